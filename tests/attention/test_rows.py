"""Selections in C give what tiles of torch give: odd sizes, strides, rules, ties, slots, threads, numbers that are not finite.

`.ci/sanitize` runs this file against libraries with AddressSanitizer and UBSan in them; REGARD_TEST_ROWS names the one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard import Causal, Document, NumericsError, Padding, Prefix, Self, State, Window, attend, compiled, explain, inspect
from regard.attention import native
from regard.attention.allow import Allow

LINES = [
    "sparsemax", "entmax(1.5)", "entmax(1.2)", "entmax(1.05)", "entmax(2.5)", "entmax(learned)", "topk(1)", "topk(3)", "topk(8)",
    "topk(70)", "hard", "hard(tie=right)", "gd", "gd(coherence=0.02)", "euclidean | sparsemax", "cosine | entmax(1.5)", "rbf | topk(5)",
    "self_conditioned(form=self_token) | entmax(1.5)", "self_conditioned(form=null_slot) | topk(4)",
    "self_conditioned(form=self_token) | hard", "self_conditioned(form=key_bias) | sparsemax",
    "abstain(entmax(1.5), null_logit=1.0)", "abstain(topk(4), threshold=0.5)", "abstain(hard, threshold=0.5)",
    "trace(gamma=0.2) | sparsemax", "rope | entmax(1.5)", "trace(gamma=0.2)", "euclidean", "abstain(softmax, null_logit=0.3)",
    "self_conditioned(form=self_token)", "self_conditioned(form=key_bias)", "abstain(softmax, threshold=0.2)", "rbf | rope",
    "alibi | entmax(1.5)", "alibi | topk(3)", "alibi | hard", "alibi | gd(coherence=0.02)", "euclidean | alibi | sparsemax",
    "alibi | abstain(sparsemax, threshold=0.5)",
]  # fmt: skip
ALLOWED = [
    "all",
    "causal",
    "window",
    "ahead",
    "prefix",
    "padding",
    "left",
    "document",
    "mask",
    "heads",
    "either",
    "not",
    "both",
]


@cache
def instrumented() -> Any:
    path = os.environ.get("REGARD_TEST_ROWS")
    return compiled.bound(path, native.SIGNATURES) if path else native.library()


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    if instrumented() is None:
        pytest.skip(f"nothing is compiled here: {native.reason()}")
    monkeypatch.setattr(native, "library", instrumented)


@pytest.fixture(params=[1, 0], ids=["wide", "narrow"])
def lanes(request: pytest.FixtureRequest) -> Any:
    if instrumented().rows_use_wide(request.param) != request.param:
        pytest.skip("this processor has no AVX-512")
    yield
    instrumented().rows_use_wide(1)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers, differently in memory."""
    match layout:
        case "heads inside":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        case "backwards":
            return x.mT.contiguous().mT
        case "apart":
            return torch.stack([x, x + 1], -2).flatten(-2)[..., : x.shape[-1]]
        case _:
            return x


def rule(name: str, B: int, H: int, Q: int, K: int, seed: int) -> Allow | Tensor | None:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, K + 1, (B,), generator=draw)
    ids = torch.randint(0, 3, (B, K), generator=draw)
    return {
        "all": None, "causal": Causal(), "window": Window(3), "ahead": Window(2, ahead=2), "prefix": Prefix(K // 2),
        "padding": Padding(lengths), "left": Padding(lengths, side="left") & Causal(),
        "document": Document(ids.sort(-1).values) & Causal() if Q <= K else None,
        "mask": torch.rand(Q, K, generator=draw) > 0.6, "heads": torch.rand(B, H, Q, K, generator=draw) > 0.8,
        "either": Causal() | Prefix(2), "not": ~Window(4), "both": Causal() & Window(9) & Padding(lengths),
    }[name]  # fmt: skip


def state(line: str, B: int, H: int, G: int, D: int, E: int, dtype: torch.dtype) -> State:
    self_state = Self(
        noise(3, seed=7).to(dtype),
        {n: noise(*s, seed=8).to(dtype) for n, s in (("W_k", (G, D, 3)), ("W_v", (G, E, 3)), ("U", (G, D, 3)), ("u", (H, 3)))},
    )
    return State(
        alpha=torch.linspace(1.1, 2.3, H).to(dtype), trace=(noise(G, D, D, seed=9) / D).to(dtype), self=self_state if "self_" in line else None
    )  # fmt: skip


sizes = st.tuples(
    st.integers(1, 2), st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]), st.integers(1, 40), st.integers(1, 75), st.integers(1, 9),
    st.integers(1, 70),
)  # fmt: skip


