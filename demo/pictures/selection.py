"""Pictures of the selections: what one row of scores becomes, and the one thing that sets each selection apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from demo.figures import descent, draw_descent, draw_valleys, patterns
from demo.scene import View, look, scene
from demo.style import COLOURS, Draw, Theme, picture
from regard.attention.allow import Causal, Window
from regard.attention.inspect import inspect
from regard.attention.operator import attend
from regard.attention.spec import parse
from regard.selection.base import Given
from regard.selection.gd import coherent_length, energy_between

WIDE = (8.4, 3.0)
ROW = torch.tensor([2.6, 2.2, 1.9, 1.2, 0.9, 0.4, 0.1, -0.3, -0.8, -1.2, -1.7, -2.2])


def weights_of(selection: str, scores: Tensor = ROW) -> Tensor:
    """One row of scores through a selection's plain definition."""
    given = Given(at=torch.zeros(1, dtype=torch.long))
    return parse(selection).selection.plain(scores[None, None, None], given)[0, 0, 0]


def bars(ax: Any, theme: Theme, selections: Sequence[str], title: str, names: Sequence[str] | None = None) -> None:
    """The same row of scores under several selections, side by side."""
    x = torch.arange(len(ROW))
    thick = 0.8 / len(selections)
    for n, (s, name) in enumerate(zip(selections, names or selections, strict=True)):
        ax.bar(x + (n - (len(selections) - 1) / 2) * thick, weights_of(s), width=thick, label=name, color=COLOURS[n])
    ax.set_xticks(x, [f"{s:g}" for s in ROW.tolist()], fontsize=7)
    ax.set(xlabel="score of the key", ylabel="weight")
    ax.set_title(title)
    ax.legend()


def gap_curves(ax: Any, selections: Sequence[tuple[str, str]], title: str) -> None:
    """Two keys, one ahead by a gap: the weight of the one ahead."""
    gaps = torch.linspace(-3, 3, 301)
    for (s, name), colour in zip(selections, COLOURS, strict=False):
        given = Given(at=torch.zeros(1, dtype=torch.long))
        p = parse(s).selection.plain(torch.stack([gaps, torch.zeros_like(gaps)], -1)[None, None], given)[0, 0, :, 0]
        ax.plot(gaps, p, color=colour, label=name)
    ax.set(xlabel="score of one key − score of the other", ylabel="its weight")
    ax.set_title(title)
    ax.legend()


def softmax(figure: Any, theme: Theme) -> None:
    left, right = figure.subplots(1, 2, width_ratios=[1.3, 1])
    taus = (2.0, 1.0, 0.3)
    bars(left, theme, [f"softmax(temperature={t})" for t in taus], "No weight is ever zero", [f"τ = {t:g}" for t in taus])
    gap_curves(right, [(f"softmax(temperature={t})", f"τ = {t:g}") for t in taus], "Two keys")


def entmax(figure: Any, theme: Theme) -> None:
    left, right = figure.subplots(1, 2, width_ratios=[1.3, 1])
    names = ["softmax (α = 1)", "entmax (α = 1.5)", "sparsemax (α = 2)"]
    bars(left, theme, ["softmax", "entmax(1.5)", "sparsemax"], "Keys that lag by enough get exactly nothing", names)
    curves = [
        ("softmax", "α = 1"),
        ("entmax(1.25)", "α = 1.25"),
        ("entmax(1.5)", "α = 1.5"),
        ("sparsemax", "α = 2"),
        ("entmax(4)", "α = 4"),
    ]
    gap_curves(right, curves, "Two keys: one-hot from a gap of 1/(α−1)")


def topk(figure: Any, theme: Theme) -> None:
    left, right = figure.subplots(1, 2, width_ratios=[1.3, 1])
    bars(left, theme, ["softmax", "topk(4)", "topk(2)"], "Softmax among the k best")
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 1, 512, 64, generator=g), torch.randn(1, 1, 256, 64, generator=g)
    full = attend(q, k, k, "softmax")
    ks = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    error = [float((attend(q, k, k, f"topk({n})") - full).norm() / full.norm()) for n in ks]
    mass = [float(inspect(q, k, k, "softmax").weights().topk(n).values.sum(-1).mean()) for n in ks]
    right.plot(ks, error, "-o", color=COLOURS[4], markersize=4, label="error against softmax (relative)")
    right.plot(ks, mass, "-o", color=COLOURS[0], markersize=4, label="softmax weight of the k best")
    right.set_xscale("log", base=2)
    right.set_xticks(ks, [str(n) for n in ks])
    right.set(xlabel="k, of 256 random keys", ylim=(0, None))
    right.set_title("Random keys are no case for top-k")
    right.legend()


