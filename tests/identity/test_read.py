"""Reading at one layer: wide heads give what the formula gives, and its gradients, wherever a text stands."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lives import apart, llama, logits, someone
from torch import Tensor

from regard.attention.allow import Causal, Window
from regard.errors import CombinationError, ShapeError
from regard.identity.body import base_of, body_of
from regard.identity.read.layer import LayerRead, Place, layer_reads
from regard.identity.speaking import living
from regard.identity.state import SelfState
from regard.models import LlamaConfig
from regard.nn import Attention, Cache

B, H, G, Q, D, SLOTS, RANK = 2, 4, 2, 5, 6, 3, 2
SCALE = D**-0.5


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(position: str = "rope") -> Attention:
    return Attention(24, H, f"dot | softmax | {position}" if position else "dot | softmax", key_heads=G, head_width=D).double()


def heads(seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    return normal(B, H, Q, D, seed=seed), normal(B, G, Q, D, seed=seed + 1), normal(B, G, Q, D, seed=seed + 2)


PARTS = {
    "k": normal(B, G, SLOTS, D, seed=10),
    "v": normal(B, G, SLOTS, D, seed=11),
    "weight": normal(B, G, SLOTS, seed=12),
    "left": normal(B, G, RANK, D, seed=13) * 0.7,
    "signs": torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64),
    "bias": normal(B, G, D, seed=14),
}
READS = {
    "slots": ("k", "v"),
    "weighed slots": ("k", "v", "weight"),
    "trace": ("left", "signs"),
    "self": ("bias",),
    "trace and self": ("left", "signs", "bias"),
    "everything": tuple(PARTS),
}


def plainly(r: LayerRead, attention: Attention, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """The formula, pair by pair."""
    position = attention.spec.position

    def turned(x: Tensor, at: int) -> Tensor:
        return x if position.name == "none" else position.rotate(x[None], at)[0]  # type: ignore[attr-defined]

    out = torch.zeros_like(q)
    for b in range(B):
        for h in range(H):
            g = h // (H // G)
            keys = [(k[b, g, j], v[b, g, j], j, 0.0) for j in range(k.shape[2])]
            slots = []
            if r.k is not None and r.v is not None:
                for n in range(r.slots):
                    more = 0.0 if r.weight is None else r.weight[b, g, n]
                    slots.append((r.k[b, g, n], r.v[b, g, n], n - r.slots, more))
            for i in range(q.shape[2]):
                scores, values = [], []
                for kj, vj, at, weight in [*slots, *keys]:
                    unit_q, unit_k = (x / x.norm() for x in (q[b, h, i], kj))
                    if at > i or (at < 0 and i == 0 and r.places is None):
                        continue
                    if at >= 0 and window is not None and i - at >= window:
                        continue
                    if at < 0 and r.beta is not None and unit_q @ unit_k < 1 - 1 / r.beta:
                        continue
                    score = turned(q[b, h, i], i) @ turned(kj, at) * r.scale + weight
                    if r.left is not None and r.signs is not None:
                        S = r.left[b, g].T @ (r.signs[b][:, None] * r.left[b, g])
                        score = score + 2 * unit_q @ S @ unit_k - unit_k @ S @ unit_k
                    if r.bias is not None:
                        score = score + kj @ r.bias[b, g]
                    scores.append(score)
                    values.append(vj)
                out[b, h, i] = torch.stack(scores).softmax(0) @ torch.stack(values)
    return out


@pytest.mark.parametrize("position", ["rope", ""])
@pytest.mark.parametrize("beta", [None, 1.2])
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("name", READS)
def test_wide_heads_give_what_the_formula_gives(name: str, alone: bool, beta: float | None, position: str):
    attention = layer(position)
    r = LayerRead(SCALE, **{n: PARTS[n] for n in READS[name]}, places=None if alone else (Place(0),), beta=beta)
    q, k, v = heads()
    found, cache = r.meet(attention, q, k, v, Cache(), Causal())
    assert apart(found, plainly(r, attention, q, k, v)) < 1e-9
    assert cache.lead == r.slots
    assert len(cache) == Q
    base, _ = LayerRead(SCALE).meet(attention, q, k, v, Cache(), Causal())
    assert apart(found, base) > 1e-2, "a read that changes nothing would agree by luck"


def test_some_slots_are_refused_and_some_are_not():
    refused = LayerRead(SCALE, PARTS["k"], PARTS["v"], beta=1.2).refused(heads()[0])
    assert refused is not None
    assert 0 < int(refused.sum()) < refused.numel()


def test_a_window_counts_tokens_and_never_slots():
    attention = layer()
    r = LayerRead(SCALE, **PARTS)
    q, k, v = heads()
    found, _ = r.meet(attention, q, k, v, Cache(), Causal() & Window(2))
    assert apart(found, plainly(r, attention, q, k, v, window=2)) < 1e-9


@pytest.mark.parametrize("beta", [None, 1.2])
def test_token_by_token_gives_what_the_whole_gives(beta: float | None):
    attention = layer()
    r = LayerRead(SCALE, **PARTS, beta=beta)
    q, k, v = heads()
    whole, _ = r.meet(attention, q, k, v, Cache(), Causal())
    cache, steps = Cache(), []
    for i in range(Q):
        out, cache = r.meet(attention, q[:, :, i : i + 1], k[:, :, i : i + 1], v[:, :, i : i + 1], cache, Causal())
        steps.append(out)
    assert apart(torch.cat(steps, 2), whole) < 1e-9


def test_gradients_reach_everything_that_is_learned():
    attention = layer()
    q, k, v = (x[:, :, :3] for x in heads())
    names = ("k", "v", "left", "bias", "weight")
    leaves = [PARTS[n].clone().requires_grad_() for n in names]

    def read(*x: Tensor) -> Tensor:
        return LayerRead(SCALE, **dict(zip(names, x, strict=True)), signs=PARTS["signs"]).meet(
            attention, q, k, v, Cache(), Causal()
        )[0]

    found = torch.autograd.grad(read(*leaves).square().sum(), leaves)
    assert all(float(g.abs().max()) > 1e-3 for g in found)
    assert torch.autograd.gradcheck(read, leaves)


def test_slots_that_are_learned_are_read_anew_after_every_step():
    attention = layer()
    k = PARTS["k"].clone().requires_grad_()
    r = LayerRead(SCALE, k, PARTS["v"])
    q, kk, v = heads()
    before, _ = r.meet(attention, q, kk, v, Cache(), Causal())
    with torch.no_grad():
        k += 1.0
    after, _ = r.meet(attention, q, kk, v, Cache(), Causal())
    assert apart(before, after) > 1e-3


@pytest.mark.parametrize("shift", [1, 17, 1000])
def test_trace_and_self_read_the_same_wherever_a_text_stands(shift: int):
    attention = layer()
    r = LayerRead(SCALE, left=PARTS["left"], signs=PARTS["signs"], bias=PARTS["bias"])
    q, k, v = heads()
    near, _ = r.meet(attention, q, k, v, Cache(), Causal())
    # Tokens before it that no one may look at move the text and do nothing else.
    gap = torch.zeros(B, G, shift, D, dtype=torch.float64)
    _, cache = r.meet(attention, q.new_zeros(B, H, shift, D), gap, gap, Cache(), Causal())
    hidden = torch.ones(Q, shift + Q, dtype=torch.bool).tril(shift)
    hidden[:, :shift] = False
    far, _ = r.meet(attention, q, k, v, cache, hidden)
    assert apart(near, far) < 1e-9


def test_rows_are_counted_against_the_batch():
    q, k, v = heads()
    r = LayerRead(SCALE, torch.zeros(3, G, SLOTS, D), torch.zeros(3, G, SLOTS, D))
    with pytest.raises(ShapeError, match="3 identities"):
        r.meet(layer(), q, k, v, Cache(), Causal())


def test_rows_in_another_order_are_the_reads_of_those_rows():
    q, k, v = heads()
    r = LayerRead(SCALE, **PARTS)
    found, _ = r.rows(torch.tensor([1, 0])).meet(layer(), q.flip(0), k.flip(0), v.flip(0), Cache(), Causal())
    whole, _ = r.meet(layer(), q, k, v, Cache(), Causal())
    assert apart(found.flip(0), whole) < 1e-12
    one = LayerRead(SCALE, bias=PARTS["bias"][:1])
    assert one.rows(torch.tensor([1, 0])) is one


def test_a_geometry_that_is_no_dot_product_is_refused():
    model = LlamaConfig(
        vocabulary=16, width=16, depth=1, heads=2, key_heads=2, hidden=16, attention="euclidean | softmax"
    ).build()
    with pytest.raises(CombinationError, match="dot products"):
        base_of(model)


def test_all_tokens_of_a_history_as_slots_are_the_history_in_context():
    model = llama()
    body = body_of(model)
    past, text = [7, 3, 30, 21, 9, 14, 2, 33], [5, 9, 11, 3, 8]
    with torch.no_grad():
        _, kept = body.watched(torch.tensor(past))
        reads = [LayerRead(s, h.k[None], h.v[None], places=(Place(0),)) for s, h in zip(body.scales, kept, strict=True)]
        with body.read(reads):
            found = body.logits(torch.tensor([text]))[0]
    whole = logits(model, [*past, *text])[0, len(past) :]
    assert apart(found, whole) < 1e-4
    assert apart(found, logits(model, text)[0]) > 0.1


def test_a_row_without_an_identity_among_others_is_filled_with_what_does_nothing():
    model = llama()
    base = base_of(model)
    reads = layer_reads([someone(base, slots=2, rank=2), None, someone(base, 1, slots=4, form="self_token")], [SCALE] * 3)
    first = reads[0]
    assert first is not None
    assert first.slots == 5
    assert first.batch == 3
    assert first.weight is not None
    assert (first.weight[1] == -1e4).all()
    assert (first.weight[0, :, :3] == -1e4).all()
    assert not (first.weight[2] == -1e4).any()


def test_a_self_token_of_zeros_is_not_there():
    model = llama()
    imprinted = someone(base_of(model), form=None, rank=0)
    width = imprinted.base.key_heads * imprinted.base.head_width
    zeros = replace(imprinted, self=SelfState(torch.zeros(3, 2 * width), "self_token"))
    with living(model, imprinted):
        plain = logits(model, [5, 9, 11])
    with living(model, zeros):
        assert torch.equal(logits(model, [5, 9, 11]), plain)
