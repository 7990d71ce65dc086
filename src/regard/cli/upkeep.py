"""`regard identity check`, `backup`, `restore` and `gc`: whether a store is whole, and what to do if it is not."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..identity.wording import clean, several
from .arguments import BlobsOption, JsonOption, StoreOption, note, open_store
from .console import fail, table, verb

Folder = Annotated[Path, typer.Argument(help="a folder", show_default=False)]


@verb
def check(store: StoreOption = None, blobs: BlobsOption = None, as_json: JsonOption = False) -> None:
    """Look whether a store is whole; nothing is changed.

    The pages and references of the database, every commit against its hash and its parent, the heads against a second record of the
    names, events against their commits, each blob against its hash, files that nobody names, and who may read them. Ends with 1
    where something is lost or damaged; what is merely untidy is told, and ends with 0.

    \b
    regard identity check
    regard identity check --store ./people.db --json
    """
    from ..identity.store.restore import check_place

    checked = check_place(store, blobs=blobs)
    if as_json:
        counts = {k: getattr(checked, k) for k in ("names", "commits", "events", "episodes", "blobs", "sound")}
        typer.echo(json.dumps({**counts, "problems": [asdict(p) for p in checked.problems]}, ensure_ascii=False))
    else:
        kinds = ("name", "commit", "event", "episode")
        counts = [several(getattr(checked, f"{kind}s"), kind) for kind in kinds]
        typer.echo(f"{', '.join(counts)}, {several(checked.blobs, 'blob')}: {'sound' if checked.sound else 'damaged'}")
        if checked.problems:
            table(("", "where", "what", "what to do"), [(p.grave, p.where, clean(p.what), p.todo) for p in checked.problems])
    if not checked.sound:
        raise typer.Exit(1)


@verb
def backup(path: Folder, store: StoreOption = None, blobs: BlobsOption = None) -> None:
    """Write all identities, as they are at one moment, to a new folder; others may go on writing.

    A backup is a store by itself, in SQLite, whatever database it comes from. It is checked before it gets its name. It holds all texts:
    what is forgotten later is still in it.

    \b
    regard identity backup ./monday
    regard identity check --store ./monday/identities.db
    """
    with open_store(store, blobs) as opened:
        where = opened.backup(path)
        names = opened.names()
    typer.echo(f"wrote {where}: {several(len(names), 'identity') if len(names) == 1 else f'{len(names):,} identities'}")


@verb
def restore(
    path: Folder,
    replace: Annotated[bool, typer.Option("--replace", help="remove what is in the store now")] = False,
    store: StoreOption = None,
    blobs: BlobsOption = None,
) -> None:
    """Put a backup back, all of it or nothing.

    It is checked before anything is changed, and the store afterwards. A store that holds identities is left alone unless --replace is
    given; one that is too damaged to be opened is then moved aside, not removed.

    \b
    regard identity restore ./monday
    regard identity restore ./monday --replace
    """
    from ..identity.store.restore import restore as put_back

    if not path.is_dir():
        fail(f"there is no folder {path}; give one that `regard identity backup` wrote")
    restored = put_back(path, store, blobs=blobs, replace=replace)
    typer.echo(
        f"restored {several(restored.names, 'name')}, {several(restored.commits, 'commit')} and {several(restored.blobs, 'blob')}"
    )
    note("regard identity list shows them")


@verb
def gc(store: StoreOption = None, blobs: BlobsOption = None) -> None:
    """Remove files that no commit names, and what killed processes left half written; safe beside writers.

    \b
    regard identity gc
    """
    with open_store(store, blobs) as opened:
        freed = opened.gc()
    typer.echo(str(freed))


__all__ = ["backup", "check", "gc", "restore"]
