"""Hugging Face's attention interface, as far as we use it: one key for the function and for its mask, put in and taken out.

A config names the implementation that a model's layers call, so while ours is named there, every layer of every model with
that config calls us. A layer that nothing was put into is answered by the implementation that was named before, with the
mask which that one would have been given: its logits stay what they were, bit for bit.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...attention.inspect import inspect
from ...attention.operator import attend
from ...attention.spec import Spec
from ...errors import CombinationError
from ...geometry import Dot
from ...position import NoPosition
from ...scope import Scope
from ...selection import Softmax
from .flight import flight, is_unhooked_forward, note_mask

KEY = "regard"
"""transformers looks for 'sdpa', 'flash', 'flex' and 'paged' inside such names, so none of them may be in ours."""
CHOOSES = ("indices", "block_indices")
"""What some models choose keys with beside the mask; a function that lets these fall would attend to other keys."""

Result = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, eq=False)
class InterfaceCall:
    """One call of a layer: heads as the model made them, and whatever else it asks of its attention."""

    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    allow: Tensor | None
    """True where a query may look, (B, 1 or H, Q, K)."""
    bias: Tensor | None
    """Added to the scores: a relative bias, or what a mask of numbers says beside yes and no."""
    scale: float
    softcap: float | None
    sinks: Tensor | None
    dropout: float
    weights: bool
    """Whether somebody asked for the weights."""
    width: int
    """Of the model's own heads; whatever an identity says of them stands in further columns."""

    @property
    def asks(self) -> list[str]:
        """What only an explicit softmax can honour."""
        settings = {
            "softcap": self.softcap,
            "sinks": self.sinks,
            "a bias on its scores": self.bias,
            "dropout on its weights": self.dropout or None,
        }
        return [name for name, x in settings.items() if x is not None]

    def answered(self, spec: Spec | None = None) -> Result:
        """Out (B, Q, H, E), and the weights if they were asked for, by a spec at the layer's own scale."""
        q, k, v = self.q, self.k, self.v
        spec = self._fitted(spec)
        if self.asks or (self.weights and spec.selection == Softmax() and isinstance(spec.geometry, Dot)):
            return self._explicit(spec)
        allow = None if self.allow is None or bool(self.allow.all()) else self.allow
        if self.weights:
            seen = inspect(q, k, v, spec, allow=allow)
            return seen.output.transpose(1, 2).contiguous(), seen.weights()
        return attend(q, k, v, spec, allow=allow).transpose(1, 2).contiguous(), None

    def _fitted(self, spec: Spec | None) -> Spec:
        if spec is None:
            return Spec(Dot(scale=self.scale), Softmax(), NoPosition())
        if isinstance(spec.geometry, Dot):
            scale = self.scale if spec.geometry.scale is None else spec.geometry.scale
            return Spec(Dot(scale=scale), spec.selection, spec.position)
        usual = self.width**-0.5
        if abs(self.scale - usual) > 1e-6 * usual:
            raise CombinationError(
                f"{type(self.module).__name__} scales its scores by {self.scale:g} rather than by 1/√{self.width}, which "
                f"{spec.geometry.name} has no place for; use dot, or leave this layer out with layers="
            )
        return spec

    def _explicit(self, spec: Spec) -> Result:
        if not isinstance(spec.geometry, Dot) or spec.selection != Softmax():
            raise CombinationError(
                f"{type(self.module).__name__} asks for {' and '.join(self.asks)}, which {spec} has no place for; "
                "use 'dot | softmax' in this layer, or leave it out with layers="
            )
        D, scale = self.width, spec.geometry.scale_for(self.width)
        repeat = self.q.shape[1] // self.k.shape[1]
        k, v = (x.repeat_interleave(repeat, 1) if repeat > 1 else x for x in (self.k, self.v))
        scores = (self.q[..., :D] @ k[..., :D].mT) * scale
        if self.softcap is not None:
            # The cap is the model's, on its own scores; what an identity adds comes after it.
            scores = (scores / self.softcap).tanh() * self.softcap
        if self.q.shape[-1] > D:
            scores = scores + (self.q[..., D:] @ k[..., D:].mT) * scale
        if self.bias is not None:
            scores = scores + self.bias
        scores, alive = scores.float(), None
        if self.allow is not None:
            # A row with nothing allowed looks everywhere and is emptied afterwards: no NaN, in its gradient neither.
            alive = self.allow.any(-1, keepdim=True)
            scores = scores.masked_fill(~(self.allow | ~alive), float("-inf"))
        if self.sinks is not None:
            sink = self.sinks.reshape(1, -1, 1, 1).float().expand(*scores.shape[:3], 1)
            weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        weights = (weights if alive is None else weights.masked_fill(~alive, 0)).to(v.dtype)
        weights = nn.functional.dropout(weights, self.dropout, training=self.dropout > 0)
        return (weights @ v).transpose(1, 2).contiguous(), weights


class Reader(Protocol):
    """What answers the calls of layers that read an identity."""

    def reads(self, module: nn.Module) -> bool: ...
    def answer(self, call: InterfaceCall, spec: Spec | None) -> Result: ...


