"""Values that hold inside a `with` block for the code which runs in it, and for no other.

A ContextVar alone does not do that. A generator shares the context of whoever calls it, so a block that yields would go on
holding for its caller, and two of them would hold for each other; and where every step runs in a copy of a context, as a web
server's threads do, the second step would no longer be held. So:

- A block of plain code or of a coroutine holds in its context: for this thread or task, and for tasks, threads and copied
  contexts that were started inside it.
- A block inside a generator holds while that generator runs, wherever it is called from; for its caller it does not. A task or
  a thread that took a copy of the context from it is refused, as nobody can tell whether the copy was made inside.
- A generator that only stands for a block (`contextlib.contextmanager`, a fixture of pytest) is as good as the block.
- Blocks are left in any order, and each takes out what it put in. One that is left from a copy of its context leaves the
  original unclear, and whoever asks there is refused.
"""

from __future__ import annotations

import asyncio
import dis
import inspect
import sys
import weakref
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock, get_ident
from types import FrameType
from typing import Any, Generic, TypeVar

import torch

from .errors import StateError

V = TypeVar("V")
_COROUTINE = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE
_GENERATOR = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_YIELD = dis.opmap["YIELD_VALUE"]
"""The instruction that a suspended generator stands at, or right after."""
_STANDS_FOR_A_BLOCK = frozenset({"contextlib", "_pytest.fixtures", "pytest_asyncio.plugin", "anyio.pytest_plugin"})
"""Modules that run a generator to its yield, then a block of somebody's, then the rest of the generator."""


_UNCLEAR = (
    "what runs here has a copy of its context: nobody can tell who is meant. Say so: generate(model, prompt, identity=…), or "
    "enter `with living(model, …)` here, with None for the model itself"
)


class _Token:
    """Held by every context that an entry is in, and by nothing else: when it is gone, the entry is."""


@dataclass(eq=False)
class Entry(Generic[V]):
    """One block that was entered."""

    values: Mapping[Hashable, V | None]
    generated: bool
    """True for a block inside a generator, which may be suspended in it."""
    thread: int
    task: Callable[[], object | None]
    left: bool = False

    @property
    def here(self) -> bool:
        """True in the thread and the task that entered."""
        return self.thread == get_ident() and self.task() is _task()


@dataclass(eq=False)
class _Here(Generic[V]):
    """What one context holds, the last block last."""

    entries: tuple[tuple[Entry[V], _Token], ...]
    merged: Mapping[Hashable, V | None] | None
    """All of it together; None where the generators that run have to be asked."""
    bound: bool = False
    """True inside a call that was told exactly what holds."""


