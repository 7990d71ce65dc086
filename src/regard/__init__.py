"""regard: attention that can measure, choose and remember.

    out  = regard.attend(q, k, v, "cosine | entmax(1.5) | alibi", allow=regard.Causal())
    seen = regard.inspect(q, k, v, "gd(coherence=1)")     # accepted, energy, support, weights(rows=, heads=)
    print(regard.explain(q, k, v, "trace(gamma=0.3)", state=regard.State(trace=T)))

Shapes: q (B, H, Q, D), k (B, G, K, D), v (B, G, K, E), H a multiple of G; the legend stands in `regard.state`.
"""

from . import geometry, nn, position, selection
from .attention.allow import All, Allow, Causal, Document, Mask, Padding, Prefix, Window
from .attention.inspect import Attended, inspect
from .attention.operator import attend, explain
from .attention.plan import Plan
from .attention.spec import Spec, parse
from .errors import CheckpointError, CombinationError, NumericsError, RegardError, ShapeError, SpecError, StateError
from .state import Additive, LowRank, Self, State

__version__ = "0.1.0"

__all__ = [
    "Additive", "All", "Allow", "Attended", "Causal", "CheckpointError", "CombinationError", "Document", "LowRank", "Mask",
    "NumericsError", "Padding", "Plan", "Prefix", "RegardError", "Self", "ShapeError", "Spec", "SpecError", "State",
    "StateError", "Window", "attend", "explain", "geometry", "inspect", "nn", "parse", "position", "selection",
]  # fmt: skip
