"""PlainEngine: one job after another, each exactly as `regard.models.decode` writes it alone. The twin that every faster engine is
compared with; it batches nothing and caches nothing."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from ..errors import NumericsError, ShapeError
from ..identity.read.body import OwnBody
from ..identity.speaking import read_by
from ..models.base import Model
from ..models.decode.contrast import beside, contrast_of, contrasted
from ..models.decode.generate import expect_decoder, prompt_rows
from ..models.decode.prepare import Weights, prepare
from ..models.decode.rooms import PREFILL, CacheKind, caches_of
from ..models.decode.sampling import Drawer
from ..models.decode.stream import Stream, Token
from ..models.tokenizer import Tokenizer
from ..nn import AttentionOverride, bound
from .contract import NO_TOKEN, DrainingError, Ending, Job, Piece, QueueFullError, Score, Stats

T = TypeVar("T")
RETRY_AFTER = 1.0


class PlainRun:
    """Pieces from the engine's thread to whoever reads them, in a thread or on any event loop."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.cached_tokens = 0
        self.prompt_scores: list[Score] | None = None
        self.waited = 0.0
        self.submitted = time.monotonic()
        self.stopped = threading.Event()
        self._ready: deque[Piece | BaseException] = deque()
        self._changed = threading.Condition()
        self._wake: Callable[[], None] | None = None

    def cancel(self) -> None:
        self.stopped.set()

    def put(self, piece: Piece | BaseException) -> None:
        with self._changed:
            self._ready.append(piece)
            self._changed.notify_all()
            if self._wake is not None:
                self._wake()

    def pieces(self) -> Iterator[Piece]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready)
                piece = self._ready.popleft()
            yield _raised(piece)
            if cast(Piece, piece).ending:
                return

    async def __aiter__(self) -> AsyncIterator[Piece]:
        loop, fallen = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            # A loop that has ended needs no waking: whoever read there is gone.
            if not loop.is_closed():
                loop.call_soon_threadsafe(fallen.set)

        with self._changed:
            self._wake = wake
        while True:
            with self._changed:
                piece = self._ready.popleft() if self._ready else None
                if piece is None:
                    fallen.clear()
            if piece is None:
                await fallen.wait()
                continue
            yield _raised(piece)
            if cast(Piece, piece).ending:
                return


def _raised(piece: Piece | BaseException) -> Piece:
    if isinstance(piece, BaseException):
        raise piece
    return piece


