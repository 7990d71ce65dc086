"""Text from a model: prefill in chunks, then one token after another over a static cache.

    out = generate(model, tokens, Sampling(max_tokens=64, temperature=0.7, top_p=0.9, seed=1))
    out = generate(model, ["Once", "The sea is"], Sampling(stop=("\n",)), tokenizer=tokenizer, on_token=print)
    for token in stream(model, "Once", tokenizer=tokenizer): print(token.text, end="")

What overrides the layers' attention is settled when a call begins, by `overrides=` or by the block around it (`regard.living`), and
holds to its end, whatever is entered or left meanwhile and whichever thread takes the next token.

Rows of different lengths are padded on the left where the mechanism does not ask where a token stands; where it does, rows
of one length run together. Ctrl-C gives back what there is.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from numbers import Number
from typing import cast

import torch
from torch import Tensor, nn

from ...attention.allow import Allow, Padding
from ...errors import CombinationError, NumericsError, RegardWarning, ShapeError, SpecError
from ...nn import Attention, AttentionOverride, bound, overrides_in, overrides_of_rows
from ..base import Model, States
from ..tokens import has_ids
from . import native
from .cache import StaticCache
from .contrast import Contrasted, contrast_of
from .int8_cache import STEPWISE
from .prepare import Decoder, Weights, prepare
from .rooms import PREFILL, CacheKind, Caches, caches_of
from .rows import finished, rows_of
from .sampling import Drawer, Sampling, is_whole
from .speculate import Drafts, Speculate, Speculation, speculation
from .stream import Ending, Speaks, Stream, Token

TAKES = "give token ids such as [1, 2], a list of such rows, or texts with tokenizer="


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
    drafted: list[int] | None = None
    """How many tokens speculation guessed; None without it, or where the model's positions allow none."""
    accepted: list[int] | None = None
    """How many of them were right."""

    @property
    def accepted_share(self) -> float | None:
        """Of all guesses; None where there were none."""
        return (
            sum(self.accepted) / sum(self.drafted) if self.accepted is not None and self.drafted and sum(self.drafted) else None
        )


Prompt = Tensor | str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
Overrides = Mapping[nn.Module, AttentionOverride]


def generate(
    model: Model,
    prompt: Prompt,
    sampling: Sampling | None = None,
    *,
    overrides: Overrides | None = None,
    tokenizer: Speaks | None = None,
    on_token: Callable[[Token], object] | None = None,
    weights: Weights = "float32",
    states: States = None,
    prefill: int = PREFILL,
    speculate: Speculate = None,
    cache: CacheKind = "float32",
) -> Generated:
    """Continue one prompt or several: token ids, or texts where a tokenizer is given.

    `overrides` is what the layers do instead of their own attention; without it, whatever overrides them here. `on_token` sees
    every token as it falls. A batch is one call: rows that end early wait for the others. A row ends at `Sampling.stop_ids`
    and the tokenizer's `eos_ids`; where neither is given, at those that came with the model (`model.generation_info.eos_ids`).
    `speculate="lookup"` guesses tokens from what was said, and gives the same text in fewer steps (`speculate.py`); `cache="int8"` keeps
    keys and values in a byte a number (`int8_cache.py`).
    """
    call = _Call(model, prompt, sampling, tokenizer, on_token, overrides, _guesses(speculate, cache))
    caches_of(cache)
    decoder = prepare(model, weights)
    try:
        with _resting(model):
            for _ in call.run(decoder, states, _checked_prefill(prefill), cache):
                pass
    except KeyboardInterrupt:
        for row in call.streams:
            row.interrupt()
    return call.generated()


def stream(
    model: Model,
    prompt: Prompt,
    sampling: Sampling | None = None,
    *,
    overrides: Overrides | None = None,
    tokenizer: Speaks | None = None,
    weights: Weights = "float32",
    states: States = None,
    prefill: int = PREFILL,
    speculate: Speculate = None,
    cache: CacheKind = "float32",
) -> Iterator[Token]:
    """`generate` as an iterator over its tokens, row by row as they fall.

    Everything is checked, and settled who speaks, before this returns: the tokens may then be taken inside any block, by any
    thread or task, one at a time, between those of other streams.
    """
    fallen: deque[Token] = deque()
    call = _Call(model, prompt, sampling, tokenizer, fallen.append, overrides, _guesses(speculate, cache))
    caches_of(cache)
    return _streamed(model, call.run(prepare(model, weights), states, _checked_prefill(prefill), cache), fallen)


