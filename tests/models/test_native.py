"""Each function in C gives what its plain twin gives: odd widths, extremes, views, one to nine rows, and refusals by name.

`.ci/sanitize` runs this file against libraries with AddressSanitizer and UBSan in them; REGARD_TEST_LIBRARY names the one.
"""

from __future__ import annotations

import ctypes
import math
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from regard.errors import ShapeError
from regard.identity.read.layer import LayerRead
from regard.models.decode import native
from regard.models.decode.marks import plain_mark
from regard.models.decode.matvec import Float, Int8
from regard.position import Rope
from regard.state import State

MOST, ROWS = 8191, 8
WIDTHS = [1, 2, 7, 8, 9, 15, 16, 31, 32, 33, 63, 65, 576, 1000, 2047, 2048, 2049, 2080, 4097, 16383, 16384, 16385, 40001]


@cache
def instrumented() -> Any:
    path = os.environ.get("REGARD_TEST_LIBRARY")
    return native.bound(path) if path else native.library()


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    if instrumented() is None:
        pytest.skip(f"nothing is compiled here: {native.reason()}")
    monkeypatch.setattr(native, "library", instrumented)


@pytest.fixture(params=["C", "torch"])
def regime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda: None)
    return request.param


def noise(*shape: int, seed: int = 0, std: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std


def within(found: Tensor | None, wanted: Tensor, tolerance: Tensor | float) -> None:
    assert found is not None
    assert found.dtype == torch.float32
    assert found.shape == wanted.shape
    worst = (found.double() - wanted.double()).abs() - tolerance
    assert bool((worst <= 0).all()), f"off by {float(worst.max()):.3g} more than is allowed"


def rounding(x: Tensor, w: Tensor) -> Tensor:
    """How far float32 sums may be off: a few units of the sum of magnitudes."""
    return (x.abs().double() @ w.abs().double().mT) * 1e-6 + 1e-30


shapes = st.tuples(st.integers(1, 9), st.integers(1, 130), st.lists(st.integers(0, 9), min_size=1, max_size=4))


@given(shapes, st.booleans(), st.booleans(), st.integers(0, 99))
@torch.no_grad()
def test_float_products_are_those_of_the_layers_side_by_side(
    shape: tuple[int, int, list[int]], biased: bool, adds: bool, seed: int
):
    rows, inside, outs = shape
    x, ws = noise(rows, inside, seed=seed), [noise(o, inside, seed=i) for i, o in enumerate(outs)]
    # The second has no bias even where the others have one.
    bs = [noise(o, seed=i) if biased and i != 1 else None for i, o in enumerate(outs)]
    onto = noise(rows, sum(outs), seed=seed) if adds else None
    before = 0 if onto is None else onto.double()
    wanted = torch.cat(
        [F.linear(x.double(), w.double(), None if b is None else b.double()) for w, b in zip(ws, bs, strict=True)], -1
    )
    found = native.product(x, native.Matrices(ws, bs), onto)
    if rows > ROWS:
        assert found is None
        return
    assert found is onto or not adds
    within(found, wanted + before, rounding(x, torch.cat(ws)) + 1e-5)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@torch.no_grad()
def test_wide_float_products_stay_within_their_rows(width: int, rows: int):
    x, w = noise(rows, width), noise(3, width, seed=1)
    within(native.product(x, native.Matrices([w], [None])), x.double() @ w.double().mT, rounding(x, w))


def whole_numbers(rows: int, width: int, seed: int) -> Tensor:
    """Activations that 14 bits hold exactly: whole, and the largest of each row is 8191."""
    x = torch.randint(-MOST, MOST + 1, (rows, width), generator=torch.Generator().manual_seed(seed)).float()
    x[:, 0] = MOST
    return x


def codes(outs: int, width: int, seed: int = 0) -> Tensor:
    return torch.randint(-128, 128, (outs, width), generator=torch.Generator().manual_seed(seed)).to(torch.int8)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@torch.no_grad()
def test_int8_sums_are_exact_at_any_width(width: int, rows: int):
    x, q = whole_numbers(rows, width, seed=width), codes(5, width)
    # The first outputs are what overflows soonest: the largest numbers, all of one sign, and all of the other.
    q[0], q[1] = -128, 127
    x[-1] = MOST
    exact = x.long() @ q.long().mT
    scale = torch.tensor([1.0, 0.5, 2.0, 0.25, 1.0])
    found = native.product(x, native.Matrices([q], [None], scale))
    assert found is not None
    assert torch.equal(found, (exact.double() * scale).float())


@given(st.integers(1, 9), st.integers(1, 300), st.integers(1, 9), st.floats(1e-36, 1e30), st.integers(0, 99))
@torch.no_grad()
def test_int8_error_is_that_of_fourteen_bits(rows: int, inside: int, outside: int, size: float, seed: int):
    x, q, bias = noise(rows, inside, seed=seed) * size, codes(outside, inside, seed), noise(outside)
    scale = torch.rand(outside, generator=torch.Generator().manual_seed(seed)) * 0.01
    w = q.double() * scale.double().unsqueeze(1)
    found = native.product(x, native.Matrices([q], [bias], scale))
    if rows > ROWS:
        assert found is None
        return
    step = x.abs().double().amax(1, keepdim=True) / MOST
    wanted = x.double() @ w.mT + bias.double()
    within(found, wanted, 0.5001 * step * w.abs().sum(1) + wanted.abs() * 1e-6 + 1e-6)


@torch.no_grad()
def test_issue_9s_product_is_not_negative():
    linear = nn.Linear(4096, 2, bias=False)
    nn.init.constant_(linear.weight, 0.02)
    found = Int8([linear])(torch.full((1, 4096), 3.0))
    torch.testing.assert_close(found, torch.full((1, 2), 245.76), rtol=1e-4, atol=0)


@pytest.mark.parametrize("small", [1e-20, 1e-30, 1e-38, 1e-42])
@torch.no_grad()
def test_int8_keeps_fourteen_bits_of_the_smallest_activations(small: float):
    x = noise(3, 40) * small
    matrices = native.Matrices([codes(4, 40)], [None], torch.full((4,), 1.0))
    found, wanted = native.product(x, matrices), x.double() @ codes(4, 40).double().mT
    within(found, wanted, float(wanted.abs().max()) * 1e-3)
    assert bool((found != 0).any())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rows", [1, 3, 8])
@torch.no_grad()
def test_row_that_is_not_finite_stays_so_and_leaves_the_others_alone(bad: float, rows: int, regime: str):
    linear = nn.Linear(70, 6)
    x = noise(rows, 70)
    x[rows - 1, 69] = bad
    for layout in (Int8([linear]), Float([linear])):
        found = layout(x)
        assert not bool(torch.isfinite(found[-1]).any())
        assert bool(torch.isfinite(found[:-1]).all())


@torch.no_grad()
def test_largest_activations_do_not_overflow_on_the_way():
    x = torch.full((1, 64), 3e38)
    matrices = native.Matrices([codes(4, 64)], [None], torch.full((4,), 1e-30))
    within(native.product(x, matrices), x.double() @ codes(4, 64).double().mT * 1e-30, 1e10 * 1e-3)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 20, 70])
