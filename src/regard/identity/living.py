"""with living(model, identity): every forward and every `generate` inside is that identity's.

    with regard.living(model, mara):
        out = generate(model, prompt)
    with regard.living(model, [mara, None, tom]):        # one for each row of a batch; None is the model itself
        logits = model(tokens)
    out = generate(model, prompt, identity=mara)         # bound to the call: nothing to enter, nothing to leave

The model is not changed, and an identity that holds nothing leaves the model's own path: its logits are the base model's, bit
for bit. Inside means the code of the block, and tasks, threads and copied contexts that were started in it with their context
(`scope.py`); a thread that starts without one, as `threading.Thread` and an executor's do, finds the model by itself. A block
in a generator holds while that generator runs, and not for whoever calls it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import cast

from torch import nn

from ..errors import ShapeError, StateError
from .body import Body, body_of
from .read.layer import LayerRead, layer_reads
from .state import Identity

Who = Identity | Sequence[Identity | None] | None
"""One identity for all rows, or one for each; None is the model itself."""


@contextmanager
def living(model: nn.Module, identity: Who, *, beta: float | None = None) -> Generator[Body]:
    """`beta` lets a query refuse imprints that do not cohere with it; without it they stand among the context's keys."""
    body, reads = read_by(model, identity, beta)
    with body.read(reads):
        yield body


def read_by(model: nn.Module, identity: Who, beta: float | None = None) -> tuple[Body, list[LayerRead | None]]:
    """What the layers of a model read while somebody lives in it; whoever cannot is refused."""
    rows = identities(identity)
    body = body_of(model)
    if beta is not None and not beta > 0:
        raise StateError(f"beta={beta}: it must be above 0; imprints with cos(q, k) < 1 − 1/β are refused")
    for row in rows:
        if row is not None:
            row.base.refuse(body.base)
    return body, layer_reads(rows, body.scales, beta=beta, device=body.device)


def identities(given: object) -> list[Identity | None]:
    """One entry per row, or one for all of them."""
    if isinstance(given, Identity) or given is None:
        return [given]
    if isinstance(given, nn.Module):
        raise StateError(f"a {type(given).__name__} is no identity; the model comes first: living(model, identity)")
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise StateError(
            f"{given!r:.60} is no identity: give an Identity, a list with one for each row, or None for the model itself; "
            "by its name it is in a store, IdentityStore().load(name), or in a folder, Identity.load(folder)"
        )
    found = list(cast(Sequence[object], given))
    if not found:
        raise ShapeError("no identities were given; None is the model by itself")
    for i, row in enumerate(found):
        if row is not None and not isinstance(row, Identity):
            raise StateError(f"row {i} is {row!r:.60}, which is no identity: give an Identity, or None for the model itself")
    return cast(list[Identity | None], found)


__all__ = ["Who", "living", "read_by"]
