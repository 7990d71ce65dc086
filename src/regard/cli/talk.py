"""A conversation on the command line: turns that are imprinted, commands about them, and two people side by side."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import typer

from ..errors import RegardError, SpecError, StateError
from ..identity import Base, Identity, IdentityStore, Rule
from ..identity.body import body_of
from ..identity.conversation import Answer, Conversation
from ..identity.facts import Fact, fact_of, facts, still_named, strike
from ..identity.store.imprinting import imprint_into
from ..identity.store.replay import Affect, imprint_event, replay
from ..identity.why import along, kl, moved
from ..identity.wording import clean, several, size, spark
from ..models.decode.prepare import Weights
from ..models.decode.sampling import Sampling
from ..models.decode.speculate import Speculate
from ..models.decode.stream import Token
from .arguments import note, parse_affect
from .console import agreed, progress
from .facts import show, struck, tell_of_others
from .identity import steps, summary
from .sleep import night

COMMANDS = """/facts [WORD]    what you told, line by line; words in brackets are imprinted; with a word, the lines that hold it; or all
/strike N        take line N of /facts back, for good, with the answer to it, and begin a fresh conversation
/sleep [resume]  consolidate over all that was told (Ctrl-C keeps the best so far), and begin a fresh conversation
/why [N|most]    what of the identity moved the answer's first token, its Nth, or the one it moved most
/compare         the model's own answer to the last message, without the identity
/new             a fresh conversation, in which what was imprinted so far is remembered
/rollback [N]    undo the last N imprints (or go back to a commit), and begin a fresh conversation
/fork NAME       go on as a second identity; the first stays as it is
/affect X        how deeply what follows is imprinted, from -1 to 1, or estimated
/who             who is speaking
/help            this
/quit            the end, as Ctrl-D; Ctrl-C only stops an answer"""
QUIT = ("/quit", "/exit", "/q")
SHOWN = 8
SHOWN_FACTS = 20


@dataclass(frozen=True)
class Settings:
    """What stays as it is for the whole of a chat."""

    sampling: Sampling
    weights: Weights
    rule: Rule
    source: str
    system: str | None
    read_only: bool
    sleep_on_leaving: bool | None = None
    """None asks whoever is at the terminal."""
    speculate: Speculate = None


@dataclass
class Talk:
    """A conversation, and whoever takes part in it."""

    store: IdentityStore
    settings: Settings
    conversation: Conversation
    base: Base
    affect: Affect
    name: str | None
    """None is the model itself."""
    listed: list[Fact] = field(default_factory=list[Fact])
    """As they were shown last: the numbers of /strike."""

    def __post_init__(self) -> None:
        self.conversation.at_commit = self._at_commit

    def _at_commit(self, commit: str) -> Identity:
        # A commit that somebody's forgetting removed has become what the name is now.
        return self.store.load(commit if self.store.holds(commit) else str(self.name), self.base)

    def hear(self, line: str) -> bool:
        """One line; False when it ends the chat. What goes wrong in it is said, and the chat goes on."""
        if line in QUIT:
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
            "/facts": self.facts, "/strike": self.strike, "/sleep": self.sleep, "/why": self.why, "/compare": self.compare, "/new": self.new, "/rollback": self.rollback, "/fork": self.fork,
            "/affect": self.feel, "/who": self.who, "/help": lambda _: typer.echo(COMMANDS),
        }  # fmt: skip
        if verb not in known:
            raise SpecError(f"{clean(verb)!r} is no command; there are {', '.join(known)} and /quit")
        known[verb](rest.strip())

    # -- talking -----------------------------------------------------------------------------------------------------

    def answer(self, text: str, show: Callable[[Token], object] | None = None) -> Answer:
        s = self.settings
        return self.conversation.ask(text, s.sampling, weights=s.weights, speculate=s.speculate, on_token=show)

    def turn(self, text: str) -> None:
        def show(token: Token) -> None:
            sys.stdout.write(clean(token.text))
            sys.stdout.flush()

        answer = self.answer(text, show)
        typer.echo()
        writes = self.name is not None and not self.settings.read_only
        if answer.ending == "interrupted":
            note("stopped" + "; an answer that was not finished is not imprinted, nor its question" * writes)
        elif answer.ending == "length":
            cut = f"cut off after {several(len(answer.tokens), 'token')} (--max-tokens)"
            note(cut + "; what you said is imprinted, and the answer is not" * writes)
        if self.name is not None and writes and answer.finished:
            self.imprint(self.name, answer)

    def imprint(self, name: str, answer: Answer) -> None:
        """The turn into the identity as it is now, which may be ahead of the one that is being read."""
        talk, s = self.conversation, self.settings
        piece = body_of(talk.model).piece
        event = imprint_event(answer.finished, source=s.source, rule=s.rule, affect=self.affect, piece=piece)
        done = imprint_into(self.store, name, talk.model, talk.tokenizer, event, again=True)
        head = self.store.find(str(done.commit))
        talk.written(head.id)
        best = f" ({', '.join(done.words[:SHOWN])})" if done.words else ""
        note(f"[{name} {head.id[:12]}: kept {done.count}{best}, {size(head.bytes)}]")

    # -- commands ----------------------------------------------------------------------------------------------------

    def writer(self, verb: str) -> str:
        """The name of whoever is speaking, if this chat may write."""
        if self.settings.read_only:
            raise StateError(f"{verb} writes, and this chat is --read-only")
        return self.mine()[0]

    def mine(self) -> tuple[str, Identity]:
        """Who is speaking, by name and as this conversation reads them."""
        if self.name is None or self.conversation.identity is None:
            raise StateError("nobody but the model is here; start with: regard chat --identity NAME")
        return self.name, self.conversation.identity

    def new(self, _: str, why: str = "a fresh conversation") -> None:
        who = None if self.name is None else self.store.load(self.name, self.base)
        talk = self.conversation
        self.conversation = Conversation(
            talk.model, talk.tokenizer, who, system=self.settings.system, at_commit=self._at_commit
        )
        note(why)

    def facts(self, word: str) -> None:
        name, _ = self.mine()
        self.listed = facts(self.store.journal(name), self.store.load(name), self.conversation.tokenizer)
        if word == "all":
            show(self.listed)
        else:
            show(self.listed, word or None, SHOWN_FACTS, "/facts all")

    def strike(self, number: str) -> None:
        name, talk = self.writer("/strike"), self.conversation
        listed = self.listed or facts(self.store.journal(name), self.store.load(name), talk.tokenizer)
        fact = fact_of(listed, int(number) if number.isdecimal() else number or "without a number")
        if sys.stdin.isatty() and not agreed(f"strike out {clean(fact.text)!r}, with the answer to it? This cannot be undone"):
            note("nothing was changed")
            return
        with progress() as tell:
            proof = strike(self.store, name, fact, replay(talk.model, talk.tokenizer, tell))
        typer.echo(struck(proof))
        self.listed = facts(self.store.journal(name), self.store.load(name), talk.tokenizer)
        tell_of_others(still_named(fact, self.listed))
        self.new("")

    def sleep(self, how: str) -> None:
        name, talk = self.writer("/sleep"), self.conversation
        if how not in ("", "resume"):
            raise SpecError(f"/sleep {clean(how)}: say /sleep, or /sleep resume to go on with a night that was interrupted")
        done = night(self.store, name, talk.model, talk.tokenizer, resume=how == "resume", go_on="/sleep resume")
        if done.commit is not None:
            self.new("")

    def leave(self) -> None:
        """Sleep over what was heard, if that was asked for: beforehand, or now of whoever is at the terminal."""
        if self.name is None or self.settings.read_only:
            return
        fresh = 0
        for event in self.store.journal(self.name):
            fresh = 0 if event.kind == "sleep" else fresh + (event.kind == "imprint" and event.source == self.settings.source)
        wanted = self.settings.sleep_on_leaving
        if not fresh or wanted is False or (wanted is None and not sys.stdin.isatty()):
            return
        if wanted or agreed(f"{self.name} heard {several(fresh, 'new turn')}; sleep over them?"):
            night(self.store, self.name, self.conversation.model, self.conversation.tokenizer)

    def rollback(self, to: str) -> None:
        name, _ = self.mine()
        commit = self.store.rollback(name, steps(to or "1"))
        self.new("", f"{name} {commit.id[:12]}: {commit.message}; a fresh conversation")

    def fork(self, name: str) -> None:
        first, _ = self.mine()
        commit = self.store.fork(first, name)
        note(f"{name} {commit.id[:12]} goes on from here; {first} stays as it is")
        self.name = name

    def feel(self, text: str) -> None:
        if text:
            self.affect = parse_affect(text)
        note(f"affect is {self.affect}")

    def who(self, _: str) -> None:
        name, reading = self.mine()
        head = self.store.head(name)
        typer.echo("\n".join([f"{name} {head.id[:12]}", *summary(self.store.load(name), self.conversation.tokenizer, SHOWN)]))
        ahead = head.tokens - reading.life.tokens
        if ahead > 0:
            note(f"{several(ahead, 'token')} of this conversation will be remembered after /new")

    def last(self) -> Answer:
        if self.conversation.last is None:
            raise StateError("nothing was answered yet; say something first")
        return self.conversation.last

    def why(self, which: str) -> None:
        _, reading = self.mine()
        if reading.empty:
            note(
                "the identity was empty when this conversation began: the answer is the model's own (/new reads what was imprinted)"
            )
            return
        answer, talk = self.last(), self.conversation
        at = 1
        if which == "most" and answer.tokens:
            distances = moved(talk.model, answer.identity or reading, answer.prompt, answer.tokens)
            at = 1 + distances.index(max(distances))
            typer.echo(f"moved    {spark(distances, 60)}  most at token {at}")
        elif which:
            if not which.isdecimal():
                raise SpecError(f"/why {clean(which)}: the last answer has tokens 1 to {len(answer.tokens)}, or say most")
            at = int(which)
        with progress() as tell:
            typer.echo(str(answer.why(talk.model, talk.tokenizer, at, tell)))

    def compare(self, _: str) -> None:
        answer, talk = self.last(), self.conversation
        name, reading = self.mine()
        alone = Conversation(talk.model, talk.tokenizer, None, talk.messages[:-2], talk.system)
        other = alone.ask(
            answer.question, self.settings.sampling, weights=self.settings.weights, speculate=self.settings.speculate
        )
        typer.echo(clean(other.text))
        if answer.tokens:
            mine, base = (along(talk.model, who, answer.prompt, answer.tokens) for who in (answer.identity or reading, None))
            note(f"KL({name} ‖ model) {kl(mine, base):.4f} nats a token along the answer of {name}")


def compare(first: Talk, second: Talk, lines: Iterator[str]) -> None:
    """Every message to both; each has a conversation of its own."""
    for line in lines:
        if line in QUIT:
            return
        if line.startswith("/"):
            if line == "/new":
                first.conversation.clear()
                second.conversation.clear()
            else:
                note("while two are compared there are /new and /quit")
            continue
        before = list(first.conversation.messages), list(second.conversation.messages)
        try:
            _compare_turn(first, second, line)
        except (RegardError, KeyboardInterrupt) as error:
            # Both go on from the same message, or neither does.
            first.conversation.messages, second.conversation.messages = before
            if isinstance(error, KeyboardInterrupt):
                note("stopped")
            else:
                typer.echo(f"error: {error}", err=True)


def _compare_turn(first: Talk, second: Talk, line: str) -> None:
    model, names, answers = first.conversation.model, (first.name, second.name), list[Answer]()
    with progress() as tell:
        for talk in (first, second):
            tell(f"{talk.name} answers", None)
            answers.append(talk.answer(line))
            if answers[-1].ending == "interrupted":
                raise KeyboardInterrupt
        tell("comparing", None)
        notes: list[str] = []
        a, b = answers
        if a.tokens:
            mine, other, base = (along(model, who, a.prompt, a.tokens) for who in (a.identity, b.identity, None))
            notes += [f"KL({names[0]} ‖ {names[1]}) {kl(mine, other):.4f}", f"KL({names[0]} ‖ model) {kl(mine, base):.4f}"]
        if b.tokens:
            mine, base = (along(model, who, b.prompt, b.tokens) for who in (b.identity, None))
            notes.append(f"KL({names[1]} ‖ model) {kl(mine, base):.4f}")
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        made = Table(*map(str, names), expand=True)
        made.add_row(*(escape(clean(x.text)) for x in answers))
        Console().print(made)
    else:
        for name, x in zip(names, answers, strict=True):
            typer.echo(f"{name}: {clean(x.text)}")
    typer.echo(", ".join(notes) + " nats a token along each one's answer")
