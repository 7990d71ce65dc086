"""Every family of models, one row each: loaders, `regard train` and the tests read this table.

A new family is a model file, a row here, and a converter where Hugging Face has a form for it:

    FAMILIES["mine"] = Family(Mine, MineConfig, small={"width": 128, "depth": 4, "heads": 4})
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .base import Model
from .bert import Bert, BertConfig
from .convert import bert, gpt2, llama, t5
from .convert.converter import Converter
from .energy import EnergyConfig, EnergyTransformer
from .gpt2 import GPT2, GPT2Config
from .llama import Llama, LlamaConfig
from .ngpt import NGPT, NGPTConfig
from .recurrent import Recurrent, RecurrentConfig
from .routing import Routing, RoutingConfig
from .t5 import T5, T5Config


@dataclass(frozen=True)
class Family:
    model: type[Model]
    config: type[Any]
    converter: Converter | None = None
    """Its form at Hugging Face; without one it is saved under our own names."""
    small: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """A size that trains in minutes."""
    follows: Mapping[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    """Settings that, when not given, are a multiple of another one, so that changing that one is enough."""

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Fields for `config`: small, unless given otherwise."""
        values = {**self.small, **given}
        for setting, (other, times) in self.follows.items():
            if setting not in given and isinstance(values[other], int):
                values[setting] = values[other] * times
        return values


_SMALL = {"width": 128, "depth": 4, "heads": 4}
_GATED, _WIDE = {"hidden": ("width", 3)}, {"hidden": ("width", 4)}
FAMILIES: dict[str, Family] = {
    "gpt2": Family(GPT2, GPT2Config, gpt2.CONVERTER, _SMALL),
    "llama": Family(Llama, LlamaConfig, llama.CONVERTER, _SMALL, {**_GATED, "key_heads": ("heads", 1)}),
    "ngpt": Family(NGPT, NGPTConfig, None, {**_SMALL, "alpha": 0.25}, _GATED),
    "routing": Family(Routing, RoutingConfig, None, {**_SMALL, "experts": 4}, {"hidden": ("width", 2)}),
    "recurrent": Family(Recurrent, RecurrentConfig, None, {"width": 192, "depth": 2}),
    "bert": Family(Bert, BertConfig, bert.CONVERTER, {**_SMALL, "pools": False}, _WIDE),
    "t5": Family(T5, T5Config, t5.CONVERTER, {**_SMALL, "head_width": 32}, _WIDE),
    "energy": Family(EnergyTransformer, EnergyConfig, None, {**_SMALL, "depth": 1}, {"memories": ("width", 4)}),
}
"""By `Model.family`."""
