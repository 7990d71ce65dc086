"""The map of a metric in C against torch's, and trace with it against trace without it.

`.ci/sanitize` runs this file against libraries with AddressSanitizer and UBSan in them; REGARD_TEST_BEND names the one.
"""

import os
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard import Causal, LowRank, State, attend
from regard.compiled import bound
from regard.geometry import bending

NEEDS_C = pytest.mark.skipif(bending.library()[0] is None, reason=str(bending.library()[1]))


@pytest.fixture(autouse=True, scope="module")
def the_library_that_is_tried():
    path = os.environ.get("REGARD_TEST_BEND")
    if path is None:
        yield
        return
    kept, tried = bending.library, bound(path, bending.SIGNATURES)
    bending.library = lambda: (tried, None)
    yield
    bending.library = kept


def symmetric(*shape: int) -> Tensor:
    x = torch.randn(*shape)
    return x + x.mT


def expected(x: Tensor, matrix: Tensor, half: float, onto: bool) -> tuple[Tensor, Tensor]:
    y = x.double() @ matrix.double()
    return (x + y if onto else y), half * (x * y).sum(-1)


@NEEDS_C
@settings(max_examples=80, deadline=None)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 101), st.integers(1, 70)),
    st.sampled_from(["shared", "one", "each"]),
    st.sampled_from(["as it is", "heads last", "cut", "strided", "expanded"]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_map_sum_and_dot_are_torch_s(sizes, batches, layout, onto, seed):
    torch.manual_seed(seed)
    B, G, K, D = sizes
    x = {
        "as it is": lambda: torch.randn(B, G, K, D),
        "heads last": lambda: torch.randn(B, K, G, D).transpose(1, 2),
        "cut": lambda: torch.randn(B, G, K + 3, D + 5)[:, :, 2:-1, 1:-4],
        "strided": lambda: torch.randn(B, G, K, 2 * D)[..., ::2],
        "expanded": lambda: torch.randn(B, 1, 1, D).expand(B, G, K, D),
    }[layout]()
    matrix = symmetric(*{"shared": (), "one": (1,), "each": (B,)}[batches], G, D, D)
    found = bending.bent(x, matrix, -0.3, onto)
    assert found is not None
    for a, b in zip(found, expected(x, matrix, -0.3, onto), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-6 * D)


@NEEDS_C
def test_a_row_has_the_same_bits_whatever_stands_beside_it():
    torch.manual_seed(0)
    x, matrix = torch.randn(1, 2, 203, 24), symmetric(2, 24, 24)
    whole = bending.bent(x, matrix, 0.5, True)
    for rows in (slice(0, 1), slice(5, 12), slice(100, 203)):
        part = bending.bent(x[:, :, rows], matrix, 0.5, True)
        assert whole is not None
        assert part is not None
        assert torch.equal(part[0], whole[0][:, :, rows])
        assert torch.equal(part[1], whole[1][:, :, rows])


@NEEDS_C
def test_nan_and_infinity_pass_through():
    x, matrix = torch.randn(1, 1, 8, 5), symmetric(1, 5, 5)
    x[0, 0, 3, 2], x[0, 0, 6, 1] = float("nan"), float("inf")
    found = bending.bent(x, matrix, 1.0, True)
    assert found is not None
    assert found[0].isfinite().all(-1).flatten().tolist() == [True] * 3 + [False] + [True] * 2 + [False, True]
    assert found[1].isfinite().flatten().tolist() == [True] * 3 + [False] + [True] * 2 + [False, True]


@NEEDS_C
def test_several_threads_call_at_once():
    torch.manual_seed(0)
    x, matrix = torch.randn(1, 2, 300, 33), symmetric(2, 33, 33)
    wanted, wrong = bending.bent(x, matrix, 1.0, False), []
    assert wanted is not None

    def call() -> None:
        for _ in range(20):
            found = bending.bent(x, matrix, 1.0, False)
            if found is None or not torch.equal(found[0], wanted[0]) or not torch.equal(found[1], wanted[1]):
                wrong.append(1)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.parametrize(
    ("x", "matrix"),
    [
        (torch.zeros(1, 2, 3, 4, dtype=torch.float64), torch.zeros(2, 4, 4, dtype=torch.float64)),
        (torch.zeros(1, 2, 3, 4, dtype=torch.bfloat16), torch.zeros(2, 4, 4, dtype=torch.bfloat16)),
        (torch.zeros(1, 2, 3, 4, requires_grad=True), torch.zeros(2, 4, 4)),
        (torch.zeros(1, 2, 3, 4), torch.zeros(2, 4, 4, requires_grad=True)),
        (torch.zeros(1, 2, 3, 4), torch.zeros(3, 4, 4)),
        (torch.zeros(1, 2, 3, 4), torch.zeros(2, 4, 5)),
        (torch.zeros(2, 2, 3, 4), torch.zeros(3, 2, 4, 4)),
        (torch.zeros(1, 2, 0, 4), torch.zeros(2, 4, 4)),
        (torch.zeros(1, 1, 2, 300), torch.zeros(1, 300, 300)),
        (torch.zeros(1, 2, 3, 4, device="meta"), torch.zeros(2, 4, 4, device="meta")),
        (torch.zeros(2, 3, 4), torch.zeros(2, 4, 4)),
    ],
)
def test_what_c_does_not_serve_is_left_to_torch(x, matrix):
    assert bending.bent(x, matrix, 1.0, True) is None


@NEEDS_C
@pytest.mark.parametrize(
    "spec", ["trace(gamma=0.3)", "trace(gamma=0.3, norm=unit)", "trace(base=none)", "trace(gamma=0.3) | rope"]
)
@pytest.mark.parametrize("kind", ["dense", "factors", "signed", "by row"])
def test_trace_gives_what_it_gives_without_c(spec, kind, monkeypatch):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 9, 12), torch.randn(2, 2, 9, 12), torch.randn(2, 2, 9, 12)
    left, right = torch.randn(2, 12, 3) / 4, torch.randn(2, 12, 3) / 4
    trace = {
        "dense": torch.randn(2, 12, 12) / 12,
        "factors": LowRank(left, right),
        "signed": LowRank(left, None, torch.tensor([1.0, -1.0, 1.0])),
        "by row": torch.randn(2, 2, 12, 12) / 12,
    }[kind]
    with torch.no_grad():
        fast = attend(q, k, v, spec, allow=Causal(), state=State(trace=trace))
        monkeypatch.setattr(bending, "library", lambda: (None, "off"))
        plain = attend(q, k, v, spec, allow=Causal(), state=State(trace=trace))
    torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-5)
