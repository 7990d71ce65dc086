"""Where a store is: its database, the folder of its blobs, and the folder of its locks; and nothing of a password in any word."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ...errors import needs_extra
from ...files import home, new_folders
from .blobs import Blobs
from .errors import StoreError
from .folder_blobs import FolderBlobs
from .object_blobs import ObjectBlobs, is_url
from .schema import URL, make_url

SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
"""Two letters or more and a colon: the beginning of a URL; one letter is a disk of Windows."""
CREDENTIALS = re.compile(r":[^/\\]*@|(?i:password\s*=)")
"""`name:password@host` and `password=…`: in a path too, where a `Path` has taken a slash from a URL, or a scheme is missing."""
SECRETS = ("password", "sslpassword", "passfile")


@dataclass(frozen=True)
class StoreLocation:
    url: URL
    blobs: Blobs
    locks: Path
    sleep_checkpoints: Path
    """Of interrupted sleeps, on this machine: beside the blobs where those are in a folder."""
    file: Path | None
    """SQLite's."""
    own: bool
    """Whether the folder of blobs is named after this store, and so used by no other."""

    def writable(self) -> bool:
        """Whether this process may write here, as far as permissions say."""
        mine = () if self.file is None else (self.file.parent, self.file)
        return self.blobs.writable() and all(os.access(p, os.W_OK) for p in mine if p.exists())

    def make(self) -> None:
        """Folders and an empty database that are their owner's alone; what was there already stays as it is."""
        if self.file is not None:
            new_folders(self.file.parent)
            # Before SQLite opens it: its log and its journal take on the mode of the file.
            os.close(os.open(self.file, os.O_CREAT | os.O_RDWR, 0o600))
        self.blobs.make(own=self.own)


def locate(url: str | Path | None, blobs: str | Path | None) -> StoreLocation:
    if url is None:
        url = home() / "identities" / "identities.db"
    address = URL.create("sqlite", database=str(Path(url).expanduser().absolute())) if _is_path(url) else parsed(str(url))
    match address.get_backend_name():
        case "sqlite":
            if not address.database or address.database == ":memory:" or address.database.startswith("file:"):
                raise StoreError(
                    "an SQLite store without a file; it keeps its tensors beside one: sqlite:///path/to/identities.db"
                )
            file = Path(address.database).expanduser().absolute()
            folder = file.with_name(f"{file.stem}.blobs")
            locks = file.with_name(f"{file.stem}.locks")
            address = URL.create("sqlite", database=str(file))
        case "postgresql" | "postgres":
            with needs_extra("postgres"):
                import psycopg as psycopg
            file = None
            address = address.set(drivername="postgresql+psycopg")
            # Two databases never share a folder by default: `gc` removes the blobs that its own database does not name.
            which = hashlib.sha256(f"{address.host}:{address.port}/{address.database}".encode()).hexdigest()[:16]
            folder = home() / "identities" / "blobs" / which
            locks = None
        case other:
            raise StoreError(
                f"{other!r} is not a database that identities are kept in; give sqlite:///… or postgresql+psycopg://…"
            )
    if blobs and not is_url(blobs):
        folder = Path(blobs)
    where = ObjectBlobs(str(blobs)) if blobs and is_url(blobs) else FolderBlobs(folder)
    nights = folder.with_name(f"{folder.stem}.nights")
    return StoreLocation(address, where, locks or folder.with_name(f"{folder.name}.locks"), nights, file, not blobs)


def _is_path(url: str | Path) -> bool:
    text = str(url)
    if not (CREDENTIALS.search(text) or (isinstance(url, str) and ("://" in text or SCHEME.match(text)))):
        return True
    if isinstance(url, str) and "://" in text:
        return False
    # Not echoed: what follows may be a password, and no folder may be named after it.
    scheme = SCHEME.match(text)
    raise StoreError(
        f"a store at {scheme[0] if scheme else ''}… is neither a file nor a URL; a URL is a text with two slashes after its scheme, "
        "postgresql://user@host/database; a file whose name has a colon begins with ./, or is given as sqlite:///path"
    )


def parsed(url: str) -> URL:
    """The parts of a URL; what is wrong with it is said without repeating it."""
    parts: URL | None = None
    try:
        parts = make_url(url)
        if parts.get_backend_name() != "sqlite" and url.partition("://")[2].partition("?")[0].count("@") > 1:
            # Which of them ends the password, nobody can tell: the rest of it would pass for the host.
            raise ValueError
        query = dict(parts.query)
        # Beside the user's name it is hidden by everything that prints a URL; in the query it is not.
        password = query.pop("password", None)
        if password is not None:
            parts = parts.set(password=password if isinstance(password, str) else password[-1], query=query)
    except Exception:
        # Raised below, where this error is not its context: it may quote the password.
        parts = None
    if parts is None:
        scheme = url.partition("://")[0]
        raise StoreError(
            f"the {scheme if scheme.isidentifier() else 'given'!r:.40} URL of a store cannot be read (not repeated here: it may "
            "hold a password); it is postgresql://user@host:5432/database, with odd characters as %XX, or sqlite:///path"
        )
    return parts


def shown(url: URL) -> str:
    """A URL as it may stand in a message: without its password, and without its query, where others may hide."""
    return url.set(query={}, password=None).render_as_string(hide_password=True)


def secrets(url: URL) -> list[str]:
    """Whatever must not appear in any message."""
    values = [url.password, *(v for k, v in url.query.items() if k in SECRETS)]
    return [str(v) for v in values if v]


__all__ = ["StoreLocation", "locate", "parsed", "secrets", "shown"]
