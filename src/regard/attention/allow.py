"""Which pairs may meet; True = may attend. Rules compose with &, | and ~ and are never expanded to Q × K.

A rule answers two questions about a tile of queries: which keys can any of them meet (`span`), and exactly which pairs
(`tile`). Positions are absolute: query i of Q stands at `offset + i`, with `offset = K − Q` unless the state says other, so
that the last query meets the last key when decoding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from numbers import Integral
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..errors import ShapeError
from ..values import constant, hashable, keepable, readable, tree


@dataclass(frozen=True)
class Span:
    """Keys [lo, hi) may be met by some query of a tile; all of [sure_lo, sure_hi) by every one of them."""

    lo: int
    hi: int
    sure_lo: int = 0
    sure_hi: int = 0

    def clip(self, keys: int) -> Span:
        lo, hi = max(0, min(self.lo, keys)), max(0, min(self.hi, keys))
        sure_lo, sure_hi = max(self.sure_lo, lo), min(self.sure_hi, hi)
        if hi <= lo:
            return Span(0, 0)
        return Span(lo, hi, sure_lo, sure_hi) if sure_hi > sure_lo else Span(lo, hi, lo, lo)

    def open_parts(self) -> list[tuple[int, int]]:
        """The ranges of keys where the exact rule has to be asked."""
        if self.sure_hi <= self.sure_lo:
            return [(self.lo, self.hi)] if self.hi > self.lo else []
        return [(a, b) for a, b in ((self.lo, self.sure_lo), (self.sure_hi, self.hi)) if b > a]


@dataclass(frozen=True)
class Tile:
    """Query rows [start, stop) against keys [lo, hi), and the whole problem they belong to."""

    start: int
    stop: int
    lo: int
    hi: int
    offset: int
    device: torch.device

    def q_at(self) -> Tensor:
        return torch.arange(self.start + self.offset, self.stop + self.offset, device=self.device).unsqueeze(-1)

    def k_at(self) -> Tensor:
        return torch.arange(self.lo, self.hi, device=self.device)


@dataclass(frozen=True)
class Call:
    """The sizes that a rule has to fit, where the first query stands, and where the tensors are."""

    B: int
    H: int
    Q: int
    K: int
    offset: int
    device: torch.device


class Allow(ABC):
    """A rule. Subclasses are frozen dataclasses; tensors in them are data of the batch, not parameters."""

    @abstractmethod
    def tile(self, t: Tile) -> Bool[Tensor, "#B #H q k"]:
        """Exactly which pairs of the tile may meet."""

    def span(self, first: int, last: int, keys: int) -> Span:
        """For queries standing at first..last, both counted. The default promises nothing."""
        return Span(0, keys)

    def check(self, call: Call) -> None:
        """Refuse what does not fit the call; a rule without tensors fits all."""
        return

    def bind(self, keys: int) -> Allow:
        """The same rule where there are so many keys; itself, unless it counts them from their end."""
        return self

    @property
    def by_distance(self) -> bool:
        """True when it depends on how far apart a query and a key stand, and in which order, alone.

        Such a rule is a value: where its fields can be hashed they say all of it, and small masks are kept from call to call.
        """
        return False

    def __and__(self, other: Allow | Tensor) -> Allow:
        return Both(self, rule(other))

    def __or__(self, other: Allow | Tensor) -> Allow:
        return Either(self, rule(other))

    def __rand__(self, other: Tensor) -> Allow:
        return Both(rule(other), self)

    def __ror__(self, other: Tensor) -> Allow:
        return Either(rule(other), self)

    def __invert__(self) -> Allow:
        return Not(self)


@constant
@dataclass(frozen=True)
class All(Allow):
    """Every pair."""

    def tile(self, t: Tile) -> Tensor:
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=t.device)

    def span(self, first: int, last: int, keys: int) -> Span:
        return Span(0, keys, 0, keys)

    @property
    def by_distance(self) -> bool:
        return True


@constant
@dataclass(frozen=True)
class Causal(Allow):
    """A query meets the keys at and before its own position."""

    def tile(self, t: Tile) -> Tensor:
        return (t.k_at() <= t.q_at())[None, None]

    def span(self, first: int, last: int, keys: int) -> Span:
        return Span(0, last + 1, 0, first + 1)

    @property
    def by_distance(self) -> bool:
        return True


@constant
@dataclass(frozen=True)
class Window(Allow):
    """The `keys` nearest keys up to and *counting* the query's own position, and `ahead` keys after it."""

    keys: int
    ahead: int = 0

    def __post_init__(self) -> None:
        if not (_whole(self.keys) and _whole(self.ahead)) or self.keys < 1 or self.ahead < 0:
            raise ShapeError(f"{self}: a window counts at least the query's own position; keys >= 1 and ahead >= 0")

    def tile(self, t: Tile) -> Tensor:
        back = t.q_at() - t.k_at()
        return ((back < self.keys) & (back >= -self.ahead))[None, None]

    def span(self, first: int, last: int, keys: int) -> Span:
        lo, hi = first - self.keys + 1, last + self.ahead + 1
        return Span(lo, hi, last - self.keys + 1, first + self.ahead + 1)

    @property
    def by_distance(self) -> bool:
        return True


