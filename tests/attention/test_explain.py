"""The plan: which backend, why, what it costs; and that neither backend ever makes a Q × K tensor."""

from dataclasses import replace

import pytest
import torch
from helpers import GEOMETRY_SPECS, SELECTION_SPECS, E, Situation, every, inputs, parse, random, state_for
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard import Causal, Padding, State, Window, attend, explain, inspect

SITUATION = Situation(heads=2, key_heads=2)


def planned(line, allow=None, value_width=E, **state):
    q, k, v = inputs(SITUATION, value_width=value_width)
    return explain(q, k, v, line, allow=allow, state=State(**state) if state else state_for(parse(line), SITUATION))


@pytest.mark.parametrize(
    ("line", "allow", "backend", "because"),
    [
        ("dot", None, "sdpa", "torch's fused call"),
        ("dot | rope", Causal(), "sdpa", "the rule is the kernel's own"),
        ("cosine", None, "sdpa", "lowers to a bare dot product"),
        ("dot", Window(3), "flash", "chunks it empties are skipped"),
        ("dot", Padding(torch.tensor([3, 7])), "flash", "masks for chunks of rows"),
        ("euclidean", Causal(), "flash", "a bias per key"),
        ("trace", None, "flash", "lowers to a dot product, a bias per key"),
        ("self_conditioned(form=self_token)", None, "flash", "and a slot"),
        ("alibi", Causal(), "flash", "go by distance: one row of numbers, of which every mask is a view"),
        (
            "alibi",
            Causal() & Padding(torch.tensor([3, 7])),
            "flash",
            "adds a bias to each pair: made for chunks of rows, never for all",
        ),
        ("abstain(softmax, null_logit=0)", None, "flash", "null slot is a gate on the row's log-sum-exp"),
        ("hopfield(steps=2)", None, "sdpa", "torch's fused call"),
        ("sparsemax", None, "tiled", "is no softmax: tiles of query rows, made again in backward"),
        ("hard", None, "tiled", "one key per row"),
        ("energy", None, "tiled", "both sides of a gradient"),
        ("pointer", None, "tiled", "the weights themselves"),
        ("additive", None, "tiled", "no dot product"),
        ("abstain(softmax, threshold=0)", None, "tiled", "each row's largest score"),
        ("softmax(learned) | alibi", None, "tiled", "learned temperature divides the position bias"),
    ],
)
def test_backend_and_its_reason(line, allow, backend, because):
    plan = planned(line, allow)
    assert plan.backend == backend
    assert because in " ".join(plan.reasons)
    assert because in str(plan)


def test_a_trained_table_takes_the_backend_that_has_its_gradient():
    table = torch.zeros(32, 2, dtype=torch.float64)
    assert planned("relative", relative=table).backend == "flash"
    plan = planned("relative", relative=table.clone().requires_grad_())
    assert plan.backend == "tiled"
    assert "table is being trained" in str(plan)


def test_a_zero_trace_is_bypassed_and_says_so():
    plan = planned("trace", trace=torch.zeros(2, 6, 6))
    assert plan.backend == "sdpa"
    assert "bypassed, bit-identical to dot" in str(plan)


def test_explain_computes_nothing():
    q, k, v = inputs(SITUATION)
    state = state_for(parse("trace"), SITUATION)
    with Recorder() as seen:
        explain(q, k, v, "trace", state=state)
    assert seen.largest <= state.trace.numel()


def test_cost_grows_with_the_pairs_that_are_computed():
    q, k, v = inputs(Situation(queries=1024, keys=1024, batch=1, heads=1, key_heads=1))
    whole, causal, window = (explain(q, k, v, "sparsemax", allow=a) for a in (None, Causal(), Causal() & Window(64)))
    assert whole.pairs == 1.0
    assert 0.5 < causal.pairs < 0.75
    assert window.pairs < 0.35
    assert whole.flops > causal.flops > window.flops
    assert whole.bytes > 0
    assert "100% of Q × K" in str(whole)


def test_inspect_keeps_the_plan_of_the_call():
    q, k, v = inputs(SITUATION)
    assert inspect(q, k, v, "euclidean").plan == explain(q, k, v, "euclidean")


class Recorder(TorchDispatchMode):
    """The largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
        return out


LENGTH = 257
MADE = [
    *(line for line in every(SELECTION_SPECS) if not line.startswith("pointer")),
    *every(GEOMETRY_SPECS), "rope", "alibi", "relative", "sinusoidal", "learned", "trace(gamma=0.3) | rope",
]  # fmt: skip


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("allow", [None, Causal(), Causal() & Window(9)], ids=["all", "causal", "window"])
@pytest.mark.parametrize("line", MADE)
def test_no_tensor_of_queries_times_keys_is_made_forward_or_backward(line, allow):
    """257 tokens in tiles of 16 rows. The widest thing allowed is additive's tile of 16 × 257 × 7 hidden units."""
    spec = parse(line)
    situation = Situation(batch=1, heads=1, key_heads=1, queries=LENGTH, keys=LENGTH)
    q, k, v = (x.requires_grad_() for x in inputs(situation, width=4, value_width=2, dtype=torch.float32))
    state = replace(
        state_for(spec, situation, width=4, value_width=2, dtype=torch.float32),
        positions=random(LENGTH, 4, dtype=torch.float32),
    )
    with Recorder() as seen:
        out = attend(q, k, None if line == "energy" else v, spec, allow=allow, state=state)
        out.sum().backward()
    assert 0 < seen.largest < LENGTH * LENGTH


def test_the_recorder_would_see_one():
    q, k, v = (
        x.requires_grad_() for x in inputs(Situation(batch=1, heads=1, key_heads=1, queries=LENGTH, keys=LENGTH), width=4)
    )
    with Recorder() as seen:
        (torch.softmax(q @ k.mT, -1) @ v).sum().backward()
    assert seen.largest == LENGTH * LENGTH
    with Recorder() as seen:
        attend(q, k, v, "pointer")
    assert seen.largest >= LENGTH * LENGTH
