"""Text from a model: prefill in chunks, then one token after another over a static cache.

    out = generate(model, tokens, Sampling(max_tokens=64, temperature=0.7, top_p=0.9, seed=1))
    out = generate(model, ["Once", "The sea is"], Sampling(stop=("\n",)), tokenizer=tokenizer, on_token=print)

Rows of different lengths are padded on the left where the mechanism does not ask where a token stands; where it does, rows
of one length run together. Ctrl-C gives back what there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from ..attention.allow import Allow, Padding
from ..errors import NumericsError, ShapeError, SpecError
from ..nn import Attention, bent_rows
from ..position import NoPosition
from .base import Model, States
from .cache import static_caches
from .decode import Decoder, Weights, prepare
from .gpt2 import GPT2
from .sampling import Drawer, Sampling
from .stream import Ending, Speaks, Stream, Token

PREFILL = 512
"""Tokens of the prompt that go through the model at a time: as fast as all at once, and bounded in memory."""


@dataclass(frozen=True)
class Generated:
    """One entry per row."""

    tokens: list[list[int]]
    finish: list[Ending]
    text: list[str] | None = None
    """Only with a tokenizer."""
    logprobs: list[list[float]] | None = None
    """Of each chosen token under the model itself, before temperature and cuts."""
    top: list[list[list[tuple[int, float]]]] | None = field(default=None, repr=False)
    """The most likely tokens at each place and their log-probabilities, when `Sampling.logprobs` is above 0."""


Prompt = Tensor | str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]


def generate(
    model: Model,
    prompt: Prompt,
    sampling: Sampling | None = None,
    *,
    tokenizer: Speaks | None = None,
    on_token: Callable[[Token], object] | None = None,
    weights: Weights = "float32",
    states: States = None,
    prefill: int = PREFILL,
) -> Generated:
    """Continue one prompt or several: token ids, or texts where a tokenizer is given.

    `on_token` sees every token as it falls. A batch is one call: rows that end early wait for the others.
    """
    s = sampling or Sampling()
    if s.stop and tokenizer is None:
        raise SpecError(f"stop={s.stop} is text, and without a tokenizer there is none: pass tokenizer=, or stop_ids=")
    if prefill < 1:
        raise SpecError(f"prefill={prefill}: at least one token goes through the model at a time")
    prompts = _rows(prompt, tokenizer, model)
    streams = [Stream(i, p, s, tokenizer, on_token) for i, p in enumerate(prompts)]
    decoder = prepare(model, weights)
    was_training = model.training
    model.eval()
    try:
        groups = _groups(model, prompts)
        for group in groups:
            with bent_rows(group if len(groups) > 1 else None, len(prompts)):
                _run(decoder, [streams[i] for i in group], s, states, prefill)
    except KeyboardInterrupt:
        for stream in streams:
            stream.interrupt()
    finally:
        model.train(was_training)
    return Generated(
        [x.tokens for x in streams],
        [cast(Ending, x.ending) for x in streams],
        None if tokenizer is None else [x.text() for x in streams],
        None if s.logprobs is None else [x.logprobs for x in streams],
        None if not s.logprobs else [x.top for x in streams],
    )


@torch.no_grad()
def _run(decoder: Decoder, streams: list[Stream], s: Sampling, states: States, prefill: int) -> None:
    prompts = [x.prompt for x in streams]
    lengths = [len(p) for p in prompts]
    longest = max(lengths)
    device = next(decoder.model.parameters()).device
    tokens = torch.tensor([[0] * (longest - n) + p for n, p in zip(lengths, prompts, strict=True)], device=device)
    pads = torch.tensor([longest - n for n in lengths], device=device)
    padded = longest > min(lengths)
    caches = static_caches(decoder.depth, longest + s.max_tokens)
    draw = Drawer(s, prompts, decoder.model.config.vocabulary, [x.row for x in streams])
    start, chunk, left = 0, tokens[:, :prefill], s.max_tokens
    while True:
        stop = start + chunk.shape[1]
        allow: Allow | None = None
        positions: Tensor | None = None
        if padded:
            allow = Padding((stop - pads).clamp_min(0), side="left")
            if isinstance(decoder.model, GPT2):
                positions = (torch.arange(start, stop, device=device) - pads.unsqueeze(-1)).clamp_min(0)
        logits, caches = decoder(chunk, caches, allow=allow, states=states, positions=positions)
        start = stop
        if start < longest:
            chunk = tokens[:, start : start + prefill]
            continue
        if not bool(torch.isfinite(logits.sum())):
            raise NumericsError("the logits are not finite: the weights or the state hold NaN or infinity")
        chosen = draw(logits)
        left -= 1
        for i, stream in enumerate(streams):
            stream.push(int(chosen[i]), logits[i], last=left == 0)
        if left == 0 or all(x.ending for x in streams):
            return
        chunk = chosen.to(device).unsqueeze(-1)


def perplexity(model: Model, tokens: Sequence[int], *, weights: Weights = "float32", states: States = None) -> float:
    """exp of the mean surprise per token of a text, from its second token on."""
    if len(tokens) < 2:
        raise ShapeError(f"{len(tokens)} tokens: perplexity needs at least two, the first has nothing before it")
    logits = logits_of(model, tokens, weights=weights, states=states)
    device = logits.device
    return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(list(tokens[1:]), device=device)).exp())


@torch.no_grad()
def logits_of(model: Model, tokens: Sequence[int], *, weights: Weights = "float32", states: States = None) -> Tensor:
    """Logits (N, V) of every token, as decoding with these weights would see them."""
    decoder = prepare(model, weights)
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        caches = static_caches(decoder.depth, len(tokens))
        return decoder(torch.tensor([list(tokens)], device=device), caches, states=states, every=True)[0][0].float()
    finally:
        model.train(was_training)


def _rows(prompt: Prompt, tokenizer: Speaks | None, model: Model) -> list[list[int]]:
    """Token ids, whatever form they came in, checked."""
    vocabulary: int = model.config.vocabulary
    if isinstance(prompt, Tensor):
        if prompt.ndim not in (1, 2) or prompt.is_floating_point():
            raise ShapeError(f"the prompt is {tuple(prompt.shape)} of {prompt.dtype}; token ids are integers (N) or (B, N)")
        given: list[object] = list(prompt.tolist()) if prompt.ndim == 2 else [prompt.tolist()]
    elif isinstance(prompt, str):
        given = [prompt]
    else:
        given = [list(cast(Sequence[int], prompt))] if prompt and isinstance(prompt[0], int) else list(prompt)
    rows: list[list[int]] = []
    for i, row in enumerate(given):
        if isinstance(row, str):
            if tokenizer is None:
                raise ShapeError(f"prompt {i} is text; pass tokenizer=, or token ids")
            row = tokenizer.encode(row)
        ids = [int(x) for x in cast(Sequence[int], row)]
        if not ids:
            raise ShapeError(f"prompt {i} is empty; a model needs one token to start from, such as its bos")
        bad = [x for x in ids if not 0 <= x < vocabulary]
        if bad:
            raise ShapeError(f"prompt {i} holds the token {bad[0]}; this model knows 0..{vocabulary - 1}")
        rows.append(ids)
    if not rows:
        raise ShapeError("there is no prompt; give token ids, or texts with tokenizer=")
    return rows


def _groups(model: Model, prompts: list[list[int]]) -> list[list[int]]:
    """Rows that may run together: all of them, or those of one length where padding would move a token."""
    if (not isinstance(model, GPT2) and getattr(model, "family", "") != "llama") or not all(
        _paddable(m) for m in model.modules()
    ):
        lengths = sorted({len(p) for p in prompts})
        return [[i for i, p in enumerate(prompts) if len(p) == n] for n in lengths]
    return [list(range(len(prompts)))]


def _paddable(module: object) -> bool:
    """False where attention reads a token's place from the start of the row, which padding would move."""
    if not isinstance(module, Attention):
        return True
    if module.bend is not None and module.bend.padless:
        return False
    relative = isinstance(module.spec.position, NoPosition) or module.spec.position.name in ("rope", "alibi", "relative")
    return relative and not module.inner.carries


__all__ = ["Ending", "Generated", "Sampling", "Token", "generate", "logits_of", "perplexity"]
