"""The text that tokens add to what stands before them, one token after another.

Decoders treat the first token of a list apart: SentencePiece drops its space, WordPiece keeps its `##`. So a continuation is
never decoded alone: what is read is the difference between a few tokens before it with and without the new ones.

    text(ids) = decode(before + ids) without its common start with decode(before)

Text that ends inside a character of several bytes is held back until the character is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

CONTEXT = 6
"""Tokens before a continuation that are decoded with it; more where these say nothing, such as special tokens."""
LONGEST = 8
PARTIAL = "\ufffd"
"""What decoders write for bytes that are no character, or no character yet."""


class Continuation:
    """`push` takes a token; `stable` is the text that no later token changes, `text` all of it."""

    def __init__(self, decode: Callable[[list[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = _context(decode, list(before))
        self._read = len(self._ids)
        self._base = decode(self._ids) if self._ids else ""
        self.stable, self._open = "", ""

    @property
    def text(self) -> str:
        return self.stable + self._open

    def push(self, token: int) -> None:
        self._ids.append(token)
        whole = self._decode(self._ids)
        # By the common start and not by length: a character that the last prompt token left open changes the end.
        self._open = _beyond(self._base, whole)
        # No character has that many tokens: what is still open then are bytes that mean nothing.
        garbage = len(self._ids) - self._read >= LONGEST
        if self._open and (garbage or not whole.endswith(PARTIAL)):
            self.stable, self._open = self.stable + self._open, ""
            # The tokens that were new are the context of the next: what is decoded again stays short.
            fresh = self._ids[self._read :]
            base = self._decode(fresh)
            if garbage or not base.startswith(PARTIAL):
                self._ids, self._base = fresh, base
            else:
                # They start inside a character that the prompt began: it stays with them.
                self._base = whole
            self._read = len(self._ids)


def continued(decode: Callable[[list[int]], str], before: Sequence[int], ids: Sequence[int]) -> str:
    """The text that `ids` add after `before`."""
    start = _context(decode, list(before))
    base, whole = decode(start) if start else "", decode([*start, *ids])
    return _beyond(base, whole)


def _beyond(base: str, whole: str) -> str:
    """What `whole` says after its common start with `base`."""
    if whole.startswith(base):
        return whole[len(base) :]
    same = next((i for i, (a, b) in enumerate(zip(base, whole, strict=False)) if a != b), min(len(base), len(whole)))
    return whole[same:]


def _context(decode: Callable[[list[int]], str], before: list[int]) -> list[int]:
    """A few last tokens that say something and do not start inside a character; all of them where none do."""
    count = CONTEXT
    while count < len(before):
        said = decode(before[-count:])
        if said.strip() and not said.startswith(PARTIAL):
            return before[-count:]
        count *= 2
    return before


__all__ = ["Continuation", "continued"]
