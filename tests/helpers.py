"""What the tests share: an example spec for every row of the tables, situations, states, and one tolerance.

Sizes are small and mostly prime: a transposed axis then fails instead of passing by luck.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from regard import Additive, Allow, Causal, CombinationError, LowRank, Padding, Self, Spec, State, Window, attend, parse
from regard.attention.reference import attend_plainly

F64 = torch.float64
D, E, S, HIDDEN, RANK = 6, 5, 3, 7, 2

GEOMETRY_SPECS: dict[str, list[str]] = {
    "dot": ["dot", "dot(scale=0.7)"],
    "cosine": ["cosine(temperature=0.3)", "cosine(temperature=learned)"],
    "euclidean": ["euclidean", "euclidean(scale=0.8)"],
    "trace": ["trace(gamma=0.3)", "trace(gamma=0.4, norm=unit)", "trace(base=none)"],
    "additive": ["additive"],
    "rbf": ["rbf", "rbf(gamma=0.3)"],
    "polynomial": ["polynomial", "polynomial(degree=4, constant=0.5)"],
    "self_conditioned": [
        f"self_conditioned(form={form})"
        for form in ("uniform", "temperature", "key_bias", "low_rank", "self_token", "null_slot")
    ],
    "affect": ["affect"],
}
SELECTION_SPECS: dict[str, list[str]] = {
    "softmax": ["softmax", "softmax(0.5)", "softmax(learned)"],
    "sparsemax": ["sparsemax"],
    "entmax": ["entmax(1.5)", "entmax(1.2)", "entmax(2.5)", "entmax(learned)"],
    "topk": ["topk(3)"],
    "hard": ["hard", "hard(tie=right)"],
    "pointer": ["pointer", "pointer(sparsemax)"],
    "monotonic": ["monotonic", "monotonic(mode=hard)"],
    "hopfield": ["hopfield", "hopfield(steps=3)"],
    "energy": ["energy"],
    "gd": ["gd", "gd(coherence=0.2)", "gd(alpha=0.7, beta=0.5, coherence=0.2, keep=all, tau=2.0)"],
    "selective": ["selective"],
    "linear": [
        "linear",
        "linear(decay=0.8)",
        "linear(map=exp, features=16)",
        "linear(map=exp, features=5, decay=0.9, seed=3)",
        "linear(map=identity)",
        "linear(map=identity, delta=0.7, decay=0.9)",
        "linear(delta=1)",
        "linear(map=exp, features=7, delta=0.5)",
    ],
    "abstain": [
        "abstain(softmax, null_logit=0.3)",
        "abstain(softmax(0.7), null_logit=0.5)",
        "abstain(entmax(1.5), threshold=0.1)",
        "abstain(topk(2), null_logit=0)",
        "abstain(selective, null_logit=0.2)",
        "abstain(selective, threshold=-0.5)",
    ],
}
POSITION_SPECS: dict[str, list[str]] = {
    "sinusoidal": ["sinusoidal"],
    "learned": ["learned"],
    "rope": ["rope", "rope(fraction=0.7, layout=interleaved)"],
    "alibi": ["alibi"],
    "relative": ["relative", "relative(buckets=8, max_distance=5, direction=past)"],
}


def every(specs: dict[str, list[str]]) -> list[str]:
    return [line for lines in specs.values() for line in lines]


def joined(*parts: str) -> Spec | None:
    """The spec of these parts, or None where they have no meaning together."""
    try:
        return parse(" | ".join(p for p in parts if p))
    except CombinationError:
        return None


@dataclass(frozen=True)
class Situation:
    """Shapes and a rule; `allow` is made for the number of queries and keys."""

    heads: int = 3
    key_heads: int = 3
    queries: int = 7
    keys: int = 7
    batch: int = 2
    allow: Callable[[int, int], Allow | Tensor | None] = lambda Q, K: None

    def suits(self, spec: Spec) -> bool:
        """Energy moves tokens that are both queries and keys; absolute places count from 0."""
        if spec.selection.name == "energy" and (self.heads, self.queries) != (self.key_heads, self.keys):
            return False
        return not (spec.position.name in ("learned", "sinusoidal") and self.queries > self.keys)


def _with_empty_rows(Q: int, K: int) -> Tensor:
    mask = torch.rand(2, 1, Q, K, generator=torch.Generator().manual_seed(3)) < 0.6
    mask[0, :, 0] = False
    mask[1, :, -2:] = False
    return mask


SITUATIONS: dict[str, Situation] = {
    "causal": Situation(allow=lambda Q, K: Causal()),
    "padded": Situation(allow=lambda Q, K: Padding(torch.tensor([K - 2, 3]))),
    "left-padded": Situation(allow=lambda Q, K: Causal() & Padding(torch.tensor([K, K - 3]), side="left")),
    "windowed": Situation(allow=lambda Q, K: Causal() & Window(3)),
    "cross": Situation(queries=3, keys=11),
    "gqa": Situation(heads=4, key_heads=2, allow=lambda Q, K: Causal()),
    "empty rows": Situation(allow=_with_empty_rows),
    "one key": Situation(queries=3, keys=1),
    "one query": Situation(queries=1, keys=5, heads=4, key_heads=2, allow=lambda Q, K: Causal()),
    "fewer queries": Situation(queries=5, keys=7, allow=lambda Q, K: Causal()),
    "more queries": Situation(queries=7, keys=5, heads=4, key_heads=1, allow=lambda Q, K: Causal()),
}


def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = F64) -> Tensor:
    return (torch.randn(*shape, dtype=torch.float64) * scale).to(dtype)


def inputs(s: Situation, width: int = D, value_width: int = E, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor, Tensor]:
    q = random(s.batch, s.heads, s.queries, width, dtype=dtype)
    k = random(s.batch, s.key_heads, s.keys, width, dtype=dtype)
    return q, k, random(s.batch, s.key_heads, s.keys, value_width, dtype=dtype)


def full_state(s: Situation, width: int = D, value_width: int = E, dtype: torch.dtype = F64, buckets: int = 32) -> State:
    """Every tensor that a mechanism can ask for."""
    H, G = s.heads, s.key_heads
    weights = {
        "u": random(H, S), "w": random(H, S, scale=0.3), "t": random(H, S, scale=0.3), "U": random(G, width, S, scale=0.3),
        "A": random(H, width, RANK), "B": random(RANK, S), "C": random(H, RANK, width, scale=0.3),
        "W_k": random(G, width, S), "W_v": random(G, value_width, S),
    }  # fmt: skip
    return State(
        trace=random(G, width, width, scale=0.2, dtype=dtype),
        self=Self(random(S, dtype=dtype), {n: w.to(dtype) for n, w in weights.items()}),
        additive=Additive(*(x.to(dtype) for x in (random(H, HIDDEN), random(H, HIDDEN, width), random(H, HIDDEN, width)))),
        alpha=torch.linspace(1.2, 2.3, H, dtype=dtype),
        temperature=torch.linspace(0.5, 2.0, H, dtype=dtype),
        relative=random(buckets, H, dtype=dtype),
        positions=random(64, width, dtype=dtype),
    )


def state_for(spec: Spec, s: Situation, **sizes: int | torch.dtype) -> State:
    return full_state(s, buckets=getattr(spec.position, "buckets", 32), **sizes)  # type: ignore[arg-type]


def trained(state: State) -> tuple[State, list[Tensor]]:
    """The same state with every tensor a leaf that asks for its gradient, and the leaves."""
    leaves: list[Tensor] = []

    def leaf(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        leaves.append(x.detach().clone().requires_grad_())
        return leaves[-1]

    trace = state.trace
    if isinstance(trace, LowRank):
        trace = LowRank(leaf(trace.left), leaf(trace.right), leaf(trace.signs))  # type: ignore[arg-type]
    me, additive = state.self, state.additive
    made = replace(
        state,
        trace=trace if isinstance(trace, LowRank) else leaf(trace),
        self=None if me is None else Self(leaf(me.s), {n: leaf(w) for n, w in me.weights.items()}),  # type: ignore[arg-type]
        additive=None if additive is None else Additive(leaf(additive.w), leaf(additive.w_q), leaf(additive.w_k)),  # type: ignore[arg-type]
        **{n: leaf(getattr(state, n)) for n in ("alpha", "temperature", "relative", "positions")},
    )
    return made, leaves


def assert_agree(actual: Tensor, expected: Tensor, rtol: float = 1e-7, atol: float = 1e-9) -> None:
    """The one tolerance of float64 comparisons."""
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def gradients(output: Tensor, leaves: list[Tensor], layout: Callable[[Tensor], Tensor] = lambda x: x) -> list[Tensor]:
    """Of a fixed random projection of the output; zeros where a leaf has no part in it."""
    if not output.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(5), dtype=output.dtype)
    found = torch.autograd.grad(output, leaves, layout(direction), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def assert_fast_is_plain(
    spec: Spec, s: Situation, state: State, leaves: list[Tensor], layout: Callable[[Tensor], Tensor] = lambda x: x
) -> None:
    """The backend that `attend` picks gives the plain definition's output and all its gradients.

    Inputs, mask and incoming gradient lie in memory as `layout` says.
    """
    q, k, v = (layout(x).detach().requires_grad_() for x in inputs(s))
    values = None if spec.selection.name == "energy" else v
    allow = s.allow(s.queries, s.keys)
    allow = layout(allow) if isinstance(allow, Tensor) else allow
    fast = attend(q, k, values, spec, allow=allow, state=state)
    plain = attend_plainly(q, k, values, spec, allow=allow, state=state).output
    assert_agree(fast, plain)
    wanted = [q, k, v, *leaves]
    for found, expected in zip(gradients(fast, wanted, layout), gradients(plain, wanted, layout), strict=True):
        assert_agree(found, expected, rtol=1e-6, atol=1e-8)


def _expanded(dim: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.narrow(dim, 0, 1).expand_as(x) if x.shape[dim] else x


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "transposed rows": lambda x: x.mT.contiguous().mT,
    "stepped": lambda x: torch.stack([x, torch.full_like(x, 9)], -1)[..., 0],
    "stepped rows": lambda x: torch.stack([x, torch.full_like(x, 9)], -2)[..., 0, :],
    "expanded batch": _expanded(0),
    "expanded heads": _expanded(1),
    "expanded rows": _expanded(2),
    "expanded width": _expanded(3),
    "offset": lambda x: torch.cat([torch.full_like(x[:, :, :1], 9), x], 2)[:, :, 1:] if x.shape[2] else x,
    "from the end": lambda x: torch.cat([x, torch.full_like(x, 9)], -1)[..., : -x.shape[-1]],
    "flipped": lambda x: x.flip(-1).contiguous().flip(-1),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "overlapping": lambda x: x.contiguous().as_strided(x.shape, (*x.contiguous().stride()[:2], 1, 1)) if x.numel() else x,
}
"""Ways in which four dimensions can lie in memory. An expanded or overlapping one repeats numbers of x; the others hold x."""


def iris_rows() -> tuple[Tensor, Tensor]:
    """150 flowers of 4 measures, each brought to mean 0 and deviation 1 as the published figures are, and their species."""
    with (Path(__file__).parent / "fixtures" / "iris.csv").open() as file:
        rows = [[float(x) for x in row] for row in list(csv.reader(file))[1:]]
    table = torch.tensor(rows, dtype=F64)
    measures = table[:, :4]
    return (measures - measures.mean(0)) / measures.std(0, unbiased=False), table[:, 4].long()
