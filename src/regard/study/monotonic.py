"""Monotonic attention reads its input once, forward, and still transduces as well as attention that waits for the end (Raffel et al. 2017).

The task: six different letters, each said one to six times ("aabccc…"), become the six letters, each once. The i-th letter can be
written when its run begins, and not before; how far one may wait beyond that is the delay.

    monotonic    stops at key j with probability σ(s_ij), never before where it stopped last; trained on the expected stop, used by
                 the hard rule (the first j with σ ≥ ½), so that it needs no key beyond the one it stops at
    softmax      offline: every letter is written with the whole input seen
    wait-k       softmax that has read k + 3.5·i keys when it writes letter i: a fixed delay, 3.5 being the mean run

    lag          keys read when a letter is written, minus those read when its run has just begun; below 0 it was guessed

The encoder is causal in all of them, or the delay would mean nothing, and letters are written one after another from their own
output (no teacher forcing). The control is the same task backwards, "cba": there the first answer is at the end, and a reader that
never goes back must fail while softmax does not. Pairs swapped ("badc") are shown too, but softmax does not learn them in these 200
batches either (0.43), so that they say little about the reader. Task and bounds were set after pilots of one seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.allow import Causal
from ..attention.inspect import Attended, inspect
from ..models.blocks import Block, BlockContext, FeedForward
from ..nn import Attention
from .frame.figure import COLOURS, MARKERS, bars
from .frame.study import Plant, Published, Record, Size, Study
from .frame.verdict import Check, Interval, Verdict, interval, judged
from .tasks.training import Batch, built, fit, generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COUNT, LETTERS, LONGEST = 6, 12, 6
KEYS = COUNT * LONGEST
MEAN = (1 + LONGEST) / 2
WAITS = (1, 4, 8)
WIDTH = 32
STEPS = {"mini": 3, "quick": 40, "full": 200}
TEXTS = 192
Order = Literal["forward", "swapped", "backward"]


class Runs(NamedTuple):
    source: Tensor
    """(rows, KEYS), 0 after the last run."""
    target: Tensor
    """(rows, COUNT)"""
    first: Tensor
    """Where the run of each target letter begins."""


def runs(g: torch.Generator, rows: int, order: Order) -> Runs:
    letters = 1 + torch.rand(rows, LETTERS, generator=g).argsort(1)[:, :COUNT]
    lengths = torch.randint(1, LONGEST + 1, (rows, COUNT), generator=g)
    ends = lengths.cumsum(1)
    which = (torch.arange(KEYS)[:, None] >= ends[:, None]).sum(-1)
    source = torch.where(which < COUNT, letters.gather(1, which.clamp(max=COUNT - 1)), 0)
    place = torch.arange(COUNT)
    place = {"forward": place, "backward": place.flip(0), "swapped": place ^ 1}[order]
    return Runs(source, letters[:, place], (ends - lengths)[:, place])


def _block() -> Block:
    norms = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
    return Block(Attention(WIDTH, 4, "dot | softmax | rope"), FeedForward(WIDTH, 2 * WIDTH), norms)


class Transducer(nn.Module):
    """A causal encoder, a causal decoder, and one head between them that reads the input by `spec`."""

    def __init__(self, spec: str, wait: int | None) -> None:
        super().__init__()
        self.letters, self.written = nn.Embedding(LETTERS + 1, WIDTH), nn.Embedding(LETTERS + 1, WIDTH)
        self.encoder, self.decoder = nn.ModuleList([_block(), _block()]), _block()
        self.reader = Attention(WIDTH, 1, spec, bias=True)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(3))
        self.ffn, self.head = FeedForward(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, LETTERS + 1)
        self.wait = wait

    def forward(self, source: Tensor, written: Tensor) -> Tensor:
        """Logits of the letters after each of those written so far, the first of which is 0."""
        x, y = self.encoded(source, written)
        return self.answer(y, self.reader(self.norms[0](y), self.norms[1](x), allow=self.seen_by_now(written.shape[1])))

    def hard(self, source: Tensor, written: Tensor) -> tuple[Tensor, Attended]:
        """The same with the reader's hard rule, and where it stopped."""
        x, y = self.encoded(source, written)
        q, k, v = self.reader._project(self.norms[0](y), self.norms[1](x))  # pyright: ignore[reportPrivateUsage]
        seen = inspect(q, k, cast(Tensor, v), "monotonic(mode=hard)")
        return self.answer(y, self.reader.joined(seen.output)), seen

    def encoded(self, source: Tensor, written: Tensor) -> tuple[Tensor, Tensor]:
        x = self.letters(source)
        for block in self.encoder:
            x = block(x, BlockContext(allow=Causal()))[0]
        return x, self.decoder(self.written(written), BlockContext(allow=Causal()))[0]

    def answer(self, y: Tensor, read: Tensor) -> Tensor:
        y = y + read
        return self.head(self.norms[2](y + self.ffn(y)))

    def seen_by_now(self, rows: int) -> Tensor | None:
        """For wait-k: which keys are read when letter i is written."""
        if self.wait is None:
            return None
        return (torch.arange(KEYS) < self.wait + MEAN * torch.arange(rows)[:, None])[None, None]


