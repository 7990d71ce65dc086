"""Rules and biases through FlexAttention: its plain form on CPU gives outputs and gradients, and the lists of blocks are counted.

The fused form is compiled for a device; on CPU torch has none with a gradient, so that the plan never chooses it there.
"""

import pytest
import torch
from helpers import SITUATIONS, Situation, assert_fast_is_plain, inputs, state_for, trained
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as torchs

from regard import Causal, Document, Padding, Prefix, State, Window, explain, parse
from regard.attention import flex
from regard.attention.allow import Allow, Alone, Behind, Tile
from regard.attention.plan import preferring
from regard.attention.problem import pose

LINES = [
    "dot", "alibi", "euclidean | alibi", "trace(gamma=0.3) | relative", "self_conditioned(form=self_token)", "softmax(0.7) | relative",
    "abstain(softmax(0.7), null_logit=0.5) | alibi", "cosine(temperature=learned)", "softmax(learned)", "rbf | hopfield(steps=2)",
]  # fmt: skip
RULES = {
    "window": lambda Q, K: Causal() & Window(5),
    "ahead": lambda Q, K: Window(4, ahead=3),
    "documents": lambda Q, K: Causal() & Document(torch.arange(K) // 5),
    "documents of a batch": lambda Q, K: Document(torch.stack([torch.arange(K) // 5, torch.arange(K) // 9])),
    "prefix": lambda Q, K: Causal() | Prefix(9),
    "padding": lambda Q, K: Causal() & Padding(torch.tensor([K - 2, 3]), side="left"),
    "not": lambda Q, K: ~Causal(),
    "mask": lambda Q, K: torch.rand(2, 1, Q, K, generator=torch.Generator().manual_seed(3)) < 0.4,
    "mask of keys": lambda Q, K: (torch.arange(K) % 3 > 0).expand(1, K),
    "nothing": lambda Q, K: Padding(torch.tensor([0, 5])),
    "imprints": lambda Q, K: Behind(4, Causal()) & Alone(4, 2),
}


@pytest.fixture
def plain_form(monkeypatch):
    """FlexAttention as it is written, with the gradient that torch refuses on CPU for its fused form alone."""
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
    monkeypatch.setattr(torchs, "_validate_device", lambda *_: None, raising=False)
    with preferring("flex"):
        yield


@pytest.mark.usefixtures("plain_form")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("line", LINES[:6:2])
def test_rules_give_the_definition_and_its_gradients(line, rule):
    situation = Situation(heads=4, key_heads=2, queries=17, keys=17, allow=RULES[rule])
    conforms(parse(line), situation)


@pytest.mark.usefixtures("plain_form")
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("situation", ["fewer queries", "empty rows", "more queries"])
def test_lines_give_the_definition_and_its_gradients(line, situation):
    conforms(parse(line), SITUATIONS[situation])


def conforms(spec, situation):
    state = state_for(spec, situation)
    # A table that trains is for tiles.
    state, leaves = (state, []) if spec.position.name == "relative" else trained(state)
    q, k, v = inputs(situation)
    assert explain(q, k, v, spec, allow=situation.allow(situation.queries, situation.keys), state=state).backend == "flex"
    assert_fast_is_plain(spec, situation, state, leaves)


@pytest.mark.parametrize("lead", [0, 1, 5])
@pytest.mark.parametrize("lengths", [(64, 64), (37, 53), (5, 50), (50, 5), (1, 40)])
@pytest.mark.parametrize("rule", RULES)
def test_blocks_hold_every_pair_and_full_ones_hold_no_other(rule, lengths, lead):
    Q, K = lengths
    if "document" in rule and Q > K:
        Q = K
    q, k, v = inputs(Situation(heads=2, key_heads=1, queries=Q, keys=K))
    p = pose(q, k, v, "dot", (None, None, None), RULES[rule](Q, K), None)
    block = 16
    some, full = flex.blocks(p, lead, block)
    allowed = p.allow.tile(Tile(0, Q, 0, K, p.offset, q.device)).expand(2, 2, Q, K)
    allowed = torch.nn.functional.pad(allowed, (lead, 0), value=True)
    wide = torch.nn.functional.pad(allowed, (0, -(lead + K) % block, 0, -Q % block))
    wide = wide.unflatten(-1, (-1, block)).unflatten(2, (-1, block))
    assert bool((~wide.any(-1).any(-2).mT.mT | some.expand(2, 2, *some.shape[2:])).all()), "a pair lies in no block"
    assert bool((~full | wide.all(-1).all(3)).all()), "a full block has a pair that may not meet"
    mod = flex._behind(flex.pair_of(p.allow, p.offset), lead)
    made = flex.block_mask(p, mod, lead, block)
    dense = made.to_dense().bool()
    assert torch.equal(dense, some), "the lists are not the blocks"
    every = torchs.create_mask(mod, 2, 2, Q, lead + K, device="cpu")
    assert torch.equal(every, allowed), "the function of a pair is not the rule"


def test_window_and_causal_blocks_are_few_and_mostly_not_asked():
    q, k, v = inputs(Situation(heads=1, key_heads=1, queries=512, keys=512, batch=1))
    p = pose(q, k, v, "dot", (None, None, None), Causal(), None)
    some, full = flex.blocks(p, 0, 64)
    assert (int(some.sum()), int(full.sum())) == (36, 28)
    p = pose(q, k, v, "dot", (None, None, None), Causal() & Window(65), None)
    assert int(flex.blocks(p, 0, 64)[0].sum()) == 15
    p = pose(q, k, v, "dot", (None, None, None), Document(torch.arange(512) // 64), None)
    some, full = flex.blocks(p, 0, 64)
    assert (int(some.sum()), int(full.sum())) == (8, 8)


class OnTiles(Allow):
    """A rule that somebody wrote elsewhere."""

    def tile(self, t):
        return (t.k_at() <= t.q_at())[None, None]


@pytest.mark.parametrize(
    ("line", "allow", "device", "backend", "because"),
    [
        ("dot", Causal() & Window(5), "cuda", "flex", "torch's FlexAttention on cuda"),
        ("alibi", None, "cuda", "flex", "a bias is a table by distance"),
        ("euclidean", Causal() | Prefix(3), "xpu", "flex", "one more column"),
        ("dot", Causal() & Window(5), "mps", "columns", "FlexAttention has no gradient on mps"),
        ("dot", OnTiles(), "cuda", "columns", "the rule is not known to FlexAttention"),
        ("softmax(learned) | alibi", None, "cuda", "columns", "learned temperature divides"),
        ("dot", Causal() & Window(5), "cpu", "flash", "masks for chunks"),
    ],
)
def test_where_it_is_chosen(line, allow, device, backend, because):
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty(2, 4, 256, 16, device=device) for _ in range(3))
        state = State(temperature=torch.ones(4, device=device))
        made = explain(q, k, v, line, allow=allow, state=state)
        few = explain(torch.empty(2, 4, 64, 16, device=device), k, v, line, allow=allow, state=state)
    assert (made.backend, because in str(made)) == (backend, True), str(made)
    assert few.backend != "flex", "a step of decoding would be compiled again and again"
