"""One row as it is being written: its tokens, its text so far, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from .sampling import Sampling

Ending = Literal["stop", "length", "interrupted"]


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


class Stream:
    def __init__(
        self,
        row: int,
        prompt: list[int],
        sampling: Sampling,
        tokenizer: Speaks | None,
        on_token: Callable[[Token], object] | None,
    ) -> None:
        self.row, self.prompt, self.sampling = row, prompt, sampling
        self.tokenizer, self.on_token = tokenizer, on_token
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[list[tuple[int, float]]] = []
        self.ending: Ending | None = None
        self.stop_ids = {*sampling.stop_ids, *(() if tokenizer is None else tokenizer.eos_ids)}
        self.ready, self.told = "", 0

    def push(self, token: int, logits: Tensor, last: bool) -> None:
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
            self.on_token(Token(self.row, token, self._news(), logprob, self.ending))

    def interrupt(self) -> None:
        self.ending = self.ending or "interrupted"

    def text(self) -> str:
        return self.ready

    def _measure(self, token: int, logits: Tensor) -> float | None:
        if self.sampling.logprobs is None:
            return None
        rates = torch.log_softmax(logits.float(), -1)
        found = float(rates[token])
        if token not in self.stop_ids:
            self.logprobs.append(found)
            if self.sampling.logprobs:
                values, index = rates.topk(self.sampling.logprobs)
                self.top.append([(int(i), float(v)) for i, v in zip(index, values, strict=True)])
        return found

    def _read(self) -> None:
        """Decode what is new, and look for a stop text in it."""
        if self.tokenizer is None:
            return
        self.ready = self.tokenizer.decode(self.tokens)
        found = [at for at in (self.ready.find(x) for x in self.sampling.stop) if at >= 0]
        if found:
            self.ready = self.ready[: min(found)]
            self.ending = "stop"

    def _news(self) -> str:
        """Text that no later token can change."""
        end = len(self.ready)
        if not self.ending:
            if self.ready.endswith("\ufffd"):
                end = len(self.ready.rstrip("\ufffd"))
            for stop in self.sampling.stop:
                for n in range(min(len(stop) - 1, end), 0, -1):
                    if self.ready.endswith(stop[:n], 0, end):
                        end = min(end, end - n)
                        break
        news = self.ready[self.told : end]
        self.told = max(self.told, end)
        return news
