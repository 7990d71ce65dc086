"""Pictures of what experience writes, for the guides about identity. Queries and keys are drawn, not a model's: they share a
direction whoever speaks, as a model's do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from demo.style import COLOURS, Draw, Theme
from regard.identity.experience import Experience
from regard.identity.state import Base, Identity
from regard.identity.trace_directions import directions
from regard.identity.write.trace import TraceRule, written
from regard.study.trace_effect import ASK, CLASSES, VOCABULARY, WORDS, Lab, learnt

WIDTH = 32
SHARED = 2.0
"""The length of what all keys have in common; what a token adds to it has length √WIDTH · 0.35, about as much."""
RULES = ("published", "centred", "delta")


def someone(seed: int, tokens: int = 96) -> Experience:
    """An experience of one layer and one head; people differ by the few directions in which their words lie."""
    g = torch.Generator().manual_seed(seed)
    common = torch.Generator().manual_seed(0)
    means = torch.nn.functional.normalize(torch.randn(2, WIDTH, generator=common), dim=-1) * SHARED
    topics = torch.randn(4, WIDTH, generator=g)
    said = topics[torch.randint(4, (tokens,), generator=g)]
    q, k = (m + 0.35 * (0.7 * said + 0.7 * torch.randn(tokens, WIDTH, generator=g)) for m in means)
    shock = torch.rand(tokens, generator=g) * 4
    base = Base("drawn", 1, 1, WIDTH)
    ones = torch.ones(tokens, dtype=torch.bool)
    shape = (1, 1, tokens, WIDTH)
    return Experience(
        base, torch.zeros(tokens, dtype=torch.long), ones, shock, q.view(shape), k.view(shape), k.view(shape), cast(Any, None)
    )


def written_by(e: Experience, rule: str, times: int = 1, rate: float = 0.02) -> Tensor:
    trace = torch.zeros(1, 1, WIDTH, WIDTH)
    for _ in range(times):
        trace = written(trace, e, TraceRule(cast(Any, rule), rate=rate), means_of(e))
    return trace[0, 0]


def means_of(e: Experience) -> tuple[Tensor, Tensor]:
    """q̄ and k̄ over many others, as the base model's own means would be."""
    others = [someone(1000 + n) for n in range(8)]
    return tuple(torch.cat([getattr(o, n) for o in others], 2).mean(2) for n in "qk")  # pyright: ignore[reportReturnType]


def trace_spectrum(figure: Any, theme: Theme) -> None:
    spectra, alike, growth = figure.subplots(1, 3)
    names = {"published": "k⊗q, as published", "centred": "centred", "delta": "delta"}
    me = someone(1)
    for colour, rule in zip(COLOURS, RULES, strict=False):
        values = torch.linalg.eigvalsh(written_by(me, rule)).flip(0)
        spectra.plot(values / values.abs().max(), color=colour, marker="o", markersize=3, label=names[rule])
    spectra.axhline(0, color=theme.soft, linewidth=0.8)
    spectra.set(title="Eigenvalues of T, scaled:\nevery rule writes negative ones", xlabel="largest first")
    spectra.legend()
    people = [someone(n) for n in range(1, 9)]
    for n, (colour, rule) in enumerate(zip(COLOURS, RULES, strict=False)):
        flat = torch.nn.functional.normalize(torch.stack([written_by(p, rule).flatten() for p in people]), dim=-1)
        cosines = (flat @ flat.T)[torch.ones(8, 8).triu(1).bool()]
        alike.plot(
            torch.full_like(cosines, n) + torch.linspace(-0.2, 0.2, len(cosines)), cosines, "o", color=colour, markersize=3
        )
    alike.set_xticks(range(len(RULES)), RULES)
    alike.set(title="Cosine of two people's T:\nplain k⊗q is nobody's", ylim=(-0.25, 1.05))
    times = (1, 2, 4, 8, 16, 32)
    for colour, rule in zip(COLOURS, RULES, strict=False):
        sizes = [float(torch.linalg.matrix_norm(written_by(me, rule, n), 2)) for n in times]
        growth.plot(times, sizes, color=colour, marker="o", markersize=3)
    growth.set(title="Largest |eigenvalue| when the same\nis written again: delta levels off", xlabel="times", yscale="log")


def trace_directions(figure: Any, theme: Theme) -> None:
    """A toy person of the study `trace_effect`, who means the second class of words."""
    lab = Lab(learnt(0, 250), 0, "full")
    mara = lab.written("gradient", lab.history(1), 0.03)
    assert isinstance(mara, Identity)
    found = directions(mara, lab.model, tokens=range(2, VOCABULARY), queries=[ASK])
    names = tuple(f"{'abc'[n // WORDS]}{n % WORDS + 1}" for n in range(CLASSES * WORDS))
    replace(found, words=names).draw(figure)


GUIDES: dict[str, tuple[Draw, tuple[float, float]]] = {
    "trace_spectrum": (trace_spectrum, (10, 3.2)),
    "trace_directions": (trace_directions, (10, 3.4)),
}
"""Pictures of guides; those of mechanisms stand in `PICTURES`."""
