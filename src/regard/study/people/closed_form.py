"""The trace that comes nearest, in closed form: the symmetric S whose outputs are nearest to those with the history in the context.

    f_ij = ⟨S, M_ij⟩,  M_ij = q̂k̂ᵀ + k̂q̂ᵀ − k̂k̂ᵀ          what a trace adds to a score: linear in S
    J(S)_i = Σ_j a_ij f_ij (v_j − o_i)                  what that adds to an output, to first order
    J*(R) = QᵀGK + KᵀGᵀQ − Kᵀdiag(Gᵀ1)K                 G_ij = a_ij ⟨v_j − o_i, R_i⟩
    S = (J*J + λ)⁻¹ J*(gap)                             by conjugate gradients; gap_i = (o_i with the history) − o_i

`Rows` are the queries of one text in one layer of a run. In a run with the history in the context nothing is missing below that layer, and
the history is hidden in this layer alone; a run without it is set against the outputs of the other by its field `wanted`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from ...errors import NumericsError
from ...identity.experience import Experience
from ...identity.read.layer import LayerRead

LARGEST_BIAS = 3.0
"""Of a fitted slot, either way: a slot counts for e³ tokens at most."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Queries of one layer (those of a group's heads one after another), the tokens that they see, and those that are hidden from them."""

    q: Float[Tensor, "G R D"]
    """Unit vectors, not turned."""
    k: Float[Tensor, "G K D"]
    v: Float[Tensor, "G K D"]
    score: Float[Tensor, "G R K"]
    """Of the visible tokens; −inf for those that stand later."""
    hidden_score: Float[Tensor, "G R M"]
    hidden_v: Float[Tensor, "G M D"]
    wanted: Float[Tensor, "G R D"]
    """The outputs with the history in the context."""

    @property
    def weights(self) -> Float[Tensor, "G R K"]:
        return self.score.softmax(-1)

    @property
    def out(self) -> Float[Tensor, "G R D"]:
        return self.weights @ self.v

    def added(self, S: Float[Tensor, "G D D"]) -> Float[Tensor, "G R K"]:
        """f: what a trace adds to each score."""
        return 2 * (self.q @ S) @ self.k.mT - ((self.k @ S) * self.k).sum(-1)[:, None]

    def moved(self, S: Float[Tensor, "G D D"]) -> Float[Tensor, "G R D"]:
        """The outputs under a trace, as the model would compute them."""
        return (self.score + self.added(S)).softmax(-1) @ self.v


@dataclass(frozen=True, eq=False)
class FirstOrder:
    """J and its adjoint at S = 0, for each key head."""

    rows: Rows
    weights: Float[Tensor, "G R K"]
    out: Float[Tensor, "G R D"]

    @classmethod
    def of(cls, rows: Rows) -> FirstOrder:
        return cls(rows, rows.weights, rows.out)

    def __call__(self, S: Float[Tensor, "G D D"]) -> Float[Tensor, "G R D"]:
        shifted = self.weights * self.rows.added(S)
        return shifted @ self.rows.v - shifted.sum(-1, keepdim=True) * self.out

    def adjoint(self, R: Float[Tensor, "G R D"]) -> Float[Tensor, "G D D"]:
        q, k = self.rows.q, self.rows.k
        G = self.weights * (R @ self.rows.v.mT - (R * self.out).sum(-1, keepdim=True))
        pairs = q.mT @ G @ k
        return pairs + pairs.mT - k.mT @ (G.sum(1)[..., None] * k)


@dataclass(frozen=True, eq=False)
class Solution:
    S: Float[Tensor, "G D D"]
    residual: float
    """|b − (J*J + λ)S| / |b|, of the worst head, computed anew at the end."""
    steps: int


def nearest_trace(rows: Rows, ridge: float, tolerance: float = 1e-10, longest: int = 3000) -> Solution:
    """The S of each key head. λ is `ridge` times the curvature of J*J along its first step."""
    J = FirstOrder.of(rows)
    b = J.adjoint(rows.wanted - rows.out)
    strength = ridge * _dot(J(b), J(b)) / _dot(b, b)

    def normal(S: Tensor) -> Tensor:
        return J.adjoint(J(S)) + strength * S

    S, steps = conjugate_gradients(normal, b, tolerance, longest)
    residual = float((_dot(b - normal(S), b - normal(S)) / _dot(b, b)).sqrt().max())
    return Solution(S, residual, steps)


def conjugate_gradients(
    normal: Callable[[Tensor], Tensor], b: Float[Tensor, "G D D"], tolerance: float, longest: int
) -> tuple[Tensor, int]:
    """S with normal(S) = b, for each head by itself; a head that has arrived waits for the others."""
    solution = torch.zeros_like(b)
    rest, way = b.clone(), b.clone()
    size = first = _dot(b, b)
    for step in range(1, longest + 1):
        ahead = normal(way)
        # A head that has arrived divides nothing by nothing.
        pace = torch.where(size > 0, size / _dot(way, ahead).clamp_min(1e-300), 0.0)
        solution, rest = solution + pace * way, rest - pace * ahead
        before, size = size, _dot(rest, rest)
        if bool((size <= (tolerance / 4) ** 2 * first).all()):
            return solution, step
        way = rest + torch.where(before > 0, size / before.clamp_min(1e-300), 0.0) * way
    raise NumericsError(f"after {longest} steps a residual of {float((size / first).sqrt().max()):.1e} is left; a larger ridge needs fewer")  # fmt: skip


