"""Hypothesis over shapes, specs, masks and types: whatever fits runs, and runs as its definition."""

import torch
from helpers import (
    GEOMETRY_SPECS,
    POSITION_SPECS,
    SELECTION_SPECS,
    Situation,
    assert_agree,
    every,
    gradients,
    inputs,
    joined,
    state_for,
    trained,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from regard import attend, inspect
from regard.attention.reference import attend_plainly
from regard.nn import Attention

GEOMETRIES, SELECTIONS = st.sampled_from(every(GEOMETRY_SPECS)), st.sampled_from(every(SELECTION_SPECS))
POSITIONS = st.sampled_from(["", *every(POSITION_SPECS)])


@st.composite
def situations(draw) -> Situation:
    groups = draw(st.integers(1, 3))
    density, seed = draw(st.floats(0, 1)), draw(st.integers(0, 99))
    batch, heads = draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    per_batch, per_head, per_row = (draw(st.booleans()) for _ in range(3))

    def mask(Q: int, K: int) -> torch.Tensor:
        shape = (batch if per_batch else 1, heads if per_head else 1, Q if per_row else 1, K)
        return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density

    return Situation(heads, groups, draw(st.integers(1, 9)), draw(st.integers(1, 9)), batch, mask)


@settings(max_examples=250)
@given(situations(), GEOMETRIES, SELECTIONS, POSITIONS, st.integers(0, 99))
def test_any_mechanism_of_any_shape_under_any_mask_is_its_definition(situation, geometry, selection, position, seed):
    spec = joined(geometry, selection, position)
    assume(spec is not None and situation.suits(spec))
    torch.manual_seed(seed)
    state, leaves = trained(state_for(spec, situation))
    q, k, v = (x.requires_grad_() for x in inputs(situation))
    allow = situation.allow(situation.queries, situation.keys)
    plain = attend_plainly(q, k, v, spec, allow=allow, state=state)
    seen = inspect(q, k, v, spec, allow=allow, state=state)
    assert_agree(seen.output, plain.output)
    assert torch.equal(seen.accepted, plain.accepted)
    assert_agree(seen.weights(), plain.weights)
    wanted = [q, k, v, *leaves]
    for found, expected in zip(gradients(seen.output, wanted), gradients(plain.output, wanted), strict=True):
        assert_agree(found, expected, rtol=1e-6, atol=1e-8)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 7), st.booleans(), SELECTIONS)
def test_a_module_of_any_shape_keeps_the_shape_of_its_input(groups, per_group, width, length, bias, selection):
    heads = groups * per_group
    keys = heads if selection == "energy" else groups
    torch.manual_seed(0)
    module = Attention(heads * 2 * width, heads, selection, key_heads=keys, bias=bias)
    x = torch.randn(2, length, heads * 2 * width)
    out = module(x)
    assert out.shape == ((2, heads, length, length) if module.points else x.shape)
    out.sum().backward()
    assert module.k.weight.grad is not None or selection in ("monotonic(mode=hard)",)


@given(st.integers(1, 5), st.integers(1, 7), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_cross_attention_reads_a_context_of_another_width(queries, keys, dtype):
    torch.manual_seed(0)
    module = Attention(12, 3, "euclidean | entmax(1.5)", context_width=7).to(dtype)
    x, context = torch.randn(2, queries, 12, dtype=dtype), torch.randn(2, keys, 7, dtype=dtype)
    out = module(x, context)
    assert out.shape == x.shape
    assert out.dtype == dtype
    seen = module.inspect(x, context)
    assert seen.weights().shape == (2, 3, queries, keys)


def test_a_module_trains_what_its_spec_asks_for():
    for line, names in {
        "entmax(learned)": {"alpha"},
        "softmax(learned)": {"temperature"},
        "cosine(temperature=learned)": {"temperature"},
        "relative": {"relative"},
        "learned": {"positions"},
        "additive": {"w", "w_q", "w_k"},
        "self_conditioned(form=low_rank)": {"self_A", "self_B", "self_C"},
        "dot": set(),
    }.items():
        assert set(Attention(12, 3, line).trained) == names
    module = Attention(12, 3, "entmax(learned) | relative")
    attend_once = module(torch.randn(2, 5, 12))
    attend_once.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in module.trained.values())


def test_half_precision_inputs_give_half_precision_results():
    q, k, v = (torch.randn(1, 2, 5, 4).to(torch.float16) for _ in range(3))
    for line in ("sparsemax", "alibi", "euclidean", "gd"):
        assert attend(q, k, v, line).dtype == torch.float16