@pytest.mark.parametrize("inside", [1, 3, 7, 12, 33, 40, 100, 2065])
@torch.no_grad()
def test_layouts_multiply_any_width_in_both_regimes(rows: int, inside: int, regime: str):
    linears = [nn.Linear(inside, 5), nn.Linear(inside, 4, bias=False), nn.Linear(inside, 1)]
    for i, f in enumerate(linears):
        nn.init.normal_(f.weight, std=0.2, generator=torch.Generator().manual_seed(i))
    x, onto = noise(rows, inside, seed=9), noise(rows, 10, seed=8)
    wanted = torch.cat([f.double()(x.double()) for f in linears], -1)
    whole = torch.cat([f.weight for f in linears])
    linears = [f.float() for f in linears]
    within(Float(linears)(x), wanted, rounding(x, whole) + 1e-5)
    within(Float(linears)(x, onto=onto.clone()), wanted + onto, rounding(x, whole) + 1e-5)
    scale = whole.abs().amax(1, keepdim=True) / 127
    coarse = (whole / scale).round() * scale
    wanted = x.double() @ coarse.double().mT + torch.cat([torch.zeros(4) if f.bias is None else f.bias for f in linears])
    # Without C activations have the eight bits of bfloat16.
    share = 1e-3 if regime == "C" else 1e-2
    slack = (x.abs().double() @ coarse.abs().double().mT) * share + 1e-2
    within(Int8(linears)(x), wanted, slack)
    within(Int8(linears)(x, onto=onto.clone()), wanted + onto, slack)