def _dot(a: Tensor, b: Tensor) -> Float[Tensor, "G 1 1"]:
    return (a * b).sum((-2, -1), keepdim=True)


def rows_of(e: Experience, layer: int, visible: Bool[Tensor, " N"], asks: Bool[Tensor, " N"]) -> Rows:
    """The queries at `asks` in one layer of a run, with the tokens that are not `visible` hidden from them."""
    q, k, v = (x[layer].double() for x in (e.q, e.k, e.v))
    turned_q, turned_k = (e.body.turned(layer, x[layer]).double() for x in (e.q, e.k))
    G, D = k.shape[0], k.shape[-1]
    places = torch.arange(len(e))
    score = (turned_q[:, asks].reshape(G, -1, D) @ turned_k.mT) * e.body.scales[layer]
    later = (places[None] > places[asks][:, None]).repeat(q.shape[0] // G, 1)
    score = score.masked_fill(later, -math.inf)
    return Rows(
        F.normalize(q[:, asks], dim=-1).reshape(G, -1, D), F.normalize(k[:, visible], dim=-1), v[:, visible],
        score[..., visible], score[..., ~visible], v[:, ~visible], score.softmax(-1) @ v,
    )  # fmt: skip


def left_over(rows: Rows, outputs: Float[Tensor, "G R D"]) -> float:
    """The share of |gap|² that these outputs leave: 1 for doing nothing, 0 for the outputs with the history in the context."""
    return float((rows.wanted - outputs).square().sum() / (rows.wanted - rows.out).square().sum())


def nearest_in_hull(rows: Rows, steps: int = 300) -> Float[Tensor, "G R D"]:
    """The nearest mixture of visible values to what is wanted, whatever the weights: by accelerated projected gradients, row by row.

    No score of any kind can do better, as every output is such a mixture.
    """
    wanted, seen = rows.wanted, torch.isfinite(rows.score)
    pace = 1 / torch.linalg.matrix_norm(rows.v, ord=2).square()[:, None, None]
    a = ahead = rows.weights
    momentum = 1.0
    for _ in range(steps):
        before = a
        a = _on_simplex(ahead - pace * ((ahead @ rows.v - wanted) @ rows.v.mT), seen)
        faster = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        ahead, momentum = a + (momentum - 1) / faster * (a - before), faster
    return a @ rows.v


def _on_simplex(x: Tensor, seen: Tensor) -> Tensor:
    """The nearest weights that are not negative, sum to one, and are zero where nothing is seen."""
    top = x.masked_fill(~seen, -math.inf).sort(-1, descending=True).values
    count = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    over = (top.masked_fill(top == -math.inf, 0).cumsum(-1) - 1) / count
    last = ((top > over).sum(-1, keepdim=True) - 1).clamp_min(0)
    return ((x - over.gather(-1, last)) * seen).clamp_min(0)


@dataclass(frozen=True, eq=False)
class Slots:
    """A few hidden tokens of each key head: which, the log of how many each counts for, and what each says."""

    index: Tensor
    bias: Float[Tensor, "G m"]
    v: Float[Tensor, "G m D"]

    def read(self, rows: Rows) -> Float[Tensor, "G R D"]:
        """The outputs of these rows when these tokens are not hidden."""
        own = rows.hidden_score.gather(-1, self.index[:, None].expand(-1, rows.score.shape[1], -1)) + self.bias[:, None]
        return torch.cat([rows.score, own], -1).softmax(-1) @ torch.cat([rows.v, self.v], 1)


def fitted_slots(rows: Rows, count: int, ridge: float = 1e-3, steps: int = 300) -> Slots:
    """The hidden tokens of highest use, √(mean a²); their biases by least squares of the weight, their values by ridge of the outputs."""
    every = torch.cat([rows.score, rows.hidden_score], -1).softmax(-1)
    weights = every[..., rows.score.shape[-1] :]
    index = weights.square().mean(1).topk(count).indices
    chosen = weights.gather(-1, index[:, None].expand(-1, weights.shape[1], -1))
    together = weights.sum(-1, keepdim=True)
    bounds = (math.exp(-LARGEST_BIAS), math.exp(LARGEST_BIAS))
    w = torch.ones(*index.shape, 1, dtype=weights.dtype)
    gram = chosen.mT @ chosen
    pace = 1 / torch.linalg.matrix_norm(gram, ord=2)[:, None, None].clamp_min(1e-12)
    for _ in range(steps):
        w = (w - pace * (gram @ w - chosen.mT @ together)).clamp(*bounds)
    slots = Slots(index, w[..., 0].log(), rows.hidden_v.gather(1, index[..., None].expand(-1, -1, rows.v.shape[-1])))
    share = chosen * w.mT
    share = share / (1 - together + share.sum(-1, keepdim=True))
    gram = share.mT @ share
    damped = gram + ridge * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * torch.eye(count, dtype=gram.dtype)
    more = torch.linalg.solve(damped, share.mT @ (rows.wanted - slots.read(rows)))
    return Slots(index, slots.bias, slots.v + more)


def trace_read(S: Float[Tensor, "G D D"], scale: float) -> LayerRead:
    """S as a layer reads it, of full rank: its eigenvectors, and the signs of its eigenvalues for each head."""
    values, vectors = torch.linalg.eigh(S)
    left = (vectors * values.abs().sqrt()[:, None]).mT
    return LayerRead(scale, left=left[None].float(), signs=values.sign()[None].float())
