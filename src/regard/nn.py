"""Multi-head attention as a module over the operator: projections, GQA, cross-attention, trained state, and a cache.

The cache is state in, state out: `out, cache = attention.step(x, cache)`. Step by step gives what the whole gives.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from secrets import token_hex
from typing import Literal, NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .attention.allow import All, Allow, Causal
from .attention.fused import one_row
from .attention.inspect import Attended, inspect
from .attention.library import is_called_for
from .attention.operator import attend, solve, solve_after
from .attention.spec import Spec, parse
from .errors import CombinationError, ShapeError, StateError
from .part import Sizes
from .position import NoPosition
from .scope import Scope
from .state import State
from .values import tree


class Owner(NamedTuple):
    """Who filled a cache, and may go on with it."""

    layer: str
    spec: str
    who: str | None = None
    """The digest of what an identity does to the layer; None for the model by itself."""
    rows: tuple[int, ...] | None = None
    """Which of several identities each row of the batch is; None where one is for all of them."""

    def pick(self, index: Tensor) -> Owner:
        """The owner of some rows of the batch, in this order."""
        if self.rows is None:
            return self
        return self._replace(rows=tuple(self.rows[i] for i in index.tolist()))


@tree
@dataclass(frozen=True)
class Cache:
    """Keys (turned already, where RoPE may turn them early) and values so far, and what a selection that carries left behind."""

    k: Float[Tensor, "B G K D"] | None = None
    v: Float[Tensor, "B G K E"] | None = None
    carry: Tensor | None = None
    written: int = 0
    """Tokens that a selection with a state of fixed size has written into the carry; their keys and values are nowhere."""
    lead: int = 0
    """Places before the first token: what an identity remembers stands there, and counts for no position."""
    owner: Owner | None = None
    """Who filled it; None while it is empty, or where somebody made it by hand."""

    def __len__(self) -> int:
        return self.tokens

    @property
    def tokens(self) -> int:
        """Tokens that it holds; a symbol where they are traced, which `len` cannot give."""
        return self.written if self.k is None else self.k.shape[2] - self.lead

    def keys(self) -> Tensor:
        assert self.k is not None
        return self.k

    def values(self) -> Tensor:
        assert self.v is not None
        return self.v

    def grown(self, k: Tensor, v: Tensor) -> Cache:
        """A longer cache; this one stays as it was."""
        if self.written:
            raise StateError(
                f"this cache holds {self.written} tokens in a state of fixed size, and no keys that others could stand beside"
            )
        if self.k is None or self.v is None:
            return replace(self, k=k, v=v)
        return replace(self, k=torch.cat([self.k, k], dim=2), v=torch.cat([self.v, v], dim=2))

    def wrote(self, carry: Tensor, tokens: int) -> Cache:
        """The cache after so many tokens more, all of them in the carry."""
        return replace(self, carry=carry, written=self.written + tokens)

    @property
    def batch(self) -> int | None:
        """Rows that it holds; None while it is empty."""
        held = self.carry if self.written else self.k
        return None if held is None else held.shape[0]

    def led(self, k: Tensor, v: Tensor) -> Cache:
        """This cache, empty still, with slots before its first token."""
        return replace(self.grown(k, v), lead=k.shape[2])

    def of(self, owner: Owner, batch: int) -> Cache:
        """This cache for whoever goes on with it; refused where another filled it."""
        if self.owner is owner and self.k is not None and self.k.shape[0] == batch:
            # Every step but the first.
            return self
        if self.batch is None or not (self.tokens or self.lead):
            return self if self.owner == owner else replace(self, owner=owner)
        if self.owner != owner:
            # What was made by hand is read by the model alone: an identity's keys are wider than any that it could hold.
            if self.owner is not None or owner.who is not None:
                raise StateError(_refusal(self.owner, owner))
            return replace(self, owner=owner)
        if self.batch != batch:
            raise ShapeError(f"the cache holds {self.batch} rows, and {batch} come after it; pick its rows first")
        return self


def _refusal(filled: Owner | None, now: Owner) -> str:
    """Why one may not read what another has filled, and what to do."""
    if filled is None or (filled.layer == now.layer and filled.spec == now.spec and filled.who is None):
        why = "it was filled by the model itself, and an identity lives in it now"
    elif filled.spec != now.spec:
        why = f"it was filled under {filled.spec!r}, and this layer is {now.spec!r}"
    elif filled.layer != now.layer:
        why = "another layer or another model filled it"
    elif now.who is None:
        why = "an identity filled it, and nobody lives in the model now"
    elif filled.who == now.who:
        why = f"its rows are those of identities {filled.rows}, and now they are {now.rows}"
    else:
        why = "another identity (or the same under another beta, or in other rows) filled it"
    return f"this cache belongs to who filled it, and {why}; begin with an empty cache, or go on as the one who filled it"


class RowRead(NamedTuple):
    """What an override does to one layer of one text, as far as it is columns of keys and slots before the first token."""

    owner: Owner
    width: int
    """Of the keys, their columns included."""
    slots: tuple[Tensor, Tensor] | None = None
    """Keys and values (1, G, m, width), turned."""
    left: Tensor | None = None
    signs: Tensor | None = None
    bias: Tensor | None = None
    head: int = 1
    """So many tokens meet no slot."""
    behind: int = 0
    """Tokens before this place stand `off` further off."""
    off: int = 0

    @property
    def lead(self) -> int:
        return 0 if self.slots is None else self.slots[0].shape[2]


class AttentionOverride(Protocol):
    """What an identity does to one layer: heads that RoPE has not turned yet go in, heads come out."""

    def meet(
        self, attention: Attention, q: Tensor, k: Tensor, v: Tensor, cache: Cache | None, allow: Allow | Tensor | None
    ) -> tuple[Tensor, Cache]:
        """Without a cache the text is whole, and the one that is given back is nobody's."""
        ...

    def inspect(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor, allow: Allow | Tensor | None) -> Attended:
        """`meet` of a whole text, to be looked at."""
        ...

    def row_read(self, attention: Attention) -> RowRead | None:
        """The same for the causal text of one row; None where it is more than columns and slots."""
        ...

    def rows(self, index: Tensor) -> AttentionOverride: ...
    @property
    def batch(self) -> int:
        """Rows that it is for, one life each; 1 is for any number of them."""
        ...

    @property
    def padless(self) -> bool:
        """True when padding before a text would move it against what is remembered."""
        ...

    @property
    def alone(self) -> bool:
        """True where it is not read beside other rows: a query may refuse slots."""
        ...

    def leans(self, row: int) -> float:
        """How far what is said in a row leans away from what is said `beside` it (`models/decode/contrast.py`)."""
        ...

    @property
    def beside(self) -> AttentionOverride | None:
        """What its words lean away from; None for the layer by itself."""
        ...


