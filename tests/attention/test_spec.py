"""Specs: one line names a mechanism, reads back as itself, and can do no harm."""

from dataclasses import fields

import pytest
import torch
from helpers import GEOMETRY_SPECS, POSITION_SPECS, SELECTION_SPECS, every, joined
from hypothesis import given
from hypothesis import strategies as st

from regard import CombinationError, Spec, SpecError, attend, parse
from regard.geometry import GEOMETRIES, Dot, Trace
from regard.position import POSITIONS, Rope
from regard.selection import SELECTIONS, Abstain, Entmax, Softmax, TopK

positive = st.floats(1e-6, 1e6) | st.integers(1, 10**6)
learnable = positive | st.just("learned")
optional = st.none() | positive
INNER = st.sampled_from(["softmax", "sparsemax", "topk", "entmax", "hard"])

VALUES = {
    ("dot", "scale"): optional, ("cosine", "temperature"): learnable, ("euclidean", "scale"): optional,
    ("rbf", "gamma"): optional, ("trace", "gamma"): st.floats(-1e3, 1e3), ("trace", "base"): st.sampled_from(["dot", None]),
    ("trace", "norm"): st.sampled_from(["raw", "unit"]), ("polynomial", "degree"): st.sampled_from([2, 4, 6]),
    ("polynomial", "constant"): st.floats(-10, 10),
    ("self_conditioned", "form"): st.sampled_from(["uniform", "temperature", "key_bias", "low_rank", "self_token", "null_slot"]),
    ("softmax", "temperature"): learnable, ("sparsemax", "alpha"): st.just(2.0),
    ("entmax", "alpha"): st.floats(1.001, 9) | st.just("learned"), ("topk", "k"): st.integers(1, 10**6),
    ("hard", "tie"): st.sampled_from(["left", "right"]), ("monotonic", "mode"): st.sampled_from(["expected", "hard"]),
    ("linear", "map"): st.sampled_from(["elu", "exp", "identity"]), ("linear", "features"): st.integers(1, 999),
    ("linear", "seed"): st.integers(0, 99), ("linear", "delta"): st.none() | st.floats(0.01, 2), ("linear", "decay"): st.floats(0.01, 1),
    ("hopfield", "beta"): optional, ("hopfield", "steps"): st.integers(1, 9),
    ("gd", "alpha"): st.floats(0.01, 0.99), ("gd", "beta"): positive, ("gd", "coherence"): st.floats(0, 9),
    ("gd", "keep"): st.sampled_from(["nearest", "all"]), ("gd", "tau"): positive,
    ("pointer", "inner"): INNER, ("abstain", "inner"): INNER, ("abstain", "null_logit"): st.none(),
    ("abstain", "threshold"): st.floats(-9, 9) | st.just(float("-inf")),
    ("sinusoidal", "base"): positive, ("rope", "base"): positive, ("rope", "fraction"): st.floats(0.01, 1),
    ("rope", "layout"): st.sampled_from(["half", "interleaved"]), ("rope", "scaling"): st.sampled_from([None, "linear", "yarn"]),
    ("rope", "factor"): positive, ("rope", "original"): st.integers(1, 10**5), ("rope", "low"): st.floats(0.1, 2),
    ("rope", "high"): st.none() | st.floats(3, 9), ("rope", "stretch"): optional, ("relative", "buckets"): st.sampled_from([8, 16, 32]),
    ("relative", "max_distance"): st.integers(33, 1000), ("relative", "direction"): st.sampled_from(["both", "past"]),
}  # fmt: skip


@st.composite
def parts(draw, table):
    name = draw(st.sampled_from(sorted(table)))
    given_values = {f.name: draw(VALUES[name, f.name]) for f in fields(table[name])}
    if "inner" in given_values:
        given_values["inner"] = SELECTIONS[given_values["inner"]]()
    return table[name](**given_values)


def test_every_parameter_of_every_row_is_drawn():
    drawn = {(name, f.name) for table in (GEOMETRIES, SELECTIONS, POSITIONS) for name, c in table.items() for f in fields(c)}
    assert drawn == set(VALUES)


@given(parts(GEOMETRIES), parts(SELECTIONS), parts(POSITIONS))
def test_a_spec_reads_back_as_itself(geometry, selection, position):
    try:
        spec = Spec(geometry, selection, position)
    except CombinationError:
        return
    assert parse(str(spec)) == spec
    assert parse(parse(str(spec))) == spec


@pytest.mark.parametrize("line", every(GEOMETRY_SPECS) + every(SELECTION_SPECS) + every(POSITION_SPECS))
def test_every_example_reads_back(line):
    spec = parse(line)
    assert parse(str(spec)) == spec
    assert str(parse(str(spec))) == str(spec)


