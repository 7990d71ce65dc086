"""The walk of monotonic attention in C against its definition, and what training keeps of a long text.

`.ci/sanitize` runs this file against libraries with AddressSanitizer and UBSan in them; REGARD_TEST_WALK names the one.
"""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard import Causal, Window, attend
from regard.attention import tiled
from regard.attention.reference import attend_plainly
from regard.compiled import bound
from regard.selection import Monotonic, walking
from regard.selection.base import Given

NEEDS_C = pytest.mark.skipif(walking.library()[0] is None, reason=str(walking.library()[1]))
F64 = torch.float64


@pytest.fixture(autouse=True, scope="module")
def the_library_that_is_tried():
    path = os.environ.get("REGARD_TEST_WALK")
    if path is None:
        yield
        return
    kept, tried = walking.library, bound(path, walking.SIGNATURES)
    walking.library = lambda: (tried, None)
    yield
    walking.library = kept


def defined(scores: Tensor, before: Tensor, empty: Tensor) -> tuple[Tensor, Tensor]:
    """Weights, and where the last row that is there stops, by the recurrence as it is written."""
    rows = Monotonic().plain(scores, Given(at=torch.arange(scores.shape[2]), empty=empty, carry=before))
    there = [i for i in range(scores.shape[2]) if not bool(empty[..., i].any())]
    after = rows[..., there[-1], :] if there else before
    return rows.masked_fill(empty.unsqueeze(-1), 0), after


@NEEDS_C
@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 12), st.integers(1, 40)),
    st.sampled_from([0.1, 1.0, 10.0, 300.0]),
    st.sampled_from([torch.float32, F64]),
    st.sampled_from(["open", "causal", "strided"]),
    st.integers(0, 2**31),
)
def test_weights_carry_and_gradients_are_the_definition_s(sizes, spread, dtype, kind, seed):
    torch.manual_seed(seed)
    B, H, R, C = sizes
    scores = torch.randn(B, H, R, C, dtype=dtype) * spread
    if kind == "causal":
        scores = scores.masked_fill(torch.arange(C) > torch.arange(R).unsqueeze(-1), float("-inf"))
    if kind == "strided":
        scores = torch.randn(B, R, H, 2 * C, dtype=dtype).transpose(1, 2)[..., ::2] * spread
    before = torch.softmax(torch.randn(B, H, C, dtype=dtype), -1)
    empty = torch.rand(1, 1, R) < 0.2
    fast = [x.detach().requires_grad_() for x in (scores, before)]
    slow = [x.detach().double().requires_grad_() for x in (scores, before)]
    found = walking.walked(fast[0], fast[1], empty)
    assert found is not None
    wanted = defined(slow[0], slow[1], empty)
    up = [torch.randn(x.shape, dtype=F64) for x in wanted]
    mine = torch.autograd.grad([*found], fast, [u.to(dtype) for u in up])
    theirs = torch.autograd.grad([*wanted], slow, up)
    tolerance = 1e-12 if dtype == F64 else 3e-6
    for a, b in zip((*found, *mine), (*wanted, *theirs), strict=True):
        b = b.detach().nan_to_num(0)
        torch.testing.assert_close(a.detach().double(), b, rtol=tolerance, atol=tolerance * max(1.0, float(b.abs().max())))


@NEEDS_C
def test_a_row_of_ten_thousand_keys_keeps_its_digits():
    torch.manual_seed(0)
    scores = torch.randn(1, 1, 3, 10_000) - 9
    before = torch.zeros(1, 1, 10_000)
    before[..., 0] = 1
    found = walking.walked(scores, before, None)
    assert found is not None
    p = torch.sigmoid(scores.double())
    first = p[..., 0, :] * torch.cumprod(torch.cat([torch.ones(1, 1, 1), 1 - p[..., 0, :-1]], -1), -1)
    torch.testing.assert_close(found[0][..., 0, :].double(), first, rtol=1e-6, atol=0)


@NEEDS_C
def test_nan_stays_and_infinite_scores_stop_or_pass():
    scores = torch.tensor([[float("-inf"), float("inf"), 3.0], [float("nan"), 0.0, 0.0]]).view(1, 1, 2, 3)
    found = walking.walked(scores, torch.tensor([1.0, 0, 0]).view(1, 1, 3), None)
    assert found is not None
    assert found[0][0, 0, 0].tolist() == [0, 1, 0]
    assert found[0][0, 0, 1].isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_types_and_devices_are_left_to_torch(dtype):
    x = torch.zeros(1, 1, 2, 3)
    assert walking.walked(x.to(dtype), x[:, :, 0].to(dtype), None) is None
    assert walking.walked(x, x[:, :, 0].double(), None) is None
    assert walking.walked(x, x[:, :, 0, :2], None) is None
    assert walking.walked(x.to("meta"), x[:, :, 0].to("meta"), None) is None


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("spec", ["monotonic", "selective", "monotonic(mode=hard)"])
@pytest.mark.parametrize("allow", [Causal(), Causal() & Window(9), None])
def test_carries_that_are_made_again_give_the_gradients_of_those_that_are_kept(spec, allow, native, monkeypatch):
    """Tiles of three rows: runs of several tiles, of which the first one's carry alone is kept."""
    torch.manual_seed(0)
    if not native:
        monkeypatch.setattr(walking, "library", lambda: (None, "off"))
    monkeypatch.setattr(tiled, "rows_per_tile", lambda *_: 3)
    inputs = [torch.randn(1, 2, 29, 4, dtype=F64, requires_grad=True) for _ in range(3)]
    upstream = torch.randn(1, 2, 29, 4, dtype=F64)
    out = attend(*inputs, spec, allow=allow)
    fast = [out, *torch.autograd.grad(out, inputs, upstream, allow_unused=True)]
    out = attend_plainly(*inputs, spec, allow=allow).output
    slow = [out, *torch.autograd.grad(out, inputs, upstream, allow_unused=True)]
    for a, b in zip(fast, slow, strict=True):
        if a is None or b is None:
            assert (0 if a is None else float(a.abs().max())) == (0 if b is None else float(b.abs().max()))
        else:
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_what_is_kept_weighs_no_more_than_a_tile(monkeypatch):
    monkeypatch.setattr(tiled, "rows_per_tile", lambda *_: 4)
    kept: list[int] = []
    walk = tiled.walk

    def counted(*arguments):
        found = walk(*arguments)
        kept.append(len(found[2]))
        return found

    monkeypatch.setattr(tiled, "walk", counted)
    for n in (4, 16, 64, 200):
        x = torch.randn(1, 1, n, 2, requires_grad=True)
        attend(x, x, x, "selective", allow=Causal()).sum().backward()
    assert kept == [1, 4, 4, 4]
