"""Exported, transformed and checkpointed: the operator does what torch's own attention does there, and what it does not have."""

import io
import warnings

import pytest
import torch
from helpers import F64, assert_agree, random
from torch import Tensor
from torch.export import Dim, export, load, save
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from regard import Causal, CombinationError, Document, LowRank, Mask, Padding, Self, State, Window, attend, explain
from regard.attention.packed import facts_of, pack
from regard.models.llama import LlamaConfig
from regard.nn import Attention, Cache

B, H, N, D = 2, 4, 5, 6
LINES = [
    "dot", "euclidean", "abstain(softmax, null_logit=0.2)", "entmax(1.5)", "entmax(learned)", "selective", "linear",
    "trace(gamma=0.3)", "relative", "pointer", "topk(2)", "gd(coherence=0.2)", "cosine | rope", "monotonic", "affect",
]  # fmt: skip


def state() -> State:
    return State(
        alpha=torch.linspace(1.2, 2, H, dtype=F64), trace=random(H, D, D, scale=0.2), relative=random(32, H),
        self=Self(random(3), {"w": random(H, 3), "t": random(H, 3)}),
    )  # fmt: skip


def stacked(f, *batches: Tensor) -> Tensor:
    return torch.stack([f(*one) for one in zip(*batches, strict=True)])


@pytest.mark.parametrize("line", LINES)
def test_batches_and_gradients_of_torch_func(line):
    known, xs = state(), random(3, B, H, N, D)

    def f(x):
        return attend(x, x, x, line, allow=Causal(), state=known)

    def loss(x):
        return f(x).square().sum()

    def usual(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(loss(x), x)[0]

    assert_agree(vmap(f)(xs), stacked(f, xs))
    assert_agree(grad(loss)(xs[0]), usual(xs[0]))
    assert_agree(vmap(grad(loss))(xs), stacked(usual, xs))
    assert_agree(grad(lambda xs: vmap(f)(xs).square().sum())(xs), stacked(usual, xs))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "line",
    ["dot", "trace(gamma=0.3)", "entmax(learned)", "entmax(1.5)", "selective", "linear"],
)
def test_directions_and_second_derivatives_are_those_of_the_definition(line):
    known, x, direction = state(), random(1, H, 3, D), random(1, H, 3, D)

    def f(x):
        return attend(x, x, x, line, allow=Causal(), state=known)

    out, along = jvp(f, (x,), (direction,))
    assert_agree(out, f(x))
    jacobian = jacrev(f)(x)
    assert_agree(along, (jacobian * direction).flatten(4).sum(-1))
    assert_agree(jacfwd(lambda x: f(x).sum(1))(x), jacobian.sum(1))
    first = grad(lambda x: f(x).square().sum())
    step = 1e-5
    numeric = (first(x + step * direction) - first(x - step * direction)) / (2 * step)
    second = hessian(lambda x: f(x).square().sum())(x)
    torch.testing.assert_close((second * direction).flatten(4).sum(-1), numeric, rtol=1e-5, atol=1e-6)
    with torch.autograd.forward_ad.dual_level():
        dual = f(torch.autograd.forward_ad.make_dual(x, direction))
        assert_agree(torch.autograd.forward_ad.unpack_dual(dual).tangent, along)


