"""Blobs as objects of a bucket, so that several machines share one store: s3://bucket/prefix, gs://…, az://…, and memory://name.

    IdentityStore("postgresql://regard@db/people", blobs="s3://bucket/people")

Credentials and endpoints come from the environment, as for every other tool of that bucket (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, …), and
never from the URL. An object is created in one request, which the bucket answers when it can no longer be lost; a writer that is killed
before leaves nothing, so there are no drafts. A bucket that keeps versions keeps what was removed: those that this process removed are
read again by a proof of forgetting, and of the others it says that it cannot.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
from collections import deque
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ...errors import CheckpointError, needs_extra
from ..folder import LARGEST
from .blobs import NAMED, READ, Blobs, Searchable, name_of, place_of
from .errors import MissingBlobError, StoreError, UnreachableError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES = ("s3", "gs", "az", "memory")
EXAMPLE = "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or memory://name"
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
RETRIES: Any = {"max_retries": 4, "retry_timeout": datetime.timedelta(seconds=30)}
PATIENCE: Any = {"timeout": "60s", "connect_timeout": "5s"}
MOST_VERSIONS = 10_000
"""Removed versions whose names are remembered, for a proof that reads them."""
_in_memory: dict[str, Any] = {}
"""What memory:// names: it lives as long as the process, so that a store that is opened again finds its blobs."""


def is_url(blobs: str | Path) -> bool:
    return isinstance(blobs, str) and URL.match(blobs) is not None


class ObjectBlobs(Blobs):
    unreachable = ("versions of removed objects that the bucket keeps, its replicas, logs and backups",)

    def __init__(self, url: str) -> None:
        """Nothing is asked of the bucket yet."""
        self.where = _checked(url)
        with needs_extra("objects"):
            import obstore
        self._api = obstore
        self._store = _opened(self.where)
        self._removed: deque[tuple[str, str]] = deque(maxlen=MOST_VERSIONS)

    def label(self, blob: str) -> str:
        return f"{self.where}/{place_of(blob)}"

    def put(self, data: bytes, name: str | None = None) -> str:
        blob = name_of(data, name)
        with self._writing(len(data)):
            try:
                # In one request, and only where nothing is: a part of it, or two writers' halves, can never be seen.
                self._api.put(self._store, place_of(blob), data, mode="create", use_multipart=False)
            except self._api.exceptions.AlreadyExistsError:
                if not self._holds(blob, data):
                    self._api.put(self._store, place_of(blob), data, mode="overwrite", use_multipart=False)
        return blob

    def _holds(self, blob: str, data: bytes) -> bool:
        try:
            return self.read(blob) == data
        except CheckpointError:
            return False

    def has(self, blob: str) -> bool:
        with self._asking():
            try:
                self._api.head(self._store, place_of(blob))
            except FileNotFoundError:
                return False
            return True

    def read(self, blob: str) -> bytes:
        with self._asking():
            try:
                found = self._api.get(self._store, place_of(blob))
            except FileNotFoundError as error:
                raise MissingBlobError(blob, f"{self.label(blob)} is not there; restore it or roll back") from error
            if found.meta["size"] > LARGEST:
                raise CheckpointError(f"{self.label(blob)} has {found.meta['size']:,} bytes; at most {LARGEST:,} are read")
            return bytes(found.bytes())

    def drop(self, blob: str) -> int:
        with self._asking():
            try:
                meta = self._api.head(self._store, place_of(blob))
                self._api.delete(self._store, place_of(blob))
            except FileNotFoundError:
                return 0
            if meta["version"] is not None:
                self._removed.append((blob, meta["version"]))
            return meta["size"]

    def every(self) -> Iterator[str]:
        return (found[1] for meta in self._list() if (found := NAMED.fullmatch(meta["path"])))

    def old(self, grace: float) -> Iterator[str]:
        before = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=grace)
        for meta in self._list():
            if (found := NAMED.fullmatch(meta["path"])) and meta["last_modified"] <= before:
                yield found[1]

    def strays(self, named: set[str]) -> list[str]:
        return [Path(meta["path"]).name for meta in self._list() if Path(meta["path"]).stem not in named]

    def drafts(self) -> tuple[int, int]:
        return 0, 0

    def sweep(self, older_than: float) -> int:
        return 0

    def searchable(self, named: set[str]) -> Iterator[Searchable]:
        for meta in self._list():
            if meta["size"] and Path(meta["path"]).stem not in named:
                yield Searchable(Path(meta["path"]).name, self._parts(meta["path"], None))
        for blob, version in list(self._removed):
            yield Searchable(f"{Path(place_of(blob)).name}, version {version}", self._parts(place_of(blob), version))

    def _parts(self, place: str, version: str | None) -> Any:
        def parts() -> Iterator[bytes]:
            with self._asking(), contextlib.suppress(FileNotFoundError):
                found = self._api.get(self._store, place, options={"version": version} if version else {})
                yield from map(bytes, found.stream(min_chunk_size=READ))

        return parts

    def open_to_others(self) -> Iterator[Path]:
        # Who may read a bucket is said by its policy, which is not asked here.
        return iter(())

    def writable(self) -> bool:
        return True

    def make(self, *, own: bool) -> None:
        """A bucket that is not there, or not ours, is an error now and not at the first write."""
        next(self._list(), None)

    def set_aside(self, stamp: str) -> None:
        """Each object goes to a prefix beside this one; what a kill interrupts is in one of the two."""
        for meta in list(self._list()):
            with self._asking():
                data = self._api.get(self._store, meta["path"]).bytes()
                beside = _opened(f"{self.where}.{stamp}")
                self._api.put(beside, meta["path"], data, use_multipart=False)
                self._api.delete(self._store, meta["path"])

    def _list(self) -> Iterator[Any]:
        with self._asking():
            for batch in self._api.list(self._store):
                yield from batch

    @contextlib.contextmanager
    def _asking(self) -> Generator[None]:
        try:
            yield
        except (self._api.exceptions.BaseError, OSError) as error:
            raise UnreachableError(
                f"{self.where} did not answer as it should: {_first_line(error)}; nothing was changed"
            ) from error

    @contextlib.contextmanager
    def _writing(self, size: int) -> Generator[None]:
        try:
            yield
        except (self._api.exceptions.BaseError, OSError) as error:
            raise UnreachableError(
                f"{size:,} bytes could not be written to {self.where}: {_first_line(error)}; nothing was committed, and every head is "
                "where it was"
            ) from error