class Scope(Generic[V]):
    """Values for keys, block by block."""

    def __init__(self, name: str) -> None:
        self._here: ContextVar[_Here[V] | None] = ContextVar(name, default=None)
        self._frames: dict[FrameType, list[tuple[Entry[V], _Token]]] = {}
        self._open, self._counting = 0, Lock()
        self.is_idle = True
        """True where no block is open anywhere. A compiler cannot read a context: a graph that was made while this was so holds as
        long as it is, and is made again when a block is opened."""

    def _count(self, change: int) -> None:
        with self._counting:
            self._open += change
            self.is_idle = self._open == 0

    @contextmanager
    def held(self, values: Mapping[Any, V | None], end: Callable[[], object] | None = None) -> Generator[None]:
        """Inside, these hold; None for a key is a value too. `end` is called when no context has the block any more."""
        self._count(1)
        entry = self._enter(values, end)
        try:
            yield
        finally:
            self._leave(entry)
            self._count(-1)

    @contextmanager
    def bound(self, values: Mapping[Any, V]) -> Generator[None]:
        """Inside, exactly these hold, whatever blocks are open: for one call, and never around a yield."""
        before = self._here.get()
        self._count(1)
        self._here.set(_Here((), values, bound=True))
        try:
            yield
        finally:
            self._here.set(before)
            self._count(-1)

    def get(self, key: Hashable, default: Any = None) -> V | None:
        if self.is_idle and torch.compiler.is_compiling():
            return default
        here = self._here.get()
        if here is None:
            if not self._frames:
                return default
        elif here.merged is not None and (here.bound or not self._frames):
            return here.merged.get(key, default)
        return self._found(key, default)

    def of(self, keys: Iterable[Hashable]) -> dict[Any, V]:
        """What holds here and now for these keys, those without a value left out."""
        values = ((key, self.get(key)) for key in list(keys))
        return {key: value for key, value in values if value is not None}

    def _enter(self, values: Mapping[Any, V | None], end: Callable[[], object] | None) -> Entry[V]:
        task, frame = _task(), _suspendable()
        entry = Entry(dict(values), frame is not None, get_ident(), _nothing if task is None else weakref.ref(task))
        token = _Token()
        if end is not None:
            weakref.finalize(token, end).atexit = False
        if frame is not None:
            self._frames.setdefault(frame, []).append((entry, token))
        here = self._here.get()
        # What a bound call was told holds below a block that is opened inside it.
        before = () if here is None else here.entries
        if here is not None and here.bound:
            told = Entry(here.merged or {}, False, entry.thread, entry.task)
            before = ((told, _Token()),)
        self._here.set(_together((*before, (entry, token))))
        return entry

    def _leave(self, entry: Entry[V]) -> None:
        for frame in [f for f, pairs in list(self._frames.items()) if any(e is entry for e, _ in pairs)]:
            rest = [pair for pair in self._frames[frame] if pair[0] is not entry]
            if rest:
                self._frames[frame] = rest
            else:
                del self._frames[frame]
        entry.left = True
        here = self._here.get()
        if here is not None and any(e is entry for e, _ in here.entries):
            # Contexts that were copied meanwhile have it still, and ask again from now on.
            here.merged = None
            self._here.set(_together(tuple(pair for pair in here.entries if pair[0] is not entry)))

    def _is_suspended(self, entry: Entry[V]) -> bool:
        """Whether the generator that entered waits at a yield; one that has ended can no longer be inside its block."""
        frames = (f for f, pairs in list(self._frames.items()) if any(e is entry for e, _ in pairs))
        return any(_YIELD in (f.f_code.co_code[max(f.f_lasti - 2, 0)], f.f_code.co_code[f.f_lasti]) for f in frames)

    def _found(self, key: Hashable, default: Any) -> V | None:
        if self._frames:
            for frame in _running():
                for entry, _ in reversed(self._frames.get(frame, ())):
                    if key in entry.values:
                        return entry.values[key]
        here = self._here.get()
        for entry, _ in reversed(here.entries if here is not None else ()):
            if key not in entry.values:
                continue
            if entry.generated:
                if not entry.here:
                    raise StateError(f"an identity lives in this model inside a generator, and {_UNCLEAR}")
                if not entry.left and not self._is_suspended(entry):
                    raise StateError(
                        "an identity came to live in this model inside a generator that has ended without leaving: enter "
                        "`with living(model, …)` outside of it, in the function that speaks"
                    )
                continue
            if entry.left and entry.here:
                raise StateError(f"the block that an identity lived in has ended, and {_UNCLEAR}")
            return entry.values[key]
        return default


def _together(entries: tuple[tuple[Entry[V], _Token], ...]) -> _Here[V] | None:
    if not entries:
        return None
    if any(e.generated or e.left for e, _ in entries):
        return _Here(entries, None)
    return _Here(entries, {key: value for e, _ in entries for key, value in e.values.items()})


def _nothing() -> None:
    return None


def _task() -> object | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def _running() -> Generator[FrameType]:
    """The frames of this thread that are running, as far as the task that they belong to."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        yield frame
        frame = None if _is_root(frame) else frame.f_back


def _is_root(frame: FrameType) -> bool:
    """True for the outermost coroutine of a task: what calls it is the loop, and not who wrote the block."""
    if not frame.f_code.co_flags & _COROUTINE:
        return False
    caller = frame.f_back
    return caller is None or not caller.f_code.co_flags & (_COROUTINE | inspect.CO_ASYNC_GENERATOR)


def _suspendable() -> FrameType | None:
    """The nearest generator that runs, if one does: it may be suspended inside a block that is entered now."""
    for frame in _running():
        flags = frame.f_code.co_flags
        # An expression has no block of its own: what it enters is left by whoever collects it, as an ExitStack does.
        if flags & _GENERATOR and not flags & _COROUTINE and frame.f_code.co_name != "<genexpr>":
            caller = frame.f_back
            if caller is None or caller.f_globals.get("__name__") not in _STANDS_FOR_A_BLOCK:
                return frame
    return None


__all__ = ["Scope"]
