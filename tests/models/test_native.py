"""Each function in C gives what its plain twin gives: odd widths, extremes, views, one row and many, and refusals by name.

`.ci/sanitize` runs this file against libraries with AddressSanitizer and UBSan in them; REGARD_TEST_LIBRARY names the one.
"""

from __future__ import annotations

import ctypes
import math
import os
import random
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from regard.attention.allow import Causal
from regard.errors import ShapeError
from regard.identity.read.layer import LayerRead, Place
from regard.models.blocks import gelu_tanh
from regard.models.decode import native
from regard.models.decode.marks import plain_mark
from regard.models.decode.matvec import Float, Int8
from regard.nn import Attention, Cache, RowRead
from regard.position import Rope
from regard.state import State

MOST = 8191
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


shapes = st.tuples(
    st.integers(1, 9) | st.integers(60, 70), st.integers(1, 130), st.lists(st.integers(0, 30), min_size=1, max_size=4)
)


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
    assert found is onto or not adds
    within(found, wanted + before, rounding(x, torch.cat(ws)) + 1e-5)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@torch.no_grad()
def test_wide_float_products_stay_within_their_rows(width: int, rows: int):
    x, w = noise(rows, width), noise(3, width, seed=1)
    within(native.product(x, native.Matrices([w], [None])), x.double() @ w.double().mT, rounding(x, w))


@given(st.integers(1, 70), st.integers(1, 130), st.integers(1, 30), st.booleans(), st.integers(0, 99))
@torch.no_grad()
def test_row_gets_the_same_bits_whoever_is_multiplied_beside_it(rows: int, inside: int, outside: int, whole: bool, seed: int):
    x, bias = noise(rows, inside, seed=seed), noise(outside, seed=3)
    w, scale = (codes(outside, inside, seed), torch.rand(outside)) if whole else (noise(outside, inside, seed=1), None)
    matrices = native.Matrices([w], [bias], scale)
    together = native.product(x, matrices)
    assert together is not None
    for some in (1, 2, 3, 5, 8, 64):
        parts = [native.product(part, matrices) for part in x.split(some)]
        assert torch.equal(torch.cat([p for p in parts if p is not None]), together)
    weight, mixed = noise(inside, seed=4), torch.cat([x, x.flip(1)], -1)
    normed, gated = native.rms(x, weight, 1e-5), native.act(mixed, "silu", gated=True)
    assert normed is not None
    assert gated is not None
    for r in range(rows):
        assert torch.equal(normed[r], native.rms(x[r : r + 1].clone(), weight, 1e-5)[0])  # pyright: ignore
        assert torch.equal(gated[r], native.act(mixed[r : r + 1].clone(), "silu", gated=True)[0])  # pyright: ignore


def whole_numbers(rows: int, width: int, seed: int) -> Tensor:
    """Activations that 14 bits hold exactly: whole, and the largest of each row is 8191."""
    x = torch.randint(-MOST, MOST + 1, (rows, width), generator=torch.Generator().manual_seed(seed)).float()
    x[:, 0] = MOST
    return x


def codes(outs: int, width: int, seed: int = 0) -> Tensor:
    return torch.randint(-128, 128, (outs, width), generator=torch.Generator().manual_seed(seed)).to(torch.int8)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 11])
@torch.no_grad()
def test_int8_sums_are_exact_at_any_width(width: int, rows: int, wide: bool):
    before = native.library().use_wide(wide)
    x, q = whole_numbers(rows, width, seed=width), codes(5, width)
    # The first outputs are what overflows soonest: the largest numbers, all of one sign, and all of the other.
    q[0], q[1] = -128, 127
    x[-1] = MOST
    exact = x.long() @ q.long().mT
    scale = torch.tensor([1.0, 0.5, 2.0, 0.25, 1.0])
    found = native.product(x, native.Matrices([q], [None], scale))
    native.library().use_wide(before)
    assert found is not None
    assert torch.equal(found, (exact.double() * scale).float())


@given(st.integers(1, 9), st.integers(1, 300), st.integers(1, 9), st.floats(1e-36, 1e30), st.integers(0, 99))
@torch.no_grad()
def test_int8_error_is_that_of_fourteen_bits(rows: int, inside: int, outside: int, size: float, seed: int):
    x, q, bias = noise(rows, inside, seed=seed) * size, codes(outside, inside, seed), noise(outside)
    scale = torch.rand(outside, generator=torch.Generator().manual_seed(seed)) * 0.01
    w = q.double() * scale.double().unsqueeze(1)
    found = native.product(x, native.Matrices([q], [bias], scale))
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
        (
            native.act(views(noise(rows, 38))[how], "silu", gated=True),
            F.silu(noise(rows, 38)[:, :19]) * noise(rows, 38)[:, 19:],
        ),
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
    within(native.act(x, "silu", gated=True), wanted, wanted.abs() * 1e-5 + 1e-30)


