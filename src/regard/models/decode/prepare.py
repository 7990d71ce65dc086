"""A model made ready to decode: the same numbers, laid out so that a step reads every weight once and at full speed.

    decoder = prepare(model)              # or prepare(model, "int8")
    logits, caches = decoder(tokens, caches)

`prepare` is what sees that weights have changed: a decoder that is kept by hand goes on with what it copied (int8) or reads the
model's own memory (float32 where C multiplies). q, k and v are one product, and so are gate and up. Attention is still
`Attention.meet`: any spec decodes this way. A model whose blocks are not plain (`CausalModel.plain_blocks`) runs through its own
forward.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attention.allow import Allow, Causal
from ...errors import CombinationError, SpecError
from ...nn import Attention, Cache, RowRead
from ...position import Rope
from ...state import State
from ..base import CausalModel, Model, States, cached_length, narrowed, per_layer
from ..blocks import Block, FeedForward, gelu_tanh
from . import native
from .boards import Boards
from .cache import StaticCache
from .int8_cache import STEPWISE, Int8Cache
from .matvec import Float, Int8, Product, Quantised

Weights = Literal["float32", "int8", "q4"]
WEIGHTS: dict[str, type[Float] | type[Int8] | type[Quantised]] = {"float32": Float, "int8": Int8, "q4": Quantised}


@dataclass(frozen=True)
class Layer:
    """One block: its modules, and its products in their new layout."""

    attention: Attention
    norms: tuple[nn.Module, nn.Module]
    qkv: Product
    out: Product
    into: Product
    down: Product
    ffn: FeedForward

    def __call__(self, x: Tensor, batch: int, cache: Cache, rule: Allow, state: State | None) -> tuple[Tensor, Cache]:
        """x (B·N, M)."""
        a = self.attention
        H, G, D = a.heads, a.key_heads, a.head_width
        flat = self.project(x)
        override = a.override
        if state is None and isinstance(rule, Causal) and isinstance(cache, StaticCache) and self.meets and native.serves(flat):
            read = None if override is None else override.row_read(a)
            if override is None or read is not None:
                met, cache = self._meet(flat, batch, cache, read)
                return self.rest(x, met), cache
        whole = flat.view(batch, -1, H + 2 * G, D).transpose(1, 2)
        # Bytes make much of a last bit: the few tokens of a guess meet one by one, as they would have been written.
        alone = isinstance(cache, Int8Cache) and batch == 1 and whole.shape[2] <= STEPWISE
        each: list[Tensor] = []
        for part in whole.split(1, dim=2) if alone else [whole]:
            # Of one token alone, however it lay: kernels choose their way by strides.
            part = part.clone(memory_format=torch.contiguous_format) if alone else part
            q, k, v = part.split([H, G, G], dim=1)
            if override is not None:
                heads, cache = override.meet(a, q, k, v, cache, rule)
            else:
                if a.turns_early:
                    q, k = (a.spec.position.apply(y, len(cache), _NOTHING) for y in (q, k))
                heads, cache = a.meet(q, k, v, cache, allow=rule, state=state)
            each.append(heads)
        heads = each[0] if len(each) == 1 else torch.cat(each, dim=2)
        return self.rest(x, heads.transpose(1, 2).reshape(x.shape[0], -1)), cache

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values side by side, not turned."""
        return self.qkv(_normed(self.norms[0], x))

    def rest(self, x: Tensor, heads: Tensor) -> Tensor:
        """What comes after attention: heads (rows, H·D) back to the model's width, then the feed-forward layer."""
        x = self.out(heads, onto=x)
        wide = self.into(_normed(self.norms[1], x))
        gated, kind = self.ffn.gate is not None, _KINDS.get(self.ffn.act)
        inner = None if kind is None else native.act(wide, kind, gated)
        if inner is None and gated:
            gate, up = wide.chunk(2, dim=-1)
            inner = self.ffn.act(gate) * up
        return self.down(self.ffn.act(wide) if inner is None else inner, onto=x)

    @cached_property
    def meets(self) -> bool:
        """True where tokens meet in C: scaled dot products and a softmax, turned by halves or not at all."""
        a, position = self.attention, self.attention.spec.position
        turns = position.absent or (isinstance(position, Rope) and position.layout == "half" and a.turns_early)
        return a.bare is not None and turns and a.v is not None

    def angles(self, start: int, stop: int, read: RowRead | None) -> tuple[Tensor, Tensor] | None:
        """cos and sin (N, pairs) of tokens start..stop of a text; those of its head stand further off where slots stand between."""
        turns = self.attention.spec.position
        if not isinstance(turns, Rope):
            return None
        like = _like(self.attention.head_width)
        if read is None or start >= read.behind:
            return turns.angles(like, start, stop)
        ahead = turns.angles(like, start - read.off, min(stop, read.behind) - read.off)
        if stop <= read.behind:
            return ahead
        cos, sin = (torch.cat(x) for x in zip(ahead, turns.angles(like, read.behind, stop), strict=True))
        return cos, sin

    def _meet(self, flat: Tensor, batch: int, cache: StaticCache, read: RowRead | None) -> tuple[Tensor, StaticCache]:
        """Rows of one length, each after its own cache; what is remembered is the same for all of them."""
        a = self.attention
        heads, N = (a.heads, a.key_heads, a.head_width), flat.shape[0] // batch
        grown = self.reserve(cache, batch, N, read, flat)
        at = len(grown) - N
        texts = (native.Text * batch)(*(self.text(*grown.row(i), read) for i in range(batch)))
        angles = self.angles(at, at + N, read)
        if angles is not None and batch > 1:
            angles = angles[0].repeat(batch, 1), angles[1].repeat(batch, 1)
        return native.meet(flat, angles, texts, [N] * batch, [at] * batch, heads, self.scale), grown

    def reserve(self, cache: StaticCache, batch: int, places: int, read: RowRead | None, like: Tensor) -> StaticCache:
        """The cache with so many places more, which are about to be written, and with its slots before them."""
        a = self.attention
        cache = cast(StaticCache, cache.of(a.owner if read is None else read.owner, batch))
        if read is not None and read.slots is not None and not cache.length:
            cache = cast(StaticCache, cache.led(*(x.expand(batch, -1, -1, -1) for x in read.slots)))
        return cache.reserved((batch, a.key_heads, a.head_width if read is None else read.width), places, like)

    def text(self, k: native.Room, v: native.Room, read: RowRead | None) -> native.Text:
        """A text whose keys and values lie in k and v (G, capacity, width)."""
        a = self.attention
        heads = a.key_heads, a.head_width
        if read is None:
            return native.text(k, v, heads)
        return native.text(k, v, heads, read.left, read.signs, read.bias, lead=read.lead, head=read.head)

    @property
    def scale(self) -> float:
        assert self.attention.bare is not None
        return self.attention.bare


