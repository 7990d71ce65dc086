"""Bad input is refused with the offending values and the fix; hard numbers give a finite result or say why not."""

import pytest
import torch
from helpers import D, E, Situation, assert_agree, inputs, random

from regard import (
    Additive,
    Causal,
    CombinationError,
    Document,
    LowRank,
    Mask,
    NumericsError,
    Padding,
    Prefix,
    RegardError,
    Self,
    ShapeError,
    SpecError,
    State,
    StateError,
    Window,
    attend,
    explain,
    inspect,
)
from regard.nn import Attention
from regard.selection import Softmax

GQA = Situation(heads=4, key_heads=2)


def changed(**new):
    q, k, v = inputs(GQA)
    return [new.get(n, x) for n, x in (("q", q), ("k", k), ("v", v))]


@pytest.mark.parametrize(
    ("new", "says"),
    [
        ({"q": random(4, 7, D)}, r"q is \(4, 7, 6\); it must have 4 dimensions, \(B, heads, length, width\)"),
        ({"k": random(1, 2, 2, 7, D)}, r"k is \(1, 2, 2, 7, 6\); it must have 4 dimensions"),
        ({"v": random(7, E)}, r"v is \(7, 5\)"),
        ({"q": random(2, 3, 7, D)}, r"H=3 query heads is not a multiple of G=2 key heads"),
        ({"q": random(3, 4, 7, D)}, r"q is \(3, 4, 7, 6\).*the batch sizes differ"),
        ({"q": random(2, 4, 7, D + 1)}, r"q and k need the same width D"),
        ({"v": random(2, 2, 8, E)}, r"k and v need the same heads and the same length"),
        ({"v": random(2, 4, 7, E)}, r"k and v need the same heads"),
        ({"v": random(2, 2, 7, 0)}, r"widths of 0"),
        ({"v": random(2, 2, 7, E, dtype=torch.float32)}, r"q, k, v are torch.float64, torch.float64, torch.float32; make them"),
        ({"q": torch.ones(2, 4, 7, D, dtype=torch.long)}, r"q is torch.int64; use float32"),
        ({"q": [[1.0]]}, r"q is a list; q, k and v are tensors"),
        ({"v": None}, r"v is None; only pointer and energy do without values"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
@pytest.mark.parametrize("call", [attend, inspect, explain])
def test_tensors_that_do_not_fit(call, new, says):
    with pytest.raises(ShapeError, match=says):
        call(*changed(**new))


@pytest.mark.parametrize(
    ("allow", "says"),
    [
        (torch.ones(7, 6, dtype=torch.bool), r"mask is \(1, 1, 7, 6\); it must broadcast to \(B, H, Q, K\) = \(2, 4, 7, 7\)"),
        (torch.ones(3, 1, 1, 7, dtype=torch.bool), r"\(3, 1, 1, 7\).*\(2, 4, 7, 7\)"),
        (torch.ones(7, dtype=torch.bool), r"mask is \(7,\); it must have 2 to 4 dimensions"),
        (torch.ones(7, 7, dtype=torch.long), r"allow is a torch.int64 tensor.*boolean tensor, True = may attend"),
        (torch.zeros(7, 7), r"allow is a torch.float32 tensor"),
        ("causal", r"allow is a str; it must be a rule such as Causal\(\)"),
        (Padding(torch.tensor([3])), r"lengths \(1,\); it needs one for each of 2 batch rows"),
        (Padding(torch.tensor([3, 8])), r"lengths \[3, 8\]; they lie in 0\.\.7"),
        (Padding(torch.tensor([3, 8])) & Window(2), r"they lie in 0\.\.7"),
        (Padding(torch.tensor([3, 3]), side="top"), r"'right' or 'left'"),
        (Padding([9]), r"lengths \[9\], a list; pass a tensor, as in Padding\(torch\.tensor"),
        (Padding(torch.tensor([9, 9])), r"lengths \[9, 9\]; they lie in 0\.\.7"),
        (Padding(torch.tensor([-1, 3])), r"lengths \[-1, 3\]; they lie in 0\.\.7"),
        (Padding(torch.tensor([2.5, 3.0])), r"lengths of torch\.float32; they count keys"),
        (Padding(torch.tensor([True, False])), r"lengths of torch\.bool; they count keys"),
        (Padding(torch.ones(2, 7, dtype=torch.long)), r"lengths \(2, 7\); it needs one for each of 2"),
        (Padding(torch.tensor([3, 3], device="meta")), r"lengths on meta, and q is on cpu"),
        (~Padding([9]) | Window(2), r"lengths \[9\], a list"),
        (Mask(torch.ones(1, 1, 7, 7)), r"the mask is torch\.float32; it is a boolean tensor"),
        (Mask(torch.ones(7, 7, dtype=torch.bool)), r"mask is \(7, 7\); it must broadcast"),
        (Mask([[True]]), r"allowed \[\[True\]\], a list"),
        (torch.ones(7, 7, dtype=torch.bool, device="meta"), r"on meta, and q is on cpu"),
        (Document([0] * 7), r"ids \[0, 0, 0, 0, 0, 0, 0\], a list"),
        (Document(torch.zeros(6)), r"ids \(6,\); it needs \(B, K\) = \(2, 7\)"),
    ],
)
def test_rules_that_do_not_fit(allow, says):
    with pytest.raises(ShapeError, match=says):
        attend(*inputs(GQA), allow=allow)


@pytest.mark.parametrize("rule", [lambda: Window(2.5), lambda: Window("3"), lambda: Window(True), lambda: Window(3, -1),
                                  lambda: Prefix(-1), lambda: Prefix(1.5), lambda: Prefix([2])])  # fmt: skip
def test_a_rule_counts_keys_in_whole_numbers(rule):
    with pytest.raises(ShapeError, match=r"counts"):
        rule()


@pytest.mark.parametrize("offset", [-1, 6, 5, 100])
@pytest.mark.parametrize("line", ["dot", "euclidean", "sparsemax"])
def test_a_query_that_stands_at_no_key_has_no_document(line, offset):
    q, k, v = inputs(Situation(queries=3, keys=7))
    rule = Causal() & Document(torch.tensor([0, 0, 0, 1, 1, 2, 2]))
    with pytest.raises(ShapeError, match=rf"positions {offset}\.\.{offset + 2} are not among the 7 keys.*0\.\.4 here"):
        attend(q, k, v, line, allow=rule, state=State(offset=offset))


@pytest.mark.parametrize("offset", range(5))
@pytest.mark.parametrize("line", ["dot", "euclidean", "sparsemax", "alibi"])
def test_a_query_reads_the_document_of_its_own_position(line, offset):
    q, k, v = inputs(Situation(queries=3, keys=7))
    ids = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    same = ids[offset : offset + 3, None] == ids
    found = attend(q, k, v, line, allow=Document(ids), state=State(offset=offset))
    assert_agree(found, attend(q, k, v, line, allow=same, state=State(offset=offset)))


def test_a_window_without_its_own_position_is_refused():
    with pytest.raises(ShapeError, match=r"keys >= 1"):
        Window(0)
    with pytest.raises(ShapeError, match=r"more queries|not among|queries are not among"):
        attend(random(1, 1, 5, 4), *(random(1, 1, 3, 4),) * 2, allow=Document(torch.zeros(3)))


NOT_A_NUMBER = random(2, D, D)
NOT_A_NUMBER[1, 2, 3] = float("nan")

BAD_STATES = [
    ("trace", State(), StateError, r"trace needs state\.trace, and the state carries nothing: pass state=State\(trace=\.\.\.\)"),
    ("trace", State(alpha=torch.ones(4)), StateError, r"the state carries alpha"),
    ("trace", State(trace=random(2, D, D - 1)), ShapeError, r"\(2, 6, 5\); a trace is square, \(G, D, D\) = \(2, 6, 6\)"),
    ("trace", State(trace=random(2, D - 1, D - 1)), ShapeError, r"\(2, 5, 5\).*\(H, D, D\) = \(4, 6, 6\) per query head"),
    ("trace", State(trace=random(3, D, D)), ShapeError, r"\(3, 6, 6\)"),
    ("trace", State(trace=random(D, D)), ShapeError, r"\(6, 6\)"),
    ("trace", State(trace=random(3, 2, D, D)), ShapeError, r"\(3, 2, 6, 6\) and q has a batch of 2; give one T for each row"),
    ("trace", State(trace=NOT_A_NUMBER), StateError, r"state\.trace has 1 values that are not finite out of 72; roll back"),
    ("trace", State(trace=LowRank(random(2, D, 2), random(2, D, 3))), ShapeError, r"left \(2, 6, 2\) and right \(2, 6, 3\)"),
    ("trace", State(trace="T"), StateError, r"state\.trace is a str"),
    ("self_conditioned", State(), StateError, r"needs state\.self"),
    ("self_conditioned", State(self=Self(random(3))), StateError, r"needs the weight 'U'; state\.self has none"),
    ("self_conditioned", State(self=Self(random(3), {"U": random(2, D, 4)})), ShapeError, r"'U' is \(2, 6, 4\).*D=6, S=3 takes"),
    ("self_conditioned", State(self=Self(random(5, 3), {"U": random(2, D, 3)})), ShapeError, r"s is \(5, 3\).*B=2 from q"),
    ("self_conditioned", State(self=Self(random(3) * torch.nan, {"U": random(2, D, 3)})), StateError, r"3 values that are not"),
    ("self_conditioned(form=self_token)", State(self=Self(random(3), {"W_k": random(2, D, 3), "W_v": random(2, D, 3)})),
     ShapeError, r"'W_v' is \(2, 6, 3\)"),
    ("affect", State(), StateError, r"affect needs state\.self"),
    ("affect", State(self=Self(random(3), {"w": random(4, 3)})), StateError, r"affect needs the weight 't'; state\.self has w"),
    ("affect", State(self=Self(random(3), {"w": random(2, 3), "t": random(4, 3)})), ShapeError, r"'w' is \(2, 3\); affect with H=4"),
    ("additive", State(), StateError, r"needs state\.additive"),
    ("additive", State(additive=Additive(random(4, 7), random(4, 7, D), random(4, 7, 9))), ShapeError, r"w_k is \(4, 7, 9\).*D=6"),
    ("entmax(learned)", State(), StateError, r"entmax\(alpha=learned\) needs state\.alpha"),
    ("entmax(learned)", State(alpha=torch.tensor([1.5, 1.0, 2.0, 2.0])), StateError, r"1\.0.*every value must be above 1"),
    ("entmax(learned)", State(alpha=torch.tensor([1.5])), ShapeError, r"\(1,\).*one number per query head, \(4,\)"),
    ("entmax(learned)", State(alpha=torch.full((4,), torch.nan)), StateError, r"nan"),
    ("softmax(learned)", State(temperature=torch.tensor([1.0, 1, 1, -1])), StateError, r"above 0"),
    ("cosine(temperature=learned)", State(), StateError, r"needs state\.temperature"),
    ("cosine(temperature=learned)", State(temperature=torch.tensor([1.0, 1, 1, -1])), StateError, r"above 0"),
    ("cosine(temperature=learned)", State(temperature=torch.ones(3)), ShapeError, r"\(3,\).*\(4,\)"),
    ("relative", State(), StateError, r"needs state\.relative"),
    ("relative", State(relative=random(32, 2)), ShapeError, r"\(32, 2\).*needs \(32, 4\)"),
    ("learned", State(), StateError, r"needs state\.positions"),
    ("trace", State(trace=LowRank(random(2, D, 2), signs=random(3))), ShapeError, r"signs \(3,\); with rank 2 they are \(2,\)"),
    ("trace", State(trace=LowRank(None)), StateError, r"state\.trace\.left is a NoneType; it must be a tensor"),
    ("dot", State(offset=1.5), StateError, r"state\.offset is 1\.5; it is the position of the first query, a whole number"),
    ("dot", State(offset=True), StateError, r"state\.offset is True"),
    ("dot", State(offset="3"), StateError, r"state\.offset is '3'"),
    ("entmax(learned)", State(alpha=[2.0] * 4), StateError, r"state\.alpha is a list; it must be a tensor"),
    ("entmax(learned)", State(alpha=torch.full((4,), 2.0, device="meta")), StateError, r"state\.alpha is on meta, and q is on cpu"),
    ("trace", State(trace=random(2, D, D).to(torch.complex64)), StateError, r"state\.trace is torch\.complex64; it must be real"),
    ("additive", State(additive=Additive([1.0], random(7, D), random(7, D))), StateError, r"state\.additive\.w is a list"),
    ("self_conditioned(form=self_token)", State(self="me"), StateError, r"state\.self is a str"),
    ("selective", State(carry=random(2, 9)), ShapeError, r"carry is \(2, 9\) and there are 7 keys; it is of another, longer text"),
    ("selective", State(carry=random(3, 2)), ShapeError, r"state\.carry is \(3, 2\)"),
    ("monotonic", State(carry=random(2, 3)), ShapeError, r"state\.carry is \(2, 3\)"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "state", "error", "says"), BAD_STATES)
def test_a_state_that_does_not_fit(line, state, error, says):
    with pytest.raises(error, match=says):
        attend(*inputs(GQA), line, state=state)


def test_a_state_is_a_state():
    with pytest.raises(StateError, match=r"state is a dict; pass regard\.State"):
        attend(*inputs(GQA), state={"trace": 1})  # type: ignore[arg-type]
    for empty in ({}, 0, "", False):
        with pytest.raises(StateError, match=r"pass regard\.State"):
            attend(*inputs(GQA), state=empty)  # type: ignore[arg-type]


def test_a_spec_and_parts_are_not_given_together():
    with pytest.raises(SpecError, match=r"not both: 'dot' and softmax"):
        attend(*inputs(GQA), "dot", selection=Softmax())


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("line", ["dot", "euclidean", "sparsemax", "entmax(1.3)", "topk(2)", "hard", "gd", "gd(coherence=1)",
                                  "selective", "monotonic", "monotonic(mode=hard)", "alibi", "cosine"])  # fmt: skip
def test_not_a_number_is_named(line, name):
    tensors = dict(zip("qkv", inputs(GQA), strict=True))
    tensors[name][..., 1] = float("nan")
    with pytest.raises(NumericsError, match=rf"{name} has \d+ of \d+ values that are not finite"):
        attend(*tensors.values(), line)


@pytest.mark.parametrize("line", ["hard", "topk(1)", "gd"])
def test_a_value_that_no_query_reads_may_be_anything(line):
    q, k, v = inputs(Situation(queries=1))
    read = inspect(q, k, v, "euclidean | " + line).weights().sum((1, 2)) > 0
    keys = (~read).nonzero()
    assert len(keys)
    v[keys[:, 0], :, keys[:, 1]] = 1e300
    assert attend(q, k, v, "euclidean | " + line).abs().max() < 1e3


def test_energy_needs_tokens_that_are_both_queries_and_keys():
    with pytest.raises(CombinationError, match=r"\(2, 4, 7, 6\).*\(2, 2, 7, 6\).*as many heads"):
        attend(*inputs(GQA)[:2], None, "energy")


def test_rows_and_heads_that_do_not_exist():
    seen = inspect(*inputs(GQA))
    with pytest.raises(ShapeError, match=r"rows=\[7\]: there are 7 rows"):
        seen.weights(rows=[7])
    with pytest.raises(ShapeError, match=r"heads=\[-5\]: there are 4 heads"):
        seen.weights(heads=[-5])
    with pytest.raises(CombinationError, match="only gd jumps"):
        seen.jump()


def test_a_module_refuses_heads_that_do_not_divide():
    with pytest.raises(ShapeError, match=r"heads=4 is not a multiple of key_heads=3"):
        Attention(24, 4, key_heads=3)
    with pytest.raises(ShapeError, match=r"width=25 does not divide into heads=4; give head_width"):
        Attention(25, 4)
    with pytest.raises(ShapeError, match=r"takes \(B, N, M\)"):
        Attention(24, 4)(torch.zeros(5, 24))


@pytest.mark.parametrize("wrong", [{"width": 0}, {"heads": 0}, {"heads": 4.0}, {"heads": True}, {"key_heads": 0}, {"head_width": -1},
                                   {"context_width": 0}, {"self_width": 0}], ids=str)  # fmt: skip
def test_sizes_of_a_module_are_whole_numbers_of_at_least_one(wrong):
    with pytest.raises(ShapeError, match=r"must be a whole number of at least 1"):
        Attention(**{"width": 24, "heads": 4, **wrong})


def test_a_module_says_which_width_it_takes():
    module, crossed = Attention(24, 4), Attention(24, 4, context_width=7)
    x = torch.zeros(2, 5, 24)
    for call in (module, module.inspect, module.step):
        with pytest.raises(ShapeError, match=r"the input is \(2, 5, 23\); this attention takes \(B, N, M\) with M=24"):
            call(x[..., :23])
        with pytest.raises(ShapeError, match=r"the input is a list"):
            call([[1.0]])
        with pytest.raises(
            ShapeError, match=r"the input is torch\.float64 and this attention torch\.float32; make them one dtype"
        ):
            call(x.double())
        with pytest.raises(ShapeError, match=r"the input is torch\.int64"):
            call(x.long())
    with pytest.raises(ShapeError, match=r"the context is \(2, 5, 24\); this attention takes \(B, N, M\) with M=7"):
        crossed(x, x)
    with pytest.raises(ShapeError, match=r"the batch sizes differ"):
        crossed(x, torch.zeros(3, 5, 7))
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x.bfloat16()).shape == x.shape


def test_every_error_is_a_value_error():
    assert issubclass(RegardError, ValueError)
    for error in (SpecError, ShapeError, StateError, CombinationError, NumericsError):
        assert issubclass(error, RegardError)
