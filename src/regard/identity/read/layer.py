"""Reading an identity at one layer: the founding observation once more, everything is a dot product in disguise.

    score_ij = q_i·k_j/√D  +  γ-free trace term 2 q̂ᵀS k̂ − k̂ᵀS k̂  +  k_j·s  +  log weight_j,     S = L diag(signs) Lᵀ

q̂, k̂ are unit vectors *before* RoPE, so that what was written does not depend on where it was written. A few more columns on
q and k carry all of it, q' = [R q, 2·signs·(L q̂)·√D, √D] and k' = [R k, L k̂, k·s − k̂ᵀS k̂ + log weight], and what is remembered
stands as slots in front of the first token. What is left is the model's own attention over wider heads, cache and all.

The first token meets no slot. A model's first token is its sink: it must see nothing but itself to become one, and without a
sink slots do harm (SmolLM2, a quarter of the history: answers 5.3 nats, against 4.3 without any slots and 3.9 with the sink kept).

A turn that comes to mind stands where it would stand in the text: behind the `head` of the prompt (its sink and system message), which
neither meets it nor comes nearer for it, and before the rest. Then reading it as slots *is* reading it as text. Of 30 gold answers
(nats): nothing 5.03, the turn as text 2.71, as slots 2.71; without its markup 2.88; over the head's own places 3.16; before it 3.75.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ...attention.allow import Allow, Alone, Behind, Causal, rule
from ...attention.fused import one_row
from ...attention.inspect import Attended, inspect
from ...attention.operator import attend
from ...attention.spec import Spec
from ...errors import CombinationError, ShapeError
from ...geometry import Dot
from ...nn import Attention, Cache, Owner, RowRead
from ...position import NoPosition, Rope
from ...selection import Softmax
from ...state import State
from ..state import Identity, Recollection


class Place(NamedTuple):
    """Where the slots of a row stand."""

    head: int = 1
    """So many tokens of a text meet no slot; the first stays the sink that it is to the model by itself."""
    slots: int = 0
    """That the row has, others are filled up; a head of more than one token stands so much further off."""

    @property
    def behind(self) -> int:
        """The place after the last slot; a sink alone stays where it is, and slots stand before it."""
        return self.head if self.head > 1 else 0


ABSENT = -1e4
"""The log weight of a slot that a row of the batch does not have: exp of it is 0 in every dtype."""


@dataclass(frozen=True, eq=False)
class LayerRead:
    """What one layer reads; the first dimension is the batch, or 1 for all rows."""

    scale: float
    """Of the model's own scores."""
    k: Float[Tensor, "B G m D"] | None = None
    v: Float[Tensor, "B G m D"] | None = None
    weight: Float[Tensor, "B G m"] | None = None
    left: Float[Tensor, "B G R D"] | None = None
    signs: Float[Tensor, "B R"] | Float[Tensor, "B G R"] | None = None
    """+1 and −1; any number is a gain on its column, for each key head where they differ."""
    bias: Float[Tensor, "B G D"] | None = None
    places: tuple[Place, ...] | None = None
    """Where the slots of each row stand, or those of all rows; None is right after the first token."""
    beta: float | None = None
    """With a number, a query refuses the slots that do not cohere with it: cos(q, k) < 1 − 1/β, on unit vectors
    (docs/maths.md, “GD: one valley or two”)."""
    contrast: tuple[float, ...] | None = None
    """How far each row's words lean away from what is `beside` them, or those of all rows; None where nobody's do."""
    beside: LayerRead | None = None
    """What this layer reads in the row that words lean away from; None for nothing."""
    _kept: dict[str, Tensor] = field(default_factory=lambda: dict[str, Tensor](), init=False, repr=False)
    _owners: dict[str, Owner] = field(default_factory=lambda: dict[str, Owner](), init=False, repr=False)
    _reads: dict[str, RowRead] = field(default_factory=lambda: dict[str, RowRead](), init=False, repr=False)
    _picked: tuple[str, tuple[int, ...]] | None = field(default=None, init=False, repr=False)
    """Where this is some rows of another: the other's digest, and which rows."""

    @property
    def slots(self) -> int:
        return 0 if self.k is None else self.k.shape[2]

    @property
    def padless(self) -> bool:
        return self.slots > 0

    @property
    def alone(self) -> bool:
        return self.beta is not None

    def leans(self, row: int) -> float:
        return 0.0 if self.contrast is None else self.contrast[row if len(self.contrast) > 1 else 0]

    @property
    def batch(self) -> int:
        return max((x.shape[0] for x in (self.k, self.left, self.bias) if x is not None), default=1)

    @property
    def wide(self) -> bool:
        return self.left is not None or self.bias is not None or self.weight is not None

    def rows(self, index: Tensor) -> LayerRead:
        """The reads of some rows of the batch, in this order."""
        if self.batch == 1:
            return self

        def pick(x: Tensor | None) -> Tensor | None:
            return x if x is None or x.shape[0] == 1 else x.index_select(0, index.to(x.device))

        parts = (pick(x) for x in (self.k, self.v, self.weight, self.left, self.signs, self.bias))
        places = self.places and tuple(self.places[i] for i in index.tolist())
        contrast = self.contrast and tuple(self.contrast[i] for i in index.tolist())
        beside = self.beside and self.beside.rows(index)
        picked = LayerRead(self.scale, *parts, places=places, beta=self.beta, contrast=contrast, beside=beside)
        rows = self.arranged or ()
        object.__setattr__(picked, "_picked", (self.digest, tuple(rows[i] for i in index.tolist())))
        return picked

    @cached_property
    def digest(self) -> str:
        """A name by content, made once: a conversation may go on in another block of the same identity, and in no other's."""
        if self._picked is not None:
            return self._picked[0]
        h = hashlib.blake2b(digest_size=16)
        for f in fields(self):
            x = getattr(self, f.name)
            if isinstance(x, Tensor):
                h.update(f"{f.name} {tuple(x.shape)} {x.dtype} ".encode())
                h.update(x.detach().float().cpu().contiguous().numpy().tobytes())
            elif isinstance(x, LayerRead):
                h.update(f"{f.name} {x.digest} ".encode())
            elif not f.name.startswith("_"):
                h.update(f"{f.name}={x} ".encode())
        return h.hexdigest()

    @property
    def arranged(self) -> tuple[int, ...] | None:
        """Which of several identities each row is; None where one is for all rows."""
        if self._picked is not None:
            return self._picked[1]
        return None if self.batch == 1 else tuple(range(self.batch))

    def owner(self, attention: Attention) -> Owner:
        """This identity in this layer, as the caches that it fills name it."""
        owner = self._owners.get(attention.name)
        if owner is None or owner.spec != attention.owner.spec:
            owner = attention.owner._replace(who=self.digest, rows=self.arranged)
            self._owners[attention.name] = owner
        return owner

    def columns(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """What q (B,H,Q,D) and k (B,G,K,D), not turned, have to say beside themselves: (B,H,Q,C) and (B,G,K,C)."""
        B, H, Q, D = q.shape
        G = k.shape[1]
        ones = q.new_full((1, 1, 1, 1), 1 / self.scale).expand(B, H, Q, 1)
        bias = k.new_zeros(B, G, k.shape[2], 1) if self.bias is None else k @ self.bias.to(k.dtype).unsqueeze(-1)
        if self.left is None or self.signs is None:
            # A multiple of eight keeps the fused kernels; one column is the sum of what is known of a key.
            return F.pad(ones, (0, 7)), F.pad(bias, (0, 7))
        left, signs = self.left.to(q.dtype), self.signs.to(q.dtype)
        signs = signs[:, None, None] if signs.ndim == 2 else signs[:, :, None]
        near = F.normalize(k, dim=-1) @ left.mT
        asks = (F.normalize(q, dim=-1).reshape(B, G, -1, D) @ left.mT) * (signs * (2 / self.scale))
        pad = -(left.shape[2] + 1) % 8
        own = bias - (near.square() * signs).sum(-1, keepdim=True)
        return F.pad(torch.cat([asks.view(B, H, Q, -1), ones], -1), (0, pad)), F.pad(torch.cat([near, own], -1), (0, pad))

    def slot_heads(self, turned: Tensor) -> tuple[Tensor, Tensor]:
        """The slots as wide keys and values, where `turned` are their keys after RoPE."""
        assert self.k is not None
        assert self.v is not None
        if not self.wide:
            return turned, self.v
        empty = self.k.new_zeros(self.k.shape[0], self.k.shape[1], 1, self.k.shape[3])
        _, extra = self.columns(
            empty.expand(max(self.k.shape[0], self.batch), -1, -1, -1), self.k.expand(self.batch, -1, -1, -1)
        )
        if self.weight is not None:
            at = 0 if self.left is None else self.left.shape[2]
            extra = extra + F.pad(self.weight[..., None], (at, extra.shape[-1] - at - 1))
        return torch.cat([turned.expand(self.batch, -1, -1, -1), extra], -1), self.v.expand(self.batch, -1, -1, -1)

    def refused(self, q: Tensor) -> Tensor | None:
        """True where a query (not turned) refuses a slot, (B, H, Q, m); None where nothing is ever refused."""
        if self.beta is None or self.k is None:
            return None
        B, H, Q, D = q.shape
        G = self.k.shape[1]
        cos = F.normalize(q, dim=-1).reshape(B, G, -1, D) @ F.normalize(self.k, dim=-1).to(q.dtype).mT
        return cos.view(B, H, Q, -1) < 1 - 1 / self.beta

    def meet(
        self, attention: Attention, q: Tensor, k: Tensor, v: Tensor, cache: Cache | None, allow: Allow | Tensor | None
    ) -> tuple[Tensor, Cache]:
        """`nn.Attention.meet` under this read: q and k come unturned, and the cache keeps wide keys."""
        E = v.shape[-1]
        q, cache, ruled = self._posed(attention, q, k, v, cache, allow)
        keys, values = cache.keys(), cache.values()
        if ruled is None:
            return one_row(q, keys, values, self.scale)[..., :E], cache
        return attend(q, keys, values, self._met(attention), allow=ruled)[..., :E], cache

    def inspect(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor, allow: Allow | Tensor | None) -> Attended:
        """`meet` of a whole text, to be looked at: its first keys are the slots."""
        E = v.shape[-1]
        q, cache, ruled = self._posed(attention, q, k, v, None, allow)
        return inspect(
            q, cache.keys(), cache.values()[..., :E], self._met(attention), allow=Causal() if ruled is None else ruled
        )

    def _met(self, attention: Attention) -> Spec:
        """What is left to do for heads that are turned and wide."""
        return Spec(Dot(scale=self.scale), attention.spec.selection, NoPosition())

    def _posed(
        self, attention: Attention, q: Tensor, k: Tensor, v: Tensor, cache: Cache | None, allow: Allow | Tensor | None
    ) -> tuple[Tensor, Cache, Allow | None]:
        """Queries turned and wide, the keys and values that they meet, and under which rule; None: one row that may meet all of them."""
        B, _, Q, _ = q.shape
        if self.batch not in (1, B):
            raise ShapeError(f"{self.batch} identities live here, one for each row, and the batch has {B} rows")
        turns = _turns(attention)
        cache = Cache() if cache is None else cache.of(self.owner(attention), B)
        if self.slots and not len(cache) and not cache.lead:
            cache = cache.led(*(x.to(q.dtype).expand(B, -1, -1, -1) for x in self._slots(turns)))
        at = len(cache)
        refused = self.refused(q)
        if self.wide:
            asks, tells = self.columns(q, k)
        if turns is not None:
            q, k = (self._turned(turns, x, at) for x in (q, k))
        if self.wide:
            q, k = torch.cat([q, asks], -1), torch.cat([k, tells], -1)  # pyright: ignore
            # The fused kernels want values as wide as keys.
            v = F.pad(v, (0, k.shape[-1] - v.shape[-1]))
        cache = cache.grown(k, v)
        plain = attention.spec.selection == Softmax()
        ruled = rule(allow)
        heads = [p.head for p in self.places or (Place(),)]
        first = cache.lead and at < max(heads)
        if plain and Q == 1 and refused is None and isinstance(ruled, Causal) and not first:
            return q, cache, None
        if not isinstance(ruled, Causal) and cache.lead:
            ruled = Behind(cache.lead, ruled)
        if first:
            ruled = ruled & Alone(cache.lead, tuple(heads))
        if refused is not None:
            open_ = refused.new_ones(*refused.shape[:3], cache.keys().shape[2] - refused.shape[3])
            ruled = ruled & torch.cat([~refused, open_], -1)
        return q, cache, ruled

    def row_read(self, attention: Attention) -> RowRead | None:
        """What C reads of this; None where it is for several rows, refuses slots, or chooses otherwise than by softmax."""
        name, mine = attention.name, attention.owner
        known = self._reads.get(name)
        # Every layer of every token comes by: what was settled for this layer is not settled again.
        if known is not None and known.owner is self._owners.get(name) and known.owner.spec == mine.spec:
            return known if attention.bare == self.scale else None
        turns = _turns(attention)
        signed = self.signs is None or self.signs.ndim == 2
        half = turns is None or turns.layout == "half"
        same = attention.spec.selection == Softmax() and attention.bare == self.scale
        if self.batch != 1 or self.beta is not None or not signed or not half or not same:
            return None
        owner = self.owner(attention)
        slots = tuple(x.float().contiguous() for x in self._slots(turns)) if self.slots else None
        D = attention.head_width
        rank = 0 if self.left is None else self.left.shape[2]
        columns = 0 if not self.wide else 8 if self.left is None else rank + 1 + -(rank + 1) % 8
        left, signs, bias = (None if x is None else x[0].float().contiguous() for x in (self.left, self.signs, self.bias))
        place = (self.places or (Place(),))[0]
        behind = place.behind if self.places is not None and self.slots else 0
        read = RowRead(owner, D + columns, slots, left, signs, bias, place.head, behind, place.slots if behind else 0)  # pyright: ignore
        self._reads[name] = read
        return read

    def _turned(self, turns: Rope, x: Tensor, at: int) -> Tensor:
        """Queries or keys at their places: those of the head stand before the slots, and as far off as these are many."""
        if self.places is None or not self.slots or at >= max(p.head for p in self.places):
            return turns.apply(x, at, _NOTHING)
        rows = x.split(1) if len(self.places) > 1 else [x]
        return torch.cat([_around(turns, row, at, p) for row, p in zip(rows, self.places, strict=True)])

    def _slots(self, turns: Rope | None) -> tuple[Tensor, Tensor]:
        assert self.k is not None
        learns = any(x is not None and x.requires_grad for x in (self.k, self.v, self.left, self.bias, self.weight))
        if "k" in self._kept and not learns:
            return self._kept["k"], self._kept["v"]
        k, v = self.slot_heads(self.k if turns is None else self._turned_slots(turns, self.k))
        v = F.pad(v, (0, k.shape[-1] - v.shape[-1]))
        if not learns:
            self._kept.update(k=k, v=v)
        return k, v

    def _turned_slots(self, turns: Rope, k: Tensor) -> Tensor:
        starts = [p.behind - self.slots for p in self.places or (Place(),)]
        if len(set(starts)) == 1:
            return turns.apply(k, starts[0], _NOTHING)
        return torch.cat([turns.apply(row, at, _NOTHING) for row, at in zip(k.split(1), starts, strict=True)])


def _around(turns: Rope, x: Tensor, at: int, place: Place) -> Tensor:
    """Tokens from `at` on, turned: a head of more than the sink stands as far before the rest as the slots take."""
    ahead = min(place.behind - at, x.shape[2])
    if ahead < 1:
        return turns.apply(x, at, _NOTHING)
    first, rest = turns.apply(x[:, :, :ahead], at - place.slots, _NOTHING), x[:, :, ahead:]
    return torch.cat([first, turns.apply(rest, at + ahead, _NOTHING)], 2) if rest.shape[2] else first


_NOTHING = State()


def _turns(attention: Attention) -> Rope | None:
    spec = attention.spec
    if not isinstance(spec.geometry, Dot):
        raise CombinationError(f"an identity overrides scaled dot products, and this layer is {spec}")
    if isinstance(spec.position, NoPosition):
        return None
    if not isinstance(spec.position, Rope) or not spec.position.early:
        raise CombinationError(f"an identity reads where positions turn keys once and for all (RoPE); this layer is {spec}")
    return spec.position


def layer_reads(
    identities: Sequence[Identity | None],
    scales: Sequence[float],
    *,
    beta: float | None = None,
    device: torch.device | None = None,
) -> list[LayerRead | None]:
    """One read per layer of a batch whose rows are these identities; None for a layer that reads nothing.

    Rows without an identity, or with fewer slots or columns than others, are filled up with what does nothing.
    """
    living = [i for i in identities if i is not None and not i.silent]
    if not living:
        return [None] * len(scales)
    base = living[0].base
    L, G, D = base.depth, base.key_heads, base.head_width
    m = max(len(i.imprints) + _is_token(i) for i in living)
    R = max((i.trace.rank for i in living if i.trace is not None), default=0)
    B = len(identities)
    k, v = (torch.zeros(B, L, G, m, D) for _ in range(2))
    weight = torch.full((B, L, G, m), ABSENT)
    left, signs, bias = torch.zeros(B, L, G, R, D), torch.zeros(B, R), torch.zeros(B, L, G, D)
    for b, identity in enumerate(identities):
        if identity is None or identity.silent:
            continue
        imprints, me = identity.imprints, identity.self
        n = len(imprints)
        if n:
            k[b, :, :, m - n :], v[b, :, :, m - n :], weight[b, :, :, m - n :] = (
                imprints.k.dense(),
                imprints.v.dense(),
                imprints.weight,
            )
        if me is not None and me.form == "key_bias":
            bias[b] = me.s.view(L, G, D)
        elif me is not None and _is_token(identity):
            k[b, :, :, m - n - 1], v[b, :, :, m - n - 1] = me.s.view(L, 2, G, D).unbind(1)
            weight[b, token_layers(me.s), :, m - n - 1] = 0
        if identity.trace is not None:
            r = identity.trace.rank
            left[b, :, :, :r], signs[b, :r] = identity.trace.left.dense(), identity.trace.signs.float()
    k, v, weight, left, signs, bias = (x.to(device) for x in (k, v, weight, left, signs, bias))
    # A self may stand in some layers alone: where no row has a slot, nothing is read.
    slots = [bool((weight[:, i] > ABSENT).any()) for i in range(L)]
    is_biased = bool(bias.any())
    heads = [i.head if isinstance(i, Recollection) else 1 for i in identities]
    leaning = tuple(_leaning(i) for i in identities)
    contrast = leaning if any(leaning) else None
    whose = [i.beside if isinstance(i, Recollection) else None for i in identities]
    beside = layer_reads(whose, scales, device=device)
    places = None
    if max(heads) > 1:
        counts = [0 if i is None else len(i.imprints) + _is_token(i) for i in identities]
        places = tuple(Place(h, n) for h, n in zip(heads, counts, strict=True))
    return [
        LayerRead(
            scales[i],
            k[:, i] if slots[i] else None,
            v[:, i] if slots[i] else None,
            weight[:, i] if slots[i] and bool(weight[:, i].any()) else None,
            left[:, i] if R else None,
            signs if R else None,
            bias[:, i] if is_biased else None,
            places=places,
            beta=beta,
            contrast=contrast,
            beside=beside[i],
        )
        for i in range(L)
    ]


def _leaning(identity: Identity | None) -> float:
    """How far somebody's words lean away from the model's own: as far as it is sure that what came to mind was asked for."""
    if not isinstance(identity, Recollection) or not identity.chosen:
        return 0.0
    return identity.lean * identity.sure


def token_layers(s: Float[Tensor, "L S"]) -> list[bool]:
    """The layers in which a self stands as a token: those where it is not zero; of a self that is zero everywhere, and about to learn, all."""
    return s.detach().any(1).tolist() if bool(s.detach().any()) else [True] * len(s)


def _is_token(identity: Identity) -> int:
    """1 for a self that stands as a token; one of zeros says nothing, and is not there."""
    return int(identity.self is not None and identity.self.form == "self_token" and bool(identity.self.s.any()))


__all__ = ["LayerRead", "layer_reads", "token_layers"]
