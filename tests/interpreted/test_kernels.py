"""The Triton kernels in Triton's interpreter: outputs and gradients of the definition, on CPU.

`TRITON_INTERPRET=1 pytest tests/interpreted` runs all of it; `tests/attention/test_triton.py` runs a share in every test run.
"""

import os
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from helpers import Situation, assert_agree, assert_fast_is_plain, inputs, joined, state_for, trained
from random_calls import TOLERANCE, draw, verdict

from regard import Causal, Document, Padding, Prefix, Window, attend, explain, parse
from regard.attention.allow import Behind
from regard.attention.plan import preferring
from regard.attention.reference import attend_plainly
from regard.attention.triton import launch

SHARE = int(os.environ.get("REGARD_INTERPRETED_SHARE", "1"))
"""Every which case of the long lists is run."""

# numpy, which the interpreter computes with, also divides where a row has nothing to do.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SELECTIONS = [
    "entmax(1.5)", "hard", "topk(3)", "sparsemax", "gd", "entmax(learned)", "entmax(1.2)", "hard(tie=right)", "entmax(2.5)",
    "gd(coherence=0.2)", "topk(1)", "gd(alpha=0.7, beta=0.5, coherence=0.2, keep=all, tau=2.0)", "topk(50)", "gd(keep=all)",
    "abstain(entmax(1.5), threshold=0.1)",
]  # fmt: skip
RULES = {
    "none": lambda Q, K: None,
    "causal": lambda Q, K: Causal(),
    "window": lambda Q, K: Causal() & Window(5),
    "window ahead": lambda Q, K: Window(3, ahead=2),
    "padding": lambda Q, K: Padding(torch.tensor([K - 2])),
    "left padding": lambda Q, K: Causal() & Padding(torch.tensor([3]), side="left"),
    "prefix": lambda Q, K: Causal() | Prefix(9),
    "documents": lambda Q, K: Causal() & Document(torch.arange(K) // 5),
    "mask": lambda Q, K: torch.rand(1, 2, Q, K, generator=torch.Generator().manual_seed(3)) < 0.4,
    "mask of keys": lambda Q, K: Causal() & (torch.rand(K, generator=torch.Generator().manual_seed(1)) < 0.5)[None],
    "empty rows": lambda Q, K: (torch.arange(Q) % 3 > 0)[:, None].expand(Q, K) & Causal(),
    "imprints": lambda Q, K: Behind(4, Causal()),
}
GEOMETRIES = [
    "trace(gamma=0.3)", "euclidean", "cosine(temperature=0.3)", "trace(base=none)", "rbf", "self_conditioned(form=key_bias)",
    "trace(gamma=0.4, norm=unit)", "self_conditioned(form=low_rank)", "dot(scale=0.7)",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(launch, "ROWS", 16)
    monkeypatch.setattr(launch, "KEYS", 16)
    with preferring("triton"):
        yield


def some(cases, turn=0):
    return list(cases)[turn % SHARE :: SHARE]


def assert_kernel_is_plain(spec, situation, state=None):
    state = state_for(spec, situation) if state is None else state
    q, k, v = inputs(situation)
    # A table that trains is for tiles.
    state, leaves = (state, []) if spec.position.name == "relative" else trained(state)
    made = explain(q, k, v, spec, allow=situation.allow(situation.queries, situation.keys), state=state)
    assert made.backend == "triton", str(made)
    assert "never measured" in str(made)
    assert_fast_is_plain(spec, situation, state, leaves)


@pytest.mark.parametrize(("selection", "rule"), some([(s, r) for s in SELECTIONS for r in RULES], 1))
def test_selection_under_a_rule(selection, rule):
    """37 rows and keys in blocks of 16; two query heads share a key head."""
    situation = Situation(heads=2, key_heads=1, queries=37, keys=37, batch=1, allow=RULES[rule])
    assert_kernel_is_plain(parse(selection), situation)


def lines():
    """Every geometry with the first selections, the positions taking turns; gd and a bias that raises scores are for tiles."""
    for geometry in GEOMETRIES:
        for selection in SELECTIONS[:6]:
            position = ["", "alibi", "relative", "rope"][len(geometry + selection) % 4]
            spec = joined(geometry, selection, position)
            if spec is not None and (selection, position) != ("gd", "relative"):
                yield str(spec)


@pytest.mark.parametrize("line", some(lines(), 2))
def test_geometry_and_position(line):
    spec = parse(line)
    for situation in some(
        [
            Situation(heads=2, key_heads=1, queries=5, keys=19, batch=2, allow=RULES["causal"]),
            Situation(heads=2, key_heads=2, queries=3, keys=1, batch=1),
        ],
        len(line),
    ):
        assert_kernel_is_plain(spec, situation)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(("selection", "dtype"), some([(s, d) for s in SELECTIONS[:5] for d in DTYPES], 4))
def test_every_dtype(selection, dtype):
    situation = Situation(heads=2, key_heads=1, queries=21, keys=35, batch=1)
    q, k, v = (x.requires_grad_() for x in inputs(situation, 20, 9, dtype=dtype))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, plain = attend(q, k, v, selection, allow=Causal()), attend_plainly(*exact, selection, allow=Causal()).output
    assert out.dtype == dtype
    near = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), plain, atol=near, rtol=near)
    along = torch.ones_like(out)
    for found, expected in zip(
        torch.autograd.grad(out, [q, k, v], along), torch.autograd.grad(plain, exact, along.double()), strict=True
    ):
        assert float((found.double() - expected).abs().max()) <= near * (1 + float(expected.abs().max()))


