"""A Hugging Face decoder as a body: everything about it is found by running two tokens through it, and refused if it does not fit."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from threading import get_ident

import torch
from torch import Tensor, nn

from ...errors import CombinationError
from ...models.families import FAMILIES
from ..read.body import Body, Heads, fingerprint
from ..read.layer import LayerRead
from ..state import Base
from .hooks import reading
from .interface import InterfaceCall
from .probe import HeadLayout, catches, expect_hub, layers_of, out_weight, probe, projections, value_weight

Turn = Callable[[Tensor, Tensor], Tensor]
"""x (B, H, N, D) at positions (B or 1, N)."""


class HubBody(Body):
    """Any decoder of transformers that calls the attention interface in every layer, and whose projections we know."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.hub = model, expect_hub(model)
        if self.hub.config.is_encoder_decoder or getattr(self.hub.config, "add_cross_attention", False):
            raise CombinationError(f"a {type(model).__name__} reads two texts; an identity needs a decoder of one text")
        config = self.hub.config.get_text_config()
        self.layout = HeadLayout.of(config)
        table = next((m for n, m in model.named_modules() if n.rpartition(".")[2] in ("wpe", "embed_positions")), None)
        self.has_places = isinstance(table, nn.Embedding)
        self.context = getattr(config, "max_position_embeddings", None)
        caught: dict[tuple[nn.Module, str], Tensor] = {}
        calls, out, hidden = self._probed(caught)
        self.layers = [c.module for c in calls]
        if len(set(self.layers)) != len(self.layers):
            raise CombinationError(f"a {type(model).__name__} shares attention between layers; they would share what they read")
        self._check_causal(calls)
        self._check_head(out, hidden)
        self.scales = [c.scale for c in calls]
        self.layout = replace(self.layout, sideways=frozenset(key for c in calls for key in _straighten(c, caught)))
        self.turns = {c.module: self._turn_of(i, c, caught) for i, c in enumerate(calls)}
        shapes = {(c.k.shape[1], c.q.shape[-1], c.v.shape[-1]) for c in calls}
        G, D, E = next(iter(shapes))
        if len(shapes) > 1 or D != E:
            raise CombinationError(f"the layers of a {type(model).__name__} differ in heads and widths: {sorted(shapes)}")
        weights = [self.hub.get_input_embeddings().weight, *(value_weight(layer, self.layout) for layer in self.layers)]
        kind, name = str(config.model_type), str(getattr(self.hub.config, "_name_or_path", "") or "")
        # By the family's name, so that our own model of the same weights has the same base.
        family = next((own for own, f in FAMILIES.items() if f.converter and kind in f.converter.model_types), kind)
        self.base = Base(fingerprint(weights), len(calls), G, D, family=family, name=name)

    def _probed(self, caught: dict[tuple[nn.Module, str], Tensor]) -> tuple[list[InterfaceCall], object, list[Tensor]]:
        """The probe, with what every layer projected on the way and what came to the head."""
        hidden: list[Tensor] = []
        head = self.hub.get_output_embeddings()
        with ExitStack() as hooks:
            for module in self.model.modules():
                if projections(module) is not None:
                    for handle in catches(module, self.layout, lambda m, n, x: caught.__setitem__((m, n), x)):
                        hooks.callback(handle.remove)
            if head is not None:
                hooks.callback(head.register_forward_pre_hook(lambda m, args: hidden.append(args[0])).remove)
            calls, out = probe(self.model)
        layers_of(self.model, calls, whole=True)
        return calls, out, hidden

    def _check_causal(self, calls: Sequence[InterfaceCall]) -> None:
        for c in calls:
            if c.allow is None or bool(c.allow[..., 0, 1].any()):
                raise CombinationError(f"a {type(self.model).__name__} lets tokens see the future; an identity needs a decoder")

    def _check_head(self, out: object, hidden: list[Tensor]) -> None:
        logits = getattr(out, "logits", None)
        if logits is None or len(hidden) != 1 or self.hub.get_output_embeddings() is None:
            raise CombinationError(
                f"a {type(self.model).__name__} gives no logits; load it with its head, as AutoModelForCausalLM does"
            )
        config = self.hub.config.get_text_config()
        self._cap = getattr(config, "final_logit_softcapping", None)
        self._times = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        self._whole = _near(self.head(hidden[0]), logits)

    def _turn_of(self, layer: int, call: InterfaceCall, caught: Mapping[tuple[nn.Module, str], Tensor]) -> Turn | None:
        """How this layer turns its heads, found by trying; refused where it does something else to them."""
        kind = type(call.module).__name__
        if not all((call.module, n) in caught for n in "qkv"):
            raise CombinationError(f"where q, k and v of a {kind} come from is not known: it has no q_proj, k_proj and v_proj")
        q, k, v = (caught[call.module, n] for n in "qkv")
        fits = all(a.shape == b.shape for a, b in ((q, call.q), (k, call.k), (v, call.v)))
        if fits and _near(v, call.v):
            if _near(q, call.q) and _near(k, call.k):
                return None
            at = torch.arange(2, device=q.device)[None]
            for turn in self._rotary(layer, call.module):
                # A way that is not this layer's may not even fit its shapes.
                with suppress(RuntimeError):
                    if _near(turn(q, at), call.q) and _near(turn(k, at), call.k):
                        return turn
        raise CombinationError(f"a {kind} does more to its heads than project and turn them; an identity cannot be read in it")

    def _rotary(self, layer: int, module: nn.Module) -> list[Turn]:
        """Ways in which this layer may turn its heads: the whole of them, or their first part."""
        rotary = getattr(self.trunk, "rotary_emb", None)
        apply = getattr(sys.modules.get(type(module).__module__), "apply_rotary_pos_emb", None)
        if rotary is None or apply is None:
            return []
        config = self.hub.config.get_text_config()
        kind = getattr(rotary, "rope_type", "default")
        if kind in ("dynamic", "longrope"):
            raise CombinationError(
                f"rope of type {kind!r} turns a key anew as the text grows; an identity needs keys turned once"
            )
        typed = "layer_type" in inspect.signature(rotary.forward).parameters
        more = {"layer_type": config.layer_types[layer]} if typed else {}
        wide = rotary(
            torch.zeros(1, 1, 1, self.layout.width, device=self.device), torch.zeros(1, 1, device=self.device), **more
        )
        turned = int(wide[0].shape[-1])

        def whole(x: Tensor, at: Tensor) -> Tensor:
            return apply(x, x, *rotary(x, at, **more))[0]

        def part(x: Tensor, at: Tensor) -> Tensor:
            return torch.cat([whole(x[..., :turned], at), x[..., turned:]], -1)

        return [whole] if turned == self.layout.width else [part, whole]

    @property
    def trunk(self) -> nn.Module:
        """The model without its head."""
        return self.hub.base_model

    def hidden(self, tokens: Tensor) -> Tensor:
        return self.trunk(tokens, use_cache=False).last_hidden_state

    def head(self, hidden: Tensor) -> Tensor:
        if not getattr(self, "_whole", True):
            raise CombinationError(f"a {type(self.model).__name__} does more than project to its logits; ask for `logits`")
        logits = self.hub.get_output_embeddings()(hidden) * self._times
        return logits if self._cap is None else (logits / self._cap).tanh() * self._cap

    def logits(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=False).logits

    def watched(self, tokens: Tensor) -> tuple[Tensor, list[Heads]]:
        seen: dict[tuple[nn.Module, str], Tensor] = {}
        watcher = get_ident()

        def see(module: nn.Module, name: str, x: Tensor) -> None:
            # Hooks are on the model for all threads, and another's text is not what is watched.
            if get_ident() == watcher:
                seen[module, name] = x[0]

        with ExitStack() as hooks:
            for layer in self.layers:
                for handle in catches(layer, self.layout, see):
                    hooks.callback(handle.remove)
            logits = self.logits(tokens[None])[0]
        return logits, [Heads(*(seen[layer, n] for n in "qkv")) for layer in self.layers]

    def turned(self, layer: int, x: Tensor) -> Tensor:
        turn = self.turns[self.layers[layer]]
        if turn is None:
            return x
        at = torch.arange(x.shape[-2], device=x.device)[None]
        return turn(x.reshape(1, -1, *x.shape[-2:]), at).reshape(x.shape)

    def out_weight(self, layer: int) -> Tensor:
        return out_weight(self.layers[layer])

    @contextmanager
    def read(self, reads: Sequence[LayerRead | None]) -> Generator[None]:
        """Inside, the model's implementation is ours; another thread that calls the model meanwhile finds it as it was."""
        with reading(self, reads):
            yield


