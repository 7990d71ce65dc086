"""Decoding SmolLM2-135M beside `transformers.generate` and llama.cpp: greedy, in turns, the same tokens asked of both.

The note of a row says which share of the memory's measured bandwidth a step of ours reaches: bytes of weights over its time,
against the fastest of several sums over a tensor that no cache holds. For int8 it says what the bytes cost: the perplexity of
a fixed paragraph and the largest change of a logit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor

from demo.speak import PARAGRAPH
from regard.models import Sampling, generate, perplexity
from regard.models import downloads as hub
from regard.models.decode.cache import static_caches
from regard.models.decode.generate import PREFILL, logits_of
from regard.models.decode.int8_cache import int8_caches
from regard.models.decode.prepare import Weights, prepare

from . import llamacpp
from .harness import UNWRITTEN, Bench, Case, Reach, Row, quartiles, take_turns

TITLE = "Decoding SmolLM2-135M"
PEER = "transformers.generate"


def cases(bench: Bench) -> list[Case]:
    n = 8 if bench.settings.quick else 64
    return [
        Case("float32, one row", lambda: _row(bench, 1, 32, n, "float32", Reach(2, "faster"))),
        Case("int8, one row", lambda: _row(bench, 1, 32, n, "int8", Reach(4, "faster"))),
        Case("prefill", lambda: _row(bench, 1, bench.settings.size(512), 1, "float32", Reach(1.2, "faster"))),
        Case("float32, eight rows", lambda: _row(bench, 8, 32, n, "float32", Reach(2, "faster"))),
        Case("int8, eight rows", lambda: _row(bench, 8, 32, n, "int8", None)),
        *(
            Case(f"{w}, int8 cache, after {c}", lambda w=w, c=c: _bytes_kept(bench, w, bench.settings.size(c)))
            for w in ("int8", "q4")
            for c in (128, 1024)
        ),
        *(_beside_llamacpp(bench, n) if llamacpp.installed() is not None else []),
    ]


def _beside_llamacpp(bench: Bench, new: int) -> list[Case]:
    reach = Reach(1.0, "faster")
    return [
        Case("q4, one row, llama.cpp", lambda: _same_file(bench, 1, new, "q4", reach)),
        Case("int8, one row, llama.cpp", lambda: _same_file(bench, 1, new, "int8", reach)),
        Case("q4, eight rows, llama.cpp", lambda: _same_file(bench, llamacpp.SLOTS, new, "q4", reach)),
        Case("int8, eight rows, llama.cpp", lambda: _same_file(bench, llamacpp.SLOTS, new, "int8", reach)),
        Case("q4, prefill, llama.cpp", lambda: _same_file(bench, 1, 1, "q4", None, prompt=bench.settings.size(512))),
    ]


def _same_file(bench: Bench, rows: int, new: int, weights: Weights, reach: Reach | None, prompt: int = 32) -> Row:
    """Ours and llama.cpp's on the same GGUF; the text of one row is that of the float32 weights on both sides."""
    model, tokenizer, _ = _models()
    ids = tokenizer.encode(PARAGRAPH)
    # A place of the paragraph after which llama.cpp's rounding of activations to bytes changes no token.
    prompts = [ids[80:112]] if rows == 1 else [ids[11 * i : 11 * i + 32] for i in range(rows)]
    if prompt != 32:
        prompts = [(ids * (prompt // len(ids) + 1))[:prompt]]

    def ours() -> list[str]:
        out = generate(model, prompts, Sampling(max_tokens=new, stop_ids=UNWRITTEN), weights=weights).tokens
        assert all(len(row) == new for row in out), "a row ended early"
        return [tokenizer.decode(row) for row in out]

    def theirs() -> list[str]:
        return llamacpp.texts(prompts, new)

    note = ""
    if rows == 1 and new >= 64:
        exact = (generate(model, prompts, Sampling(max_tokens=new), tokenizer=tokenizer).text or [""])[0]
        same = [text[0].strip() == exact.strip() for text in (ours(), theirs())]
        assert same[0] or weights == "int8", "q4 writes another text than its own weights in float32"
        note = f"text of the float32 weights: ours {'same' if same[0] else 'another'}, llama.cpp {'same' if same[1] else 'another'}; "
    pairs = take_turns(ours, theirs, bench.settings)
    ratios = pairs.ratios("faster")
    low, high = quartiles(ratios)
    step = median(pairs.ours) / new
    what = f"{weights}, {'prefill' if new == 1 else 'one row' if rows == 1 else f'{rows} rows'}"
    run = f"{prompt} tokens in" if new == 1 else f"{new} after {prompt}"
    note += "" if new == 1 else _bandwidth(weights, step)
    return Row(what, run, "llama.cpp", step, median(pairs.theirs) / new, median(ratios), low, high, reach, "faster", note=note)


def _row(bench: Bench, batch: int, prompt: int, new: int, weights: Weights, reach: Reach | None) -> Row:
    ours, theirs = _calls(batch, prompt, new, weights)
    if weights == "float32":
        # Two most likely tokens can be nearer than rounding; most rows have to agree from end to end.
        same = float((ours() == theirs()).float().mean())
        assert same > 0.9, f"{same:.0%} of the tokens are {PEER}'s"
    pairs = take_turns(ours, theirs, bench.settings)
    ratios = pairs.ratios("faster")
    low, high = quartiles(ratios)
    step = median(pairs.ours) / new
    what = f"{weights}, {'one row' if batch == 1 else f'{batch} rows'}"
    run = f"{prompt} tokens in" if new == 1 else f"{new} after {prompt}"
    note = "" if new == 1 else _bandwidth(weights, step)
    return Row(
        "prefill" if new == 1 else what, run, PEER, step, median(pairs.theirs) / new, median(ratios), low, high, reach, "faster",
        note=note + (_loss() if weights == "int8" and batch == 1 else ""),
    )  # fmt: skip


def _bytes_kept(bench: Bench, weights: Weights, context: int, new: int = 16) -> Row:
    """A token after a context whose keys and values are bytes, beside one where they are float32."""
    decoder = prepare(_model()[0], weights)
    tokens = torch.randint(100, 40000, (1, context), generator=torch.Generator().manual_seed(0))
    next_one = torch.tensor([[100]])

    def steps(rooms: Callable[[int, int], Any]) -> tuple[Callable[[], Tensor], Any]:
        caches: Any = rooms(decoder.depth, context + new)
        for piece in tokens.split(PREFILL, dim=1):
            _, caches = decoder(piece, caches)

        def call() -> Tensor:
            at: Any = tuple(c.reopened() for c in caches)
            logits = next_one
            for _ in range(new):
                logits, at = decoder(next_one, at)
            return logits

        return call, caches

    (ours, coarse), (theirs, exact) = steps(int8_caches), steps(static_caches)
    smaller = sum(c.k.nbytes + c.v.nbytes for c in exact) / sum(c.nbytes for c in coarse)
    pairs = take_turns(ours, theirs, bench.settings)
    ratios = pairs.ratios("times")
    low, high = quartiles(ratios)
    return Row(
        f"{weights}, int8 cache", f"a token after {context:,}", "float32 cache", median(pairs.ours) / new, median(pairs.theirs) / new,
        median(ratios), low, high, Reach(1.0, "times"), "times", note=f"{smaller:.2f} times smaller",
    )  # fmt: skip


def _calls(batch: int, prompt: int, new: int, weights: Weights) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    model, _, peer = _models()
    tokens = torch.randint(100, 40000, (batch, prompt), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)

    def ours() -> Tensor:
        return torch.tensor(generate(model, tokens, Sampling(max_tokens=new, stop_ids=UNWRITTEN), weights=weights).tokens)

    def theirs() -> Tensor:
        fixed: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "eos_token_id": None}
        return peer.generate(tokens, attention_mask=mask, pad_token_id=2, **fixed)[:, prompt:]

    return ours, theirs


@cache
def _model() -> tuple[Any, Any]:
    hub.get("smollm2")
    return hub.open_model("smollm2")


@cache
def _models() -> tuple[Any, Any, Any]:
    import transformers

    transformers.logging.set_verbosity_error()
    model, tokenizer = _model()
    # transformers reads no blocks of a GGUF as fast as that: the same weights, written out once.
    folder = hub.place("smollm2") / "safetensors"
    if not (folder / "config.json").is_file():
        hub.convert(hub.resolve("smollm2"), folder)
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, tokenizer, peer


def _bandwidth(weights: Weights, step: float) -> str:
    reached = prepare(_models()[0], weights).nbytes / step / 1e9
    return f"{reached:.1f} GB/s of weights, {reached / _memory():.0%} of the memory's {_memory():.0f}"


@cache
def _memory() -> float:
    x = torch.ones(1 << 26)
    best = min(_seconds(x.sum) for _ in range(12))
    return x.numel() * 4 / best / 1e9


def _seconds(f: Callable[[], object]) -> float:
    started = time.perf_counter()
    f()
    return time.perf_counter() - started


@cache
def _loss() -> str:
    model, tokenizer, _ = _models()
    ids = tokenizer.encode(PARAGRAPH)
    exact, coarse = (perplexity(model, ids, weights=w) for w in ("float32", "int8"))
    change = (logits_of(model, ids) - logits_of(model, ids, weights="int8")).abs().max()
    return f"; perplexity {exact:.2f} to {coarse:.2f}, largest change of a logit {float(change):.2f}"
