"""One look for every figure: two themes, colours that colour-blind readers can tell apart, small PNG files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from demo.extras import need

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8C8C8C")
"""Okabe and Ito's palette, without its yellow and black, which vanish on one of the two themes."""

WEIGHTS = "cividis"
"""For what starts at zero."""
SIGNED = "PuOr_r"
"""For what has a sign: orange above zero, violet below."""


@dataclass(frozen=True)
class Theme:
    name: str
    ground: str
    ink: str
    soft: str

    def settings(self) -> dict[str, Any]:
        cycle = need("cycler").cycler(color=COLOURS)
        ink = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), self.ink)
        return {
            **ink,
            "figure.facecolor": self.ground,
            "axes.facecolor": self.ground,
            "savefig.facecolor": self.ground,
            "axes.edgecolor": self.soft,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 10,
            "axes.titlelocation": "left",
            "axes.labelsize": 9,
            "xtick.labelsize": 8,
            "ytick.labelsize": 8,
            "legend.fontsize": 8,
            "legend.frameon": False,
            "legend.labelcolor": self.ink,
            "axes.prop_cycle": cycle,
            "font.family": "DejaVu Sans",
            "lines.linewidth": 1.8,
        }


LIGHT = Theme("light", "#ffffff", "#1b1f24", "#8a929c")
DARK = Theme("dark", "#14171b", "#e6e8eb", "#7d8590")

Draw = Callable[[Any, Theme], None]
"""A figure is a function that draws on an empty matplotlib Figure."""


def save(path: Path, draw: Draw, size: tuple[float, float], theme: Theme = LIGHT, dpi: int = 110) -> Path:
    """The figure as a PNG with few colours, which keeps it small enough for a repository."""
    with need("matplotlib").rc_context(theme.settings()):
        figure = need("matplotlib.figure").Figure(figsize=size, dpi=dpi, layout="constrained")
        draw(figure, theme)
        figure.savefig(path, dpi=dpi, metadata={"Software": None})
    image = need("PIL.Image").open(path).convert("RGB").quantize(128, method=1, dither=0)
    image.save(path, optimize=True)
    return path


def picture(ax: Any, x: Tensor, *, cmap: str = WEIGHTS, low: float | None = 0.0, high: float | None = None, **more: Any) -> Any:
    """A matrix as an image, without ticks."""
    ax.set(xticks=[], yticks=[])
    for side in ax.spines.values():
        side.set_visible(False)
    return ax.imshow(x.detach().numpy(), cmap=cmap, vmin=low, vmax=high, interpolation="nearest", **more)


def bar(figure: Any, image: Any, axes: Any, label: str, theme: Theme) -> Any:
    """A slim colour bar beside some axes."""
    colours = figure.colorbar(image, ax=axes, shrink=0.8, aspect=30, pad=0.02)
    colours.set_label(label, fontsize=8)
    colours.ax.tick_params(labelsize=7, color=theme.soft)
    colours.outline.set_visible(False)
    return colours
