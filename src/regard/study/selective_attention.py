"""Selective attention: a token may decide that another is no longer needed, and what is no longer needed may leave the cache.

    F_ij = Σ_{l<i} [s⁰_lj]₊,   weights = softmax(s_ij − F_ij)        (Leviathan et al. 2025; no parameter is added)

s⁰ are the scores of the first head; nobody masks itself nor the first token. The paper says that this lowers the loss of language
models, solves *variable assignment* (x=3, y=1, x=5, …, x=?), and that the cache can be cut to a fraction, by dropping what is masked
most, at no loss. Here one-layer models learn variable assignment, an assignment being one token, and two-layer models learn text.

A cache of C tokens: whenever a token comes that would be one too many, the token with the largest F so far is dropped from that layer for
good. Its controls drop as many: the oldest, or any; the token itself and the first one always stay. The paper's extra loss term, which
presses the masks to be stronger, is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.allow import Causal, Mask
from ..models.blocks import Block, BlockContext, scale_residuals
from ..models.llama import Llama, LlamaConfig
from ..nn import Attention
from ..state import State
from .frame.figure import line_with_band
from .frame.study import Plant, Record, Size, Study
from .frame.verdict import Check, Verdict, interval, judged
from .tasks.sequences import text
from .tasks.training import IGNORED, Batch, built, fit, generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Dropping = Literal["masked", "oldest", "random"]
SPECS = {"selective": "dot | selective", "softmax": "dot | softmax"}
NAMES, VALUES = 4, 8
"""Variables, and what they may be; token n · VALUES + v assigns, NAMES · VALUES + n asks."""
ASSIGNED = 32
"""Assignments before the questions."""


def assignment(g: torch.Generator, rows: int, assigned: int) -> Batch:
    """Assignments, every variable at least once, and then each is asked for: what was its last value?"""
    names = torch.randint(NAMES, (rows, assigned), generator=g)
    first = torch.rand(rows, assigned, generator=g).argsort(1)[:, :NAMES]
    names.scatter_(1, first, torch.arange(NAMES).expand(rows, -1))
    values = torch.randint(VALUES, (rows, assigned), generator=g)
    asked = torch.rand(rows, NAMES, generator=g).argsort(1)
    places = torch.where(names[:, None] == asked[:, :, None], torch.arange(assigned), -1).amax(-1)
    tokens = torch.cat([names * VALUES + values, NAMES * VALUES + asked], 1)
    targets = torch.full_like(tokens, IGNORED)
    targets[:, assigned:] = values.gather(1, places)
    return Batch(tokens, targets)


def made(spec: str, vocabulary: int, width: int, depth: int, heads: int) -> Llama:
    """A small LLaMA with RoPE whose weights begin large enough to learn within a few hundred steps."""
    config = LlamaConfig(vocabulary, width, depth, heads, heads, 2 * width, tied=False, attention=f"{SPECS[spec]} | rope")
    model = config.build()
    scale_residuals(model.blocks, std=width**-0.5)
    torch.nn.init.normal_(model.embed.weight, std=0.5**0.5)
    return model


def masked_so_far(attention: Attention, x: Tensor) -> Tensor:
    """F (B, N, N): how strongly the tokens before i have masked token j."""
    at, scale = attention.spec.position, attention.spec.geometry.scale_for(attention.head_width)
    q, k = (at.apply(part(x).unflatten(-1, (attention.heads, -1))[..., :1, :].transpose(1, 2), 0, State())[:, 0] for part in (attention.q, attention.k))  # fmt: skip
    decided = torch.relu(q @ k.mT * (scale or 1.0)).tril(-1)
    decided[..., 0] = 0
    return decided.cumsum(-2) - decided


def surviving(priority: Tensor, size: int) -> Tensor:
    """(B, N, N): which tokens are in a cache of `size` when token i reads it. `priority` (B, N, N) says who is dropped first at i."""
    B, N, _ = priority.shape
    alive, rows = torch.zeros(B, N, dtype=torch.bool), list[Tensor]()
    for i in range(N):
        alive[:, i] = True
        if i >= size:
            candidates = priority[:, i].masked_fill(~alive, -torch.inf)
            candidates[:, 0] = candidates[:, i] = -torch.inf
            alive = alive.scatter(1, candidates.argmax(1, keepdim=True), False)
        rows.append(alive.clone())
    return torch.stack(rows, 1)


@torch.no_grad()
def pruned(model: Llama, tokens: Tensor, size: int, dropping: Dropping, seed: int) -> Tensor:
    """Logits of a model whose every layer has a cache of `size` tokens."""
    B, N = tokens.shape
    x, g = model.start(tokens), generator(seed)
    for block in cast(list[Block], list(model.blocks)):
        if dropping == "masked":
            priority = masked_so_far(block.attention, block.norm_1(x))
        elif dropping == "oldest":
            priority = -torch.arange(N, dtype=x.dtype).expand(B, N, N)
        else:
            priority = torch.rand(B, 1, N, generator=g).expand(B, N, N)
        keep = surviving(priority.clone(), size)
        x = block(x, BlockContext(Causal() & Mask(keep.unsqueeze(1))))[0]
    return model.readout(model.norm(x))