class Trained(NamedTuple):
    accuracy: float
    lag: float
    read: float
    """Keys scored for one text."""


def trained(seed: int, steps: int, spec: str, order: Order, wait: int | None = None) -> Trained:
    """Train one transducer, and let it write by itself."""
    model = built(seed, lambda: Transducer(spec, wait))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch.tokens, F.pad(batch.targets[:, :-1], (1, 0))).flatten(0, 1), batch.targets.flatten())

    fit(model, lambda g: Batch(*runs(g, 48, order)[:2]), steps, lr=5e-3, seed=seed, loss=loss)
    test = runs(generator(5000 + seed), TEXTS if steps == STEPS["full"] else 32, order)
    with torch.no_grad():
        letters, seen = _write(model, test.source, spec == "monotonic")
    if seen is not None:
        # A reader that stops nowhere has run to the end of the input.
        stops = torch.where(seen.accepted[:, 0], seen.weights()[:, 0].argmax(-1), KEYS - 1)
        keys, scored = stops + 1, float((stops[:, -1] + COUNT).float().mean())
    else:
        keys = torch.full_like(test.first, KEYS) if wait is None else (wait + MEAN * torch.arange(COUNT)).ceil().clamp(max=KEYS)
        scored = float(keys.expand(len(test.first), -1).sum(1).float().mean())
    lag = float((keys - (test.first + 1)).float().mean())
    return Trained(float((letters == test.target).float().mean()), lag, scored)


def _write(model: Transducer, source: Tensor, hard: bool) -> tuple[Tensor, Attended | None]:
    written, seen = torch.zeros(len(source), 1, dtype=torch.long), None
    for _ in range(COUNT):
        logits, seen = model.hard(source, written) if hard else (model(source, written), None)
        written = torch.cat([written, logits[:, -1:].argmax(-1)], 1)
    return written[:, 1:], seen


def run(seed: int, size: Size) -> Record:
    steps = STEPS[size]
    orders: tuple[Order, ...] = ("forward", "backward") if size == "mini" else ("forward", "swapped", "backward")
    measured = {
        **{f"monotonic {o}": trained(seed, steps, "monotonic", o) for o in orders},
        **{f"softmax {o}": trained(seed, steps, "dot | softmax", o) for o in orders},
        **{f"wait-{k} forward": trained(seed, steps, "dot | softmax", "forward", k) for k in WAITS},
    }
    return {name: t._asdict() for name, t in measured.items()}


def of(records: Sequence[Record], name: str, field: str = "accuracy") -> list[float]:
    return [r[name][field] for r in records]


def less(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]


def judge(records: Sequence[Record]) -> Verdict:
    forward, backward = of(records, "monotonic forward"), of(records, "monotonic backward")
    return judged(
        Check(
            "accuracy of the hard reader (control: the same task backwards)", forward, above=0.95, control=backward,
            condition="input and output have the same order: letters are then right",
        ),
        Check(
            "what softmax with the whole input has more (control: backwards)",
            less(of(records, "softmax forward"), forward), below=0.02, control=less(of(records, "softmax backward"), backward),
            condition="input and output have the same order: nothing is then lost against waiting for the end",
        ),
        Check(
            "lag in keys behind the earliest possible (control: softmax, which waits for the end)",
            of(records, "monotonic forward", "lag"), above=-0.5, below=1.0, control=of(records, "softmax forward", "lag"),
            condition="letters may be written as soon as they are heard",
        ),
        Check(
            "accuracy above wait-4, a fixed delay of three keys more (control: backwards)",
            less(forward, of(records, "wait-4 forward")), above=0.02, control=less(backward, of(records, "wait-4 forward")),
            condition="a fixed delay of three keys is the alternative",
        ),
    )  # fmt: skip


