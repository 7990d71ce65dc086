"""Linear attention: the recurrence token by token, its feature maps, the delta rule, and a cache that does not grow."""

import math

import pytest
import torch
from helpers import F64, SELECTION_SPECS, Situation, assert_agree, gradients, inputs, random

from regard import Causal, CombinationError, Padding, ShapeError, SpecError, StateError, Window, attend, explain, inspect, parse
from regard.models import LlamaConfig, generate
from regard.models.decode.cache import StaticCache
from regard.models.decode.generate import Sampling
from regard.nn import Attention, Cache
from regard.selection import Linear
from regard.selection.linear import directions

LINES = SELECTION_SPECS["linear"]
WIDTH = 24


def phi(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    """The feature map as its formula stands."""
    if linear.map == "exp":
        w = directions(linear.features, x.shape[-1], linear.seed)
        return torch.exp(w @ x - x @ x / 2) / math.sqrt(linear.features)
    return x if linear.map == "identity" else torch.where(x > 0, x + 1, x.exp())


def by_token(linear: Linear, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shown: torch.Tensor) -> torch.Tensor:
    """One head, (N, D) each: a matrix, written and read token after token."""
    root = q.shape[-1] ** -0.25
    S, z = torch.zeros(linear.features_for(q.shape[-1]), v.shape[-1], dtype=F64), None
    rows = []
    for i in range(len(q)):
        f = phi(linear, root * k[i])
        if shown[i] and linear.delta is not None:
            f = f / f.norm()
            S = linear.decay * S
            S = S + linear.delta * torch.outer(f, v[i] - f @ S)
            z = torch.ones(())
        elif shown[i]:
            S = linear.decay * S + torch.outer(f, v[i])
            z = f if z is None else linear.decay * z + f
        ask = phi(linear, root * q[i])
        if linear.delta is not None:
            rows.append(ask / ask.norm() @ S)
        else:
            rows.append(ask @ S / (1 if linear.map == "identity" or z is None else ask @ z))
    return torch.stack(rows)


@pytest.mark.parametrize("line", LINES)
def test_is_its_recurrence_token_by_token(line):
    """150 tokens are three chunks; hidden keys lie before, between and within them."""
    linear = parse(line).inner
    assert isinstance(linear, Linear)
    q, k, v = inputs(Situation(heads=4, key_heads=2, queries=150, keys=150))
    shown = torch.rand(2, 1, 1, 150, generator=torch.Generator().manual_seed(2)) < 0.8
    shown[1, ..., :70] = False
    found = attend(q, k, v, line, allow=Causal() & shown)
    for b in range(2):
        for h in range(4):
            assert_agree(found[b, h], by_token(linear, q[b, h], k[b, h // 2], v[b, h // 2], shown[b, 0, 0]))


@pytest.mark.parametrize("line", LINES)
def test_gradients_cross_the_borders_of_chunks(line):
    q, k, v = (x[:, :, :90].requires_grad_() for x in inputs(Situation(heads=2, key_heads=1, queries=90, keys=90, batch=1)))
    written = attend(q, k, v, line, allow=Causal())
    # The same rule as a mask of pairs takes tiles instead.
    tiled = attend(q, k, v, line, allow=torch.ones(90, 90).tril().bool())
    assert explain(q, k, v, line, allow=Causal()).backend == "chunked"
    assert explain(q, k, v, line, allow=torch.ones(90, 90).tril().bool()).backend == "tiled"
    assert_agree(written, tiled)
    for found, expected in zip(gradients(written, [q, k, v]), gradients(tiled, [q, k, v]), strict=True):
        assert_agree(found, expected)
        assert expected.abs().max() > 1e-3


def test_identity_weighs_by_the_score_itself():
    q, k, v = inputs(Situation())
    expected = (q @ k.mT / math.sqrt(6)).tril() @ v
    assert_agree(attend(q, k, v, "linear(map=identity)", allow=Causal()), expected)
    assert_agree(inspect(q, k, v, "linear(map=identity)").weights(), q @ k.mT / math.sqrt(6))


def test_exp_features_are_softmax_on_average_and_nearer_with_more_of_them():
    q, k = (0.4 * x for x in inputs(Situation(batch=1, heads=1, key_heads=1))[:2])
    kernel = torch.exp(q @ k.mT / math.sqrt(6))[0, 0]
    root = 6**-0.25

    def estimate(features: int, seed: int) -> torch.Tensor:
        w = directions(features, 6, seed)
        a, b = ((x[0, 0] * root) @ w.mT - (x[0, 0] * root).square().sum(-1, keepdim=True) / 2 for x in (q, k))
        return a.exp() @ b.exp().mT / features

    errors = {}
    for features in (6, 48):
        made = torch.stack([estimate(features, seed) for seed in range(400)])
        spread = made.std(0) / math.sqrt(400)
        assert ((made.mean(0) - kernel).abs() < 5 * spread).all()
        errors[features] = float(made.std(0).mean())
    assert errors[48] < 0.5 * errors[6]
    soft = inspect(q, k, k, "softmax").weights()
    assert (inspect(q, k, k, "linear(map=exp, features=4096)").weights() - soft).abs().max() < 0.03


def test_directions_are_orthogonal_in_blocks_as_long_as_normal_vectors_and_fixed_by_the_seed():
    w = directions(16, 6, 0)
    gram = w[:6] @ w[:6].mT
    assert (gram - torch.diag(gram.diag())).abs().max() < 1e-12
    assert w.shape == (16, 6)
    long = directions(6000, 6, 1).square().sum(-1)
    assert abs(float(long.mean()) - 6) < 0.2
    assert abs(float(long.var()) - 12) < 1.5
    assert not torch.equal(w, directions(16, 6, 1))


def test_delta_replaces_what_its_key_reads_and_leaves_the_rest():
    k = torch.eye(4, dtype=F64)[[0, 1, 2, 0]].view(1, 1, 4, 4) * 3
    v = torch.arange(1.0, 5).view(1, 1, 4, 1).double()
    q = torch.eye(4, dtype=F64).view(1, 1, 4, 4)
    assert attend(q, k, v, "linear(map=identity, delta=1)").flatten().tolist() == [4, 2, 3, 0]
    assert attend(q, k, v, "linear(map=identity, delta=0.5)").flatten().tolist() == [2.25, 1, 1.5, 0]
    added = attend(q, k, v, "dot(scale=1) | linear(map=identity)").flatten() / 3
    assert added.tolist() == [5, 2, 3, 0]


def test_decay_counts_writes_and_not_places():
    """A hidden key neither writes nor fades."""
    q, k, v = inputs(Situation(batch=1))
    shown = torch.tensor([True, False, True, True, False, False, True])
    line = "linear(map=identity, decay=0.5)"
    assert_agree(
        attend(q, k, v, line, allow=shown.view(1, 1, 1, 7)), attend(q, k[:, :, shown], v[:, :, shown], line), atol=1e-12
    )
    ages = inspect(q, k, v, line, allow=shown.view(1, 1, 1, 7)).weights() / (q @ k.mT / math.sqrt(6))
    assert_agree(ages[0, 0, 0], torch.tensor([0.125, 0, 0.25, 0.5, 0, 0, 1], dtype=F64))


@pytest.mark.parametrize("line", LINES)
def test_a_cache_holds_a_state_of_fixed_size_and_no_keys(line):
    attention = Attention(WIDTH, 4, f"{line} | rope", key_heads=2)
    x = torch.randn(2, 130, WIDTH)
    whole = attention(x, allow=Causal())
    for cache in (Cache(), StaticCache()):
        sizes, outs = set(), []
        for part in x.split([3, 1, 64, 1, 61], dim=1):
            out, cache = attention.step(part, cache, allow=Causal())
            assert cache.k is None
            assert cache.carry is not None
            sizes.add(cache.carry.shape)
            outs.append(out)
        assert sizes == {(2, 2, attention.inner.features_for(6), 6 + 3)}
        assert len(cache) == 130
        torch.testing.assert_close(torch.cat(outs, 1), whole, rtol=1e-4, atol=1e-5)


def test_a_cache_of_bfloat16_carries_on():
    attention = Attention(WIDTH, 4, "linear").bfloat16()
    x = torch.randn(1, 40, WIDTH).bfloat16()
    whole, cache, outs = attention(x, allow=Causal()), None, []
    for i in range(40):
        out, cache = attention.step(x[:, i : i + 1], cache, allow=Causal())
        outs.append(out)
    assert cache is not None
    assert cache.carry is not None
    assert cache.carry.dtype == torch.float32
    torch.testing.assert_close(torch.cat(outs, 1), whole, rtol=2e-2, atol=2e-2)


def test_gradients_go_through_a_cache():
    attention = Attention(WIDTH, 4, "linear(map=identity, delta=0.5)").to(F64)
    x = random(2, 9, WIDTH).requires_grad_()
    (expected,) = torch.autograd.grad(attention(x, allow=Causal())[:, 5:].sum(), x)
    _, cache = attention.step(x[:, :5], None, allow=Causal())
    out, _ = attention.step(x[:, 5:], cache, allow=Causal())
    assert_agree(torch.autograd.grad(out.sum(), x)[0], expected)


def test_padding_may_be_decoded_and_a_rule_that_hides_what_was_written_is_refused():
    attention = Attention(WIDTH, 4, "linear(decay=0.9)", key_heads=2).to(F64)
    x, lengths = random(2, 9, WIDTH), torch.tensor([9, 6])
    whole = attention(x, allow=Causal() & Padding(lengths, side="left"))
    _, cache = attention.step(x[:, :4], None, allow=Causal() & Padding(lengths - 5, side="left"))
    out, after = attention.step(x[:, 4:], cache, allow=Causal() & Padding(lengths, side="left"))
    assert_agree(out, whole[:, 4:])
    assert after.k is None
    with pytest.raises(CombinationError, match="what was written cannot be hidden again"):
        attention.step(x[:, 4:], cache, allow=Causal() & Padding(torch.tensor([5, 5]), side="left"))
    with pytest.raises(CombinationError, match="4 tokens are written into a state of fixed size"):
        attention.step(x[:, 4:], cache, allow=Causal() & Window(2))


def test_under_a_window_the_cache_keeps_keys_from_the_start():
    attention = Attention(WIDTH, 4, "linear").to(F64)
    x, rule = random(2, 9, WIDTH), Causal() & Window(3)
    out, cache = attention.step(x[:, :5], None, allow=rule)
    assert cache.keys().shape[2] == 5
    assert_agree(out, attention(x[:, :5], allow=rule))


def test_a_written_cache_knows_its_owner_its_rows_and_that_it_has_no_keys():
    attention, other = (Attention(WIDTH, 4, "linear", key_heads=2) for _ in range(2))
    x = torch.randn(3, 5, WIDTH)
    _, cache = attention.step(x, StaticCache(), allow=Causal())
    with pytest.raises(StateError, match="another layer"):
        other.step(x, cache)
    with pytest.raises(ShapeError, match="holds 3 rows, and 2 come"):
        attention.step(x[:2], cache)
    with pytest.raises(StateError, match="holds 5 tokens in a state of fixed size"):
        cache.grown(x[:, None], x[:, None])
    assert isinstance(cache, StaticCache)
    some = cache.rows(torch.tensor([2, 0]))
    expected = attention.step(x, cache)[0][[2, 0]]
    torch.testing.assert_close(attention.step(x[[2, 0]], some)[0], expected)


@pytest.mark.parametrize("line", ["linear", "linear(map=exp, features=32)", "linear(map=identity, delta=0.5)"])
def test_a_model_trained_with_softmax_generates_with_it(line):
    torch.manual_seed(0)
    model = LlamaConfig(vocabulary=61, width=24, depth=2, heads=6, key_heads=2, hidden=40, context=64).build().eval()
    swapped = model.with_attention(line)
    prompts = [[5, 17, 3, 40, 8], [9, 2]]
    together = generate(swapped, prompts, Sampling(max_tokens=6, temperature=0))
    for prompt, row in zip(prompts, together.tokens, strict=True):
        text = list(prompt)
        for _ in range(6):
            text.append(int(swapped(torch.tensor([text])).logits[0, -1].argmax()))
        assert row == text[len(prompt) :]


def test_explain_says_what_it_did_and_why():
    q, k, v = inputs(Situation(heads=4, key_heads=2, queries=512, keys=512))
    plan = explain(q, k, v, "linear(decay=0.9)", allow=Causal())
    assert plan.backend == "chunked"
    assert "all rows of linear write the same keys into a matrix (6 × 5 a key head), in chunks: no Q × K weights" in str(plan)
    assert "the order of the keys counts" in str(plan)
    assert plan.pairs == 64 / 512
    assert plan.flops < explain(q, k, v, "sparsemax", allow=Causal()).flops
    tiles = explain(q, k, v, "linear", allow=Causal() & Window(9))
    assert tiles.backend == "tiled"
    assert "each row of linear writes keys of its own" in str(tiles)


@pytest.mark.parametrize(
    ("line", "error", "why"),
    [
        ("linear(map=relu)", SpecError, "map must be one of elu, exp, identity"),
        ("linear(features=0)", SpecError, "features is a whole number of at least 1"),
        ("linear(seed=-1)", SpecError, "seed is a whole number of at least 0"),
        ("linear(delta=2.5)", SpecError, "above 0, at most 2"),
        ("linear(delta=0)", SpecError, "above 0, at most 2"),
        ("linear(decay=1.01)", SpecError, "above 0, at most 1"),
        ("euclidean | linear", CombinationError, "linear maps q and k themselves, and euclidean adds to their product"),
        ("additive | linear", CombinationError, "use dot or cosine"),
        ("linear | alibi", CombinationError, "alibi adds to a score, and linear has none; use decay"),
        ("abstain(linear, null_logit=0)", SpecError, "no scores that a refusal could be measured by"),
        ("pointer(linear)", SpecError, r"read them with inspect"),
    ],
)
def test_what_has_no_meaning_is_refused_with_its_reason(line, error, why):
    with pytest.raises(error, match=why):
        parse(line)
