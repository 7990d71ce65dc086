"""Where an interrupted sleep stands, as a file beside the store: whole or not at all, and of use to nobody but the sleep that goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ...errors import CheckpointError, StateError
from ...files import private_folder, write_bytes
from ..store.replay import sleep_fields, sleep_rule
from .consolidate import Look, SleepCheckpoint
from .rule import SleepRule

if TYPE_CHECKING:
    from ..store import IdentityStore

NUMBERS = ("step", "best_step")


def checkpoint_file(store: IdentityStore, commit: str) -> Path:
    """Where a sleep over a commit is saved."""
    return store.sleep_checkpoints / f"{commit}.safetensors"


def interrupted_over(store: IdentityStore, name: str) -> str:
    """The commit over which a sleep was interrupted: the head, or the one before it where the sleep wrote already."""
    head = store.head(name)
    refs = [head.id, *([head.parent] if head.kind == "sleep" and head.parent else [])]
    for ref in refs:
        if checkpoint_file(store, ref).exists():
            return ref
    raise StateError(f"no night of {name} was interrupted, or something was written since; begin one without --resume")


def write_checkpoint(file: Path, rule: SleepRule, night: SleepCheckpoint) -> None:
    tensors: dict[str, Any] = {f"leaves.{n}": x for n, x in night.leaves.items()}
    tensors |= {f"best.{n}": x for n, x in night.best.items()}
    tensors |= {f"moments.{i}.{n}": x for n, pair in night.moments.items() for i, x in enumerate(pair)}
    about = {"rule": sleep_fields(rule), "looks": night.looks, **{n: getattr(night, n) for n in NUMBERS}}
    private_folder(file.parent)
    data = save({n: x.contiguous() for n, x in tensors.items()}, metadata={"night": json.dumps(about)})
    write_bytes(file, data, private=True)


def read_checkpoint(file: Path) -> tuple[SleepRule, SleepCheckpoint]:
    parts: dict[str, dict[str, Any]] = {"leaves": {}, "best": {}, "moments": {}}
    try:
        with safe_open(file, framework="pt") as f:
            about = json.loads((f.metadata() or {})["night"])
            # An open safetensors file has keys() and cannot be iterated.
            for key in f.keys():  # noqa: SIM118
                part, name = key.split(".", 1)
                parts[part][name] = f.get_tensor(key)
        first, second = ({n[2:]: x for n, x in parts["moments"].items() if n.startswith(i)} for i in ("0.", "1."))
        moments = {n: (x, second[n]) for n, x in first.items()}
        looks = [Look(*x) for x in about["looks"]]
        numbers = {n: about[n] for n in NUMBERS}
        night = SleepCheckpoint(leaves=parts["leaves"], best=parts["best"], moments=moments, looks=looks, **numbers)
        return sleep_rule(about["rule"]), night
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file.name} holds no night that can go on ({error}); begin one without --resume") from error


__all__ = ["checkpoint_file", "interrupted_over", "read_checkpoint", "write_checkpoint"]
