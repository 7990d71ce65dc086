"""What holds for every mechanism: empty rows, permutations, sums of weights, weights on demand, gradients, precision."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    GEOMETRY_SPECS,
    POSITION_SPECS,
    SELECTION_SPECS,
    SITUATIONS,
    Situation,
    assert_agree,
    every,
    gradients,
    inputs,
    joined,
    state_for,
    trained,
)

from regard import Causal, Padding, State, attend, inspect, parse
from regard.attention.reference import attend_plainly

SELECTIONS_AND_GEOMETRIES = [*every(SELECTION_SPECS), *every(GEOMETRY_SPECS)]
LINES = [*SELECTIONS_AND_GEOMETRIES, *every(POSITION_SPECS), "trace(gamma=0.3) | rope", "additive | alibi"]


def posed(line: str, situation: Situation):
    spec = parse(line)
    return spec, *inputs(situation), state_for(spec, situation)


@pytest.mark.parametrize("line", LINES)
def test_row_with_nothing_allowed_gives_zeros_and_is_not_accepted(line):
    situation = Situation(batch=3)
    spec, q, k, v, state = posed(line, situation)
    q = q.requires_grad_()
    allow = Causal() & Padding(torch.tensor([7, 0, 7]))
    allow = allow & (torch.arange(7) != 4).view(7, 1)
    seen = inspect(q, k, v, spec, allow=allow, state=state)
    half = seen.output.chunk(2, -1)[0] if spec.selection.name == "energy" else seen.output
    for found in (half, attend_plainly(q, k, v, spec, allow=allow, state=state).output[..., : half.shape[-1]]):
        assert found.isfinite().all()
        assert not found[1].any()
        assert not found[:, :, 4].any()
        assert found[0].any()
    assert not seen.accepted[1].any()
    assert not seen.accepted[:, :, 4].any()
    assert not seen.support[1].any()
    (grad,) = gradients(half, [q])
    assert grad.isfinite().all()
    assert not grad[1].any()


@pytest.mark.parametrize("line", LINES)
def test_no_rows_and_no_keys_are_no_error(line):
    for sizes in ({"queries": 0, "keys": 5}, {"queries": 3, "keys": 0}, {"batch": 0}):
        situation = Situation(**sizes)
        spec, q, k, v, state = posed(line, situation)
        if not situation.suits(spec):
            continue
        seen = inspect(q, k, v, spec, state=state)
        assert seen.output.shape[:3] == q.shape[:3]
        assert not seen.output.any()
        assert seen.weights().shape == (*q.shape[:3], k.shape[2])
        for found in (seen.accepted, seen.support, seen.effective):
            assert found.shape == q.shape[:3]
            assert not found.any()


ORDERLESS = [line for line in SELECTIONS_AND_GEOMETRIES if not (parse(line).inner.carries or parse(line).inner.ordered)]


@pytest.mark.parametrize("line", ORDERLESS)
def test_permuted_keys_change_nothing_and_permuted_queries_permute(line):
    situation = SITUATIONS["causal"]
    spec, q, k, v, state = posed(line, situation)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    whole = attend(q, k, v, spec, state=state)
    if spec.selection.name == "energy":
        assert_agree(attend(q[:, :, order], k[:, :, order], None, spec), whole[:, :, order])
        return
    shuffled = attend(q, k[:, :, order], v[:, :, order], spec, state=state)
    assert_agree(shuffled, whole[..., order] if spec.selection.name == "pointer" else whole)
    assert_agree(attend(q[:, :, order], k, v, spec, state=state), whole[:, :, order])


@pytest.mark.parametrize("line", [line for line in every(SELECTION_SPECS) if parse(line).inner.carries])
def test_a_selection_that_carries_reads_its_rows_in_order(line):
    spec, q, k, v, state = posed(line, SITUATIONS["causal"])
    backwards = attend(q.flip(2), k, v, spec, state=state).flip(2)
    assert (backwards - attend(q, k, v, spec, state=state)).abs().max() > 1e-2


@pytest.mark.parametrize("line", [line for line in every(SELECTION_SPECS) if parse(line).inner.ordered])
def test_a_selection_whose_keys_have_an_order_reads_them_in_it(line):
    spec, q, k, v, state = posed(line, SITUATIONS["causal"])
    whole = attend(q, k, v, spec, state=state)
    assert (attend(q, k.flip(2), v.flip(2), spec, state=state) - whole).abs().max() > 1e-2
    assert_agree(attend(q.flip(2), k, v, spec, state=state).flip(2), whole)


@pytest.mark.parametrize("situation", ["causal", "padded", "empty rows"])
@pytest.mark.parametrize("line", SELECTIONS_AND_GEOMETRIES)
def test_weights_are_a_choice(line, situation):
    spec, q, k, v, state = posed(line, SITUATIONS[situation])
    allow = SITUATIONS[situation].allow(7, 7)
    seen = inspect(q, k, v, spec, allow=allow, state=state)
    weights = seen.weights()
    total = weights.sum(-1)
    if not spec.inner.signed:
        assert (weights >= 0).all()
        assert (total <= 1 + 1e-9).all()
    slotted = "self_token" in line or "null_slot" in line
    if spec.inner.sums_to_one and spec.refusal is None and not slotted:
        assert_agree(total, seen.accepted.to(total.dtype))
        assert seen.accepted.any()
    assert torch.equal(seen.support, (weights != 0).sum(-1))
    assert ((seen.effective <= seen.support + 1e-6) | (seen.support == 0)).all()


@pytest.mark.parametrize("situation", ["gqa", "empty rows", "windowed"])
@pytest.mark.parametrize("line", LINES)
def test_weights_on_demand_are_the_plain_weights_and_change_no_output(line, situation):
    s = SITUATIONS[situation]
    spec, q, k, v, state = posed(line, s)
    if not s.suits(spec):
        s = SITUATIONS["causal"]
        spec, q, k, v, state = posed(line, s)
    allow = s.allow(s.queries, s.keys)
    plain = attend_plainly(q, k, v, spec, allow=allow, state=state)
    seen = inspect(q, k, v, spec, allow=allow, state=state)
    before = seen.output.clone()
    assert_agree(seen.weights(), plain.weights)
    assert_agree(seen.weights(rows=[5, 0, -1], heads=[-1, 0]), plain.weights[:, [s.heads - 1, 0]][:, :, [5, 0, s.queries - 1]])
    assert_agree(seen.weights(rows=slice(1, 4), heads=slice(1, None)), plain.weights[:, 1:, 1:4])
    assert torch.equal(seen.accepted, plain.accepted)
    assert torch.equal(seen.output, before)
    assert torch.equal(attend(q, k, v, spec, allow=allow, state=state), before)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("line", every(SELECTION_SPECS))
def test_weights_of_a_late_row_in_a_late_tile(line):
    situation = Situation(queries=37, keys=37, heads=2, key_heads=2)
    spec, q, k, v, state = posed(line, situation)
    plain = attend_plainly(q, k, v, spec, allow=Causal(), state=state)
    seen = inspect(q, k, v, spec, allow=Causal(), state=state)
    assert_agree(seen.weights(rows=[35, 2]), plain.weights[:, :, [35, 2]])
    assert torch.equal(seen.accepted, plain.accepted)


SPARSE = ("sparsemax", "entmax(1.5)", "entmax(2.5)", "entmax(learned)", "topk(3)", "pointer(sparsemax)", "abstain(topk(2)")
STRAIGHT_THROUGH = ("hard", "gd", "monotonic(mode=hard)")
SMOOTH = [
    line
    for line in SELECTIONS_AND_GEOMETRIES
    if not line.startswith(STRAIGHT_THROUGH) or "keep=all" in line
]  # fmt: skip


@pytest.mark.parametrize("line", SMOOTH)
def test_gradcheck_on_a_case_that_is_not_trivial(line):
    tiny = Situation(batch=1, heads=2, key_heads=2, queries=5, keys=5)
    spec = parse(line)
    q, k, v = inputs(tiny, width=4, value_width=2)
    state, leaves = trained(state_for(spec, tiny, width=4, value_width=2))
    weights = attend_plainly(q, k, v, spec, allow=Causal(), state=state).weights
    seen = weights[:, :, 2:].detach()
    allowed = torch.ones(5, 5).tril().bool()[2:].expand_as(seen)
    assert ((seen > 0.01) & (seen < 0.99)).any(), "every row is a constant: its gradient would say nothing"
    if line.startswith(SPARSE):
        assert (seen[allowed] == 0).any()
    needed = {id(x) for x in leaves}
    parts = [x.requires_grad_() for x in (q, k, v)]
    used = [
        x for x, g in zip(leaves, gradients(attend(q, k, v, spec, allow=Causal(), state=state), leaves), strict=True) if g.any()
    ]
    assert all(id(x) in needed for x in used)
    assert torch.autograd.gradcheck(
        lambda *_: attend(q, k, None if spec.selection.name == "energy" else v, spec, allow=Causal(), state=state),
        (*parts, *used),
        atol=1e-5,
        rtol=1e-4,
    )


@pytest.mark.parametrize("line", ["hard", "hard(tie=right)"])
def test_hard_has_the_gradient_of_softmax_on_q_and_k(line):
    q, k, v = (x.requires_grad_() for x in inputs(SITUATIONS["causal"]))
    hard, soft = attend(q, k, v, line, allow=Causal()), attend(q, k, v, "softmax", allow=Causal())
    assert (hard - soft).abs().max() > 0.1
    for found, expected in zip(gradients(hard, [q, k]), gradients(soft, [q, k]), strict=True):
        assert_agree(found, expected)


def test_gd_has_the_gradient_of_its_relaxed_form():
    q, k, v = (x.requires_grad_() for x in inputs(SITUATIONS["causal"]))
    nearest, relaxed = (attend(q, k, v, f"gd(beta=0.4, keep={keep})", allow=Causal()) for keep in ("nearest", "all"))
    assert (nearest - relaxed).abs().max() > 0.1
    for found, expected in zip(gradients(nearest, [q, k]), gradients(relaxed, [q, k]), strict=True):
        assert_agree(found, expected)


@pytest.mark.parametrize("line", LINES)
def test_float32_follows_float64(line):
    situation = SITUATIONS["gqa"] if "energy" not in line else SITUATIONS["causal"]
    spec, q, k, v, state = posed(line, situation)
    exact = attend(q, k, v, spec, allow=Causal(), state=state)
    single = attend(q.float(), k.float(), v.float(), spec, allow=Causal(), state=state)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("line", LINES)
def test_bfloat16_errs_at_most_twice_as_much_as_torch(line):
    """The truth is float64 on the same rounded inputs; the yardstick is what torch's own bfloat16 attention loses."""
    situation = Situation(heads=4, key_heads=4, queries=61, keys=61)
    spec = parse(line)
    q, k, v = inputs(situation, width=18, value_width=18, dtype=torch.bfloat16)
    exact_state = state_for(spec, situation, width=18, value_width=18, dtype=torch.bfloat16)
    truth = attend(q.double(), k.double(), v.double(), spec, allow=Causal(), state=as_double(exact_state))
    found = attend(q, k, v, spec, allow=Causal(), state=exact_state)
    own = F.scaled_dot_product_attention(q, k, v, is_causal=True).double()
    own_truth = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    assert found.dtype == torch.bfloat16
    size = truth.square().mean().sqrt() / own_truth.square().mean().sqrt()
    mean_error = (found.double() - truth).square().mean().sqrt()
    assert mean_error <= 2 * (own - own_truth).square().mean().sqrt() * size.clamp_min(1)


