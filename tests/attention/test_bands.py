"""Masks that are views of one row: ALiBi and the relative bias under rules that go by distance, against their definitions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard import Causal, Padding, State, Window, attend, explain
from regard.attention import band
from regard.attention.problem import pose
from regard.attention.reference import attend_plainly
from regard.position.alibi import slopes

RULES = {
    "none": None,
    "causal": Causal(),
    "window": Window(3),
    "ahead": Window(5, ahead=2),
    "causal and window": Causal() & Window(40),
    "not itself": ~Window(1),
    "not the near": ~Window(9, ahead=9),
    "strictly before": Causal() & ~Window(2),
    "either": Window(3) | Causal(),
    "after": ~Causal(),
}
SPECS = (
    "dot | softmax | alibi",
    "euclidean | softmax(0.7) | alibi",
    "dot | abstain(softmax, null_logit=0.3) | alibi",
    "rbf(gamma=0.3) | softmax | relative",
)


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def gradients(out: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    upstream = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(5))
    return [out, *torch.autograd.grad(out, inputs, upstream)]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(RULES)),
    st.sampled_from(SPECS),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.one_of(st.none(), st.integers(-12, 45)),
    st.sampled_from([(1, 1), (4, 2), (3, 3), (6, 1)]),
    st.integers(0, 2**31),
)
def test_result_and_gradients_are_the_definitions(rule, spec, lengths, offset, heads, seed):
    torch.manual_seed(seed)
    (Q, K), (H, G) = lengths, heads
    inputs = normal(2, H, Q, 5), normal(2, G, K, 5), normal(2, G, K, 7)
    state = State(relative=torch.randn(32, H, dtype=torch.float64), offset=offset)
    fast = gradients(attend(*inputs, spec, allow=RULES[rule], state=state), inputs)
    slow = gradients(attend_plainly(*inputs, spec, allow=RULES[rule], state=state).output, inputs)
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rule", ["causal", "causal and window", "none"])
@pytest.mark.parametrize("queries", [band.ROWS + 37, 1])
def test_more_rows_than_a_chunk_and_a_row_alone(rule, queries):
    torch.manual_seed(0)
    inputs = normal(1, 4, queries, 8), normal(1, 2, 300, 8), normal(1, 2, 300, 8)
    fast = gradients(attend(*inputs, "dot | softmax | alibi", allow=RULES[rule]), inputs)
    slow = gradients(attend_plainly(*inputs, "dot | softmax | alibi", allow=RULES[rule]).output, inputs)
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_thirty_two_thousand_keys_round_no_bias(dtype):
    """A bias per key, slope · j, would round a score by a thousandth there; the definition's own numbers do not."""
    torch.manual_seed(0)
    K, H = 32768, 8
    q, k, v = torch.randn(1, H, 3, 8).to(dtype), torch.randn(1, H, K, 8).to(dtype), torch.randn(1, H, K, 4).to(dtype)
    found = attend(q, k, v, "dot | softmax | alibi", allow=Causal())
    at = torch.arange(K)
    bias = (at - at[-3:].unsqueeze(-1)).double() * torch.tensor(slopes(H), dtype=torch.float64).view(-1, 1, 1)
    scores = q.double() @ k.double().mT * 8**-0.5 + bias
    wanted = torch.softmax(scores.masked_fill(at > at[-3:].unsqueeze(-1), float("-inf")), -1) @ v.double()
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


def test_rows_decoded_one_by_one_are_the_rows_of_the_whole():
    torch.manual_seed(0)
    q, k, v = (x.detach() for x in (normal(1, 4, 20, 6), normal(1, 2, 20, 6), normal(1, 2, 20, 6)))
    whole = attend(q, k, v, "dot | softmax | alibi", allow=Causal() & Window(7))
    for i in range(20):
        row = attend(
            q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1], "dot | softmax | alibi", allow=Causal() & Window(7)
        )
        torch.testing.assert_close(row, whole[:, :, i : i + 1], rtol=1e-12, atol=1e-12)


def test_every_number_of_a_mask_is_the_pair_s_own():
    q, k = torch.zeros(1, 3, 11, 2), torch.zeros(1, 3, 17, 2)
    p = pose(q, k, k, "dot | softmax | alibi", (None, None, None), Window(4, ahead=1), State(offset=5))
    made = band.band(p, q, None, 1.0).mask(band.Tile(2, 9, 3, 15, 5, q.device)).flip(3)
    for h, slope in enumerate(slopes(3)):
        for r, i in enumerate(range(7, 14)):
            for c, j in enumerate(range(3, 15)):
                wanted = -slope * abs(i - j) if -1 <= i - j < 4 else float("-inf")
                assert float(made[0, h, r, c]) == pytest.approx(wanted, rel=1e-6)


def test_a_rule_of_places_or_of_the_batch_has_no_band():
    x = torch.zeros(2, 2, 4, 3)
    for rule in (Padding(torch.tensor([4, 2])) & Causal(), torch.ones(4, 4, dtype=torch.bool).tril()):
        p = pose(x, x, x, "dot | softmax | alibi", (None, None, None), rule, None)
        assert not band.serves(p)


def test_explain_says_what_the_masks_are_made_of():
    x = torch.zeros(1, 2, 4, 3)
    assert "one row of numbers" in str(explain(x, x, x, "dot | softmax | alibi", allow=Causal()))
    said = str(explain(x, x, x, "dot | softmax | alibi", allow=Causal() & Padding(torch.tensor([3]))))
    assert "made for chunks of rows" in said