def hard(figure: Any, theme: Theme) -> None:
    left, right = figure.subplots(1, 2, width_ratios=[1.3, 1])
    bars(left, theme, ["softmax", "hard"], "The whole weight on the best key")
    tied = torch.tensor([0.2, 1.0, 0.5, 1.0, 1.0, 0.1])
    x = torch.arange(6)
    right.bar(x - 0.2, weights_of("hard(tie=left)", tied), 0.38, label="tie=left", color=COLOURS[0])
    right.bar(x + 0.2, weights_of("hard(tie=right)", tied), 0.38, label="tie=right", color=COLOURS[1])
    right.set_xticks(x, [f"{s:g}" for s in tied.tolist()])
    right.set(xlabel="score of the key", ylabel="weight")
    right.set_title("Equal scores: the side is part of the spec")
    right.legend(loc="upper center")


def pointer(figure: Any, theme: Theme) -> None:
    left, right = figure.subplots(1, 2)
    g = torch.Generator().manual_seed(2)
    numbers = (torch.arange(10) / 10 + 0.03 * torch.rand(10, generator=g))[torch.randperm(10, generator=g)]
    # Query i asks for the i-th smallest number: −(a − b)² as a dot product of (2a, −1) and (b, b²).
    wanted = numbers.sort().values
    q = torch.stack([2 * wanted, -torch.ones(10)], -1)[None, None]
    k = torch.stack([numbers, numbers.square()], -1)[None, None]
    for ax, inner, name in ((left, "pointer", "pointer"), (right, "pointer(sparsemax)", "pointer(sparsemax)")):
        result = attend(q, k, None, f"dot(scale=250) | {inner}")
        picture(ax, result[0, 0], high=1)
        ax.set_xticks(range(10), [f"{x:.2f}" for x in numbers.tolist()], fontsize=7)
        ax.set_yticks(range(10), [f"{n + 1}" for n in range(10)], fontsize=7)
        ax.set(xlabel="the input", ylabel="place in the sorted order")
        ax.set_title(f"{name}: the result is the choice itself")


def monotonic(figure: Any, theme: Theme) -> None:
    axes = figure.subplots(1, 3)
    N, M = 14, 40
    target = torch.linspace(2, M - 3, N)
    scores = 4 - 1.2 * (torch.arange(M) - target.unsqueeze(-1)).abs()
    scores = scores + torch.randn(N, M, generator=torch.Generator().manual_seed(1))
    q, k = scores[None, None], torch.eye(M)[None, None]
    for ax, spec, title in zip(
        axes,
        ("dot(scale=1) | softmax", "dot(scale=1) | monotonic", "dot(scale=1) | monotonic(mode=hard)"),
        ("softmax", "monotonic: where it is\nexpected to stop", "monotonic(mode=hard):\nwhere it stops"),
        strict=True,
    ):
        # With unit keys q·k reads a matrix of scores off as it is.
        seen = inspect(q, k, k, spec)
        picture(ax, seen.weights()[0, 0], high=1, aspect="auto")
        ax.set(xlabel="key", ylabel="query")
        ax.set_title(title)


def hopfield(figure: Any, theme: Theme) -> None:
    left, right = figure.subplots(1, 2)
    draw_descent(left, theme)
    turn = torch.arange(12) * (2 * math.pi / 12) + 0.2
    starts = 1.25 * torch.stack([turn.cos(), turn.sin()], -1)
    for beta, colour in ((2.0, COLOURS[1]), (8.0, COLOURS[0]), (32.0, COLOURS[2])):
        _, energies = descent(starts, patterns(), beta, 6)
        for n, path in enumerate(energies.unbind(1)):
            right.plot(path, color=colour, linewidth=0.9, label=f"β = {beta:g}" if n == 0 else None)
    right.set(xlabel="step", ylabel="E(ξ)")
    right.set_title("The energy never rises")
    right.legend()