@pytest.mark.parametrize("line", LINES)
@given(
    sizes, st.sampled_from(ALLOWED), st.sampled_from(["plain", "heads inside", "backwards", "apart"]), st.integers(0, 99),
    st.integers(1, 3), st.booleans(),
)  # fmt: skip
def test_any_call_gives_what_tiles_of_torch_give(line, size, name, layout, seed, threads, wide):
    B, (H, G), Q, K, half, E = size
    D = 2 * half
    q, k, v = noise(B, H, Q, D, seed=seed), noise(B, G, K, D, seed=seed + 1), noise(B, G, K, E, seed=seed + 2)
    allow = rule(name, B, H, Q, K, seed)
    state32, state64 = (state(line, B, H, G, D, E, t) for t in (torch.float32, torch.float64))
    before = torch.get_num_threads()
    instrumented().rows_use_wide(wide)
    torch.set_num_threads(threads)
    try:
        found = attend(*(laid_out(x, layout) for x in (q, k, v)), line, allow=allow, state=state32)
    finally:
        torch.set_num_threads(before)
        instrumented().rows_use_wide(1)
    wanted = attend(q.double(), k.double(), v.double(), line, allow=allow, state=state64)
    # Above 2 the weights have an infinite slope where a key enters, and the threshold is known to float32's digits only.
    loose = 5e-3 if line in ("entmax(2.5)", "entmax(learned)") else 1e-4
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=loose)


@pytest.mark.parametrize(
    "line", ["hard", "hard(tie=right)", "topk(1)", "topk(3)", "topk(20)", "topk(80)", "sparsemax", "entmax(1.5)"]
)
@pytest.mark.parametrize("keys", [1, 2, 13, 64, 65, 200, 700])
def test_equal_scores_go_where_the_rule_says(line, keys, lanes):
    """Whole numbers, so that scores are exact and most of them are equal to others."""
    draw = torch.Generator().manual_seed(keys)
    q, k = (torch.randint(-1, 2, (1, 3, n, 4), generator=draw).float() for n in (50, keys))
    v = noise(1, 3, keys, 5)
    for allow in (None, Causal(), torch.rand(50, keys, generator=draw) > 0.5):
        spec = f"dot(scale=1) | {line}"
        wanted = attend(q.double(), k.double(), v.double(), spec, allow=allow)
        torch.testing.assert_close(attend(q, k, v, spec, allow=allow).double(), wanted, rtol=0, atol=1e-5)


def test_zeros_of_both_signs_are_equal():
    scores = torch.tensor([-0.0, 0.0, -0.0, 0.0, -1.0, -0.0, 0.0, -0.0, 0.0, 0.0])
    q, k, v = torch.ones(1, 1, 1, 1), scores.view(1, 1, -1, 1), torch.eye(10).view(1, 1, 10, 10)
    kept = attend(q, k, v, "dot(scale=1) | topk(3)").flatten()
    torch.testing.assert_close(kept, torch.tensor([1.0, 1, 1] + [0] * 7) / 3)


@pytest.mark.parametrize("line", ["sparsemax", "entmax(1.5)", "entmax(1.3)", "topk(8)", "topk(90)", "hard", "gd"])
def test_threads_do_not_change_a_bit(line, lanes):
    q, k, v = noise(2, 4, 130, 24), noise(2, 2, 300, 24, seed=1), noise(2, 2, 300, 40, seed=2)
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 3, 4, 2, 2):
        torch.set_num_threads(threads)
        found.append(attend(q, k, v, line, allow=Causal()))
    torch.set_num_threads(before)
    assert all(torch.equal(found[0], x) for x in found)


def test_calls_at_the_same_time_do_not_meet():
    q, k, v = noise(1, 2, 150, 16), noise(1, 2, 200, 16, seed=1), noise(1, 2, 200, 16, seed=2)
    lines = ["sparsemax", "topk(8)", "hard", "entmax(1.5)"]
    wanted = [attend(q, k, v, line) for line in lines]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda n: attend(q, k, v, lines[n % 4]), range(64)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, wanted[n % 4]) for n, x in enumerate(found))


