"""However the inputs, the mask and the incoming gradient lie in memory, output and gradients are those of the definition."""

import pytest
import torch
from helpers import (
    F64,
    GEOMETRY_SPECS,
    LAYOUTS,
    POSITION_SPECS,
    SELECTION_SPECS,
    SITUATIONS,
    D,
    assert_agree,
    assert_fast_is_plain,
    every,
    inputs,
    random,
    state_for,
    trained,
)

from regard import Causal, LowRank, State, attend, parse
from regard.attention.fused import adjacent
from regard.nn import Attention

LINES = [
    *every(GEOMETRY_SPECS),
    *every(SELECTION_SPECS),
    *every(POSITION_SPECS),
    "trace(gamma=0.3) | abstain(softmax, null_logit=0)",
]
SHARING = ("expanded", "overlapping")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_another_place_in_memory_for_the_same_numbers(layout):
    x = random(2, 3, 5, 6)
    laid = LAYOUTS[layout](x)
    assert laid.shape == x.shape
    if not layout.startswith(SHARING):
        assert torch.equal(laid, x)
    if layout not in ("flipped",):
        assert laid.stride() != x.stride() or laid.storage_offset() != x.storage_offset()
    near = adjacent(laid)
    assert torch.equal(near, laid)
    assert near.stride(-1) == 1
    assert near.stride(-2) >= near.shape[-1]


def test_rows_that_are_adjacent_are_not_copied():
    for x in (random(2, 3, 5, 6), random(2, 5, 3, 6).transpose(1, 2), random(2, 3, 5, 9)[..., 2:8]):
        assert adjacent(x) is x


def close_ties(line: str, layout: str) -> bool:
    """Equal numbers make equal scores, and which of two equal keys a choice falls on is a matter of the last digit."""
    return layout.startswith(SHARING) and line.startswith(("hard", "gd", "topk", "abstain(topk", "monotonic(mode=hard"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("line", LINES)
def test_every_row_of_the_tables_and_every_situation(line, layout):
    """Each row meets each layout, and each situation each layout; a row meets a third of the situations in each layout."""
    spec = parse("softmax" if close_ties(line, layout) else line)
    turn = LINES.index(line) + list(LAYOUTS).index(layout)
    for n, situation in enumerate(SITUATIONS.values()):
        if situation.suits(spec) and (turn + n) % 3 == 0:
            state, leaves = trained(state_for(spec, situation))
            # What is trained may take another backend than what is given.
            given = (state, leaves) if turn % 2 else (state_for(spec, situation), [])
            assert_fast_is_plain(spec, situation, *given, LAYOUTS[layout])


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "line", ["euclidean", "rbf", "trace(gamma=0.3)", "alibi", "abstain(softmax, null_logit=0)", "sparsemax"]
)
def test_chunks_of_rows(line, layout):
    spec = parse(line)
    for heads, key_heads in ((2, 2), (2, 1)):
        situation = type(SITUATIONS["causal"])(
            heads, key_heads, 37, 37, allow=lambda Q, K: torch.ones(2, 1, Q, K).tril().bool()
        )
        state, leaves = trained(state_for(spec, situation))
        assert_fast_is_plain(spec, situation, state, leaves, LAYOUTS[layout])


@pytest.mark.parametrize("line", ["euclidean", "rbf", "trace(gamma=0.3)", "alibi", "abstain(softmax, null_logit=0)", "dot"])
def test_numbers_beside_a_stepped_value_are_never_read(line):
    situation = SITUATIONS["causal"]
    q, k, v = inputs(situation, value_width=D, dtype=torch.float32)
    state = state_for(parse(line), situation, dtype=torch.float32)
    beside = torch.stack([torch.zeros_like(v), torch.full_like(v, 9)], -1)[..., 0]
    assert not attend(q, k, beside, line, state=state).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_float_type(layout, dtype):
    situation = SITUATIONS["gqa"]
    for line in ("dot", "cosine", "euclidean", "trace(gamma=0.3)", "alibi", "entmax(1.5)"):
        state = state_for(parse(line), situation, dtype=dtype)
        q, k, v = (LAYOUTS[layout](x) for x in inputs(situation, dtype=dtype))
        found = attend(q, k, v, line, allow=Causal(), state=state)
        plain = attend(*(x.contiguous() for x in (q, k, v)), line, allow=Causal(), state=state)
        torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("layout", ["stepped", "transposed rows", "expanded heads"])
def test_tensors_of_the_state(layout):
    situation = SITUATIONS["gqa"]
    q, k, v = inputs(situation)
    T = LAYOUTS[layout](random(1, 2, D, D, scale=0.2))[0]
    factor = LAYOUTS[layout](random(1, 2, D, 2, scale=0.4))[0]
    for trace, copy in ((T, T.contiguous()), (LowRank(factor), LowRank(factor.contiguous()))):
        assert_agree(
            attend(q, k, v, "trace", allow=Causal(), state=State(trace=trace)),
            attend(q, k, v, "trace", allow=Causal(), state=State(trace=copy)),
        )


@pytest.mark.parametrize("line", ["dot", "euclidean", "alibi", "entmax(1.5)"])
def test_a_module_reads_any_layout_of_its_input(line):
    module = Attention(12, 3, line).to(F64)
    x = random(2, 7, 12)
    for laid in (torch.stack([x, x + 9], -1)[..., 0], x.mT.contiguous().mT, x.transpose(0, 1).contiguous().transpose(0, 1)):
        assert_agree(module(laid, allow=Causal()), module(x, allow=Causal()))
