"""Who speaks: `living`, a block in which every forward is an identity's, and `generate` and `stream`, which are told.

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

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, cast

from torch import nn

from ..errors import ShapeError, StateError
from ..models.base import Model, States
from ..models.decode import generate as decoding
from ..models.decode.generate import PREFILL, Generated, Overrides, Prompt, expect_decoder
from ..models.decode.prepare import Weights
from ..models.decode.sampling import Sampling
from ..models.decode.stream import Speaks, Token
from .body import Body, body_of
from .read.body import OwnBody
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
    if beta is not None and not (isinstance(beta, int | float) and beta > 0):
        raise StateError(f"beta={beta!r:.60}: it must be above 0; imprints with cos(q, k) < 1 − 1/β are refused")
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
    rows = list(cast(Sequence[object], given))
    if not rows:
        raise ShapeError("no identities were given; None is the model by itself")
    for i, row in enumerate(rows):
        if row is not None and not isinstance(row, Identity):
            raise StateError(f"row {i} is {row!r:.60}, which is no identity: give an Identity, or None for the model itself")
    return cast(list[Identity | None], rows)


Speaker = Who | Literal["here"]
"""One identity for all rows, a list with one for each, None for the model itself; "here" for whoever lives in the model."""


def generate(
    model: Model,
    prompt: Prompt,
    sampling: Sampling | None = None,
    *,
    identity: Speaker = "here",
    tokenizer: Speaks | None = None,
    on_token: Callable[[Token], object] | None = None,
    weights: Weights = "float32",
    states: States = None,
    prefill: int = PREFILL,
) -> Generated:
    """Continue one prompt or several, as `identity`: token ids, or texts where a tokenizer is given.

    `on_token` sees every token as it falls. A batch is one call: rows that end early wait for the others.
    """
    overrides = _overrides(model, identity)
    return decoding.generate(
        model, prompt, sampling, overrides=overrides, tokenizer=tokenizer, on_token=on_token, weights=weights, states=states,
        prefill=prefill,
    )  # fmt: skip


def stream(
    model: Model,
    prompt: Prompt,
    sampling: Sampling | None = None,
    *,
    identity: Speaker = "here",
    tokenizer: Speaks | None = None,
    weights: Weights = "float32",
    states: States = None,
    prefill: int = PREFILL,
) -> Iterator[Token]:
    """`generate` as an iterator over its tokens, row by row as they fall.

    Everything is checked, and settled who speaks, before this returns: the tokens may then be taken inside any block, by any
    thread or task, one at a time, between those of other streams.
    """
    overrides = _overrides(model, identity)
    return decoding.stream(
        model, prompt, sampling, overrides=overrides, tokenizer=tokenizer, weights=weights, states=states, prefill=prefill
    )


def _overrides(model: Model, identity: Speaker) -> Overrides | None:
    if isinstance(identity, str) and identity == "here":
        return None
    expect_decoder(model)
    body, reads = read_by(model, identity)
    assert isinstance(body, OwnBody)
    return {layer: read for layer, read in zip(body.layers, reads, strict=True) if read is not None}


__all__ = ["Speaker", "Who", "generate", "living", "read_by", "stream"]
