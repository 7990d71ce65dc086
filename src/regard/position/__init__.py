"""Where a token stands. One row per position; the name is the word in a spec."""

from .alibi import Alibi
from .base import NoPosition, Position
from .relative import Relative
from .rope import Rope
from .sinusoidal import LearnedPosition, Sinusoidal

POSITIONS: dict[str, type[Position]] = {p.name: p for p in (Sinusoidal, LearnedPosition, Rope, Alibi, Relative)}
"""Every position by the word that names it in a spec."""

__all__ = ["POSITIONS", "Alibi", "LearnedPosition", "NoPosition", "Position", "Relative", "Rope", "Sinusoidal"]
