"""`regard sleep`: the slow write. A few gradient steps over what an identity has been through, the model frozen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..identity.sleep.rule import SleepRule
from ..identity.wording import size
from .arguments import ModelOption, StoreOption, load, note, open_model, open_store
from .console import progress, verb
from .generate import DEFAULT

if TYPE_CHECKING:
    from ..identity import IdentityStore
    from ..identity.sleep.stored import Sleep
    from ..models.base import Model
    from ..models.tokenizer import Tokenizer


@verb
def sleep(
    identity: Annotated[str, typer.Option("--identity", "-i", help="who sleeps")],
    steps: Annotated[
        int | None, typer.Option(help=f"how many steps [default: {SleepRule.steps}]", min=1, show_default=False)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with a night that was interrupted")] = False,
    seed: Annotated[int, typer.Option(help="same seed, same night")] = 0,
    model: ModelOption = DEFAULT,
    store: StoreOption = None,
) -> None:
    """Consolidate an identity over all that its journal tells of.

    The model asks about what was said, answers with one statement before its eyes, and the identity learns to answer so without it.
    Some questions are held back: the state that answers them best is kept. A night that would lose answers, or change what is said
    to everyday questions, changes nothing and says why. Ctrl-C ends it early and keeps the best so far; --resume goes on with it.

    \b
    regard sleep --identity mara
    regard sleep -i mara --steps 32
    regard sleep -i mara --resume
    """
    from ..identity.sleep.resume import interrupted_over

    with open_store(store) as opened:
        load(opened, identity)
        if resume:
            # Before the model is loaded.
            interrupted_over(opened, identity)
        with progress() as tell:
            body, tokenizer, _ = open_model(model, tell)
        done = night(opened, identity, body, tokenizer, steps=steps, seed=seed, resume=resume)
    if done.interrupted:
        raise typer.Exit(130)


def night(
    opened: IdentityStore,
    name: str,
    model: Model,
    tokenizer: Tokenizer,
    *,
    steps: int | None = None,
    seed: int = 0,
    resume: bool = False,
    go_on: str = "regard sleep --identity {name} --resume",
) -> Sleep:
    """Sleep over what a name has been through, and say what came of it; `go_on` is how to go on where Ctrl-C ended it."""
    from ..identity.sleep.resume import checkpoint_file
    from ..identity.sleep.stored import sleep_over

    how = go_on.format(name=name)
    if not resume and checkpoint_file(opened, opened.head(name).id).exists():
        note(f"an interrupted night is left behind, and a new one begins; this would go on with it: {how}")
    with progress() as tell:
        done = sleep_over(opened, name, model, tokenizer, steps=steps, seed=seed, resume=resume, tell=tell)
    typer.echo(str(done))
    if done.commit is not None:
        typer.echo(f"{name} {done.commit[:12]}  {size(opened.find(done.commit).bytes)}")
    if done.interrupted:
        note(f"interrupted; go on with: {how}")
    return done
