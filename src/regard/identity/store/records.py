"""What a store remembers: commits, each made from the one before it, and the events that led to them.

A commit's id is the sha256 of its own record, so that nothing in it can change unseen; the record holds the digest of the
identity, the hash of its blob and the hash of its events, so that the id stands for all of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Any, Literal, NoReturn, get_args

from ...errors import CheckpointError
from .errors import StoreError

Kind = Literal["new", "imprint", "sleep", "rollback", "import", "forget"]
WRITES: tuple[Kind, ...] = ("imprint", "sleep")
"""Kinds of events that write into an identity: these are replayed; the others only record."""
MOST_TEXT = 1 << 20
MOST_RULE = 1 << 16
MOST_MESSAGE = 4096
MOST_SOURCE = 256
MARK, DIGITS = "@", 8
"""Between the name of a source and the digits that make it unique, and how many those are."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PREFIX = re.compile(r"[0-9a-f]{4,64}")


@dataclass(frozen=True)
class Event:
    """One thing that happened to an identity, with all that is needed to let it happen again."""

    kind: Kind
    source: str | None = None
    """Who or what wrote: `forget` takes back by this name."""
    text: str | None = None
    """The experience: plain text, or a JSON list of chat messages."""
    rule: Mapping[str, Any] = field(default_factory=dict[str, Any])
    seed: int | None = None
    time: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise StoreError(f"an event of kind {self.kind!r}; there are {', '.join(get_args(Kind))}")
        if self.source is not None:
            checked_source(self.source)
        if self.text is not None:
            if not isinstance(self.text, str):
                raise StoreError(f"the text of an event is a string, not a {type(self.text).__name__}")
            size = len(self.text.encode("utf-8", "surrogatepass"))
            if size > MOST_TEXT:
                raise StoreError(f"an event with {size:,} bytes of text; at most {MOST_TEXT:,}: write it in several events")
        if not isinstance(self.rule, Mapping):
            raise StoreError(f"the rule of an event is a mapping, not a {type(self.rule).__name__}")
        try:
            rule = canonical(dict(self.rule))
        except (TypeError, ValueError, RecursionError) as error:
            raise StoreError(f"the rule of an event must be plain JSON with finite numbers: {error}") from error
        if len(rule) > MOST_RULE:
            raise StoreError(f"an event with a rule of {len(rule):,} characters; at most {MOST_RULE:,}")
        # As it will be read back: tuples are lists in JSON, and an event must equal its own copy from the disk.
        object.__setattr__(self, "rule", json.loads(rule))
        if self.seed is not None and (type(self.seed) is not int or not -(1 << 63) <= self.seed < 1 << 64):
            raise StoreError(f"the seed of an event is a 64-bit integer, not {self.seed!r}")
        if isinstance(self.time, bool) or not isinstance(self.time, int | float) or not math.isfinite(self.time):
            raise StoreError(f"the time of an event is in seconds, not {self.time!r}")
        object.__setattr__(self, "time", float(self.time))

    def body(self) -> str:
        return canonical(asdict(self))

    @classmethod
    def read(cls, record: object) -> Event:
        """From the object that `body` describes."""
        if not isinstance(record, dict) or set(record) != {f.name for f in fields(cls)}:
            raise CheckpointError(
                f"an event has {', '.join(f.name for f in fields(cls))} and nothing else; this is {record!r:.80}"
            )
        try:
            return cls(**record)
        except (StoreError, TypeError, OverflowError) as error:
            raise CheckpointError(f"this is no event: {error}") from error


