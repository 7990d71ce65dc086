"""The lines of an event: what the person said in it, sentence by sentence, and the event without one of them.

In a chat only the messages of the user are lines. A line goes together with the answer to its message, which may repeat it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..experience import Chat
from ..speech import SENTENCE
from .records import Event
from .replay import content, event_text

SHORTENED = re.compile(r"(?:^|\W)(?:[A-Z]|[B-DF-HJ-NP-TV-XZ][b-df-hj-np-tv-xz]+)\.$")
"""A full stop that ends no sentence: after an initial, or after a name for people that has no vowel left, as in Mrs."""


@dataclass(frozen=True)
class Line:
    text: str
    message: int
    """Which message of the event it stands in; 0 in a plain text."""
    start: int
    """Where in that message it begins."""
    answer: str = ""
    """What was answered to its message."""

    @property
    def end(self) -> int:
        return self.start + len(self.text)


def lines_of(event: Event) -> list[Line]:
    """What a person said in an event, in order."""
    said = content(event.text or "")
    if isinstance(said, str):
        return [Line(text, 0, start) for start, text in _sentences(said)]
    return [
        Line(text, i, start, "\n".join(m["content"] for m in said[i + 1 : _turn_end(said, i)]))
        for i, message in enumerate(said)
        if message["role"] == "user"
        for start, text in _sentences(message["content"])
    ]


def without(event: Event, line: Line) -> Event | None:
    """The event without a line and what was answered to its message; None where nothing of the person's is left."""
    said = content(event.text or "")
    if isinstance(said, str):
        rest = _cut_out(said, line)
        return replace(event, text=rest) if rest else None
    rest = _cut_out(said[line.message]["content"], line)
    own = [{**said[line.message], "content": rest}] if rest else []
    left = [*said[: line.message], *own, *said[_turn_end(said, line.message) :]]
    return replace(event, text=event_text(left)) if any(m["role"] == "user" for m in left) else None


def _turn_end(said: Chat, start: int) -> int:
    """Where the next message of a user stands."""
    return next((i for i in range(start + 1, len(said)) if said[i]["role"] == "user"), len(said))


def _cut_out(text: str, line: Line) -> str:
    before, after = text[: line.start].rstrip(), text[line.end :]
    # What stood between two paragraphs stays between them.
    return (before + after if before else after).strip()


def _sentences(text: str) -> list[tuple[int, str]]:
    """Where each sentence begins, and the sentence."""
    spans: list[tuple[int, int]] = []
    for match in SENTENCE.finditer(text):
        before = text[spans[-1][0] : spans[-1][1]] if spans else "\n"
        goes_on = SHORTENED.search(before) or match[0].lstrip()[:1].islower()
        if goes_on and "\n" not in before[-1:] + match[0][:1]:
            spans[-1] = (spans[-1][0], match.end())
        else:
            spans.append(match.span())
    pieces = [(a, text[a:b]) for a, b in spans if text[a:b].strip()]
    return [(a + len(piece) - len(piece.lstrip()), piece.strip()) for a, piece in pieces]


__all__ = ["Line", "lines_of", "without"]