def energy(figure: Any, theme: Theme) -> None:
    left, right = figure.subplots(1, 2)
    g = torch.Generator().manual_seed(4)
    x = torch.randn(24, 2, generator=g)
    x = x / x.norm(dim=-1, keepdim=True)
    paths, values = [x], list[float]()
    for _ in range(30):
        q = x[None, None]
        seen = inspect(q, q, None, "dot(scale=4) | energy", allow=~Window(1))
        assert seen.energy is not None
        values.append(float(seen.energy.sum()) / 4)
        x = x + 0.05 * sum(seen.output[0, 0].chunk(2, dim=-1))
        x = x / x.norm(dim=-1, keepdim=True)
        paths.append(x)
    way = torch.stack(paths)
    for p in way.unbind(1):
        left.plot(p[:, 0], p[:, 1], color=COLOURS[6], linewidth=2.5)
    left.plot(way[0, :, 0], way[0, :, 1], "o", color=COLOURS[1], markersize=5, label="before")
    left.plot(
        way[-1, :, 0], way[-1, :, 1], "o", color=COLOURS[0], markersize=8, label="after", fillstyle="none", markeredgewidth=1.6
    )
    left.set(aspect="equal", xticks=[], yticks=[])
    left.set_title("Tokens on a circle draw together")
    left.legend(loc="center")
    right.plot(values, color=COLOURS[0])
    right.set(xlabel="step", ylabel="E, all tokens")
    right.set_title("Both sides of the gradient: E falls")


def gd(figure: Any, theme: Theme) -> None:
    left, middle, right = figure.subplots(1, 3, width_ratios=[1.35, 1, 1])
    draw_valleys(left, theme)
    left.set_title("φ between query and key")
    L = torch.linspace(0, 4, 200, dtype=torch.float64)
    for alpha, colour in ((0.5, COLOURS[0]), (0.7, COLOURS[1]), (0.9, COLOURS[2])):
        middle.plot(L, energy_between(L, alpha), color=colour, label=f"α = {alpha}")
        middle.plot(
            coherent_length(alpha), float(energy_between(torch.tensor(coherent_length(alpha)), alpha)), "o", color=colour
        )
    middle.set(xlabel="distance L", ylabel="E*", ylim=(0, 0.85))
    middle.set_title("E* grows, then saturates")
    middle.legend()
    alphas = torch.linspace(0.02, 0.98, 97)
    bounds = [coherent_length(float(a)) for a in alphas]
    right.fill_between(alphas, 0, bounds, color=COLOURS[0], alpha=0.25, linewidth=0)
    right.plot(alphas, bounds, color=COLOURS[0])
    right.text(0.5, 0.7, "one valley:\nq and k cohere", ha="center", fontsize=8.5)
    right.text(0.5, 2.35, "two valleys", ha="center", fontsize=8.5)
    right.set(xlabel="α", ylabel="distance L", ylim=(0, 3.2))
    right.set_title("L_c(α), √2 at α = ½")


def selective(figure: Any, theme: Theme) -> None:
    axes = figure.subplots(1, 3)
    s = scene()
    plain = look(View("", "dot | softmax", ""), s).weights(heads=[0])[0, 0]
    chosen = look(View("", "dot | selective", ""), s).weights(heads=[0])[0, 0]
    decided = inspect(s.q, s.k, s.v, "dot | selective", allow=Causal()).state.carry
    hide = torch.triu(torch.ones_like(plain), 1) > 0
    for ax, x, title in ((axes[0], plain, "softmax"), (axes[1], chosen, "selective")):
        picture(ax, x.masked_fill(hide, float("nan")).sqrt(), high=1)
        ax.set_title(title)
        ax.set(xlabel="key", ylabel="query")
    if decided is not None:
        axes[2].bar(range(decided.shape[-1]), decided[0], color=COLOURS[0])
    axes[2].set(xlabel="key", ylabel="masking, summed over tokens")
    axes[2].set_title("The carry: who is no\nlonger needed (not token 0)")