@pytest.mark.parametrize("selection", some(["hard", "hard(tie=right)", "topk(3)", "topk(7)", "gd", "sparsemax"], 2))
def test_equal_scores_go_where_the_definition_sends_them(selection):
    """Whole numbers and repeated keys: ties within a block, and between blocks."""
    situation = Situation(heads=1, key_heads=1, queries=9, keys=50, batch=1)
    q, k, v = inputs(situation)
    q, k = q.round(), k[:, :, torch.arange(50) * 7 % 13].round()
    if selection != "gd":
        # A distance that is lowered is rounded, and the whole numbers of its definition are not.
        assert_agree(attend(q, k, v, selection), attend_plainly(q, k, v, selection).output)
    same = torch.zeros_like(k)
    assert_agree(attend(q, same, v, selection), attend_plainly(q, same, v, selection).output)


@pytest.mark.parametrize("selection", some(SELECTIONS[:5], 1))
def test_not_finite_is_said(selection):
    situation = Situation(heads=1, key_heads=1, queries=3, keys=20, batch=1)
    for number in ("nan", "inf"):
        q, k, v = inputs(situation)
        q[0, 0, 1] = float(number)
        with pytest.raises(ValueError, match="q has 6 of"):
            attend(q, k, v, selection)
    q, k, v = inputs(situation)
    with pytest.raises(ValueError, match="overflow"):
        attend(q * 1e200, k * 1e200, v, selection)
    if selection in ("entmax(1.5)", "hard", "topk(3)"):
        q[0, 0, 1] = float("nan")
        with pytest.raises(ValueError, match="q has 6 of"):
            attend(q, k, v, f"abstain({selection}, threshold=5)")


def test_what_nobody_may_meet_has_no_part():
    """Keys that are hidden may be NaN-free rubbish of any size; rows that meet nothing are zeros, with gradients of zero."""
    situation = Situation(heads=1, key_heads=1, queries=20, keys=20, batch=2)
    q, k, v = (x.requires_grad_() for x in inputs(situation))
    for line in some(SELECTIONS[:5], 3):
        out = attend(q, k, v, line, allow=Padding(torch.tensor([0, 4])))
        assert not out[0].any()
        grads = torch.autograd.grad(out.sum(), [q, k, v])
        assert not any(g[0].any() for g in grads)
        assert not grads[2][1, :, 4:].any()


def test_a_gradient_of_a_gradient_is_refused():
    q, k, v = (x.requires_grad_() for x in inputs(Situation(heads=1, key_heads=1, queries=3, keys=3, batch=1)))
    (slope,) = torch.autograd.grad(attend(q, k, v, "sparsemax").sum(), q, create_graph=True)
    with pytest.raises(ValueError, match="second derivative"):
        slope.sum().backward()


@pytest.mark.parametrize(
    ("line", "allow", "because"),
    [
        ("selective", None, "no softmax"),
        ("pointer(sparsemax)", None, "no softmax"),
        ("abstain(sparsemax, null_logit=0)", None, "no softmax"),
        ("additive | sparsemax", None, "no softmax"),
        ("topk(65)", None, "no softmax"),
        ("sparsemax", ~Causal(), "no softmax"),
        ("euclidean | gd | relative", None, "one key per row"),
    ],
)
def test_the_rest_stays_in_tiles(line, allow, because):
    situation = Situation(heads=2, key_heads=2)
    made = explain(*inputs(situation), line, allow=allow, state=state_for(parse(line), situation))
    assert made.backend == "tiled"
    assert because in str(made)


def test_random_calls():
    """Those of the conformance suite that a kernel takes."""
    seen = 0
    for seed in range(4000):
        d = draw(seed)
        if d.spec.inner.name not in ("entmax", "sparsemax", "topk", "hard", "gd") or d.spec.points or not d.q.numel():
            continue
        with suppress(ValueError):
            if explain(d.q, d.k, d.v, d.spec, allow=d.allow, state=d.state).backend != "triton":
                continue
        verdict(replace(d, small_tiles=False))
        seen += 1
        if seen == 160 // SHARE:
            break
    assert seen == 160 // SHARE