def _streamed(model: Model, steps: Generator[None], fallen: deque[Token]) -> Generator[Token]:
    more = True
    while more:
        with _resting(model):
            more = next(steps, _END) is not _END
        while fallen:
            yield fallen.popleft()


_END = object()


class _Call:
    """A call of `generate`, checked, with whoever speaks in it."""

    def __init__(
        self,
        model: Model,
        prompt: Prompt,
        sampling: Sampling | None,
        tokenizer: Speaks | None,
        on_token: Callable[[Token], object] | None,
        overrides: Overrides | None,
        guesses: Speculation | None = None,
    ) -> None:
        expect_decoder(model)
        sampling = Sampling() if sampling is None else sampling
        if not isinstance(sampling, Sampling):
            raise SpecError(f"sampling={sampling!r:.60}: it must be a Sampling, such as Sampling(max_tokens=64)")
        if tokenizer is not None and (isinstance(tokenizer, type) or not isinstance(tokenizer, Speaks)):
            raise SpecError(
                f"tokenizer={tokenizer!r:.60}: it must have encode, decode and eos_ids, as load_tokenizer(source) gives it"
            )
        if on_token is not None and not callable(on_token):
            raise SpecError(f"on_token={on_token!r:.60}: it must be a function of a Token, such as print")
        if sampling.stop and tokenizer is None:
            raise SpecError(
                f"stop={sampling.stop} is text, and without a tokenizer there is none: pass tokenizer=, or stop_ids="
            )
        self.model, self.sampling, self.tokenizer = model, sampling, tokenizer
        self.prompts = prompt_rows(prompt, tokenizer, model)
        _expect_room(model, max(len(p) for p in self.prompts), sampling.max_tokens)
        self.overrides: Overrides = overrides_in(model) if overrides is None else overrides
        eos_ids = model.generation_info.eos_ids
        self.streams = [Stream(i, p, sampling, tokenizer, on_token, eos_ids) for i, p in enumerate(self.prompts)]
        # A guess that is read lengthens the text: under such a position every token is written by itself.
        alone = any(m.spec.position.reads_length for m in model.modules() if isinstance(m, Attention))
        each = range(len(self.prompts))
        self.contrasts = any(contrast_of(self.overrides, sampling, i) for i in each)
        """Whether somebody's words are held against the model's own: then rows are written as a server writes them, and nothing is guessed."""
        self.drafts = None if guesses is None or alone or self.contrasts else [Drafts(guesses, p) for p in self.prompts]

    def run(self, decoder: Decoder, states: States, prefill: int, cache: CacheKind) -> Generator[None]:
        if self.contrasts and states is None:
            count = len(self.prompts)
            each = [overrides_of_rows(self.overrides, [i], count) for i in range(count)]
            yield from _run_beside(decoder, self.streams, self.sampling, each, cache)
            return
        for group in _groups(self.model, self.prompts, self.overrides):
            overrides = overrides_of_rows(self.overrides, group, len(self.prompts))
            drafts = None if self.drafts is None else [self.drafts[i] for i in group]
            yield from _run(decoder, [self.streams[i] for i in group], self.sampling, states, prefill, overrides, drafts, cache)

    def generated(self) -> Generated:
        streams, s = self.streams, self.sampling
        return Generated(
            [x.tokens for x in streams],
            [cast(Ending, x.ending) for x in streams],
            None if self.tokenizer is None else [x.text() for x in streams],
            None if s.logprobs is None else [x.logprobs for x in streams],
            None if not s.logprobs else [x.top for x in streams],
            *((None, None) if self.drafts is None else ([d.drafted for d in self.drafts], [d.accepted for d in self.drafts])),
        )


def expect_decoder(model: object) -> None:
    """Raise for what does not write one token after another, by its name and with what to call instead."""
    if isinstance(model, Model):
        if model.instead is not None:
            raise CombinationError(f"a {type(model).__name__} {model.instead}")
    else:
        more = "; a model of transformers has its own model.generate(...)" if hasattr(model, "generate") else ""
        raise CombinationError(f"a {type(model).__name__} is no model of regard, so there is nothing to decode{more}")