@torch.no_grad()
def test_swiglu_of_extremes_is_torchs():
    gate = torch.tensor([[0.0, -0.0, 100.0, -100.0, 3e38, -3e38, math.inf, -math.inf, math.nan]])
    x = torch.cat([gate, torch.ones_like(gate)], -1)
    torch.testing.assert_close(native.act(x, "silu", gated=True), F.silu(gate), equal_nan=True)


@given(st.sampled_from(native.ACTIVATIONS), st.integers(1, 5), st.integers(1, 70), st.floats(-3, 3))
@torch.no_grad()
def test_activations_are_the_plain_ones(kind: str, rows: int, width: int, power: float):
    x = noise(rows, width, seed=width) * 10**power
    plain = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": gelu_tanh, "relu": F.relu}[kind]
    wanted = plain(x.double())
    # Where it all but vanishes, what is left of it is the rounding of 1 − tanh.
    within(native.act(x, kind), wanted, wanted.abs() * 2e-5 + x.abs() * 2e-7 + 1e-30)


@torch.no_grad()
def test_activations_of_extremes_are_those_of_double_precision():
    x = torch.tensor([[0.0, -0.0, 100.0, -100.0, 88.7, 88.8, -88.7, -88.8, 3e38, -3e38, math.inf, math.nan]])
    for kind, plain in (("silu", F.silu), ("gelu", F.gelu), ("gelu_tanh", gelu_tanh), ("relu", F.relu)):
        torch.testing.assert_close(native.act(x, kind), plain(x.double()).float(), equal_nan=True)


class Scene:
    """Texts of one layer, some with an identity, and what is new in each."""

    def __init__(self, seed: int, position: str = " | rope") -> None:
        draw = random.Random(seed)
        G, D = draw.randint(1, 3), 2 * draw.randint(1, 20)
        H = G * draw.randint(1, 4)
        self.heads = H, G, D
        self.attention = Attention(H * D, H, f"dot | softmax{position}", key_heads=G, head_width=D)
        scale = self.attention.bare
        assert scale is not None
        self.scale = scale
        self.reads: list[LayerRead | None] = []
        self.before: list[Tensor] = []
        self.new: list[Tensor] = []
        for i in range(draw.randint(1, 6)):
            m, R = draw.choice([0, 0, 1, 7]), draw.choice([0, 3])
            biased = draw.random() < 0.5
            k, v = (noise(1, G, m, D, seed=seed + i + n) if m else None for n in (1, 2))
            weight = noise(1, G, m, seed=seed + 3) if m and draw.random() < 0.5 else None
            left, signs = (noise(1, G, R, D, seed=seed + i), torch.ones(1, R)) if R else (None, None)
            if signs is not None:
                signs[:, ::2] = -1
            bias = noise(1, G, D, seed=seed + 5) if biased else None
            head = draw.choice([1, 1, 4])
            places = (Place(head, m),) if head > 1 else None
            read = LayerRead(scale, k, v, weight, left, signs, bias, places=places)
            self.reads.append(read if m or R or biased else None)
            self.before.append(noise(draw.choice([0, 1, 3, 40]), (H + 2 * G) * D, seed=10 * seed + i))
            self.new.append(noise(draw.choice([1, 1, 2, 5, 35]), (H + 2 * G) * D, seed=10 * seed + i + 100))

    def plain(self, i: int) -> Tensor:
        """Heads (n, H·D) of what is new in a text, by torch."""
        (H, G, D), read, a = self.heads, self.reads[i], self.attention
        cache = Cache()
        out = torch.empty(0)
        for flat in (self.before[i], self.new[i]):
            if not len(flat):
                continue
            q, k, v = flat.view(1, -1, H + 2 * G, D).transpose(1, 2).split([H, G, G], dim=1)
            if read is not None:
                out, cache = read.meet(a, q, k, v, cache, Causal())
            else:
                q, k = (a.spec.position.apply(y, len(cache), State()) for y in (q, k))
                out, cache = a.meet(q, k, v, cache, allow=Causal())
        return out[0].transpose(0, 1).reshape(len(self.new[i]), -1)

    def rooms(self) -> list[tuple[Tensor, Tensor, RowRead | None, native.Text]]:
        _, G, D = self.heads
        made: list[tuple[Tensor, Tensor, RowRead | None, native.Text]] = []
        for i, read in enumerate(self.reads):
            row = None if read is None else read.row_read(self.attention)
            assert (row is None) == (read is None)
            lead, width = (0, D) if row is None else (row.lead, row.width)
            # Exactly as much room as is needed: whoever writes beyond it is seen.
            k, v = (torch.full((G, lead + len(self.before[i]) + len(self.new[i]), width), math.nan) for _ in range(2))
            if row is not None and row.slots is not None:
                k[:, :lead], v[:, :lead] = row.slots[0][0], row.slots[1][0]
            more = dict[str, Any]()
            if row is not None:
                more.update(left=row.left, signs=row.signs, bias=row.bias, lead=lead, head=row.head)
            made.append((k, v, row, native.text(k, v, (G, D), **more)))
        return made

    def meet(self, texts: list[Any], flats: list[Tensor], lengths: list[int]) -> list[Tensor]:
        turns = self.attention.spec.position
        angles: tuple[Tensor, Tensor] | None = None
        counts = [len(f) for f in flats]
        if isinstance(turns, Rope):
            like, pairs = torch.empty(0, self.heads[2]), list[tuple[Tensor, Tensor]]()
            for (_, _, row, _), n, at in zip(texts, counts, lengths, strict=True):
                for p in range(at, at + n):
                    off = row.off if row is not None and p < row.behind else 0
                    pairs.append(turns.angles(like, p - off, p - off + 1))
            angles = torch.cat([c for c, _ in pairs]), torch.cat([s for _, s in pairs])
        array = (native.Text * len(texts))(*(t[3] for t in texts))
        out = native.meet(torch.cat(flats), angles, array, counts, lengths, self.heads, self.scale)
        return list(out.split(counts))