def views(x: Tensor) -> dict[str, Tensor]:
    """The same numbers, lying otherwise in memory."""
    n = x.numel()
    room = torch.zeros(n + 3)
    room[3:] = x.reshape(-1)
    bytes_ = torch.zeros(n * 4 + 1, dtype=torch.uint8)
    bytes_[1:] = x.reshape(-1).view(torch.uint8)
    odd = (ctypes.c_char * (n * 4)).from_buffer(bytes_.numpy(), 1)
    return {
        "offset": room[3:].view(x.shape),
        "transposed": x.mT.contiguous().mT,
        "every other": torch.stack([x, x + 9], -1)[..., 0],
        "negated": torch._neg_view(-x),  # pyright: ignore
        "unaligned": torch.frombuffer(odd, dtype=torch.float32).view(x.shape),
    }


@pytest.mark.parametrize("how", ["offset", "transposed", "every other", "negated", "unaligned"])
@pytest.mark.parametrize("rows", [1, 4, 8])
@torch.no_grad()
def test_views_are_read_as_the_numbers_they_show(how: str, rows: int):
    x, w = noise(rows, 37), noise(6, 37, seed=1)
    seen = views(x)[how]
    assert torch.equal(seen, x)
    within(native.product(seen, native.Matrices([w], [None])), x.double() @ w.double().mT, rounding(x, w))
    linear = nn.Linear(37, 6)
    linear.weight.data = views(w)[how]
    within(Float([linear])(x), x.double() @ w.double().mT + linear.bias, rounding(x, w) + 1e-5)
    assert not Float([linear]).stale()
    for found, plain in (
        (native.rms(seen, noise(37), 1e-5), F.rms_norm(x, (37,), noise(37), 1e-5)),
        (
            native.rms(x, views(noise(1, 37))[how].view(-1) if how == "offset" else noise(37), 1e-5),
            F.rms_norm(x, (37,), noise(37), 1e-5),
        ),
        (native.swiglu(views(noise(rows, 38))[how]), F.silu(noise(rows, 38)[:, :19]) * noise(rows, 38)[:, 19:]),
    ):
        # Either C reads it rightly or it leaves it to torch.
        if found is not None:
            within(found, plain, 1e-5)


@torch.no_grad()
def test_expanded_rows_are_read_as_the_numbers_they_show():
    w = noise(6, 40, seed=1)
    x = noise(1, 40).expand(5, 40)
    within(native.product(x, native.Matrices([w], [None])), x.double() @ w.double().mT, rounding(x, w))


@torch.no_grad()
def test_product_added_onto_its_own_input_reads_the_input_first():
    w = noise(40, 40)
    for rows in (1, 3, 8):
        x = noise(rows, 40, seed=rows)
        wanted = x.double() + x.double() @ w.double().mT
        within(native.product(x, native.Matrices([w], [None]), x), wanted, rounding(x, w) + 1e-5)


@given(st.integers(1, 8), st.integers(1, 200), st.floats(-30, 18), st.sampled_from([0.0, 1e-12, 1e-5, 1.0]))
@torch.no_grad()
def test_rms_is_the_plain_norm(rows: int, width: int, power: float, eps: float):
    x, weight = noise(rows, width, seed=width) * 10**power, noise(width, seed=1)
    wanted = x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    within(native.rms(x, weight, eps), wanted, wanted.abs() * 1e-6 + 1e-37)


