"""The selections whose rows depend on earlier rows, against SDPA: what walking in order costs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import regard

from .harness import Bench, Case, Reach, Row, inferred, qkv, trained

TITLE = "monotonic and selective"
REACHES = {"monotonic": Reach(10, "times"), "selective": None}


def cases(bench: Bench) -> list[Case]:
    return [
        Case(f"{spec}, {'forward + backward' if back else 'forward'}", lambda s=spec, b=back: _against_sdpa(bench, s, b))
        for spec in REACHES
        for back in (False, True)
    ]


def ours(spec: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return regard.attend(q, k, v, spec, allow=regard.Causal())


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def walk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """α_ij = p_ij (α_{i−1,j} + (1 − p_{i,j−1}) q_{i,j−1}), all rows along their diagonals at once, in float64."""
    scores = (q.double() @ k.double().mT * q.shape[-1] ** -0.5).masked_fill(_later(q), float("-inf"))
    p, N = torch.sigmoid(scores), q.shape[2]
    goes, reach = torch.sigmoid(-scores), torch.zeros_like(p)
    before = torch.zeros_like(p[:, :, 0])
    before[..., 0] = 1
    rows: list[Tensor] = []
    for i in range(N):
        # r_j = r_{j−1} g_{j−1} + b_j: in logs, and exact in float64 for scores as small as these.
        through = F.pad(goes[:, :, i].log().cumsum(-1), (1, -1))
        reach = torch.logcumsumexp(before.clamp_min(1e-300).log() - through, -1) + through
        before = p[:, :, i] * reach.exp()
        rows.append(before)
    return (torch.stack(rows, 2) @ v.double()).to(v.dtype)


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """s_ij − Σ_{l<i} [s⁰_lj]₊, where nobody masks itself nor the first token."""
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(_later(q), float("-inf"))
    decided = torch.relu(scores[:, 0]).masked_fill(torch.eye(q.shape[2], dtype=torch.bool), 0)
    decided[..., 0] = 0
    before = decided.cumsum(-2) - decided
    return torch.softmax(scores - before.unsqueeze(1), -1) @ v


def _later(q: Tensor) -> Tensor:
    return torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)


def _against_sdpa(bench: Bench, spec: str, back: bool) -> Row:
    x = qkv(bench.settings, 1024, grad=back)
    how = trained if back else inferred
    return bench.compare(
        spec,
        f"{'forward + backward' if back else 'forward'}, N={x[0].shape[2]}",
        "SDPA",
        how(lambda q, k, v: ours(spec, q, k, v), x),
        how(sdpa, x),
        None if back else REACHES[spec],
        truth=how(walk if spec == "monotonic" else masked, x),
    )