@constant
@dataclass(frozen=True)
class Prefix(Allow):
    """Everyone meets the first n keys: `Causal() | Prefix(n)` is a prefix language model."""

    n: int

    def __post_init__(self) -> None:
        if not _whole(self.n) or self.n < 0:
            raise ShapeError(f"{self}: a prefix counts keys, so n is a whole number of at least 0")

    def tile(self, t: Tile) -> Tensor:
        return (t.k_at() < self.n)[None, None, None]

    def span(self, first: int, last: int, keys: int) -> Span:
        return Span(0, self.n, 0, self.n)


@tree
@dataclass(frozen=True, eq=False)
class Padding(Allow):
    """Keys that are real: the first `lengths[b]` of row b, or the last ones with side="left"."""

    lengths: Int[Tensor, " B"]
    side: Literal["right", "left"] = "right"

    def tile(self, t: Tile) -> Tensor:
        raise AssertionError("Padding is bound to the number of keys by its `bind` before it is asked")

    def check(self, call: Call) -> None:
        _check_tensor(self.lengths, "Padding", "lengths", call)
        if self.lengths.ndim != 1 or self.lengths.shape[0] != call.B:
            raise ShapeError(f"Padding has lengths {tuple(self.lengths.shape)}; it needs one for each of {call.B} batch rows")
        if self.lengths.dtype == torch.bool or self.lengths.is_floating_point() or self.lengths.is_complex():
            raise ShapeError(f"Padding has lengths of {self.lengths.dtype}; they count keys, so they are whole numbers")
        if self.side not in ("right", "left"):
            raise ShapeError(f"Padding(side={self.side!r}): the side is 'right' or 'left'")
        if (
            self.lengths.numel()
            and readable(self.lengths)
            and (int(self.lengths.min()) < 0 or int(self.lengths.max()) > call.K)
        ):
            raise ShapeError(f"Padding has lengths {self.lengths.tolist()}; they lie in 0..{call.K}, the number of keys")

    def bind(self, keys: int) -> Allow:
        lengths = self.lengths
        if not lengths.numel():
            return All()
        # Read from the device once per call.
        low, high = (int(lengths.min()), int(lengths.max())) if readable(lengths) else (0, keys)
        if self.side == "right":
            return BoundPadding(torch.zeros_like(lengths), lengths, (0, high), (0, low))
        return BoundPadding(keys - lengths, torch.full_like(lengths, keys), (keys - high, keys), (keys - low, keys))


@dataclass(frozen=True, eq=False)
class BoundPadding(Allow):
    first: Int[Tensor, " B"]
    last: Int[Tensor, " B"]
    outer: tuple[int, int]
    inner: tuple[int, int]

    def tile(self, t: Tile) -> Tensor:
        at = t.k_at()
        return ((at >= self.first[:, None]) & (at < self.last[:, None]))[:, None, None]

    def span(self, first: int, last: int, keys: int) -> Span:
        return Span(*self.outer, *self.inner)


