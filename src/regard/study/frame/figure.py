"""One look for the figures of all studies, and the numbers that a figure shows, as JSON beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import needs_extra
from .study import Record, Study
from .verdict import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
"""Okabe and Ito's, told apart by everyone; the first is for what the claim is about."""
MARKERS = "osv^D<>p"
"""For those who see no colours, in the same order."""
_LOOK = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "font.family": "DejaVu Sans",
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "figure.facecolor": "white",
}
SHOWN = 4096
"""Numbers of a picture (a heatmap) at most that are written beside it."""


def line_with_band(axes: Axes, x: Sequence[float], intervals: Sequence[Interval], label: str, index: int = 0) -> None:
    """Means as a line with markers, their 95% intervals as a band; `index` picks colour and marker."""
    colour = COLOURS[index % len(COLOURS)]
    axes.plot(x, [i.mean for i in intervals], color=colour, marker=MARKERS[index % len(MARKERS)], label=label)
    axes.fill_between(x, [i.low for i in intervals], [i.high for i in intervals], color=colour, alpha=0.18, lw=0)


def bars(axes: Axes, names: Sequence[str], intervals: Sequence[Interval], index: int = 0, label: str | None = None) -> None:
    """Horizontal bars with their 95% intervals, the first name on top."""
    spread = [[i.mean - i.low for i in intervals], [i.high - i.mean for i in intervals]]
    axes.barh(
        range(len(names)), [i.mean for i in intervals], xerr=spread, color=COLOURS[index % len(COLOURS)], label=label, capsize=2
    )
    axes.set_yticks(range(len(names)), list(names))
    axes.invert_yaxis()


def picture(study: Study, records: Sequence[Record], path: Path) -> list[dict[str, Any]]:
    """Draw a study's figure into a PNG file, and give back the numbers that it shows."""
    with needs_extra("figures"):
        import matplotlib as mpl
        from matplotlib.figure import Figure

    from ...files import replacing

    with mpl.rc_context(dict[Any, Any](_LOOK)):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        study.draw(records, figure)
        with replacing(path) as draft:
            # No date and no version inside: the same numbers give the same file.
            figure.savefig(draft, format="png", dpi=110, metadata={"Software": None})
    return shown(figure)


def shown(figure: Figure) -> list[dict[str, Any]]:
    """What a figure shows, one entry a panel: its lines, bars, points and pictures."""
    import numpy as np
    from matplotlib.collections import PathCollection
    from matplotlib.patches import Rectangle

    panels = list[dict[str, Any]]()
    for axes in figure.axes:
        panel: dict[str, Any] = {
            "title": axes.get_title(loc="left") or axes.get_title(),
            "x": axes.get_xlabel(),
            "y": axes.get_ylabel(),
        }
        panel["lines"] = [
            {"label": _label(x.get_label()), "x": _numbers(x.get_xdata()), "y": _numbers(x.get_ydata())}
            for x in axes.get_lines()
        ]
        panel["bars"] = [
            [round(float(v), 6) for v in (p.get_x(), p.get_y(), p.get_width(), p.get_height())]
            for p in axes.patches
            if isinstance(p, Rectangle)
        ]
        panel["points"] = [
            {"label": _label(c.get_label()), "xy": [_numbers(p) for p in np.asarray(c.get_offsets())]}
            for c in axes.collections
            if isinstance(c, PathCollection)
        ]
        arrays = [np.asarray(image.get_array()) for image in axes.get_images()]
        panel["pictures"] = [[_numbers(row) for row in a] for a in arrays if a.ndim == 2 and a.size <= SHOWN]
        panels.append({k: v for k, v in panel.items() if v})
    return panels


def _label(label: object) -> str:
    return "" if str(label).startswith("_") else str(label)


def _numbers(values: Any) -> list[Any]:
    return [round(float(v), 6) if isinstance(v, int | float) or hasattr(v, "__float__") else str(v) for v in values]
