"""GD: its published numbers on Iris, its energy, and where a query and a key cohere."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import F64, assert_agree, random
from hypothesis import given
from hypothesis import strategies as st

from regard import CombinationError, State, attend, inspect
from regard.selection.gd import coherence_point, coherent_length, energy_between


def landscape(x, L, alpha):
    return -torch.logaddexp(math.log(alpha) - x * x, math.log1p(-alpha) - (L - x) ** 2)


def chosen_keys(line, data):
    n = data.shape[0]
    x = data.view(1, 1, n, -1)
    index = torch.arange(n, dtype=F64).view(1, 1, n, 1)
    others = ~torch.eye(n, dtype=torch.bool)
    return attend(x, x, index, line, allow=others).flatten().long()


def test_iris_leave_one_out(iris):
    """0.9467 by gd, 0.7733 by the largest dot product, which choose one flower in 6% of the cases."""
    data, species = iris
    assert data.shape == (150, 4)
    near, dot = chosen_keys("gd", data), chosen_keys("dot | hard", data)
    assert round(float((species[near] == species).double().mean()), 4) == 0.9467
    assert round(float((species[dot] == species).double().mean()), 4) == 0.7733
    assert round(float((near == dot).double().mean()), 2) == 0.06


@pytest.mark.parametrize("line", ["gd", "gd(alpha=0.7)", "gd(coherence=1)", "rbf | gd(beta=0.5)"])
def test_iris_gd_is_the_nearest_neighbour_for_all_150(iris, line):
    data, _ = iris
    apart = torch.cdist(data, data, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(float("inf"))
    assert torch.equal(chosen_keys(line, data), apart.argmin(-1))


def test_selection_is_the_largest_of_twice_q_k_minus_k_squared():
    q, k, v = random(2, 3, 11, 6), random(2, 3, 13, 6), random(2, 3, 13, 4)
    index = (2 * q @ k.mT - k.square().sum(-1).unsqueeze(-2)).argmax(-1)
    for alpha, beta in ((0.5, 1.0), (0.2, 0.3), (0.9, 4.0)):
        seen = inspect(q, k, v, f"gd(alpha={alpha}, beta={beta})")
        assert torch.equal(seen.jump().index, index)


@given(st.floats(0.01, 6), st.floats(0.02, 0.98))
def test_energy_is_the_least_of_its_landscape(L, alpha):
    x = torch.linspace(-0.5, L + 0.5, 20001, dtype=F64)
    found = energy_between(torch.tensor(L, dtype=F64), alpha)
    assert abs(float(found) - float(landscape(x, L, alpha).min())) < 1e-5
    point = float(coherence_point(torch.tensor(L, dtype=F64), alpha))
    assert 0 <= point <= L


@pytest.mark.parametrize(
    ("L", "alpha", "energy"),
    [
        (1.0, 0.5, 0.25),
        (math.sqrt(2), 0.5, 0.5),
        (3.0, 0.5, 0.6930),
        (100.0, 0.99, 0.010),
        (0.5, 0.5, 0.0625),
        (2.34, 0.9, 0.1049),
    ],
)
def test_published_energies(L, alpha, energy):
    assert abs(float(energy_between(torch.tensor(L, dtype=F64), alpha)) - energy) < 6e-5


def test_far_away_the_energy_saturates_at_the_heavier_side():
    for alpha in (0.5, 0.9, 0.2):
        far = float(energy_between(torch.tensor(50.0, dtype=F64), alpha))
        assert abs(far + math.log(max(alpha, 1 - alpha))) < 1e-12


@pytest.mark.parametrize(("alpha", "length"), [(0.5, math.sqrt(2)), (0.744, 2.0), (0.256, 2.0), (0.9943, 3.0), (0.9, 2.34)])
def test_published_coherent_lengths(alpha, length):
    assert abs(coherent_length(alpha) - length) < 5e-3


@given(st.floats(0.02, 0.98), st.floats(0.2, 5))
def test_one_valley_up_to_the_coherent_length_and_two_beyond(alpha, L):
    border = coherent_length(alpha)
    if abs(L - border) < 0.05 * border:
        return
    x = torch.linspace(-1, L + 1, 8001, dtype=F64)
    falls = landscape(x, L, alpha).diff() < 0
    valleys = int((falls[:-1] & ~falls[1:]).sum())
    assert valleys == (1 if border > L else 2)


def test_energy_grows_with_distance():
    L = torch.linspace(0, 3, 301, dtype=F64)
    for alpha in (0.5, 0.8, 0.3):
        assert (energy_between(L, alpha).diff() > 0).all()


@pytest.mark.parametrize("beta", [1.0, 1.87, 4.0])
def test_unit_vectors_cohere_when_their_cosine_reaches_one_minus_one_over_beta(beta):
    q, k = F.normalize(random(1, 2, 31, 8), dim=-1), F.normalize(random(1, 2, 7, 8), dim=-1)
    seen = inspect(q, k, k, f"gd(beta={beta}, coherence=1)")
    nearest = (q @ k.mT).amax(-1)
    assert torch.equal(seen.accepted, nearest >= 1 - 1 / beta)
    assert seen.accepted.sum() > 0
    assert not seen.output[~seen.accepted].any()


def test_jump_tells_the_whole_story():
    q, k = random(1, 1, 5, 3, scale=0.4), random(1, 1, 7, 3, scale=0.4)
    seen = inspect(q, k, k, "gd(beta=2, coherence=1)")
    jump = seen.jump()
    apart = torch.cdist(q, k)
    there = jump.index >= 0
    assert torch.equal(there, seen.accepted)
    assert there.any()
    assert_agree(jump.distance[there], apart.amin(-1)[there])
    assert_agree((q + jump.distance.unsqueeze(-1) * jump.direction)[there], seen.output[there])
    assert_agree(jump.energy[there], seen.energy[there])
    assert_agree(jump.energy[there], jump.distance[there].square() * 2 / 4)
    assert_agree(jump.point[there], ((q + seen.output) / 2)[there])
    assert_agree(jump.coherence[there], 2 / (2 * jump.distance[there].square()))


def test_keep_all_re_forms_attention_among_the_coherent_keys():
    q, k, v = random(1, 2, 9, 3), random(1, 2, 7, 3), random(1, 2, 7, 4)
    squared = torch.cdist(q, k).square()
    fits = squared <= 2
    weights = torch.softmax((-squared).masked_fill(~fits, -torch.inf), -1).nan_to_num(0)
    seen = inspect(q, k, v, "gd(coherence=1, keep=all)")
    assert_agree(seen.weights(), weights)
    assert torch.equal(seen.support, fits.sum(-1))
    assert torch.equal(seen.accepted, fits.any(-1))
    assert 0 < fits.sum() < fits.numel()


def test_a_common_shift_of_queries_and_keys_changes_no_choice_in_float32():
    q, k = random(1, 1, 64, 16, dtype=torch.float32), random(1, 1, 64, 16, dtype=torch.float32)
    index = torch.arange(64, dtype=torch.float32).view(1, 1, 64, 1)
    near = attend(q, k, index, "gd")
    shifted = attend(q + 1000, k + 1000, index, "gd")
    assert (near == shifted).double().mean() > 0.98


def test_gd_refuses_a_geometry_without_distance():
    with pytest.raises(CombinationError, match="use euclidean, rbf, cosine or trace"):
        attend(*(random(1, 1, 2, 4) for _ in range(3)), "additive | gd")


@pytest.mark.parametrize("beta", [1.0, 2.0, 3.0])
def test_cosine_measures_the_distance_between_unit_vectors(beta: float) -> None:
    q, k = (torch.nn.functional.normalize(torch.randn(1, 2, 41, 16, dtype=torch.float64), dim=-1) for _ in range(2))
    v = torch.randn(1, 2, 41, 5, dtype=torch.float64)
    by_angle = inspect(3 * q, 0.2 * k, v, f"cosine | gd(beta={beta}, coherence=1)")
    by_length = inspect(q, k, v, f"euclidean | gd(beta={beta}, coherence=1)")
    assert torch.equal(by_angle.accepted, (q @ k.mT).amax(-1) >= 1 - 1 / beta)
    assert torch.equal(by_angle.accepted, by_length.accepted)
    torch.testing.assert_close(by_angle.energy, by_length.energy)
    torch.testing.assert_close(by_angle.jump().point, by_length.jump().point)


def test_a_jump_in_a_metric_is_as_long_as_the_metric_says() -> None:
    q, k, v = (torch.randn(1, 2, 7, 5, dtype=torch.float64) for _ in range(3))
    T = torch.randn(2, 5, 5, dtype=torch.float64)
    T = T @ T.mT
    seen = inspect(q, k, v, "trace(base=none) | gd", state=State(trace=T))
    jump = seen.jump()
    step = k.gather(2, jump.index.unsqueeze(-1).expand(-1, -1, -1, 5)) - q
    torch.testing.assert_close(jump.distance**2, torch.einsum("bhqd,hde,bhqe->bhq", step, T, step))
    torch.testing.assert_close(jump.energy, seen.energy)
