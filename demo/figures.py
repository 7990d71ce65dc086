"""The figures of the tour, used by the demo page and by the docs alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from demo.extras import need
from demo.map import Place
from demo.scene import EIGHT, TOPICS, Scene, look
from demo.style import COLOURS, WEIGHTS, Theme, bar, picture
from regard.attention.inspect import inspect
from regard.attention.operator import attend
from regard.selection.gd import coherence_point, coherent_length, energy_between


def draw_eight(figure: Any, theme: Theme, s: Scene) -> None:
    """Weights of the same q and k under eight mechanisms. Refused rows are crossed out."""
    axes = figure.subplots(2, 4)
    norm = need("matplotlib.colors").PowerNorm(0.5, 0, 1)
    image = None
    for n, (ax, view) in enumerate(zip(axes.flat, EIGHT, strict=True)):
        seen = look(view, s)
        weights = seen.weights(heads=[0])[0, 0]
        image = picture(ax, weights.masked_fill(torch.triu(torch.ones_like(weights), 1) > 0, float("nan")), low=None, norm=norm)
        mark_refused(ax, seen.accepted[0, 0], theme)
        ax.set_title(view.title, fontweight="bold", pad=16)
        ax.text(0, 1.02, view.remark, transform=ax.transAxes, fontsize=8.5, color=theme.ink, va="bottom")
        at, names = range(len(TOPICS)), list(TOPICS)
        ax.set_xticks(at, names, fontsize=5.5)
        ax.set_yticks(at, names, fontsize=5.5)
        ax.tick_params(length=0, pad=1.5)
        if n % 4 == 0:
            ax.set_ylabel("query")
        if n >= 4:
            ax.set_xlabel("key")
    bar(figure, image, axes, "weight", theme)


def mark_refused(ax: Any, accepted: Tensor, theme: Theme) -> None:
    for row in (~accepted).nonzero().flatten().tolist():
        ax.plot([-0.5, row + 0.5], [row, row], color=COLOURS[4], linewidth=1.2)


def draw_landscape(figure: Any, theme: Theme) -> None:
    """Left: the energy between a query and a key, and where it splits in two. Right: a descent among stored patterns."""
    left, right = figure.subplots(1, 2, width_ratios=[1, 1])
    draw_valleys(left, theme)
    draw_descent(right, theme)


def draw_valleys(ax: Any, theme: Theme, alpha: float = 0.5) -> None:
    x = torch.linspace(-0.6, 3.8, 400, dtype=torch.float64)
    for colour, L in zip(COLOURS, (0.8, math.sqrt(2), 2.0, 3.0), strict=False):
        far = torch.tensor(L, dtype=torch.float64)
        phi = -torch.logaddexp(math.log(alpha) - x * x, math.log1p(-alpha) - (far - x) ** 2)
        name = "√2" if math.sqrt(2) == L else f"{L:g}"
        ax.plot(x, phi, color=colour)
        # Above the middle of the curve; below it where the next curve would be in the way.
        height = float(-torch.logaddexp(math.log(alpha) - far**2 / 4, math.log1p(-alpha) - far**2 / 4))
        shift = (0, -14) if L < 1 else (0, 5)
        ax.annotate(
            f"L = {name}", (L / 2, height), xytext=shift, textcoords="offset points", ha="center", color=colour, fontsize=8.5
        )
        ax.plot(float(coherence_point(far, alpha)), float(energy_between(far, alpha)), "o", color=colour, markersize=6)
    ax.set(xlabel="x, from the query (0) to the key (L)", ylabel="φ(x)", ylim=(-0.15, 2.6), xlim=(-0.6, 3.8))
    ax.set_title(
        f"Query and key cohere while there is one valley:\nL ≤ {coherent_length(alpha):.3f} at α = ½ (dots: coherence points)"
    )


def patterns() -> Tensor:
    """Seven stored patterns in the plane."""
    return torch.tensor([[1.0, 0.1], [0.6, 0.85], [-0.3, 0.95], [-1.0, 0.2], [-0.7, -0.75], [0.1, -1.0], [0.8, -0.6]])


def descent(starts: Tensor, stored: Tensor, beta: float, steps: int) -> tuple[Tensor, Tensor]:
    """States (steps + 1, N, 2) of Hopfield retrieval from each start, and their energies (steps + 1, N)."""
    k = stored[None, None]
    states = [starts]
    for n in range(1, steps + 1):
        states.append(attend(starts[None, None], k, k, f"hopfield(beta={beta}, steps={n})")[0, 0])
    energies = [_hopfield(x, stored, beta) for x in states]
    return torch.stack(states), torch.stack(energies)


def _hopfield(x: Tensor, stored: Tensor, beta: float) -> Tensor:
    """E(ξ) at ξ = x: with one step the state that is read out is the query itself."""
    energy = inspect(x[None, None], stored[None, None], stored[None, None], f"hopfield(beta={beta})").energy
    assert energy is not None
    return energy[0, 0]


def draw_descent(ax: Any, theme: Theme, beta: float = 8.0) -> None:
    stored = patterns()
    side = torch.linspace(-1.35, 1.35, 140)
    grid = torch.stack(torch.meshgrid(side, side, indexing="xy"), -1)
    energy = _hopfield(grid.flatten(0, 1), stored, beta).view(140, 140)
    ax.contourf(side, side, energy, levels=18, cmap=WEIGHTS)
    turn = torch.arange(12) * (2 * math.pi / 12) + 0.2
    starts = torch.cat([1.25 * torch.stack([turn.cos(), turn.sin()], -1), torch.tensor([[0.1, 0.1], [-0.1, -0.15]])])
    states, _ = descent(starts, stored, beta, 5)
    for path in states.unbind(1):
        ax.plot(path[:, 0], path[:, 1], "-o", color="#ffffff", markersize=2.2, linewidth=1)
    ax.plot(stored[:, 0], stored[:, 1], "*", color=COLOURS[4], markersize=12, markeredgecolor="white", markeredgewidth=0.6)
    ax.set(xticks=[], yticks=[], aspect="equal")
    ax.set_title(f"Hopfield retrieval, β = {beta:g}: five steps downhill\n(dark: low energy; stars: stored patterns)")


def draw_map(figure: Any, theme: Theme, places: Sequence[Place], trails: Sequence[Sequence[Place]]) -> None:
    """Blending to selection across, weak to strong consistency control upwards. Hollow: keeps less than half of what fits."""
    ax = figure.subplots()
    for colour, trail in zip(COLOURS, trails, strict=False):
        xs, ys = [p.effective for p in trail], [p.refusal for p in trail]
        ax.plot(xs, ys, "-", color=colour, alpha=0.45, linewidth=5, solid_capstyle="round", zorder=1)
        middle, shift, side = (1, (14, -18), "left") if colour == COLOURS[0] else (2, (-12, 4), "right")
        ax.annotate(
            trail[0].label,
            (xs[middle], ys[middle]),
            xytext=shift,
            textcoords="offset points",
            ha=side,
            color=colour,
            fontsize=8.5,
        )
    for p in places:
        fill = theme.ink if p.kept >= 0.5 else "none"
        ax.errorbar(p.effective, p.refusal, xerr=p.effective_sd, yerr=p.refusal_sd, fmt="none", ecolor=theme.soft, zorder=2)
        ax.plot(p.effective, p.refusal, "o", color=theme.ink, markerfacecolor=fill, markersize=6.5, zorder=3)
        dx, dy, where = p.nudge
        ax.annotate(
            p.label, (p.effective, p.refusal), xytext=(dx, dy), textcoords="offset points", ha=where, va="center", fontsize=8.5,
            zorder=4, arrowprops={"arrowstyle": "-", "color": theme.soft, "linewidth": 0.7} if abs(dx) > 20 or abs(dy) > 14 else None,
        )  # fmt: skip
    ax.axhline(0.5, color=theme.soft, linestyle=":", linewidth=1)
    ax.text(66, 0.515, "above: can refuse a whole row", ha="left", fontsize=8, color=theme.ink)
    ax.set_xscale("log", base=2)
    ax.set(xlim=(72, 0.8), ylim=(-0.02, 1.05))
    ax.set_xticks([64, 32, 16, 8, 4, 2, 1], ["64", "32", "16", "8", "4", "2", "1"])
    ax.set_xlabel("effective number of keys, of 64   (blending → selection)")
    ax.set_ylabel("weight kept off inconsistent keys   (weak → strong control)")