SPECS: WeakKeyDictionary[nn.Module, list[Spec]] = WeakKeyDictionary()
"""What was put into each layer; the last of them counts."""
HERE: Scope[Reader] = Scope("here")
"""What a layer reads inside a `living` block alone; None keeps out what was injected for all threads."""
FOR_ALL: dict[nn.Module, list[Reader]] = {}
"""What a layer reads in every thread; the last of them counts."""
RECORDED: ContextVar[list[InterfaceCall] | None] = ContextVar("recorded", default=None)
"""Where the calls of this thread or task are recorded while a probe runs."""


_ABSENT = object()


def reader_of(module: nn.Module) -> Reader | None:
    """What a layer reads, for the forward that this thread is in."""
    if _began_before():
        return None
    here = HERE.get(module, _ABSENT)
    if here is not _ABSENT:
        return here
    now = flight()
    if now is not None:
        return now.everyone.get(module)
    everyone = FOR_ALL.get(module)
    return everyone[-1] if everyone else None


def spec_of(module: nn.Module) -> Spec | None:
    """What was put into a layer, for the forward that this thread is in."""
    now = flight()
    if now is not None:
        return now.put.get(module)
    put = SPECS.get(module)
    return put[-1] if put and not _began_before() else None


def _began_before() -> bool:
    """True inside a forward that began before anything was put in; a probe puts nothing in, and asks for what is there."""
    return flight() is None and RECORDED.get() is None and is_unhooked_forward()


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> Result:
    """What transformers calls under our key."""
    put, reader, recorded = spec_of(module), reader_of(module), RECORDED.get()
    reader = reader if reader is not None and reader.reads(module) else None
    call = None
    if put is not None or reader is not None or recorded is not None:
        call = _call(module, query, key, value, attention_mask, scaling, dropout, kwargs)
    if call is not None and recorded is not None:
        recorded.append(call)
    if call is None or (put is None and reader is None):
        return _as_before(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    chosen = [name for name in CHOOSES if kwargs.get(name) is not None]
    if chosen:
        raise CombinationError(f"{type(module).__name__} chooses keys by {chosen[0]}=, which no mechanism here reads")
    return reader.answer(call, put) if reader is not None else call.answered(put)


def _call(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> InterfaceCall:
    Q, K = q.shape[2], k.shape[2]
    allow, bias = mask, kwargs.get("position_bias")
    if mask is None:
        # The convention of torch's own call, for a model that made no mask although ours was there to be asked.
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", False) if causal is None else causal
        if causal and Q > 1:
            allow = torch.ones(Q, K, dtype=torch.bool, device=q.device).tril(K - Q)[None, None]
    else:
        mask = mask if mask.shape[-1] == K else mask[..., :K]
        allow = mask
        if mask.is_floating_point():
            allow = mask > torch.finfo(mask.dtype).min / 2
            said = mask.masked_fill(~allow, 0)
            if bool(said.any()):
                bias = said if bias is None else bias + said
        elif mask.dtype != torch.bool:
            allow = mask != 0
    return InterfaceCall(
        module,
        q,
        k,
        v,
        allow,
        bias,
        q.shape[-1] ** -0.5 if scaling is None else float(scaling),
        kwargs.get("softcap"),
        kwargs.get("s_aux"),
        float(dropout),
        _wanted(module, kwargs),
        q.shape[-1],
    )


def _wanted(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether weights are asked for: by a keyword, by the config, or by the hooks that collect them, which say so to no one."""
    asked = kwargs.get("output_attentions")
    if asked is None:
        asked = getattr(getattr(module, "config", None), "output_attentions", False)
    if asked:
        return True
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    collected = None if collector is None else collector.get()
    return bool(collected) and any("attentions" in name for name in collected)


def mask(**kwargs: Any) -> Tensor:
    """The mask as truth values, always made: None would leave causality to whoever reads it."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    always: dict[str, Any] = {**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    made = sdpa_mask(**always)
    assert isinstance(made, Tensor)
    before = named_before(kwargs.get("config"))
    formatter = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.get(before)  # pyright: ignore
    note_mask()
    if formatter is not None:
        vars(made)["regard_before"] = cache(partial(formatter, **kwargs))
    return made


def _as_before(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Result:
    """What the layer would have got without us."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = named_before(getattr(module, "config", None))
    plain = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", _plainly)
    function = plain if before in (None, "eager", KEY) else ALL_ATTENTION_FUNCTIONS.get_interface(before, plain)
    theirs = getattr(mask, "regard_before", None)
    if theirs is not None:
        mask = theirs()
    elif mask is not None and mask.dtype == torch.bool and function is plain and plain is not _plainly:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
    return function(module, q, k, v, mask, **kwargs)


def _plainly(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    **kwargs: Any,
) -> Result:
    return _call(module, q, k, v, mask, scaling, dropout, kwargs).answered()


@dataclass
class Named:
    config: Any
    before: str | None
    count: int = 0


NAMED: dict[int, Named] = {}
"""Configs that name us now, by identity (they have no hash), and how many want it to stay so."""


def named_before(config: object) -> str | None:
    named = NAMED.get(id(config))
    return None if named is None else named.before


__all__ = [
    "FOR_ALL",
    "HERE",
    "KEY",
    "NAMED",
    "SPECS",
    "InterfaceCall",
    "Named",
    "Reader",
    "Result",
    "attention",
    "mask",
    "named_before",
    "reader_of",
    "spec_of",
]  # fmt: skip
