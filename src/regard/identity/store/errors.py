"""What a store of identities refuses."""

from __future__ import annotations

from ...errors import RegardError, StateError


class StoreError(RegardError):
    """Something that the store was asked for and does not do: an unknown name, a limit, a newer schema, a full disk."""


class StaleError(StateError):
    """The head of a name is no longer what the writer started from; nothing was written, and nothing is lost."""


__all__ = ["StaleError", "StoreError"]
