"""Forwards that are under way: each ends as it began, whatever is put in or taken out meanwhile.

A pre-hook on every model of transformers that we are in writes down what is put in when a forward begins, and its layers ask
that. Hooks are removed, and configs given back, when no forward that may need them is running any more. A forward that began
before our hooks were there has written nothing down, and goes on as if we were not.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

from torch import nn

from ...attention.spec import Spec
from ...errors import StateError

if TYPE_CHECKING:
    from .interface import Reader

LOCK = threading.RLock()
"""Of everything that is put in and taken out. A finaliser may want it while its thread has it."""


@dataclass(eq=False)
class Flight:
    """One forward, or one call of `generate`, in one thread."""

    thread: int
    key: int
    """The identity of the frame that has to end."""
    frame: FrameType | None = None
    """That frame, so that no other takes its identity; where it would keep somebody's tensors, a wrong guess only waits longer."""
    put: Mapping[nn.Module, Spec] = field(default_factory=lambda: dict[nn.Module, Spec]())
    """The spec of each layer, as it was when the forward began."""
    everyone: Mapping[nn.Module, Reader] = field(default_factory=lambda: dict[nn.Module, "Reader"]())
    """What each layer reads of an identity in every thread, likewise."""
    name: str = ""
    """All specs in one text, for the caches that are filled under them."""


class Handle(Protocol):
    """Something that was put on a module, and can be taken off again; torch's handles of hooks are some."""

    @property
    def id(self) -> int: ...
    def remove(self) -> None: ...


class _ThreadFlights(threading.local):
    def __init__(self) -> None:
        self.flights: list[Flight] = []


_LOCAL = _ThreadFlights()
_FLIGHTS: list[Flight] = []
_PENDING: list[Callable[[], None]] = []
_HOOKED: WeakKeyDictionary[nn.Module, dict[str, tuple[int, list[Handle]]]] = WeakKeyDictionary()
"""How often each kind of hooks of a module was asked for, and their handles."""


def flight() -> Flight | None:
    """The forward that this thread is in, if it began under our hooks."""
    flights = _LOCAL.flights
    while flights and flights[-1].frame is not None and has_ended(flights[-1].frame):
        # What was interrupted has told nobody that it ended.
        _land(flights.pop())
    return flights[-1] if flights else None


Put = tuple[Mapping[nn.Module, Spec], Mapping[nn.Module, "Reader"], str]


def begin(module: nn.Module, look: Callable[[nn.Module], Put]) -> None:
    """A forward of a hooked model begins; inside another it is a part of that."""
    expect_original(module)
    if flight() is None:
        frame = call_of(inspect.currentframe())
        new = Flight(threading.get_ident(), id(frame), frame, *look(module))
        _LOCAL.flights.append(new)
        _FLIGHTS.append(new)


def expect_original(module: nn.Module) -> None:
    """Raise for a copy, which has our hooks without being known here."""
    if module not in _HOOKED:
        raise StateError(
            f"this {type(module).__name__} is a copy of one that something was put into, and the copy does not have it: "
            "unwrap(), or leave the block, before you copy; then inject into the copy as well"
        )


def end(module: nn.Module) -> bool:
    """The forward of a hooked model ends; True if it was the outermost."""
    flights = _LOCAL.flights
    if not flights or flights[-1].frame is not call_of(inspect.currentframe()):
        return False
    _land(flights.pop())
    if _PENDING:
        sweep()
    return True


def note_mask() -> None:
    """A mask of our kind was made here: until whoever asked for it is done, an implementation of another may not read it."""
    if flight() is not None:
        return
    asked = _outermost()
    if asked is not None and not any(f.key == id(asked) for f in list(_FLIGHTS)):
        _FLIGHTS.append(Flight(threading.get_ident(), id(asked)))


def is_unhooked_forward() -> bool:
    """True inside a forward that began before our hooks were there."""
    return flight() is None and _outermost() is not None


def later(undo: Callable[[], None]) -> None:
    """Do this when no forward is under way: now, as a rule."""
    with LOCK:
        _PENDING.append(undo)
        sweep()


def sweep() -> None:
    """Undo what waits, unless a forward is under way."""
    with LOCK:
        # Settled first: what begins from here on is under way.
        flights = list(_FLIGHTS)
        running = _running({f.thread for f in flights if f.frame is None})
        for f in flights:
            if has_ended(f.frame) if f.frame is not None else f.key not in running[f.thread]:
                _land(f)
        if _FLIGHTS:
            return
        waiting, _PENDING[:] = list(_PENDING), []
        for undo in waiting:
            undo()


def _land(f: Flight) -> None:
    # Another thread, which found that it had ended, may have been faster.
    with contextlib.suppress(ValueError):
        _FLIGHTS.remove(f)


def has_ended(call: FrameType) -> bool:
    """Whether a call of a function is done, whichever thread it was of; torch does not tell its hooks of a Ctrl-C."""
    try:
        call.clear()
    except RuntimeError:
        # A frame that is executed cannot be cleared.
        return False
    return True


def _running(threads: Iterable[int]) -> dict[int, set[int]]:
    """The identities of all frames that these threads are in."""
    # Before Python 3.12 a collection may begin where a frame is looked up; the thread whose frame it is goes on meanwhile, and
    # what is found then is memory that somebody else has.
    collects = gc.isenabled()
    gc.disable()
    try:
        current = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        return {thread: {id(frame) for frame in _stack(current.get(thread))} for thread in threads}
    finally:
        if collects:
            gc.enable()


def hook(kind: str, modules: Iterable[nn.Module], attach: Callable[[nn.Module], list[Handle]]) -> Callable[[], None]:
    """Hooks of a kind on these modules, once for all who ask; what is given back removes them when nobody needs them."""
    modules = list(modules)
    with LOCK:
        for m in modules:
            kinds = _HOOKED.setdefault(m, {})
            count, handles = kinds[kind] if kind in kinds else (0, attach(m))
            kinds[kind] = count + 1, handles

    def undo() -> None:
        for m in modules:
            count, handles = _HOOKED[m][kind]
            _HOOKED[m][kind] = count - 1, handles
            if count > 1:
                continue
            del _HOOKED[m][kind]
            if not _HOOKED[m]:
                del _HOOKED[m]
            for handle in handles:
                handle.remove()

    return lambda: later(undo)


def hook_ids(module: nn.Module) -> list[int]:
    return [handle.id for _, handles in _HOOKED.get(module, {}).values() for handle in handles]


def _stack(frame: FrameType | None) -> Iterable[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def call_of(frame: FrameType | None) -> FrameType | None:
    """The call of a module that runs these hooks."""
    return next((f for f in _stack(frame) if f.f_code.co_name == "_call_impl"), frame)


def _outermost() -> FrameType | None:
    """The outermost forward or generation of transformers that this thread is in."""
    outermost = None
    for f in _stack(inspect.currentframe()):
        if f.f_code.co_name in ("forward", "generate") and str(f.f_globals.get("__name__", "")).startswith("transformers"):
            outermost = f
    return outermost


__all__ = [
    "LOCK",
    "Flight",
    "Handle",
    "begin",
    "call_of",
    "end",
    "expect_original",
    "flight",
    "has_ended",
    "hook",
    "hook_ids",
    "is_unhooked_forward",
    "later",
    "note_mask",
    "sweep",
]
