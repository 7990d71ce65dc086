"""Text cut by the package `tokenizers`, and faster readers of its vocabularies of characters and of bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import RegardError, ShapeError
from ..files import reading
from .byte_level import byte_characters

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_BYTES = 512
"""Tokens of a vocabulary of bytes: 256, and special ones."""
EACH = r"[\s\S]"
"""Any one character: how a vocabulary of characters cuts a text."""


class TokenizerError(RegardError):
    """Text that a tokenizer has no tokens for, or a tokenizer that cannot be made."""


class Subwords:
    """A `tokenizers.Tokenizer` behind our two verbs."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner = inner
        self.size: int = inner.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return self._encoded(text, False)

    def framed(self, text: str) -> list[int]:
        return self._encoded(text, True)

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        bad = [i for i in ids if not 0 <= i < 1 << 32]
        if bad:
            raise ShapeError(f"{bad[0]} is no token; this tokenizer knows 0..{self.size - 1}")
        with reading("the tokenizer"):
            return self.inner.decode(list(ids), skip_special_tokens=not special)

    def text_of(self, i: int) -> str:
        """How a token is written in the vocabulary; a decoder could take its spaces away."""
        return self.inner.id_to_token(i) or ""

    def id_of(self, text: object) -> int | None:
        """The token that is written like this, or None; half of a surrogate pair is no text."""
        if not isinstance(text, str) or text.encode("utf-8", errors="replace").decode("utf-8") != text:
            return None
        return self.inner.token_to_id(text)

    def _encoded(self, text: str, framed: bool) -> list[int]:
        # What JSON and terminals give for broken text, halves of surrogate pairs, is no UTF-8.
        plain = text.encode("utf-8", errors="replace").decode("utf-8")
        with reading("the tokenizer"):
            return self.inner.encode(plain, add_special_tokens=framed).ids


class Characters(Subwords):
    """A vocabulary of single characters, and special tokens that no text spells. `tokenizers` would read its file too, a hundred times
    slower; a character that it does not have is named, where `tokenizers` only says that there is none."""

    def __init__(self, inner: Tokenizer) -> None:
        super().__init__(inner)
        self.ids: dict[str, int] = inner.get_vocab()

    def _encoded(self, text: str, framed: bool) -> list[int]:
        try:
            return [self.ids[c] for c in text]
        except KeyError as error:
            raise TokenizerError(
                f"character {error.args[0]!r} was not in the corpus this tokenizer was made of ({self.size} characters); "
                "data.tokenizer=byte takes any text"
            ) from None


class Bytes(Subwords):
    """UTF-8 bytes, each its own number, and special tokens that no text spells."""

    def _encoded(self, text: str, framed: bool) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))


def subwords(inner: Tokenizer) -> Subwords:
    """The fastest reader of a `tokenizers.Tokenizer`: single characters and bytes need no search for pairs."""
    if type(inner.model).__name__ != "WordLevel" and inner.get_vocab_size() > MOST_BYTES:
        return Subwords(inner)  # looking closer would take longer than loading it
    parts: Any = json.loads(inner.to_str())
    model, cut = parts["model"], parts["pre_tokenizer"] or {}
    if not parts["normalizer"] and not parts["post_processor"]:
        letters = model["type"] == "WordLevel" and cut.get("pattern") == {"Regex": EACH}
        if letters and all(added["special"] for added in parts["added_tokens"]):
            return Characters(inner)
        ours = model["type"] == "BPE" and not model["merges"] and cut.get("use_regex") is False
        if ours and all(model["vocab"].get(c) == i for i, c in enumerate(byte_characters())):
            return Bytes(inner)
    return Subwords(inner)