@given(st.integers(1, 8), st.integers(1, 200), st.floats(-3, 3))
@torch.no_grad()
def test_swiglu_is_silu_of_one_half_times_the_other(rows: int, hidden: int, power: float):
    x = noise(rows, 2 * hidden, seed=hidden) * 10**power
    gate, up = x.double().chunk(2, -1)
    wanted = F.silu(gate) * up
    within(native.swiglu(x), wanted, wanted.abs() * 1e-5 + 1e-30)


@torch.no_grad()
def test_swiglu_of_extremes_is_torchs():
    gate = torch.tensor([[0.0, -0.0, 100.0, -100.0, 3e38, -3e38, math.inf, -math.inf, math.nan]])
    x = torch.cat([gate, torch.ones_like(gate)], -1)
    torch.testing.assert_close(native.swiglu(x), F.silu(gate), equal_nan=True)


heads_of = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 9))


@given(st.integers(1, 8), heads_of, st.sampled_from([0.5, 1.0]), st.integers(0, 5000))
@torch.no_grad()
def test_turn_is_rope_on_queries_and_keys_and_leaves_values(rows: int, heads: tuple[int, int, int], fraction: float, at: int):
    H, G, D = heads[0], heads[1], heads[2] * 4
    x, rope = noise(rows, (H + 2 * G) * D), Rope(fraction=fraction)
    split = x.clone().view(rows, 1, H + 2 * G, D).transpose(1, 2)
    wanted = torch.cat([rope.apply(split[:, : H + G], at, State()), split[:, H + G :]], 1).transpose(1, 2).reshape(rows, -1)
    assert native.turn(x, *rope.angles(split, at, at + 1), H + G, D)
    torch.testing.assert_close(x, wanted, rtol=1e-5, atol=1e-5)


@given(
    st.integers(1, 8), st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)), st.integers(0, 9),
    st.tuples(st.booleans(), st.booleans(), st.booleans()), st.integers(0, 8),
)  # fmt: skip
@torch.no_grad()
def test_bend_is_what_an_identity_says_in_torch(
    rows: int, heads: tuple[int, int, int], rank: int, with_: tuple[bool, bool, bool], spare: int
):
    (traced, biased, turned), (groups, G, quarter) = with_, heads
    H, D, rank = groups * G, quarter * 4, rank if traced else 0
    x = noise(rows, (H + 2 * G) * D)
    left = noise(G, rank, D, seed=1) if traced else None
    signs = torch.ones(rank) if traced else None
    if signs is not None:
        signs[::2] = -1
    bias, scale = noise(G, D, seed=2) if biased else None, 0.125
    rope = Rope()
    q, k, v = x.view(rows, 1, H + 2 * G, D).transpose(1, 2).split([H, G, G], 1)
    read = LayerRead(
        scale, left=None if left is None else left[None], signs=None if signs is None else signs[None],
        bias=None if bias is None else bias[None],
    )  # fmt: skip
    asks, tells = read.columns(q, k)
    angles = rope.angles(q, 7, 8) if turned else None
    turn = (lambda t: rope.apply(t, 7, State())) if turned else (lambda t: t)
    least = D + rank + 1
    wide = max(D + asks.shape[-1], least) + spare
    found = native.widen(x, angles, (H, G, D), wide, scale, left, signs, bias)
    plain = (torch.cat([turn(q), asks], -1), torch.cat([turn(k), tells], -1), v)
    for here, there in zip(found, plain, strict=True):
        torch.testing.assert_close(here, F.pad(there, (0, wide - there.shape[-1])), rtol=2e-5, atol=2e-5)
    # As narrow as it may be: the last column is the last one written.
    for here, there in zip(native.widen(x, angles, (H, G, D), least, scale, left, signs, bias), found, strict=True):
        assert torch.equal(here, there[..., :least])


