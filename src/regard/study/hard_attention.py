"""Unique hard attention recognises star-free languages, and parity is none: constructed, learnt and searched for.

Masked transformers whose rows each look at one place, ties to the left or to the right, recognise exactly the star-free languages (Yang, Chiang and
Angluin 2024; Hahn 2020 showed that parity is out of reach). A theorem is not measured; what can be measured is this:

    constructed   programs of the library's `hard` selection for five star-free languages (`tasks.languages`), against the definition, on every
                  string up to a length and on long ones. Swapped ties are the control: the side of a tie is part of the program.
    learnt        two-layer transformers (hard with straight-through gradients, and softmax), strict causal mask, ALiBi, trained to say for every
                  prefix up to 16 letters whether it is a member, tested on prefixes of 33 to 64 letters; balanced accuracy, ½ is chance.
    searched      all programs of two looks, one after the other: every mask, tie, bit to look for and bit to write (thousands); the best
                  that any decision at the last place could make of what it holds, on all strings of one length.

What this cannot show: no finite search proves that deeper programs fail on parity (the theorem does), and that training does not learn parity says
nothing of hard attention by itself: softmax, which the theorem does not bind, does not learn it beyond its length either. Likewise a language that
training misses can still be recognised: brackets of depth 1, (ab)*, are constructed exactly, and not learnt. Even a*b*, which every seed learns
within the training length, is kept beyond it by some seeds only.

Tried for those brackets: four heads, three layers, a third of the step size; within the training length 0.91 to 0.99, beyond it chance.

Source: the map of prior work of GD-Attention; Hahn 2020; Yang, Chiang and Angluin 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ..attention.operator import attend
from ..models.blocks import Block, BlockContext, FeedForward, scale_residuals
from ..nn import Attention
from .frame.study import Plant, Record, Size, Study
from .frame.verdict import Check, Verdict, interval, judged
from .tasks.languages import BEFORE, LANGUAGES, Language, Look, every_string
from .tasks.training import IGNORED, Batch, built, fit, generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEADS, DEPTH = 32, 2, 2
TRAINED, FROM, TO = 16, 33, 64
"""Letters in training, and the prefixes that are tested after it."""
SPECS = {"hard": "dot | hard | alibi", "softmax": "dot | softmax | alibi"}
SIMPLE = ("a*b*", "contains ab", "first = last")
LEARNT = (*SIMPLE, "brackets, depth 1", "parity of b", "b modulo 3")
SEARCHED = (*SIMPLE, "brackets, depth 1", "parity of b")


class Scale(NamedTuple):
    exhaustive: int
    """All strings up to this length."""
    long: int
    searched: int
    steps: int
    rows: int


SCALES: dict[Size, Scale] = {
    "mini": Scale(5, 40, 3, 3, 16),
    "quick": Scale(9, 150, 5, 40, 64),
    "full": Scale(12, 400, 10, 200, 256),
}


class Reader(nn.Module):
    """Says at every place whether the letters up to it are a member; a mark stands before the first letter."""

    def __init__(self, spec: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, WIDTH)
        self.blocks = nn.ModuleList(
            Block(
                Attention(WIDTH, HEADS, spec),
                FeedForward(WIDTH, 2 * WIDTH),
                (nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)),
            )
            for _ in range(DEPTH)
        )
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2)
        scale_residuals(self.blocks, std=WIDTH**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, BlockContext(BEFORE))[0]
        return self.head(self.norm(x))


def _batch(language: Language, g: torch.Generator, rows: int, length: int) -> Batch:
    x = language.sample(g, rows, length)
    mark, nothing = torch.full((rows, 1), 2), torch.full((rows, 1), IGNORED)
    return Batch(torch.cat([mark, x], 1), torch.cat([nothing, language.prefixes(x).long()], 1))


@torch.no_grad()
def _balanced(model: nn.Module, batch: Batch, first: int) -> float:
    """Mean accuracy of members and of others, from the first-th letter on."""
    said, target = model(batch.tokens).argmax(-1)[:, first:], batch.targets[:, first:]
    return sum(float((said[target == c] == c).double().mean()) for c in (0, 1)) / 2


def _learnt(name: str, spec: str, scale: Scale, seed: int) -> dict[str, float]:
    language = LANGUAGES[name]
    model = built(seed, lambda: Reader(spec))
    fit(model, lambda g: _batch(language, g, 32, TRAINED), scale.steps, lr=3e-3, seed=seed)
    inside, beyond = generator(10_000 + seed), generator(20_000 + seed)
    return {
        "inside": _balanced(model, _batch(language, inside, scale.rows, TRAINED), 1),
        "beyond": _balanced(model, _batch(language, beyond, scale.rows, TO), FROM),
    }


def _constructed(language: Language, scale: Scale, seed: int, swapped: bool) -> float:
    """The share of strings judged rightly: all up to a length, and long ones of which about half are members or near misses."""
    assert language.recognise is not None
    right = count = 0
    samples = [language.sample(generator(seed), scale.rows, n) for n in (scale.long, scale.long + 1)]
    for x in [*map(every_string, range(1, scale.exhaustive + 1)), *samples]:
        right += int((language.recognise(x, Look(swapped)) == language.prefixes(x)[:, -1]).sum())
        count += len(x)
    return right / count


def _bits(x: Tensor) -> Tensor:
    """(P, S, N): what one look can write at every place, each bit or its complement once."""
    one, tables = x == 1, every_string(6).bool()
    written = list[Tensor]()
    for where in (torch.ones_like(one), one, ~one):
        for tie in ("left", "right"):
            for after in (False, True):
                bit, there = Look()(where, one, tie, after)
                written.append(tables[:, one.long() * 3 + bit.long() + there.long()])
    every = torch.cat(written)
    return torch.unique((every ^ every[:, :1, :1]).flatten(1), dim=0).unflatten(1, x.shape)


def _searched(length: int) -> dict[str, float]:
    """The best accuracy of any program of two looks, on all strings of this length."""
    x = every_string(length)
    one, tables = x == 1, every_string(4).bool()[1:]
    labels = torch.stack([LANGUAGES[name].prefixes(x)[:, -1] for name in SEARCHED]).double()
    best, programs = torch.zeros(len(SEARCHED), dtype=torch.float64), _bits(x)
    for bit in programs:
        where = tables[:, one.long() + 2 * bit.long()].transpose(0, 1)[..., :-1]
        k = where.float().unsqueeze(-1)
        v = torch.stack([(one.long() + 2 * bit.long() + 1)[:, None, :-1].expand_as(where).float(), where.float()], -1)
        for tie in ("left", "right"):
            out = attend(torch.ones_like(k[:, :, :1]), k, v, f"dot(scale=1) | hard(tie={tie})")[:, :, 0]
            held = (out[..., 0] * (out[..., 1] > 0)).long() * 4 + (one[:, -1].long() + 2 * bit[:, -1].long()).unsqueeze(1)
            members = torch.zeros(len(labels), len(tables), 20, dtype=torch.float64)
            index = held.T.expand(len(labels), -1, -1)
            members.scatter_add_(2, index, labels[:, None, :].expand(-1, len(tables), -1))
            others = torch.zeros_like(members).scatter_add_(2, index, torch.ones_like(index, dtype=torch.float64)) - members
            best = torch.maximum(best, torch.maximum(members, others).sum(-1).amax(-1) / len(x))
    return dict(zip(SEARCHED, best.tolist(), strict=True)) | {"programs": len(programs) * len(tables) * 2.0}


def run(seed: int, size: Size) -> Record:
    scale = SCALES[size]
    exact = {n: x for n, x in LANGUAGES.items() if x.recognise is not None}
    return {
        "constructed": {n: _constructed(x, scale, seed, swapped=False) for n, x in exact.items()},
        "swapped": {n: _constructed(x, scale, seed, swapped=True) for n, x in exact.items()},
        "learnt": {s: {n: _learnt(n, spec, scale, seed) for n in LEARNT} for s, spec in SPECS.items()},
        "searched": _searched(scale.searched),
    }


def judge(records: Sequence[Record]) -> Verdict:
    def beyond(*names: str, worst: bool = True) -> list[float]:
        pick = min if worst else max
        return [pick(r["learnt"]["hard"][n]["beyond"] for n in names) for r in records]

    return judged(
        Check(
            "constructed: share of strings judged rightly, worst of five languages",
            [min(r["constructed"].values()) for r in records],
            above=1.0,
            control=[min(r["swapped"].values()) for r in records],
            condition="star-free languages are constructed",
            needed=True,
        ),
        Check(
            f"learnt: {', '.join(SIMPLE)}: balanced accuracy beyond the training length, the worst",
            beyond(*SIMPLE),
            above=0.95,
            control=beyond("parity of b"),
            condition="simple star-free languages are learnt",
        ),
        Check(
            "learnt: brackets of depth 1: balanced accuracy beyond the training length",
            beyond("brackets, depth 1"),
            above=0.95,
            control=beyond("parity of b"),
            condition="alternating brackets are learnt as well",
        ),
        Check(
            "learnt: parity and counting modulo 3: balanced accuracy beyond the training length, the better",
            beyond("parity of b", "b modulo 3", worst=False),
            below=0.55,
            control=beyond(*SIMPLE, worst=False),
            condition="parity is not learnt beyond the training length",
        ),
        Check(
            "searched: parity on all strings of one length, best program of two looks",
            [r["searched"]["parity of b"] for r in records],
            below=0.75,
            control=[min(r["searched"][n] for n in SIMPLE) for r in records],
            condition="no program of two looks computes parity",
        ),
    )


def draw(records: Sequence[Record], figure: Figure) -> None:
    from .frame.figure import COLOURS, MARKERS

    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1.25, 1))

    def points(
        axes: object, names: Sequence[str], values: Sequence[Sequence[float]], index: int, label: str, shift: float
    ) -> None:
        spread = [interval(v) for v in values]
        axes.errorbar(  # pyright: ignore[reportAttributeAccessIssue]
            [i.mean for i in spread],
            [y + shift for y in range(len(names))],
            xerr=[[i.mean - i.low for i in spread], [i.high - i.mean for i in spread]],
            fmt=MARKERS[index],
            color=COLOURS[index],
            capsize=2,
            label=label,
        )

    exact = list(records[0]["constructed"])
    points(left, exact, [[r["constructed"][n] for r in records] for n in exact], 0, "its ties", -0.12)
    points(left, exact, [[r["swapped"][n] for r in records] for n in exact], 1, "ties swapped", 0.12)
    for index, (name, shift) in enumerate((("hard", -0.12), ("softmax", 0.12))):
        values = [[r["learnt"][name][n]["beyond"] for r in records] for n in LEARNT]
        points(middle, LEARNT, values, 2 * index, f"{name}, 33 to 64 letters", shift)
    inside = [[r["learnt"]["hard"][n]["inside"] for r in records] for n in LEARNT]
    points(middle, LEARNT, inside, 5, "hard, up to 16 letters", -0.3)
    points(right, SEARCHED, [[r["searched"][n] for r in records] for n in SEARCHED], 0, "best of all", 0)
    for axes, names, label in (
        (left, exact, "constructed: share right"),
        (middle, LEARNT, "learnt: balanced accuracy"),
        (right, SEARCHED, "searched: best accuracy"),
    ):
        axes.set_yticks(range(len(names)), list(names))
        axes.invert_yaxis()
        axes.axvline(0.5, color="#999999", ls=":", lw=1)
        axes.set_xlim(0.4, 1.05)
        axes.set_xlabel(label)
        axes.grid(axis="y", alpha=0.25)
    for axes in (left, middle):
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=1)


def planted(kind: Plant, seed: int) -> Record:
    wobble = 0.004 * (seed % 3)
    good = kind != "negative"
    exact = {n: 1.0 if good else 0.8 for n, x in LANGUAGES.items() if x.recognise is not None}
    star_free = 0.99 - wobble if good else 0.7
    counting = 0.99 if kind == "control" else 0.5 + wobble if good else 0.9
    learnt = {n: {"inside": 0.99, "beyond": star_free if LANGUAGES[n].star_free else counting} for n in LEARNT}
    searched = {n: 1.0 if n != "parity of b" else 0.6 if good else 0.9 for n in SEARCHED} | {"programs": 9000.0}
    swapped = dict.fromkeys(exact, 1.0 if kind == "control" else 0.7)
    if kind == "control":
        searched = dict.fromkeys(searched, 0.6)
    return {"constructed": exact, "swapped": swapped, "learnt": dict.fromkeys(SPECS, learnt), "searched": searched}


STUDY = Study(
    claim="Unique hard attention, with ties to the left or right, recognises and learns star-free languages, and not parity.",
    source="GD-Attention's map of prior work (source 5 of the sources); Hahn 2020; Yang, Chiang and Angluin 2024",
    protocol="Programs of masked hard attention for five star-free languages, on all 8,190 strings up to 12 letters and 512 of about 400; two-layer "
    "transformers trained 200 steps on prefixes up to 16 letters of six languages, tested on prefixes of 33 to 64; all programs of two "
    "looks, on all strings of 10 letters.",
    controls=(
        "the same programs with ties on the other side must fail somewhere",
        "parity, trained alike, must not be learnt; star-free languages must not stay at chance",
        "the search must find programs for star-free languages where it finds none for parity",
    ),
    caption="Left: programs with their ties, and with ties on the other side (a*b* asks only whether, not where). Middle: what training "
    "gives; the brackets that a program recognises exactly are not learnt, and softmax does not learn to count either. Right: the best of "
    "all programs of two looks. Dotted: chance. Bars are 95% intervals over seeds.",
    run=run,
    judge=judge,
    draw=draw,
    planted=planted,
)
