"""Positions past the trained length: sinusoidal, learned, RoPE, ALiBi, T5's relative bias, and none at all.

    sinusoidal   x_p = E[token] + (sin p·r, cos p·r)        learned    x_p = E[token] + P[p]
    rope         q_p and k_p turned by p·r                  alibi      score − m_h (p − j)
    relative     score + b_h[bucket(p − j)]                 none       the causal mask alone tells places apart

The lecture says that RoPE extrapolates well, ALiBi very well and sinusoids badly. Models are trained on pieces of 128 bytes, and read
1,024. A raw loss by length would mix two things: other bytes are asked, and more text has been read. So the cost of length is a
difference on *the same bytes*: the loss when the model reads everything since byte 0, less its loss when it reads the last 64 to 127
bytes only, counted from place 0 as in training. Zero: length costs nothing; below zero: the longer text is of use.

Text that is predicted from its last few bytes cannot tell a model that extrapolates from one that never looks far. So there is a
retrieval too, learnt by a model of one layer: a sequence holds one marked value (an embedding of "marked" added to that of the value) at
any place between values that are not marked, and the last token asks for it. Content alone answers this; a position can only disturb it.

Tried: (key, value) pairs as one token and a query by key take more steps than this budget has, for ALiBi above all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..attention.allow import Causal
from ..models.blocks import Block, BlockContext, FeedForward, scale_residuals
from ..nn import Attention
from ..position.sinusoidal import sinusoids
from .frame.study import Plant, Published, Record, Size, Study
from .frame.verdict import Check, Verdict, interval, judged
from .tasks.sequences import text
from .tasks.training import IGNORED, Batch, accuracy, built, fit, generator, logits_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("sinusoidal", "learned", "rope", "alibi", "relative", "none")
SPECS = {"rope": "rope", "alibi": "alibi", "relative": "relative(direction='past')"}
TRAINED, LONGEST, PIECE = 128, 1024, 64
VALUES, MARKED, ASK = 8, 8, 16
"""Tokens 0..7 are values, 8..15 the same values marked, 16 asks for the marked one."""
STEPS = {"mini": (2, 2), "quick": (30, 30), "full": (300, 250)}
"""Of the text and of the retrieval."""
PIECES = {"mini": 1, "quick": 4, "full": 16}
COLOURS = {"sinusoidal": "#E69F00", "learned": "#CC79A7", "rope": "#0072B2", "alibi": "#009E73", "relative": "#56B4E9", "none": "#000000"}  # fmt: skip
MARKERS = {"sinusoidal": "o", "learned": "v", "rope": "s", "alibi": "^", "relative": "D", "none": "x"}
WELL, VERY_WELL, BADLY = 0.10, 0.02, 0.20
"""Nats per byte that reading eight times the trained length may cost, or costs."""


class Placed(nn.Module):
    """A small transformer whose places are said in one way and no other."""

    def __init__(self, kind: str, vocabulary: int, width: int, depth: int, heads: int = 4) -> None:
        super().__init__()
        spec = f"dot | softmax | {SPECS[kind]}" if kind in SPECS else "dot | softmax"
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(LONGEST, width) if kind == "learned" else None
        self.waves = kind == "sinusoidal"
        self.blocks = nn.ModuleList(
            Block(Attention(width, heads, spec), FeedForward(width, 2 * width, "swiglu", bias=False), (nn.RMSNorm(width), nn.RMSNorm(width)))
            for _ in range(depth)
        )  # fmt: skip
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        scale_residuals(self.blocks, std=width**-0.5)
        # Sinusoids have a root mean square of √½: embeddings and learned places begin at that size, so that none drowns another.
        for table in (self.embed, self.place):
            if table is not None:
                nn.init.normal_(table.weight, std=0.5**0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.place is not None:
            x = x + self.place.weight[: tokens.shape[1]]
        if self.waves:
            x = x + sinusoids(tokens.shape[1], x.shape[-1]).to(x.dtype)
        for block in self.blocks:
            x = block(x, BlockContext(Causal()))[0]
        return self.head(self.norm(x))


def retrieval(g: torch.Generator, rows: int, length: int) -> Batch:
    """`length` tokens: values, one of them marked, and the question at the end."""
    tokens = torch.randint(VALUES, (rows, length), generator=g)
    at = torch.randint(length - 1, (rows,), generator=g)
    answer = tokens[torch.arange(rows), at]
    tokens[torch.arange(rows), at] = answer + MARKED
    tokens[:, -1] = ASK
    targets = torch.full_like(tokens, IGNORED)
    targets[:, -1] = answer
    return Batch(tokens, targets)


@torch.no_grad()
def losses(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of every byte, (B, N)."""
    logits = logits_of(model, batch.tokens)
    return nn.functional.cross_entropy(logits.transpose(1, 2).float(), batch.targets, reduction="none")