class PlainEngine:
    def __init__(
        self, model: Model, tokenizer: Tokenizer, *, weights: Weights = "float32", cache: CacheKind = "float32", queue: int = 64
    ) -> None:
        expect_decoder(model)
        self._rooms = caches_of(cache)
        self.model, self.tokenizer, self.most = model, tokenizer, queue
        self.weights: Weights = weights
        self._waiting: _Jobs = _jobs()
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="regard-call")
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._queued = self._running = self._prompt = self._written = 0
        self._draining = False
        self._idle = threading.Condition(self._lock)

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="regard-engine", daemon=True)
            self._thread.start()

    def submit(self, job: Job) -> PlainRun:
        prompt_rows(job.prompt, None, self.model)
        context = self.model.context
        if context is not None and len(job.prompt) + job.sampling.max_tokens - 1 > context:
            raise ShapeError(
                f"{len(job.prompt):,} tokens and {job.sampling.max_tokens:,} more do not fit the context of {context:,}"
            )
        run = PlainRun(job)
        with self._lock:
            if self._draining:
                raise DrainingError
            if self._queued >= self.most:
                raise QueueFullError(self._queued, RETRY_AFTER)
            self._queued += 1
        self._waiting.put(run)
        return run

    async def call(self, f: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._calls, f)

    def forget(self, version: str) -> None:
        """Nothing is kept."""

    def stats(self) -> Stats:
        with self._lock:
            return Stats(self._queued, self._running, self._prompt, self._written)

    def drain(self, timeout: float) -> bool:
        with self._idle:
            self._draining = True
            return self._idle.wait_for(lambda: self._queued + self._running == 0, timeout)

    def close(self) -> None:
        with self._lock:
            self._draining = True
        self._waiting.put(None)
        if self._thread is not None:
            self._thread.join()
        self._calls.shutdown()

    def _work(self) -> None:
        while (run := self._waiting.get()) is not None:
            with self._lock:
                self._queued, self._running = self._queued - 1, self._running + 1
            try:
                run.waited = time.monotonic() - run.submitted
                ending = _gone(run) or self._write(run)
                if ending is not None:
                    run.put(Piece(NO_TOKEN, ending=ending))
            except Exception as error:
                run.put(error)
            finally:
                with self._idle:
                    self._running -= 1
                    self._idle.notify_all()

    @torch.no_grad()
    def _write(self, run: PlainRun) -> Ending | None:
        """All pieces of a run; how it ended where nothing has said so yet."""
        job, model = run.job, self.model
        decoder = prepare(model, self.weights)
        body, reads = read_by(model, job.identity)
        overrides: dict[nn.Module, AttentionOverride] = {
            layer: r for layer, r in zip(cast(OwnBody, body).layers, reads, strict=True) if r is not None
        }
        prompt = list(job.prompt)
        told: list[Token] = []
        stream = Stream(0, prompt, job.sampling, self.tokenizer, told.append, model.generation_info.eos_ids)
        draw = Drawer(job.sampling, [prompt], model.config.vocabulary, [0], stream.stop_ids)
        contrast, room = contrast_of(overrides, job.sampling), len(prompt) + job.sampling.max_tokens
        caches = self._rooms(decoder.depth, room)
        others, other_caches = beside(overrides), self._rooms(decoder.depth, room) if contrast else ()
        scores: list[Score] | None = [Score(prompt[0], None)] if job.prompt_logprobs is not None else None
        device = next(model.parameters()).device
        start, chunk = 0, prompt[:PREFILL]
        while True:
            if (ending := _gone(run)) is not None:
                return ending
            with bound(overrides):
                # A prompt's own tokens are scored by the logits of those before them.
                logits, caches = decoder(torch.tensor([chunk], device=device), caches, every=scores is not None)
            plain: Tensor | None = None
            if contrast:
                with bound(others):
                    plain, other_caches = decoder(torch.tensor([chunk], device=device), other_caches)
            start += len(chunk)
            if scores is not None and start <= len(prompt):
                scores += _scores(logits[0], prompt[start - len(chunk) + 1 : start + 1], job.prompt_logprobs or 0)
            if start < len(prompt):
                chunk = prompt[start : start + PREFILL]
                continue
            last = logits[:, -1] if scores is not None else logits
            last = last if plain is None else contrasted(last, plain, contrast)
            if not bool(torch.isfinite(last.sum())):
                raise NumericsError("the logits are not finite: the weights or the state hold NaN or infinity")
            run.prompt_scores = scores
            token, places = int(draw(last)[0]), len(stream.top)
            stream.push(token, last[0], last=len(stream.tokens) + 1 == job.sampling.max_tokens)
            top = tuple(stream.top[-1]) if len(stream.top) > places else ()
            with self._lock:
                self._prompt += len(prompt) if start == len(prompt) else 0
                self._written += 1
            run.put(Piece(token, told[-1].text, told[-1].logprob, top, cast(Ending | None, told[-1].ending)))
            if stream.ending:
                return None
            chunk = [token]


_Jobs = queue.SimpleQueue[PlainRun | None]


def _jobs() -> _Jobs:
    return queue.SimpleQueue()


def _gone(run: PlainRun) -> Ending | None:
    if run.stopped.is_set():
        return "cancelled"
    return "deadline" if run.job.deadline is not None and time.monotonic() > run.job.deadline else None


def _scores(logits: torch.Tensor, tokens: list[int], most: int) -> list[Score]:
    """Of the tokens that these rows of logits expected; the last row may have none."""
    rates = torch.log_softmax(logits[: len(tokens)].float(), -1)
    top = rates.topk(most) if most else None
    out: list[Score] = []
    for i, token in enumerate(tokens):
        beside = () if top is None else tuple(zip(top.indices[i].tolist(), top.values[i].tolist(), strict=True))
        out.append(Score(token, float(rates[i, token]), beside))
    return out


__all__ = ["PlainEngine", "PlainRun"]