@pytest.mark.skipif("REGARD_TEST_ROWS" in os.environ, reason="a sanitizer's threads do not live through a fork")
def test_a_forked_child_has_helpers_of_its_own():
    code = (
        "import os, torch, regard; torch.set_num_threads(3)\n"
        "q = torch.randn(1, 4, 200, 32); f = lambda: regard.attend(q, q, q, 'sparsemax', allow=regard.Causal())\n"
        "a = f(); child = os.fork()\n"
        "if child == 0: os._exit(0 if torch.equal(a, f()) and torch.equal(a, f()) else 1)\n"
        "assert torch.equal(a, f()); print(os.waitpid(child, 0)[1])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "0\n", done.stderr


@pytest.mark.parametrize("line", ["sparsemax", "entmax(1.2)", "topk(3)", "hard", "gd"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_not_finite_is_named(line, bad, name, lanes):
    x = {"q": noise(1, 2, 40, 8), "k": noise(1, 2, 60, 8, seed=1), "v": noise(1, 2, 60, 8, seed=2)}
    x[name][0, 1, 7] = bad
    if name == "v" and line in ("hard", "gd"):
        x[name][:] = bad
    with pytest.raises(NumericsError, match=rf"{name} has \d+ of \d+ values"):
        attend(**x, spec=line)


def test_a_hidden_key_may_hold_anything(lanes):
    q, k, v = noise(1, 2, 20, 8), noise(1, 2, 20, 8, seed=1), noise(1, 2, 20, 8, seed=2)
    k[:, :, 15:] = v[:, :, 15:] = float("nan")
    allow = Padding(torch.tensor([15]))
    for line in ("sparsemax", "topk(3)", "hard", "abstain(softmax, null_logit=0)"):
        wanted = attend(q, k[:, :, :15], v[:, :, :15], line)
        torch.testing.assert_close(attend(q, k, v, line, allow=allow), wanted)


@pytest.mark.parametrize("line", ["sparsemax", "entmax(1.5)", "topk(3)", "hard", "abstain(sparsemax, null_logit=0)"])
def test_rows_with_nothing_allowed_are_zeros_and_not_accepted(line, lanes):
    q, k, v = noise(2, 2, 37, 8), noise(2, 2, 50, 8, seed=1), noise(2, 2, 50, 8, seed=2)
    mask = torch.ones(37, 50, dtype=torch.bool)
    mask[[0, 17, 36]] = False
    seen = inspect(q, k, v, line, allow=mask)
    assert not seen.output[:, :, [0, 17, 36]].any()
    assert not seen.accepted[:, :, [0, 17, 36]].any()
    assert seen.output[:, :, 1:17].any(-1).all() or "abstain" in line
    assert not attend(q, k, v, line, allow=Padding(torch.tensor([0, 50])))[0].any()


@pytest.mark.parametrize("line", ["sparsemax", "entmax(1.5)", "entmax(1.3)", "topk(5)", "topk(100)"])
def test_output_is_what_the_weights_read(line, lanes):
    q, k, v = noise(1, 4, 90, 16), noise(1, 2, 120, 16, seed=1), noise(1, 2, 120, 33, seed=2)
    seen = inspect(q, k, v, line, allow=Window(50))
    torch.testing.assert_close(seen.output, seen.weights() @ v.repeat_interleave(2, dim=1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("line", ["sparsemax", "entmax(1.5)", "entmax(1.01)", "entmax(3)", "topk(60)"])
def test_scores_of_any_size_are_weighed(line, lanes):
    """All equal, nearly equal, far apart, far from zero."""
    v = torch.eye(64).view(1, 1, 64, 64)
    for scale, shift in ((0.0, 0.0), (1e-6, 0.0), (1.0, 1e4), (1e4, -1e4), (1e-3, 3.0)):
        k = (noise(1, 1, 64, 1) * scale + shift).float()
        weights = attend(torch.ones(1, 1, 5, 1), k, v, f"dot(scale=1) | {line}")
        wanted = attend(torch.ones(1, 1, 5, 1).double(), k.double(), v.double(), f"dot(scale=1) | {line}")
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 1, 5))
        torch.testing.assert_close(weights.double(), wanted, rtol=0, atol=2e-5)


def test_many_keys_take_narrower_blocks():
    q, k, v = noise(1, 2, 20, 4), noise(1, 1, 9001, 4, seed=1), noise(1, 1, 9001, 3, seed=2)
    for line in ("sparsemax", "topk(100)", "hard"):
        wanted = attend(q.double(), k.double(), v.double(), line)
        torch.testing.assert_close(attend(q, k, v, line).double(), wanted, rtol=0, atol=1e-5)


def test_half_precision_is_computed_in_float32():
    q, k, v = (noise(1, 2, 30, 16, seed=n).bfloat16() for n in range(3))
    found = attend(q, k, v, "entmax(1.5)", allow=Causal())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, attend(q.float(), k.float(), v.float(), "entmax(1.5)", allow=Causal()).bfloat16())


@pytest.mark.parametrize(
    ("line", "dtype", "because"),
    [
        ("sparsemax", torch.float32, "blocks of rows in C"),
        ("hard", torch.bfloat16, "blocks of rows in C"),
        ("sparsemax", torch.float64, "tiles are torch's: C computes in float32"),
        ("additive | sparsemax", torch.float32, "tiles are torch's: additive is no dot product"),
        ("trace", torch.float32, "nothing is trained: blocks of rows in C"),
        ("pointer(sparsemax)", torch.float32, "pointer returns the weights"),
        ("alibi | sparsemax", torch.float32, "blocks of rows in C"),
        ("alibi", torch.float32, "one row of numbers, of which every mask is a view"),
        (
            "relative | sparsemax",
            torch.float32,
            "tiles are torch's: relative adds a bias to each pair, and no line by distance",
        ),
    ],
)
def test_the_plan_says_who_computes(line, dtype, because):
    q = torch.randn(1, 2, 4, 6, dtype=dtype)
    found = explain(q, q, q, line, state=State(trace=torch.ones(2, 6, 6, dtype=dtype), relative=torch.zeros(32, 2)))
    assert because in str(found) or ("trained" in because and not instrumented().rows_use_wide(1))


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch):
    q = noise(1, 2, 40, 6)
    fast = attend(q, q, q, "sparsemax")
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native, "_loaded", lambda: (None, "REGARD_NATIVE=0 turns it off"))
    assert "REGARD_NATIVE=0" in str(explain(q, q, q, "sparsemax"))
    torch.testing.assert_close(attend(q, q, q, "sparsemax"), fast)


