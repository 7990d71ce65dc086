"""How a row of scores becomes a choice. One row per selection; the name is the word in a spec."""

from .base import Given, Jump, Selection
from .energy import Energy
from .entmax import Entmax, Sparsemax, entmax_weights
from .gd import GD
from .hard import Hard
from .hopfield import Hopfield
from .linear import Linear
from .monotonic import Monotonic
from .selective import Selective
from .softmax import Softmax
from .topk import TopK
from .wrappers import Abstain, Pointer

_ROWS = (Softmax, Sparsemax, Entmax, TopK, Hard, Pointer, Monotonic, Hopfield, Energy, GD, Selective, Linear, Abstain)
SELECTIONS: dict[str, type[Selection]] = {s.name: s for s in _ROWS}
"""Every selection by the word that names it in a spec."""

__all__ = [
    "GD", "SELECTIONS", "Abstain", "Energy", "Entmax", "Given", "Hard", "Hopfield", "Jump", "Linear", "Monotonic", "Pointer",
    "Selection", "Selective", "Softmax", "Sparsemax", "TopK", "entmax_weights",
]  # fmt: skip
