"""Figures of a few people: how all of them score; of two, where their selves went, what their traces look like, and what the controls say."""

from __future__ import annotations

from typing import Any

import torch

from demo.style import COLOURS, SIGNED, Theme, bar, picture
from demo.two import CONTROLS, WHOSE, Two

HUES = (COLOURS[0], COLOURS[4])
SHAPES = ("o", "s")
"""Blue circles are the first person's, orange squares the second's: nobody has to tell colours apart."""


def draw_crowd(figure: Any, theme: Theme, two: Two) -> None:
    """Left: nats of everybody's next conversation. Right: questions answered, over all of them."""
    left, right = figure.subplots(1, 2, width_ratios=[1.7, 1])
    marks = {"own": ("o", HUES[0]), "other": ("s", HUES[1]), "nobody": ("|", theme.ink), "context": ("D", theme.soft)}
    for y, person in enumerate(two.crowd):
        x = person.losses
        left.plot([x["nobody"], x["own"]], [y, y], color=HUES[0], linewidth=3, alpha=0.6, zorder=1)
        for name, (shape, colour) in marks.items():
            left.plot(x[name], y, shape, color=colour, markersize=11 if shape == "|" else 7, markeredgewidth=2 if shape == "|" else 1,
                      linestyle="none", label=WHOSE[name] if y == 0 else None, zorder=2)  # fmt: skip
    left.set_yticks(range(len(two.crowd)), [p.name + (" *" if p.chosen else "") for p in two.crowd])
    left.set_ylim(len(two.crowd) - 0.4, -0.6)
    left.margins(x=0.08)
    left.set_xlabel("nats per token of the next conversation (less is better; *: shown below)")
    left.set_title("Everybody's next conversation", fontweight="bold")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=8)
    total = sum(p.questions for p in two.crowd)
    for y, name in enumerate(WHOSE):
        count = sum(p.right[name] for p in two.crowd)
        right.barh(y, count, color=HUES[0] if name == "own" else theme.soft, height=0.6)
        right.annotate(
            f"{count} of {total}",
            (count, y),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=theme.ink,
        )
    right.set_yticks(range(len(WHOSE)), ["own", "another's", "nobody", "history in\ncontext"])
    right.set_ylim(len(WHOSE) - 0.4, -0.6)
    right.set_xlim(0, max(1, total))
    right.set_xlabel("questions answered")
    right.set_title("Greedy answers", fontweight="bold")


def draw_selves(figure: Any, theme: Theme, two: Two) -> None:
    """Left: the way of both selves in the plane that shows most of it. Right: |s| in every layer, after each moment."""
    left, *panels = figure.subplots(1, 3, width_ratios=[1.15, 1, 1])
    right = HUES[0] if two.paths[0][-1][0] > two.paths[1][-1][0] else HUES[1]
    for person, path, colour, shape in zip(two.people, two.paths, HUES, SHAPES, strict=True):
        xs, ys = zip(*path, strict=True)
        left.plot(xs[:-1], ys[:-1], "-", color=colour, marker=shape, markersize=5)
        left.plot(xs[-2:], ys[-2:], ":", color=colour)
        left.plot(xs[-1], ys[-1], shape, color=colour, markersize=9, markerfacecolor=theme.ground, markeredgewidth=2)
        # Each name and number on its own side: the two ways may run close together.
        side = 1 if colour == right else -1
        where = "left" if side > 0 else "right"
        left.annotate(
            person.name, (xs[-1], ys[-1]), xytext=(10 * side, 5), textcoords="offset points", ha=where, color=theme.ink,
            fontsize=10, fontweight="bold",
        )  # fmt: skip
        for n in range(1, len(path) - 1):
            left.annotate(
                str(n),
                (xs[n], ys[n]),
                xytext=(7 * side, -8),
                textcoords="offset points",
                fontsize=7.5,
                color=theme.ink,
                ha=where,
            )
    left.plot(0, 0, "*", color=theme.ink, markersize=11)
    left.annotate("nobody", (0, 0), xytext=(8, -4), textcoords="offset points", fontsize=8.5, color=theme.ink)
    left.margins(0.22)
    left.set_xticks([])
    left.set_yticks([])
    left.set_title(f"The way of the self\n({two.shown:.0%} of it lies in this plane)")
    top = 1.08 * max(x for p in two.people for row in p.selves for x in row) or 1.0
    for ax, person, colour in zip(panels, two.people, HUES, strict=True):
        moments = person.selves[1:]
        for n, row in enumerate(moments):
            slept = n == len(moments) - 1
            ax.plot(
                range(1, len(row) + 1), row, color=colour, linestyle=":" if slept else "-", linewidth=2.2 if slept else 1.6,
                alpha=1.0 if slept else 0.3 + 0.7 * (n + 1) / len(moments), label="after sleep" if slept else f"after {n + 1}",
            )  # fmt: skip
        ax.set(xlabel="layer", ylim=(0, top))
        ax.set_title(f"{person.name}: |s| in each layer")
        ax.legend(loc="upper left")