@pytest.mark.parametrize("position", [" | rope", " | rope(fraction=0.5)", ""])
@pytest.mark.parametrize("seed", range(12))
@torch.no_grad()
def test_texts_meet_their_own_keys_as_they_do_in_torch(seed: int, position: str):
    if "fraction" in position and Scene(seed).heads[2] % 4:
        position = " | rope"
    scene = Scene(seed, position)
    texts = scene.rooms()
    old = [i for i, before in enumerate(scene.before) if len(before)]
    if old:
        scene.meet([texts[i] for i in old], [scene.before[i] for i in old], [0] * len(old))
    found = scene.meet(texts, scene.new, [len(b) for b in scene.before])
    for i, y in enumerate(found):
        torch.testing.assert_close(y, scene.plain(i), rtol=2e-4, atol=2e-5)
    assert all(bool(torch.isfinite(x).all()) for k, v, _, _ in texts for x in (k, v))
    # One text after the other, one token after the other: the same bits, and the same in the rooms.
    for i, (read, before, new) in enumerate(zip(scene.reads, scene.before, scene.new, strict=True)):
        alone = scene.rooms()[i]
        rows = [scene.meet([alone], [row[None]], [n])[0] for n, row in enumerate(torch.cat([before, new]))]
        assert torch.equal(torch.cat(rows[len(before) :]), found[i]), (i, read)
        assert torch.equal(alone[0], texts[i][0])
        assert torch.equal(alone[1], texts[i][1])


@torch.no_grad()
def test_text_that_is_not_finite_leaves_the_others_alone():
    scene = Scene(3)
    assert len(scene.new) > 1
    texts, lengths = scene.rooms(), [0] * len(scene.new)
    fine = scene.meet(texts, scene.new, lengths)
    scene.new[0] = scene.new[0] * math.nan
    broken = scene.meet(texts, scene.new, lengths)
    assert bool(torch.isnan(broken[0]).all())
    assert all(torch.equal(a, b) for a, b in zip(fine[1:], broken[1:], strict=True))


@torch.no_grad()
def test_token_never_hears_of_a_later_one():
    H, G, D = 2, 1, 8
    flat = noise(6, (H + 2 * G) * D)
    k, v = torch.zeros(G, 6, D), torch.zeros(G, 6, D)
    array = (native.Text * 1)(native.text(k, v, (G, D)))
    before = native.meet(flat, None, array, [6], [0], (H, G, D), 0.3)
    flat[4:] = math.nan
    after = native.meet(flat, None, array, [6], [0], (H, G, D), 0.3)
    assert torch.equal(before[:4], after[:4])
    assert bool(torch.isnan(after[4:]).all())


