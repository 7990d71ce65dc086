"""A model made ready to decode: the same numbers, laid out so that a step reads every weight once and at full speed.

    decoder = prepare(model)              # or prepare(model, "int8")
    logits, caches = decoder(tokens, caches)

`prepare` is what sees that weights have changed: a decoder that is kept by hand goes on with what it copied (int8) or reads the
model's own memory (float32 where C multiplies). q, k and v are one product, and so are gate and up. Attention is still `Attention.meet`: any spec decodes this way. A family
whose blocks are not known here runs through its own forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attention.allow import Allow, Causal, Window
from ...errors import CombinationError, ShapeError, SpecError
from ...nn import Attention, Cache
from ...position import Rope
from ...selection import Energy
from ...state import State
from ..base import Model, States, per_layer
from ..blocks import Block, FeedForward
from ..gpt2 import GPT2
from ..llama import Llama
from . import native
from .matvec import Float, Int8, Product

Weights = Literal["float32", "int8"]


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
        flat = self.qkv(_normed(self.norms[0], x))
        override = a.override
        if override is not None:
            met = override.step(a, flat, batch, cache, rule) if x.shape[0] == batch and native.serves(flat) else None
            if met is not None:
                return self.rest(x, met[0]), met[1]
            q, k, v = flat.view(batch, -1, H + 2 * G, D).transpose(1, 2).split([H, G, G], dim=1)
            heads, cache = override.meet(a, q, k, v, cache, rule)
            return self.rest(x, heads), cache
        at = len(cache)
        turns = cast(Rope, a.spec.position) if a.turns_early else None
        if turns is not None and turns.layout == "half" and x.shape[0] == batch:
            angles = turns.angles(flat.view(batch, -1, D), at, at + 1)
            turns = None if native.turn(flat, *angles, H + G, D) else turns
        qkv = flat.view(batch, -1, H + 2 * G, D).transpose(1, 2)
        qk, v = qkv[:, : H + G], qkv[:, H + G :]
        if turns is not None:
            qk = turns.apply(qk, at, _NOTHING)
        heads, cache = a.meet(qk[:, :H], qk[:, H:], v, cache, allow=rule, state=state)
        return self.rest(x, heads), cache

    def rest(self, x: Tensor, heads: Tensor) -> Tensor:
        """What comes after attention: back to the model's width, then the feed-forward layer."""
        x = self.out(heads.transpose(1, 2).reshape(x.shape[0], -1), onto=x)
        wide = self.into(_normed(self.norms[1], x))
        if self.ffn.gate is None:
            return self.down(self.ffn.act(wide), onto=x)
        inner = native.swiglu(wide) if self.ffn.act is F.silu else None
        if inner is None:
            gate, up = wide.chunk(2, dim=-1)
            inner = self.ffn.act(gate) * up
        return self.down(inner, onto=x)


_NOTHING = State()