def _expect_room(model: Model, longest: int, more: int) -> None:
    """A word before minutes of work where a text outgrows the context."""
    context = model.context
    # The last token that is written does not go through the model again.
    if context is None or longest + more - 1 <= context:
        return
    if model.has_place_table:
        room = context - longest + 1
        said = f"{longest:,} tokens and {more:,} more are past this model's context of {context:,} tokens"
        raise ShapeError(f"{said}: {f'write at most {room:,}, max_tokens={room}' if room > 0 else 'shorten the prompt'}")
    if longest > context:
        said = f"{longest:,} tokens are past this model's context of {context:,}"
        warnings.warn(
            f"{said}: it was not trained on texts as long, and will hardly make sense of it", RegardWarning, stacklevel=4
        )


def _guesses(speculate: Speculate, cache: CacheKind) -> Speculation | None:
    given = speculation(speculate)
    # No more of them than meet a cache of bytes one by one.
    return given if given is None or cache == "float32" else replace(given, tokens=min(given.tokens, STEPWISE - 1))


def _checked_prefill(prefill: int) -> int:
    if not is_whole(prefill) or prefill < 1:
        raise SpecError(f"prefill={prefill!r:.60}: it is how many tokens go through the model at a time, a whole number from 1")
    return prefill


@contextmanager
def _resting(model: nn.Module) -> Generator[None]:
    """Inside, the model does not train: no dropout."""
    was_training = model.training
    if was_training:
        model.eval()
    try:
        yield
    finally:
        if was_training:
            model.train()


@torch.no_grad()
def _run(
    decoder: Decoder,
    streams: list[Stream],
    s: Sampling,
    states: States,
    prefill: int,
    overrides: Overrides,
    drafts: list[Drafts] | None,
    cache: CacheKind,
) -> Generator[None]:
    """Stops after every step; who speaks is bound to each of them, and to nothing between them."""
    prompts = [x.prompt for x in streams]
    lengths = [len(p) for p in prompts]
    longest = max(lengths)
    device = next(decoder.model.parameters()).device
    tokens = torch.tensor([[0] * (longest - n) + p for n, p in zip(lengths, prompts, strict=True)], device=device)
    pads = torch.tensor([longest - n for n in lengths], device=device)
    padded = longest > min(lengths)
    caches = caches_of(cache)(decoder.depth, longest + s.max_tokens)
    draw = Drawer(s, prompts, decoder.model.config.vocabulary, [x.row for x in streams], streams[0].stop_ids)

    def read(chunk: Tensor, start: int, caches: Caches, every: bool = False) -> tuple[Tensor, Caches]:
        stop = start + chunk.shape[1]
        allow: Allow | None = None
        positions: Tensor | None = None
        if padded:
            allow = Padding((stop - pads).clamp_min(0), side="left")
            if decoder.model.has_place_table:
                positions = (torch.arange(start, stop, device=device) - pads.unsqueeze(-1)).clamp_min(0)
        with bound(overrides):
            return decoder(chunk, caches, allow=allow, states=states, positions=positions, every=every)

    last = tokens[:, :0]
    for start in range(0, longest, prefill):
        last, caches = read(tokens[:, start : start + prefill], start, caches)
    steps = _Steps(streams, draw, s.max_tokens, drafts)
    chosen, _ = steps.take(last.unsqueeze(1), [])
    count, pending = longest, chosen.to(device).unsqueeze(-1)
    while True:
        yield
        if steps.over:
            return
        guessed = steps.guess() if pending.shape[1] == 1 else []
        before = caches
        chunk = torch.cat([pending, torch.tensor(guessed, device=device).T], dim=1) if guessed else pending
        logits, caches = read(chunk, count, before, every=bool(guessed))
        chosen, right = steps.take(logits[:, pending.shape[1] - 1 :] if guessed else logits.unsqueeze(1), guessed)
        new = chosen.to(device).unsqueeze(-1)
        if right < len(guessed):
            kept = count + pending.shape[1] + right
            shorter = [c.shortened(kept) if isinstance(c, StaticCache) else None for c in caches]
            if None in shorter:
                # A carry has taken in what was wrong: what was right is read again, with what was drawn after it.
                caches = tuple(c.reopened() if isinstance(c, StaticCache) else c for c in before)
                pending = torch.cat([chunk[:, : pending.shape[1] + right], new], dim=1)
                continue
            caches = cast(Caches, tuple(shorter))
        count += pending.shape[1] + right
        pending = new