def test_texts_refuse_what_does_not_fit():
    G, D = 2, 8
    k, v = noise(G, 5, D), noise(G, 5, D)
    wide = noise(G, 5, 16)

    def meet(x: Tensor | None = None, text: native.Text | None = None, **changes: Any) -> Tensor:
        given: dict[str, Any] = {"counts": [2], "lengths": [0], "heads": (4, G, D), "scale": 0.3, "angles": None, **changes}
        array = (native.Text * 1)(native.text(k, v, (G, D)) if text is None else text)
        x = noise(2, 8 * D) if x is None else x
        return native.meet(x, given["angles"], array, given["counts"], given["lengths"], given["heads"], given["scale"])

    assert meet().shape == (2, 4 * D)
    for bad in (
        lambda: native.text(noise(3, 5, D), v, (G, D)),
        lambda: native.text(k, noise(G, 4, D), (G, D)),
        lambda: native.text(k.double(), v, (G, D)),
        lambda: native.text(noise(5, G, D).transpose(0, 1), v, (G, D)),
        lambda: native.text(noise(G, D), v, (G, D)),
        lambda: native.text(k, v, (G, D), noise(G, 3, D), torch.ones(3)),
        lambda: native.text(k, v, (G, D), bias=noise(G, D)),
        lambda: native.text(wide, wide, (G, D), noise(G, 8, D), torch.ones(8)),
        lambda: native.text(wide, wide, (G, D), noise(G, 3, D)),
        lambda: native.text(wide, wide, (G, D), noise(G, 3, 7), torch.ones(3)),
        lambda: native.text(wide, wide, (G, D), noise(G, 3, D), torch.ones(2)),
        lambda: native.text(wide, wide, (G, D), bias=noise(G, 7)),
        lambda: native.text(k, v, (G, D), lead=6),
        lambda: meet(noise(2, 8 * D - 1)),
        lambda: meet(noise(2, 8 * D).double()),
        lambda: meet(noise(8 * D, 2).mT),
        lambda: meet(counts=[3]),
        lambda: meet(counts=[0]),
        lambda: meet(counts=[1]),
        lambda: meet(lengths=[4]),
        lambda: meet(lengths=[-1]),
        lambda: meet(text=native.text(k, v, (G, D), lead=4)),
        lambda: meet(heads=(3, G, D)),
        lambda: meet(heads=(4, 0, D)),
        lambda: meet(scale=0.0),
        lambda: meet(angles=(noise(2, 5), noise(2, 5))),
        lambda: meet(angles=(noise(2, 4), noise(2, 3))),
        lambda: meet(angles=(noise(1, 4), noise(1, 4))),
    ):
        with pytest.raises(ShapeError):
            bad()


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
        lambda: native.act(noise(2, 7), "silu", gated=True),
        lambda: native.act(noise(2, 8), "swish"),
    ):
        with pytest.raises(ShapeError):
            bad()


@torch.no_grad()
def test_what_c_does_not_serve_is_left_to_torch():
    matrices = native.Matrices([noise(4, 8)], [None])
    for x in (noise(0, 8), noise(2, 8).double(), noise(8), noise(1, 2, 8), torch.empty(2, 8, device="meta")):
        assert not native.serves(x)
        assert native.product(x, matrices) is None
        assert native.rms(x, noise(8), 1e-5) is None
        assert native.act(x, "silu") is None
    assert native.product(noise(2, 8).requires_grad_(), matrices) is None


@torch.no_grad()
def test_results_are_float32_whatever_torchs_default_is():
    x, matrices = noise(3, 40), native.Matrices([noise(6, 40)], [None])
    wanted = native.product(x, matrices)
    assert wanted is not None
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = native.product(x, matrices), native.rms(x, noise(40).float(), 1e-5), native.act(x, "silu", gated=True)
        room = torch.zeros(1, 3, 8, dtype=torch.float32)
        other = room.clone()
        text = (native.Text * 1)(native.text(room, other, (1, 8)))
        q = native.meet(x, None, text, [3], [0], (3, 1, 8), 0.5)
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
    for width in (1 << 62,) if scale is None else (1 << 55, 1 << 62):
        kept.record.inside = width
        assert native.library().product(None, kept.address, None, 2, 0, 1) == 1


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
