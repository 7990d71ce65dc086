"""The learned fast write: its features are relative to a text, its gains belong to one base, and learning moves shared numbers only."""

from __future__ import annotations

import math

import pytest
import torch
from lives import HISTORY, apart, heard, letters, llama, nobody, says, speaking
from safetensors.torch import save_file

from regard.errors import CheckpointError
from regard.identity.body import base_of, body_of, frozen
from regard.identity.experience import observe
from regard.identity.packed import Packed
from regard.identity.write import fast_write as shipped_numbers
from regard.identity.write.fast_write import FEATURES, HIDDEN, FastWrite, features, forget_shipped, shipped_for
from regard.identity.write.imprints import worth_of
from regard.identity.write.keepers import later_attention
from regard.identity.write.rule import Rule, imprint
from regard.identity.write.self_state import SelfRule
from regard.identity.write.trace import TraceRule, compressed, dense, written
from regard.models.base import Model
from regard.study.people import fast_write as learn
from regard.study.people.fast_write import FastWriteTrainer, Schedule
from regard.study.people.generator import Person


def made_up(base_model: Model, seed: int = 0) -> FastWrite:
    """Random numbers in the shapes of learned ones."""
    base = base_of(base_model)
    L, G, D = base.depth, base.key_heads, base.head_width
    g = torch.Generator().manual_seed(seed)
    shapes = {
        "scorer.direct": (len(FEATURES),), "scorer.into": (len(FEATURES), HIDDEN), "scorer.bias": (HIDDEN,), "scorer.out": (HIDDEN,),
        "slots.gate": (L, G), "slots.shift": (L, G, D), "slots.value": (L, G), "self.key": (L, G), "self.value": (L, G), "self.bias": (L, G), "trace.gain": (L, G),
        "mean.q": (L, G, D), "mean.k": (L, G, D),
    }  # fmt: skip
    return FastWrite({n: torch.randn(s, generator=g) for n, s in shapes.items()}, base.fingerprint)


def test_features_are_spreads_from_the_mean_of_what_was_said():
    model = speaking()
    e = observe(model, says("I am Mara. My cat is called Mochi.", "Hello Mara!"), letters())
    x = features(e)
    assert x.shape == (len(e), len(FEATURES))
    said = x[e.content]
    assert torch.allclose(said.mean(0), torch.zeros(len(FEATURES)), atol=1e-4)
    assert torch.allclose(said.std(0), torch.ones(len(FEATURES)), atol=1e-3)
    order = said[:, FEATURES.index("attention")].argsort()
    assert torch.equal(order, later_attention(e)[e.content].argsort())


def test_features_of_a_text_without_any_spread_are_finite():
    model = llama()
    for ids in ([5, 5], [5, 5, 5], [5, 9]):
        assert bool(torch.isfinite(features(heard(model, ids))).all())


def test_the_worth_of_tokens_is_a_small_network_of_their_features():
    model = llama()
    e, write = heard(model), made_up(model)
    n = write.numbers
    found = write.telling(e)
    assert found.shape == (len(HISTORY),)
    for t in range(len(HISTORY)):
        x = features(e)[t]
        plain = sum(float(x[i] * n["scorer.direct"][i]) for i in range(len(FEATURES)))
        for h in range(HIDDEN):
            into = sum(float(x[i] * n["scorer.into"][i, h]) for i in range(len(FEATURES))) + float(n["scorer.bias"][h])
            plain += math.tanh(into) * float(n["scorer.out"][h])
        assert float(found[t]) == pytest.approx(plain, abs=1e-3)
    assert write.count == sum(x.numel() for x in n.values())


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Model:
    """A model whose learned numbers are made up and come with the package."""
    model = llama()
    write = made_up(model)
    save_file(write.numbers, tmp_path / "write.safetensors", metadata={"about": f'{{"fingerprint": "{write.fingerprint}"}}'})
    monkeypatch.setattr(shipped_numbers, "FILE", tmp_path / "write.safetensors")
    forget_shipped()
    yield model
    forget_shipped()


def test_gains_belong_to_the_base_that_they_were_learned_on(installed: Model):
    assert shipped_for(base_of(llama(1))) is None
    found = shipped_for(base_of(installed))
    assert found is not None
    assert torch.equal(found.trace_gain, made_up(installed).trace_gain)


