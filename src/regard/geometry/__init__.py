"""How near a query and a key are. One row per geometry; the name is the word in a spec."""

from .additive import Additive
from .affect import Affect
from .base import Geometry, Lowered, Slot, Turn
from .cosine import Cosine
from .dot import Dot
from .euclidean import Euclidean, Rbf
from .polynomial import Polynomial
from .self_conditioned import SelfConditioned
from .trace import Trace

GEOMETRIES: dict[str, type[Geometry]] = {
    g.name: g for g in (Dot, Cosine, Euclidean, Trace, Additive, Rbf, Polynomial, SelfConditioned, Affect)
}
"""Every geometry by the word that names it in a spec."""

__all__ = [
    "GEOMETRIES", "Additive", "Affect", "Cosine", "Dot", "Euclidean", "Geometry", "Lowered", "Polynomial", "Rbf",
    "SelfConditioned", "Slot", "Trace", "Turn",
]  # fmt: skip
