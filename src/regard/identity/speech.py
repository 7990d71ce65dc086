"""Speech: who says each token of a text, in which sentence and in which word.

    speech = Speech.of(ids, roles, tokenizer)       roles: MARKUP, USER or ASSISTANT of every token
    speech.role[i], speech.sentence[i], speech.asks[speech.sentence[i]]

Sentences end by punctuation alone, of any script, and with their speaker; words by what is no letter and no digit. There is no list of
words in any language.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..models.continuation import Continuation
from ..models.tokenizer import Tokenizer

MARKUP, USER, ASSISTANT = 0, 1, 2
"""Who speaks. Plain text, and every role of a chat but the system's and the assistant's, is the user's own words."""
SENTENCE = re.compile(r".+?(?:[.!?…؟।]+[\"'”’»)\]]*(?=\s|$)|[。！？]+[」』”’]*|\n+|$)", re.S)
"""Up to what ends a sentence: a mark before a space, a mark of a script that writes none, or a new line."""


@dataclass(frozen=True, eq=False)
class Speech:
    """Who says each token of a text, and where its sentences begin and end."""

    role: Int[Tensor, " N"]
    """MARKUP, USER or ASSISTANT."""
    sentence: Int[Tensor, " N"]
    """Counted from 0 through the whole text; −1 for markup. A sentence has one speaker."""
    word: Int[Tensor, " N"]
    """Counted in the same way; in a script that writes no spaces every token is a word."""
    letters: Bool[Tensor, " N"]
    """False for tokens that have neither letter nor digit."""
    asks: Bool[Tensor, " S"]
    """Of every sentence, whether it ends as a question does."""

    def __len__(self) -> int:
        return self.role.shape[0]

    @classmethod
    def plain(cls, content: Sequence[bool]) -> Speech:
        """One sentence of the user's: what is known of token ids alone."""
        role = torch.tensor([USER if said else MARKUP for said in content], dtype=torch.long)
        word = torch.where(role == MARKUP, -1, (role != MARKUP).cumsum(0) - 1)
        return cls(role, role - USER, word, role != MARKUP, torch.zeros(int(any(content)), dtype=torch.bool))

    @classmethod
    def of(cls, ids: Sequence[int], roles: Sequence[int], tokenizer: Tokenizer) -> Speech:
        """The speech of a text's tokens, whose speakers are known."""
        sentence, asks = [-1] * len(ids), list[bool]()
        pieces = token_texts(ids, tokenizer)
        for role, run in groupby(range(len(ids)), lambda i: roles[i]):
            if role == MARKUP:
                continue
            run = list(run)
            ends = [(m.end(), is_question(m.group())) for m in SENTENCE.finditer("".join(pieces[i] for i in run))]
            starts, at = len(asks), 0
            asks += [question for _, question in ends] or [False]
            number = 0
            for i in run:
                # A token belongs to the sentence in which its last letter stands: a space before a word does not hold it back.
                at += len(pieces[i])
                while number < len(ends) - 1 and at > ends[number][0]:
                    number += 1
                sentence[i] = starts + number
        return cls(
            torch.tensor(roles, dtype=torch.long),
            torch.tensor(sentence),
            torch.tensor(_words(pieces, roles)),
            torch.tensor([any(map(str.isalnum, piece)) for piece in pieces]),
            torch.tensor(asks, dtype=torch.bool),
        )


def _words(pieces: Sequence[str], roles: Sequence[int]) -> list[int]:
    """Which word each token is of: letters and digits that touch are one."""
    words, count, last = list[int](), -1, ""
    for piece, role in zip(pieces, roles, strict=True):
        if role == MARKUP:
            words.append(-1)
            last = ""
            continue
        touching = last[-1:].isalnum() and piece[:1].isalnum() and unicodedata.category(piece[0]) != "Lo"
        # A part of a letter has no text of its own yet; it goes with the word before it.
        count += not (touching or (piece == "" and last != ""))
        words.append(count)
        last = piece or last
    return words


def is_question(sentence: str) -> bool:
    """Whether the marks at the end of a sentence have a question mark of any script among them."""
    for mark in reversed(sentence.rstrip()):
        if unicodedata.category(mark)[0] != "P":
            return False
        if "QUESTION MARK" in unicodedata.name(mark, ""):
            return True
    return False


def token_texts(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """The text that every token adds; where several make one letter, the last of them has it."""
    line = Continuation(partial(tokenizer.coder.decode, special=True))
    texts: list[str] = []
    for token in ids:
        before = len(line.stable)
        line.push(token)
        texts.append(line.stable[before:])
    return texts


__all__ = ["ASSISTANT", "MARKUP", "USER", "Speech", "is_question", "token_texts"]
