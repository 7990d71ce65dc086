"""A model made ready to decode: the same numbers, laid out so that a step reads every weight once and at full speed.

    decoder = prepare(model)              # or prepare(model, "int8")
    logits, caches = decoder(tokens, caches)

q, k and v are one product, and so are gate and up. Attention is still `Attention.meet`: any spec decodes this way. A family
whose blocks are not known here runs through its own forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.allow import Allow, Causal, Window
from ..errors import CombinationError, ShapeError, SpecError
from ..nn import Attention, Cache
from ..position import Rope
from ..selection import Energy
from ..state import State
from . import native
from .base import Model, States, per_layer
from .blocks import Block, FeedForward
from .gpt2 import GPT2
from .layouts import Float, Int8, Product
from .llama import Llama

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
        bend = a.bend
        if bend is not None:
            met = bend.step(a, flat, batch, cache, rule) if x.shape[0] == batch and native.serves(flat) else None
            if met is not None:
                return self.rest(x, met[0]), met[1]
            q, k, v = flat.view(batch, -1, H + 2 * G, D).transpose(1, 2).split([H, G, G], dim=1)
            heads, cache = bend.meet(a, q, k, v, cache, rule)
            return self.rest(x, heads), cache
        at = len(cache)
        turns = cast(Rope, a.spec.position) if a.turns_early else None
        if turns is not None and turns.layout == "half" and x.shape[0] == batch and native.serves(flat):
            native.turn(flat, *turns.angles(flat.view(batch, -1, D), at, at + 1), H + G, D)
            turns = None
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
            wide = self.ffn.act(wide)
        elif self.ffn.act is F.silu and native.serves(wide):
            wide = native.swiglu(wide)
        else:
            gate, up = wide.chunk(2, dim=-1)
            wide = self.ffn.act(gate) * up
        return self.down(wide, onto=x)


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
        self.known = isinstance(model, Llama | GPT2)
        self.depth = model.cache_count
        if not self.known:
            if weights != "float32":
                raise CombinationError(
                    f"a {type(model).__name__} decodes through its own forward, which has no {weights} weights"
                )
            return
        known = cast(Llama | GPT2, model)
        layout = Int8 if weights == "int8" else Float
        self.layers = [_layer(cast(Block, b), layout) for b in known.blocks]
        self.head = layout([known.head])
        self.products: list[Float | Int8] = [self.head]
        for x in self.layers:
            self.products += cast(list[Float | Int8], [x.qkv, x.out, x.into, x.down])

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
            found = self.model(tokens, allow=allow, caches=caches, states=states)
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


def prepare(model: Model, weights: Weights = "float32") -> Decoder:
    """The decoder of a model, made once: kept until the model is gone or its weights have changed."""
    versions = tuple((p.data_ptr(), p._version) for p in model.parameters())
    kept = _KEPT.setdefault(model, {})
    if weights not in kept or kept[weights][0] != versions:
        kept[weights] = versions, Decoder(model, weights)
    return kept[weights][1]


_KEPT: WeakKeyDictionary[Model, dict[str, tuple[tuple[tuple[int, int], ...], Decoder]]] = WeakKeyDictionary()


def _layer(block: Block, layout: type[Float] | type[Int8]) -> Layer:
    a, ffn = block.attention, cast(FeedForward, block.ffn)
    assert a.v is not None
    assert a.out is not None
    into = [ffn.up] if ffn.gate is None else [ffn.gate, ffn.up]
    return Layer(
        a, (block.norm_1, block.norm_2), layout([a.q, a.k, a.v]), layout([a.out]), layout(into), layout([ffn.down]), ffn
    )


def _attentions(model: Model) -> list[Attention]:
    return [m for m in model.modules() if isinstance(m, Attention)]


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    if not isinstance(norm, nn.RMSNorm) or norm.eps is None:
        return norm(x)
    if norm.weight.dtype == torch.float32 and x.is_contiguous() and native.serves(x):
        return native.rms(x, norm.weight, norm.eps)
    return F.rms_norm(x, norm.normalized_shape, norm.weight, norm.eps)
