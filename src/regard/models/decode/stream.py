"""One row as it is being written: its tokens, its text so far, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..continuation import PARTIAL, Continuation
from .sampling import Sampling

Ending = Literal["stop", "length", "interrupted"]


@runtime_checkable
class Speaks(Protocol):
    """What generation asks of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Token:
    """What `on_token` sees. `text` is what has become readable with this token: nothing yet inside a character of several
    bytes or inside what may turn out to be a stop text."""

    row: int
    token: int
    text: str
    logprob: float | None
    ending: Ending | None
    guessed: bool = False
    """True where speculation had guessed it."""


class Stream:
    def __init__(
        self,
        row: int,
        prompt: list[int],
        sampling: Sampling,
        tokenizer: Speaks | None,
        on_token: Callable[[Token], object] | None,
        eos_ids: tuple[int, ...] = (),
    ) -> None:
        """`eos_ids` are the model's own, for whoever names neither a tokenizer nor ids that end a text."""
        self.row, self.prompt, self.sampling = row, prompt, sampling
        self.tokenizer, self.on_token = tokenizer, on_token
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[list[tuple[int, float]]] = []
        self.ending: Ending | None = None
        named = (*sampling.stop_ids, *(() if tokenizer is None else tokenizer.eos_ids))
        self.stop_ids = set(named if sampling.stop_ids or tokenizer is not None else eos_ids)
        # A continuation keeps the space between itself and the prompt, so it is read after it.
        self.written = None if tokenizer is None else Continuation(tokenizer.decode, prompt)
        self.ready, self.told = "", 0

    def push(self, token: int, logits: Tensor, last: bool, guessed: bool = False) -> None:
        """Take one more token; a row that has ended takes none."""
        if self.ending:
            return
        logprob = self._measure(token, logits)
        if token in self.stop_ids:
            self.ending = "stop"
        else:
            self.tokens.append(token)
            self._read()
            if last and not self.ending:
                self.ending = "length"
        if self.on_token is not None:
            self.on_token(Token(self.row, token, self._news(), logprob, self.ending, guessed))

    def interrupt(self) -> None:
        self.ending = self.ending or "interrupted"

    def text(self) -> str:
        return self.ready

    def _measure(self, token: int, logits: Tensor) -> float | None:
        if self.sampling.logprobs is None:
            return None
        rates = torch.log_softmax(logits.float(), -1)
        logprob = float(rates[token])
        if token not in self.stop_ids:
            self.logprobs.append(logprob)
            if self.sampling.logprobs:
                values, index = rates.topk(self.sampling.logprobs)
                self.top.append([(int(i), float(v)) for i, v in zip(index, values, strict=True)])
        return logprob

    def _read(self) -> None:
        """Decode what is new, and look for a stop text in it."""
        if self.written is None:
            return
        # A stop text that was not there before ends in what is new.
        start = max(0, len(self.written.stable) - max(map(len, self.sampling.stop), default=1) + 1)
        self.written.push(self.tokens[-1])
        self.ready = self.written.text
        places = [at for at in (self.ready.find(x, start) for x in self.sampling.stop) if at >= 0]
        if places:
            self.ready = self.ready[: min(places)]
            self.ending = "stop"

    def _news(self) -> str:
        """Text that no later token can change."""
        end = len(self.ready)
        if not self.ending:
            if self.written is not None:
                end = max(len(self.written.stable), len(self.ready.rstrip(PARTIAL)))
            for stop in self.sampling.stop:
                for n in range(min(len(stop) - 1, end), 0, -1):
                    if self.ready.endswith(stop[:n], 0, end):
                        end = min(end, end - n)
                        break
        news = self.ready[self.told : end]
        self.told = max(self.told, end)
        return news
