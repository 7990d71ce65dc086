"""`regard sleep`: the slow write. A few gradient steps over what an identity has been through, the model frozen."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import fail, progress, verb
from .generate import DEFAULT
from .who import ModelOption, StoreOption, load, note, open_model, open_store, several, size

if TYPE_CHECKING:
    from ..identity import IdentityStore, SleepRule
    from ..identity.sleep.consolidate import SleepCheckpoint


@verb
def sleep(
    identity: Annotated[str, typer.Option("--identity", "-i", help="who sleeps")],
    steps: Annotated[int | None, typer.Option(help="how many steps [default: 16]", min=1, show_default=False)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with a night that was interrupted")] = False,
    seed: Annotated[int, typer.Option(help="same seed, same night")] = 0,
    model: ModelOption = DEFAULT,
    store: StoreOption = None,
) -> None:
    """Consolidate an identity over all that its journal tells of.

    The identity learns to retell what was said, and to answer plain questions as the model does with the whole history before its eyes.
    Some questions are held back: the state that does best on them is kept, and if none does better than before, nothing is
    changed. Ctrl-C ends the night early and keeps the best so far; --resume goes on with it.

    \b
    regard sleep --identity mara
    regard sleep -i mara --steps 32
    regard sleep -i mara --resume
    """
    from ..identity.sleep.consolidate import SleepRule, consolidate
    from ..identity.speaking import living
    from ..identity.store.replay import history, sleep_event

    with open_store(store) as kept:
        load(kept, identity)
        start = kept.head(identity).id
        night: SleepCheckpoint | None = None
        rule = SleepRule(seed=seed) if steps is None else SleepRule(steps=steps, seed=seed)
        kept.sweep_drafts()
        if resume:
            start = _broken_off(kept, identity)
            rule, night = read(_file(kept, start))
            rule = rule if steps is None else replace(rule, steps=max(steps, night.step))
            note(f"going on after step {night.step} of {rule.steps}")
        elif _file(kept, start).exists():
            note("an interrupted night is left behind, and a new one begins; --resume would go on with it")
        with progress() as tell:
            body, tokenizer, base = open_model(model, tell)
            before = kept.load(start, base)
            past = history(kept.journal(start), tokenizer)
            if not past:
                fail(
                    f"{identity} has lived through nothing yet; imprint something first: regard imprint FILE --identity {identity}"
                )

            def keep(now: SleepCheckpoint) -> None:
                file = _file(kept, start)
                write(file, rule, now)
                # After it is written: whoever forgets removes the commit first and then looks for its night, so that one of the
                # two sees the other.
                if not kept.holds(start):
                    file.unlink(missing_ok=True)
                    fail(f"{identity} was made to forget something, or deleted, while it slept; the night was not kept")

            with living(body, None):
                after, slept = consolidate(body, before, past, tokenizer, rule, tell=tell, night=night, on_step=keep)
        held = f"{slept.before:.3f} → {slept.best:.3f} nats a token on what was held back"
        head = kept.head(identity)
        if slept.helped and after.digest() == head.digest:
            typer.echo(f"{identity} {head.id[:12]}  the rest of the night found nothing better ({held})")
        elif slept.helped:
            if resume and head.id != start and night is not None:
                # What the first part of the night wrote is part of the whole night: it must not count twice.
                kept.rollback(identity, start, message="the night goes on")
                head = kept.head(identity)
            event = sleep_event(rule, slept)
            commit = kept.commit(identity, after, event=event, expected=head.id, message=held)
            typer.echo(f"slept over {several(len(past), 'conversation')}: {held}, best after step {slept.best_step}")
            typer.echo(f"{identity} {commit.id[:12]}  {size(after.nbytes)}")
        else:
            typer.echo(f"slept over {several(len(past), 'conversation')}, and it did not help ({held}): nothing was changed")
        if not slept.interrupted:
            _file(kept, start).unlink(missing_ok=True)
            return
    note(f"interrupted; go on with: regard sleep --identity {identity} --resume")
    raise typer.Exit(130)


def _broken_off(store: IdentityStore, name: str) -> str:
    """The commit over which a night was broken off: the head, or the one before it where the night wrote already."""
    head = store.head(name)
    refs = [head.id, *([head.parent] if head.kind == "sleep" and head.parent else [])]
    found = [ref for ref in refs if _file(store, ref).exists()]
    if not found:
        fail(f"no night of {name} was interrupted, or something was written since; begin one without --resume")
    return found[0]


def _file(store: IdentityStore, commit: str) -> Path:
    """Beside the blobs; what lies there is of no use to anyone but the night that goes on."""
    return store.nights / f"{commit}.safetensors"


def write(file: Path, rule: SleepRule, night: SleepCheckpoint) -> None:
    """Where a night stands, whole or not at all."""
    from safetensors.torch import save

    from ..files import private_folder, write_bytes

    tensors: dict[str, Any] = {f"leaves.{n}": x for n, x in night.leaves.items()}
    tensors |= {f"best.{n}": x for n, x in night.best.items()}
    tensors |= {f"moments.{i}.{n}": x for n, pair in night.moments.items() for i, x in enumerate(pair)}
    numbers = {n: getattr(night, n) for n in ("step", "best_loss", "best_step", "before", "looks")}
    private_folder(file.parent)
    data = save(
        {n: x.contiguous() for n, x in tensors.items()}, metadata={"night": json.dumps({"rule": asdict(rule), **numbers})}
    )
    write_bytes(file, data, private=True)


def read(file: Path) -> tuple[SleepRule, SleepCheckpoint]:
    from safetensors import SafetensorError, safe_open

    from ..errors import CheckpointError
    from ..identity.sleep.consolidate import SleepCheckpoint
    from ..identity.store.replay import sleep_rule

    found: dict[str, dict[str, Any]] = {"leaves": {}, "best": {}, "moments": {}}
    with contextlib.ExitStack() as open_files:
        try:
            f = open_files.enter_context(safe_open(file, framework="pt"))
            values = json.loads((f.metadata() or {})["night"])
            for key in f.keys():  # noqa: SIM118
                part, name = key.split(".", 1)
                found[part][name] = f.get_tensor(key)
            moments = {n[2:]: (x, found["moments"][f"1.{n[2:]}"]) for n, x in found["moments"].items() if n.startswith("0.")}
            looks = [(int(a), float(b)) for a, b in values["looks"]]
            numbers = {n: values[n] for n in ("step", "best_loss", "best_step", "before")}
            night = SleepCheckpoint(leaves=found["leaves"], best=found["best"], moments=moments, looks=looks, **numbers)
            return sleep_rule(values["rule"]), night
        except (SafetensorError, KeyError, ValueError, TypeError) as error:
            raise CheckpointError(f"{file.name} holds no night that can go on ({error}); begin one without --resume") from error