def overridden(**changes: Any) -> tuple[Tensor, Tensor, Tensor]:
    rope = Rope()
    given: dict[str, Any] = {
        "x": noise(2, 32), "angles": rope.angles(noise(2, 1, 8), 3, 4), "heads": (2, 1, 8), "wide": 16, "scale": 0.3,
        "left": noise(1, 4, 8), "signs": torch.ones(4), "bias": noise(1, 8),
    }  # fmt: skip
    return native.widen(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"wide": 12}, "cache keeps keys 12 wide"),
        ({"wide": 8}, "cache keeps keys 8 wide"),
        ({"wide": 0}, "cache keeps keys 0 wide"),
        ({"left": None, "signs": None, "wide": 8}, "cache keeps keys 8 wide"),
        ({"x": noise(2, 31)}, "x is"),
        ({"x": noise(32, 2).mT}, "x is"),
        ({"x": noise(2, 32).double()}, "x is"),
        ({"x": noise(1, 32).expand(2, 32)}, "x is"),
        ({"heads": (3, 2, 8)}, "multiple of G"),
        ({"heads": (2, 0, 8)}, "multiple of G"),
        ({"left": noise(2, 4, 8)}, "left is"),
        ({"left": noise(1, 4, 7)}, "left is"),
        ({"left": noise(1, 8, 4).mT}, "left is"),
        ({"signs": torch.ones(3)}, "signs is"),
        ({"signs": torch.ones(4, dtype=torch.int8)}, "signs is"),
        ({"signs": None}, "without signs"),
        ({"bias": noise(1, 7)}, "bias is"),
        ({"angles": (noise(1, 5), noise(1, 5))}, "turn by one row"),
        ({"angles": (noise(1, 4), noise(1, 3))}, "sin is"),
        ({"angles": (noise(2, 2), noise(2, 2))}, "turn by one row"),
        ({"scale": 0.0}, "scale=0"),
    ],
)
def test_bend_refuses_what_does_not_fit(changes: dict[str, Any], word: str):
    assert overridden()[0].shape == (2, 2, 1, 16)
    with pytest.raises(ShapeError, match=word):
        overridden(**changes)


@torch.no_grad()
def test_products_refuse_what_does_not_fit():
    w, b, q, s = noise(4, 8), noise(4), codes(4, 8), torch.ones(4)
    matrices = native.Matrices([w], [b])
    for bad in (
        lambda: native.Matrices([w.double()], [None]),
        lambda: native.Matrices([w.mT], [None]),
        lambda: native.Matrices([w[:, ::2]], [None]),
        lambda: native.Matrices([w, noise(4, 9)], [None, None]),
        lambda: native.Matrices([w], [noise(5)]),
        lambda: native.Matrices([w], [b.half()]),
        lambda: native.Matrices([noise(4, 0)], [None]),
        lambda: native.Matrices([q], [None]),
        lambda: native.Matrices([w], [None], s),
        lambda: native.Matrices([q], [None], torch.ones(3)),
        lambda: native.Matrices([q, q], [None, None], s),
        lambda: native.product(noise(1, 7), matrices),
        lambda: native.product(noise(1, 8), matrices, noise(1, 5)),
        lambda: native.product(noise(2, 8), matrices, noise(1, 4)),
        lambda: native.product(noise(2, 8), matrices, noise(1, 4).expand(2, 4)),
        lambda: native.product(noise(2, 8), matrices, noise(4, 2).mT),
        lambda: native.product(noise(2, 8), matrices, noise(2, 4).double()),
        lambda: native.rms(noise(2, 8), noise(7), 1e-5),
        lambda: native.swiglu(noise(2, 7)),
        lambda: native.turn(noise(2, 16), noise(1, 4), noise(1, 3), 2, 8),
        lambda: native.turn(noise(2, 16), noise(1, 5), noise(1, 5), 2, 8),
        lambda: native.turn(noise(2, 16), noise(1, 4), noise(1, 4), 3, 8),
        lambda: native.turn(noise(2, 16), noise(1, 4), noise(1, 4), -1, 8),
        lambda: native.turn(noise(2, 16), noise(2, 4), noise(2, 4), 2, 8),
    ):
        with pytest.raises(ShapeError):
            bad()


