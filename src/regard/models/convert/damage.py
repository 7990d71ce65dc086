"""Whatever a damaged or hostile file provokes in a reader becomes one error of ours that names the file."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from ...errors import CheckpointError, RegardError


@contextmanager
def reading(origin: str, *, changed: bool = False) -> Generator[None]:
    """Errors inside are the file's fault: each is a CheckpointError that names `origin`.

    With `changed` the caller has put in values of its own, and what our own checks say of those stays as it is.
    """
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as error:
        if (changed and isinstance(error, RegardError)) or not (isinstance(error, Exception) or is_panic(error)):
            raise
        why = str(error).strip().splitlines()
        raise CheckpointError(
            f"{origin} is damaged, or not what its configuration says: {type(error).__name__}: {why[0] if why else 'no reason given'}"
        ) from error


def is_panic(error: BaseException) -> bool:
    """A panic of a library in Rust, which is no Exception and passes every `except Exception`."""
    return type(error).__module__ == "pyo3_runtime"


__all__ = ["is_panic", "reading"]
