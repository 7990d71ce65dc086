"""The learned fast write: its gains belong to one base, and learning moves shared numbers only."""

from __future__ import annotations

import math

import pytest
import torch
from lives import HISTORY, apart, heard, letters, llama, nobody, says, speaking
from safetensors.torch import save_file

from regard.errors import CheckpointError
from regard.identity.body import base_of, body_of, frozen
from regard.identity.packed import Packed
from regard.identity.write import fast_write as shipped_numbers
from regard.identity.write import imprints
from regard.identity.write.fast_write import FastWrite, forget_shipped, shipped_for
from regard.identity.write.imprints import worth_of
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
        "slots.shift": (L, G, D), "self.key": (L, G), "self.value": (L, G), "self.bias": (L, G), "trace.gain": (L, G),
        "mean.q": (L, G, D), "mean.k": (L, G, D),
    }  # fmt: skip
    return FastWrite({n: torch.randn(s, generator=g) for n, s in shapes.items()}, base.fingerprint)


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


def test_without_the_file_there_are_no_gains_and_imprints_are_kept_as_they_were_met(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setattr(shipped_numbers, "FILE", tmp_path / "none.safetensors")
    forget_shipped()
    model = llama()
    assert shipped_for(base_of(model)) is None
    e = heard(model)
    written_plain = imprint(nobody(model), e, Rule(share=1.0)).imprints
    assert apart(written_plain.k.dense(), Packed.of(e.k[:, :, e.content]).dense()) == 0
    with pytest.raises(CheckpointError, match="train it"):
        shipped_numbers.shipped()
    forget_shipped()


def test_keys_of_slots_can_be_had_as_they_were_met(installed: Model):
    write, e = made_up(installed), heard(installed)
    opened = write.opened(e.k)
    assert apart(opened, e.k) > 0.1
    assert apart(write.closed(opened), e.k) < 1e-5


def test_what_was_learned_is_what_is_written(installed: Model):
    write = made_up(installed)
    e = heard(installed)
    rule = Rule(share=0.5, trace=TraceRule(write="centred", rank=8, bound=100), self=SelfRule("key_bias"))
    found = imprint(nobody(installed), e, rule)
    best = worth_of(e, rule.keep).topk(len(found.imprints)).indices.sort().values
    assert found.imprints.token.tolist() == [HISTORY[i] for i in best.tolist()]
    k, gate = write.opened(e.k[:, :, best]), imprints.opening(3)
    assert apart(found.imprints.k.dense(), Packed.of(k).dense()) == 0
    assert apart(found.imprints.v.dense(), Packed.of(e.v[:, :, best]).dense()) == 0
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
            "imprints": {"slots.shift": (L, G, D)},
            "token": {"self.key": (L, G), "self.value": (L, G)},
            "bias": {"self.bias": (L, G)},
            "trace": {"trace.gain": (L, G)},
        }  # fmt: skip
        for part, shapes in parts.items():
            leaves = {n: learn._start(n, s).requires_grad_() for n, s in shapes.items()}
            start = {n: x.detach().clone() for n, x in leaves.items()}
            loss = trainer.run(part, leaves, numbers)
            assert math.isfinite(loss)
            assert all(bool(torch.isfinite(x).all()) for x in leaves.values())
            assert any(not torch.equal(leaves[n], start[n]) for n in leaves), part
    assert told[-1] == 1.0
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_later_layers_open_wider_to_slots():
    assert imprints.opening(3).flatten().tolist() == [-imprints.LATE, 0.0, imprints.LATE]
    model = llama(1)
    kept = imprint(nobody(model), heard(model), Rule(share=0.5)).imprints
    assert torch.equal(kept.weight, imprints.opening(3).expand_as(kept.weight)), "on a base that nothing was learned on, too"
