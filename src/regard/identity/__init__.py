"""A persistent identity for a language model: observe, imprint, live, sleep; saved, forked, compared, rolled back.

    from regard.identity import Identity, Rule, consolidate, generate, imprint, observe

    mara = Identity.new(model)
    mara = imprint(mara, observe(model, chat, tokenizer, source="monday"), Rule())
    print(generate(model, prompt, tokenizer=tokenizer, identity=mara).text)

Every write gives a new identity and leaves the old one as it was.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ..errors import needs_extra

with needs_extra("identity"):
    import numpy as numpy
    import safetensors as safetensors

if TYPE_CHECKING:
    from .body import base_of
    from .energies import ImprintEnergy, imprint_energy
    from .episodes import Episode
    from .experience import Experience, observe
    from .hf.inject import Injected, inject
    from .person import Person
    from .read.recall import recall
    from .scoring import surprisal
    from .sleep.acting import ActingRule, chosen_by_expected_surprise, expected_surprise
    from .sleep.consolidate import Slept, consolidate
    from .sleep.rule import SleepRule
    from .speaking import generate, living, stream
    from .state import Base, Identity, Imprints, Life, Recollection, SelfState, TraceState
    from .store import Event, IdentityStore
    from .trace_directions import Direction, Directions, directions
    from .write.rule import Rule, imprint
    from .write.self_state import SelfRule
    from .write.trace import TraceRule

_PARTS = {
    "body": ("base_of",),
    "energies": ("ImprintEnergy", "imprint_energy"),
    "episodes": ("Episode",),
    "experience": ("Experience", "observe"),
    "hf.inject": ("Injected", "inject"),
    "person": ("Person",),
    "read.recall": ("recall",),
    "speaking": ("generate", "living", "stream"),
    "sleep.acting": ("ActingRule", "chosen_by_expected_surprise", "expected_surprise"),
    "sleep.consolidate": ("Slept", "consolidate"),
    "sleep.rule": ("SleepRule",),
    "state": ("Base", "Identity", "Imprints", "Life", "Recollection", "SelfState", "TraceState"),
    "store": ("Event", "IdentityStore"),
    "scoring": ("surprisal",),
    "trace_directions": ("Direction", "Directions", "directions"),
    "write.rule": ("Rule", "imprint"),
    "write.self_state": ("SelfRule",),
    "write.trace": ("TraceRule",),
}
_WHERE = {name: module for module, names in _PARTS.items() for name in names}
__all__ = [
    "ActingRule", "Base", "Direction", "Directions", "Episode", "Event", "Experience", "Identity", "IdentityStore", "ImprintEnergy",
    "Imprints", "Injected", "Life", "Person", "Recollection", "Rule", "SelfRule", "SelfState", "SleepRule", "Slept", "TraceRule",
    "TraceState", "base_of", "chosen_by_expected_surprise", "consolidate", "directions", "expected_surprise", "generate",
    "imprint", "imprint_energy", "inject", "living", "observe", "recall", "stream", "surprisal",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Names are found when they are asked for: a store is opened without waiting for models."""
    if name not in _WHERE:
        raise AttributeError(f"module 'regard.identity' has no attribute {name!r}")
    if name == "Identity":
        # Whoever knows models, so that Identity.new takes one.
        importlib.import_module(".body", __name__)
    return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
