"""Answers as they are written: pieces of one run or of several, measured, bounded in time, and stopped when nobody reads them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar, cast

from ..errors import needs_extra

with needs_extra("serve"):
    from fastapi import Request

from .contract import Job, Piece, QueueFullError, Run, Score
from .errors import ApiError, GoneError
from .service import Service

T = TypeVar("T")
GRACE = 5.0
"""Seconds after a deadline in which the engine says itself that it has passed."""
BRIEFLY = 0.25
"""Seconds between two tries of one request to have a further job taken."""
Finish = Literal["stop", "length"]


def out_of_time(seconds: float) -> ApiError:
    return ApiError(504, f"the answer was not finished within {seconds:.0f} s, and was stopped", code="deadline_exceeded")


@dataclass(eq=False)
class Answer:
    """One choice, as far as it was written."""

    run: Run | None
    """None for one that was committed before, and is told again."""
    began: float
    stops: frozenset[int] = frozenset()
    text: str = ""
    pieces: list[Piece] = field(default_factory=list[Piece])
    ending: Finish | None = None

    @property
    def said(self) -> list[Piece]:
        """The pieces that are the answer's: without a token whose meaning is to end it."""
        return [p for p in self.pieces if not self.ends(p)]

    @property
    def cached_tokens(self) -> int:
        return 0 if self.run is None else self.run.cached_tokens

    @property
    def prompt_scores(self) -> list[Score]:
        return [] if self.run is None else self.run.prompt_scores or []

    def ends(self, piece: Piece) -> bool:
        return piece.ending == "stop" and piece.token in self.stops

    def take(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.text += piece.text
        self.ending = cast(Finish | None, piece.ending)


def begin(service: Service, job: Job, began: float) -> Answer:
    """An answer whose job is submitted."""
    return Answer(service.engine.submit(job), began, frozenset(service.tokenizer.eos_ids))


async def written(service: Service, answer: Answer) -> AsyncGenerator[Piece]:
    """The pieces of an answer as they fall. Whoever stops reading stops the run, before its next token."""
    metrics, limit, run = service.metrics, service.settings.deadline, answer.run
    assert run is not None
    last, late = answer.began, list[bool]()

    def stop() -> None:
        late.append(True)
        run.cancel()

    # By a timer, and not by cancelling a task: each piece of a stream may be waited for by another one.
    left = max(0.0, answer.began + limit - time.monotonic()) + GRACE
    timer = asyncio.get_running_loop().call_later(left, stop)
    try:
        async for piece in run:
            now = time.monotonic()
            if not answer.pieces:
                metrics.queue.observe(run.waited)
            (metrics.token if answer.pieces else metrics.first_token).observe(now - last)
            last = now
            if piece.ending is not None:
                metrics.endings.labels(piece.ending).inc()
            if piece.ending == "deadline" or (piece.ending == "cancelled" and late):
                raise out_of_time(limit)
            if piece.ending == "cancelled":
                raise GoneError
            answer.take(piece)
            yield piece
    finally:
        timer.cancel()
        run.cancel()


@dataclass(frozen=True)
class Fallen:
    """A piece of one of several answers."""

    index: int
    piece: Piece


async def together(service: Service, jobs: Sequence[Job], began: float, answers: dict[int, Answer]) -> AsyncGenerator[Fallen]:
    """The pieces of several answers in the order in which they fall; `answers` fills as they begin.

    As many run at once as the engine has rows: one request does not fill the queue for everybody.
    """
    # Before anything else, so that a full queue refuses the whole request at once.
    answers[0] = begin(service, jobs[0], began)
    if len(jobs) == 1:
        async for piece in written(service, answers[0]):
            yield Fallen(0, piece)
        return
    fallen: asyncio.Queue[Fallen | Exception | None] = asyncio.Queue()
    waiting = iter(range(1, len(jobs)))

    async def write(index: int) -> None:
        while index not in answers:
            try:
                answers[index] = begin(service, jobs[index], began)
            except QueueFullError as error:
                await asyncio.sleep(min(error.retry_after, BRIEFLY))
        async for piece in written(service, answers[index]):
            await fallen.put(Fallen(index, piece))

    async def work(first: int | None) -> None:
        try:
            if first is not None:
                await write(first)
            for index in waiting:
                await write(index)
        except Exception as error:
            await fallen.put(error)
        else:
            await fallen.put(None)

    left = min(len(jobs), service.settings.rows)
    tasks = [asyncio.create_task(work(0 if i == 0 else None)) for i in range(left)]
    try:
        while left:
            item = await fallen.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def pinged(source: AsyncIterator[T], seconds: float) -> AsyncGenerator[T | None]:
    """The same items, and None whenever nothing came for so long: a proxy closes a connection that says nothing."""
    pending: asyncio.Future[T] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(source))
            done, _ = await asyncio.wait({pending}, timeout=seconds)
            if not done:
                yield None
                continue
            task, pending = pending, None
            try:
                item = task.result()
            except StopAsyncIteration:
                return
            yield item
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        await closed(source)


async def closed(source: AsyncIterator[T]) -> None:
    """Let go of a source now, and not when it is collected: what it runs stops with it."""
    if isinstance(source, AsyncGenerator):
        with contextlib.suppress(RuntimeError):
            await source.aclose()


async def unless_gone(request: Request, work: Callable[[], Awaitable[T]]) -> T:
    """What the work gives; cut short when the client hangs up."""
    task = asyncio.ensure_future(work())
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise GoneError
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


__all__ = ["Answer", "Fallen", "Finish", "begin", "closed", "out_of_time", "pinged", "together", "unless_gone", "written"]
