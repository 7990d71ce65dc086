"""Out of a store and into another: the folder of `Identity.save` with a journal beside it, or all of it in one file."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ...errors import CheckpointError
from ...files import new_folders, read_plain, sweep, write_bytes
from ..episodes import packed_together, taken_apart
from ..folder import CONFIG, EPISODES, JOURNAL, LARGEST, MOST_EPISODES, TENSORS, unpack, write_folder
from ..state import Base, Identity
from .codec import EPISODE_TYPES, MOST_HEADER, TYPES, build, decode_whole, encode_whole, read_header
from .errors import StoreError
from .records import WRITES, Event, canonical, checked_name, strict_json

if TYPE_CHECKING:
    from .records import Commit
    from .store import IdentityStore

SCHEMA = 1
MOST_EVENTS = 100_000
SINGLE = ".safetensors"


def export(store: IdentityStore, name: str, path: Path) -> Path:
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
        if len(canonical([journal, [e.facts() for e in identity.episodes]])) > MOST_HEADER // 2:
            raise StoreError(f"the journal of {name!r} is too long for one file; export a folder: {path.with_suffix('')}")
        write_bytes(path, encode_whole(identity, journal=journal), private=True)
        return path
    facts, episodes = packed_together(identity.episodes)
    config = {**identity.config(), "episodes": facts}
    write_folder(path, config, identity.tensors(), episodes, json.dumps(journal, indent=1) + "\n")
    return path


def _read(store: IdentityStore, name: str) -> tuple[Commit, list[Event], list[Commit], Identity]:
    with store.db.read() as c:
        head = store.head_of(c, name)
        events = store.lineage(c, head)[1]
        log = store.db.chain(c, head)
    return head, events, log, store.identity_of(head)


def import_(store: IdentityStore, path: Path, name: str, base: Base | None) -> Commit:
    """Everything is read and checked before anything is written."""
    checked_name(name)
    if path.is_dir():
        config = strict_json(read_plain(path / CONFIG, LARGEST), str(path / CONFIG))
        if not isinstance(config, dict):
            raise CheckpointError(f"{path / CONFIG} holds a {type(config).__name__}, not the settings of an identity")
        data = read_plain(path / TENSORS, LARGEST)
        read_header(data, str(path / TENSORS), TYPES)
        episodes = taken_apart(config.pop("episodes", []), _lived(path / EPISODES))
        identity = build(config, unpack(data), str(path / TENSORS), episodes)
        journal = strict_json(read_plain(path / JOURNAL, LARGEST), str(path / JOURNAL)) if _there(path / JOURNAL) else None
    else:
        identity, more = decode_whole(read_plain(path, LARGEST + MOST_EPISODES), str(path))
        journal = more.pop("journal", None)
        if more:
            raise CheckpointError(f"{path} has {sorted(more)[0]!r:.80} beside its settings, which is nothing of an identity's")
    if base is not None:
        identity.base.refuse(base)
    _expect_width(identity, path)
    events = [] if journal is None else _events(journal, identity, path)
    arrival = Event("import", rule={"digest": identity.digest(), "events": len(events), "parent": identity.parent})
    return store.begin(name, replace(identity, parent=None), [*events, arrival], f"from {path.name}"[:200])


def _expect_width(identity: Identity, path: Path) -> None:
    """Refuse episodes that no prompt to this base could be compared with."""
    from ..read.finding import finding_layers

    b = identity.base
    width = len(finding_layers(b.depth, b.key_heads * b.head_width)) * b.key_heads * b.head_width
    for e in identity.episodes[:1]:
        if e.keys.shape[1] != width:
            raise CheckpointError(
                f"the episodes of {path} are found by {e.keys.shape[1]} numbers a token, and those of {b.name or b.family} by "
                f"{width}: another model made them"
            )


def _there(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _lived(path: Path) -> dict[str, Tensor]:
    """The tensors of a folder's episodes, where it has any."""
    if not _there(path):
        return {}
    data = read_plain(path, MOST_EPISODES)
    read_header(data, str(path), EPISODE_TYPES)
    return unpack(data, MOST_EPISODES)


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