def test_without_the_file_there_are_no_gains_and_the_learned_keeper_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setattr(shipped_numbers, "FILE", tmp_path / "none.safetensors")
    forget_shipped()
    model = llama()
    assert shipped_for(base_of(model)) is None
    with pytest.raises(CheckpointError, match="train it"):
        worth_of(heard(model), "learned")
    forget_shipped()


def test_what_was_learned_is_what_is_written(installed: Model):
    write = made_up(installed)
    e = heard(installed)
    rule = Rule(keep="learned", share=0.5, trace=TraceRule(write="centred", rank=8, bound=100), self=SelfRule("key_bias"))
    found = imprint(nobody(installed), e, rule)
    best = write.worth(e).masked_fill(~e.content, -math.inf).topk(len(found.imprints)).indices.sort().values
    assert found.imprints.token.tolist() == [HISTORY[i] for i in best.tolist()]
    k, v, gate = write.opened(e.k[:, :, best], e.v[:, :, best])
    assert apart(found.imprints.k.dense(), Packed.of(k).dense()) == 0
    assert apart(found.imprints.v.dense(), Packed.of(v).dense()) == 0
    assert apart(found.imprints.weight, gate.expand_as(found.imprints.weight)) == 0
    assert found.self is not None
    k = torch.einsum("lgnd,n->lgd", e.k, e.shock / e.shock.sum()) - write.means[1]
    assert apart(found.self.s, (write.numbers["self.bias"][..., None] * k).flatten(1)) < 1e-4
    assert found.trace is not None
    T = written(torch.zeros(3, 2, 8, 8), e, rule.trace, write.means, write.trace_gain)
    assert apart(dense(found.trace), dense(compressed(T, rule.trace))) == 0


def test_gains_of_a_self_token_are_for_its_key_and_its_value(installed: Model):
    write = made_up(installed)
    gain = write.self_gain("self_token").view(3, 2, 2, 8)
    assert torch.equal(gain[:, 0], write.numbers["self.key"][..., None].expand(3, 2, 8))
    assert torch.equal(gain[:, 1], write.numbers["self.value"][..., None].expand(3, 2, 8))


CROWD = [
    Person("Mara", (), (tuple(says("I am Mara.", "Hello Mara!")),), tuple(says("Who am I?", "You are Mara.")), ()),
    Person("Tom", (), (tuple(says("I am Tom.", "Hi Tom!")),), tuple(says("Who am I?", "You are Tom.")), ()),
]


def test_a_trainer_of_two_people_learns_every_part():
    model = speaking()
    body = body_of(model)
    L, G, D = body.base.depth, body.base.key_heads, body.base.head_width
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    told: list[float | None] = []
    with frozen(model):
        trainer = FastWriteTrainer(
            body,
            letters(),
            CROWD,
            ["The river rises in the hills."],
            Schedule(people=2),
            lambda what, share: told.append(share),
        )
        numbers = trainer.means(2)
        said = [trainer.experience(i) for i in range(2)]
        k = torch.cat([e.k[:, :, e.content] for e in said], 2).mean(2)
        assert apart(numbers["mean.k"], k) < 1e-4
        parts = {
            "imprints": {
                "scorer.direct": (len(FEATURES),), "scorer.into": (len(FEATURES), HIDDEN), "scorer.bias": (HIDDEN,),
                "scorer.out": (HIDDEN,), "slots.gate": (L, G), "slots.shift": (L, G, D), "slots.value": (L, G),
            },
            "token": {"self.key": (L, G), "self.value": (L, G)},
            "bias": {"self.bias": (L, G)},
            "trace": {"trace.gain": (L, G)},
        }  # fmt: skip
        for part, shapes in parts.items():
            leaves = {n: learn._start(n, s, 0).requires_grad_() for n, s in shapes.items()}
            start = {n: x.detach().clone() for n, x in leaves.items()}
            loss = trainer.run(part, leaves, numbers)
            assert math.isfinite(loss)
            assert all(bool(torch.isfinite(x).all()) for x in leaves.values())
            assert any(not torch.equal(leaves[n], start[n]) for n in leaves), part
    assert told[-1] == 1.0
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
