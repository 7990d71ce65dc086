"""How the next token is drawn from the logits: a chain of cuts, each of which leaves a distribution."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import cast

import torch
from torch import Tensor

from ...errors import SpecError


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 takes the most likely token. Cuts apply in the order of the fields, each to what the last one left."""

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    """Keep the k most likely tokens."""
    top_p: float | None = None
    """Keep the fewest tokens whose probabilities sum to p (nucleus)."""
    min_p: float | None = None
    """Keep tokens at least this many times as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """Above 1: logits of tokens that were seen already shrink by this factor (Keskar et al. 2019); never of those that end a row."""
    stop: tuple[str, ...] = ()
    """Texts that end a row; they are not part of the result."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end a row, beside the tokenizer's; a call with neither ends at the model's own `generation_info.eos_ids`."""
    seed: int = 0
    """Row i draws from seed + i, whoever else is in the batch."""
    logprobs: int | None = None
    """None: no log-probabilities. n: those of the chosen tokens and of the n most likely ones beside them."""
    penalised: tuple[int, ...] | None = None
    """Ids that `repetition_penalty` takes for seen before the first token is drawn. None: all of the prompt's."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token that was drawn already, as OpenAI's clients know it."""
    frequency_penalty: float = 0.0
    """The same, once for each time that it was drawn."""
    bias: tuple[tuple[int, float], ...] = ()
    """(id, number) pairs: what is added to the logits of these tokens before anything else."""
    contrast: float | None = None
    """How far an identity's words lean away from those of the model by itself (`contrast.py`). None: as whoever speaks does; 0: not at all."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("max_tokens", "top_k", "seed", "logprobs"):
            self._check(is_whole(getattr(self, name)) or self._is_left_out(name), name, "a whole number")
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "contrast",
        ):
            value = getattr(self, name)
            self._check(isinstance(value, Real) or self._is_left_out(name), name, "a number")
        for name, kind, what in (
            ("stop", str, "texts"),
            ("stop_ids", Integral, "token ids"),
            ("penalised", Integral, "token ids"),
        ):
            value = getattr(self, name)
            # A set of ids is as good as a tuple of them.
            listed = isinstance(value, Collection) and all(isinstance(x, kind) for x in cast(Collection[object], value))
            self._check(listed or self._is_left_out(name), name, f"a tuple of {what}")
        self._check(-(1 << 63) <= self.seed < 1 << 63, "seed", "a number of 64 bits")
        self._check(self.max_tokens >= 1, "max_tokens", "at least 1")
        self._check(0 <= self.temperature < float("inf"), "temperature", "0 (greedy) or above; 0.7 is a common choice")
        self._check(self.top_k is None or self.top_k >= 1, "top_k", "at least 1, or None to keep all tokens")
        self._check(self.top_p is None or 0 < self.top_p <= 1, "top_p", "in (0, 1], or None; 0.9 is a common choice")
        self._check(self.min_p is None or 0 <= self.min_p <= 1, "min_p", "in [0, 1], or None; 0.05 is a common choice")
        self._check(self.repetition_penalty > 0, "repetition_penalty", "above 0; 1 leaves logits alone, 1.1 is a common choice")
        whole = self.contrast is None or 0 <= self.contrast < float("inf")
        self._check(whole, "contrast", "0 or above, or None; 0.5 is a common choice")
        for name in ("presence_penalty", "frequency_penalty"):
            self._check(abs(getattr(self, name)) < float("inf"), name, "a finite number; 0 leaves logits alone")
        pairs = all(len(p) == 2 and is_whole(p[0]) and isinstance(p[1], Real) and abs(p[1]) < float("inf") for p in self.bias)
        self._check(pairs, "bias", "(token id, finite number) pairs, such as ((42, -100.0),)")
        self._check(all(self.stop), "stop", "texts of at least one character")
        self._check(self.logprobs is None or 0 <= self.logprobs <= 100, "logprobs", "0 to 100, or None")
        cuts = [n for n in ("top_k", "top_p", "min_p") if getattr(self, n) is not None]
        if self.temperature == 0 and cuts:
            raise SpecError(
                f"{cuts[0]}={getattr(self, cuts[0])} does nothing at temperature 0, which is greedy: set a temperature"
            )

    def _is_left_out(self, name: str) -> bool:
        """True for None where that means something."""
        return getattr(self, name) is None and getattr(type(self), name) is None

    def _check(self, holds: bool, name: str, fix: str) -> None:
        if not holds:
            raise SpecError(f"{name}={getattr(self, name)!r}: it must be {fix}")


def is_whole(x: object) -> bool:
    """True for a whole number, of Python or numpy; a truth value is none."""
    return isinstance(x, Integral) and not isinstance(x, bool)


class Drawer:
    """Draws for every row of a batch, each with a generator of its own."""

    def __init__(
        self, sampling: Sampling, prompts: list[list[int]], vocabulary: int, rows: list[int], stop_ids: Collection[int] = ()
    ) -> None:
        self.sampling = sampling
        self.generators = [torch.Generator().manual_seed(sampling.seed + r) for r in rows]
        self.seen: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self.seen = torch.zeros(len(prompts), vocabulary, dtype=torch.bool)
            for i, prompt in enumerate(prompts):
                before = prompt if sampling.penalised is None else sampling.penalised
                self.seen[i, [t for t in before if 0 <= t < vocabulary]] = True
            # A chat's markup ends every message with the token that ends an answer: punished for it, an answer would run on.
            self.seen[:, [i for i in stop_ids if 0 <= i < vocabulary]] = False
        # Counted only where they matter: a vocabulary of numbers a row is not nothing.
        counts = sampling.presence_penalty or sampling.frequency_penalty
        self.drawn = torch.zeros(len(prompts), vocabulary) if counts else None
        known = [(i, b) for i, b in sampling.bias if 0 <= i < vocabulary]
        self.bias = torch.zeros(vocabulary).index_add(0, *map(torch.tensor, zip(*known, strict=True))) if known else None

    def __call__(self, logits: Tensor, best: Sequence[int] | None = None) -> Tensor:
        """Tokens (B) from logits (B, V); `best` are the most likely ones, where they are known."""
        s = self.sampling
        if best is not None and s.temperature == 0 and self.bias is None and self.drawn is None and self.seen is None:
            return torch.tensor(best)
        logits = logits.float().cpu()
        if self.bias is not None:
            logits = logits + self.bias
        if self.drawn is not None:
            logits = logits - s.frequency_penalty * self.drawn - s.presence_penalty * (self.drawn > 0)
        if self.seen is not None:
            logits = penalised(logits, self.seen, s.repetition_penalty)
        if s.temperature == 0:
            chosen = logits.argmax(-1)
        else:
            probabilities, index = cut(logits / s.temperature, s)
            point = torch.cat([torch.rand(1, generator=g) for g in self.generators]).unsqueeze(-1)
            heights = probabilities.cumsum(-1)
            place = torch.searchsorted(heights, point * heights[:, -1:]).clamp_max(probabilities.shape[-1] - 1)
            chosen = index.gather(-1, place).squeeze(-1)
        if self.seen is not None:
            self.seen.scatter_(1, chosen.unsqueeze(-1), True)
        if self.drawn is not None:
            self.drawn.scatter_add_(1, chosen.unsqueeze(-1), torch.ones(len(chosen), 1))
        return chosen


def penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    shrunk = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, shrunk, logits)


def cut(logits: Tensor, s: Sampling) -> tuple[Tensor, Tensor]:
    """Probabilities from the most likely down, cut ones 0, and the tokens they belong to; rows need not sum to one."""
    vocabulary = logits.shape[-1]
    if s.top_k is not None and s.top_k < vocabulary:
        values, index = logits.topk(s.top_k, dim=-1)
    else:
        values, index = logits.sort(dim=-1, descending=True)
    probabilities = values.softmax(-1)
    if s.top_p is not None:
        # A token stays when those before it have not reached p yet, so that the one that crosses p stays too.
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= s.top_p, 0)
    if s.min_p is not None:
        probabilities = probabilities.masked_fill(probabilities < s.min_p * probabilities[:, :1], 0)
    return probabilities, index