def test_whatever_a_call_carries_may_be_one_of_a_batch():
    xs = random(3, B, H, N, D)
    lengths, ids = torch.tensor([[5, 3], [2, 4], [1, 5]]), torch.randint(0, 2, (3, N))
    cases = [
        (lambda x, n: attend(x, x, x, allow=Padding(n)), lengths),
        (lambda x, i: attend(x, x, x, "sparsemax", allow=Causal() & Document(i)), ids),
        (lambda x, m: attend(x, x, x, "euclidean", allow=Mask(m)), torch.rand(3, B, 1, N, N) < 0.6),
        (lambda x, m: attend(x, x, x, allow=m), torch.rand(3, N, N) < 0.6),
        (lambda x, T: attend(x, x, x, "trace", state=State(trace=T)), random(3, H, D, D, scale=0.2)),
        (lambda x, T: attend(x, x, x, "trace", state=State(trace=T)), random(3, B, H, D, D, scale=0.2)),
        (lambda x, a: attend(x, x, x, "trace", state=State(trace=LowRank(a))), random(3, H, D, 2)),
        (lambda x, a: attend(x, x, x, "entmax(learned)", state=State(alpha=a)), torch.rand(3, H, dtype=F64) + 1.1),
        (lambda x, s: attend(x, x, x, "affect", state=State(self=Self(s, state_weights))), random(3, 3)),
        (lambda x, p: attend(x, x, x, "learned", state=State(positions=p)), random(3, N, D)),
        (lambda x, k: attend(xs[0], k, k, "cosine"), xs),
    ]
    state_weights = {"w": random(H, 3), "t": random(H, 3)}
    for f, carried in cases:
        assert_agree(vmap(f)(xs, carried), stacked(f, xs, carried))
        if carried.is_floating_point():
            for n in (0, 1):
                g = grad(lambda x, c, f=f: f(x, c).square().sum(), n)
                assert_agree(vmap(g)(xs, carried), stacked(g, xs, carried))
    assert_agree(
        vmap(lambda x: attend(x, x, x), in_dims=1, out_dims=2)(xs),
        stacked(lambda x: attend(x, x, x), *[xs.movedim(1, 0)]).movedim(0, 2),
    )
    twice = vmap(vmap(lambda x: attend(x[None], x[None], x[None], "euclidean")[0]))(xs)
    assert_agree(twice, stacked(lambda x: attend(x, x, x, "euclidean"), xs))


def test_a_gradient_of_a_gradient_of_the_operator_is_refused():
    x = random(B, H, N, D).requires_grad_()
    compiled = torch.compile(lambda x: attend(x, x, x, "entmax(1.5)"), backend="eager", fullgraph=True)
    (first,) = torch.autograd.grad(compiled(x).square().sum(), x, create_graph=True)
    with pytest.raises(CombinationError, match="attend has no second derivative"):
        first.square().sum().backward()
    torch.compiler.reset()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("line", ["dot", "abstain(softmax, null_logit=0.2)", "entmax(learned)", "selective", "linear", "trace"])
def test_opcheck_finds_nothing_in_attend(line, trained):
    q, k, v = (random(B, H, N, D).requires_grad_(trained) for _ in range(3))
    packed = pack(
        facts_of(line, None, None, None), (N, N), Causal() & Padding(torch.tensor([5, 3])) & Window(3), state(), q.device
    )
    flags = "111" + "0" * len(packed.tensors) if trained else ""
    # How torch compiles it is asked in `test_compiled`, for every row.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(
        torch.ops.regard.attend.default, (q, k, v, packed.tensors, packed.numbers, packed.line, flags, ""), test_utils=checks
    )
    if line == "linear":
        first, then = (pack(facts_of(line, None, None, None), (N, n), Causal(), None, q.device) for n in (N, 2 * N))
        rest = first.tensors, first.numbers, first.line
        _, carry = torch.ops.regard.write.default(q.detach(), k.detach(), v.detach(), None, *rest, 0)
        rest = then.tensors, then.numbers, then.line
        opcheck(torch.ops.regard.write.default, (q, k, v, carry.clone().requires_grad_(trained), *rest, N))


