"""The controls of the evidence keep what they say: a rotated state its spectrum, a shuffled one its numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lives import apart, someone

from regard.identity.state import Base
from regard.identity.write.trace import spectrum
from regard.study.people.lab import rotated, shuffled

BASE = Base("f" * 64, depth=3, key_heads=2, head_width=8)


@pytest.mark.parametrize("form", ["key_bias", "self_token"])
def test_a_rotated_state_keeps_spectrum_and_lengths_and_nothing_else(form: Any):
    me = someone(BASE, form=form)
    other = rotated(me, 1)
    assert me.trace is not None
    assert me.self is not None
    assert other.trace is not None
    assert other.self is not None
    assert apart(spectrum(me.trace), spectrum(other.trace)) < 0.05 * float(spectrum(me.trace).abs().max())
    for a, b in ((me.imprints.k, other.imprints.k), (me.imprints.v, other.imprints.v)):
        assert apart(a.dense().norm(dim=-1), b.dense().norm(dim=-1)) < 0.05
        assert apart(a.dense(), b.dense()) > 0.5
    heads = [x.self.s.view(3, -1, 2, 8).norm(dim=-1) for x in (me, other)]  # type: ignore[union-attr]
    assert apart(heads[0], heads[1]) < 1e-4
    assert apart(me.self.s, other.self.s) > 0.1
    # Keys and values of one head are turned together, so that who is near to whom stays.
    gram = [x.imprints.k.dense() @ x.imprints.k.dense().mT for x in (me, other)]
    assert apart(gram[0], gram[1]) < 0.2
    assert rotated(me, 1).digest() == other.digest() != rotated(me, 2).digest()
    assert torch.equal(other.imprints.weight, me.imprints.weight)


def test_a_shuffled_state_has_the_same_numbers_in_other_places():
    me = someone(BASE, slots=9)
    other = shuffled(me, 3)
    assert torch.equal(me.imprints.k.codes, other.imprints.k.codes)
    assert not torch.equal(me.imprints.v.codes, other.imprints.v.codes)
    for name, x in me.tensors().items():
        assert torch.equal(x.flatten().sort().values, other.tensors()[name].flatten().sort().values)
    assert shuffled(me, 3).digest() == other.digest()
    assert shuffled(me.only("imprints"), 3).trace is None
