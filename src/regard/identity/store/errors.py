"""What a store of identities refuses."""

from __future__ import annotations

from ...errors import CheckpointError, RegardError, StateError


class StoreError(RegardError):
    """Something that the store was asked for and does not do: an unknown name, a limit, a newer schema, a full disk."""


class UnknownNameError(StoreError):
    """No name and no commit is called so. Its words name others, for whoever may see all of the store."""


class UnreachableError(StoreError):
    """The place where blobs are kept did not answer; nothing was changed, and it may answer later."""


class StaleError(StateError):
    """The head of a name is no longer what the writer started from; nothing was written, and nothing is lost."""


class MissingBlobError(CheckpointError):
    """A file that a commit names is not there: lost, or removed with its commit since the commit was read."""

    def __init__(self, blob: str, message: str) -> None:
        super().__init__(message)
        self.blob = blob


__all__ = ["MissingBlobError", "StaleError", "StoreError", "UnknownNameError", "UnreachableError"]
