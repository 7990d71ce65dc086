"""A persistent identity for a language model: observe, imprint, live, sleep; saved, forked, compared, rolled back.

    from regard.identity import Identity, Rule, consolidate, imprint, living, observe

    mara = Identity.new(base_of(model))
    mara = imprint(mara, observe(model, chat, tokenizer, source="monday"), Rule())
    with living(model, mara):
        print(generate(model, prompt, tokenizer=tokenizer).text)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .body import base_of
    from .consolidate import SleepRule, Slept, consolidate
    from .identity import Base, Identity, Imprints, Life, SelfState, TraceState
    from .inject import Injected, inject
    from .living import living
    from .observe import Experience, observe
    from .self_state import SelfRule
    from .store import Event, IdentityStore
    from .trace import TraceRule
    from .write import Rule, imprint

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


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'regard.identity' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