@pytest.mark.parametrize("line", ["dot | softmax | rope", "cosine(temperature=learned) | entmax(learned)", "selective | alibi"])
def test_a_module_is_exported_for_any_length_and_saved(line):
    class Causally(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Attention(24, 4, line, key_heads=2)

        def forward(self, x):
            return self.attention(x, allow=Causal())

    module = Causally()
    program = export(module, (torch.randn(2, 9, 24),), dynamic_shapes=({1: Dim("N", min=2, max=512)},))
    file = io.BytesIO()
    save(program, file)
    file.seek(0)
    for made in (program, load(file)):
        x = torch.randn(2, 70, 24)
        torch.testing.assert_close(made.module()(x), module(x))


def test_a_whole_model_is_exported_with_its_padding_and_its_caches():
    model = LlamaConfig(vocabulary=50, width=24, depth=2, heads=4, key_heads=2, hidden=32).build().eval()
    tokens, padding = torch.randint(0, 50, (2, 9)), Padding(torch.tensor([5, 9]))
    dims = {"tokens": {1: Dim("N", min=2, max=512)}}
    other = torch.randint(0, 50, (2, 17))
    with torch.no_grad():
        whole = export(model, (tokens,), dynamic_shapes=dims)
        torch.testing.assert_close(whole.module()(other).logits, model(other).logits)
        padded = export(model, (tokens,), {"allow": padding})
        shorter = Padding(torch.tensor([9, 2]))
        torch.testing.assert_close(padded.module()(tokens, allow=shorter).logits, model(tokens, allow=shorter).logits)
        begun = model(tokens, caches=[Cache()] * 2).caches
        one = torch.randint(0, 50, (2, 1))
        keys = {2: Dim.DYNAMIC}
        lengths = torch.export.ShapesCollection()
        for cache in begun:
            lengths[cache.k], lengths[cache.v] = keys, keys
        step = export(model, (one,), {"caches": list(begun)}, dynamic_shapes=lengths)
        for _ in range(3):
            expected = model(one, caches=begun)
            torch.testing.assert_close(step.module()(one, caches=list(begun)).logits, expected.logits)
            begun = expected.caches


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("line", ["dot", "euclidean", "entmax(1.5)", "selective", "linear"])
def test_a_checkpoint_gives_the_same_gradient(line, reentrant):
    x, y = (random(B, H, N, D).requires_grad_() for _ in range(2))
    y.data.copy_(x.data)

    def f(x):
        return attend(x, x, x, line, allow=Causal())

    checkpoint(f, x, use_reentrant=reentrant).square().sum().backward()
    f(y).square().sum().backward()
    assert_agree(x.grad, y.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("line", ["dot", "euclidean", "entmax(1.5)", "abstain(softmax, null_logit=0.2)"])
def test_autocast_rounds_in_the_operator_as_it_does_outside(line, dtype):
    x = random(B, H, N, D, dtype=dtype).requires_grad_()

    def f(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attend(x, x, x, line, allow=Causal())

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    found, eager = compiled(x), f(x)
    torch.compiler.reset()
    assert found.dtype == eager.dtype == dtype
    torch.testing.assert_close(found, eager)
    (a,), (b,) = (torch.autograd.grad(y.square().sum(), x) for y in (found, eager))
    torch.testing.assert_close(a, b, rtol=2e-2, atol=5e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        batch = vmap(lambda x: attend(x, x, x, line, allow=Causal()))(x.detach()[None])
    # Without a gradient a small call may take another way to the same numbers.
    torch.testing.assert_close(batch[0], eager)


def test_explain_says_what_a_trace_runs_and_what_is_decided_later():
    x = random(B, H, N, D)
    assert "traced   as one operator, regard::attend" in str(explain(x, x, x, "sparsemax"))
    fake = x.to("meta")
    plan = explain(fake, fake, fake, "trace", state=State(trace=torch.empty(H, D, D, device="meta")))
    assert "decided when it runs" in str(plan)


def test_values_are_still_looked_at_inside_a_graph():
    compiled = torch.compile(lambda x, n: attend(x, x, x, allow=Padding(n)), backend="eager", fullgraph=True)
    x, lengths = random(B, H, N, D), torch.tensor([5, 3])
    assert_agree(compiled(x, lengths), attend(x, x, x, allow=Padding(lengths)))
    with pytest.raises(ValueError, match=r"lengths \[9, 3\]; they lie in 0..5"):
        compiled(x, torch.tensor([9, 3]))
    x[0, 1, 2, 3] = torch.nan
    with pytest.raises(ValueError, match="q has 1 of 240 values that are not finite"):
        compiled(x, lengths)
    torch.compiler.reset()


def test_no_warning_is_given_by_a_transform():
    x = random(2, B, H, N, D)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vmap(lambda x: attend(x, x, x, "topk(2)"))(x)