def test_parts_come_in_any_order_and_may_be_left_out():
    whole = parse("trace(gamma=0.3) | entmax(1.5) | rope")
    assert parse("rope | entmax(1.5) | trace(gamma=0.3)") == whole == parse("  trace(0.3)|entmax()|  rope()")
    assert whole == Spec(Trace(gamma=0.3), Entmax(1.5), Rope())
    assert str(whole) == "trace(gamma=0.3) | entmax | rope"
    assert parse("rope").geometry == Dot()
    assert parse("rope").selection == Softmax()
    assert parse("gd").geometry.name == "euclidean"
    assert parse("abstain(topk(2), null_logit=-1)").selection == Abstain(TopK(2), null_logit=-1)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("cosin", r"did you mean cosine\?.*geometry: dot, cosine.*selection: softmax.*position: sinusoidal"),
        ("attention", r"'attention' is no mechanism.*geometry: dot"),
        ("dot | cosine", r"two of one kind, dot and cosine \(geometry\)"),
        ("topk(4, 5)", r"topk\(4, 5\): topk takes k"),
        ("cosine(temprature=0.2)", r"temprature is not a free parameter.*did you mean temperature\?"),
        ("topk(4, k=5)", r"k is not a free parameter"),
        ("topk(0)", r"topk\(k=0\): k counts keys, so it is a whole number of at least 1"),
        ("topk(2.5)", r"topk\(k=2.5\)"),
        ("entmax(1)", r"entmax\(alpha=1\): alpha must be above 1 \(1 is softmax, 2 is sparsemax\), or learned"),
        ("entmax(0.5)", r"alpha=0.5"),
        ("entmax(-2)", r"alpha=-2"),
        ("softmax(0)", r"softmax\(temperature=0\): temperature must be a number above 0"),
        ("softmax(none)", r"temperature=none"),
        ("cosine(none)", r"temperature=none"),
        ("dot(scale=learned)", r"scale=learned"),
        ("euclidean(scale=learned)", r"scale=learned"),
        ("hopfield(beta=learned)", r"beta=learned"),
        ("rope(base=learned)", r"base=learned"),
        ("rope(base=none)", r"base=none"),
        ("gd(tau=none)", r"tau=none"),
        ("gd(alpha=1)", r"strictly between 0 and 1"),
        ("hopfield(steps=0)", r"whole number of at least 1"),
        ("hard(tie=middle)", r"one of left, right"),
        ("self_conditioned(form=mood)", r"one of uniform, temperature, key_bias"),
        ("abstain(softmax)", r"exactly one of null_logit and threshold"),
        ("abstain(softmax, null_logit=0, threshold=0)", r"exactly one of null_logit and threshold"),
        ("abstain(gd, threshold=0)", r"gd refuses by its own coherence"),
        ("abstain(3, threshold=0)", r"first argument is a selection"),
        ("pointer(pointer)", r"write pointer\(abstain"),
        ("polynomial(degree=3)", r"even whole number"),
        ("polynomial(constant=inf)", r"constant"),
        ("abstain(softmax, null_logit=inf)", r"null_logit"),
        ("rope(fraction=1.5)", r"\(0, 1\]"),
        ("rope(scaling=warp)", r"none, linear, ntk,.*yarn"),
        ("rope(scaling=llama3, low=4, high=4)", r"low must be below 4"),
        ("relative(buckets=32, max_distance=8)", r"max_distance=8.*above 8"),
        ("sparsemax(1.5)", r"write entmax\(alpha\)"),
    ],
)
def test_a_bad_line_is_refused_with_its_fix(line, says):
    with pytest.raises(SpecError, match=says):
        parse(line)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "   ",
        "|",
        "dot |",
        "__import__('os').system('false')",
        "softmax(__import__('os'))",
        "softmax((lambda: 1)())",
        "softmax([x for x in ().__class__.__base__.__subclasses__()])",
        "dot.scores",
        "dot[0]",
        "dot and softmax",
        "dot + softmax",
        "softmax(temperature=1e999)",
        "softmax(temperature=-1e999)",
        "softmax(temperature=10**9)",
        "topk(" + "9" * 5000 + ")",
        "topk(" + "9" * 400 + ")",
        "dot(scale=" + "9" * 400 + ")",
        "softmax(1j)",
        "softmax(True)",
        "softmax(b'1')",
        "softmax(*[1])",
        "softmax(**{'temperature': 1})",
        "abstain(" * 150 + "softmax" + ")" * 150,
        "pointer(" * 90 + "softmax" + ")" * 90,
        "(" * 5000,
        "softmax(" + "-" * 900 + "1)",
        "softmax(" + "-" * 50000 + "1)",
        "dot|" * 5000 + "softmax",
        "softmax(" + "+".join(["1"] * 900) + ")",
        "softmax\x00",
        "soft\nmax",
        "softmax; import os",
        "\ud800",
        "x := softmax",
        "f'{softmax}'",
    ],
    ids=lambda line: ascii(line[:24]),
)
def test_a_hostile_line_is_refused_and_never_run(line, monkeypatch):
    monkeypatch.setattr("os.system", lambda *_: pytest.fail("a spec was executed"))
    with pytest.raises(SpecError):
        parse(line)


@given(st.text(max_size=40))
def test_any_text_is_a_spec_or_a_spec_error(text):
    try:
        spec = parse(text)
    except (SpecError, CombinationError):
        return
    assert parse(str(spec)) == spec


def test_a_spec_is_a_line_or_a_spec():
    with pytest.raises(SpecError, match="not a int"):
        parse(3)  # type: ignore[arg-type]


def test_refused_combinations_say_why():
    assert joined("trace(base=none)", "rope") is None
    for line, says in {
        "trace(base=none) | rope": "use base=dot or alibi",
        "cosine | energy": "use dot",
        "additive | gd": "gives none",
        "self_conditioned(form=null_slot) | monotonic": "a slot has no place in the order",
        "additive | hopfield(beta=2)": "leave beta out",
        "polynomial | hopfield(steps=2)": "no such space",
    }.items():
        with pytest.raises(CombinationError, match=says):
            parse(line)


def test_objects_and_a_line_are_the_same_call():
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    by_line = attend(q, k, v, "dot(scale=0.4) | topk(2) | alibi")
    by_parts = attend(q, k, v, geometry=Dot(0.4), selection=TopK(2), position=POSITIONS["alibi"]())
    assert torch.equal(by_line, by_parts)