@torch.no_grad()
def _run_beside(
    decoder: Decoder, streams: list[Stream], s: Sampling, overrides: Sequence[Overrides], cache: CacheKind
) -> Generator[None]:
    """The same for rows of which some are contrasted with the model by itself (`contrast.py`)."""
    rows, vocabulary = Contrasted(rows_of(decoder, cache)), decoder.model.config.vocabulary
    draws = [Drawer(s, [x.prompt], vocabulary, [x.row], x.stop_ids) for x in streams]
    opened = [rows.open(o, len(x.prompt) + s.max_tokens, contrast_of(o, s)) for x, o in zip(streams, overrides, strict=True)]
    heard = [finished(rows.read(row, x.prompt)) for row, x in zip(opened, streams, strict=True)]
    going = list(range(len(streams)))
    for left in reversed(range(s.max_tokens)):
        tokens = list[int]()
        for i, logits in zip(going, heard, strict=True):
            if not bool(torch.isfinite(logits.sum())):
                raise NumericsError("the logits are not finite: the weights or the state hold NaN or infinity")
            tokens.append(int(draws[i](logits[None])))
            streams[i].push(tokens[-1], logits, last=left == 0)
        yield
        on = [(i, t) for i, t in zip(going, tokens, strict=True) if not streams[i].ending]
        going = [i for i, _ in on]
        if not going:
            return
        stepped = rows.step([opened[i] for i in going], [t for _, t in on])
        for x in stepped:
            if isinstance(x, Exception):
                raise x
        heard = cast(list[Tensor], stepped)


class _Steps:
    """What is drawn behind the tokens that a step has read, and what is guessed for the next."""

    def __init__(self, streams: list[Stream], draw: Drawer, most: int, drafts: list[Drafts] | None) -> None:
        self.streams, self.draw, self.left, self.drafts = streams, draw, most, drafts

    @property
    def over(self) -> bool:
        return self.left == 0 or all(x.ending for x in self.streams)

    def guess(self) -> list[list[int]]:
        """For each of the next places, what may stand there in each row: as far as all that go on have a guess."""
        if self.drafts is None:
            return []
        # The last token that is written does not go through the model again.
        each = [None if x.ending else d.guess(self.left - 1) for x, d in zip(self.streams, self.drafts, strict=True)]
        count = min(len(x) for x in each if x is not None)
        return [[0 if x is None else x[i] for x in each] for i in range(count)]

    def take(self, logits: Tensor, guessed: list[list[int]]) -> tuple[Tensor, int]:
        """Draw from logits (B, 1 + guesses, V), one place after the other while the guesses are right: the last tokens that were
        drawn, and how many guesses stood."""
        going = [not x.ending for x in self.streams]
        right = 0
        while True:
            here = logits[:, right]
            # In one pass of one thread: torch would wake all of them twice for a vocabulary of numbers.
            best = native.peaks(here)
            if not bool(torch.isfinite(here.sum())) if best is None else -1 in best:
                raise NumericsError("the logits are not finite: the weights or the state hold NaN or infinity")
            chosen = self.draw(here, best)
            self.left -= 1
            drawn = chosen.tolist()
            ended = [x.ending for x in self.streams]
            hit = right < len(guessed) and all(e or g == t for e, g, t in zip(ended, guessed[right], drawn, strict=True))
            for i, stream in enumerate(self.streams):
                if self.drafts is not None and not ended[i]:
                    self.drafts[i].lookup.push(drawn[i])
                stream.push(drawn[i], here[i], last=self.left == 0, guessed=hit)
            if not hit or self.over:
                break
            right += 1
        right += hit
        if self.drafts is not None:
            for i, row in enumerate(self.drafts):
                if going[i]:
                    row.checked(len(guessed), right)
        return chosen, right


def perplexity(
    model: Model, tokens: Sequence[int], *, weights: Weights = "float32", states: States = None, cache: CacheKind = "float32"
) -> float:
    """exp of the mean surprise per token of a text, from its second token on."""
    ids = _row(tokens, model)
    if len(ids) < 2:
        raise ShapeError(f"{len(ids)} tokens: perplexity needs at least two, the first has nothing before it")
    logits = logits_of(model, ids, weights=weights, states=states, cache=cache)
    return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:], device=logits.device)).exp())