@lru_cache(maxsize=32)
def _like(width: int) -> Tensor:
    return torch.empty(0, width)


_KINDS: dict[Callable[[Tensor], Tensor], str] = {F.silu: "silu", gelu_tanh: "gelu_tanh", F.gelu: "gelu", F.relu: "relu"}
_NOTHING = State()


class Decoder:
    """Tokens in, logits of the last one out."""

    def __init__(self, model: Model, weights: Weights = "float32") -> None:
        if not isinstance(weights, str) or weights not in WEIGHTS:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SpecError(
                f"weights={weights!r}: choose 'float32' (the model's own numbers), 'int8' (a byte each) or 'q4' (blocks of few bits, "
                "those of the GGUF file that the model came from)"
            )
        attentions = [m for m in model.modules() if isinstance(m, Attention)]
        for i, layer in enumerate(attentions):
            if layer.inner.both_sides:
                raise CombinationError(
                    f"layer {i} is {layer.spec}: {layer.inner.name} moves earlier tokens too and cannot be decoded"
                )
        self.model, self.weights = model, weights
        self.parts = _parts(model)
        watched = any(extra for _, _, extra in self.parts)
        self.depth = model.cache_count
        self.stack: Stack | None = None
        strange: list[nn.Module] = []
        if isinstance(model, CausalModel) and (blocks := model.plain_blocks()) is not None:
            strange = [x for x in (model.head, *(x for b in blocks for x in _linears(b))) if not _is_plain(x)]
            if not strange and not watched:
                self.stack = Stack(model, blocks, WEIGHTS[weights])
        if self.stack is None and weights != "float32":
            what = f" with a {type(strange[0]).__name__} in it" if strange else " with hooks on it" if watched else ""
            raise CombinationError(
                f"a {type(model).__name__}{what} decodes through its own forward, which has no {weights} weights"
            )

    def stale(self) -> bool:
        """True where the model's parts or weights are no longer those that this was made of."""
        return self.parts != _parts(self.model) or (self.stack is not None and self.stack.stale())

    @property
    def nbytes(self) -> int:
        """Bytes of weights that one step reads."""
        if self.stack is not None:
            return sum(p.nbytes for p in self.stack.products)
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    @torch.inference_mode()
    def __call__(
        self,
        tokens: Tensor,
        caches: Sequence[Cache],
        *,
        allow: Allow | None = None,
        states: States = None,
        positions: Tensor | None = None,
        every: bool = False,
    ) -> tuple[Tensor, tuple[Cache, ...]]:
        """Logits (B, V) of the last token, or (B, N, V) of every one."""
        if self.stack is not None:
            return self.stack(tokens, caches, allow, per_layer(states, self.depth), positions, every)
        places = {} if positions is None else {"positions": positions}
        out = self.model(tokens, allow=allow, caches=caches, states=states, **places)
        return out.logits if every else out.logits[:, -1], out.caches


