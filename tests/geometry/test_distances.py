"""Dot, cosine, euclidean, rbf, polynomial and additive against their formulas, and the lecture's worked example."""

import torch
from helpers import F64, assert_agree, random

from regard import Additive, State, attend, inspect
from regard.nn import Attention


def posed():
    return random(2, 3, 5, 4), random(2, 3, 7, 4), random(2, 3, 7, 6)


def attended(scores, v):
    return torch.softmax(scores, -1) @ v


def test_worked_example_of_the_lecture_corrected():
    x = torch.tensor([[1, 0.5, 0.2, 0.1], [0.3, 1, 0.4, 0.2], [0.2, 0.3, 1, 0.5]], dtype=F64)
    seen = inspect(*(x.view(1, 1, 3, 4),) * 3, "dot | softmax")
    weights = [[0.396, 0.324, 0.279], [0.313, 0.380, 0.307], [0.277, 0.315, 0.409]]
    outputs = [[0.549, 0.606, 0.488, 0.244], [0.488, 0.629, 0.521, 0.261], [0.453, 0.576, 0.590, 0.295]]
    torch.testing.assert_close(seen.weights()[0, 0], torch.tensor(weights, dtype=F64), rtol=0, atol=6e-4)
    torch.testing.assert_close(seen.output[0, 0], torch.tensor(outputs, dtype=F64), rtol=0, atol=6e-4)


def test_projections_cost_four_d_squared_whatever_the_number_of_heads():
    counts = {h: sum(p.numel() for p in Attention(64, h).parameters()) for h in (1, 2, 4, 8)}
    assert set(counts.values()) == {4 * 64 * 64}


def test_cosine_ignores_lengths():
    q, k, v = posed()
    unit_q, unit_k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    assert_agree(attend(q, k, v, "cosine(temperature=0.2)"), attended(unit_q @ unit_k.mT / 0.2, v))
    stretched = attend(q * 1e-30, k * torch.rand(7, 1, dtype=F64) * 1e30, v, "cosine(temperature=0.2)")
    assert_agree(stretched, attend(q, k, v, "cosine(temperature=0.2)"))


def test_euclidean_is_minus_the_squared_distance():
    q, k, v = posed()
    squared = torch.cdist(q, k).square()
    assert_agree(attend(q, k, v, "euclidean"), attended(-squared / 2, v))
    assert_agree(attend(q, k, v, "euclidean(scale=0.3)"), attended(-0.3 * squared, v))
    assert_agree(attend(q, k, v, "rbf"), attended(-squared / 4, v))
    assert_agree(attend(q, k, v, "rbf(gamma=1.5)"), attended(-1.5 * squared, v))


def test_keys_of_one_norm_make_euclidean_a_dot_product_at_half_the_temperature():
    q, k, v = posed()
    k = k / k.norm(dim=-1, keepdim=True)
    assert_agree(attend(q, k, v, "euclidean"), attend(q, k, v, "softmax(0.5)"))


def test_rbf_is_the_nadaraya_watson_smoother():
    q, k, v = posed()
    kernel = torch.exp(-0.7 * torch.cdist(q, k).square())
    assert_agree(attend(q, k, v, "rbf(gamma=0.7)"), kernel @ v / kernel.sum(-1, keepdim=True))


def test_polynomial_is_a_kernel_smoother():
    q, k, v = posed()
    kernel = (q @ k.mT / 2 + 0.5) ** 4
    assert_agree(attend(q, k, v, "polynomial(degree=4, constant=0.5)"), kernel @ v / kernel.sum(-1, keepdim=True))


def test_additive_is_bahdanau_s():
    q, k, v = posed()
    w, w_q, w_k = random(3, 5), random(3, 5, 4), random(3, 5, 4)
    scores = torch.empty(2, 3, 5, 7, dtype=F64)
    for h in range(3):
        for i in range(5):
            for j in range(7):
                scores[:, h, i, j] = torch.tanh(q[:, h, i] @ w_q[h].mT + k[:, h, j] @ w_k[h].mT) @ w[h]
    assert_agree(attend(q, k, v, "additive", state=State(additive=Additive(w, w_q, w_k))), attended(scores, v))


def test_a_common_shift_changes_no_distance_even_in_float32():
    q, k, v = (x.float() for x in posed())
    near = attend(q, k, v, "euclidean")
    torch.testing.assert_close(attend(q + 1000, k + 1000, v, "euclidean"), near, rtol=0, atol=5e-3)
