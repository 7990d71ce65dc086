"""Continuous batching: jobs join and leave the running batch between tokens, and each gets the tokens it would get alone.

    engine = Engine(model, tokenizer, weights="int8", rows=8)
    engine.start()
    run = engine.submit(Job(prompt, Sampling(max_tokens=64), identity=mara, version="…"))
    for piece in run.pieces(): print(piece.text, end="")

One thread has the model's steps to itself. Between two tokens it lets rows go that have ended or were left, lets the next jobs in, and
reads their prompts for at most `PAUSE` seconds, so that a long prompt never stops those who are being answered. How rows share a step,
and why their numbers are those of a row alone, is said in `models/decode/rows.py`; what is kept of prompts in `prefix.py`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from ..errors import ShapeError, SpecError
from ..models.base import Model
from ..models.decode.contrast import Contrasted
from ..models.decode.generate import expect_decoder, prompt_rows
from ..models.decode.prepare import Weights, prepare
from ..models.decode.rooms import CacheKind
from ..models.decode.rows import rows_of
from ..models.decode.sampling import is_whole
from ..models.decode.stream import Speaks
from .contract import NO_TOKEN, DrainingError, Job, Piece, QueueFullError, Stats
from .plain import PlainRun
from .prefix import PrefixCache
from .row import Row, gone

T = TypeVar("T")
PAUSE = 0.05
"""Seconds that prompts are read for between two tokens of those who are being answered; one piece of work is done whatever it takes."""
RETRY = (1.0, 300.0)
"""Seconds after which somebody who was refused may ask again, at least and at most."""
RECENT = 0.2
"""What the last job counts in the mean of how long one takes."""


class Engine:
    def __init__(
        self,
        model: Model,
        tokenizer: Speaks | None,
        *,
        weights: Weights = "float32",
        cache: CacheKind = "float32",
        rows: int = 8,
        queue: int = 64,
        cache_bytes: int = 256 << 20,
    ) -> None:
        """At most `rows` jobs run and `queue` wait; `cache` is how keys and values are kept, `cache_bytes` of them of prompts, 0 for none."""
        expect_decoder(model)
        for name, n, least in (("rows", rows, 1), ("queue", queue, 0), ("cache_bytes", cache_bytes, 0)):
            if not is_whole(n) or n < least:
                raise SpecError(f"{name}={n!r}: it must be a whole number of at least {least}")
        self.model, self.tokenizer = model.eval(), tokenizer
        self.weights: Weights = weights
        self.cache: CacheKind = cache
        self.most_rows, self.most_waiting = rows, queue
        self.rows = Contrasted(rows_of(prepare(model, weights), cache))
        self.prefixes = PrefixCache(cache_bytes, self.rows.grain)
        self._changed = threading.Condition()
        self._waiting: deque[PlainRun] = deque()
        self._running: list[Row] = []
        self._turn = 0
        self._draining = self._closing = False
        self._failure: BaseException | None = None
        self._prompted = self._written = self._cached = 0
        self._seconds = 1.0
        """How long a job takes, as the last ones did."""
        self._forgotten: list[str] = []
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="regard-call")
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        with self._changed:
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._work, name="regard-engine", daemon=True)
                self._thread.start()

    def submit(self, job: Job) -> PlainRun:
        prompt_rows(job.prompt, None, self.model)
        context, more = self.model.context, job.sampling.max_tokens
        # The last token that is written does not go through the model again.
        if context is not None and len(job.prompt) + more - 1 > context:
            raise ShapeError(
                f"{len(job.prompt):,} tokens and {more:,} more are past this model's context of {context:,} tokens: "
                + (f"ask for at most {room:,}" if (room := context - len(job.prompt) + 1) > 0 else "shorten the prompt")
            )
        if job.sampling.stop and self.tokenizer is None:
            raise SpecError(f"stop={job.sampling.stop} is text, and without a tokenizer there is none: give stop_ids")
        run = PlainRun(job)
        with self._changed:
            if self._failure is not None:
                raise RuntimeError("the engine has stopped") from self._failure
            if self._draining:
                raise DrainingError
            if len(self._waiting) >= max(self.most_waiting, self.most_rows - len(self._running)):
                raise QueueFullError(len(self._waiting), self._retry_after())
            self._waiting.append(run)
            self._changed.notify_all()
        return run

    async def call(self, f: Callable[[], T]) -> T:
        """Other work on the same model, off the event loop and one at a time; decoding goes on beside it."""
        try:
            done = self._calls.submit(f)
        except RuntimeError as error:
            raise DrainingError from error
        return await asyncio.wrap_future(done)

    def forget(self, version: str) -> None:
        """Let go of whatever is kept of prompts under versions that begin so, before the next token."""
        with self._changed:
            self._forgotten.append(version)
            self._changed.notify_all()

    def stats(self) -> Stats:
        with self._changed:
            p = self.prefixes
            return Stats(
                len(self._waiting), len(self._running), self._prompted, self._written, self._cached, p.hits, p.misses, p.nbytes
            )

    def drain(self, timeout: float) -> bool:
        with self._changed:
            self._draining = True
            idle = self._changed.wait_for(lambda: not self._waiting and not self._running, timeout)
            return idle and self._failure is None

    def close(self) -> None:
        """End now: whoever still runs is cancelled, whoever waits is refused."""
        with self._changed:
            self._draining = self._closing = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._end_all(None)
        self._calls.shutdown(cancel_futures=True)

    def _retry_after(self) -> float:
        """When a place will be free: one of the rows ends in a row's share of the time that a job takes."""
        least, most = RETRY
        return min(max(self._seconds / self.most_rows, least), most)

    def _work(self) -> None:
        try:
            with torch.inference_mode():
                while self._round():
                    pass
        except BaseException as error:
            # Nothing here raises on its own; if something does, nobody is left waiting for an answer.
            with self._changed:
                self._failure = error
            self._end_all(error)
            raise

    def _round(self) -> bool:
        """What happens between two tokens, and the next token of every row; False when it is time to go."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._running or self._closing or self._forgotten)
            if self._closing:
                return False
            forgotten, self._forgotten = self._forgotten, []
        for version in forgotten:
            self.prefixes.forget(lambda root, start=version: root[0].startswith(start))
        self._sweep()
        self._admit()
        self._read()
        self._step()
        return True

    def _sweep(self) -> None:
        for row in list(self._running):
            if (ending := row.gone) is not None:
                self._leave(row, Piece(NO_TOKEN, ending=ending))
        with self._changed:
            left = [(run, Piece(NO_TOKEN, ending=gone(run))) for run in self._waiting]
            left = [(run, last) for run, last in left if last.ending is not None]
            for run, _ in left:
                self._waiting.remove(run)
            self._changed.notify_all()
        for run, last in left:
            run.put(last)

    def _admit(self) -> None:
        while True:
            with self._changed:
                if not self._waiting or len(self._running) >= self.most_rows:
                    return
                run = self._waiting.popleft()
            run.waited = time.monotonic() - run.submitted
            try:
                row = Row(run, self.model, self.tokenizer)
                self._begin(row)
            except Exception as error:
                run.put(error)
                with self._changed:
                    self._changed.notify_all()
                continue
            with self._changed:
                self._running.append(row)

    def _begin(self, row: Row) -> None:
        """Room for its text, and what is known of its prompt already; tokens that are to be scored are all read."""
        row.state = self.rows.open(row.overrides, len(row.prompt) + row.job.sampling.max_tokens, row.contrast)
        tokens = row.prompt
        if row.scores is None and self.prefixes.most:
            hit = self.prefixes.find(row.root, row.prompt)
            if hit.tokens:
                self.rows.restore(row.state, hit.parts, hit.tokens)
                tokens = row.prompt[hit.tokens :]
                row.run.cached_tokens = hit.tokens
            row.logits = hit.logits
        row.left = len(tokens)
        if tokens:
            row.reading = self.rows.read(row.state, tokens, None if row.scores is None else row.scored)

    def _read(self) -> None:
        """Prompts, for a bounded time: in turns the one that came first and the one that is nearest to its end."""
        for row in [r for r in self._running if r.reading is None and r.last == NO_TOKEN]:
            self._begun(row)
        until = time.monotonic() + PAUSE
        while reading := [r for r in self._running if r.reading is not None]:
            self._turn += 1
            row = reading[0] if self._turn % 2 else min(reading, key=lambda r: r.left)
            self._read_on(row)
            if row.reading is None or time.monotonic() >= until:
                return

    def _read_on(self, row: Row) -> None:
        assert row.reading is not None
        try:
            next(row.reading)
        except StopIteration as end:
            row.reading, row.logits = None, end.value
            if row.scores is not None:
                row.run.prompt_scores = row.scores
            else:
                self._keep(row, row.prompt, row.logits)
            self._begun(row)
        except Exception as error:
            self._leave(row, error)

    def _begun(self, row: Row) -> None:
        """The first token, whose logits reading has left."""
        logits, row.logits = row.logits, None
        assert logits is not None
        with self._changed:
            self._prompted += len(row.prompt)
            self._cached += row.run.cached_tokens
        self._write(row, logits)

    def _step(self) -> None:
        rows = [r for r in self._running if r.reading is None]
        if not rows:
            return
        for row, logits in zip(rows, self.rows.step([r.state for r in rows], [r.last for r in rows]), strict=True):
            if isinstance(logits, Exception):
                self._leave(row, logits)
            else:
                self._write(row, logits)

    def _write(self, row: Row, logits: torch.Tensor) -> None:
        try:
            piece = row.write(logits)
        except Exception as error:
            self._leave(row, error)
            return
        with self._changed:
            self._written += 1
        if piece.ending is None:
            row.run.put(piece)
            return
        if self.rows.steps_as_it_reads:
            # The last token may not have gone through the model.
            self._keep(row, (row.prompt + row.stream.tokens)[: row.state.length], None)
        self._leave(row, piece)

    def _keep(self, row: Row, tokens: list[int], logits: torch.Tensor | None) -> None:
        """What the row has read, for whoever begins alike; where there is no memory for it, nothing is kept any more."""
        try:
            self.prefixes.keep(row.root, tokens, lambda a, b: self.rows.copy(row.state, a, b), logits)
        except (MemoryError, RuntimeError):
            self.prefixes.forget(lambda root: True)

    def _leave(self, row: Row, last: Piece | BaseException) -> None:
        """Out of the batch, with its last word."""
        if row.reading is not None:
            row.reading.close()
        with self._changed:
            self._running.remove(row)
            took = time.monotonic() - row.run.submitted - row.run.waited
            self._seconds += RECENT * (took - self._seconds)
            self._changed.notify_all()
        row.run.put(last)

    def _end_all(self, error: BaseException | None) -> None:
        """Say to everybody that nothing more comes."""
        with self._changed:
            running, self._running = self._running, []
            waiting = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        for row in running:
            row.run.put(Piece(NO_TOKEN, ending="cancelled") if error is None else error)
        for run in waiting:
            run.put(DrainingError() if error is None else error)


__all__ = ["Engine"]
