"""What others keep of a cache, each in one sum over layers and heads, since an imprint is a token in all of them.

    attention   H2O (arXiv 2306.14048)                  Σ_i a_ij                                 from everyone so far, itself included
    snapkv      SnapKV (arXiv 2404.14469)               Σ_{i in the last 16} a_ij                smoothed over seven neighbours
    keydiff     KeyDiff (arXiv 2504.15364)              −cos(k_j, mean_i k_i/|k_i|)              keys as RoPE turns them
    expected    Expected Attention (arXiv 2510.00636)   softmax_j(k_j·μ/√d + k_jᵀΣk_j/2d) |v_j|  μ, Σ of the turned queries
    criticalkv  CriticalKV (arXiv 2502.03805)           half by Σ_i a_ij, half by Σ_i a_ij |W_o v_j|₁
    kvzip       KVzip (arXiv 2505.23416)                max_i a_ij, i in the same text repeated after itself

Published, each chooses per head and knows the position of a key; here a slot is one token of all heads, and slots stand before the text,
so Expected Attention takes keys that are not turned, as they will be read. KVzip asks for a repetition in English before it; the text after
itself asks in no language. SnapKV looks at the question, which an identity cannot know: its last tokens are those of the history.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ..experience import Experience, attention_weights

LAST_QUERIES = 16


def attention_mass(e: Experience, seed: int = 0) -> Tensor:
    """H2O: the attention that a token has gathered from everyone so far, itself included."""
    return e.attention.sum((0, 1))


def snapkv(e: Experience, seed: int = 0) -> Tensor:
    """Attention from the last queries, smoothed over seven neighbours as SnapKV pools."""
    mass = e.attention[:, -LAST_QUERIES:].sum((0, 1))
    return F.avg_pool1d(mass[None, None], 7, stride=1, padding=3, count_include_pad=False)[0, 0]


def keydiff(e: Experience, seed: int = 0) -> Tensor:
    """A key that points elsewhere than the others do."""
    turned = torch.stack([e.body.turned(layer, k) for layer, k in enumerate(e.k)])
    mean = F.normalize(turned, dim=-1).mean(2, keepdim=True)
    return -F.cosine_similarity(turned, mean, dim=-1).sum((0, 1))


def expected_attention(e: Experience, seed: int = 0) -> Tensor:
    """The attention that queries like those of this text are expected to give, times the length of the value."""
    worth = torch.zeros(len(e), device=e.k.device)
    for layer, scale in enumerate(e.body.scales):
        q, k = e.body.turned(layer, e.q[layer]), e.k[layer].repeat_interleave(e.q.shape[1] // e.k.shape[1], 0)
        mean = q.mean(1, keepdim=True)
        spread = (q - mean).mT @ (q - mean) / q.shape[1]
        logits = scale * (k * mean).sum(-1) + 0.5 * scale**2 * ((k @ spread) * k).sum(-1)
        length = e.v[layer].norm(dim=-1).repeat_interleave(q.shape[0] // e.v.shape[1], 0)
        worth += (logits.softmax(-1) * length).sum(0)
    return worth


@torch.no_grad()
def criticalkv(e: Experience, seed: int = 0) -> Tensor:
    """In turns the best by attention and the best by what the attention moves, so that any budget has half of each."""
    mass = torch.zeros(len(e), device=e.k.device)
    moved = torch.zeros_like(mass)
    for layer in range(e.base.depth):
        received = attention_weights(e.body, layer, e.q[layer], e.k[layer]).sum(1)
        out = e.body.out_weight(layer).float().unflatten(1, (received.shape[0], -1))
        v = e.v[layer].repeat_interleave(received.shape[0] // e.v.shape[1], 0)
        mass += received.sum(0)
        moved += (received * torch.einsum("mhd,hnd->hnm", out, v).abs().sum(-1)).sum(0)
    said = e.content.nonzero().flatten().tolist()
    orders = [iter(sorted(said, key=lambda i: -float(x[i]))) for x in (mass, moved)]
    worth, taken = torch.full((len(e),), float("-inf")), set[int]()
    for n in range(len(said)):
        best = next(i for i in orders[n % 2] if i not in taken)
        taken.add(best)
        worth[best] = 1 - n / len(said)
    return worth


@torch.no_grad()
def kvzip(e: Experience, seed: int = 0) -> Tensor:
    """The most attention that a token receives while the model reads the same text again, nobody living in it."""
    N = len(e)
    twice = torch.cat([e.tokens, e.tokens])
    e.body.expect_room(len(twice))
    with e.body.read([None] * e.base.depth):
        _, heads = e.body.watched(twice)
    worth = torch.zeros(N, device=e.k.device)
    for layer, h in enumerate(heads):
        weights: Float[Tensor, "H M M"] = attention_weights(e.body, layer, h.q.float(), h.k.float())
        worth += weights[:, N:, :N].unflatten(0, (h.k.shape[0], -1)).amax((1, 2)).sum(0)
    return worth


__all__ = ["attention_mass", "criticalkv", "expected_attention", "keydiff", "kvzip", "snapkv"]
