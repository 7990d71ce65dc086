"""Pictures of the geometries: the score of every key in the plane for one query, where the plane is enough to see it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from demo.style import COLOURS, SIGNED, WEIGHTS, Draw, Theme
from regard.attention.inspect import inspect
from regard.attention.operator import attend
from regard.attention.spec import parse
from regard.geometry.affect import affected
from regard.state import Additive, Self, State

WIDE = (8.4, 3.0)
QUERY = torch.tensor([1.0, 0.6])
_SIDE = torch.linspace(-2.2, 2.2, 161)


def plane() -> Tensor:
    return torch.stack(torch.meshgrid(_SIDE, _SIDE, indexing="xy"), -1).flatten(0, 1)


def field(ax: Any, spec: str, title: str, state: State | None = None, query: Tensor = QUERY, signed: bool = True) -> None:
    """score(q, k) for every k in the plane, by the geometry's plain definition."""
    scores = parse(spec).geometry.scores(query[None, None, None], plane()[None, None], state or State()).view(161, 161)
    scores = scores if signed else scores.exp()
    top = float(scores.abs().max())
    colours = {"cmap": SIGNED, "vmin": -top, "vmax": top} if signed else {"cmap": WEIGHTS, "vmin": 0, "vmax": top}
    ax.contourf(_SIDE, _SIDE, scores, levels=24, **colours)
    ax.contour(
        _SIDE, _SIDE, scores, levels=10, colors="#00000055" if signed else "#ffffff55", linewidths=0.6, linestyles="solid"
    )
    ax.plot(*query, "o", color=COLOURS[4], markeredgecolor="white", markersize=8)
    ax.annotate(
        "q", query.tolist(), xytext=(6, 5), textcoords="offset points", fontweight="bold", color="black" if signed else "white"
    )
    ax.set(xticks=[], yticks=[], aspect="equal")
    ax.set_title(title)


def dot(figure: Any, theme: Theme) -> None:
    left, right = figure.subplots(1, 2)
    field(left, "dot", "q·k/√D over the plane of keys:\nlonger keys score more, without end")
    g = torch.Generator().manual_seed(0)
    widths = [4, 8, 16, 32, 64, 128, 256]
    for name, spec, colour in (("q·k/√D", "dot", COLOURS[0]), ("q·k", "dot(scale=1)", COLOURS[4])):
        found: list[float] = []
        for D in widths:
            q, k = torch.randn(1, 1, 256, D, generator=g), torch.randn(1, 1, 64, D, generator=g)
            found.append(float(inspect(q, k, k, spec).effective.mean()))
        right.plot(widths, found, "-o", color=colour, label=name, markersize=4)
    right.set_xscale("log", base=2)
    right.set(xlabel="D", ylabel="effective keys, of 64", ylim=(0, 64))
    right.set_xticks(widths, [str(w) for w in widths])
    right.set_title("Why √D: without it, wide heads\nbecome a hard choice")
    right.legend()


def cosine(figure: Any, theme: Theme) -> None:
    left, right = figure.subplots(1, 2)
    field(left, "cosine", "cos(q, k)/τ: only the angle counts")
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 1, 256, 64, generator=g), torch.randn(1, 1, 64, 64, generator=g)
    taus = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]
    for factor, colour in ((1, COLOURS[0]), (10, COLOURS[1])):
        cosines = [float(inspect(q, k * factor, k, f"cosine(temperature={t})").effective.mean()) for t in taus]
        name = "cosine" if factor == 1 else "cosine, keys × 10 (the same)"
        right.plot(
            taus,
            cosines,
            "-o" if factor == 1 else ":s",
            color=colour,
            markersize=4 if factor == 1 else 7,
            label=name,
            fillstyle="none",
        )
    for factor in (1, 10):
        level = float(inspect(q, k * factor, k, "dot").effective.mean())
        right.axhline(level, color=COLOURS[4], linewidth=1, linestyle="--")
        right.text(1.0, level + 1.2, f"dot, keys × {factor}", ha="right", fontsize=8, color=COLOURS[4])
    right.set_xscale("log")
    right.set(xlabel="temperature τ", ylabel="effective keys, of 64", ylim=(0, 68))
    right.set_title("Blind to length, so τ alone says how sharp")
    right.legend(loc="upper left")