def linear(figure: Any, theme: Theme) -> None:
    left, middle, right = figure.subplots(1, 3)
    g = torch.Generator().manual_seed(0)
    counts = [16, 32, 64, 128, 256, 512, 1024]
    for size, colour in ((0.5, COLOURS[0]), (1.0, COLOURS[1]), (2.0, COLOURS[4])):
        q, k = (size * torch.randn(1, 1, 64, 32, generator=g) for _ in range(2))
        soft = inspect(q, k, k, "softmax").weights()
        errors = [
            sum(
                float((inspect(q, k, k, f"linear(map=exp, features={n}, seed={s})").weights() - soft).abs().sum(-1).mean())
                for s in range(5)
            ) / 10
            for n in counts
        ]  # fmt: skip
        left.plot(counts, errors, "-o", color=colour, markersize=4, label=f"|q|, |k| ≈ {size * 32**0.5:.1f}")
    left.set_xscale("log", base=2)
    left.set(xlabel="features", ylabel="weight moved against softmax", ylim=(0, 1.45), yticks=[0, 0.25, 0.5, 0.75, 1])
    left.set_title("map=exp is near softmax\nfor short vectors alone")
    left.legend(loc="upper right")
    pairs = [4, 8, 16, 24, 32, 48, 64, 96, 128]
    for spec, name, colour in (
        ("cosine(temperature=0.02) | softmax", "softmax", COLOURS[6]),
        ("cosine(temperature=1) | linear(map=identity)", "identity", COLOURS[0]),
        ("linear(map=identity, delta=1)", "identity, delta=1", COLOURS[2]),
    ):
        errors = list[float]()
        for n in pairs:
            k, v = torch.randn(2, 16, 1, n, 32, generator=g).unbind(0)
            errors.append(float((attend(k, k, v, spec) - v).square().mean()))
        middle.plot(pairs, errors, "-o", color=colour, markersize=4, label=name)
    middle.set(xlabel="pairs written into 32 × 32", ylabel="squared error of what a key reads", ylim=(-0.1, 3.6))
    middle.set_title("Random keys disturb each other\nlong before the matrix is full")
    middle.legend(loc="upper left")
    lengths = torch.logspace(1, 5, 50)
    right.plot(lengths, lengths * 2 * 64 * 4, color=COLOURS[6], label="keys and values")
    right.plot(lengths, torch.full_like(lengths, 64 * 67 * 4), color=COLOURS[0], label="linear")
    right.set(xscale="log", yscale="log", xlabel="tokens", ylabel="cache of a key head, bytes")
    right.set_title("Head of 64: from 34 tokens on\nthe matrix is smaller")
    right.legend()


def abstain(figure: Any, theme: Theme) -> None:
    from regard.study.selection_map import rows

    left, right = figure.subplots(1, 2)
    scores = torch.linspace(-3, 6, 200)
    for null, colour in ((0.0, COLOURS[2]), (2.0, COLOURS[0]), (4.0, COLOURS[1])):
        left.plot(scores, torch.sigmoid(scores - null), color=colour, label=f"null_logit={null:g}")
    left.step(scores, (scores >= 2).float(), color=COLOURS[4], linestyle="--", label="threshold=2")
    left.set(xlabel="score of the only key", ylabel="its weight")
    left.set_title("Two ways to refuse")
    left.legend()
    (q, k), (q0, k0) = rows(0, 4), rows(1001, 0)
    for name, values, colour in (
        ("null_logit", torch.linspace(2, 8, 25), COLOURS[0]),
        ("threshold", torch.linspace(1, 6, 25), COLOURS[4]),
    ):
        pairs = [
            [float(inspect(a, b, b, f"abstain({name}={x:.3f})").accepted.float().mean()) for a, b in ((q, k), (q0, k0))]
            for x in values.tolist()
        ]
        right.plot([p[1] for p in pairs], [p[0] for p in pairs], "-o", color=colour, markersize=3, label=name)
    right.set(xlabel="share accepted with only strangers", ylabel="share accepted with 4 that fit", xlim=(-0.03, 1.03))
    right.set_ylim(0, 1.05)
    right.set_title("64 keys: what a refusal costs")
    right.legend(loc="lower right")


PICTURES: dict[str, tuple[Draw, tuple[float, float]]] = {
    "softmax": (softmax, WIDE),
    "entmax": (entmax, WIDE),
    "topk": (topk, WIDE),
    "hard": (hard, WIDE),
    "pointer": (pointer, (8.4, 3.6)),
    "monotonic": (monotonic, WIDE),
    "hopfield": (hopfield, (8.4, 3.4)),
    "energy": (energy, WIDE),
    "gd": (gd, WIDE),
    "selective": (selective, WIDE),
    "linear": (linear, (9.4, 3.2)),
    "abstain": (abstain, WIDE),
}