_OVERRIDES: Scope[AttentionOverride] = Scope("overrides")
"""Of the code inside a block alone: two requests may live different lives on one model at the same time."""


@contextmanager
def overridden(overrides: Mapping[nn.Module, AttentionOverride | None]) -> Generator[None]:
    """Inside, these layers attend as their overrides say; the models themselves are not touched, and others go on as they were."""
    with _OVERRIDES.held(overrides):
        yield


@contextmanager
def bound(overrides: Mapping[nn.Module, AttentionOverride]) -> Generator[None]:
    """One call, whose layers attend as these overrides say and no other, whoever lives there meanwhile; never around a yield."""
    with _OVERRIDES.bound(overrides):
        yield


def overrides_in(model: nn.Module) -> dict[nn.Module, AttentionOverride]:
    """What overrides the layers of a model here and now, to go on with wherever it will be used."""
    return _OVERRIDES.of(m for m in model.modules() if isinstance(m, Attention))


def overrides_of_rows(
    overrides: Mapping[nn.Module, AttentionOverride], rows: list[int], count: int
) -> dict[nn.Module, AttentionOverride]:
    """The overrides of a batch whose row i is row `rows[i]` of theirs; all rows together are `count`."""
    for b in overrides.values():
        if b.batch not in (1, count):
            raise ShapeError(f"{b.batch} identities live here, one for each row, and there are {count} rows")
    return dict(overrides) if rows == list(range(count)) else {m: b.rows(torch.tensor(rows)) for m, b in overrides.items()}


