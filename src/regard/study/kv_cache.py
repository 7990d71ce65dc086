"""What a cache of keys and values saves, what it costs, and that it changes nothing.

To say token N + 1 a decoder without a cache reads all N tokens again: in every layer N rows of projections and N² pairs. Keys and values of
earlier tokens do not change, since nobody looks ahead; kept, one row of projections and N pairs are left:

    without   N·(linear part) + N²·(pair)           with   (linear part) + N·(pair)

so a cache saves the factor N at every length, whichever part is larger. Measured on the library's own model:

    operations   counted by torch, of the pairs alone and of all products, by length
    time         CPU seconds of this thread, whole text and one cached token in turn, so that whoever else uses the machine slows both
    memory       bytes of the cache, with a key head for each query head and with one for four
    exactness    logits of token after token against the whole text's, float64, for selections that blend, choose and carry

Source: lecture "Attention".
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ..models.llama import Llama, LlamaConfig
from ..nn import Cache
from .frame.study import Plant, Published, Record, Size, Study
from .frame.verdict import Check, Verdict, interval, judged
from .tasks.training import built, generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTHS: dict[Size, tuple[int, ...]] = {
    "mini": (32, 64, 128),
    "quick": (64, 128, 256, 512, 1024),
    "full": (64, 128, 256, 512, 1024, 2048, 4096),
}
REPEATS: dict[Size, int] = {"mini": 2, "quick": 3, "full": 5}
VOCABULARY, WIDTH, DEPTH, HEADS, GROUPED = 32, 64, 2, 4, 1
STEPS = 24
"""Tokens of the exactness test."""
SPECS = (
    "dot | softmax",
    "dot | entmax(1.5)",
    "euclidean | gd",
    "dot | selective",
    "cosine | abstain(hard, threshold=0) | alibi",
)


def _model(seed: int, spec: str = "dot | softmax", key_heads: int = HEADS) -> Llama:
    config = LlamaConfig(VOCABULARY, WIDTH, DEPTH, HEADS, key_heads, hidden=2 * WIDTH, attention=spec)
    return built(seed, config.build).eval()


def _pairs(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Products of attention, q·k and p·v, from the shapes that torch hands over."""
    return 2 * math.prod(q[:3]) * k[2] * (q[3] + v[3])


def _counted(model: Llama, tokens: Tensor, caches: tuple[Cache, ...] | None) -> tuple[int, int]:
    """Operations of all products, and of the pairs among them."""
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # pyright: ignore[reportPrivateUsage]
    counter = FlopCounterMode(display=False, custom_mapping={fused: _pairs})
    with counter:
        model(tokens, caches=caches)
    by_product = counter.get_flop_counts()["Global"]
    return sum(by_product.values()), by_product.get(fused, 0)


def _prefilled(model: Llama, tokens: Tensor) -> tuple[Cache, ...]:
    caches = model(tokens, caches=tuple(Cache() for _ in range(DEPTH))).caches
    assert caches is not None
    return caches


def _bytes(caches: Sequence[Cache]) -> int:
    return sum(x.numel() * x.element_size() for c in caches for x in (c.keys(), c.values()))


def _seconds(model: Llama, tokens: Tensor, caches: tuple[Cache, ...] | None) -> float:
    began = time.thread_time()
    model(tokens, caches=caches)
    return time.thread_time() - began


