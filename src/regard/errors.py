"""Every error is a ValueError that echoes the offending values and says what to write instead."""

from collections.abc import Generator
from contextlib import contextmanager


class RegardError(ValueError):
    """Base of all errors raised by regard."""


class SpecError(RegardError):
    """A spec that cannot be read: an unknown name, a bad parameter."""


class ShapeError(RegardError):
    """Tensors whose shapes do not fit each other."""


class StateError(RegardError):
    """A mechanism needs a tensor that `state=` does not carry, or carries wrongly."""


class CombinationError(RegardError):
    """Two parts that have no meaning together."""


class NumericsError(RegardError):
    """Inputs that are not finite, or whose scores overflow."""


class CheckpointError(RegardError):
    """A checkpoint that is damaged, hostile, or not of the shape that its own configuration says."""


class RegardWarning(UserWarning):
    """What will be done, and will hardly be what was meant."""


class MissingPackageError(RegardError, ImportError):
    """A package that only an extra of regard installs."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"this part of regard needs {package}, which is not installed: pip install 'regard[{extra}]'")
        self.name, self.extra = package, extra


@contextmanager
def needs_extra(extra: str) -> Generator[None]:
    """Imports of packages that `extra` brings; one that is missing becomes an error that says what to install."""
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "regard"):
            raise
        raise MissingPackageError(package, extra) from error