def euclidean(figure: Any, theme: Theme) -> None:
    left, right = figure.subplots(1, 2)
    field(left, "euclidean", "−|q−k|²/√D: the best key is q itself")
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 1, 512, 16, generator=g), torch.randn(1, 1, 64, 16, generator=g)
    k[:, :, 0] *= 4
    for spec, colour in (("dot | hard", COLOURS[4]), ("euclidean | hard", COLOURS[0])):
        chosen = inspect(q, k, k, spec).weights().sum((0, 1, 2)).sort(descending=True).values
        first = float(inspect(q, k, k, spec).weights()[..., 0].mean())
        right.plot(chosen / 512, color=colour, label=f"{spec.split(' ')[0]}: {first:.0%} of queries choose the long key")
    right.set(xlabel="keys, most chosen first", ylabel="share of queries", ylim=(0, None))
    right.set_title("One key of 64 is four times too long:\na hub for dot, an outsider for distance")
    right.legend()


def trace(figure: Any, theme: Theme) -> None:
    axes = figure.subplots(1, 3)
    q, k = QUERY / QUERY.norm(), torch.tensor([-0.6, 1.0]) / torch.tensor([-0.6, 1.0]).norm()
    sigma, delta = k + q, k - q
    written = (
        ("k⊗q, as published:\na saddle, so far keys win", 0.4 * torch.outer(k, q)),
        ("σσᵀ/4, σ = k + q:\na metric, and it attracts", 0.4 * torch.outer(sigma, sigma) / 4),
        ("δδᵀ/4, δ = k − q:\na metric, and it repels", 0.4 * torch.outer(delta, delta) / 4),
    )
    for ax, (title, T) in zip(axes, written, strict=True):
        field(ax, "trace(base=none)", title, State(trace=T[None]), q)
        ax.plot(*k, "s", color=COLOURS[0], markeredgecolor="white", markersize=8)
        ax.annotate("k", k.tolist(), xytext=(6, 5), textcoords="offset points", fontweight="bold", color="black")


def additive(figure: Any, theme: Theme) -> None:
    axes = figure.subplots(1, 3)
    for ax, hidden in zip(axes, (1, 3, 16), strict=True):
        g = torch.Generator().manual_seed(5)
        w, w_q, w_k = (torch.randn(*s, generator=g) for s in ((hidden,), (hidden, 2), (hidden, 2)))
        field(
            ax,
            "additive",
            f"w·tanh(W_q q + W_k k), random,\n{hidden} hidden unit{'s' if hidden > 1 else ''}",
            State(additive=Additive(w, 1.5 * w_q, 1.5 * w_k)),
        )


def rbf(figure: Any, theme: Theme) -> None:
    axes = figure.subplots(1, 3)
    for ax, gamma in zip(axes, (0.2, 1.0, 5.0), strict=True):
        field(ax, f"rbf(gamma={gamma})", f"κ = exp(−{gamma:g}|q−k|²)", signed=False)


def polynomial(figure: Any, theme: Theme) -> None:
    axes = figure.subplots(1, 3)
    for ax, (spec, name) in zip(
        axes,
        (
            ("polynomial(degree=2, constant=0)", "(q·k/√D)²: opposite keys\ncount as much as equal ones"),
            ("polynomial(degree=2)", "(q·k/√D + 1)²: the constant\ntells them apart"),
            ("polynomial(degree=8)", "(q·k/√D + 1)⁸: sharper"),
        ),
        strict=True,
    ):
        field(ax, spec, name, signed=False)