TRAINED = [
    x for x in LINES if any(n in x for n in ("max(", "sparsemax", "topk")) and "softmax" not in x and "threshold" not in x
]


@pytest.mark.parametrize("line", TRAINED)
@given(sizes, st.sampled_from(ALLOWED), st.sampled_from(["plain", "heads inside"]), st.integers(0, 99), st.booleans())
def test_gradients_are_those_of_torchs_tiles(line, size, name, layout, seed, wide):
    B, (H, G), Q, K, half, E = size
    D = 2 * half
    given_ = noise(B, H, Q, D, seed=seed), noise(B, G, K, D, seed=seed + 1), noise(B, G, K, E, seed=seed + 2)
    allow, upstream = rule(name, B, H, Q, K, seed), noise(B, H, Q, E, seed=seed + 3)

    def gradients(dtype: torch.dtype) -> list[Tensor]:
        x = [laid_out(y.to(dtype), layout).detach().requires_grad_() for y in given_]
        read = state(line, B, H, G, D, E, dtype)
        leaves = [y.requires_grad_() for n, y in read.tensors() if n.split(".")[0] in ("alpha", "trace", "self")]
        out = attend(*x, line, allow=allow, state=read)
        found = torch.autograd.grad(out, [*x, *leaves], upstream.to(dtype), allow_unused=True)
        return [torch.zeros(1, dtype=torch.float64) if g is None else g.double() for g in found]

    instrumented().rows_use_wide(wide)
    try:
        found = gradients(torch.float32)
    finally:
        instrumented().rows_use_wide(1)
    # Weights near zero have steep gradients where alpha is above 1.5, and a key at the threshold is in or out by its last bit.
    loose = 0.05 if line in ("entmax(2.5)", "entmax(learned)") else 1e-3
    for ours, theirs in zip(found, gradients(torch.float64), strict=True):
        off = (ours - theirs).abs() > loose * (1 + theirs.abs().max())
        assert not off.any(), (ours - theirs).abs().max()


@pytest.mark.parametrize("line", ["sparsemax", "entmax(1.5)", "entmax(1.3)", "topk(7)"])
def test_gradients_do_not_depend_on_threads(line):
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3, 2):
        torch.set_num_threads(threads)
        x = [noise(1, 4, 150, 24, seed=n)[:, : 4 if n == 0 else 2].requires_grad_() for n in range(3)]
        found.append(torch.autograd.grad(attend(*x, line, allow=Causal()).square().sum(), x))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for x in found for a, b in zip(found[0], x, strict=True))
