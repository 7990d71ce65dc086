"""Putting our attention into a model of transformers, and out again: its configs, its hooks, and a guard against copies.

While something is in a model its configs name our key, and hooks on it know when a forward begins. All of it is undone when the
last who wanted it is gone and no forward is under way.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, ref

from torch import nn

from ...attention.spec import Spec
from ...errors import StateError
from .flight import LOCK, Handle, begin, end, hook, hook_ids, later
from .interface import FOR_ALL, KEY, NAMED, SPECS, Named, Reader, attention, mask, named_before

_WITHIN: WeakKeyDictionary[nn.Module, frozenset[int]] = WeakKeyDictionary()
"""The modules of each model that is hooked, by identity: what keeps a model may not be kept by what is put into it."""


def _installed(model: nn.Module) -> tuple[dict[nn.Module, Spec], dict[nn.Module, Reader], str]:
    """What is in the layers of a model now, for a forward that begins."""
    with LOCK:
        within = _WITHIN.get(model, frozenset())
        put = {m: specs[-1] for m, specs in SPECS.items() if specs and id(m) in within}
        everyone = {m: readers[-1] for m, readers in FOR_ALL.items() if readers}
    return put, everyone, ", ".join(f"{getattr(m, 'layer_idx', '')}: {s}" for m, s in put.items())


def install(
    model: nn.Module, layers: Iterable[nn.Module] = (), follow: Callable[[nn.Module], list[Handle]] | None = None
) -> Callable[[], None]:
    """Let the model's layers call us, with hooks that `follow` puts on them; what is given back undoes it, once no forward is
    under way."""
    from transformers import AttentionInterface, PreTrainedModel
    from transformers.masking_utils import AttentionMaskInterface

    with LOCK:
        AttentionInterface.register(KEY, attention)
        # Without a mask of the same name transformers makes none, and every token sees the future.
        AttentionMaskInterface.register(KEY, mask)
        configs = _configs(model)
        for config in configs:
            named = NAMED.setdefault(id(config), Named(config, config._attn_implementation))
            named.count += 1
            config._attn_implementation_internal = KEY
        undone = [lambda: later(partial(_give_back, configs))]
        if follow is not None:
            undone.append(hook("layer", layers, follow))
            undone.append(hook("model", (m for m in model.modules() if isinstance(m, PreTrainedModel)), _watch))

    def undo() -> None:
        with LOCK:
            for one in undone[::-1]:
                one()

    return undo


def _give_back(configs: Iterable[Any]) -> None:
    for config in configs:
        named = NAMED[id(config)]
        named.count -= 1
        if not named.count:
            del NAMED[id(config)]
            if config._attn_implementation_internal == KEY:
                config._attn_implementation_internal = named.before


def _watch(model: nn.Module) -> list[Handle]:
    """Hooks on a model of transformers, and a guard against copies that would silently lack what is in it."""
    _WITHIN[model] = frozenset(id(m) for m in model.modules())
    model.__dict__["__deepcopy__"] = partial(_copied, model)
    model.__dict__["__reduce_ex__"] = partial(_pickled, model)

    return [
        model.register_forward_pre_hook(_begin, prepend=True),
        model.register_forward_hook(_end, always_call=True),
        _Guards(ref(model)),
    ]


@dataclass(frozen=True)
class _Guards:
    """What `_watch` put on a model beside its hooks, removed as they are."""

    model: Callable[[], nn.Module | None]
    id: int = -1

    def remove(self) -> None:
        model = self.model()
        if model is not None:
            _WITHIN.pop(model, None)
            for name in _GUARDED:
                model.__dict__.pop(name, None)


_GUARDED = ("__deepcopy__", "__reduce_ex__")


def _begin(module: nn.Module, args: object) -> None:
    begin(module, _installed)
    for named in list(NAMED.values()):
        chosen = named.config._attn_implementation_internal
        if chosen != KEY:
            # Somebody called set_attn_implementation: that is for layers with nothing of ours, and for when we are gone.
            named.before, named.config._attn_implementation_internal = chosen, KEY


def _end(module: nn.Module, args: object, out: object) -> None:
    end(module)


def _copied(model: nn.Module, memo: dict[int, object]) -> nn.Module:
    """The copy of a model inside a `living` block is the model without the identity; with something injected it is refused."""
    with LOCK:
        if any(SPECS.get(m) or FOR_ALL.get(m) for m in model.modules()):
            raise StateError(
                f"something is injected into this {type(model).__name__}, and a copy would lack it: unwrap() first, copy, and "
                "inject into both"
            )
        guarded = [m for m in model.modules() if _GUARDED[0] in m.__dict__]
        saved = [(m, {n: m.__dict__.pop(n) for n in _GUARDED}) for m in guarded]
        try:
            copied = copy.deepcopy(model, memo)
        finally:
            for m, guards in saved:
                m.__dict__.update(guards)
        for m, twin in zip(model.modules(), copied.modules(), strict=True):
            for number in hook_ids(m):
                for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks",
                             "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):  # fmt: skip
                    getattr(twin, name).pop(number, None)
        for config, twin in zip(_configs(model), _configs(copied), strict=True):
            if twin._attn_implementation_internal == KEY:
                twin._attn_implementation_internal = named_before(config)
        return copied


def _pickled(model: nn.Module, protocol: object) -> NoReturn:
    raise StateError(
        f"something is in this {type(model).__name__} now that cannot be written to a file with it: unwrap(), or leave the "
        "`living` block, before you save; save_pretrained writes the weights alone at any time"
    )


def _configs(model: nn.Module) -> list[Any]:
    """Every config that a layer of this model may read its implementation from."""
    configs: dict[int, Any] = {}

    def add(config: Any) -> None:
        if config is None or id(config) in configs or not hasattr(config, "_attn_implementation_internal"):
            return
        configs[id(config)] = config
        for name in config.sub_configs:
            add(getattr(config, name, None))

    for module in model.modules():
        add(getattr(module, "config", None))
    return list(configs.values())


__all__ = ["install"]