@tree
@dataclass(frozen=True, eq=False)
class Document(Allow):
    """Only tokens of one document meet: `ids` (B, K) or (K) says whose each key is.

    A query belongs to the document of the key at its own position, so every query has to stand at one of the keys.
    """

    ids: Int[Tensor, "*B K"]

    def tile(self, t: Tile) -> Tensor:
        ids = self.ids if self.ids.ndim == 2 else self.ids.unsqueeze(0)
        q, k = ids[:, t.start + t.offset : t.stop + t.offset], ids[:, t.lo : t.hi]
        return (q.unsqueeze(-1) == k.unsqueeze(-2)).unsqueeze(1)

    def check(self, call: Call) -> None:
        B, Q, K = call.B, call.Q, call.K
        _check_tensor(self.ids, "Document", "ids", call)
        if self.ids.shape not in ((K,), (B, K), (1, K)):
            raise ShapeError(f"Document has ids {tuple(self.ids.shape)}; it needs (B, K) = ({B}, {K}) or ({K},)")
        if Q > K:
            raise ShapeError(f"Document: {Q} queries are not among {K} keys; give a boolean tensor for cross-attention")
        if Q and not 0 <= call.offset <= K - Q:
            raise ShapeError(
                f"Document: queries at positions {call.offset}..{call.offset + Q - 1} are not among the {K} keys (0..{K - 1}), "
                f"so they have no document; state.offset lies in 0..{K - Q} here, or is left out"
            )


@tree
@dataclass(frozen=True, eq=False)
class Mask(Allow):
    """Any boolean tensor that broadcasts to (B, H, Q, K)."""

    allowed: Bool[Tensor, "#B #H #Q #K"]

    def tile(self, t: Tile) -> Tensor:
        m = self.allowed
        m = m if m.shape[-2] == 1 else m[..., t.start : t.stop, :]
        return m if m.shape[-1] == 1 else m[..., t.lo : t.hi]

    def check(self, call: Call) -> None:
        want = (call.B, call.H, call.Q, call.K)
        _check_tensor(self.allowed, "Mask", "allowed", call)
        if self.allowed.dtype != torch.bool:
            raise ShapeError(f"the mask is {self.allowed.dtype}; it is a boolean tensor, True = may attend")
        if self.allowed.ndim != 4 or any(a not in (1, b) for a, b in zip(self.allowed.shape, want, strict=True)):
            raise ShapeError(f"the mask is {tuple(self.allowed.shape)}; it must broadcast to (B, H, Q, K) = {want}")


@dataclass(frozen=True)
class Behind(Allow):
    """A rule for the keys after the first `lead`; those in front may be met by everyone."""

    lead: int
    a: Allow

    def tile(self, t: Tile) -> Tensor:
        cut = min(max(self.lead, t.lo), t.hi)
        inner = Tile(t.start, t.stop, cut - self.lead, t.hi - self.lead, t.offset - self.lead, t.device)
        rest = self.a.tile(inner) if t.hi > cut else torch.ones(1, 1, 1, 0, dtype=torch.bool, device=t.device)
        rest = rest.expand(*rest.shape[:2], t.stop - t.start, t.hi - cut)
        return torch.cat([rest.new_ones(*rest.shape[:3], cut - t.lo), rest], dim=-1)

    def check(self, call: Call) -> None:
        self.a.check(replace(call, K=call.K - self.lead, offset=call.offset - self.lead))

    def bind(self, keys: int) -> Allow:
        a = self.a.bind(keys - self.lead)
        return self if a is self.a else Behind(self.lead, a)


@dataclass(frozen=True)
class Alone(Allow):
    """The `first` queries right after the first `lead` keys do not meet those; as many for all rows, or a number for each."""

    lead: int
    first: int | tuple[int, ...] = 1

    def tile(self, t: Tile) -> Tensor:
        first = torch.tensor(self.first, device=t.device).view(-1, 1, 1, 1)
        return (t.q_at() >= self.lead + first) | (t.k_at() >= self.lead)


@tree
@dataclass(frozen=True)
class Both(Allow):
    a: Allow
    b: Allow

    def tile(self, t: Tile) -> Tensor:
        return self.a.tile(t) & self.b.tile(t)

    def span(self, first: int, last: int, keys: int) -> Span:
        a, b = self.a.span(first, last, keys).clip(keys), self.b.span(first, last, keys).clip(keys)
        return Span(max(a.lo, b.lo), min(a.hi, b.hi), max(a.sure_lo, b.sure_lo), min(a.sure_hi, b.sure_hi))

    def check(self, call: Call) -> None:
        self.a.check(call)
        self.b.check(call)

    def bind(self, keys: int) -> Allow:
        a, b = self.a.bind(keys), self.b.bind(keys)
        return self if a is self.a and b is self.b else Both(a, b)

    @property
    def by_distance(self) -> bool:
        return self.a.by_distance and self.b.by_distance


