"""Pictures of positions and of rules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from demo.extras import need
from demo.style import COLOURS, SIGNED, WEIGHTS, Draw, Theme, picture
from regard.attention.allow import Allow, Causal, Document, Padding, Prefix, Tile, Window
from regard.position import Relative, Rope, Sinusoidal
from regard.position.alibi import slopes
from regard.state import State

WIDE = (8.4, 3.0)


def sinusoidal(figure: Any, theme: Theme) -> None:
    left, right = figure.subplots(1, 2)
    waves = Sinusoidal().apply(torch.zeros(1, 1, 600, 64, dtype=torch.float64), 0, State())[0, 0]
    table = waves[:100].float()
    picture(left, table.mT, cmap=SIGNED, low=-1, high=1, aspect="auto")
    left.set(xlabel="position", ylabel="dimension")
    left.set_title("PE: slow waves below, fast waves above")
    offsets = torch.arange(-60, 61)
    for start, colour, dash in ((60, COLOURS[0], "-"), (500, COLOURS[1], ":")):
        right.plot(
            offsets,
            waves[start + offsets] @ waves[start],
            dash,
            color=colour,
            label=f"at position {start}",
            linewidth=3 if dash == ":" else 1.8,
        )
    right.set(xlabel="offset", ylabel="PE(p) · PE(p + offset)")
    right.set_title("Their product depends on the offset alone")
    right.legend()


def rope(figure: Any, theme: Theme) -> None:
    left, right = figure.subplots(1, 2)
    offsets = torch.arange(0, 2049)
    unit = torch.ones(1, 1, 1, 128) / 128**0.5
    for base, colour in ((10000.0, COLOURS[0]), (500000.0, COLOURS[1])):
        turned = Rope(base=base).rotate(unit.double().expand(1, 1, len(offsets), 128), 0)
        left.plot(offsets, turned[0, 0] @ unit[0, 0, 0].double(), color=colour, label=f"base {base:,.0f}")
    left.set(xlabel="offset i − j", ylabel="q·k of two equal vectors", ylim=(-0.4, 1.05))
    left.set_title("Equal content fades with the offset")
    left.legend()
    rates = Rope().rates(128)[0]
    plans = {"linear": Rope(scaling="linear", factor=4.0), "ntk": Rope(scaling="ntk", factor=4.0),
             "llama3": Rope(scaling="llama3", factor=4.0, original=2048), "yarn": Rope(scaling="yarn", factor=4.0, original=2048)}  # fmt: skip
    for (name, plan), colour in zip(plans.items(), COLOURS, strict=False):
        right.plot(plan.rates(128)[0] / rates, color=colour, label=name)
    right.set(xlabel="pair of dimensions, fast to slow", ylabel="rate / unscaled rate", ylim=(0, 1.1))
    right.set_title("Four ways to stretch by 4")
    right.legend(loc="lower left", ncols=2)


def alibi(figure: Any, theme: Theme) -> None:
    left, right = figure.subplots(1, 2)
    back = torch.arange(0, 65)
    colours = [need("matplotlib").colormaps["cividis"](h / 8) for h in range(8)]
    for h, (m, colour) in enumerate(zip(slopes(8), colours, strict=True)):
        left.plot(back, torch.exp(-m * back), color=colour, label=f"head {h}: 1/{1 / m:g}")
    left.set(xlabel="distance |i − j|", ylabel="factor on a weight, e^(−m|i−j|)")
    left.set_title("Slopes of eight heads")
    left.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    image = -slopes(8)[1] * (torch.arange(48).unsqueeze(1) - torch.arange(48)).abs().float()
    picture(right, image.masked_fill(torch.triu(torch.ones(48, 48), 1) > 0, float("nan")), low=None)
    right.set(xlabel="key", ylabel="query")
    right.set_title("The bias of head 1, causal")


def relative(figure: Any, theme: Theme) -> None:
    left, right = figure.subplots(1, 2)
    at = torch.arange(-160, 161)
    zero = torch.zeros(1, dtype=torch.long)
    for direction, colour in (("both", COLOURS[0]), ("past", COLOURS[1])):
        number = Relative(direction=direction).bucket(zero, at).flatten()  # type: ignore[arg-type]
        left.step(at, number, where="mid", color=colour, label=f"direction={direction}")
    left.set(xlabel="key − query", ylabel="bucket")
    left.set_title("32 buckets: exact near, logarithmic far")
    left.legend()
    number = Relative().bucket(torch.arange(48), torch.arange(48))
    picture(right, number.float(), low=None, high=None)
    right.set(xlabel="key", ylabel="query")
    right.set_title("Which bucket each pair reads (both)")


def allow(figure: Any, theme: Theme) -> None:
    axes = figure.subplots(2, 4)
    N = 12
    ids = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2])
    rules: list[tuple[str, Allow]] = [
        ("Causal()", Causal()),
        ("Window(4)", Window(4)),
        ("Window(3, ahead=2)", Window(3, ahead=2)),
        ("Causal() | Prefix(4)", Causal() | Prefix(4)),
        ("Padding([9])", Padding(torch.tensor([9]))),
        ("Document(ids)", Document(ids)),
        ("Causal() & Document(ids)", Causal() & Document(ids)),
        ("~Window(1)", ~Window(1)),
    ]
    for ax, (name, rule) in zip(axes.flat, rules, strict=True):
        met: Tensor = rule.bind(N).tile(Tile(0, N, 0, N, 0, torch.device("cpu"))).expand(1, 1, N, N)[0, 0]
        ax.imshow(met.float(), cmap=WEIGHTS, vmin=0, vmax=1.25, interpolation="nearest")
        ax.set_xticks([x - 0.5 for x in range(N)], [])
        ax.set_yticks([x - 0.5 for x in range(N)], [])
        ax.grid(color=theme.ground, linewidth=0.8)
        ax.tick_params(length=0)
        for side in ax.spines.values():
            side.set_visible(False)
        ax.set_title(name, family="DejaVu Sans Mono", fontsize=8.5)


PICTURES: dict[str, tuple[Draw, tuple[float, float]]] = {
    "sinusoidal": (sinusoidal, WIDE),
    "rope": (rope, WIDE),
    "alibi": (alibi, WIDE),
    "relative": (relative, WIDE),
    "allow": (allow, (8.4, 4.4)),
}
