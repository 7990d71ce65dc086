"""Out of a store and into another: the folder of `Identity.save` with a journal beside it, or all of it in one file."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import CheckpointError
from ...files import new_folder, new_folders, read_plain, sweep, write_bytes
from ..folder import CONFIG, JOURNAL, LARGEST, TENSORS
from ..state import Base, Identity
from .codec import MOST_HEADER, build, decode, encode
from .errors import StoreError
from .records import WRITES, Event, canonical, checked_name, strict_json

if TYPE_CHECKING:
    from .records import Commit
    from .store import IdentityStore

SCHEMA = 1
MOST_EVENTS = 100_000
SINGLE = ".safetensors"


def export(store: IdentityStore, name: str, path: Path) -> Path:
    from safetensors.torch import save

    if path.exists() or path.is_symlink():
        raise StoreError(f"{path} is there already; an export begins a new folder or file")
    head, events, log, identity = store.settled(lambda: _read(store, name))
    journal = {
        "schema": SCHEMA,
        "name": name,
        "digest": head.digest,
        "events": [asdict(e) for e in events],
        "log": [{k: getattr(x, k) for k in ("id", "parent", "kind", "message", "time", "digest")} for x in log],
    }
    new_folders(path.parent.absolute())
    # An export that was killed left its draft here.
    sweep(path.parent)
    if path.suffix == SINGLE:
        if len(canonical(journal)) > MOST_HEADER // 2:
            raise StoreError(f"the journal of {name!r} is too long for one file; export a folder: {path.with_suffix('')}")
        write_bytes(path, encode(identity, journal=journal), private=True)
        return path
    with new_folder(path, private=True) as draft:
        (draft / TENSORS).write_bytes(save(identity.tensors(), metadata={"format": "pt"}))
        (draft / CONFIG).write_text(json.dumps(identity.config(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        (draft / JOURNAL).write_text(json.dumps(journal, indent=1) + "\n", encoding="utf-8")
    return path


def _read(store: IdentityStore, name: str) -> tuple[Commit, list[Event], list[Commit], Identity]:
    with store.db.read() as c:
        head = store.head_of(c, name)
        events = store.lineage(c, head)[1]
        log = store.db.chain(c, head)
    return head, events, log, replace(store.identity_of(head), parent=head.id)


def import_(store: IdentityStore, path: Path, name: str, base: Base | None) -> Commit:
    """Everything is read and checked before anything is written."""
    checked_name(name)
    if path.is_dir():
        config = strict_json(read_plain(path / CONFIG, MOST_HEADER), str(path / CONFIG))
        if not isinstance(config, dict):
            raise CheckpointError(f"{path / CONFIG} holds a {type(config).__name__}, not the settings of an identity")
        identity = build(config, read_plain(path / TENSORS, LARGEST), str(path / TENSORS))
        there = (path / JOURNAL).exists() or (path / JOURNAL).is_symlink()
        journal = strict_json(read_plain(path / JOURNAL, LARGEST), str(path / JOURNAL)) if there else None
    else:
        identity, more = decode(read_plain(path, LARGEST), str(path))
        journal = more.pop("journal", None)
        if more:
            raise CheckpointError(f"{path} has {sorted(more)[0]!r:.80} beside its settings, which is nothing of an identity's")
    if base is not None:
        identity.base.refuse(base)
    events = [] if journal is None else _events(journal, identity, path)
    arrival = Event("import", rule={"digest": identity.digest(), "events": len(events), "parent": identity.parent})
    return store.begin(name, replace(identity, parent=None), [*events, arrival], f"from {path.name}"[:200])


def _events(journal: object, identity: Identity, path: Path) -> list[Event]:
    """Only those that write: rollbacks and imports of another store are not replayed here."""
    match journal:
        case {"schema": 1, "digest": str(digest), "events": list(records)} if len(records) <= MOST_EVENTS:
            pass
        case {"schema": schema} if schema != SCHEMA:
            raise CheckpointError(
                f"the journal of {path} has schema {schema!r:.40}; this version of regard reads {SCHEMA}: update regard"
            )
        case _:
            raise CheckpointError(f"the journal of {path} is not a digest and a list of up to {MOST_EVENTS:,} events")
    if digest != identity.digest():
        raise CheckpointError(
            f"the journal of {path} tells of {digest[:12]!r}, and the identity beside it is {identity.digest()[:12]}"
        )
    return [e for e in map(Event.read, records) if e.kind in WRITES]


__all__ = ["export", "import_"]