def _at(model: Llama, grouped: Llama, length: int, repeats: int, seed: int) -> dict[str, Any]:
    """One length: the last of its tokens, with the others in a cache and without."""
    tokens = torch.randint(VOCABULARY, (1, length), generator=generator(seed))
    caches = _prefilled(model, tokens[:, :-1])
    whole, pairs = _counted(model, tokens, None)
    cached, cached_pairs = _counted(model, tokens[:, -1:], caches)
    timed = dict[str, list[float]](whole=[], again=[], cached=[])
    for _ in range(repeats + 1):
        timed["whole"].append(_seconds(model, tokens, None))
        # One token is over so soon that the clock's own step would show.
        timed["cached"].append(sum(_seconds(model, tokens[:, -1:], caches) for _ in range(8)) / 8)
        timed["again"].append(_seconds(model, tokens, None))
    return {
        "operations": {"whole": whole, "cached": cached},
        "pairs": {"whole": pairs, "cached": cached_pairs},
        "bytes": {"all": _bytes(caches), "grouped": _bytes(_prefilled(grouped, tokens[:, :-1]))},
        # The first round warms up.
        "timed": {name: sorted(x[1:])[repeats // 2] for name, x in timed.items()},
    }


def _error(spec: str, seed: int, wrong: bool = False) -> float:
    """The largest difference of logits, one token after another against the whole text; `wrong` fills the cache with another first token."""
    model = _model(seed, spec).double()
    tokens = torch.randint(VOCABULARY, (2, STEPS), generator=generator(seed))
    whole, caches = model(tokens).logits, tuple(Cache() for _ in range(DEPTH))
    worst = 0.0
    for n in range(STEPS):
        said = (tokens[:, n : n + 1] + (wrong and n == 0)) % VOCABULARY
        out = model(said, caches=caches)
        caches = out.caches
        if n:
            worst = max(worst, float((out.logits[:, 0] - whole[:, n]).abs().max()))
    return worst


@torch.no_grad()
def run(seed: int, size: Size) -> Record:
    model, grouped = _model(seed), _model(seed, key_heads=GROUPED)
    return {
        "lengths": {str(n): _at(model, grouped, n, REPEATS[size], seed) for n in LENGTHS[size]},
        "error": {spec: _error(spec, seed) for spec in SPECS},
        "error_of_another_text": {spec: _error(spec, seed, wrong=True) for spec in SPECS},
    }


def _power(record: Record, what: str, name: str, over: str | None = None, last: int = 0) -> float:
    """The slope of log value against log length; of a ratio where `over` is given, of the last lengths where `last` is."""
    rows = list(record["lengths"].items())[-last:]
    points = [(math.log(int(n)), math.log(x[what][name] / (x[what][over] if over else 1))) for n, x in rows]
    mx, my = (sum(p[i] for p in points) / len(points) for i in (0, 1))
    return sum((x - mx) * (y - my) for x, y in points) / sum((x - mx) ** 2 for x, _ in points)


def judge(records: Sequence[Record]) -> Verdict:
    def power(what: str, name: str, over: str | None = None, last: int = 0) -> list[float]:
        return [_power(r, what, name, over, last) for r in records]

    return judged(
        Check(
            "largest difference of logits",
            [max(r["error"].values()) for r in records],
            below=1e-10,
            control=[min(r["error_of_another_text"].values()) for r in records],
            condition="exactness is meant",
            needed=True,
        ),
        Check(
            "power of N in the pairs of a cached token",
            power("pairs", "cached"),
            0.95,
            1.05,
            power("pairs", "whole"),
            "the pairs of attention are counted, N instead of N²",
        ),
        Check(
            "power of N in the pairs without a cache",
            power("pairs", "whole"),
            1.95,
            2.05,
            power("pairs", "cached"),
            "the pairs of attention are counted, N² without a cache",
        ),
        Check(
            "power of N in the operations that a cache saves, of all products",
            power("operations", "whole", "cached"),
            0.9,
            1.1,
            power("operations", "whole", "whole"),
            "all operations are counted: the cache saves the factor N",
        ),
        Check(
            "power of N in the time that a cache saves, last four lengths",
            power("timed", "whole", "cached", 4),
            0.7,
            1.5,
            power("timed", "whole", "again", 4),
            "time is measured on texts that are long enough",
        ),
        Check(
            "power of N in the bytes of the cache",
            power("bytes", "all"),
            0.95,
            1.05,
            condition="memory grows by the same bytes with each token",
        ),
    )


def draw(records: Sequence[Record], figure: Figure) -> None:
    from .frame.figure import line_with_band

    lengths = [int(n) for n in records[0]["lengths"]]

    def values(what: str, name: str, scale: float = 1.0) -> list[Any]:
        return [interval([r["lengths"][str(n)][what][name] * scale for r in records]) for n in lengths]

    left, middle, right = figure.subplots(1, 3)
    for index, (name, label) in ((1, ("whole", "whole text again")), (0, ("cached", "one token, cached"))):
        line_with_band(left, lengths, values("timed", name, 1e3), label, index)
        line_with_band(middle, lengths, values("operations", name, 1e-6), f"{label}: all products", index)
        pairs = [i.mean for i in values("pairs", name, 1e-6)]
        middle.plot(lengths, pairs, color=("#0072B2", "#D55E00")[index], ls="--", label=f"{label}: pairs")
    for index, (name, label) in ((0, ("all", "a key head for each of 4")), (2, ("grouped", "one key head for all 4"))):
        line_with_band(right, lengths, values("bytes", name, 1 / 1024), label, index)
    for axes, label in ((left, "CPU time of the next token, ms"), (middle, "million operations"), (right, "cache, KiB")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [f"{n:,}" if n < 1024 else f"{n // 1024}k" for n in lengths])
        axes.set_xlabel("tokens so far")
        axes.set_ylabel(label)
        axes.legend()
    # Room for the legend above the lines.
    middle.set_ylim(top=3e6)


def planted(kind: Plant, seed: int) -> Record:
    wobble = 1 + 0.01 * (seed % 3)
    rows: dict[str, Any] = {}
    for n in (64, 128, 256, 512):
        whole, cached = float(n * n), float(n)
        if kind == "negative":
            cached = whole = math.sqrt(n)
        if kind == "control":
            whole = cached
        rows[str(n)] = {
            "operations": {"whole": whole * wobble, "cached": cached}, "pairs": {"whole": whole, "cached": cached},
            "timed": {"whole": whole * wobble, "again": whole, "cached": cached},
            "bytes": {"all": cached * 512, "grouped": cached * 128},
        }  # fmt: skip
    wrong = dict.fromkeys(SPECS, 0.3)
    same = dict.fromkeys(SPECS, 1e-14 * wobble)
    return {
        "lengths": rows,
        "error": wrong if kind == "negative" else same,
        "error_of_another_text": same if kind == "control" else wrong,
    }


def _saved(records: Sequence[Record]) -> list[float]:
    last = max(records[0]["lengths"], key=int)
    return [r["lengths"][last]["timed"]["whole"] / r["lengths"][last]["timed"]["cached"] for r in records]


STUDY = Study(
    claim="A cache of keys and values makes the next token cost O(N) instead of O(N²), for memory that grows with N, and changes no logit.",
    source='Lecture "Attention" (source 3 of the sources)',
    protocol="A model of two layers, width 64 and four heads says the last token of texts of 64 to 4,096 tokens, with all others in its cache and "
    "without a cache, in turn. Operations are counted by torch, time is CPU time of the thread (median of 5 rounds), memory the bytes of "
    "the cache; logits are compared token by token in float64 for five mechanisms.",
    controls=(
        "a cache that another first token filled must change the logits",
        "the whole text against the whole text again must not save time",
        "the power of N with a cache must not be the one without",
    ),
    caption="Left: CPU time of the next token. Middle: operations; dashed, those of the pairs alone, which are N² and N. The whole text is dominated "
    "by the linear part up to some hundred tokens, so its time grows like N first and N² later; the ratio is N throughout. Right: what "
    "the cache holds. Bands are 95% intervals over seeds.",
    run=run,
    judge=judge,
    draw=draw,
    planted=planted,
    published=(
        Published(
            "a token costs O(N²) without a cache and O(N) with it",
            "N² against N",
            lambda rs: (
                f"pairs N^{interval([_power(r, 'pairs', 'whole') for r in rs]).mean:.2f} against "
                f"N^{interval([_power(r, 'pairs', 'cached') for r in rs]).mean:.2f}; at {int(max(rs[0]['lengths'], key=int)):,} tokens "
                f"{interval(_saved(rs))} times less CPU time"
            ),
            lambda rs: abs(interval([_power(r, "pairs", "whole") for r in rs]).mean - 2) > 0.05,
        ),
    ),
)
