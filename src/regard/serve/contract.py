"""What the application asks of an engine: a job goes in, its tokens come out one by one.

run = engine.submit(Job(prompt, Sampling(max_tokens=64)))
async for piece in run: print(piece.text, end="")          # or, in a thread, for piece in run.pieces()
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from ..errors import RegardError
from ..identity.state import Identity
from ..models.decode.sampling import Sampling

T = TypeVar("T")
Ending = Literal["stop", "length", "cancelled", "deadline"]
NO_TOKEN = -1
"""Of a last piece with which no token fell: a job that was cancelled, or ran out of time."""


class QueueFullError(RegardError):
    """As many jobs wait as may wait."""

    def __init__(self, waiting: int, retry_after: float) -> None:
        super().__init__(f"{waiting} requests are waiting already, as many as may; try again in {retry_after:.0f} s")
        self.waiting, self.retry_after = waiting, retry_after


class DrainingError(RegardError):
    """The engine finishes what it has begun, and begins nothing."""

    def __init__(self) -> None:
        super().__init__("this server is going down: it finishes what it has begun, and takes nothing new")


@dataclass(frozen=True, eq=False)
class Job:
    """One row that is to be written."""

    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    identity: Identity | None = None
    """As `recall` made it for this prompt, or None: the model itself."""
    version: str = ""
    """Base fingerprint, identity name and commit: part of the prefix cache's key."""
    prompt_logprobs: int | None = None
    """n: log-probabilities of the prompt's own tokens, and of the n most likely at each place."""
    deadline: float | None = None
    """`time.monotonic()` after which it ends with "deadline"."""


@dataclass(frozen=True)
class Piece:
    """One token as it falls. A token that ends the row (`ending="stop"`, by an id) is none of the answer's, and says nothing."""

    token: int
    text: str = ""
    """What became readable with it; may be empty."""
    logprob: float | None = None
    """Under the model itself, before temperature and cuts; with `Sampling.logprobs`."""
    top: tuple[tuple[int, float], ...] = ()
    ending: Ending | None = None
    """Set on the last piece."""


@dataclass(frozen=True)
class Score:
    """One token of a prompt, as the model expected it."""

    token: int
    logprob: float | None
    """None for the first: nothing stands before it."""
    top: tuple[tuple[int, float], ...] = ()


class Run(Protocol):
    """A job that was submitted. What goes wrong is raised where its pieces are read."""

    cached_tokens: int
    """Of the prompt, taken from the prefix cache; known once the first piece is there."""
    prompt_scores: list[Score] | None
    """With `Job.prompt_logprobs`; known once the first piece is there."""
    waited: float
    """Seconds between `submit` and the first work on it; known once the first piece is there."""

    def __aiter__(self) -> AsyncIterator[Piece]: ...
    def pieces(self) -> Iterator[Piece]: ...
    def cancel(self) -> None:
        """Let the row leave before its next token; any thread may, more than once, and after its end."""
        ...


@dataclass(frozen=True)
class Stats:
    """What an engine has done so far, and what it holds now."""

    queued: int = 0
    running: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    cache_bytes: int = 0


class EngineLike(Protocol):
    """What `PlainEngine` and `Engine` are."""

    def start(self) -> None: ...
    def submit(self, job: Job) -> Run:
        """Thread-safe; raises QueueFullError, DrainingError, and ShapeError for what does not fit the context."""
        ...

    async def call(self, f: Callable[[], T]) -> T:
        """Other work on the same model, off the event loop, one at a time; decoding goes on beside it."""
        ...

    def forget(self, version: str) -> None:
        """Let go of whatever is kept of prompts under versions that begin so."""
        ...

    def stats(self) -> Stats: ...
    def drain(self, timeout: float) -> bool:
        """Take nothing new, wait for what runs; False where some of it did not end in time."""
        ...

    def close(self) -> None: ...


__all__ = [
    "NO_TOKEN", "DrainingError", "Ending", "EngineLike", "Job", "Piece", "QueueFullError", "Run", "Score", "Stats",
]  # fmt: skip
