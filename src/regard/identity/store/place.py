"""Where a store is: its database, the folder of its blobs, and the folder of its locks."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from ...files import home
from .database import URL, make_url
from .errors import StoreError


def place(url: str | Path | None, blobs: str | Path | None) -> tuple[URL, Path, Path]:
    if url is None:
        url = _home() / "identities.db"
    if isinstance(url, Path) or "://" not in url:
        url = f"sqlite:///{Path(url).expanduser().absolute()}"
    found = make_url(url)
    match found.get_backend_name():
        case "sqlite":
            if not found.database or found.database == ":memory:" or found.database.startswith("file:"):
                raise StoreError(f"{url!r} is no file; a store keeps its tensors beside one: sqlite:///path/to/identities.db")
            file = Path(found.database).expanduser().absolute()
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            beside = file.with_name(f"{file.stem}.blobs")
            return found.set(database=str(file)), Path(blobs) if blobs else beside, file.with_name(f"{file.stem}.locks")
        case "postgresql" | "postgres":
            if importlib.util.find_spec("psycopg") is None:
                raise ImportError("a store in PostgreSQL needs psycopg 3: pip install 'regard[postgres]'")
            found = found.set(drivername="postgresql+psycopg")
            # Two databases never share a folder by default: what one does not name, `gc` would take for rubbish.
            which = hashlib.sha256(f"{found.host}:{found.port}/{found.database}".encode()).hexdigest()[:16]
            folder = Path(blobs) if blobs else _home() / "blobs" / which
            return found, folder, folder.with_name(f"{folder.name}.locks")
        case other:
            raise StoreError(
                f"{other!r} is not a database that identities are kept in; give sqlite:///… or postgresql+psycopg://…"
            )


def _home() -> Path:
    return home() / "identities"


__all__ = ["place"]
