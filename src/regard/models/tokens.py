"""The table of token embeddings, which says what is wrong with ids that it has no row for."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import ShapeError


class TokenTable(nn.Embedding):
    """`nn.Embedding` for token ids (B, N)."""

    def forward(self, input: Tensor) -> Tensor:  # torch calls it `input`
        try:
            return super().forward(input)
        except (IndexError, RuntimeError, TypeError) as error:
            # Asked only now: a look at every id before every step would cost more than it tells.
            refusal = id_refusal(input, self.num_embeddings)
            if refusal is None:
                raise
            raise ShapeError(refusal) from error


def has_ids(x: Tensor) -> bool:
    """True for whole numbers of any size; truth values are none."""
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def id_refusal(tokens: object, vocabulary: int) -> str | None:
    """Why these are no token ids of a vocabulary; None where they are."""
    if not isinstance(tokens, Tensor):
        return f"the tokens are {tokens!r:.60}; a model takes a tensor of token ids (B, N), such as torch.tensor([[1, 2]])"
    if tokens.dtype not in (torch.int64, torch.int32):
        return f"the tokens are {tuple(tokens.shape)} of {tokens.dtype}; token ids are integers (B, N), as tokens.long() gives"
    outside = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if outside.numel():
        return f"the tokens hold {int(outside[0])}; this model knows 0..{vocabulary - 1}: is the tokenizer another model's?"
    return None


__all__ = ["TokenTable", "has_ids", "id_refusal"]
