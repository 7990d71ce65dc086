"""A persistent identity for a language model: observe, imprint, live, sleep; saved, forked, compared, rolled back.

    from regard.identity import Identity, Rule, consolidate, imprint, living, observe

    mara = Identity.new(base_of(model))
    mara = imprint(mara, observe(model, chat, tokenizer, source="monday"), Rule())
    with living(model, mara):
        print(generate(model, prompt, tokenizer=tokenizer).text)

Every write gives a new identity and leaves the old one as it was.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .body import base_of
    from .experience import Experience, observe
    from .hf.inject import Injected, inject
    from .living import living
    from .sleep.consolidate import SleepRule, Slept, consolidate
    from .state import Base, Identity, Imprints, Life, SelfState, TraceState
    from .store import Event, IdentityStore
    from .write.rule import Rule, imprint
    from .write.self_state import SelfRule
    from .write.trace import TraceRule

_PARTS = {
    "body": ("base_of",),
    "consolidate": ("SleepRule", "Slept", "consolidate"),
    "identity": ("Base", "Identity", "Imprints", "Life", "SelfState", "TraceState"),
    "inject": ("Injected", "inject"),
    "living": ("living",),
    "observe": ("Experience", "observe"),
    "self_state": ("SelfRule",),
    "store": ("Event", "IdentityStore"),
    "trace": ("TraceRule",),
    "write": ("Rule", "imprint"),
}
_WHERE = {name: module for module, names in _PARTS.items() for name in names}
__all__ = [
    "Base", "Event", "Experience", "Identity", "IdentityStore", "Imprints", "Injected", "Life", "Rule", "SelfRule", "SelfState",
    "SleepRule", "Slept", "TraceRule", "TraceState", "base_of", "consolidate", "imprint", "inject", "living", "observe",
]  # fmt: skip


class _Package(ModuleType):
    """Names are found when they are asked for, and a function comes before the module that it lives in."""

    def __getattribute__(self, name: str) -> object:
        where = ModuleType.__getattribute__(self, "__dict__").get("_WHERE", {}).get(name)
        if where is None:
            return ModuleType.__getattribute__(self, name)
        return getattr(importlib.import_module(f"{__name__}.{where}"), name)


sys.modules[__name__].__class__ = _Package