def draw(records: Sequence[Record], figure: Figure) -> None:
    trade, orders = figure.subplots(1, 2)
    names = {"monotonic forward": "monotonic, hard", "softmax forward": "softmax, offline"}
    names |= {f"wait-{k} forward": f"wait-{k}" for k in WAITS}
    for n, (name, label) in enumerate(names.items()):
        x, y = interval(of(records, name, "lag")), interval(of(records, name))
        trade.errorbar(
            [x.mean],
            [y.mean],
            xerr=_spread(x),
            yerr=_spread(y),
            color=COLOURS[n],
            marker=MARKERS[n],
            ms=8,
            capsize=2,
            ls="",
            label=label,
        )
    trade.set(
        xlabel="lag behind the earliest possible (keys)", ylabel="accuracy of letters", title="Delay and accuracy, in order"
    )
    trade.set_ylim(top=1.03)
    trade.legend(loc="lower right")
    rows = [(o, m) for o in ("forward", "swapped", "backward") for m in ("monotonic", "softmax") if f"{m} {o}" in records[0]]
    said = {"forward": "in order", "swapped": "pairs swapped", "backward": "backwards"}
    bars(orders, [f"{m}, {said[o]}" for o, m in rows], [interval(of(records, f"{m} {o}")) for o, m in rows])
    for patch, (_, m) in zip(orders.patches, rows, strict=True):
        patch.set_facecolor(COLOURS[0 if m == "monotonic" else 1])
    orders.set(xlim=(0, 1.05), xlabel="accuracy of letters", title="By the order of the output")


def _spread(x: Interval) -> list[list[float]]:
    return [[x.mean - x.low], [x.high - x.mean]]


def planted(kind: Plant, seed: int) -> Record:
    shift = 0.01 * torch.rand(1, generator=generator(seed)).item()

    def one(accuracy: float, lag: float) -> dict[str, float]:
        return {"accuracy": accuracy - shift, "lag": lag + shift, "read": 30.0}

    works = one(0.99, 0.1) if kind != "negative" else one(0.6, 6.0)
    return {
        "monotonic forward": works,
        "monotonic backward": one(0.99, 0.1) if kind == "control" else one(0.3, 6.0),
        "softmax forward": one(1.0, 0.1 if kind == "control" else 22.0),
        "softmax backward": one(1.0, 22.0),
        **{f"wait-{k} forward": one(0.9, k - 1) for k in WAITS},
    }


STUDY = Study(
    claim="Monotonic attention transduces online: it writes each letter as soon as it is heard, as accurately as softmax that has "
    "seen the whole input, and more accurately than a fixed delay.",
    source="GD-Attention's map of prior work, hard selection; Raffel et al. 2017 (arXiv:1704.00784)",
    protocol="Six letters, each said one to six times, become six letters. A causal encoder and decoder with one reading head, trained "
    "on 200 batches of 48 and tested on 192 texts that it writes by itself: monotonic (trained on expected stops, used by the hard "
    "rule), softmax over the whole input, and softmax that has read k + 3.5·i keys at letter i.",
    controls=("the same letters asked for backwards", "softmax, whose delay is the whole input", "fixed delays, wait-1, 4 and 8"),
    caption="Left: accuracy against the keys read beyond the earliest possible; the upper left corner is best. Right: what the order "
    "of the output does to a reader that never goes back; bars are means with 95% intervals.",
    run=run,
    judge=judge,
    draw=draw,
    planted=planted,
    published=(
        Published(
            "decoding is online and takes time linear in the input: no key is scored twice but the one where the reader stands",
            f"at most {KEYS + COUNT} keys for {KEYS} inputs and {COUNT} outputs",
            lambda records: f"{interval(of(records, 'monotonic forward', 'read'))} keys, softmax {KEYS * COUNT}",
            lambda records: interval(of(records, "monotonic forward", "read")).low > KEYS + COUNT,
        ),
    ),
    parts={"monotonic": "mechanisms/monotonic.md"},
)  # fmt: skip
