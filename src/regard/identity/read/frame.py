"""The frame of a chat: what a template writes before the first turn, and around every turn, as tokens.

frame = Frame.of(tokenizer)
frame.head_of(prompt)                 tokens before what is asked last in a prompt
frame.question_of(prompt)             what is asked there
frame.read(parts, prompt)             what comes to mind, as it would stand between the two
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import RegardError
from ...models.subwords import TokenizerError
from ...models.tokenizer import Tokenizer
from ..episodes import Role

ASKED = 64
"""Tokens at the end of a prompt without turns that are taken for what it is about."""
READ = ("Read the text and answer the question.\n\nText: ", "\n", "\n\nQuestion: ")
"""Around and between what comes to mind. A small model goes on with a chat, and reads a text: of 24 questions of six people's it answered
14 with the right turn in this form, 5 with the same turn before its own."""
WORDS = ("Alpha", "Beta", "Gamma")
"""Stand for what is said while a template is taken apart."""


@dataclass(frozen=True)
class Frame:
    """Tokens that a template writes; a model without one continues plain text, a paragraph after the other."""

    head: tuple[int, ...] = ()
    """Before the first turn, where the chat has no system message of its own."""
    opening: dict[Role, tuple[int, ...]] | None = None
    closing: dict[Role, tuple[int, ...]] | None = None
    paragraph: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    line: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Frame:
        def ids(text: str) -> tuple[int, ...]:
            try:
                return tuple(tokenizer.encode(text, bos=False))
            except TokenizerError:
                # One of a single book's characters may have none for it.
                return ()

        plain = cls(paragraph=ids("\n\n"))
        if tokenizer.template is None:
            return plain
        a, b, c = WORDS
        said = [{"role": r, "content": x} for r, x in (("user", a), ("assistant", b), ("user", c))]
        try:
            whole, one, two = (tokenizer.chat(said[:n], add_generation_prompt=False) for n in (3, 1, 2))
        except RegardError:
            return plain
        before, _, rest = whole.partition(a)
        between, _, rest = rest.partition(b)
        again, _, _ = rest.partition(c)
        after_user, after_assistant = one.rpartition(a)[2], two.rpartition(b)[2]
        whole_turns = between.startswith(after_user) and again.startswith(after_assistant)
        to_user, to_assistant = again[len(after_assistant) :], between[len(after_user) :]
        if not (whole_turns and to_user and before.endswith(to_user)):
            return plain

        head = tuple(tokenizer.encode(before[: -len(to_user)]))
        opening: dict[Role, tuple[int, ...]] = {"user": ids(to_user), "assistant": ids(to_assistant)}
        closing: dict[Role, tuple[int, ...]] = {"user": ids(after_user), "assistant": ids(after_assistant)}
        return cls(head, opening, closing, plain.paragraph, *map(ids, READ))

    def head_of(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt come before what is asked last in it, the sink among them."""
        last = self._last_turn(prompt)
        return 1 if last is None else max(last, 1)

    def head_alone(self, prompt: Sequence[int]) -> list[int]:
        """The head of a prompt that asks this and nothing before: its system message, and what opens the user's turn."""
        if self.opening is None or (first := _first(prompt, self.opening["user"])) is None:
            return list(prompt[:1])
        return list(prompt[: max(first + len(self.opening["user"]), 1)])

    def read(self, parts: Sequence[Sequence[int]], prompt: Sequence[int]) -> tuple[list[int], list[int]]:
        """What comes to mind as it stands right before a question, and of which part each token is; −1 for the words around them."""
        before, between, after = self.around(prompt)
        tokens, part = list(before), [-1] * len(before)
        for n, said in enumerate(parts):
            gap = between if n else ()
            tokens += [*gap, *said]
            part += [-1] * len(gap) + [n] * len(said)
        return [*tokens, *after], [*part, *([-1] * len(after))]

    def around(self, prompt: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The words before, between and behind what comes to mind; a text without turns has a paragraph's end behind it."""
        asks = self._last_turn(prompt) is not None
        return (self.before, self.line, self.after) if asks else ((), (), self.paragraph)

    def question_of(self, prompt: Sequence[int]) -> list[int]:
        """What the user said last in a prompt."""
        start = self._last_turn(prompt)
        if start is None or self.closing is None:
            return list(prompt)[-ASKED:]
        said = list(prompt)[start:]
        end = _first(said, self.closing["user"])
        return said if end is None else said[:end]

    def _last_turn(self, prompt: Sequence[int]) -> int | None:
        """Where what the user said last begins; None in a text without turns."""
        if self.opening is None:
            return None
        opening, prompt = self.opening["user"], tuple(prompt)
        starts = [i for i in range(len(prompt)) if prompt[i : i + len(opening)] == opening]
        return starts[-1] + len(opening) if starts else None

    def alone(self, role: Role, tokens: Sequence[int], begin: Sequence[int] = ()) -> tuple[list[int], int]:
        """A turn as the first of a chat, and where in it what was said begins."""
        before = [*self.head, *self.opening[role]] if self.opening is not None else list(begin)
        return [*before, *tokens], len(before)


def _first(tokens: Sequence[int], part: tuple[int, ...]) -> int | None:
    """Where a part begins in tokens for the first time."""
    if not part:
        return None
    tokens = tuple(tokens)
    return next((i for i in range(len(tokens) - len(part) + 1) if tokens[i : i + len(part)] == part), None)


__all__ = ["Frame"]
