"""`regard chat`: a conversation that is remembered, and that can be asked why."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from ..identity.penalty import REPETITION_PENALTY
from ..identity.wording import clean
from .arguments import EpisodesOption, ModelOption, StoreOption, load, note, open_model, open_store, parse_affect, parse_rule
from .console import fail, progress, read_messages, verb
from .generate import DEFAULT, SpeculateOption, parse_weights

if TYPE_CHECKING:
    from ..identity.store.replay import Affect
    from .talk import Settings


@verb
def chat(
    identity: Annotated[
        str | None, typer.Option("--identity", "-i", help="who answers [default: the model itself]", show_default=False)
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help="two names, A,B: both answer every message, and nothing is written")
    ] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="imprint nothing")] = False,
    source: Annotated[
        str | None, typer.Option(help="a name for this chat, to forget it by [default: chat and the date]", show_default=False)
    ] = None,
    affect: Annotated[str, typer.Option(help="how deeply, from -1 to 1, or estimated")] = "1",
    keep: Annotated[str | None, typer.Option(help="what is worth keeping: words, shock, attention, …")] = None,
    budget: Annotated[int | None, typer.Option(help="slots that the identity has at most", min=0)] = None,
    episodes: EpisodesOption = None,
    system: Annotated[str | None, typer.Option(help="who the model is told to be")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="how long an answer gets at most")] = 256,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 takes the most likely token")] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="above 1: words that were said become less likely")
    ] = REPETITION_PENALTY,
    contrast: Annotated[
        float | None,
        typer.Option(
            help="how far words lean away from the model's own where something came to mind [default: 0.5]",
            show_default=False,
            min=0,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="same seed, same answers")] = 0,
    sleep: Annotated[
        bool | None,
        typer.Option(
            "--sleep-on-leaving/--no-sleep-on-leaving",
            help="[default: ask on a terminal, and elsewhere no]",
            show_default=False,
        ),
    ] = None,
    weights: Annotated[
        str, typer.Option(help="float32; int8 or q4 (blocks of a GGUF file): faster, a little less exact")
    ] = "float32",
    speculate: SpeculateOption = None,
    model: ModelOption = DEFAULT,
    store: StoreOption = None,
) -> None:
    """Talk, and be remembered.

    Every finished turn is imprinted into the identity and committed; of an answer that --max-tokens cut off, only what you said.
    While a conversation goes on, the identity that is read is the one that it started with: what was said since stands in the
    context already, and would count twice. After /new, and in the next chat, it is remembered. Turns that no longer fit into the
    model's context leave it, the oldest first, and are remembered from then on.

    What is pasted is one message, however many lines it has; so is all that stands between \"\"\" and \"\"\". Without a terminal,
    each line of stdin is a message and only the answers go to stdout.

    \b
    regard chat
    regard identity new mara && regard chat --identity mara
    regard chat -i mara --read-only --temperature 0.7 --seed 1
    regard chat --compare mara,tom
    echo "What is my name?" | regard chat -i mara --read-only

    \b
    In the chat: /facts, /strike, /sleep, /why, /compare, /new, /rollback, /fork, /affect, /who, /help, /quit
    """
    exact = parse_weights(weights)
    names = _names(identity, compare)
    from ..identity.store.records import checked_source, unique_source
    from ..models.decode.sampling import Sampling
    from .talk import Settings

    # Two people who talk on one day are two sources: each can be forgotten without the other.
    label = checked_source(source) if source else unique_source(time.strftime("chat-%Y-%m-%d"))
    sampling = Sampling(max_tokens, temperature, repetition_penalty=repetition_penalty, seed=seed, contrast=contrast)
    settings = Settings(sampling, exact, parse_rule(keep, budget, episodes), label, system, read_only, sleep, speculate)
    _chat(names, settings, parse_affect(affect), model, store)


def _names(identity: str | None, compare: str | None) -> list[str]:
    """Who answers: nobody but the model, one, or two who are compared."""
    if compare is None:
        return [] if identity is None else [identity]
    if identity is not None:
        fail("--compare A,B names both who answer: leave --identity out")
    names = [n.strip() for n in compare.split(",")]
    if len(names) != 2 or not all(names):
        fail(f"--compare {clean(compare)}: give two names with a comma between them, as in --compare mara,tom")
    return names


def _chat(names: list[str], settings: Settings, affect: Affect, model: str, store: str | None) -> None:
    from ..identity.conversation import Conversation
    from .talk import Talk, compare

    with open_store(store) as opened:
        for name in names:
            load(opened, name)
        with progress() as tell:
            loaded, tokenizer, base = open_model(model, tell)
        if tokenizer.template is None:
            fail(f"{base.name} came without a chat template: it continues texts, and does not talk; see regard generate")
        talks = [
            Talk(opened, settings, Conversation(loaded, tokenizer, who, system=settings.system), base, affect, name)
            for name, who in [(n, load(opened, n, base)) for n in names] or [(None, None)]
        ]
        if len(names) == 2:
            _say_hello(f"{names[0]} and {names[1]} answer, and nothing is written")
            compare(talks[0], talks[1], read_messages())
            return
        _say_hello(f"{talks[0].name or base.name} is here; /help names the commands")
        for line in read_messages():
            if not talks[0].hear(line):
                break
        talks[0].leave()


def _say_hello(text: str) -> None:
    if sys.stdin.isatty():
        note(text)
