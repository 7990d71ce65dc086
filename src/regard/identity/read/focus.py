"""Which words of what came to mind are looked at more: those of the sentences that fit the question best.

    more_t = FOCUS · clamp((c_t − c̄) / (max c − c̄), 0, 1)        nats in the last layer, none in the first, those between in proportion

c_t is the cosine of the question's meaning and that of token t's sentence, by an episode's own vectors; c̄ is the mean over the sentences that
came. A small model reads all of a long message alike, and answers from any of it; of one sentence nothing stands out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...models.tokenizer import Tokenizer
from ..episodes import Episode
from ..speech import token_texts
from .finding import sentences_within

FOCUS = 2.0
"""Nats by which the last layer looks more at the best sentence."""


def focus(episodes: Sequence[Episode], asked: Float[Tensor, " E"], tokenizer: Tokenizer) -> list[Float[Tensor, " n"]]:
    """How much more each token of these episodes is looked at; `asked` is the question's meaning, by the encoder that made theirs."""
    sentences = [_sentences(e, asked, tokenizer) for e in episodes]
    every = torch.cat([cosines for cosines, _ in sentences])
    spread = (every.max() - every.mean()).clamp_min(1e-6)
    return [FOCUS * ((cosines - every.mean()) / spread).clamp(0, 1)[owner] for cosines, owner in sentences]


def _sentences(e: Episode, asked: Float[Tensor, " E"], tokenizer: Tokenizer) -> tuple[Float[Tensor, " s"], Int[Tensor, " n"]]:
    """How well each sentence fits, and which one every token is in; an episode without meanings of its sentences is one of them."""
    assert e.meaning is not None
    cosines = (e.meaning.codes.float() * e.meaning.scale.float()) @ asked
    pieces = token_texts(e.tokens.tolist(), tokenizer)
    sentences = sentences_within("".join(pieces))[: len(cosines) - 1]
    if len(sentences) < 2:
        return cosines[:1], torch.zeros(len(e), dtype=torch.int64)
    # A token is in the sentence in which its last letter stands; a word alone, which is no sentence, in the one after it.
    ends = torch.tensor(list(accumulate(map(len, pieces))))
    return cosines[1 : 1 + len(sentences)], torch.searchsorted(torch.tensor([stop for *_, stop in sentences[:-1]]), ends)


__all__ = ["FOCUS", "focus"]
