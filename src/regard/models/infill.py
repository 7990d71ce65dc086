"""Filling in what a text leaves open, by models that read it from both sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import CombinationError

if TYPE_CHECKING:
    from .base import Model
    from .tokenizer import Tokenizer


def joined_around(pieces: Sequence[Sequence[int]], between: Sequence[int]) -> list[int]:
    """All pieces, with one of the ids between each two."""
    return [i for piece, mark in zip(pieces, [*[[b] for b in between], []], strict=True) for i in (*piece, *mark)]


@torch.no_grad()
def masks_filled(model: Model, text: str, tokenizer: Tokenizer) -> str:
    """The text with a token for each mask. The model is asked again after each: what is filled in first, where it is surest, helps
    with the rest."""
    mask = tokenizer.special.mask
    if mask is None:
        raise CombinationError("this tokenizer has no token for a mask, so there is no place to fill in")
    word = tokenizer.text_of(mask)
    parts = text.split(word)
    if len(parts) == 1:
        raise CombinationError(
            f"{text!r:.80} has no {word}, and a {type(model).__name__} fills in masks: write one for each token"
        )
    pieces = [tokenizer.encode(part, bos=False) for part in parts]
    frame = tokenizer.encode("", framed=True)
    before, after = frame[: len(frame) // 2], frame[len(frame) // 2 :]
    tokens = torch.tensor([[*before, *joined_around(pieces, [mask] * (len(parts) - 1)), *after]])
    tokens = tokens.to(next(model.parameters()).device)
    was_training = model.training
    model.eval()
    while bool((tokens == mask).any()):
        logits = model(tokens).logits[0]
        logits[:, mask] = -torch.inf
        best = logits.log_softmax(-1).max(-1)
        at = int(best.values.masked_fill(tokens[0] != mask, -torch.inf).argmax())
        tokens[0, at] = best.indices[at]
    model.train(was_training)
    return tokenizer.decode(tokens[0, len(before) : tokens.shape[1] - len(after)].tolist())


__all__ = ["joined_around", "masks_filled"]
