"""An identity on disk: a folder with its tensors and its settings, of this schema or an older one."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from ..errors import CheckpointError, RegardError, StateError
from ..files import new_folder, read_plain, write_text

SCHEMA = 2
"""Of the settings and tensors on disk; `UPGRADES` leads here from every older one."""
TENSORS, CONFIG, JOURNAL, EPISODES = "identity.safetensors", "identity_config.json", "journal.json", "episodes.safetensors"
FILES = (TENSORS, CONFIG, JOURNAL, EPISODES)
"""Of an identity's folder; a store that exports one lays its journal beside it."""
LARGEST = 64 << 20
"""Bytes of an identity that are read at most: one that is larger did not come from here."""
MOST_EPISODES = 4 << 30
"""Bytes of a folder's episodes: of three million tokens."""
Settings = dict[str, Any]
"""Of an identity, as JSON."""
Parts = tuple[Settings, dict[str, Tensor]]
UPGRADES: dict[int, Callable[[Settings, dict[str, Tensor]], Parts]] = {1: lambda settings, t: ({**settings, "schema": 2}, t)}
"""From a schema to the next one: settings and tensors in, settings and tensors out. The first had no episodes."""


def path_of(folder: object) -> Path:
    if not isinstance(folder, str | PathLike):
        raise StateError(f"{folder!r:.60} is no folder: give its path, such as 'people/mara'")
    return Path(cast(str | PathLike[str], folder))


def write_folder(
    folder: Path,
    config: Settings,
    tensors: Mapping[str, Tensor],
    episodes: Mapping[str, Tensor],
    journal: str | None = None,
) -> None:
    """Whole or not at all, and for its owner alone; an identity that is there already is replaced, anything else is not."""
    from safetensors.torch import save_file

    _refuse_others(folder)
    with new_folder(folder, private=True) as draft:
        save_file(dict(tensors), draft / TENSORS, metadata={"format": "pt"})
        if episodes:
            save_file(dict(episodes), draft / EPISODES, metadata={"format": "pt"})
        write_text(draft / CONFIG, json.dumps(config, indent=1, ensure_ascii=False) + "\n")
        if journal is not None:
            write_text(draft / JOURNAL, journal)


def read_folder(folder: Path) -> tuple[Settings, dict[str, Tensor], dict[str, Tensor]]:
    """Settings, tensors and those of the episodes as they stand there; a file that is damaged is refused."""
    try:
        config = json.loads(read_bytes(folder / CONFIG))
        data = read_bytes(folder / TENSORS)
        lived = read_bytes(folder / EPISODES, MOST_EPISODES) if (folder / EPISODES).exists() else None
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is no identity: it has no {Path(str(error.filename)).name}") from error
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}") from error
    except RegardError:
        raise
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits is a ValueError of its own.
        raise CheckpointError(f"{folder / CONFIG} is not readable as JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / CONFIG} holds a {type(config).__name__}, not the settings of an identity")
    settings: Settings = config
    return settings, unpack(data), {} if lived is None else unpack(lived, MOST_EPISODES)


def upgraded(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Parts:
    """Settings and tensors of any schema that there was, in this one's."""
    settings, t = dict(config), dict(tensors)
    while (schema := settings.get("schema")) != SCHEMA:
        if type(schema) is int and schema > SCHEMA:
            raise CheckpointError(
                f"this identity has schema {schema}; this version of regard reads up to {SCHEMA}: update regard"
            )
        if type(schema) is not int or schema not in UPGRADES:
            raise CheckpointError(f"this identity has schema {schema!r:.40}; this version reads 1 to {SCHEMA}")
        settings, t = UPGRADES[schema](settings, t)
        if settings.get("schema") != schema + 1:
            raise CheckpointError(f"the upgrade from schema {schema} led to {settings.get('schema')!r:.40}")
    return settings, t


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """A plain file, or what a link to one leads to; never a pipe or a device, which end late or not at all."""
    try:
        return read_plain(path, most or LARGEST, follow=True)
    except CheckpointError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise error.__cause__ from None
        raise


def _refuse_others(folder: Path) -> None:
    """Raise where saving would remove what is no identity's."""
    if not folder.exists():
        return
    others = [folder.name] if not folder.is_dir() else sorted(p.name for p in folder.iterdir() if p.name not in FILES)
    if others:
        raise StateError(f"{folder} is no identity: {others[0]} would be lost; give a folder that is new, or an identity's")


def unpack(data: bytes, most: int | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file in memory; whatever is wrong with it is one kind of error."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    most = most or LARGEST
    if len(data) > most:
        raise CheckpointError(f"{len(data) / 1e6:,.0f} MB of tensors; an identity has at most {most / 1e6:.0f}")
    try:
        return load(data)
    except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError, OverflowError, struct.error) as error:
        raise CheckpointError(f"the tensors are not readable as safetensors: {error}") from error
