"""Identities on disk: append-only commits, forks, rollbacks, and forgetting that is verified by replay."""

from .check import Checked, Finding
from .difference import Change, Diff, EpisodeSummary, compare
from .errors import MissingBlobError, StaleError, StoreError, UnreachableError
from .forget import Forgotten, Replay
from .proof import Searched
from .records import Commit, Event, label_of, unique_source
from .store import Collected, IdentityStore

__all__ = [
    "Change", "Checked", "Collected", "Commit", "Diff", "EpisodeSummary", "Event", "Finding", "Forgotten", "IdentityStore", "MissingBlobError", "Replay",
    "Searched", "StaleError", "StoreError", "UnreachableError", "compare", "label_of", "unique_source",
]  # fmt: skip