def draw_spectra(figure: Any, theme: Theme, two: Two) -> None:
    """Eigenvalues of the trace in every layer, the largest above; the two share one scale."""
    axes = figure.subplots(1, 2)
    largest = max((abs(x) for p in two.people for row in p.spectrum for x in row), default=0.0) or 1.0
    # Most of them are small: a root keeps their sign in sight.
    norm = {"low": -1.0, "high": 1.0}
    image = None
    for ax, person in zip(axes, two.people, strict=True):
        values = torch.tensor(person.spectrum).mT / largest
        image = picture(ax, values.abs().sqrt() * values.sign(), cmap=SIGNED, aspect="auto", **norm)
        layers = len(person.spectrum)
        ax.set_xticks([0, layers // 2, layers - 1], ["1", str(layers // 2 + 1), str(layers)])
        ax.set(xlabel="layer", ylabel="eigenvalues, largest above")
        ax.set_title(f"The spectrum of {person.name}'s trace")
    colours = bar(figure, image, axes, "eigenvalue", theme)
    marks = (-1.0, -0.25, 0.0, 0.25, 1.0)
    colours.set_ticks([abs(m) ** 0.5 * (1 if m > 0 else -1) for m in marks], labels=[f"{m * largest:.2g}" for m in marks])


def draw_controls(figure: Any, theme: Theme, two: Two) -> None:
    """Nats per token of each person's next conversation: the further left, the better it was foreseen."""
    axes = figure.subplots(1, 2, sharey=True)
    names = list(CONTROLS)
    for ax, person, colour, shape in zip(axes, two.people, HUES, SHAPES, strict=True):
        base = person.losses["nobody"]
        # One state that breaks the model would press all others together.
        edge = base + 1.25 * max(0.5, base - min(person.losses.values()))
        for y, name in enumerate(names):
            x, own = person.losses[name], name in ("own", "fast")
            tint = colour if own else theme.soft
            beyond, value = x > edge, x
            x = min(x, edge)
            ax.plot([base, x], [y, y], color=tint, linewidth=5 if own else 2.5, solid_capstyle="butt", zorder=2)
            ax.plot(x, y, ">" if beyond else shape, color=tint, markersize=8 if own else 6, zorder=3)
            side = -1 if x < base else 1
            ax.annotate(
                f"{value:.2f}", (x, y), xytext=(9 * side, 0), textcoords="offset points", va="center", fontsize=8, color=theme.ink,
                ha="left" if side > 0 else "right", fontweight="bold" if name == "own" else "normal",
            )  # fmt: skip
        ax.axvline(base, color=theme.soft, linestyle=":", linewidth=1.2, zorder=1)
        ax.set_yticks(range(len(names)), [CONTROLS[n] for n in names])
        ax.set_ylim(len(names) - 0.4, -0.6)
        ax.margins(x=0.22)
        ax.tick_params(axis="y", length=0)
        ax.set_xlabel("nats per token (dotted: the model alone; left of it is better)")
        ax.set_title(f"{person.name}'s next conversation", fontweight="bold")


__all__ = ["HUES", "draw_controls", "draw_crowd", "draw_selves", "draw_spectra"]