@torch.no_grad()
def test_what_c_does_not_serve_is_left_to_torch():
    matrices = native.Matrices([noise(4, 8)], [None])
    for x in (noise(9, 8), noise(0, 8), noise(2, 8).double(), noise(8), noise(1, 2, 8), torch.empty(2, 8, device="meta")):
        assert not native.serves(x)
        assert native.product(x, matrices) is None
        assert native.rms(x, noise(8), 1e-5) is None
        assert native.swiglu(x) is None
        assert native.turn(x, noise(1, 4), noise(1, 4), 1, 8) is False
    assert native.product(noise(2, 8).requires_grad_(), matrices) is None


@torch.no_grad()
def test_results_are_float32_whatever_torchs_default_is():
    x, matrices = noise(3, 40), native.Matrices([noise(6, 40)], [None])
    wanted = native.product(x, matrices)
    assert wanted is not None
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = native.product(x, matrices), native.rms(x, noise(40).float(), 1e-5), native.swiglu(x)
        q, _, _ = native.widen(x, None, (3, 1, 8), 9, 0.5, None, None, None)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found[0] is not None
    assert torch.equal(found[0], wanted)
    assert all(y is not None and y.dtype == torch.float32 for y in (*found, q))


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@torch.no_grad()
def test_any_number_of_threads_gives_the_same_product(threads: int):
    x, ws = noise(2, 96), [noise(50, 96), noise(3, 96), noise(1, 96)]
    matrices = native.Matrices(ws, [None] * 3)
    alone = native.product(x, matrices)
    assert alone is not None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = native.product(x, matrices)
        mark = native.checksum(noise(700_001))
    finally:
        torch.set_num_threads(before)
    assert found is not None
    assert torch.equal(found, alone)
    assert mark == native.checksum(noise(700_001))


@torch.no_grad()
def test_two_python_threads_multiply_at_once():
    matrices = native.Matrices([codes(300, 257)], [None], torch.full((300,), 0.01))
    inputs = [noise(1 + i % 8, 257, seed=i) for i in range(64)]
    alone = [native.product(x, matrices) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda x: native.product(x, matrices), inputs))
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("scale", [None, torch.ones(1)])
def test_c_says_when_there_is_no_memory_before_it_touches_anything(scale: Tensor | None):
    kept = native.Matrices([noise(1, 8) if scale is None else codes(1, 8)], [None], scale)
    for width in (1 << 55, 1 << 62):
        assert native.library().product(None, *kept.addresses, None, 1, 2, width, 1, 0, 1) == 1


@torch.no_grad()
def test_no_memory_is_a_memory_error(monkeypatch: pytest.MonkeyPatch):
    matrices = native.Matrices([noise(4, 8)], [None])

    class Full:
        def product(self, *_: object) -> int:
            return 1

    monkeypatch.setattr(native, "library", Full)
    with pytest.raises(MemoryError, match="2 rows of width 8"):
        native.product(noise(2, 8), matrices)


@pytest.mark.parametrize("size", [1, 2, 31, 32, 33, 1000, 262_144, 262_145, 600_000])
def test_checksum_sees_every_change_and_the_order(size: int):
    x = noise(size)
    for mark in (native.checksum, plain_mark):
        before = mark(x)
        assert mark(x.clone()) == before
        for i in {0, size // 2, size - 1}:
            changed = x.clone()
            changed.view(torch.int32)[i] ^= 1
            assert mark(changed) != before
        if size > 1:
            for i, j in ((0, size - 1), (size // 2, 0)):
                swapped = x.clone()
                swapped[i], swapped[j] = x[j], x[i]
                assert mark(swapped) != before
            assert mark(x.flip(0)) != before
        assert mark(torch.cat([x, torch.zeros(1)])) != before


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64, torch.int8, torch.bool])
def test_checksums_take_any_type(kind: torch.dtype):
    x = (noise(77) * 3).to(kind)
    other = x.clone()
    other[76] = ~other[76] if kind == torch.bool else other[76] + 1
    for mark in (native.checksum, plain_mark):
        assert mark(x) != mark(other)
