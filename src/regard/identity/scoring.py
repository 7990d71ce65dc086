"""How surprising an answer is to whoever would give it: −log p of its tokens, whatever of all that it may the prompt brings to mind.

    surprisal(model, prompt, "Porto", identity=mara, tokenizer=tokenizer)      nats of each token, (n)

    p(y) = Σ_u p(u) Π_t p(y_t | u, y_<t)        as `generate` draws an answer at temperature 1: first what comes to mind, then the words

A token's share is −log p(y_t | y_<t) under that sum: what was said of the answer so far says which u it is about.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import ShapeError
from ..models.base import Model
from ..models.decode.contrast import Contrasted, Pair, contrast_of, contrasted
from ..models.decode.generate import expect_decoder, prompt_rows
from ..models.decode.prepare import prepare
from ..models.decode.rows import Overrides, Rows, finished, rows_of
from ..models.decode.sampling import Sampling
from ..models.tokenizer import Tokenizer
from .read.recall import minds
from .speaking import overrides_of
from .state import Identity


@torch.no_grad()
def surprisal(
    model: Model,
    prompt: str | Sequence[int],
    answer: str | Sequence[int],
    *,
    tokenizer: Tokenizer,
    identity: Identity | None = None,
    contrast: float | None = None,
) -> Float[Tensor, " n"]:
    """Nats of each token of an answer; `contrast` is that of `Sampling`."""
    expect_decoder(model)
    asked = prompt_rows(prompt, tokenizer, model)[0]
    said = tokenizer.encode(answer, bos=False) if isinstance(answer, str) else prompt_rows(answer, tokenizer, model)[0]
    if not said:
        raise ShapeError("an empty answer has no surprise: give its words, or its tokens")
    every = [(identity, 1.0)] if identity is None else minds(model, identity, asked, tokenizer)
    rows, sampling = Contrasted(rows_of(prepare(model))), Sampling(contrast=contrast)
    logs = list[Tensor]()
    for who, p in every:
        overrides: Overrides = overrides_of(model, who)
        row = rows.open(overrides, len(asked) + len(said), contrast_of(overrides, sampling))
        each = log_probabilities(rows, row, finished(rows.read(row, asked)), said)
        logs.append(torch.tensor(p).log() + each.cumsum(0))
    so_far = torch.stack(logs).logsumexp(0)
    return -torch.diff(so_far, prepend=so_far.new_zeros(1))


def log_probabilities(rows: Contrasted, row: Pair, first: Tensor, tokens: Sequence[int]) -> Float[Tensor, " n"]:
    """Of tokens behind what a row has read, whose last logits are `first`; the row is then as it was."""
    logits = [first[None]]
    if len(tokens) > 1:
        each = [_along(rows.rows, one, tokens[:-1]) for one in (row.own, row.plain) if one is not None]
        logits.append(each[0] if row.plain is None else contrasted(each[0], each[1], row.contrast))
    return torch.cat(logits).float().log_softmax(-1).gather(-1, torch.tensor(list(tokens))[:, None])[:, 0]


def _along(rows: Rows[Any], row: Any, tokens: Sequence[int]) -> Tensor:
    """Logits behind each of these, which whatever is said instead then overwrites."""
    logits, before = list[Tensor](), copy(row)
    finished(rows.read(row, tokens, lambda x: logits.append(x.clone())))
    vars(row).update(vars(before))
    return torch.cat(logits)


__all__ = ["log_probabilities", "surprisal"]