@tree
@dataclass(frozen=True)
class Either(Allow):
    a: Allow
    b: Allow

    def tile(self, t: Tile) -> Tensor:
        return self.a.tile(t) | self.b.tile(t)

    def span(self, first: int, last: int, keys: int) -> Span:
        a, b = self.a.span(first, last, keys).clip(keys), self.b.span(first, last, keys).clip(keys)
        spans = [s for s in (a, b) if s.hi > s.lo]
        if not spans:
            return Span(0, 0)
        # Two sure ranges need not touch, so only the longer one is promised.
        sure = max(spans, key=lambda s: s.sure_hi - s.sure_lo)
        return Span(min(s.lo for s in spans), max(s.hi for s in spans), sure.sure_lo, sure.sure_hi)

    def check(self, call: Call) -> None:
        self.a.check(call)
        self.b.check(call)

    def bind(self, keys: int) -> Allow:
        a, b = self.a.bind(keys), self.b.bind(keys)
        return self if a is self.a and b is self.b else Either(a, b)

    @property
    def by_distance(self) -> bool:
        return self.a.by_distance and self.b.by_distance


@tree
@dataclass(frozen=True)
class Not(Allow):
    a: Allow

    def tile(self, t: Tile) -> Tensor:
        return ~self.a.tile(t)

    def span(self, first: int, last: int, keys: int) -> Span:
        s = self.a.span(first, last, keys).clip(keys)
        if s.hi <= s.lo:
            return Span(0, keys, 0, keys)
        if s.sure_lo == 0 and s.sure_hi > 0:
            return Span(s.sure_hi, keys, s.hi, keys)
        if s.sure_hi == keys and s.sure_hi > s.sure_lo:
            return Span(0, s.sure_lo, 0, s.lo)
        return Span(0, keys)

    def check(self, call: Call) -> None:
        self.a.check(call)

    def bind(self, keys: int) -> Allow:
        a = self.a.bind(keys)
        return self if a is self.a else Not(a)

    @property
    def by_distance(self) -> bool:
        return self.a.by_distance


def _whole(n: object) -> bool:
    return type(n) is int or (isinstance(n, _WHOLE) and not isinstance(n, bool))


def _check_tensor(x: object, rule: str, field: str, call: Call) -> None:
    if not isinstance(x, Tensor):
        raise ShapeError(f"{rule} has {field} {x!r}, a {type(x).__name__}; pass a tensor, as in {rule}(torch.tensor(...))")
    if x.device != call.device:
        raise ShapeError(f"{rule} has {field} on {x.device}, and q is on {call.device}; put them on one device")


_WHOLE = (Integral, torch.SymInt)
SMALL = 1 << 16
"""Pairs up to which a mask is kept for the next call: small problems are mostly made of what they have in common."""


def allowed_in(a: Allow, t: Tile) -> Bool[Tensor, "#B #H q k"]:
    """`a.tile(t)`, not to be written to: the same tensor again for small tiles of a rule that is made of numbers alone."""
    if not a.by_distance or (t.stop - t.start) * (t.hi - t.lo) > SMALL or not (keepable() and hashable(a)):
        return a.tile(t)
    return _kept_tile(a, t)


@lru_cache(maxsize=64)
def _kept_tile(a: Allow, t: Tile) -> Tensor:
    # It outlives the call: made under inference mode it could never be trained with.
    with torch.inference_mode(False):
        return a.tile(t)


def rule(x: Allow | Tensor | None) -> Allow:
    """An Allow, from what a user may pass: a rule, a boolean tensor (Q, K) to (B, H, Q, K), or nothing."""
    if x is None:
        return All()
    if isinstance(x, Allow):
        return x
    if not isinstance(x, Tensor) or x.dtype != torch.bool:
        what = f"a {x.dtype} tensor" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ShapeError(f"allow is {what}; it must be a rule such as Causal() or a boolean tensor, True = may attend")
    if not 2 <= x.ndim <= 4:
        raise ShapeError(f"the mask is {tuple(x.shape)}; it must have 2 to 4 dimensions and broadcast to (B, H, Q, K)")
    return Mask(x[(None,) * (4 - x.ndim)])


def same_for_all(a: Allow) -> bool:
    """True where a key is open to every query or to none, whatever the queries are."""
    match a:
        case Mask(allowed):
            return allowed.shape[-2] == 1
        case Both(x, y) | Either(x, y):
            return same_for_all(x) and same_for_all(y)
        case Not(x):
            return same_for_all(x)
        case _:
            return isinstance(a, (All, Prefix, BoundPadding))
