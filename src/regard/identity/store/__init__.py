"""Identities that are kept: append-only commits, forks, rollbacks, and forgetting that proves itself."""

from .difference import Change, Diff, compare
from .errors import StaleError, StoreError
from .forget import Forgotten, Replay
from .records import Commit, Event
from .store import Collected, IdentityStore

__all__ = [
    "Change", "Collected", "Commit", "Diff", "Event", "Forgotten", "IdentityStore", "Replay", "StaleError", "StoreError", "compare",
]  # fmt: skip