class Stack:
    """A model's plain blocks with their products laid out; where it starts, its rule and its readout are the model's own."""

    def __init__(self, model: CausalModel, blocks: Sequence[Block], layout: type[Float] | type[Int8] | type[Quantised]) -> None:
        self.model = model
        self.layers = [_layer(block, layout) for block in blocks]
        head = [cast(nn.Linear, model.head)]
        self.head = layout(head, head=True) if layout is Quantised else layout(head)
        self.products: list[Product] = [self.head, *(p for x in self.layers for p in (x.qkv, x.out, x.into, x.down))]
        self.whole = whole_of(self)
        self.norm_places = _norm_places(self)
        self.boards = Boards()

    def stale(self) -> bool:
        return self.norm_places != _norm_places(self) or any(p.stale() for p in self.products)

    def __call__(
        self,
        tokens: Tensor,
        caches: Sequence[Cache],
        allow: Allow | None,
        states: Sequence[State | None],
        positions: Tensor | None,
        every: bool,
    ) -> tuple[Tensor, tuple[Cache, ...]]:
        B, N = tokens.shape
        if B * N <= native.NEAR and self.whole is not None and allow is None and positions is None and not any(states):
            done = self._at_once(tokens, caches, every)
            if done is not None:
                return done
        way = self.walk(tokens, caches, allow, states, positions)
        try:
            while True:
                next(way)
        except StopIteration as end:
            x, grown = end.value
        if not every:
            x = x.view(B, N, -1)[:, -1]
        logits = self.logits(x)
        return logits.view(B, N, -1) if every else logits, grown

    def _at_once(self, tokens: Tensor, caches: Sequence[Cache], every: bool) -> tuple[Tensor, tuple[Cache, ...]] | None:
        """All layers in one call of C; None where one of them, or a cache, is not for it."""
        (B, N), whole, model = tokens.shape, self.whole, self.model
        at = cached_length(caches, len(self.layers))
        x = model.start(tokens, at, None).reshape(B * N, -1)
        if whole is None or type(model.rule()) is not Causal or not native.serves(x) or not native.readable(x):
            return None
        board = self.boards.board(self.layers, caches, (B, N), x)
        if board is None:
            return None
        rows = board.texts.place([N] * B, [at] * B)
        picks = range(rows) if every else range(N - 1, rows, N)
        angles = [layer.angles(at, at + N, read) for layer, read in board.turned]
        if B > 1:
            angles = [None if a is None else (a[0].repeat(B, 1), a[1].repeat(B, 1)) for a in angles]
        logits = native.step(whole, x, angles, board.texts, picks)
        self.boards.keep(board)
        if logits is None:
            logits = self.logits(x[list(picks)])
        return logits.view(B, N, -1) if every else logits, board.grown

    def walk(
        self,
        tokens: Tensor,
        caches: Sequence[Cache],
        allow: Allow | None = None,
        states: Sequence[State | None] | None = None,
        positions: Tensor | None = None,
    ) -> Generator[None, None, tuple[Tensor, tuple[Cache, ...]]]:
        """What the last block leaves (B·N, M), and the caches; it stops before every block, so that others may have their turn."""
        (B, N), model = tokens.shape, self.model
        rule = narrowed(model.rule(), allow)
        x = model.start(tokens, cached_length(caches, len(self.layers)), positions).reshape(B * N, -1)
        grown: list[Cache] = []
        for layer, cache, state in zip(self.layers, caches, states or [None] * len(self.layers), strict=True):
            yield
            x, cache = layer(x, B, cache, rule, state)
            grown.append(cache)
        return x, tuple(grown)

    def logits(self, x: Tensor) -> Tensor:
        """Of what `walk` left, row by row."""
        return self.model.readout(_normed(self.model.norm, x), self.head)


def prepare(model: Model, weights: Weights = "float32", *, fresh: bool = False) -> Decoder:
    """The decoder of a model, made once: kept until the model is gone or its weights or parts are others.

    What was copied from the weights is compared with them, every byte, on each call; `fresh=True` makes it anew unasked.
    """
    decoders: _Decoders | None = model.__dict__.get(_DECODERS)
    if decoders is None:
        # With the model itself, so that both go together.
        decoders = _Decoders()
        object.__setattr__(model, _DECODERS, decoders)
    decoder = decoders.get(weights) if isinstance(weights, str) else None
    if decoder is None or fresh or decoder.model is not model or decoder.stale():
        decoder = decoders[weights] = Decoder(model, weights)
    return decoder


_DECODERS = "_regard_decoders"


