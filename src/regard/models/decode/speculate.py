"""Tokens guessed from what was said before, and checked by the model several at a time (Leviathan et al. 2023; Saxena 2023, prompt lookup).

    out = generate(model, prompt, speculate="lookup")     # or a number: how many tokens at most are guessed at a time
    out.accepted_share                                    # how many of the guesses were right

The last few tokens are looked up in the prompt, in what was written since and in further texts, and whatever followed there is the guess. A
forward reads all of it at once, and every token is then drawn from the model's own logits, with the random number that plain decoding
would draw it with: a guess only decides whether those logits are there already. So the text is that of plain decoding, greedy or sampled,
token for token; where C multiplies the logits are the same bits, elsewhere they agree to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ...errors import SpecError
from .sampling import is_whole

LONGEST, SHORTEST = 4, 2
"""Tokens in a row that have to agree before what followed them is guessed."""
USUAL = 12
MOST = 256
_END = -1
"""No token has this number."""


@dataclass(frozen=True)
class Speculation:
    tokens: int = USUAL
    """How many are guessed at a time, at most; fewer where guesses were wrong lately."""
    texts: tuple[tuple[int, ...], ...] = ()
    """Tokens of texts that are likely to be quoted, beside the prompt."""

    def __post_init__(self) -> None:
        if not is_whole(self.tokens) or not 1 <= self.tokens <= MOST:
            raise SpecError(f"speculate={self.tokens!r:.60}: it is how many tokens are guessed at a time, 1 to {MOST}")


Speculate = Speculation | int | Literal["lookup"] | None
"""None: every token by itself. "lookup": guess from what was said. A number: the same, at most so many tokens at a time."""


def speculation(given: object) -> Speculation | None:
    if given is None or isinstance(given, Speculation):
        return given
    if isinstance(given, str) and given == "lookup":
        return Speculation()
    if is_whole(given) and not isinstance(given, bool):
        return Speculation(int(given))  # type: ignore[call-overload]
    raise SpecError(f'speculate={given!r:.60}: give "lookup", how many tokens are guessed at a time, or None')


class Lookup:
    """What followed the same few tokens when they stood somewhere before, the latest place first."""

    def __init__(self, texts: Iterable[Sequence[int]]) -> None:
        self.history: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        """Where a text went on after some tokens."""
        self._start = 0
        for text in texts:
            # No guess runs from one text into the next.
            self.history.append(_END)
            self._start = len(self.history)
            for token in text:
                self.push(token)

    def push(self, token: int) -> None:
        at = len(self.history)
        for n in range(SHORTEST, min(LONGEST, at - self._start) + 1):
            self._after[tuple(self.history[at - n : at])] = at
        self.history.append(token)

    def guess(self, count: int) -> list[int]:
        """At most `count` tokens that may come next; what repeats itself is guessed to go on."""
        end = len(self.history)
        for n in range(min(LONGEST, end - self._start), SHORTEST - 1, -1):
            at = self._after.get(tuple(self.history[end - n :]))
            if at is not None:
                guessed: list[int] = []
                for i in range(at, at + count):
                    token = self.history[i] if i < end else guessed[i - end]
                    if token == _END:
                        break
                    guessed.append(token)
                return guessed
        return []


class Drafts:
    """The guesses of one row: how many, from where, and how many were right."""

    def __init__(self, speculation: Speculation, prompt: Sequence[int]) -> None:
        self.limit = speculation.tokens
        self.lookup = Lookup([*speculation.texts, prompt])
        self.ahead = min(4, self.limit)
        self.drafted = self.accepted = 0

    def guess(self, most: int) -> list[int]:
        return self.lookup.guess(min(self.ahead, most)) if most > 0 else []

    def checked(self, drafted: int, accepted: int) -> None:
        """Guess further where all was right, and less far where it was not: a wrong guess is read for nothing."""
        self.drafted += drafted
        self.accepted += accepted
        if drafted:
            self.ahead = min(self.limit, 2 * self.ahead) if accepted == drafted else max(1, (accepted + 1 + self.ahead) // 2)


__all__ = ["Drafts", "Lookup", "Speculate", "Speculation", "speculation"]
