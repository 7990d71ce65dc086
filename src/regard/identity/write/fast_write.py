"""The fast write's learned numbers: what an untrained rule cannot know, learned once on generated people, and shipped.

    scorer   features of a token → how telling it is, which weighs its distance from what is kept already (`keepers.covering`)
    slots    how widely each head opens to them, to which queries (a shift of all their keys), and how loudly they answer
    trace    a signed gain per layer and key head on the centred write, and the base's mean queries and keys
    self     a gain per layer and key head on what was pooled, for each form

On another base only the scorer is used: its features are relative to the text, the gains belong to layers. How they are learned is
in `regard.study.people.fast_write`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ...errors import CheckpointError
from ...files import read_plain, reading
from ..experience import Experience
from ..state import Base, Form
from .keepers import covering, later_attention, snapkv, value_norm

FILE = Path(__file__).with_name("fast_write.safetensors")
LARGEST = 1 << 28
"""Bytes of such a file; that of a base of 100 layers of 128 key heads has a hundredth of it."""
FEATURES = ("shock", "shock_before", "shock_after", "shock_after_two", "attention", "last_attention", "value_norm", "recency")
HIDDEN = 16


def features(e: Experience) -> Float[Tensor, "N F"]:
    """What is known of each token, in spreads from the mean of what was said."""
    shock = e.shock.cpu()
    rows = [
        shock,
        F.pad(shock[:-1], (1, 0)),
        F.pad(shock[1:], (0, 1)),
        F.pad(shock[2:], (0, 2)),
        later_attention(e).cpu().clamp_min(1e-6).log(),
        snapkv(e).cpu().clamp_min(1e-6).log(),
        value_norm(e).cpu(),
        torch.arange(len(e), dtype=torch.float32),
    ]
    x = torch.stack(rows, -1).float()
    said = x[e.content.cpu()]
    if len(said) < 2:
        # One token alone is as usual as can be: it has no spread to be measured in.
        return torch.zeros_like(x)
    return (x - said.mean(0)) / said.std(0).clamp_min(1e-6)


@dataclass(frozen=True, eq=False)
class FastWrite:
    """The learned numbers, by name."""

    numbers: dict[str, Tensor]
    fingerprint: str = ""

    def worth(self, e: Experience) -> Float[Tensor, " N"]:
        """How telling each token is, and how little is like it among what is worth more."""
        return covering(e, self.telling(e))

    def telling(self, e: Experience) -> Float[Tensor, " N"]:
        n = self.numbers
        x = features(e)
        return x @ n["scorer.direct"] + torch.tanh(x @ n["scorer.into"] + n["scorer.bias"]) @ n["scorer.out"]

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """q̄ and k̄ of the base on ordinary text, (L, G, D)."""
        return self.numbers["mean.q"], self.numbers["mean.k"]

    def opened(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Float[Tensor, "L G 1"]]:
        """Keys and values (L, G, m, D) as slots, and how widely each head opens to them."""
        n = self.numbers
        shift, value = n["slots.shift"].to(k.device), n["slots.value"].to(v.device)
        return k + shift[:, :, None], v * value[..., None, None], n["slots.gate"][..., None]

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
        "imprints": {"scorer.direct": (len(FEATURES),), "scorer.into": (len(FEATURES), HIDDEN), "scorer.bias": (HIDDEN,),
                     "scorer.out": (HIDDEN,), "slots.gate": (L, G), "slots.shift": (L, G, D), "slots.value": (L, G)},
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
    "FEATURES",
    "FILE",
    "HIDDEN",
    "FastWrite",
    "digest",
    "features",
    "forget_shipped",
    "read_file",
    "shapes_of",
    "shipped",
    "shipped_for",
]
