"""Imprint energy: zero for nobody, the slots' share exactly, and lower on what was lived."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from lives import letters, nobody, says, speaking

from regard.errors import StateError
from regard.identity import Rule, SelfRule, TraceRule, imprint, imprint_energy, observe
from regard.identity.body import body_of
from regard.identity.packed import Packed
from regard.identity.speaking import living

TALK = says("I am Mara. My cat is Mochi.", "Hello Mara!")


@pytest.fixture(scope="module")
def model():
    return speaking()


@pytest.fixture(scope="module")
def mara(model):
    rule = Rule(keep="shock", share=0.3, trace=TraceRule(rank=4), self=SelfRule("self_token"))
    return imprint(nobody(model), observe(model, TALK, letters(), source="monday"), rule)


def test_nobody_has_no_energy(model):
    energy = imprint_energy(model, nobody(model), TALK, letters())
    assert energy.surprise == 0
    assert bool((energy.attention == 0).all())
    assert energy.code == 0
    assert energy.repaid == math.inf


def test_slots_never_raise_the_energy_of_attention(model, mara):
    energy = imprint_energy(model, mara, TALK, letters())
    assert bool((energy.attention < 0).all())
    assert bool(((energy.share > 0) & (energy.share < 1)).all())
    assert "nats a token" in str(energy)


def test_the_surprise_is_that_of_living_as_them(model, mara):
    seen = observe(model, TALK, letters())
    with living(model, mara):
        again = observe(model, TALK, letters())
    counted = seen.content.clone()
    counted[0] = False
    expected = float((again.shock - seen.shock)[counted].mean())
    assert imprint_energy(model, mara, TALK, letters()).surprise == pytest.approx(expected, abs=1e-5)


def test_the_share_is_what_the_slots_values_weigh(model, mara):
    """In the first layer the output moves by share · Δ when every slot's value moves by Δ."""
    me, body = mara.only("imprints", "trace"), body_of(model)
    ids = observe(model, TALK, letters()).tokens
    outs = []
    for shift in (0.0, 1.0):
        v = me.imprints.v.dense()
        v[:] = shift
        who = replace(me, imprints=replace(me.imprints, v=Packed.of(v)))
        caught = []
        handle = body.layers[0].out.register_forward_pre_hook(lambda m, given, into=caught: into.append(given[0]))
        with living(model, who), torch.no_grad():
            body.logits(ids[None])
        handle.remove()
        outs.append(caught[0][0])
        # Eight bits of it.
        size = float(who.imprints.v.dense().mean())
    H = body.layers[0].heads
    share = ((outs[1] - outs[0]).double() / size).unflatten(-1, (H, -1)).mean(-1)
    counted = observe(model, TALK, letters()).content.clone()
    counted[0] = False
    expected = torch.log1p(-share[counted]).mean(0)
    found = imprint_energy(model, me, TALK, letters()).attention[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_text_in_which_nothing_is_said_has_no_energy(model, mara):
    with pytest.raises(StateError, match="nothing to be surprised by"):
        imprint_energy(model, mara, [5])
