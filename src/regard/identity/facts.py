"""Facts: what a person said that an identity is made of, line by line, and which words of it are imprints.

    for fact in facts(store.journal("mara"), store.load("mara"), tokenizer):
        print(fact)                                      3  My cat is called [Mochi].
    print(strike(store, "mara", fact, replay(model, tokenizer)))

Lines are of the journal: one without an imprint may come to mind as an episode, and sleep goes over it, so it can be struck out like any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..errors import SpecError
from ..models.tokenizer import Tokenizer
from .experience import Chat, tokenised
from .speech import MARKUP, is_question
from .state import Identity
from .store import Event, Forgotten, IdentityStore
from .store.forget import Replay
from .store.lines import Line, lines_of, without
from .store.replay import PIECE, content, cut

Span = tuple[int, int]


@dataclass(frozen=True)
class Fact:
    number: int
    """Counted from 1, the oldest first."""
    line: Line
    event: Event
    imprinted: tuple[Span, ...] = ()
    """Where in the line words stand that are imprints."""

    @property
    def text(self) -> str:
        return self.line.text

    @property
    def marked(self) -> str:
        """The line, its imprints in brackets."""
        out, at = "", 0
        for start, end in self.imprinted:
            out += f"{self.text[at:start]}[{self.text[start:end]}]"
            at = end
        return out + self.text[at:]

    @property
    def asks(self) -> bool:
        """Whether it is a question, and so states nothing."""
        return is_question(self.text)

    def mentions(self, word: str) -> bool:
        """Whether the line, or what was answered to it, holds a word."""
        return _holds(self.text, word) or _holds(self.line.answer, word)

    def mentions_only_in_answer(self, word: str) -> bool:
        return self.mentions(word) and not _holds(self.text, word)

    def __str__(self) -> str:
        return f"{self.number:>4}  {self.marked}"


def facts(journal: Sequence[Event], identity: Identity, tokenizer: Tokenizer | None = None) -> list[Fact]:
    """The lines of a journal, the youngest last; without a tokenizer nothing says which words are imprints."""
    listed: list[Fact] = []
    met = 0
    for event in journal:
        if event.kind != "imprint" or event.text is None:
            continue
        spans = dict[int, list[Span]]()
        if tokenizer is not None:
            met, spans = _imprinted(event, met, identity, tokenizer)
        for line in lines_of(event):
            inside = [(max(a, line.start), min(b, line.end)) for a, b in spans.get(line.message, [])]
            own = [(a - line.start, b - line.start) for a, b in inside if a < b]
            listed.append(Fact(len(listed) + 1, line, event, tuple(_joined(line.text, own))))
    return listed


def fact_of(listed: Sequence[Fact], number: int | str) -> Fact:
    """The fact of a number; an unknown one is answered with those that there are."""
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= len(listed):
        there = f"lines 1 to {len(listed)}" if listed else "no lines yet"
        raise SpecError(f"there is no line {number!r:.20}: there are {there}")
    return listed[number - 1]


def strike(store: IdentityStore, name: str, fact: Fact, replay: Replay) -> Forgotten:
    """Take one line back for good, and the answer to its message with it, by living the rest again: see `store.forget`."""
    return store.forget(name, fact.event, replay, instead=without(fact.event, fact.line))


def still_named(fact: Fact, rest: Sequence[Fact]) -> dict[str, list[int]]:
    """Names and numbers of a line that other lines, or the answers to them, hold too, with the numbers of those lines."""
    starts = [m for m in re.finditer(r"\w+", fact.text) if m[0][0].isupper() or m[0][0].isdigit()]
    texts = [text for f in rest for text in (f.text, f.line.answer)]
    # The first word of a sentence has its capital for another reason, unless it has one inside another sentence too.
    chosen = [m[0] for m in starts if m.start() or any(re.search(rf"[\w,;] {re.escape(m[0])}\b", t) for t in texts)]
    by_word = {word: [f.number for f in rest if f.mentions(word)] for word in dict.fromkeys(chosen) if len(word) > 1}
    return {word: numbers for word, numbers in by_word.items() if numbers}


def _holds(text: str, word: str) -> bool:
    return bool(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _imprinted(event: Event, met: int, identity: Identity, tokenizer: Tokenizer) -> tuple[int, dict[int, list[Span]]]:
    """How many tokens were met after an event, and where in each of its messages imprints stand."""
    imprints = identity.imprints
    here = {
        (int(p), int(t))
        for p, t, s in zip(imprints.position.tolist(), imprints.token.tolist(), imprints.source.tolist(), strict=True)
        if identity.sources[s] == event.source
    }
    whole = content(str(event.text))
    texts = [whole] if isinstance(whole, str) else [m["content"] for m in whole]
    spans: dict[int, list[Span]] = {}
    message = begin = 0
    for part in cut(whole, tokenizer, int(event.rule.get("piece", PIECE))):
        ids, roles = tokenised(part, tokenizer)
        said = [role != MARKUP for role in roles]
        before = list(accumulate(said, initial=met))
        for words, places in _placed(part, ids, tokenizer):
            # A long message is read in pieces, which follow each other in it.
            while message < len(texts) and words not in texts[message][begin:]:
                message, begin = message + 1, 0
            if message == len(texts):
                break
            start = texts[message].index(words, begin)
            begin = start + len(words)
            for i, p in enumerate(places):
                # What was merged or learned has no token of its own.
                if said[p] and here & {(before[p], ids[p]), (before[p], -1)}:
                    a, b = (len(tokenizer.decode([ids[x] for x in places[:n]])) for n in (i, i + 1))
                    spans.setdefault(message, []).append((start + a, start + b))
        met = before[-1]
    return met, spans


def _placed(part: str | Chat, ids: Sequence[int], tokenizer: Tokenizer) -> Iterator[tuple[str, list[int]]]:
    """The words of a piece, message by message, and where their tokens stand; a message that the template changed is left out."""
    if isinstance(part, str):
        own = tokenizer.encode(part, bos=False)
        yield part, list(range(len(ids) - len(own), len(ids)))
        return
    at = 0
    for message in part:
        words = message["content"].strip()
        own = tokenizer.encode(words, bos=False)
        start = next((i for i in range(at, len(ids) - len(own) + 1) if list(ids[i : i + len(own)]) == own), None)
        if own and start is not None:
            yield words, list(range(start, start + len(own)))
            at = start + len(own)


def _joined(text: str, spans: Sequence[Span]) -> Iterator[Span]:
    """Spans that touch as one, without the spaces at their ends."""
    runs: list[Span] = []
    for a, b in sorted(spans):
        if runs and a <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(b, runs[-1][1]))
        else:
            runs.append((a, b))
    for a, b in runs:
        word = text[a:b]
        a, b = a + len(word) - len(word.lstrip()), b - len(word) + len(word.rstrip())
        if a < b:
            yield a, b


__all__ = ["Fact", "fact_of", "facts", "still_named", "strike"]
