"""Hallucination is a query without a near star: low coherence foretells a wrong answer.

SmolLM2-135M-Instruct completes 198 short factual sentences ("The capital of France is") and 36 about things that do not exist, where
whatever it says is wrong. At the last word before the answer, these are read; each is larger where the answer should be more to be trusted:

    coherence         GD's L_c²/L² of the query with its nearest key, log, mean over all layers and heads
    nearest score     the largest attention score, which `abstain(threshold=…)` compares, mean over all layers and heads
    not at rest       1 − the weight on the first token, where heads rest (the null slot that the model made itself), mean over all
    word coherence    GD's coherence of the last state with its nearest word vector, by angle
    max-softmax       the largest probability of the next token
    −entropy          of the next token
    answer probability  the mean log-probability of the whole answer

AUROC: the probability that a right answer scores above a wrong one. No layer and no head is picked, so nothing is fitted and nothing
held out is needed. Intervals are over questions: each question's jackknife pseudo-value of the AUROC averaged over wordings. Kinds of
questions differ in wording and in difficulty, so the same is computed from pairs within one kind. Controls are the same measures with
right and wrong shuffled among the questions.

Coherence comes out below ½, and the reason is length: names that do not exist, and rare ones, are cut into more tokens, and among more
keys the nearest is nearer. The number of tokens alone has an AUROC of 0.35 (0.30 to 0.41), as low as coherence; among pairs of one kind and one
number of tokens coherence has 0.45 (0.35 to 0.55), which says nothing, and max-softmax 0.82 (0.75 to 0.89).

Tried: questions after five examples, two of them answered "unknown"; the model copied the examples (see `tasks/questions.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..attention.inspect import inspect
from ..nn import Attention, Cache
from ..state import State
from .frame.figure import COLOURS, MARKERS
from .frame.study import Plant, Record, Size, Study
from .frame.verdict import Check, Interval, Verdict, interval, judged
from .tasks.packaged import SMOLLM2, opened
from .tasks.questions import frame, is_right, questions
from .tasks.training import generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURES = ("coherence", "nearest score", "not at rest", "word coherence", "max-softmax", "−entropy", "answer probability")
LONGEST = 5
"""Tokens of an answer."""


def read(model: Any, tokens: list[int], caches: Sequence[Cache]) -> tuple[Any, dict[Attention, Tensor]]:
    """Logits and caches after these tokens, and what each layer asked at the last of them, before it was turned."""
    from ..models.base import Look

    asked: dict[Attention, Tensor] = {}
    layers = [m for m in model.modules() if isinstance(m, Attention)]

    def remember(layer: Attention) -> Any:
        return layer.q.register_forward_hook(lambda _, __, out: asked.__setitem__(layer, out[:, -1:]))

    handles = [remember(layer) for layer in layers]
    try:
        return model(torch.tensor([tokens]), caches=caches, look=Look(hidden=True)), asked
    finally:
        for handle in handles:
            handle.remove()


def attention_measures(asked: dict[Attention, Tensor], caches: Sequence[Cache]) -> dict[str, float]:
    """Means over layers and heads, of the last query against all keys so far."""
    coherence, nearest, rest = list[Tensor](), list[Tensor](), list[Tensor]()
    for (layer, raw), filled in zip(asked.items(), caches, strict=True):
        k, v = filled.keys(), filled.values()
        q = layer.spec.position.apply(raw.unflatten(-1, (layer.heads, -1)).transpose(1, 2), k.shape[2] - 1, State())
        coherence.append(inspect(q, k, v, "gd").jump().coherence.log().flatten())
        seen = inspect(q, k, v, "softmax")
        weights, energy = seen.weights(), seen.energy
        assert energy is not None
        # softmax's energy is −log Σ exp s, so that the largest score is the log of the largest weight less the energy.
        nearest.append((weights.amax(-1).log() - energy).flatten())
        rest.append(weights[..., 0].flatten())
    return {
        "coherence": float(torch.cat(coherence).mean()),
        "nearest score": float(torch.cat(nearest).mean()),
        "not at rest": 1 - float(torch.cat(rest).mean()),
    }


@torch.no_grad()
def run(seed: int, size: Size) -> Record:
    model, tokenizer = opened("smollm2")
    every = questions(seed, {"mini": 0.02, "quick": 0.1, "full": 0.5}[size])
    every = every[1::3] if size == "mini" else every
    before = model(torch.tensor([tokenizer.encode(frame(seed))]), caches=[Cache()] * model.cache_count).caches
    rows, last = list[Record](), list[Tensor]()
    for q in every:
        out, asked = read(model, tokenizer.encode(q.text, bos=False), before)
        measured = attention_measures(asked, out.caches)
        logits = out.logits[0, -1]
        chances = logits.softmax(-1)
        measured |= {"max-softmax": float(chances.amax()), "−entropy": -float(torch.special.entr(chances).sum())}
        last.append(out.hidden[-1][0, -1])
        text, measured["answer probability"] = answered(model, tokenizer, logits, out.caches)
        rows.append(
            {"question": f"{q.kind}: {q.subject}", "sort": q.sort, "said": text, "right": is_right(text, q.answers), **measured}
        )
    words: Any = model.get_parameter("head.weight")[None, None]
    near = inspect(torch.stack(last)[None, None], words, words, "cosine | gd").jump().coherence[0, 0]
    shuffled = torch.randperm(len(rows), generator=generator(seed)).tolist()
    for row, value, i in zip(rows, near.tolist(), shuffled, strict=True):
        row |= {"word coherence": value, "right_of_another": rows[i]["right"]}
    return {"answers": rows}


def answered(model: Any, tokenizer: Any, logits: Tensor, caches: Any) -> tuple[str, float]:
    """What the model says up to the end of the clause, and the mean log-probability of its tokens."""
    said, chances = list[int](), list[float]()
    for _ in range(LONGEST):
        chances.append(float(logits.log_softmax(-1).amax()))
        said.append(int(logits.argmax()))
        if said[-1] in tokenizer.eos_ids or any(mark in tokenizer.decode(said[-1:]) for mark in ".,;\n"):
            break
        out = model(torch.tensor([said[-1:]]), caches=caches)
        logits, caches = out.logits[0, -1], out.caches
    return tokenizer.decode(said).strip(), math.fsum(chances) / len(chances)


def pairs(record: Record, measure: str, flag: str, within: bool) -> tuple[Tensor, Tensor, list[str], list[str]]:
    """For each right and wrong answer of one wording: 1 where the right one scores higher (½ if equal), and whether the pair counts."""
    right = [a for a in record["answers"] if a[flag]]
    wrong = [a for a in record["answers"] if not a[flag]]
    high, low = (torch.tensor([a[measure] for a in side], dtype=torch.float64) for side in (right, wrong))
    higher = (high[:, None] > low).double() + 0.5 * (high[:, None] == low)
    kinds = [[a["sort"] for a in side] for side in (right, wrong)]
    counts = torch.tensor([[not within or a == b for b in kinds[1]] for a in kinds[0]], dtype=torch.float64).view(higher.shape)
    return higher * counts, counts, [a["question"] for a in right], [a["question"] for a in wrong]


def by_question(records: Sequence[Record], measure: str, flag: str = "right", within: bool = False) -> dict[str, float]:
    """Jackknife pseudo-values of the AUROC, one per question: their mean is the AUROC, their spread its uncertainty over questions."""
    tables = [pairs(r, measure, flag, within) for r in records]
    total, count = sum(float(h.sum()) for h, *_ in tables), sum(float(c.sum()) for _, c, *_ in tables)
    if not count:
        return {"": 0.5}
    without: dict[str, list[float]] = {}
    for higher, counts, right, wrong in tables:
        for names, dim in ((right, 1), (wrong, 0)):
            for name, h, c in zip(names, higher.sum(dim).tolist(), counts.sum(dim).tolist(), strict=True):
                taken = without.setdefault(name, [0.0, 0.0])
                taken[0], taken[1] = taken[0] + h, taken[1] + c
    n, whole = len(without), total / count
    return {q: n * whole - (n - 1) * ((total - h) / (count - c) if count > c else whole) for q, (h, c) in without.items()}


def _against(records: Sequence[Record], measure: str, other: str, flag: str = "right") -> list[float]:
    one, two = (by_question(records, m, flag) for m in (measure, other))
    return [one[q] - two[q] for q in one]


def judge(records: Sequence[Record]) -> Verdict:
    def values(measure: str, flag: str = "right", within: bool = False) -> list[float]:
        return list(by_question(records, measure, flag, within).values())

    other, one = "right_of_another", "coherence"
    existing = [{"answers": [a for a in r["answers"] if not a["question"].startswith("made-up")]} for r in records]
    alike, alike_shuffled = (list(by_question(existing, one, flag, within=True).values()) for flag in ("right", other))
    return judged(
        Check("AUROC of coherence", values(one), above=0.6, control=values(one, other), needed=True,
              condition="questions of all kinds are mixed"),
        Check("AUROC of coherence within one kind of question, made-up things too", values(one, within=True), above=0.55,
              control=values(one, other, within=True), condition="things that exist are told from things that do not"),
        Check("AUROC of coherence within one kind of question, things that exist", alike, above=0.55, control=alike_shuffled,
              condition="questions of one kind are compared"),
        Check("AUROC of coherence above that of max-softmax", _against(records, one, "max-softmax"), above=0.0,
              control=_against(records, one, "max-softmax", other), condition="the probability of the answer is not to be had"),
    )  # fmt: skip


def draw(records: Sequence[Record], figure: Figure) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(1.7, 1))
    existing = [{"answers": [a for a in r["answers"] if not a["question"].startswith("made-up")]} for r in records]
    rows = (
        (records, "right", False, "all questions"),
        (records, "right", True, "pairs of one kind"),
        (records, "right_of_another", False, "control: shuffled"),
        (existing, "right", True, "of one kind, things that exist"),
    )
    for i, (given, flag, within, label) in enumerate(rows):
        made = [interval(list(by_question(given, m, flag, within).values())) for m in MEASURES]
        places = [len(MEASURES) - 1 - j + (0.27, 0.09, -0.27, -0.09)[i] for j in range(len(MEASURES))]
        if i < 3:
            _points(left, places, made, i, label)
            continue
        means, spread = [x.mean for x in made], [[x.mean - x.low for x in made], [x.high - x.mean for x in made]]
        left.errorbar(means, places, xerr=spread, fmt=MARKERS[3], color=COLOURS[2], capsize=2, label=label)
    left.set_yticks(range(len(MEASURES)), list(reversed(MEASURES)))
    left.axvline(0.5, color="#999999", linestyle="--", linewidth=1)
    left.set(xlabel="AUROC, right above wrong (95% over questions)", title="What foretells a wrong answer of SmolLM2")
    left.legend(loc="lower left", bbox_to_anchor=(-0.28, 1.07), ncols=4, columnspacing=1)
    kinds = sorted({_label(a) for r in records for a in r["answers"]})
    shares = [interval([_share(r, k) for r in records if any(_label(a) == k for a in r["answers"])]) for k in kinds]
    spread = [[s.mean - max(s.low, 0) for s in shares], [min(s.high, 1) - s.mean for s in shares]]
    right.barh(range(len(kinds)), [s.mean for s in shares], xerr=spread, color=COLOURS[2], capsize=2)
    right.set_yticks(range(len(kinds)), kinds)
    right.set(xlabel="share right (95% over wordings)", xlim=(0, 1), title="Answers")


def _points(axes: Any, places: list[float], made: list[Interval], index: int, label: str) -> None:
    spread = [[i.mean - i.low for i in made], [i.high - i.mean for i in made]]
    axes.errorbar([i.mean for i in made], places, xerr=spread, fmt=MARKERS[index], color=(COLOURS[0], COLOURS[1], COLOURS[7])[index], capsize=2, label=label)  # fmt: skip


def _label(answer: Record) -> str:
    return answer["question"].partition(":")[0]


def _share(record: Record, label: str) -> float:
    marks = [a["right"] for a in record["answers"] if _label(a) == label]
    return sum(marks) / len(marks)


def planted(kind: Plant, seed: int) -> Record:
    g, rows = generator(seed), list[Record]()
    for i in range(120):
        right, noise, other = (
            i % 2 == 0,
            torch.randn(len(MEASURES), generator=g).tolist(),
            int(torch.randint(2, (1,), generator=g)),
        )
        gain = [0.0 if kind == "negative" else (2.0 if m == "coherence" else 0.3) for m in MEASURES]
        row = {m: noise[j] + gain[j] * right for j, m in enumerate(MEASURES)}
        rows.append({"question": f"{'capital' if i % 3 else 'sum'}: {i}", "sort": "capital" if i % 3 else "sum", "said": "", "right": right, "right_of_another": right if kind == "control" else bool(other), **row})  # fmt: skip
    return {"answers": rows}


STUDY = Study(
    claim="Hallucination is a query without a near star: low coherence foretells a wrong answer.",
    source="Lecture “The transformer as a surveyor” (source 4); GD's coherence and refusal (source 5)",
    protocol="SmolLM2-135M-Instruct completes half of 234 factual sentences, 36 of them about what does not exist, in another wording or after another first line for each seed; measures at the last word before the answer, no layer or head picked; AUROC of right against wrong with intervals over questions (jackknife).",
    controls=("right and wrong shuffled among the questions of a wording", "pairs within one kind of question, so that kinds are not told apart instead"),
    caption="Left: how well each measure puts right answers above wrong ones; ½ says nothing. Right: what the model knows.",
    run=run,
    judge=judge,
    draw=draw,
    planted=planted,
    needs=(SMOLLM2,),
)  # fmt: skip
