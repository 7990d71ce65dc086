"""A conversation out of steps: who speaks next, what is said in one message, and where every step ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from .generator import Conversation, Message
from .natural_data import LISTENER


@dataclass(frozen=True)
class Step:
    """Some lines, and the listener's replies to them: the last one to the last line, the others to those before."""

    lines: Sequence[str]
    replies: Sequence[str] = ()
    ends: int = -1
    """The line in which what is told is told."""


class _Writer:
    def __init__(self, opener: str) -> None:
        self.messages: list[Message] = []
        self.opener, self.reply = opener, ""

    @property
    def last(self) -> str:
        return self.messages[-1]["role"] if self.messages else ""

    def add(self, role: str, text: str) -> None:
        if self.last == role:
            before = self.messages[-1]["content"]
            self.messages[-1] = {"role": role, "content": f"{before}{_gap(before, text)}{text}"}
        else:
            self.messages.append({"role": role, "content": text})

    def answer(self) -> None:
        """The reply that is due, if the person spoke last."""
        if self.last == "user" and self.reply:
            self.add("assistant", self.reply)

    def say(self, line: str, join: bool) -> None:
        if line.startswith(LISTENER):
            if not self.messages:
                self.add("user", self.opener)
            self.add("assistant", line.removeprefix(LISTENER))
            return
        if not join:
            self.answer()
        if not self.messages and self.opener:
            self.add("user", self.opener)
        self.add("user", line)


def _gap(before: str, after: str) -> str:
    """A new line after the address of a letter, and around a list."""
    return "\n" if before.endswith(",") or "\n" in before.split(",\n", 1)[-1] + after else " "


def converse(
    steps: Sequence[Step], opener: str, closer: str, rng: Random, join: float, breath: int
) -> tuple[Conversation, list[int]]:
    """The messages, and for every step the message that its telling line is in.

    A step is told in the same message as the one before with probability `join`, and up to `breath` of them in one.
    """
    writer = _Writer(opener)
    at: list[int] = []
    things = 0
    for step in steps:
        replies = iter(step.replies)
        for index, line in enumerate(step.lines):
            spoken = not line.startswith(LISTENER)
            joined = spoken and index == 0 and writer.last == "user" and things < breath and rng.random() < join
            things = things + 1 if joined else 1
            writer.say(line, joined)
            writer.reply = next(replies, "") if spoken else ""
            if index == step.ends % len(step.lines):
                at.append(len(writer.messages) - 1)
    if closer and writer.last == "user":
        writer.add("user", closer)
    writer.answer()
    return tuple(writer.messages), at


__all__ = ["Step", "converse"]
