"""Positions against their papers: published numbers, relative properties, buckets."""

import math

import pytest
import torch
from helpers import F64, assert_agree, random

from regard import Causal, ShapeError, SpecError, State, attend, inspect, parse
from regard.position import Relative, Rope
from regard.position.alibi import slopes
from regard.position.sinusoidal import sinusoids

LAYOUTS = ["half", "interleaved"]


def test_alibi_slopes_of_eight_heads_are_the_paper_s():
    assert slopes(8) == [2.0**-n for n in range(1, 9)]


def test_alibi_slopes_off_powers_of_two_interpolate():
    assert slopes(12)[:8] == slopes(8)
    assert slopes(12)[8:] == slopes(16)[0:8:2]


def test_alibi_subtracts_slope_times_distance():
    q, k = torch.zeros(1, 8, 5, 4, dtype=F64), random(1, 8, 5, 4)
    weights = inspect(q, k, k, "alibi", allow=Causal()).weights()
    for h, slope in enumerate(slopes(8)):
        row = torch.softmax(torch.tensor([-slope * (4 - j) for j in range(5)], dtype=F64), 0)
        assert_agree(weights[0, h, 4], row)


def test_sinusoids_are_the_corrected_numbers_of_the_lecture():
    expected = [0.841, 0.540, 0.0998, 0.995, 0.0100, 1.000, 0.0010, 1.000]
    torch.testing.assert_close(sinusoids(2, 8)[1], torch.tensor(expected, dtype=F64), rtol=0, atol=5e-4)
    assert sinusoids(1, 8)[0].tolist() == [0, 1] * 4


def test_sinusoidal_adds_the_same_places_to_queries_and_keys():
    q, k, v = random(1, 2, 3, 6), random(1, 2, 5, 6), random(1, 2, 5, 6)
    table = sinusoids(5, 6)
    assert_agree(attend(q, k, v, "sinusoidal"), attend(q + table[2:], k + table, v))
    assert_agree(attend(q, k, v, "learned", state=State(positions=table)), attend(q, k, v, "sinusoidal"))


def test_attention_without_a_position_is_equivariant_and_with_one_is_not():
    """A shuffled input gives shuffled outputs; only pooling makes that invariant."""
    x = random(1, 2, 7, 6)
    order = torch.tensor([2, 0, 5, 6, 1, 3, 4])
    y = x[:, :, order]
    assert_agree(attend(y, y, y), attend(x, x, x)[:, :, order])
    assert (attend(y, y, y) - attend(x, x, x)).abs().max() > 0.1
    assert_agree(attend(y, y, y).mean(2), attend(x, x, x).mean(2))
    for line in ("rope", "alibi", "sinusoidal"):
        assert (attend(y, y, y, line) - attend(x, x, x, line)[:, :, order]).abs().max() > 1e-2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_rope_keeps_norms_and_depends_on_the_offset_only(layout, fraction):
    rope = Rope(layout=layout, fraction=fraction)
    q, k = random(1, 1, 1, 8), random(1, 1, 1, 8)
    for at in (0, 1, 17, 1000):
        assert_agree(rope.rotate(q, at).norm(), q.norm())
        assert_agree(
            (rope.rotate(q, at + 3) * rope.rotate(k, at)).sum(), (rope.rotate(q, 3) * rope.rotate(k, 0)).sum(), atol=1e-8
        )
    assert abs(float((rope.rotate(q, 3) * k).sum() - (rope.rotate(q, 4) * k).sum())) > 1e-3
    assert_agree(rope.revert(rope.rotate(q, 5), 5, State()), q)
    assert torch.equal(rope.rotate(q, 0), q)


def test_rope_turns_each_pair_by_its_rate():
    x = random(1, 1, 3, 4)
    for layout, pairs in (("half", [(0, 2), (1, 3)]), ("interleaved", [(0, 1), (2, 3)])):
        turned = Rope(layout=layout).rotate(x, 5)
        for i, (a, b) in enumerate(pairs):
            for n in range(3):
                angle = (5 + n) * 10000 ** (-i / 2)
                c, s = math.cos(angle), math.sin(angle)
                assert_agree(turned[0, 0, n, a], c * x[0, 0, n, a] - s * x[0, 0, n, b])
                assert_agree(turned[0, 0, n, b], s * x[0, 0, n, a] + c * x[0, 0, n, b])


def test_rope_layouts_are_one_rotation_in_another_order():
    x = random(1, 1, 5, 8)
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    half = Rope(layout="half").rotate(x, 2)
    assert_agree(Rope(layout="interleaved").rotate(x[..., order], 2), half[..., order])


