"""Softmax, top-k, hard, pointer and abstain against their definitions and against torch."""

import pytest
import torch
import torch.nn.functional as F
from helpers import F64, assert_agree, random

from regard import Causal, State, attend, inspect


def test_default_is_torch_s_attention():
    q, k, v = (random(2, 4, 7, 6) for _ in range(3))
    for allow, causal in ((None, False), (Causal(), True)):
        assert torch.equal(
            attend(q, k, v, allow=allow), F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=6**-0.5)
        )
        grouped = F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], is_causal=causal, enable_gqa=True)
        assert_agree(attend(q, k[:, :2], v[:, :2], allow=allow), grouped)


def test_masked_attention_is_torch_s_masked_attention():
    q, k, v = (random(2, 3, 7, 6) for _ in range(3))
    mask = torch.rand(2, 3, 7, 7) < 0.5
    mask[..., 0] = True
    assert_agree(attend(q, k, v, "softmax", allow=mask), F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def test_masked_softmax_of_the_lecture():
    """Scores [1, 2, masked, 3]: the weights sum to one, unlike the [.0900, .2447, 0, .5652] of the slide."""
    q = torch.ones(1, 1, 1, 1, dtype=F64)
    k = torch.tensor([1.0, 2.0, 9.0, 3.0], dtype=F64).view(1, 1, 4, 1)
    allow = torch.tensor([[True, True, False, True]])
    weights = inspect(q, k, k, "dot(scale=1)", allow=allow).weights().flatten()
    torch.testing.assert_close(weights, torch.tensor([0.0900, 0.2447, 0, 0.6652], dtype=F64), rtol=0, atol=5e-5)


def test_temperature_divides_the_scores():
    q, k, v = (random(1, 2, 5, 4) for _ in range(3))
    assert_agree(attend(q, k, v, "softmax(0.25)"), attend(q, k, v, "dot(scale=2)"))
    learned = attend(q, k, v, "softmax(learned)", state=State(temperature=torch.tensor([0.25, 1.0], dtype=F64)))
    assert_agree(learned[:, 0], attend(q, k, v, "softmax(0.25)")[:, 0])
    assert_agree(learned[:, 1], attend(q, k, v)[:, 1])


def test_topk_keeps_exactly_k_and_ties_go_left():
    scores = torch.tensor([[3.0, 1, 3, 3, 0], [5, 5, 5, 5, 5], [1, 2, 3, 4, 5]], dtype=F64)
    rows, columns = torch.eye(3, dtype=F64).view(1, 1, 3, 3), scores.mT.view(1, 1, 5, 3)
    assert (inspect(rows, columns, columns, "topk(2)").weights()[0, 0] > 0).tolist() == [
        [True, False, True, False, False],
        [True, True, False, False, False],
        [False, False, False, True, True],
    ]
    q, k, v = (random(2, 2, 7, 4) for _ in range(3))
    assert (inspect(q, k, v, "topk(3)").support == 3).all()
    assert inspect(q, k, v, "topk(3)", allow=Causal()).support[0, 0].tolist() == [1, 2, 3, 3, 3, 3, 3]
    assert_agree(attend(q, k, v, "topk(7)"), attend(q, k, v))


@pytest.mark.parametrize(("tie", "key"), [("left", 1), ("right", 3)])
def test_hard_takes_the_largest_and_ties_go_to_their_side(tie, key):
    q = torch.ones(1, 1, 2, 1, dtype=F64)
    k = torch.tensor([0.0, 2.0, 1.0, 2.0, -1.0], dtype=F64).view(1, 1, 5, 1)
    v = torch.arange(5, dtype=F64).view(1, 1, 5, 1)
    seen = inspect(q, k, v, f"hard(tie={tie})")
    assert seen.output.flatten().tolist() == [key, key]
    assert seen.support.flatten().tolist() == [1, 1]
    assert torch.equal(seen.effective, torch.ones_like(seen.effective))


def test_hard_output_is_a_value_exactly():
    q, k, v = (random(2, 2, 7, 4) for _ in range(3))
    index = (q @ k.mT).argmax(-1)
    assert torch.equal(attend(q, k, v, "hard"), v.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, 4)))


def test_pointer_is_the_distribution_over_keys():
    q, k = random(2, 3, 5, 4), random(2, 3, 7, 4)
    expected = torch.softmax(q @ k.mT / 2, -1)
    assert_agree(attend(q, k, None, "pointer"), expected)
    assert_agree(attend(q, k, random(2, 3, 7, 9), "pointer"), expected)
    assert (attend(q, k, None, "pointer(hard)").sum(-1) == 1).all()


def test_null_slot_scales_the_output_by_the_share_of_the_real_keys():
    """o = σ(LSE − null) · o_standard."""
    q, k, v = (random(2, 3, 7, 6) for _ in range(3))
    scores = q @ k.mT / 6**0.5
    for null in (-3.0, 0.0, 2.5):
        share = torch.sigmoid(torch.logsumexp(scores, -1) - null)
        seen = inspect(q, k, v, f"abstain(softmax, null_logit={null})")
        assert_agree(seen.output, share.unsqueeze(-1) * attend(q, k, v))
        assert torch.equal(seen.accepted, share >= 0.5)
    assert inspect(q, k, v, "abstain(softmax, null_logit=-3)").accepted.all()
    assert not inspect(q, k, v, "abstain(softmax, null_logit=9)").accepted.any()


def test_threshold_refuses_a_row_whose_best_score_is_below_it():
    q, k, v = (random(2, 3, 7, 6) for _ in range(3))
    best = (q @ k.mT / 6**0.5).amax(-1)
    for inner in ("softmax", "sparsemax", "hard"):
        seen = inspect(q, k, v, f"abstain({inner}, threshold=0.8)")
        assert torch.equal(seen.accepted, best >= 0.8)
        assert 0 < seen.accepted.sum() < seen.accepted.numel()
        assert_agree(seen.output, attend(q, k, v, inner) * (best >= 0.8).unsqueeze(-1))


def test_softmax_energy_is_minus_the_log_sum_exp_of_the_geometry_s_own_scores():
    q, k, v = (random(2, 3, 7, 6) for _ in range(3))
    assert_agree(inspect(q, k, v).energy, -torch.logsumexp(q @ k.mT / 6**0.5, -1))
    distances = torch.cdist(q, k).square() / 6**0.5
    assert_agree(inspect(q, k, v, "euclidean").energy, -torch.logsumexp(-distances, -1))
    assert_agree(inspect(q, k, v, "hard").energy, -(q @ k.mT / 6**0.5).amax(-1))


def test_effective_number_of_keys_runs_from_one_to_all():
    q, k, v = torch.zeros(1, 1, 1, 4, dtype=F64), random(1, 1, 7, 4), random(1, 1, 7, 4)
    assert_agree(inspect(q, k, v).effective, torch.full((1, 1, 1), 7.0, dtype=F64))
    sharp = inspect(random(1, 1, 1, 4) * 1e3, k, v).effective
    assert_agree(sharp, torch.ones_like(sharp))