class Attention(nn.Module):
    """x (B, N, M) to (B, N, M) by any mechanism.

        attention = Attention(64, heads=8, spec="cosine(temperature=learned) | entmax(learned) | rope", key_heads=2)
        out = attention(x, allow=Causal())

    Tensors that the spec asks to be learned (temperature, alpha, additive weights, relative and position tables, the maps of
    the self) become parameters. What belongs to an episode (`state.trace`, `state.self.s`) comes with each call.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        spec: str | Spec = "dot | softmax",
        *,
        key_heads: int | None = None,
        head_width: int | None = None,
        context_width: int | None = None,
        self_width: int = 16,
        bias: bool | Literal["qkv"] = False,
    ) -> None:
        super().__init__()
        key_heads = heads if key_heads is None else key_heads
        for name, n in (("width", width), ("heads", heads), ("key_heads", key_heads), ("head_width", head_width),
                        ("context_width", context_width), ("self_width", self_width)):  # fmt: skip
            if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
                raise ShapeError(f"{name}={n!r}; it must be a whole number of at least 1")
        if heads % key_heads:
            raise ShapeError(f"heads={heads} is not a multiple of key_heads={key_heads}")
        if head_width is None and width % heads:
            raise ShapeError(f"width={width} does not divide into heads={heads}; give head_width")
        self.spec, self.heads, self.key_heads = parse(spec), heads, key_heads
        self.head_width = D = head_width or width // heads
        self.inner, self.points = self.spec.inner, self.spec.points
        self.widths = width, source = width, context_width or width
        self.q = nn.Linear(width, heads * D, bias=bool(bias))
        self.k = nn.Linear(source, key_heads * D, bias=bool(bias))
        # Energy's values are the keys and its way back is W_Qᵀ and W_Kᵀ; a pointer's result is the choice itself.
        valueless = self.points or self.inner.both_sides
        self.v = None if valueless else nn.Linear(source, key_heads * D, bias=bool(bias))
        self.out = None if valueless else nn.Linear(heads * D, width, bias=bias is True)
        sizes = Sizes(heads, key_heads, D, self_width)
        initial = {name: x for part in self.spec.parts for name, x in part.initial(sizes).items()}
        self.trained = nn.ParameterDict({name: nn.Parameter(x) for name, x in initial.items()})
        self.name = token_hex(8)
        """Tells this layer from every other; a copy of it, with the same weights, keeps the name."""
        # Known from here on: a compiler that traces a call would have to wait at the lock of what is computed when it is first read.
        _ = self.owner, self.met, self.bare, self.writes, self.turns_early

    def forward(
        self,
        x: Float[Tensor, "B N M"],
        context: Tensor | None = None,
        *,
        allow: Allow | Tensor | None = None,
        state: State | None = None,
    ) -> Tensor:
        """x attends to itself, or to `context` where one is given."""
        q, k, v = self._project(x, x if context is None else context)
        override = self.override
        if override is not None and v is not None and context is None:
            return self.joined(override.meet(self, q, k, v, None, allow)[0])
        return self.joined(attend(q, k, v, self.spec, allow=allow, state=self.state(state)))

    def inspect(
        self, x: Tensor, context: Tensor | None = None, *, allow: Allow | Tensor | None = None, state: State | None = None
    ) -> Attended:
        """The operator's view of the same call: weights, energy, who was accepted. What an identity keeps stands before the text's keys."""
        q, k, v = self._project(x, x if context is None else context)
        override = self.override
        if override is not None and v is not None and context is None:
            return override.inspect(self, q, k, v, allow)
        return inspect(q, k, v, self.spec, allow=allow, state=self.state(state))

    def step(
        self, x: Tensor, cache: Cache | None = None, *, allow: Allow | Tensor | None = None, state: State | None = None
    ) -> tuple[Tensor, Cache]:
        """New tokens after those in the cache; the old cache stays as it was."""
        if self.inner.both_sides:
            raise CombinationError(
                f"{self.inner.name} moves a token by what later tokens do, so it cannot be decoded step by step"
            )
        q, k, v = self._project(x, x)
        cache = Cache() if cache is None else cache
        override = self.override
        if override is not None and v is not None:
            out, cache = override.meet(self, q, k, v, cache, allow)
            return self.joined(out), cache
        if self.turns_early:
            q, k = (self.spec.position.apply(y, cache.tokens, State()) for y in (q, k))
        out, cache = self.meet(q, k, v, cache, allow=allow, state=state)
        return self.joined(out), cache

    def meet(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        cache: Cache,
        *,
        allow: Allow | Tensor | None = None,
        state: State | None = None,
    ) -> tuple[Tensor, Cache]:
        """`step` between its projections, for callers with their own: heads in, heads out.

        Where `turns_early` says so, q and k come turned.
        """
        whole = self.state(state)
        if whole.offset not in (None, cache.tokens):
            raise StateError(
                f"state.offset={whole.offset!r}, and the first of the new tokens stands at {cache.tokens}, after those in the cache: "
                "leave offset out"
            )
        cache = cache.of(self.owner, k.shape[0])
        if self.writes and cache.k is None and v is not None:
            met = solve_after(q, k, v, self.met, allow, whole, (cache.tokens, cache.carry))
            if met is not None:
                return met[0], cache.wrote(met[1], k.shape[2])
            if cache.written:
                raise CombinationError(
                    f"{self.spec}: {cache.written} tokens are written into a state of fixed size, and under {allow} each row would "
                    "need keys of its own; begin with an empty cache under this rule, and it keeps keys"
                )
        cache = cache.grown(k, k if v is None else v)
        if (
            self.bare is not None
            and state is None
            and q.shape[2] == 1
            and (allow is None or isinstance(allow, (Causal, All)))
            and not is_called_for(q)
        ):
            # One token after the others is what decoding does all day: the call that the plan would come to, at once.
            return one_row(q, cache.keys(), cache.values(), self.bare), cache
        parts, whole = (None, None, None), replace(whole, carry=cache.carry)
        out, carry = solve(q, cache.keys(), cache.values(), self.met, parts, allow, whole)
        return out, cache if carry is None else replace(cache, carry=carry)

    @property
    def override(self) -> AttentionOverride | None:
        """What overrides this layer here and now; None for a model by itself."""
        return _OVERRIDES.get(self)

    @cached_property
    def owner(self) -> Owner:
        """This layer by itself, as the caches that it fills name it."""
        return Owner(self.name, str(self.spec))

    @cached_property
    def met(self) -> Spec:
        """What is left of the spec for heads that are turned already."""
        return Spec(self.spec.geometry, self.spec.selection, NoPosition()) if self.turns_early else self.spec

    @cached_property
    def bare(self) -> float | None:
        """The scale where nothing but a scaled dot product and a softmax is left to do; None elsewhere."""
        spec = self.met
        plain = spec.selection is spec.inner and spec.inner.softmax_temperature == 1.0 and not spec.inner.repeats(spec.geometry)
        return spec.geometry.scale_for(self.head_width) if plain and spec.position.absent else None

    @cached_property
    def writes(self) -> bool:
        """True when a cache holds what keys wrote instead of keys: nothing that comes later moves or reads them again."""
        spec = self.spec
        return self.inner.weighs_vectors and (self.turns_early or spec.position.absent) and not spec.geometry.needs

    @cached_property
    def turns_early(self) -> bool:
        """True when keys may be cached as their position turned them: nothing looks at them, or moves them, before it turns."""
        repeated = self.inner.repeats(self.spec.geometry)
        moves = repeated is not None and repeated[2] > 1
        return self.spec.position.early and not self.spec.geometry.reads_unturned and not moves

    def state(self, given: State | None = None) -> State:
        """What a call carries: the episode's tensors, completed by this module's own."""
        if given is not None and not isinstance(given, State):
            raise StateError(f"state={given!r:.60}; pass regard.State(...)")
        state = _NOTHING if given is None else given
        if self.trained:
            trained = dict(self.trained.items())
            for part in self.spec.parts:
                state = part.fill(state, trained)
        return state

    def _project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        for name, given, width in (("input", x, self.widths[0]), ("context", source, self.widths[1])):
            if not isinstance(given, Tensor) or given.ndim != 3 or given.shape[-1] != width:
                what = tuple(given.shape) if isinstance(given, Tensor) else f"a {type(given).__name__}"
                raise ShapeError(f"the {name} is {what}; this attention takes (B, N, M) with M={width}")
            own = self.q.weight.dtype if isinstance(self.q, nn.Linear) else given.dtype
            if given.dtype != own and not torch.is_autocast_enabled(given.device.type):
                raise ShapeError(f"the {name} is {given.dtype} and this attention {own}; make them one dtype")
        q, k = _split(self.q(x), self.heads), _split(self.k(source), self.key_heads)
        return q, k, None if self.v is None else _split(self.v(source), self.key_heads)

    def joined(self, y: Tensor) -> Tensor:
        """Heads back to the width of the model."""
        if self.points:
            return y
        if self.out is not None:
            return self.out(y.transpose(1, 2).flatten(-2))
        by_query, by_key = (side.transpose(1, 2).flatten(-2) for side in y.chunk(2, dim=-1))
        return by_query @ self.q.weight + by_key @ self.k.weight


_NOTHING = State()


def _split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


__all__ = [
    "Attention",
    "AttentionOverride",
    "Cache",
    "Owner",
    "RowRead",
    "bound",
    "overridden",
    "overrides_in",
    "overrides_of_rows",
]