@dataclass(frozen=True)
class Commit:
    """An identity at one moment. Commits are never changed; what is undone is undone by a further commit."""

    id: str
    parent: str | None
    origin: str | None
    """For a rollback, the commit whose identity it holds."""
    number: int
    """How many commits are behind it."""
    kind: Kind | None
    """Of its last event; None where the writer gave none."""
    source: str | None
    message: str
    time: float
    digest: str
    """Of the identity."""
    blob: str
    """sha256 of the file that holds the identity."""
    bytes: int
    fingerprint: str
    """Of the base model."""
    journal: str
    """sha256 over its events."""
    token: str
    sources: tuple[str, ...]
    experiences: int
    tokens: int
    imprints: int
    episodes: int = 0
    """How many it has."""
    last_episode: str | None = None
    """The row of the last of them, whose id stands for all of them and their order: see `episode_rows`."""

    def body(self) -> str:
        record = asdict(self)
        del record["id"]
        return canonical(record)

    @classmethod
    def read(cls, id: object, body: object) -> Commit:
        if not isinstance(id, str) or not isinstance(body, str):
            raise CheckpointError(f"a commit is recorded as {id!r:.80}, with {body!r:.80}: the database is damaged")
        if hashlib.sha256(body.encode("utf-8", "surrogatepass")).hexdigest() != id:
            raise CheckpointError(f"the record of commit {id[:12]} is not the one that was written: its hash differs")
        record = strict_json(body, f"commit {id[:12]}")
        try:
            record |= {"id": id, "sources": tuple(record["sources"])}
            return cls(**record)
        except (TypeError, KeyError) as error:
            raise CheckpointError(f"the record of commit {id[:12]} is not whole: {error}") from error

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.time))
        what = self.kind or "write"
        return f"{self.id[:12]}  {when}  {what}{f' by {self.source}' if self.source else ''}  {self.message}".rstrip()


@dataclass(frozen=True)
class EpisodeRow:
    """One episode in one list: its id stands for all before it too."""

    id: str
    previous: str | None
    number: int
    """How many are before it."""
    blob: str
    """The episode's digest, by which its file is named."""


def row_id(previous: str | None, blob: str) -> str:
    return hashlib.sha256(f"{previous or ''} {blob}".encode()).hexdigest()


@lru_cache(maxsize=8)
def rows_of(blobs: tuple[str, ...]) -> tuple[EpisodeRow, ...]:
    """The rows of a list of episodes, oldest first."""
    rows: list[EpisodeRow] = []
    previous: str | None = None
    for number, blob in enumerate(blobs):
        rows.append(EpisodeRow(row_id(previous, blob), previous, number, blob))
        previous = rows[-1].id
    return tuple(rows)


def lists(rows: Mapping[str, EpisodeRow], commit: Commit) -> bool:
    """Whether the episodes of a commit are among these rows, as many as it says."""
    last = rows.get(commit.last_episode or "")
    return commit.episodes == (0 if last is None else last.number + 1) and (last is None) == (commit.last_episode is None)


def reached(rows: Mapping[str, EpisodeRow], commits: Iterable[Commit]) -> set[str]:
    """The rows to which these commits lead."""
    live: set[str] = set()
    for commit in commits:
        at = commit.last_episode
        while at is not None and at not in live and at in rows:
            live.add(at)
            at = rows[at].previous
    return live


def journal_hash(events: Sequence[Event]) -> str:
    return hashlib.sha256("\n".join(e.body() for e in events).encode()).hexdigest()


def canonical(value: object) -> str:
    """One text for one value, in ASCII: no database's encoding, and no NUL, can stand in its way."""
    return json.dumps(value, sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def strict_json(text: str | bytes, what: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not readable as JSON: {error}") from error


def checked_name(name: str) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise StoreError(f"{name!r:.80} cannot name an identity: a letter or digit, then up to 63 of A–Z a–z 0–9 . _ -")
    return name


def checked_source(source: str) -> str:
    if not isinstance(source, str) or not source.isprintable() or not 0 < len(source) <= MOST_SOURCE:
        raise StoreError(f"{source!r:.80} cannot name a source: 1 to {MOST_SOURCE} printable characters")
    return source


def unique_source(label: str, *parts: str) -> str:
    """`label@3f2a9c1d`: a name that tells apart two sources which would be called the same, by what they hold; without parts, by chance."""
    digest = hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest() if parts else uuid.uuid4().hex
    return checked_source(f"{label[: MOST_SOURCE - DIGITS - 1]}{MARK}{digest[:DIGITS]}")


def label_of(source: str) -> str:
    """What people call a source: its name without the digits that make it unique."""
    label, mark, digits = source.rpartition(MARK)
    return label if mark and len(digits) == DIGITS and all(c in "0123456789abcdef" for c in digits) else source


def checked_message(message: str) -> str:
    if not isinstance(message, str) or len(message) > MOST_MESSAGE:
        raise StoreError(f"a message is a text of at most {MOST_MESSAGE} characters, not {message!r:.80}")
    return message


__all__ = [
    "WRITES",
    "Commit",
    "EpisodeRow",
    "Event",
    "Kind",
    "label_of",
    "lists",
    "reached",
    "row_id",
    "rows_of",
    "unique_source",
]
