"""The Routing Transformer's attention: queries and keys are clustered, and meet within their cluster (Roy et al. 2021).

Clusters are centroids on the unit sphere, one set per head, moved by online spherical k-means: in training, each call draws
every centroid a little toward the mean of the queries and keys nearest to it. Clusters look at content, so they are found
before RoPE turns anything. A query always meets its own position, whose key may lie in another cluster.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn

from ..attention.allow import Allow, Call, Tile, Window, rule
from ..attention.inspect import Attended
from ..attention.spec import Spec
from ..errors import CombinationError, ShapeError
from ..nn import Attention, Cache
from ..state import State


@dataclass(frozen=True, eq=False)
class SameCluster(Allow):
    """Pairs whose query and key are in one cluster, head by head."""

    queries: Int[Tensor, "B H Q"]
    keys: Int[Tensor, "B H K"]

    def tile(self, t: Tile) -> Tensor:
        return self.queries[..., t.start : t.stop].unsqueeze(-1) == self.keys[..., t.lo : t.hi].unsqueeze(-2)

    def check(self, call: Call) -> None:
        B, H, Q, K = call.B, call.H, call.Q, call.K
        if self.queries.shape != (B, H, Q) or self.keys.shape != (B, H, K):
            raise ShapeError(
                f"clusters of {tuple(self.queries.shape)} queries and {tuple(self.keys.shape)} keys; "
                f"the call has {(B, H, Q)} and {(B, H, K)}"
            )


class ClusteredAttention(Attention):
    def __init__(self, width: int, heads: int, spec: Spec, clusters: int, decay: float = 0.999) -> None:
        super().__init__(width, heads, spec)
        if self.inner.carries or self.v is None:
            raise CombinationError(
                f"{spec}: clusters choose which keys a query meets, and this needs them all, or has no values"
            )
        # A parameter, so that it is saved with the others, but no gradient moves it.
        self.centroids = nn.Parameter(F.normalize(torch.randn(heads, clusters, self.head_width), dim=-1), requires_grad=False)
        self.decay = decay

    def forward(
        self, x: Tensor, context: Tensor | None = None, *, allow: Allow | Tensor | None = None, state: State | None = None
    ) -> Tensor:
        return super().forward(x, context, allow=self._within(x, context, allow, learn=self.training), state=state)

    def inspect(
        self, x: Tensor, context: Tensor | None = None, *, allow: Allow | Tensor | None = None, state: State | None = None
    ) -> Attended:
        return super().inspect(x, context, allow=self._within(x, context, allow), state=state)

    def step(
        self, x: Tensor, cache: Cache | None = None, *, allow: Allow | Tensor | None = None, state: State | None = None
    ) -> tuple[Tensor, Cache]:
        """The cache carries the clusters of its keys: once turned by RoPE, a key no longer shows where it belongs."""
        cache = cache or Cache()
        q, k, _ = self._project(x, x)
        mine, new = self.nearest(q), self.nearest(k)
        keys = new if cache.carry is None else torch.cat([cache.carry, new], dim=-1)
        meets = rule(allow) & (SameCluster(mine, keys) | Window(1))
        out, grown = super().step(x, replace(cache, carry=None), allow=meets, state=state)
        return out, replace(grown, carry=keys)

    @torch.no_grad()
    def nearest(self, x: Tensor) -> Int[Tensor, "B H N"]:
        """The cluster of each vector: the centroid with the largest cosine."""
        return (F.normalize(x, dim=-1) @ self.centroids.mT).argmax(-1)

    def _within(self, x: Tensor, context: Tensor | None, allow: Allow | Tensor | None, learn: bool = False) -> Allow:
        q, k, _ = self._project(x, x if context is None else context)
        mine, keys = self.nearest(q), self.nearest(k)
        if learn:
            self._learn(torch.cat([q, k], dim=2), torch.cat([mine, keys], dim=2))
        return rule(allow) & (SameCluster(mine, keys) | Window(1))

    @torch.no_grad()
    def _learn(self, x: Tensor, cluster: Tensor) -> None:
        """One step of spherical k-means; a centroid with no vectors stays where it is."""
        member = F.one_hot(cluster, self.centroids.shape[1]).to(x.dtype)
        total = torch.einsum("bhnc,bhnd->hcd", member, F.normalize(x, dim=-1))
        moved = F.normalize(self.decay * self.centroids + (1 - self.decay) * F.normalize(total, dim=-1), dim=-1)
        self.centroids.copy_(torch.where(member.sum((0, 2)).unsqueeze(-1) > 0, moved, self.centroids))