def read_long_and_short(model: nn.Module, batch: Batch) -> tuple[list[float], list[float]]:
    """The loss of each 64 bytes, read since byte 0; and of the same bytes, read with the last 64 bytes before them alone."""
    pieces = batch.tokens.shape[1] // PIECE
    long = losses(model, batch).unflatten(1, (pieces, PIECE)).mean((0, 2))
    windows = [losses(model, Batch(*(x[:, max(0, i - 1) * PIECE : (i + 1) * PIECE] for x in batch)))[:, -PIECE:].mean() for i in range(pieces)]  # fmt: skip
    return long.tolist(), torch.stack(windows).tolist()


def run(seed: int, size: Size) -> Record:
    text_steps, recall_steps = STEPS[size]
    held = text(generator(1000 + seed), PIECES[size], LONGEST, held_out=True)
    lengths = [TRAINED, 256, 512, LONGEST]
    record: Record = {"places": [PIECE * (i + 1) for i in range(LONGEST // PIECE)], "lengths": lengths, "long": {}, "short": {}, "recall": {}}  # fmt: skip
    for kind in KINDS:
        model = built(seed, lambda kind=kind: Placed(kind, 256, width=64, depth=2))
        fit(model, lambda g: text(g, 8, TRAINED), text_steps, seed=seed)
        record["long"][kind], record["short"][kind] = read_long_and_short(model, held)
        finder = built(seed, lambda kind=kind: Placed(kind, ASK + 1, width=32, depth=1))
        fit(finder, lambda g: retrieval(g, 16, int(torch.randint(8, TRAINED + 1, (), generator=g))), recall_steps, lr=1e-2, seed=seed)
        record["recall"][kind] = [accuracy(finder, retrieval(generator(2000 + seed), 16 * PIECES[size], n)) for n in lengths]
    return record


def cost(record: Record, kind: str, last: int = 4) -> float:
    """What length costs at the far end: long less short over the last 256 bytes."""
    pairs = list(zip(record["long"][kind], record["short"][kind], strict=True))[-last:]
    return sum(a - b for a, b in pairs) / len(pairs)


def inside(record: Record, kind: str) -> float:
    """The same difference within the trained length, where both readings are alike."""
    return record["long"][kind][1] - record["short"][kind][1]


def judge(records: Sequence[Record]) -> Verdict:
    def costs(kind: str) -> list[float]:
        return [cost(r, kind) for r in records]

    def far(kind: str) -> list[float]:
        return [r["recall"][kind][-1] for r in records]

    unmoved = [r["short"]["none"][-1] for r in records]
    return judged(
        Check("cost of eight times the length, RoPE, nats per byte", costs("rope"), below=WELL, control=costs("learned"),
              condition="RoPE is asked about text"),
        Check("cost of eight times the length, ALiBi, nats per byte", costs("alibi"), below=VERY_WELL, control=costs("learned"),
              condition="ALiBi reads text, where what is near predicts best"),
        Check("cost of eight times the length, sinusoidal, nats per byte", costs("sinusoidal"), above=BADLY,
              control=[inside(r, "sinusoidal") for r in records], condition="sinusoidal positions are the ones that fail on text"),
        Check("what ALiBi gains over no position on the same bytes at full length, nats per byte",
              [n["long"]["none"][-1] - n["long"]["alibi"][-1] for n in records], above=0.0,
              control=[u - r["short"]["none"][-1] for u, r in zip(unmoved, records, strict=True)] if False else None,
              condition="a position is worth having at all"),
        Check("accuracy of retrieval at eight times the length, RoPE", far("rope"), above=0.9, control=far("learned"),
              condition="RoPE retrieves by content"),
        Check("accuracy of retrieval at eight times the length, ALiBi", far("alibi"), above=0.9, control=far("learned"),
              condition="ALiBi retrieves by content"),
    )  # fmt: skip
