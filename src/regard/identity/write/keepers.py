"""What each token of an experience is worth keeping: one untrained measure after the other.

    shock        what surprised the model                         recency      the last tokens
    shock_next   that, or what came right before a surprise       random       any (the control)
    attention    H2O: attention gathered from all tokens so far   value_norm   |v|, summed over layers
    snapkv       attention received from the last 16 tokens       diversity    GD coverage: far in L2 from what is kept
    coverage     both at once: far from what is kept, and shocking

`imprints.py` has the table of all of them, with the learned one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ..experience import Experience

LAST_QUERIES = 16
TELLING = 0.2
"""What a spread of shock is worth against the log of a distance."""
Keeper = Callable[[Experience, int], Float[Tensor, " N"]]
"""An experience and a seed to the worth of each token."""


def shock(e: Experience, seed: int = 0) -> Tensor:
    return e.shock


def shock_next(e: Experience, seed: int = 0) -> Tensor:
    """A surprise is found again by what led to it: the token before it is worth as much."""
    return torch.maximum(e.shock, F.pad(e.shock[1:], (0, 1)))


def attention_mass(e: Experience, seed: int = 0) -> Tensor:
    """H2O: the attention that a token has gathered from everyone so far, itself included."""
    return e.attention.sum((0, 1))


def later_attention(e: Experience) -> Tensor:
    """Attention from later tokens alone; a feature of the learned scorer."""
    return e.attention.tril(-1).sum((0, 1))


def snapkv(e: Experience, seed: int = 0) -> Tensor:
    """Attention from the last queries, smoothed over seven neighbours as SnapKV pools."""
    mass = e.attention[:, -LAST_QUERIES:].sum((0, 1))
    return F.avg_pool1d(mass[None, None], 7, stride=1, padding=3, count_include_pad=False)[0, 0]


def recency(e: Experience, seed: int = 0) -> Tensor:
    return torch.arange(len(e), dtype=torch.float32)


def random(e: Experience, seed: int = 0) -> Tensor:
    return torch.rand(len(e), generator=torch.Generator().manual_seed(seed))


def value_norm(e: Experience, seed: int = 0) -> Tensor:
    return e.v.norm(dim=-1).sum((0, 1))


def diversity(e: Experience, seed: int = 0) -> Tensor:
    """Farthest first: GD takes the nearest key, so what no kept key is near to is what coverage lacks."""
    return covering(e, torch.zeros(len(e)))


def coverage(e: Experience, seed: int = 0) -> Tensor:
    said = e.shock[e.content]
    spread = said.std(correction=0).clamp_min(1e-6) if len(said) else torch.tensor(1.0)
    return covering(e, TELLING * e.shock / spread)


def covering(e: Experience, telling: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Farthest first, where every distance counts e^telling times: a token's worth is the log of it when its turn comes.

    What is taken only brings the others nearer, so worths fall in the order of the taking, and those of two experiences compare.
    """
    said = e.content.cpu().nonzero().flatten()
    weight = telling.cpu()[said]
    keys = F.normalize(e.k[:, :, said.to(e.k.device)].permute(2, 0, 1, 3).flatten(1).float(), dim=-1)
    apart = torch.cdist(keys, keys).cpu()
    near, left = torch.full((len(said),), 2.0), torch.ones(len(said), dtype=torch.bool)
    far_then = torch.zeros(len(said))
    for _ in range(len(said)):
        far = near.clamp_min(1e-6).log()
        best = int((far + weight.detach()).masked_fill(~left, float("-inf")).argmax())
        far_then[best], left[best] = far[best], False
        near = torch.minimum(near, apart[best])
    return torch.full((len(e),), float("-inf")).index_copy(0, said, far_then + weight)
