"""Keys: who may call, what for, and whose identities are theirs.

    token, key = keys.new("phone", scopes={"read", "write"}, owns=("mara", "family-*"))     the token is shown once
    keys.caller(token)

A token is 256 random bits, so that its plain SHA-256 gives nothing away; the file holds that and no token. It is read again when it
has changed: a key that is revoked is refused by the next request. A file that has ever held a key asks for one, also when all of
them are revoked.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from ..errors import CheckpointError, SpecError
from ..files import home, new_folders, read_plain, write_text
from ..identity.store.records import NAME

Scope = Literal["read", "write", "admin"]
PREFIX = "rg-"
FILE_BYTES = 16 << 20
MOST_KEYS = 10_000
MOST_OWNED = 10_000


@dataclass(frozen=True)
class Key:
    """One key as it is kept."""

    id: str
    label: str
    hash: str
    scopes: tuple[Scope, ...]
    owns: tuple[str, ...] = ()
    """Names of identities; one that ends in * stands for all names that begin so."""
    created: float = field(default_factory=time.time)
    revoked: float | None = None


@dataclass(frozen=True)
class Caller:
    """Whoever sent a request: by a key, or by being on this machine where no keys are."""

    id: str
    scopes: frozenset[str]
    owns: tuple[str, ...] = ()

    @property
    def admin(self) -> bool:
        return "admin" in self.scopes

    def holds(self, scope: str) -> bool:
        """admin can do all; who may write may read."""
        return scope == "open" or scope in self.scopes or self.admin or (scope == "read" and "write" in self.scopes)

    def may(self, name: str) -> bool:
        """Whether an identity of this name is, or would be, theirs."""
        if self.admin:
            return True
        return any(name.startswith(own[:-1]) if own.endswith("*") else name == own for own in self.owns)


LOCAL = Caller("local", frozenset({"admin"}))
"""Whoever calls a server that has no keys, and that only this machine reaches."""


class Keys:
    def __init__(self, path: Path | None = None) -> None:
        self.path = path or home() / "serve" / "keys.json"
        self._lock = threading.Lock()
        self._seen: tuple[int, int, int] | None = None
        self._by_hash: dict[str, Key] = {}

    @property
    def required(self) -> bool:
        return bool(self.all())

    def all(self) -> list[Key]:
        """Every key that was ever made here, revoked ones too."""
        with self._lock:
            self._refresh()
            return list(self._by_hash.values())

    def new(self, label: str, scopes: Iterable[str], owns: Iterable[str] = ()) -> tuple[str, Key]:
        """A token, which is kept nowhere, and its key."""
        token = PREFIX + secrets.token_urlsafe(32)
        key = Key(f"k{secrets.token_hex(4)}", checked_label(label), hashed(token), checked_scopes(scopes), checked_owns(owns))
        with self._lock, self._alone():
            self._refresh()
            if len(self._by_hash) >= MOST_KEYS:
                raise SpecError(f"there are {MOST_KEYS:,} keys in {self.path}, which is the limit")
            self._write([*self._by_hash.values(), key])
        return token, key

    def revoke(self, which: str) -> Key:
        """Refuse a key from now on; `which` is its id or its label."""
        with self._lock, self._alone():
            self._refresh()
            keys = list(self._by_hash.values())
            live = [k for k in keys if k.revoked is None and which in (k.id, k.label)]
            if len(live) != 1:
                known = ", ".join(f"{k.id} ({k.label})" for k in keys if k.revoked is None) or "none"
                several = f"{len(live)} keys are" if live else "no key that is not revoked is"
                raise SpecError(f"{several} called {which!r:.60}; there are: {known}")
            gone = replace(live[0], revoked=time.time())
            self._write([gone if k.id == gone.id else k for k in keys])
        return gone

    def caller(self, token: str) -> Caller | None:
        """Who holds this token; None for a stranger, and for a key that was revoked."""
        given = hashed(token)
        with self._lock:
            self._refresh()
            key = self._by_hash.get(given)
        # The search is by hash, which a caller cannot steer; the comparison takes as long whatever was found.
        if not hmac.compare_digest(given, key.hash if key is not None else "0" * 64) or key is None or key.revoked is not None:
            return None
        return Caller(key.id, frozenset(key.scopes), key.owns)

    def _refresh(self) -> None:
        try:
            s = self.path.stat()
        except FileNotFoundError:
            # A server that asked for keys does not stop asking because their file is gone.
            if not self._by_hash:
                self._seen = None
            return
        mark = s.st_mtime_ns, s.st_ino, s.st_size
        if mark != self._seen:
            self._by_hash = {k.hash: k for k in _read(self.path)}
            self._seen = mark

    def _write(self, keys: list[Key]) -> None:
        new_folders(self.path.parent)
        write_text(self.path, json.dumps({"version": 1, "keys": [asdict(k) for k in keys]}, indent=1) + "\n", private=True)
        self._seen = None
        self._refresh()

    def _alone(self) -> AbstractContextManager[object]:
        """While this block runs, no other process changes the file."""
        try:
            import fcntl
        except ImportError:
            return nullcontext()
        new_folders(self.path.parent)
        lock = self.path.with_suffix(".lock").open("a")
        self.path.with_suffix(".lock").chmod(0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return lock


def hashed(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def checked_label(label: str) -> str:
    if not label.isprintable() or not 0 < len(label) <= 64:
        raise SpecError(f"{label!r:.80} cannot name a key: 1 to 64 printable characters")
    return label


def checked_scopes(scopes: Iterable[str]) -> tuple[Scope, ...]:
    given = tuple(dict.fromkeys(scopes))
    unknown = [s for s in given if s not in get_args(Scope)]
    if unknown or not given:
        raise SpecError(f"scopes {', '.join(given) or 'none'}: give one or more of {', '.join(get_args(Scope))}")
    return cast(tuple[Scope, ...], given)


def checked_owns(owns: Iterable[str]) -> tuple[str, ...]:
    given = tuple(dict.fromkeys(owns))
    for name in given:
        # A prefix is the beginning of a name; * alone stands for everybody.
        if name != "*" and not NAME.fullmatch(name.removesuffix("*")):
            raise SpecError(f"{name!r:.80} names no identity: a name, or the beginning of names and a *, as family-*")
    if len(given) > MOST_OWNED:
        raise SpecError(f"{len(given):,} names for one key; at most {MOST_OWNED:,}: a prefix such as family-* stands for many")
    return given


def _read(path: Path) -> list[Key]:
    try:
        record: Any = json.loads(read_plain(path, FILE_BYTES))
        given: list[dict[str, Any]] = record["keys"]
        rows = [replace(Key(**k), scopes=tuple(k["scopes"]), owns=tuple(k["owns"])) for k in given]
        for key in rows:
            checked_scopes(key.scopes)
            checked_owns(key.owns)
        return rows
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{path} holds no keys that can be read: {error}; nobody is let in until it is repaired"
        ) from error


__all__ = ["LOCAL", "Caller", "Key", "Keys", "Scope"]