def self_conditioned(figure: Any, theme: Theme) -> None:
    left, right = figure.subplots(1, 2, width_ratios=[1.2, 1])
    g = torch.Generator().manual_seed(0)
    D, S = 32, 8
    q, k, v = (torch.randn(1, 1, n, D, generator=g) for n in (64, 48, 48))
    s = torch.randn(S, generator=g)
    shapes = {"w": (1, S), "U": (1, D, S), "A": (1, D, 4), "B": (4, S), "C": (1, 4, D), "W_k": (1, D, S), "W_v": (1, D, S)}
    sizes = {"w": 0.3, "U": 0.08, "A": 0.35, "B": 0.35, "C": 0.35, "W_k": 0.35, "W_v": 0.35}
    weights = {n: torch.randn(*shape, generator=g) * sizes[n] for n, shape in shapes.items()}
    # A null slot that opens as s grows: its score is −u·s.
    weights["u"] = -(s / s.square().sum()).unsqueeze(0) * 2

    def out(form: str, strength: float) -> Tensor:
        return attend(q, k, v, f"self_conditioned(form={form})", state=State(self=Self(strength * s, weights)))

    plain = attend(q, k, v, "dot")
    strengths = torch.linspace(0, 2, 17).tolist()
    for form, colour in zip(
        ("uniform", "temperature", "key_bias", "low_rank", "self_token", "null_slot"), COLOURS, strict=False
    ):
        moved = [float((out(form, x) - plain).norm() / plain.norm()) for x in strengths]
        left.plot(strengths, moved, color=colour, label=form, linewidth=3.5 if form == "uniform" else 1.8)
    left.set(xlabel="strength of the self, x in x·s", ylabel="change of the output, relative")
    left.set_title("uniform does nothing; the others act")
    left.legend(ncols=2)
    still, moved = (
        inspect(q, k, v, "self_conditioned", state=State(self=Self(x * s, weights))).weights()[0, 0].mean(0) for x in (0.0, 1.0)
    )
    order = (moved - still).argsort()
    right.plot(still[order], color=COLOURS[6], label="s = 0")
    right.plot(moved[order], color=COLOURS[2], label="key_bias")
    right.set(xlabel="keys, by how much they gain", ylabel="mean weight", ylim=(0, None))
    right.set_title("A self prefers some keys, for every query")
    right.legend()


def affect(figure: Any, theme: Theme) -> None:
    left, right = figure.subplots(1, 2, width_ratios=[1.2, 1])
    e = torch.linspace(-4, 4, 161)
    shades = ((-9.0, COLOURS[1]), (-0.7, COLOURS[4]), (0.0, COLOURS[6]), (0.7, COLOURS[2]), (9.0, COLOURS[0]))
    for lean, colour in shades:
        warped = affected(e, torch.tensor(lean).tanh(), torch.ones(()))
        left.plot(e, warped, color=colour, label=f"w·s = {lean:g}" if abs(lean) < 9 else f"w·s → {'+' if lean > 0 else '−'}∞")
    left.axhline(0, color=theme.soft, linewidth=0.6)
    left.axvline(0, color=theme.soft, linewidth=0.6)
    left.set(xlabel="score e = q·k/√D", ylabel="warped score")
    left.set_title("One side is flattened, the other doubled")
    left.legend()
    keys = torch.linspace(-3, 3, 13)
    for lean, colour in shades[::2]:
        p = affected(keys, torch.tensor(lean).tanh(), torch.ones(())).softmax(-1)
        right.plot(keys, p, "o-", color=colour, markersize=4)
    right.set(xlabel="score of the key", ylabel="weight", ylim=(0, None))
    right.set_title("The same thirteen keys under three moods")


PICTURES: dict[str, tuple[Draw, tuple[float, float]]] = {
    "dot": (dot, WIDE),
    "cosine": (cosine, WIDE),
    "euclidean": (euclidean, WIDE),
    "trace": (trace, WIDE),
    "additive": (additive, WIDE),
    "rbf": (rbf, WIDE),
    "polynomial": (polynomial, WIDE),
    "self_conditioned": (self_conditioned, WIDE),
    "affect": (affect, WIDE),
}
