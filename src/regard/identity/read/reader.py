"""How what came to mind is read: keys and values of the words around it, moved once so that a small model answers from it.

    "Read the text and answer the question. Text: …  Question: …"        slots of the words around get  k + sure · δk,  v + sure · δv

A model of 135 million parameters that has the answer before its eyes tells of the text ("The text suggests …"), or says it over again. That it is to
answer is a matter of a few slots: δ is learned by gradient, with the model frozen, on what people who were written by hand told and were asked
(`regard.study.people.reading`), and knows nobody: it stands at the words around what came, never at what was told. `reader.safetensors` has it, for
one base; on another the words around stand as they are read. Where it is less sure that it was asked, δ counts less.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import CheckpointError
from ...files import read_plain, reading
from ..packed import Packed
from .body import Body, OwnBody

FILE = Path(__file__).with_name("reader.safetensors")
LARGEST = 1 << 22


@dataclass(frozen=True, eq=False)
class Reader:
    """What is added at the words before what came to mind, and at those behind it."""

    before: tuple[Float[Tensor, "L G b D"], Float[Tensor, "L G b D"]]
    """To keys and to values."""
    after: tuple[Float[Tensor, "L G a D"], Float[Tensor, "L G a D"]]
    fingerprint: str

    def moved(self, k: Packed, v: Packed, sure: float) -> tuple[Packed, Packed]:
        """Slots (L, G, n, D) whose first and last are the words around."""
        b, a = self.before[0].shape[2], self.after[0].shape[2]
        out: list[Packed] = []
        for x, before, after in zip((k, v), self.before, self.after, strict=True):
            dense = x.dense()
            dense[:, :, :b] += sure * before
            dense[:, :, dense.shape[2] - a :] += sure * after
            out.append(Packed.of(dense))
        return out[0], out[1]


@lru_cache(maxsize=1)
def shipped() -> Reader:
    """The one that came with the package."""
    from safetensors.torch import load

    with reading(FILE):
        data = read_plain(FILE, LARGEST, follow=True)
        numbers = {name: x.float() for name, x in load(data).items()}
        about = json.loads(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["about"])
        b, a = (tuple(numbers[f"{side}.{x}"] for x in "kv") for side in ("before", "after"))
        for pair in (b, a):
            if len({x.shape for x in pair}) > 1 or pair[0].ndim != 4 or not all(bool(torch.isfinite(x).all()) for x in pair):
                raise CheckpointError(
                    f"{FILE.name}: keys and values are finite, of one shape (L, G, n, D): {[tuple(x.shape) for x in pair]}"
                )
        return Reader((b[0], b[1]), (a[0], a[1]), str(about["fingerprint"]))


def reader_for(body: Body, before: int, after: int) -> Reader | None:
    """The same, if it was learned on this base and between so many words; None if not."""
    if not isinstance(body, OwnBody) or shipped().fingerprint != body.base.fingerprint:
        return None
    mine = shipped()
    return mine if (mine.before[0].shape[2], mine.after[0].shape[2]) == (before, after) else None


__all__ = ["FILE", "Reader", "reader_for", "shipped"]
