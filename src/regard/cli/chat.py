"""`regard chat`: a conversation that is remembered, and that can be asked why."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from .console import fail, progress, read_messages, verb
from .generate import DEFAULT
from .identity import steps, summary
from .who import (  # fmt: skip
    ModelOption,
    StoreOption,
    clean,
    load,
    note,
    open_model,
    open_store,
    parse_affect,
    several,
    size,
    spark,
    word,
    words,
)

if TYPE_CHECKING:
    from ..identity import Base, Identity, IdentityStore, Rule
    from ..models.decode.generate import Generated, Sampling
    from ..models.decode.stream import Token
    from ..models.tokenizer import Tokenizer

COMMANDS = """/why [N|most]    what of the identity moved the answer's first token, its Nth, or the one it moved most
/compare         the model's own answer to the last message, without the identity
/new             a fresh conversation, in which what was imprinted so far is remembered
/rollback [N]    undo the last N imprints (or go back to a commit), and begin a fresh conversation
/fork NAME       go on as a second identity; the first stays as it is
/affect X        how deeply what follows is imprinted, from -1 to 1, or estimated
/who             who is speaking
/help            this
/quit            the end, as Ctrl-D; Ctrl-C only stops an answer"""
MOST = 24
"""Imprints that `/why` leaves out in turn: each costs a forward over the whole conversation."""
SHOWN = 8


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
    keep: Annotated[str | None, typer.Option(help="what is worth keeping: learned, shock, attention, …")] = None,
    budget: Annotated[int | None, typer.Option(help="slots that the identity has at most", min=0)] = None,
    system: Annotated[str | None, typer.Option(help="who the model is told to be")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="how long an answer gets at most")] = 256,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 takes the most likely token")] = 0.0,
    seed: Annotated[int, typer.Option(help="same seed, same answers")] = 0,
    weights: Annotated[str, typer.Option(help="float32, or int8: faster, a little less exact")] = "float32",
    model: ModelOption = DEFAULT,
    store: StoreOption = None,
) -> None:
    """Talk, and be remembered.

    Every finished turn is imprinted into the identity and committed. While a conversation goes on, the identity that is read is
    the one that it started with: what was said since stands in the context already, and would count twice. After /new, and in
    the next chat, it is remembered.

    What is pasted is one message, however many lines it has; so is all that stands between \"\"\" and \"\"\". Without a terminal,
    each line of stdin is a message and only the answers go to stdout.

    \b
    regard chat
    regard identity new mara && regard chat --identity mara
    regard chat -i mara --read-only --temperature 0.7 --seed 1
    regard chat --compare mara,tom
    echo "What is my name?" | regard chat -i mara --read-only

    \b
    In the chat: /why, /compare, /new, /rollback, /fork, /affect, /who, /help, /quit
    """
    if identity is not None and compare is not None:
        fail("--compare A,B names both who answer: leave --identity out")
    if weights not in ("float32", "int8"):
        fail(f"--weights {weights}: choose float32 or int8")
    from ..identity import Rule
    from ..identity.store.records import checked_source, unique_source
    from ..models.decode.generate import Sampling

    sampling = Sampling(max_tokens, temperature, seed=seed)
    gain = parse_affect(affect)
    changes: dict[str, Any] = {k: v for k, v in (("keep", keep), ("budget", budget)) if v is not None}
    rule = Rule(**changes)
    # Two people who talk on one day are two sources: each can be forgotten without the other.
    label = checked_source(source) if source else unique_source(time.strftime("chat-%Y-%m-%d"))
    with open_store(store) as kept:
        names = [n.strip() for n in compare.split(",")] if compare is not None else [] if identity is None else [identity]
        if compare is not None and (len(names) != 2 or not all(names)):
            fail(f"--compare {clean(compare)}: give two names with a comma between them, as in --compare mara,tom")
        for name in names:
            load(kept, name)
        with progress() as tell:
            loaded, tokenizer, base = open_model(model, tell)
        if tokenizer.template is None:
            fail(f"{base.name} came without a chat template: it continues texts, and does not talk; see regard generate")
        who = [(n, load(kept, n, base)) for n in names]
        talk = Talk(loaded, tokenizer, base, kept, sampling, rule, label, gain, system, weights, read_only)
        if compare is not None:
            talk.say_hello(f"{names[0]} and {names[1]} answer, and nothing is written")
            _compare(talk, who)
            return
        talk.name, talk.reading = who[0] if who else (None, None)
        talk.say_hello(f"{talk.name or base.name} is here; /help names the commands")
        for line in read_messages():
            if not talk.hear(line):
                break


@dataclass
class Talk:
    """A conversation, and whoever takes part in it."""

    model: Any
    tokenizer: Tokenizer
    base: Base
    store: IdentityStore
    sampling: Sampling
    rule: Rule
    source: str
    affect: Any
    system: str | None
    weights: str
    read_only: bool
    name: str | None = None
    reading: Identity | None = None
    """The identity as it was when this conversation began."""
    said: list[dict[str, str]] = field(default_factory=lambda: list[dict[str, str]]())
    last: tuple[list[int], list[int]] | None = None
    """Tokens of the last prompt and of the answer to it."""

    def say_hello(self, text: str) -> None:
        if sys.stdin.isatty():
            note(text)

    def hear(self, line: str) -> bool:
        """One line; False when it ends the chat. What goes wrong in it is said, and the chat goes on."""
        from ..errors import RegardError

        if line in ("/quit", "/exit", "/q"):
            return False
        try:
            if line.startswith("/"):
                self.command(line)
            else:
                self.turn(line)
        except RegardError as error:
            typer.echo(f"error: {error}", err=True)
        except KeyboardInterrupt:
            note("stopped")
        return True

    def command(self, line: str) -> None:
        verb, _, rest = line.partition(" ")
        known: dict[str, Callable[[str], None]] = {
            "/why": self.why, "/compare": self.compare, "/new": self.new, "/rollback": self.rollback, "/fork": self.fork,
            "/affect": self.feel, "/who": self.who, "/help": lambda _: typer.echo(COMMANDS),
        }  # fmt: skip
        if verb not in known:
            from ..errors import SpecError

            raise SpecError(f"{clean(verb)!r} is no command; there are {', '.join(known)} and /quit")
        known[verb](rest.strip())

    # -- talking -----------------------------------------------------------------------------------------------------

    def prompt(self, said: list[dict[str, str]]) -> list[int]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        return self.tokenizer.encode(self.tokenizer.chat([*first, *said]))

    def answer(self, who: Identity | None, tokens: list[int], show: Callable[[Token], object] | None = None) -> Generated:
        from ..identity.speaking import generate

        how = cast(Any, self.weights)
        return generate(self.model, tokens, self.sampling, identity=who, tokenizer=self.tokenizer, on_token=show, weights=how)

    def turn(self, text: str) -> None:
        def show(token: Token) -> None:
            sys.stdout.write(clean(token.text))
            sys.stdout.flush()

        message = {"role": "user", "content": text}
        tokens = self.prompt([*self.said, message])
        out = self.answer(self.reading, tokens, show)
        typer.echo()
        answer = cast(list[str], out.text)[0].strip()
        self.said += [message, {"role": "assistant", "content": answer}]
        self.last = tokens, out.tokens[0]
        if out.finish[0] == "interrupted":
            note("stopped; an answer that was not finished is not imprinted")
        elif self.name is not None and not self.read_only:
            self.imprint(self.said[-2:])

    def imprint(self, pair: list[dict[str, str]]) -> None:
        """The turn into the identity as it is now, which may be ahead of the one that is being read."""
        from ..identity.body import body_of
        from ..identity.store.replay import apply_event, imprint_event

        name = cast(str, self.name)
        event = imprint_event(pair, source=self.source, rule=self.rule, affect=self.affect, piece=body_of(self.model).piece)
        before = after = self.store.load(name)

        def write(me: Identity) -> Identity:
            nonlocal before, after
            before, after = me, apply_event(self.model, self.tokenizer, me, event)
            return after

        commit = self.store.update(name, write, event=event)
        fresh = [i for i, p in enumerate(after.imprints.position.tolist()) if p >= before.life.tokens]
        best = ", ".join(w for w, _, _ in words(after, self.tokenizer, fresh)[:SHOWN])
        note(f"[{name} {commit.id[:12]}: kept {len(fresh)}{f' ({best})' if best else ''}, {size(after.nbytes)}]")

    # -- commands ----------------------------------------------------------------------------------------------------

    def mine(self) -> str:
        if self.name is None:
            from ..errors import StateError

            raise StateError("nobody but the model is here; start with: regard chat --identity NAME")
        return self.name

    def again(self) -> None:
        self.said, self.last = [], None
        if self.name is not None:
            self.reading = self.store.load(self.name, self.base)

    def new(self, _: str) -> None:
        self.again()
        note("a fresh conversation")

    def rollback(self, to: str) -> None:
        commit = self.store.rollback(self.mine(), steps(to or "1"))
        self.again()
        note(f"{self.name} {commit.id[:12]}: {commit.message}; a fresh conversation")

    def fork(self, name: str) -> None:
        commit = self.store.fork(self.mine(), name)
        note(f"{name} {commit.id[:12]} goes on from here; {self.name} stays as it is")
        self.name = name

    def feel(self, text: str) -> None:
        if text:
            self.affect = parse_affect(text)
        note(f"affect is {self.affect}")

    def who(self, _: str) -> None:
        name = self.mine()
        head = self.store.head(name)
        typer.echo("\n".join([f"{name} {head.id[:12]}", *summary(self.store.load(name), self.tokenizer, SHOWN)]))
        ahead = head.tokens - cast("Identity", self.reading).life.tokens
        if ahead > 0:
            note(f"{several(ahead, 'token')} of this conversation will be remembered after /new")

    def spoken(self) -> tuple[list[int], list[int]]:
        if self.last is None:
            from ..errors import StateError

            raise StateError("nothing was answered yet; say something first")
        return self.last

    def why(self, which: str) -> None:
        from ..errors import SpecError
        from ..identity.why import along, kl, why

        self.mine()
        who = cast("Identity", self.reading)
        if who.empty:
            note(
                "the identity was empty when this conversation began: the answer is the model's own (/new reads what was imprinted)"
            )
            return
        prompt, answer = self.spoken()
        at = 1
        if which == "most" and answer:
            mine, other = along(self.model, who, prompt, answer), along(self.model, None, prompt, answer)
            moved = [kl(p, q) for p, q in zip(mine, other, strict=True)]
            at = 1 + moved.index(max(moved))
            typer.echo(f"moved    {spark(moved, 60)}  most at token {at}")
        elif which:
            if not which.isdecimal() or not 1 <= int(which) <= max(len(answer), 1):
                raise SpecError(f"/why {clean(which)}: the last answer has tokens 1 to {len(answer)}, or say most")
            at = int(which)
        with progress() as tell:
            found = why(self.model, who, [*prompt, *answer[: at - 1]], most=MOST, tell=tell)
        here = f"token {at}, {word(self.tokenizer, answer[at - 1 : at])!r}" if answer else "the next token"
        typer.echo(f"{here}: {found.base:.4f} nats from the model itself")
        typer.echo("likely   " + "  ".join(f"{word(self.tokenizer, [t])} {p:.0%} ({q:.0%})" for t, p, q in found.likely[:5]))
        typer.echo("without  " + "  ".join(f"{part} {x:.4f}" for part, x in found.parts.items()))
        top = max(range(len(found.layers)), key=lambda i: found.layers[i])
        typer.echo(
            f"layers   {spark(found.layers, len(found.layers))}  most in layer {top + 1} of {len(found.layers)}, {found.layers[top]:.4f}"
        )
        kept = who.imprints
        for i, x in list(found.imprints.items())[:SHOWN]:
            shown = word(self.tokenizer, [int(kept.token[i])])
            typer.echo(f"  {x:.4f}  {shown:<16} shock {float(kept.shock[i]):5.2f}  {clean(who.sources[int(kept.source[i])])}")

    def compare(self, _: str) -> None:
        from ..identity.why import along, kl

        prompt, answer = self.spoken()
        self.mine()
        out = self.answer(None, prompt)
        typer.echo(clean(cast(list[str], out.text)[0].strip()))
        if answer:
            moved = kl(along(self.model, self.reading, prompt, answer), along(self.model, None, prompt, answer))
            note(f"KL({self.name} ‖ model) {moved:.4f} nats a token along the answer of {self.name}")


def _compare(talk: Talk, who: list[tuple[str, Identity]]) -> None:
    """Every message to both; each has a conversation of its own."""
    from ..errors import RegardError

    said: list[list[dict[str, str]]] = [[], []]
    for line in read_messages():
        if line in ("/quit", "/exit", "/q"):
            return
        if line.startswith("/"):
            if line == "/new":
                said = [[], []]
            else:
                note("while two are compared there are /new and /quit")
            continue
        try:
            said = _both(talk, who, said, line)
        except RegardError as error:
            typer.echo(f"error: {error}", err=True)
        except KeyboardInterrupt:
            note("stopped")


def _both(
    talk: Talk, who: list[tuple[str, Identity]], said: list[list[dict[str, str]]], line: str
) -> list[list[dict[str, str]]]:
    from ..identity.why import along, kl

    answers: list[str] = []
    told: list[tuple[list[int], list[int]]] = []
    message = {"role": "user", "content": line}
    with progress() as tell:
        for (name, one), past in zip(who, said, strict=True):
            tell(f"{name} answers", None)
            tokens = talk.prompt([*past, message])
            out = talk.answer(one, tokens)
            if out.finish[0] == "interrupted":
                raise KeyboardInterrupt
            answers.append(clean(cast(list[str], out.text)[0].strip()))
            told.append((tokens, out.tokens[0]))
        tell("comparing", None)
        notes: list[str] = []
        (a, first), (b, second) = who
        if told[0][1]:
            mine, other, base = (along(talk.model, x, *told[0]) for x in (first, second, None))
            notes += [f"KL({a} ‖ {b}) {kl(mine, other):.4f}", f"KL({a} ‖ model) {kl(mine, base):.4f}"]
        if told[1][1]:
            notes.append(f"KL({b} ‖ model) {kl(along(talk.model, second, *told[1]), along(talk.model, None, *told[1])):.4f}")
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        made = Table(a, b, expand=True)
        made.add_row(*map(escape, answers))
        Console().print(made)
    else:
        for (name, _), text in zip(who, answers, strict=True):
            typer.echo(f"{name}: {text}")
    typer.echo(", ".join(notes) + " nats a token along each one's answer")
    return [[*past, message, {"role": "assistant", "content": x}] for past, x in zip(said, answers, strict=True)]