@torch.no_grad()
def logits_of(
    model: Model, tokens: Sequence[int], *, weights: Weights = "float32", states: States = None, cache: CacheKind = "float32"
) -> Tensor:
    """Logits (N, V) of every token, as decoding with these weights would see them."""
    ids = _row(tokens, model)
    _expect_room(model, len(ids), 1)
    decoder = prepare(model, weights)
    device = next(model.parameters()).device
    with _resting(model):
        caches = caches_of(cache)(decoder.depth, len(ids))
        return decoder(torch.tensor([ids], device=device), caches, states=states, every=True)[0][0].float()


def prompt_rows(prompt: Prompt, tokenizer: Speaks | None, model: Model) -> list[list[int]]:
    """Token ids, whatever form they came in, checked."""
    vocabulary: int = model.config.vocabulary
    rows: list[list[int]] = []
    for i, row in enumerate(_split(prompt)):
        if isinstance(row, str):
            if tokenizer is None:
                raise ShapeError(f"prompt {i} is text; pass tokenizer=, or token ids")
            row = tokenizer.encode(row)
        if isinstance(row, Tensor):
            row = _listed(row)
        if not isinstance(row, Sequence):
            raise ShapeError(f"prompt {i} is {row!r:.60}; {TAKES}")
        ids = [x for x in cast(Sequence[int], row) if is_whole(x)]
        if len(ids) < len(row):
            other = next(x for x in cast(Sequence[object], row) if not is_whole(x))
            raise ShapeError(f"prompt {i} holds {other!r:.60}, which is no token id; {TAKES}")
        if not ids:
            raise ShapeError(f"prompt {i} is empty; a model needs one token to start from, such as its bos")
        bad = [x for x in ids if not 0 <= x < vocabulary]
        if bad:
            raise ShapeError(f"prompt {i} holds the token {bad[0]}; this model knows 0..{vocabulary - 1}")
        rows.append([int(x) for x in ids])
    if not rows:
        raise ShapeError("there is no prompt; give token ids, or texts with tokenizer=")
    return rows


def _row(tokens: Sequence[int], model: Model) -> list[int]:
    """Token ids of one text."""
    expect_decoder(model)
    rows = prompt_rows(tokens, None, model)
    if len(rows) > 1:
        raise ShapeError(f"there are {len(rows)} texts; give one at a time")
    return rows[0]


def _split(prompt: object) -> Sequence[object]:
    """One entry for each row of a batch, not looked at yet."""
    if isinstance(prompt, Tensor):
        return _listed(prompt) if prompt.ndim == 2 else [prompt]
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, Sequence):
        raise ShapeError(f"the prompt is {prompt!r:.60}; {TAKES}")
    entries = cast(Sequence[object], prompt)
    return [entries] if len(entries) and isinstance(entries[0], Number) else entries


def _listed(ids: Tensor) -> list[object]:
    if ids.ndim not in (1, 2) or not has_ids(ids):
        raise ShapeError(f"the prompt is {tuple(ids.shape)} of {ids.dtype}; token ids are integers (N) or (B, N)")
    return ids.tolist()


def _groups(model: Model, prompts: list[list[int]], overrides: Overrides) -> list[list[int]]:
    """Rows that may run together: all of them, or those of one length where padding would move a token."""
    if model.pad_side == "left" and all(_paddable(m, overrides) for m in model.modules()):
        return [list(range(len(prompts)))]
    lengths = sorted({len(p) for p in prompts})
    return [[i for i, p in enumerate(prompts) if len(p) == n] for n in lengths]


def _paddable(module: nn.Module, overrides: Overrides) -> bool:
    """False where attention reads a token's place from the start of the row, which padding would move."""
    if not isinstance(module, Attention):
        return True
    override = overrides.get(module)
    if override is not None and override.padless:
        return False
    position = module.spec.position
    return module.inner.shift_invariant(position) and not position.reads_length


__all__ = [
    "Ending",
    "Generated",
    "Overrides",
    "Sampling",
    "Token",
    "expect_decoder",
    "generate",
    "logits_of",
    "perplexity",
    "stream",
]
