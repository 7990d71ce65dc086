"""One job while it is in the batch: its text so far, how its next token is drawn, and how it ends."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import NumericsError
from ..identity.read.body import OwnBody
from ..identity.speaking import read_by
from ..models.base import Model
from ..models.decode.contrast import contrast_of
from ..models.decode.rows import Overrides, Reading
from ..models.decode.sampling import Drawer
from ..models.decode.stream import Speaks, Stream, Token
from ..nn import AttentionOverride
from .contract import NO_TOKEN, Ending, Job, Piece, Score
from .plain import PlainRun


class Row:
    def __init__(self, run: PlainRun, model: Model, tokenizer: Speaks | None) -> None:
        job = run.job
        self.run, self.job, self.prompt = run, job, list(job.prompt)
        self.overrides, digests = overrides_of(model, job)
        self.contrast = contrast_of(self.overrides, job.sampling)
        self.root: Hashable = job.version, digests, self.contrast
        """Whoever has the same may go on from what this row has read."""
        self.told: list[Token] = []
        eos_ids = model.generation_info.eos_ids
        self.stream = Stream(0, self.prompt, job.sampling, tokenizer, self.told.append, eos_ids)
        self.draw = Drawer(job.sampling, [self.prompt], model.config.vocabulary, [0], self.stream.stop_ids)
        self.scores: list[Score] | None = None if job.prompt_logprobs is None else [Score(self.prompt[0], None)]
        self.state: Any = None
        """What `Rows` knows of it."""
        self.reading: Reading | None = None
        """What is left of its prompt; None once it writes."""
        self.logits: Tensor | None = None
        """Behind its prompt, until its first token is drawn."""
        self.left = len(self.prompt)
        self.last = NO_TOKEN
        """The token that goes through the model next."""

    @property
    def gone(self) -> Ending | None:
        """How it ends before its next token, where it does."""
        return gone(self.run)

    def scored(self, logits: Tensor) -> None:
        """Take the logits behind some tokens of the prompt: they say how those after them were expected."""
        assert self.scores is not None
        at, most = len(self.scores), self.job.prompt_logprobs or 0
        tokens = self.prompt[at : at + len(logits)]
        rates = torch.log_softmax(logits[: len(tokens)].float(), -1)
        top = rates.topk(min(most, rates.shape[-1])) if most else None
        for i, token in enumerate(tokens):
            beside = () if top is None else tuple(zip(top.indices[i].tolist(), top.values[i].tolist(), strict=True))
            self.scores.append(Score(token, float(rates[i, token]), beside))

    def write(self, logits: Tensor) -> Piece:
        """Draw the next token."""
        if not bool(torch.isfinite(logits.sum())):
            raise NumericsError("the logits are not finite: the weights or the state hold NaN or infinity")
        token, places, sampling = int(self.draw(logits.unsqueeze(0))[0]), len(self.stream.top), self.job.sampling
        self.stream.push(token, logits, last=len(self.stream.tokens) + 1 == sampling.max_tokens)
        said = self.told.pop()
        top = tuple(self.stream.top[-1]) if len(self.stream.top) > places else ()
        self.last = token
        return Piece(token, said.text, said.logprob, top, cast(Ending | None, said.ending))


def gone(run: PlainRun) -> Ending | None:
    if run.stopped.is_set():
        return "cancelled"
    return "deadline" if run.job.deadline is not None and time.monotonic() > run.job.deadline else None


def overrides_of(model: Model, job: Job) -> tuple[Overrides, Sequence[str | None]]:
    """What a job's identity does to the layers, and its name by content."""
    if job.identity is None:
        return {}, ()
    body, reads = read_by(model, job.identity)
    overrides: dict[nn.Module, AttentionOverride] = {
        layer: r for layer, r in zip(cast(OwnBody, body).layers, reads, strict=True) if r is not None
    }
    # Whoever holds nothing is the model itself.
    return overrides, tuple(None if r is None else r.digest for r in reads) if overrides else ()


__all__ = ["Row", "gone", "overrides_of"]
