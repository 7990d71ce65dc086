"""Compiled: every row of the tables is one operator in one graph, forward and backward, and decoding compiles once."""

import logging
import os
import shutil

import pytest
import torch
from helpers import (
    GEOMETRY_SPECS,
    POSITION_SPECS,
    SELECTION_SPECS,
    SITUATIONS,
    assert_agree,
    every,
    gradients,
    inputs,
    state_for,
    trained,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from regard import Causal, Mask, State, Window, attend, parse
from regard.attention import library
from regard.attention.packed import facts_of
from regard.geometry import Cosine, Euclidean
from regard.models.gpt2 import GPT2Config
from regard.models.llama import LlamaConfig
from regard.nn import Attention
from regard.position import Alibi
from regard.selection import Abstain, Entmax, TopK

LINES = [*every(GEOMETRY_SPECS), *every(SELECTION_SPECS), *every(POSITION_SPECS)]
CXX = next((c for c in (os.environ.get("CXX"), "g++", "clang++") if c and shutil.which(c)), None)
SMALL = {"vocabulary": 50, "width": 24, "depth": 2, "heads": 4}


@pytest.fixture(autouse=True)
def _compile_anew(monkeypatch):
    # What torch traces for its own tools is written line by line, and pytest would keep all of it.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def call(q: Tensor, k: Tensor, v: Tensor | None, line: str, allow, state: State) -> Tensor:
    """`attend` as its operator, called by hand."""
    return library.call(q, k, v, facts_of(line, None, None, None), allow, state)[0]


def posed(line: str, situation: str):
    s, spec = SITUATIONS[situation], parse(line)
    state, leaves = trained(state_for(spec, s))
    q, k, v = (x.requires_grad_() for x in inputs(s))
    return (q, k, None if spec.inner.both_sides else v), s.allow(s.queries, s.keys), state, [q, k, v, *leaves]


def suiting(situation: str) -> list[str]:
    return [line for line in LINES if SITUATIONS[situation].suits(parse(line))]


@pytest.mark.parametrize("line", LINES)
def test_the_operator_gives_what_eager_code_gives_and_its_gradients(line):
    for situation in [s for s in SITUATIONS if line in suiting(s)]:
        qkv, allow, state, leaves = posed(line, situation)
        eager = attend(*qkv, line, allow=allow, state=state)
        found = call(*qkv, line, allow, state)
        assert_agree(found, eager)
        for a, b in zip(gradients(found, leaves), gradients(eager, leaves), strict=True):
            assert_agree(a, b)


@pytest.mark.parametrize("line", LINES)
def test_fake_tensors_have_the_shapes_and_strides_of_real_ones(line):
    for n, situation in enumerate(s for s in SITUATIONS if line in suiting(s)):
        (q, k, v), allow, state, _ = posed(line, situation)
        real = call(q, k, v, line, allow, state)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = [None if x is None else mode.from_tensor(x) for x in (q, k, v)]
            made = attend(*fake, line, allow=allow, state=state)
        assert (made.shape, made.stride(), made.dtype) == (real.shape, real.stride(), real.dtype)
        if n == 0:
            meta = attend(*(None if x is None else x.to("meta") for x in (q, k, v)), line, state=on_meta(state))
            assert meta.is_meta
            assert meta.shape == real.shape


def on_meta(state: State) -> State:
    from regard import Additive, LowRank, Self

    def moved(x):
        match x:
            case Tensor():
                return x.to("meta")
            case LowRank(left, right, signs):
                return LowRank(moved(left), moved(right), moved(signs))
            case Self(s, weights):
                return Self(moved(s), {n: moved(w) for n, w in weights.items()})
            case Additive(w, w_q, w_k):
                return Additive(moved(w), moved(w_q), moved(w_k))
            case _:
                return x

    return State(**{name: moved(x) for name, x in vars(state).items() if name != "others"})


@pytest.mark.parametrize("situation", SITUATIONS)
def test_every_mechanism_compiles_into_one_graph(situation):
    """A fifth of the rows in each situation, taking turns, so that each row meets several rules."""
    turn = list(SITUATIONS).index(situation)
    rows = suiting(situation)[turn % 5 :: 5]
    cases = [posed(line, situation) for line in rows]

    def all_of_them(cases):
        return [attend(*qkv, line, allow=allow, state=state) for line, (qkv, allow, state, _) in zip(rows, cases, strict=True)]

    compiled = torch.compile(all_of_them, fullgraph=True, backend="aot_eager")(cases)
    assert_same(compiled, all_of_them(cases), [x for *_, leaves in cases for x in leaves])


def assert_same(found: list[Tensor], eager: list[Tensor], leaves: list[Tensor]) -> None:
    """Results and their gradients, in one backward for all: a graph is there once."""
    for a, b in zip(found, eager, strict=True):
        assert_agree(a, b)
    found, eager = (torch.cat([x.flatten() for x in xs]) for xs in (found, eager))
    for a, b in zip(gradients(found, leaves), gradients(eager, leaves), strict=True):
        assert_agree(a, b)


@pytest.mark.parametrize("line", ["dot", "trace(gamma=0.3) | rope", "entmax(1.5) | alibi", "selective", "linear(decay=0.8)"])
def test_lengths_may_change_without_another_graph(line):
    def f(q, k, v, state, window):
        return attend(q, k, v, line, allow=Causal() & Window(window), state=state)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    state = State(trace=torch.randn(2, 6, 6).double() * 0.2)
    for n, length in enumerate((7, 9, 65, 130)):
        q, k, v = (torch.randn(2, heads, length, 6).double().requires_grad_() for heads in (4, 2, 2))
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            found = compiled(q, k, v, state, 3 + n)
        eager = f(q, k, v, state, 3 + n)
        assert_agree(found, eager)
        for a, b in zip(gradients(found, [q, k, v]), gradients(eager, [q, k, v]), strict=True):
            assert_agree(a, b)


@pytest.mark.parametrize("line", ["dot | rope", "selective | alibi", "linear | rope"])
def test_decoding_compiles_once_and_gives_the_whole(line):
    attention = Attention(24, 4, line, key_heads=2).double().eval()
    x = torch.randn(2, 70, 24).double()
    step = torch.compile(
        lambda x, cache: attention.step(x, cache, allow=Causal()), fullgraph=True, backend="eager", dynamic=True
    )
    with torch.no_grad():
        whole = attention(x, allow=Causal())
        out, cache = step(x[:, :60], None)
        outs = [out]
        for n in range(60, 70):
            # One graph for the prompt, one for the token after it and, since what a product gave and what was joined lie otherwise in
            # memory, one for all tokens after that: whatever the length, and past every power of two.
            with torch._dynamo.config.patch(error_on_recompile=n > 61):
                out, cache = step(x[:, n : n + 1], cache)
            outs.append(out)
    assert_agree(torch.cat(outs, 1), whole)


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**SMALL, key_heads=2, hidden=32), GPT2Config(**SMALL, context=32, attention="cosine | entmax(learned)")],
    ids=["llama", "gpt2"],
)
def test_a_whole_model_compiles_into_one_graph(config):
    model = config.build()
    tokens = torch.randint(0, 50, (2, 9))
    found = torch.compile(model, fullgraph=True, backend="aot_eager")(tokens).logits
    eager = model(tokens).logits
    torch.testing.assert_close(found, eager)
    parameters = [p for p in model.parameters() if p.requires_grad]
    for a, b in zip(gradients(found, parameters), gradients(eager, parameters), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(CXX is None, reason="inductor writes C++ for the CPU, and no compiler is found (g++, clang++ or $CXX)")
@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own parts, which are not what is tested here
def test_inductor_runs_the_operator_beside_loops_of_its_own(tmp_path, monkeypatch):
    """The real backend, forward and backward: what stands before the operator becomes C++, which the other backends never write.

    One loop each way, since a compiler takes seconds for each.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    class Waves(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q.sin(), k, v, "entmax(1.5)", allow=Causal())

    q, k, v = (x.float().requires_grad_() for x in inputs(SITUATIONS["causal"]))
    # Loops without vectors: to learn which vectors a processor has, inductor compiles a program for each kind.
    with torch._inductor.config.patch({"compile_threads": 1, "cpp.vec_isa_ok": False}):  # pyright: ignore
        found = torch.compile(Waves(), fullgraph=True)(q, k, v)
        of_found = gradients(found, [q, k, v])
    assert len(list(tmp_path.rglob("*.cpp"))) >= 2, "inductor wrote no loop for a direction"
    eager = Waves()(q, k, v)
    torch.testing.assert_close(found, eager)
    for a, b in zip(of_found, gradients(eager, [q, k, v]), strict=True):
        torch.testing.assert_close(a, b)


def test_parts_may_be_made_inside_and_outside_of_a_graph():
    """Of an object that is made in traced code torch hands on the class alone, whose numbers are the defaults."""
    q, k, v = inputs(SITUATIONS["causal"])
    outside = Cosine(0.3)

    def f(q, k, v):
        inside = attend(q, k, v, geometry=Cosine(0.7), selection=Abstain(TopK(2), null_logit=0.4), allow=Causal() & Window(3))
        return (
            inside,
            attend(q, k, v, geometry=outside, selection=Entmax(1.9)),
            attend(q, k, v, geometry=Euclidean(0.4), position=Alibi()),
        )

    for found, eager in zip(torch.compile(f, fullgraph=True, backend="eager")(q, k, v), f(q, k, v), strict=True):
        assert_agree(found, eager)
    assert (f(q, k, v)[0] - attend(q, k, v, "cosine | abstain(topk, null_logit=0.4)")).abs().max() > 1e-2


def test_a_rule_and_a_part_of_ones_own_compile_too():
    from test_own_parts import SPECS, leaves_of, state_of

    from regard.attention.allow import Allow, Tile

    class Even(Allow):
        """Keys at even places."""

        def tile(self, t: Tile) -> Tensor:
            return (t.k_at() % 2 == 0)[None, None, None]

    s = SITUATIONS["causal"]
    state, qkv = state_of(s), [x.requires_grad_() for x in inputs(s)]

    def f(q, k, v, state):
        return [attend(q, k, v, spec, allow=Causal() & Even(), state=state) for spec in SPECS]

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")(*qkv, state)
    assert_same(compiled, f(*qkv, state), [*qkv, *leaves_of(state)])
    mask = Mask((torch.arange(s.keys) % 2 == 0)[None, None, None])
    assert_agree(compiled[0], attend(*qkv, SPECS[0], allow=Causal() & mask, state=state))