def test_rope_turns_only_its_fraction():
    x = random(1, 1, 5, 8)
    turned = Rope(fraction=0.5).rotate(x, 3)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert_agree(turned[..., :4], Rope().rotate(x[..., :4].contiguous(), 3))


def test_rope_scalings_at_factor_one_change_nothing_and_at_others_do():
    plain = Rope().rates(16)[0]
    for scaling in ("linear", "ntk", "llama3", "yarn"):
        assert_agree(Rope(scaling=scaling, factor=1.0).rates(16)[0], plain)
        stretched = Rope(scaling=scaling, factor=4.0, original=64).rates(16)[0]
        assert (stretched <= plain + 1e-12).all()
        assert stretched[-1] < plain[-1]
    assert_agree(Rope(scaling="linear", factor=4.0).rates(16)[0], plain / 4)
    ntk = Rope(scaling="ntk", factor=4.0).rates(16)[0]
    assert_agree(ntk[-1], plain[-1] / 4)
    assert ntk[0] == plain[0]
    assert abs(Rope(scaling="yarn", factor=4.0).rates(16)[1] - (0.1 * math.log(4) + 1)) < 1e-12


def test_a_cross_query_can_stand_before_the_first_key():
    q, k, v = random(1, 1, 7, 6), random(1, 1, 5, 6), random(1, 1, 5, 6)
    near = attend(q, k, v, "rope")
    assert_agree(near[:, :, 2:], attend(q[:, :, 2:], k, v, "rope"))
    assert near.isfinite().all()


def transcribed_bucket(relative: int, both: bool, buckets: int, max_distance: int) -> int:
    """T5's `_relative_position_bucket`, one pair at a time; `relative` is key − query."""
    found = 0
    if both:
        buckets //= 2
        found += buckets if relative > 0 else 0
        relative = abs(relative)
    else:
        relative = -min(relative, 0)
    exact = buckets // 2
    if relative < exact:
        return found + relative
    large = exact + int(math.log(relative / exact) / math.log(max_distance / exact) * (buckets - exact))
    return found + min(large, buckets - 1)


@pytest.mark.parametrize("direction", ["both", "past"])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 20)])
def test_relative_buckets_are_t5_s(direction, buckets, furthest):
    part = Relative(buckets=buckets, max_distance=furthest, direction=direction)
    q_at, k_at = torch.arange(150, 157), torch.arange(0, 300)
    found = part.bucket(q_at, k_at)
    for i, q in enumerate(q_at.tolist()):
        expected = [transcribed_bucket(k - q, direction == "both", buckets, furthest) for k in range(300)]
        # log(2)/log(4) is a whole step in exact arithmetic, and float32 and float64 may round it to either side.
        assert sum(a != b for a, b in zip(found[i].tolist(), expected, strict=True)) <= 3
    assert int(found.max()) == buckets - 1
    assert int(found.min()) == 0


def test_relative_bias_is_added_to_the_score_of_its_bucket():
    table = random(32, 2)
    q, k = torch.zeros(1, 2, 3, 4, dtype=F64), random(1, 2, 3, 4)
    weights = inspect(q, k, k, "relative", state=State(relative=table)).weights()
    bucket = Relative().bucket(torch.arange(3), torch.arange(3))
    assert_agree(weights[0], torch.softmax(table[bucket].permute(2, 0, 1), -1))


@pytest.mark.parametrize("line", ["relative(buckets=32, max_distance=8)", "relative(buckets=6)", "relative(buckets=32.0)"])
def test_relative_refuses_buckets_that_do_not_split(line):
    with pytest.raises(SpecError, match="relative"):
        parse(line)


def test_places_that_do_not_exist_are_refused():
    q, k = random(1, 1, 5, 6), random(1, 1, 3, 6)
    with pytest.raises(ShapeError, match=r"-2"):
        attend(q, k, k, "sinusoidal")
    with pytest.raises(ShapeError, match=r"position"):
        attend(q, k, k, "learned", state=State(positions=random(9, 6)))
    with pytest.raises(ShapeError, match=r"\(3, 6\).*at least \(5, 6\)"):
        attend(q, q, q, "learned", state=State(positions=random(3, 6)))
    with pytest.raises(ShapeError, match="width is 5"):
        attend(*(random(1, 1, 2, 5) for _ in range(3)), "sinusoidal")
    with pytest.raises(SpecError, match="turns one pair"):
        attend(*(random(1, 1, 2, 2) for _ in range(3)), "rope(scaling=ntk, factor=2)")
    with pytest.raises(SpecError, match="even number"):
        attend(*(random(1, 1, 2, 5) for _ in range(3)), "rope")