def _checked(url: str) -> str:
    """A URL that names a place and carries no secret; what is wrong with it is said without repeating it."""
    try:
        parts = urlsplit(url)
        secret = "@" in parts.netloc or bool(parts.query) or bool(parts.fragment)
        scheme, bucket, prefix = parts.scheme.lower(), parts.netloc, parts.path.strip("/")
    except ValueError:
        scheme, bucket, prefix, secret = "", "", "", "@" in url or "?" in url
    if secret:
        raise StoreError(
            f"the {scheme} URL of the blobs has more than a bucket and a prefix (not repeated here: it may hold a secret); give "
            f"{EXAMPLE}, and credentials in the environment"
        )
    if scheme not in SCHEMES or not bucket or any(p in ("", ".", "..") for p in prefix.split("/") if prefix):
        raise StoreError(f"blobs={url!r:.120} is no place for blobs; give a folder, or {EXAMPLE}")
    if not prefix and scheme != "memory":
        raise StoreError(
            f"{url} is a whole bucket; give a prefix in it, {url.rstrip('/')}/people: what no commit names below it is removed by gc"
        )
    return f"{scheme}://{bucket}" + (f"/{prefix}" if prefix else "")


def _opened(where: str) -> ObjectStore:
    from obstore.store import MemoryStore, from_url

    if where.startswith("memory:"):
        return _in_memory.setdefault(where, MemoryStore())
    try:
        # Options that are given take the place of those in the environment: this one is read there as any client would.
        options: Any = {**PATIENCE, "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")}
        return from_url(where, client_options=options, retry_config=RETRIES)
    except Exception as error:
        raise StoreError(f"{where} cannot be used: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    said = str(error).strip()
    return said.splitlines()[0][:300] if said else type(error).__name__


__all__ = ["ObjectBlobs", "is_url"]