def _straighten(call: InterfaceCall, caught: dict[tuple[nn.Module, str], Tensor]) -> list[tuple[nn.Module, str]]:
    """Turn over what a norm gave with its heads before its tokens; the names of those."""
    straightened: list[tuple[nn.Module, str]] = []
    for name, meant in (("q", call.q), ("k", call.k), ("v", call.v)):
        key = (call.module, name)
        x = caught.get(key)
        if x is None or x.transpose(1, 2).shape != meant.shape:
            continue
        if x.shape != meant.shape or _uneven(x.transpose(1, 2), meant) < _uneven(x, meant) - 1e-3:
            caught[key] = x.transpose(1, 2)
            straightened.append(key)
    return straightened


def _uneven(x: Tensor, turned: Tensor) -> float:
    """How much the lengths of heads change where they are turned: all by one factor, if these are the same heads."""
    factor = turned.float().norm(dim=-1) / x.float().norm(dim=-1).clamp_min(1e-12)
    return float((factor.max() - factor.min()) / factor.max().clamp_min(1e-12))


def _near(a: Tensor, b: Tensor) -> bool:
    tolerance = 1e-4 if b.dtype in (torch.float32, torch.float64) else 3e-2
    return a.shape == b.shape and bool(((a - b).abs() <= tolerance * (1 + b.abs().max())).all())


__all__ = ["HubBody"]
