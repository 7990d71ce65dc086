"""Whatever a damaged file makes a reader raise, as one of our errors."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from .errors import CheckpointError, RegardError


@contextlib.contextmanager
def reading(what: object, kind: type[RegardError] = CheckpointError) -> Generator[None]:
    """Read `what` in this block: anything but an interruption becomes a `kind` that names it."""
    try:
        yield
    except (RegardError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        # A panic in Rust derives from BaseException, so that `except Exception` would let it through.
        said = " ".join(str(error).split())[:300]
        raise kind(f"{what} cannot be read: {type(error).__name__}{': ' if said else ''}{said}") from error


__all__ = ["reading"]
