"""The fast write's learned numbers: what an untrained rule cannot know, learned once on generated people, and shipped.

    slots    to which queries each head opens: a shift of all their keys
    trace    a signed gain per layer and key head on the centred write, and the base's mean queries and keys
    self     a gain per layer and key head on what was pooled, for each form

They belong to the layers of one base, and on another none of them is used. How they are learned is in `regard.study.people.fast_write`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import CheckpointError
from ...files import read_plain, reading
from ..state import Base, Form

FILE = Path(__file__).with_name("fast_write.safetensors")
LARGEST = 1 << 28
"""Bytes of such a file; that of a base of 100 layers of 128 key heads has a hundredth of it."""


@dataclass(frozen=True, eq=False)
class FastWrite:
    """The learned numbers, by name."""

    numbers: dict[str, Tensor]
    fingerprint: str = ""

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """q̄ and k̄ of the base on ordinary text, (L, G, D)."""
        return self.numbers["mean.q"], self.numbers["mean.k"]

    def opened(self, k: Float[Tensor, "L G m D"]) -> Float[Tensor, "L G m D"]:
        """Keys as those of slots: prose passes them by, and questions about a life do not."""
        return k + self.numbers["slots.shift"].to(k.device)[:, :, None]

    def closed(self, k: Float[Tensor, "L G m D"]) -> Float[Tensor, "L G m D"]:
        """The keys of slots as they were met."""
        return k - self.numbers["slots.shift"].to(k.device)[:, :, None]

    @property
    def trace_gain(self) -> Float[Tensor, "L G"]:
        return self.numbers["trace.gain"]

    def self_gain(self, form: Form) -> Float[Tensor, "L S"]:
        """What z is multiplied by before the self takes it in."""
        L, G, D = self.numbers["mean.k"].shape
        if form == "key_bias":
            return self.numbers["self.bias"][..., None].expand(L, G, D).flatten(1)
        both = torch.stack([self.numbers["self.key"], self.numbers["self.value"]], 1)
        return both[..., None].expand(L, 2, G, D).flatten(1)

    @cached_property
    def count(self) -> int:
        return sum(t.numel() for t in self.numbers.values())


def shapes_of(L: int, G: int, D: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """What each part learns, for L layers of G key heads of width D."""
    return {
        "imprints": {"slots.shift": (L, G, D)},
        "token": {"self.key": (L, G), "self.value": (L, G)},
        "bias": {"self.bias": (L, G)},
        "trace": {"trace.gain": (L, G)},
    }  # fmt: skip


def read_file(path: Path) -> FastWrite:
    """The numbers in a file, when they are all there, of the shapes they should have, and finite."""
    from safetensors.torch import load

    with reading(path):
        data = read_plain(path, LARGEST, follow=True)
        numbers = load(data)
        size = int.from_bytes(data[:8], "little")
        about = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["about"])
        if not isinstance(about, dict) or not isinstance(about.get("fingerprint"), str):
            raise CheckpointError(f"{path} does not say which base it was learned on")
        mean = numbers.get("mean.k", torch.empty(0))
        if mean.ndim != 3 or not mean.numel():
            raise CheckpointError(f"{path}: mean.k is {tuple(mean.shape)}; it should be (layers, key heads, head width)")
        L, G, D = mean.shape
        wanted = {"mean.q": (L, G, D), "mean.k": (L, G, D)}
        for part in shapes_of(L, G, D).values():
            wanted |= part
        if numbers.keys() != wanted.keys():
            raise CheckpointError(f"{path} lacks or adds {min(numbers.keys() ^ wanted.keys())}: no fast write of this version")
        for name, x in numbers.items():
            if tuple(x.shape) != wanted[name] or x.dtype != torch.float32 or not bool(torch.isfinite(x).all()):
                raise CheckpointError(
                    f"{path}: {name} is {tuple(x.shape)} of {x.dtype}; it should be {wanted[name]}, float32 and finite"
                )
        if "digest" in about and about["digest"] != digest(numbers):
            raise CheckpointError(f"{path} is damaged: its numbers do not match their digest")
        return FastWrite(numbers, about["fingerprint"])


def digest(numbers: dict[str, Tensor]) -> str:
    h = hashlib.sha256()
    for name in sorted(numbers):
        h.update(name.encode() + numbers[name].contiguous().numpy().tobytes())
    return h.hexdigest()


@lru_cache(maxsize=1)
def _read() -> FastWrite:
    if not FILE.exists():
        raise CheckpointError(f"{FILE.name} is not beside the code; train it with: python -m regard.study.people.fast_write")
    return read_file(FILE)


def shipped() -> FastWrite:
    """What came with the package."""
    return _read()


def shipped_for(base: Base) -> FastWrite | None:
    """The same, if its gains were learned on this base; None if they were not."""
    return _read() if FILE.exists() and _read().fingerprint == base.fingerprint else None


def forget_shipped() -> None:
    """Read the file again at the next question: it has been written anew."""
    _read.cache_clear()


__all__ = [
    "FILE",
    "FastWrite",
    "digest",
    "forget_shipped",
    "read_file",
    "shapes_of",
    "shipped",
    "shipped_for",
]