def as_double(state: State) -> State:
    made, leaves = trained(state)
    for x in leaves:
        x.data = x.data.double()
        x.requires_grad_(False)
    return replace(made)


@pytest.mark.parametrize("line", LINES)
def test_nothing_the_caller_gave_is_changed(line):
    situation = SITUATIONS["empty rows"]
    spec, q, k, v, state = posed(line, situation)
    kept = [x.clone() for x in (q, k, v)]
    state, leaves = trained(state)
    held = [x.detach().clone() for x in leaves]
    gradients(attend(q, k, v, spec, allow=situation.allow(7, 7), state=state), leaves)
    assert all(torch.equal(a, b) for a, b in zip((q, k, v, *leaves), (*kept, *held), strict=True))


def test_the_combination_of_every_pair_is_run_or_refused_with_a_reason():
    refused = [(g, s) for g in every(GEOMETRY_SPECS) for s in every(SELECTION_SPECS) if joined(g, s) is None]
    for geometry, selection in refused:
        with pytest.raises(ValueError, match=r"gd measures|energy is the gradient|monotonic walks|hopfield|linear maps"):
            parse(f"{geometry} | {selection}")
    assert 0 < len(refused) < len(every(GEOMETRY_SPECS)) * len(every(SELECTION_SPECS)) / 2
