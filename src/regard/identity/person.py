"""Person: somebody who remembers, in four lines, kept where `regard identity` keeps them.

    mara = regard.Person("mara", model="smollm2")
    mara.tell("I live in Porto and my cat is called Mochi.")
    print(mara.ask("What is my cat called?"))
    print(mara.why())

Every write is one commit of one event, so that all of it can be seen, replayed, rolled back and forgotten, from here and from the
command line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, cast, overload

from ..errors import StateError
from ..models.base import Model
from ..models.decode.prepare import Weights
from ..models.decode.sampling import Sampling
from ..models.decode.speculate import Speculate
from ..models.tokenizer import Tokenizer
from .body import base_of, body_of
from .conversation import Answer, Conversation
from .documents import Messages, checked_text, read_document
from .facts import Fact, fact_of, facts, strike
from .opened import fetched
from .penalty import REPETITION_PENALTY
from .sleep.stored import Sleep, sleep_over
from .state import Identity
from .store import Commit, Forgotten, IdentityStore
from .store.imprinting import Imprinted, imprint_into
from .store.records import checked_name, checked_source, unique_source
from .store.replay import Affect, imprint_event, replay
from .why import Why
from .wording import several
from .write.rule import Rule

Progress = Callable[[str, float | None], None]
"""What is being done, and which share of it is done; None where that cannot be known."""
MODEL = "smollm2"
BETWEEN = 2.0
"""Seconds that something takes before it is spoken of, and between two lines about it."""


class Person:
    """Somebody with a name, a model to think with, and a memory in a store."""

    def __init__(
        self,
        name: str,
        model: str | Path | Model = MODEL,
        tokenizer: Tokenizer | None = None,
        *,
        store: str | Path | IdentityStore | None = None,
        rule: Rule | None = None,
        progress: Progress | None = None,
    ) -> None:
        """`model` is a name, a path, or a loaded model with its tokenizer; people of one name or path share one loaded model.

        `store` is a file, a PostgreSQL URL or an open store, by default the one of the command line: REGARD_STORE, or
        `identities.db` in the cache. `rule` says what is kept of a text. `progress` hears what takes long; without it, stderr does.
        Somebody new is begun by the first `tell`.
        """
        self.name, self.rule, self._progress = checked_name(name), rule or Rule(), progress
        if isinstance(model, str | Path):
            with self._telling(progress) as tell:
                self.model, own, self.base = fetched(model, tell)
            self.tokenizer = tokenizer or own
        elif tokenizer is None:
            raise StateError(f"Person({name!r}, {type(model).__name__}): a loaded model comes with its tokenizer, third")
        else:
            self.model, self.tokenizer, self.base = model, tokenizer, base_of(model)
        self._at = store if store is not None else os.environ.get("REGARD_STORE") or None
        self.store = self._at if isinstance(self._at, IdentityStore) else IdentityStore(self._at)
        self._source = unique_source(time.strftime("chat-%Y-%m-%d"))
        self._last: Answer | None = None
        try:
            # Whoever belongs to another model is refused here, and not after a text was read.
            _ = self.identity
        except BaseException:
            self.close()
            raise

    # -- writing -----------------------------------------------------------------------------------------------------

    def tell(
        self,
        what: str | Sequence[Mapping[str, str]] | Path,
        *,
        source: str | None = None,
        affect: Affect = 1.0,
        again: bool = False,
        progress: Progress | None = None,
    ) -> Imprinted:
        """Imprint a text, a list of messages, or the file at a Path (.txt, .json, .jsonl), and say what was kept of it.

        `source` names it, to forget it by; `affect`, from −1 to 1 or "estimated", says how deeply it is written. The same words
        a second time are recognised, and nothing is written, unless `again`.
        """
        said = read_document(what) if isinstance(what, Path) else checked_text(what)
        label = what.stem if isinstance(what, Path) else "told"
        # Two texts are two sources; one text is the same source whoever tells it.
        source = checked_source(source) if source is not None else unique_source(label, json.dumps(said))
        return self._imprint(said, source, affect, again, progress)

    def sleep(
        self, *, steps: int | None = None, seed: int = 0, resume: bool = False, progress: Progress | None = None
    ) -> Sleep:
        """Consolidate over all that was told, commit it if it helped, and say so.

        Ctrl-C ends it early and keeps the best so far; `resume` goes on with it.
        """
        with self._telling(progress) as tell:
            return sleep_over(
                self.store, self.name, self.model, self.tokenizer, steps=steps, seed=seed, resume=resume, tell=tell
            )

    def rollback(self, to: int | str = 1) -> Commit:
        """Be again what one was `to` commits ago, or at the commit whose id begins so; itself a commit, which can be undone."""
        return self.store.rollback(self.name, to)

    def forget(self, source: str, *, progress: Progress | None = None) -> Forgotten:
        """Take back all that a source wrote, for good, by living the rest again; the proof says what was removed and read."""
        with self._telling(progress) as tell:
            return self.store.forget(self.name, source, replay(self.model, self.tokenizer, tell))

    def strike(self, number: int, *, progress: Progress | None = None) -> Forgotten:
        """Take back one line of `facts`, for good, with the answer to it, by living the rest again; later lines then count one less."""
        fact = fact_of(self.facts(), number)
        with self._telling(progress) as tell:
            return strike(self.store, self.name, fact, replay(self.model, self.tokenizer, tell))

    def fork(self, name: str) -> Person:
        """A second person who has been through the same; from here on they go apart."""
        self.store.fork(self.name, name)
        return Person(name, self.model, self.tokenizer, store=self._at, rule=self.rule, progress=self._progress)

    # -- reading -----------------------------------------------------------------------------------------------------

    @overload
    def ask(
        self, question: str, *, stream: Literal[False] = False, remember: bool = False, conversation: Conversation | None = None,
        max_tokens: int = 256, temperature: float = 0.0, repetition_penalty: float = REPETITION_PENALTY, contrast: float | None = None,
        seed: int = 0, weights: Weights = "float32", speculate: Speculate = None,
    ) -> str: ...  # fmt: skip
    @overload
    def ask(
        self, question: str, *, stream: Literal[True], remember: bool = False, conversation: Conversation | None = None,
        max_tokens: int = 256, temperature: float = 0.0, repetition_penalty: float = REPETITION_PENALTY, contrast: float | None = None,
        seed: int = 0, weights: Weights = "float32", speculate: Speculate = None,
    ) -> Iterator[str]: ...  # fmt: skip
    def ask(
        self,
        question: str,
        *,
        stream: bool = False,
        remember: bool = False,
        conversation: Conversation | None = None,
        max_tokens: int = 256,
        temperature: float = 0.0,
        repetition_penalty: float = REPETITION_PENALTY,
        contrast: float | None = None,
        seed: int = 0,
        weights: Weights = "float32",
        speculate: Speculate = None,
    ) -> str | Iterator[str]:
        """The answer to a question; with `stream`, its pieces as they fall.

        Nothing is written, unless `remember` imprints the finished turn, or the question alone where `max_tokens` cut the answer
        off. `contrast=0` says what one forward would say where something came to mind (`Sampling`). Each question stands alone, unless a
        `conversation()` is given, which goes on with it. Who answers is settled by the call: streams of several people may be read in turns.
        """
        talk = self.conversation() if conversation is None else conversation
        if not isinstance(talk, Conversation):
            raise StateError(f"conversation={talk!r:.60}: give what {self.name}.conversation(messages) made")
        sampling = Sampling(max_tokens, temperature, repetition_penalty=repetition_penalty, contrast=contrast, seed=seed)

        def done(answer: Answer) -> None:
            self._last = answer
            if remember and answer.finished:
                talk.written(str(self._imprint(answer.finished, self._source, 1.0, True, None).commit))

        if stream:
            return talk.stream(question, sampling, weights=weights, speculate=speculate, then=done)
        answer = talk.ask(question, sampling, weights=weights, speculate=speculate)
        done(answer)
        return answer.text

    def conversation(self, messages: Sequence[Mapping[str, str]] = (), *, system: str | None = None) -> Conversation:
        """A conversation to be given to `ask`, empty or after these messages.

        It reads who one is now: what is remembered while it goes on stands in its messages, and is read by the next one.
        """
        said = cast(Messages, checked_text(messages)) if len(messages) else []
        return Conversation(self.model, self.tokenizer, self.identity, said, system, at_commit=self._at_commit)

    def why(self, token: int | None = None, *, progress: Progress | None = None) -> Why:
        """What of the identity moved the last answer: at the token that it moved most, or at this one, counted from 1."""
        if self._last is None:
            raise StateError(f"{self.name} has answered nothing yet; ask something first")
        with self._telling(progress) as tell:
            return self._last.why(self.model, self.tokenizer, token, tell)

    def facts(self) -> list[Fact]:
        """What one was told by people, line by line, the youngest last, and which words of it are imprints."""
        return facts(self.store.journal(self.name), self.identity, self.tokenizer) if self.name in self.store else []

    @property
    def identity(self) -> Identity:
        """Who one is now; empty before anything was told."""
        if self.name in self.store:
            return self.store.load(self.name, self.base)
        return Identity.new(self.base)

    def log(self, limit: int | None = None) -> list[Commit]:
        """What happened, youngest first; nothing before the first `tell`."""
        return self.store.log(self.name, limit) if self.name in self.store else []

    # -- the object --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of the store, unless it was given; a `with` block does so at its end."""
        if self.store is not self._at:
            self.store.close()

    def __enter__(self) -> Person:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        who = self.identity
        life = f"{several(who.life.experiences, 'experience')}, {several(len(who.imprints), 'imprint')}, {several(len(who.episodes), 'episode')}"
        return f"Person({self.name!r}, model={self.base.name or self.base.family!r}: {life})"

    def _at_commit(self, commit: str) -> Identity:
        # A commit that somebody's forgetting removed has become what the name is now.
        return self.store.load(commit if self.store.holds(commit) else self.name, self.base)

    def _imprint(self, said: str | Messages, source: str, affect: Affect, again: bool, progress: Progress | None) -> Imprinted:
        piece = body_of(self.model).piece
        event = imprint_event(said, source=source, rule=self.rule, affect=affect, piece=piece)
        with self._telling(progress) as tell:
            return imprint_into(
                self.store, self.name, self.model, self.tokenizer, event, again=again, base=self.base, tell=tell
            )

    @contextmanager
    def _telling(self, progress: Progress | None) -> Generator[Progress]:
        given = progress or self._progress
        if given is not None:
            yield given
            return
        shown = _Lines()
        try:
            yield shown
        finally:
            shown.end()


class _Lines:
    """Progress on stderr: one line that is written over on a terminal, a plain one now and then elsewhere. What can be measured
    is spoken of once it has taken long; what cannot be is named at once, as nobody knows how long it takes."""

    def __init__(self) -> None:
        self.since: dict[str, float] = {}
        self.open = False

    def __call__(self, what: str, share: float | None) -> None:
        now = time.monotonic()
        live = sys.stderr.isatty()
        first = self.since.setdefault(what, now if share is not None else -BETWEEN)
        if now - first < (0.1 if self.open else BETWEEN):
            return
        self.since[what] = now
        text = what if not share else f"{what}: {share:.0%}"
        print(f"\r\x1b[2K{text}" if live else text, end="" if live else "\n", file=sys.stderr, flush=True)
        self.open = live

    def end(self) -> None:
        if self.open:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


__all__ = ["Person"]
