"""with living(model, identity): every forward and every `generate` inside is that identity's.

    with regard.living(model, mara):
        out = generate(model, prompt)
    with regard.living(model, [mara, None, tom]):        # one for each row of a batch; None is the model itself
        logits = model(tokens)

The model is not changed, other threads do not see it, and an identity that holds nothing leaves the model's own path: its
logits are the base model's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from torch import nn

from ..errors import ShapeError, StateError
from .body import Body, body_of
from .identity import Identity
from .read import layer_reads


@contextmanager
def living(
    model: nn.Module, identity: Identity | Sequence[Identity | None] | None, *, beta: float | None = None
) -> Generator[Body]:
    """`beta` lets a query refuse imprints that do not cohere with it; without it they stand among the context's keys."""
    body = body_of(model)
    rows = [identity] if isinstance(identity, Identity) or identity is None else list(identity)
    if not rows:
        raise ShapeError("no identities were given; None is the model by itself")
    if beta is not None and not beta > 0:
        raise StateError(f"beta={beta}: it must be above 0; imprints with cos(q, k) < 1 − 1/β are refused")
    for row in rows:
        if row is not None:
            row.base.refuse(body.base)
    with body.read(layer_reads(rows, body.scales, beta=beta, device=body.device)):
        yield body


__all__ = ["living"]
