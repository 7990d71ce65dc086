"""`regard sleep`: the slow write. A few gradient steps over what an identity has been through, the model frozen."""

from __future__ import annotations

from typing import Annotated

import typer

from ..identity.sleep.rule import SleepRule
from ..identity.wording import size
from .arguments import ModelOption, StoreOption, load, note, open_model, open_store
from .console import progress, verb
from .generate import DEFAULT


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

    The identity learns to retell what was said, and to answer plain questions as the model does with the whole history in its context.
    Some questions are held back: the state that does best on them is kept, and if none does better than before, nothing is
    changed. Ctrl-C ends the night early and keeps the best so far; --resume goes on with it.

    \b
    regard sleep --identity mara
    regard sleep -i mara --steps 32
    regard sleep -i mara --resume
    """
    from ..identity.sleep.resume import checkpoint_file, interrupted_over
    from ..identity.sleep.stored import sleep_over

    with open_store(store) as opened:
        load(opened, identity)
        if resume:
            interrupted_over(opened, identity)
        elif checkpoint_file(opened, opened.head(identity).id).exists():
            note("an interrupted night is left behind, and a new one begins; --resume would go on with it")
        with progress() as tell:
            body, tokenizer, _ = open_model(model, tell)
            done = sleep_over(opened, identity, body, tokenizer, steps=steps, seed=seed, resume=resume, tell=tell)
        typer.echo(str(done))
        if done.commit is not None:
            typer.echo(f"{identity} {done.commit[:12]}  {size(opened.find(done.commit).bytes)}")
    if done.interrupted:
        note(f"interrupted; go on with: regard sleep --identity {identity} --resume")
        raise typer.Exit(130)
