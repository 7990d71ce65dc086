"""What a kernel would hide is found: rows whose scores are all NaN or overflow, in every dtype, length and backend.

torch's kernel gives zeros for a row in which no score is above −inf. With fewer keys than a vector register holds, a row of NaN
is such a row too, so that the number of keys at which NaN is lost depends on the processor.
"""

import pytest
import torch
from helpers import random

from regard import Causal, NumericsError, Self, State, Window, attend
from regard.nn import Attention

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
LINES = ["dot", "cosine", "dot | softmax(0.5)", "rope", "euclidean", "trace(gamma=0.2)", "alibi", "abstain(softmax, null_logit=0.1)",
         "self_conditioned(form=self_token)", "self_conditioned(form=null_slot)", "hopfield(steps=2)", "entmax(1.3)", "hard", "topk(2)"]  # fmt: skip
W = 4


def state(dtype: torch.dtype) -> State:
    weights = {"W_k": random(1, W, 3), "W_v": random(1, W, 3), "u": random(2, 3)}
    return State(trace=random(1, W, W, scale=0.1, dtype=dtype), self=Self(random(3), weights))


def tensors(queries: int, keys: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {n: random(2, h, m, W, dtype=dtype) for n, h, m in (("q", 2, queries), ("k", 1, keys), ("v", 1, keys))}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("name", ["q", "k"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("line", LINES)
def test_a_row_of_scores_that_are_not_finite_is_named(line, dtype, name, bad):
    for queries, keys in ((1, 1), (1, 3), (3, 3), (5, 7), (1, 8), (9, 9), (2, 17), (1, 40)):
        x = tensors(queries, keys, dtype)
        if bad == float("inf") and line not in ("dot", "cosine", "alibi"):
            continue
        x[name][1, ..., 1] = bad
        with pytest.raises(NumericsError, match=rf"{name} has \d+ of \d+ values that are not finite"):
            attend(**x, spec=line, allow=Causal(), state=state(dtype))


@pytest.mark.parametrize("keys", [1, 3, 8, 17, 40])
@pytest.mark.parametrize("line", ["dot", "rope", "alibi", "dot | softmax(0.5)", "entmax(1.3)", "topk(2)", "hard"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_scores_that_overflow_to_minus_infinity_are_not_a_row_with_nothing_allowed(dtype, line, keys):
    far = torch.finfo(dtype).max / 8
    x = tensors(3, keys, dtype)
    x["q"][:], x["k"][:] = far, -far
    for allow in (None, Causal(), Window(2), torch.ones(3, keys, dtype=torch.bool)):
        if line == "rope" and keys > 1:
            continue
        empty = allow is not None and keys < 3 and not isinstance(allow, torch.Tensor)
        with pytest.raises(NumericsError, match="overflow"):
            attend(**x, spec=line, allow=allow, state=State(offset=0) if empty else None)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_zero_are_no_reason_to_complain(line, dtype):
    for queries, keys in ((1, 3), (5, 7), (1, 40)):
        x = tensors(queries, keys, dtype)
        x["v"].zero_()
        out = attend(**x, spec=line, allow=Causal(), state=state(dtype))
        assert out.isfinite().all()
        assert "self_token" in line or not out.any()


def test_a_slot_takes_the_whole_row_when_every_key_is_infinitely_far():
    q, k, v = torch.full((1, 2, 3, W), 1e30), torch.full((1, 1, 5, W), -1e30), torch.ones(1, 1, 5, W)
    me = Self(torch.ones(3), {"W_k": torch.zeros(1, W, 3), "W_v": torch.ones(1, W, 3)})
    out = attend(q, k, v, "self_conditioned(form=self_token)", state=State(self=me))
    torch.testing.assert_close(out, torch.full_like(out, 3.0))
    assert not attend(q, k, v, "abstain(softmax, null_logit=0)").any()


@pytest.mark.parametrize("key_heads", [1, 4])
@pytest.mark.parametrize("bad", [float("nan"), -1e30], ids=str)
def test_a_step_does_not_turn_numbers_that_are_not_finite_into_zeros(bad, key_heads):
    attention = Attention(16, heads=4, key_heads=key_heads)
    x = torch.ones(1, 20, 16)
    with torch.no_grad():
        attention.q.weight.fill_(bad)
        attention.k.weight.fill_(-bad)
        cache = None
        for i in range(20):
            out, cache = attention.step(x[:, i : i + 1], cache, allow=Causal())
            assert not out.isfinite().any()


def test_a_step_over_values_of_zero_gives_zeros():
    attention = Attention(16, heads=4)
    with torch.no_grad():
        attention.v.weight.zero_()
        out, _ = attention.step(random(1, 1, 16, dtype=torch.float32), allow=Causal())
    assert not out.any()