class _Decoders(dict[str, Decoder]):
    """A model's decoders; a copy of the model, or what is read back from its file, has none yet."""

    def __deepcopy__(self, memo: dict[int, object]) -> _Decoders:
        return _Decoders()

    def __reduce__(self) -> tuple[type[_Decoders], tuple[()]]:
        return _Decoders, ()


def _layer(block: Block, layout: type[Float] | type[Int8] | type[Quantised]) -> Layer:
    q, k, v, out, *into, down = cast(list[nn.Linear], _linears(block))
    norms = block.norm_1, block.norm_2
    return Layer(
        block.attention, norms, layout([q, k, v]), layout([out]), layout(into), layout([down]), cast(FeedForward, block.ffn)
    )


def _linears(block: Block) -> list[nn.Module]:
    """The layers of a plain block that are multiplied with here instead of being called, in the order of their use."""
    a, ffn = block.attention, cast(FeedForward, block.ffn)
    return [x for x in (a.q, a.k, a.v, a.out, ffn.gate, ffn.up, ffn.down) if x is not None]


def _parts(model: Model) -> list[tuple[nn.Module, type, bool]]:
    """Its modules, of what class each is now, and whether a call of it does more than its class says: hooks, another forward.

    A decoder calls few of them, so what hangs on them would be left out without a word.
    """
    return [
        (m, type(m), bool(m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__))  # pyright: ignore[reportPrivateUsage]
        for m in model.modules()
    ]


def _is_plain(layer: nn.Module) -> bool:
    """True where calling the layer is one product with its weight; adapters and wrappers do more."""
    return isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    y: Tensor | None = None
    if type(norm) is nn.LayerNorm and norm.normalized_shape == x.shape[1:] and norm.elementwise_affine:
        y = native.layer_norm(x, norm.weight, cast(Tensor | None, norm.bias), norm.eps)
    elif type(norm) is nn.RMSNorm and norm.eps is not None:
        weight = cast(Tensor | None, norm.weight)
        y = None if weight is None else native.rms(x, weight, norm.eps)
        return F.rms_norm(x, norm.normalized_shape, weight, norm.eps) if y is None else y
    return norm(x) if y is None else y


def norm_record(norm: nn.Module, width: int) -> native.Norm | None:
    """A norm as C reads it; None where it is none of the two that C knows."""
    if type(norm) not in (nn.RMSNorm, nn.LayerNorm) or cast(nn.LayerNorm, norm).normalized_shape != (width,):
        return None
    weight, shift = cast(Tensor | None, norm.weight), cast(Tensor | None, getattr(norm, "bias", None))
    eps = cast(float | None, norm.eps)
    if weight is None or eps is None or not all(native.readable(w, (width,)) for w in (weight, shift) if w is not None):
        return None
    return native.Norm(weight.data_ptr(), None if shift is None else shift.data_ptr(), eps, type(norm) is nn.LayerNorm)


def _norms(stack: Stack) -> list[nn.Module]:
    return [stack.model.norm, *(n for x in stack.layers for n in x.norms)]


def _norm_places(stack: Stack) -> list[object]:
    # Read where they lie; whoever replaces one is seen by its address.
    if stack.whole is None:
        return []
    weights = [w for n in _norms(stack) for w in (n.weight, getattr(n, "bias", None)) if w is not None]
    return [(cast(Tensor, w).data_ptr(), cast(Tensor, w).shape) for w in weights]


def whole_of(stack: Stack) -> native.Whole | None:
    """A stack for one call of C; None where a part of it is not for C."""
    matrices = [p.matrices for x in stack.layers for p in (x.qkv, x.out, x.into, x.down)]
    if native.library() is None or not all(x.meets for x in stack.layers) or not stack.layers:
        return None
    plain = [m for m in matrices if m is not None]
    if len(plain) != len(matrices) or any(x.ffn.act not in _KINDS for x in stack.layers):
        return None
    width = plain[0].inside
    layers: list[native.Layer] = []
    for i, x in enumerate(stack.layers):
        a, norms, (qkv, out, into, down) = x.attention, [norm_record(n, width) for n in x.norms], plain[4 * i : 4 * i + 4]
        before, between = norms
        gated, turned = x.ffn.gate is not None, x.angles(0, 1, None)
        pairs = 0 if turned is None else turned[0].shape[-1]
        if before is None or between is None or into.outs != [down.inside] * (1 + gated):
            return None
        kind = native.ACTIVATIONS.index(_KINDS[x.ffn.act])
        sizes = a.heads, a.key_heads, a.head_width, pairs
        layers.append(native.Layer(*(m.address for m in (qkv, out, into, down)), before, between, kind, gated, *sizes, x.scale))
    if any(x.pairs != layers[0].pairs for x in layers):
        return None
    norm = norm_record(stack.model.norm, width)
    reads_out = norm is not None and type(stack.model).readout is CausalModel.readout
    return native.Whole(layers, plain, norm, stack.head.matrices if reads_out else None)