class Decoder:
    """Tokens in, logits of the last one out."""

    def __init__(self, model: Model, weights: Weights = "float32") -> None:
        if weights not in ("float32", "int8"):
            raise SpecError(f"weights={weights!r}: choose 'float32' (the model's own numbers) or 'int8' (a byte each)")
        for i, layer in enumerate(_attentions(model)):
            if isinstance(layer.inner, Energy):
                raise CombinationError(f"layer {i} is {layer.spec}: energy moves earlier tokens too and cannot be decoded")
        self.model, self.weights = model, weights
        self.parts = _parts(model)
        watched = any(extra for _, _, extra in self.parts)
        self.known = isinstance(model, Llama | GPT2) and all(map(_is_plain, _linears(model))) and not watched
        self.depth = model.cache_count
        self.products: list[Float | Int8] = []
        if not self.known:
            if weights != "float32":
                strange = [type(x).__name__ for x in _linears(model) if not _is_plain(x)]
                what = f" with a {strange[0]} in it" if strange else " with hooks on it" if watched else ""
                raise CombinationError(
                    f"a {type(model).__name__}{what} decodes through its own forward, which has no {weights} weights"
                )
            return
        known = cast(Llama | GPT2, model)
        layout = Int8 if weights == "int8" else Float
        self.layers = [_layer(cast(Block, b), layout) for b in known.blocks]
        self.head = layout([known.head])
        self.products = [self.head]
        for x in self.layers:
            self.products += cast(list[Float | Int8], [x.qkv, x.out, x.into, x.down])

    def stale(self) -> bool:
        """True where the model's parts or weights are no longer those that this was made of."""
        return self.parts != _parts(self.model) or any(p.stale() for p in self.products)

    @property
    def nbytes(self) -> int:
        """Bytes of weights that one step reads."""
        return (
            sum(p.nbytes for p in self.products)
            if self.known
            else sum(p.numel() * p.element_size() for p in self.model.parameters())
        )

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
        if not self.known:
            places = {"positions": positions} if isinstance(self.model, GPT2) else {}
            found = self.model(tokens, allow=allow, caches=caches, states=states, **places)
            return found.logits if every else found.logits[:, -1], found.caches
        B, N = tokens.shape
        model = cast(Llama | GPT2, self.model)
        window = getattr(model.config, "window", None)
        rule: Allow = Causal() if window is None else Causal() & Window(window)
        rule = rule if allow is None else rule & allow
        x = F.embedding(tokens, model.embed.weight)
        if isinstance(model, GPT2):
            start = len(caches[0])
            if positions is None and start + N > model.config.context:
                raise ShapeError(f"{start + N:,} tokens are past this model's context of {model.config.context:,} tokens")
            x = x + model.place(torch.arange(start, start + N, device=tokens.device) if positions is None else positions)
        x = x.reshape(B * N, -1)
        grown: list[Cache] = []
        for layer, cache, state in zip(self.layers, caches, per_layer(states, self.depth), strict=True):
            x, cache = layer(x, B, cache, rule, state)
            grown.append(cache)
        if not every:
            x = x.view(B, N, -1)[:, -1]
        logits = self.head(_normed(model.norm, x))
        return logits.view(B, N, -1) if every else logits, tuple(grown)


def prepare(model: Model, weights: Weights = "float32", *, fresh: bool = False) -> Decoder:
    """The decoder of a model, made once: kept until the model is gone or its weights or parts are others.

    What was copied from the weights is compared with them, every byte, on each call; `fresh=True` makes it anew unasked.
    """
    kept: _Kept | None = model.__dict__.get(_KEPT)
    if kept is None:
        # Kept with the model itself, so that both go together.
        kept = _Kept()
        object.__setattr__(model, _KEPT, kept)
    decoder = kept.decoders.get(weights)
    if decoder is None or fresh or decoder.model is not model or decoder.stale():
        decoder = kept.decoders[weights] = Decoder(model, weights)
    return decoder


_KEPT = "_regard_decoders"


class _Kept:
    """A model's decoders; a copy of the model, or what is read back from its file, has none yet."""

    def __init__(self) -> None:
        self.decoders: dict[str, Decoder] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return _Kept()

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


def _layer(block: Block, layout: type[Float] | type[Int8]) -> Layer:
    a, ffn = block.attention, cast(FeedForward, block.ffn)
    assert a.v is not None
    assert a.out is not None
    into = [ffn.up] if ffn.gate is None else [ffn.gate, ffn.up]
    return Layer(
        a, (block.norm_1, block.norm_2), layout([a.q, a.k, a.v]), layout([a.out]), layout(into), layout([ffn.down]), ffn
    )


def _linears(model: Model) -> list[nn.Module]:
    """The layers that a decoder multiplies with instead of calling them."""
    if not isinstance(model, Llama | GPT2):
        return []
    found: list[nn.Module | None] = [model.head]
    for block in cast(list[Block], list(model.blocks)):
        a, ffn = block.attention, cast(FeedForward, block.ffn)
        found += [a.q, a.k, a.v, a.out, ffn.up, ffn.gate, ffn.down]
    return [x for x in found if x is not None]


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


def _attentions(model: Model) -> list[Attention]:
    return [m for m in model.modules() if isinstance(m, Attention)]


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    if type(norm) is not nn.RMSNorm or norm.eps is None:
        return norm(x)
    weight = cast(Tensor | None, norm.weight)
    y = None if weight is None else native.rms(x, weight, norm.eps)
    return F.rms_norm(x, norm.normalized_shape, weight, norm.eps) if y is None else y
