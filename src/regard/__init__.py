"""regard: attention that can measure, choose and remember.

    out  = regard.attend(q, k, v, "cosine | entmax(1.5) | alibi", allow=regard.Causal())
    seen = regard.inspect(q, k, v, "gd(coherence=1)")     # accepted, energy, support, weights(rows=, heads=)
    print(regard.explain(q, k, v, "trace(gamma=0.3)", state=regard.State(trace=T)))

Shapes: q (B, H, Q, D), k (B, G, K, D), v (B, G, K, E), H a multiple of G; the legend stands in `regard.state`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import abstention, geometry, identity, models, nn, position, selection, study, train
    from .abstention import Calibration, calibrate
    from .attention.allow import All, Allow, Causal, Document, Mask, Padding, Prefix, Window
    from .attention.inspect import Attended, inspect
    from .attention.operator import attend, explain
    from .attention.plan import Plan
    from .attention.spec import Spec, parse
    from .errors import CheckpointError, CombinationError, NumericsError, RegardError, ShapeError, SpecError, StateError
    from .identity import (
        Identity,
        IdentityStore,
        Person,
        Rule,
        consolidate,
        generate,
        imprint,
        inject,
        living,
        observe,
        stream,
    )
    from .serve.view import View, view
    from .state import Additive, LowRank, Self, State

__version__ = "0.1.0"

__all__ = [
    "Additive", "All", "Allow", "Attended", "Calibration", "Causal", "CheckpointError", "CombinationError", "Document", "Identity",
    "IdentityStore", "LowRank", "Mask", "NumericsError", "Padding", "Person", "Plan", "Prefix", "RegardError", "Rule", "Self", "ShapeError",
    "Spec", "SpecError", "State", "StateError", "View", "Window", "abstention", "attend", "calibrate", "consolidate", "explain", "generate", "geometry", "identity",
    "imprint", "inject", "inspect", "living", "models", "nn", "observe", "parse", "position", "selection", "stream", "study",
    "train", "view",
]  # fmt: skip

_PARTS = {
    "abstention": ("Calibration", "calibrate"),
    "attention.allow": ("All", "Allow", "Causal", "Document", "Mask", "Padding", "Prefix", "Window"),
    "attention.inspect": ("Attended", "inspect"),
    "attention.operator": ("attend", "explain"),
    "attention.plan": ("Plan",),
    "attention.spec": ("Spec", "parse"),
    "errors": (
        "CheckpointError", "CombinationError", "NumericsError", "RegardError", "ShapeError", "SpecError", "StateError",
    ),
    "identity": (
        "Identity", "IdentityStore", "Person", "Rule", "consolidate", "generate", "imprint", "inject", "living", "observe", "stream",
    ),
    "serve.view": ("View", "view"),
    "state": ("Additive", "LowRank", "Self", "State"),
}  # fmt: skip
_WHERE = {name: module for module, names in _PARTS.items() for name in names}
_MODULES = ("abstention", "geometry", "identity", "models", "nn", "position", "selection", "study", "train")


def __getattr__(name: str) -> object:
    """Names are found when they are asked for: the command line prints its help without waiting for torch."""
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _WHERE:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
