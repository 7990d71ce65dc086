"""Sparse weights past the trained length: does entmax still choose one item of many where softmax blends them all?

    softmax  p_j ∝ exp(s_j)                    one item with a lead Δ over N−1 others: p = 1 / (1 + (N−1) e^{−Δ}), which falls to 0 as N grows
    entmax   p_j = [(α−1) s_j − τ]₊^{1/(α−1)}    a lead Δ ≥ 1/(α−1) over all others: p = 1, whatever N is

So a bounded score cannot keep softmax sharp at every length (Veličković et al. 2024), and entmax can if the lead stays above its
threshold (Peters et al. 2019; Vasylenko et al. 2025). Two tasks, one query over N items, one layer, trained on 4 to 32 items:

    lookup   an item is a key and a value; one item has the key asked for. The lead does not depend on N.
    maximum  an item is a priority in (0, 1) and a value; the value of the highest priority is asked. The lead shrinks as 1/N.

Accuracy asks whether the right value is still the likeliest, which survives much blending; the weight on the right item does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..nn import Attention
from .frame.figure import line_with_band
from .frame.study import Plant, Record, Size, Study
from .frame.verdict import Check, Verdict, interval, judged
from .tasks.training import Batch, built, fit, generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SPECS = {"entmax": "dot | entmax(1.5)", "softmax": "dot | softmax", "sparsemax": "dot | sparsemax"}
KEYS, VALUES, WIDTH = 32, 8, 32
TRAINED = 32


class Items(nn.Module):
    """One query over N items by one attention layer of one head; what is read goes straight to the values' logits."""

    def __init__(self, task: str, spec: str) -> None:
        super().__init__()
        self.task = task
        self.value = nn.Embedding(VALUES, WIDTH)
        self.key = (
            nn.Embedding(KEYS, WIDTH)
            if task == "lookup"
            else nn.Sequential(nn.Linear(1, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        )
        self.asked = nn.Embedding(KEYS, WIDTH)
        self.attention = Attention(WIDTH, 1, spec)
        self.head = nn.Linear(WIDTH, VALUES)

    def meet(self, items: Tensor) -> tuple[Tensor, Tensor]:
        """The query (B, 1, M) and the items (B, N, M). `items` (B, 1 + N, 2) holds the question in its first row."""
        what = items[:, 1:, 0] if self.task == "lookup" else items[:, 1:, :1]
        keys = self.key(what.long() if self.task == "lookup" else what)
        return self.asked(items[:, :1, 0].long()), keys + self.value(items[:, 1:, 1].long())

    def forward(self, items: Tensor) -> Tensor:
        query, context = self.meet(items)
        return self.head(self.attention(query, context))


def lookup(g: torch.Generator, rows: int, items: int) -> Batch:
    """Keys and values; the key asked for is that of one item alone."""
    asked = torch.randint(KEYS, (rows, 1), generator=g)
    keys = (asked + torch.randint(1, KEYS, (rows, items), generator=g)) % KEYS
    at = torch.randint(items, (rows, 1), generator=g)
    return _batch(g, keys.scatter(1, at, asked), asked, at)


def maximum(g: torch.Generator, rows: int, items: int) -> Batch:
    """Priorities and values; the item of the highest priority is asked for."""
    priority = torch.rand(rows, items, generator=g)
    return _batch(g, priority, torch.zeros(rows, 1), priority.argmax(1, keepdim=True))


def _batch(g: torch.Generator, keys: Tensor, asked: Tensor, at: Tensor) -> Batch:
    values = torch.randint(VALUES, keys.shape, generator=g)
    first = torch.stack([asked.float(), at.float()], 2)
    return Batch(torch.cat([first, torch.stack([keys.float(), values.float()], 2)], 1), values.gather(1, at))


Draw = Callable[[torch.Generator, int, int], Batch]
TASKS: dict[str, Draw] = {"lookup": lookup, "maximum": maximum}
LENGTHS = {"mini": (32, 512), "quick": (16, 32, 128, 1024), "full": (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)}
STEPS, ROWS = {"mini": 12, "quick": 120, "full": 300}, {"mini": 16, "quick": 64, "full": 128}
FAR = 1024
"""Items at which the claim is judged: 32 times the longest that was trained."""
ARMS = (*SPECS, "log-N softmax", "uniform")
"""The trained three; softmax whose scores grow with log N past the trained length, from the same weights; and equal weights."""


@torch.no_grad()
def measured(model: Items, batch: Batch, sharpen: float = 1.0) -> Record:
    """Accuracy, the weight on the right item, and the effective number of items (exp of the entropy).

    `sharpen` multiplies the query, and so every score.
    """
    query, context = model.meet(batch.tokens)
    seen = model.attention.inspect(query * sharpen, context)
    right = seen.weights()[:, 0, 0].gather(1, batch.tokens[:, 0, 1:].long())
    said = model.head(model.attention.joined(seen.output)).argmax(-1)
    return {
        "accuracy": float((said == batch.targets).float().mean()),
        "weight": float(right.mean()),
        "effective": float(seen.effective.mean()),
    }


@torch.no_grad()
def blended(model: Items, batch: Batch) -> Record:
    """The same items under equal weights: what a layer that chooses nothing would say."""
    attention, (_, context) = model.attention, model.meet(batch.tokens)
    assert attention.v is not None
    assert attention.out is not None
    said = model.head(attention.out(attention.v(context.mean(1, keepdim=True)))).argmax(-1)
    items = context.shape[1]
    return {"accuracy": float((said == batch.targets).float().mean()), "weight": 1 / items, "effective": float(items)}


def run(seed: int, size: Size) -> Record:
    record: Record = {"lengths": list(LENGTHS[size]), "tasks": {}}
    for task, draw_batch in TASKS.items():

        def batch(g: torch.Generator, draw_batch: Draw = draw_batch) -> Batch:
            return draw_batch(g, 64, int(torch.randint(4, TRAINED + 1, (), generator=g)))

        arms: dict[str, list[Record]] = {arm: [] for arm in ARMS}
        models = {arm: built(seed, lambda task=task, spec=spec: Items(task, spec)) for arm, spec in SPECS.items()}
        for model in models.values():
            fit(model, batch, STEPS[size], lr=1e-2, seed=seed)
        for n in LENGTHS[size]:
            asked = draw_batch(generator(1000 + seed), ROWS[size], n)
            for arm, model in models.items():
                arms[arm].append(measured(model, asked))
            sharper = max(1.0, math.log(n) / math.log(TRAINED))
            arms["log-N softmax"].append(measured(models["softmax"], asked, sharper))
            arms["uniform"].append(blended(models["softmax"], asked))
        record["tasks"][task] = {arm: {key: [m[key] for m in made] for key in made[0]} for arm, made in arms.items()}
    return record


def values(records: Sequence[Record], task: str, arm: str, key: str, items: int = FAR) -> list[float]:
    """One number per seed at a length, or at the longest where that length was not measured."""
    return [r["tasks"][task][arm][key][r["lengths"].index(items) if items in r["lengths"] else -1] for r in records]


def lead(records: Sequence[Record], task: str) -> list[float]:
    """What entmax gains over softmax in accuracy."""
    pairs = zip(values(records, task, "entmax", "accuracy"), values(records, task, "softmax", "accuracy"), strict=True)
    return [a - b for a, b in pairs]


def judge(records: Sequence[Record]) -> Verdict:
    uniform = {task: values(records, task, "uniform", "accuracy") for task in TASKS}
    learnt = Check(
        f"softmax's accuracy of lookup at {TRAINED} items, the trained length",
        values(records, "lookup", "softmax", "accuracy", TRAINED),
        above=0.95,
        control=uniform["lookup"],
    )
    if not learnt.passed:
        # Where nothing was learnt there is nothing to lose with length.
        return judged(learnt)
    return judged(
        Check(f"entmax's accuracy of lookup at {FAR:,} items", values(records, "lookup", "entmax", "accuracy"), above=0.9,
              control=values(records, "lookup", "softmax", "accuracy"),
              condition="the right item's lead does not shrink with the length (looking up a key)"),
        Check(f"entmax's weight on the right item of lookup at {FAR:,} items", values(records, "lookup", "entmax", "weight"), above=0.8,
              control=values(records, "lookup", "softmax", "weight"), condition="the weight of a looked-up item is asked for"),
        Check(f"entmax's accuracy of the maximum at {FAR:,} items", values(records, "maximum", "entmax", "accuracy"), above=0.9,
              control=values(records, "maximum", "softmax", "accuracy"), condition="the largest of many close priorities is asked for"),
        Check(f"what entmax gains over softmax in accuracy of the maximum at {FAR:,} items", lead(records, "maximum"), above=0.1,
              control=[a - b for a, b in zip(uniform["maximum"], values(records, "maximum", "softmax", "accuracy"), strict=True)],
              condition="entmax is only asked to be better than softmax on the maximum"),
    )  # fmt: skip


def draw(records: Sequence[Record], figure: Figure) -> None:
    panels = (
        ("lookup", "accuracy", "looking up a key", "share of right answers"),
        ("maximum", "accuracy", "the highest of N priorities", "share of right answers"),
        ("lookup", "weight", "looking up a key", "weight on the right item"),
    )
    lengths = records[0]["lengths"]
    for axis, (task, key, title, label) in zip(figure.subplots(1, 3), panels, strict=True):
        for number, arm in enumerate(ARMS):
            line_with_band(axis, lengths, [interval(values(records, task, arm, key, n)) for n in lengths], arm, number)
        axis.axvline(TRAINED, color="grey", linestyle=":", linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_ylim(-0.03, 1.05)
        axis.set_xlabel("items (dotted: the most in training)")
        axis.set_ylabel(label)
        axis.set_title(title)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(ARMS))


def planted(kind: Plant, seed: int) -> Record:
    jitter = 0.01 * (seed % 3)
    good, bad = {"accuracy": 0.97, "weight": 0.95, "effective": 1.2}, {"accuracy": 0.4, "weight": 0.1, "effective": 300.0}
    far = {
        "positive": {"softmax": bad, "entmax": good},
        "negative": {"softmax": good, "entmax": bad},
        "control": {"softmax": good, "entmax": good},
    }[kind]
    far = {**far, "sparsemax": far["entmax"], "log-N softmax": far["softmax"], "uniform": {"accuracy": 0.13, "weight": 0.0, "effective": 1024.0}}  # fmt: skip
    near = {arm: ({**good, "accuracy": 0.98} if arm != "uniform" else far["uniform"]) for arm in ARMS}
    made = {arm: {key: [near[arm][key] + jitter, far[arm][key] + jitter] for key in good} for arm in ARMS}
    return {"lengths": [TRAINED, FAR], "tasks": dict.fromkeys(TASKS, made)}


STUDY = Study(
    claim="Sparse attention (entmax) goes on retrieving one item as the number of items grows far past training, where softmax disperses.",
    source="GD-Attention's map of prior work, sparse blending: Peters et al. 2019; for length Veličković et al. 2024, Vasylenko et al. 2025",
    protocol="One query over N items, one attention layer of width 32 and one head, trained on 4 to 32 items, tested on up to 8,192: "
    "looking up a key (its lead in score does not depend on N) and taking the highest of N priorities (its lead shrinks as 1/N).",
    controls=(
        "softmax, trained alike on the same batches",
        "equal weights on all items, from softmax's trained layer",
        "softmax at the trained length, which must have learnt the task",
    ),
    caption="Accuracy and weight on the right item by the number of items; bands are 95% intervals over seeds. Past the dotted line nothing was "
    "trained. Entmax and sparsemax hold on to the looked-up item; so does softmax whose scores are multiplied by log N / log 32 past 32 items. On the "
    "maximum all of them fall.",
    run=run,
    judge=judge,
    draw=draw,
    planted=planted,
)
