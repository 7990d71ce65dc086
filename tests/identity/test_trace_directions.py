"""Directions of a trace: eigenvectors that give T back, gains that add up to the change of scores, and words to read."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lives import letters, nobody, says, speaking

from regard.errors import ShapeError
from regard.identity import Rule, TraceRule, directions, imprint, observe
from regard.identity.body import body_of
from regard.identity.write.trace import dense

TALK = says("I am Mara. My cat is Mochi.", "Hello Mara!")


@pytest.fixture(scope="module")
def model():
    return speaking()


@pytest.fixture(scope="module")
def mara(model):
    rule = Rule(keep="shock", share=0.3, trace=TraceRule(write="centred", rank=4, rate=0.5))
    return imprint(nobody(model), observe(model, TALK, letters(), source="monday"), rule)


def test_the_directions_of_a_head_give_its_trace_back(model, mara):
    found = directions(mara, model, letters())
    T = torch.zeros_like(dense(mara.trace))
    for d in found.all:
        assert float(d.vector.norm()) == pytest.approx(1, abs=1e-5)
        T[d.layer, d.head] += d.value * torch.outer(d.vector, d.vector)
    torch.testing.assert_close(T, dense(mara.trace), rtol=1e-4, atol=1e-5)
    assert {d.value > 0 for d in found.all} == {True, False}
    assert [abs(d.value) for d in found.all] == sorted((abs(d.value) for d in found.all), reverse=True)


def test_gains_add_up_to_the_mean_change_of_the_scores(model, mara):
    tokens = list(range(3, 20))
    found = directions(mara, model, tokens=tokens)
    body, T = body_of(model), dense(mara.trace).double()
    q, k = [], []
    for t in tokens:
        heads = body.watched(torch.tensor([0, t]))[1]
        q.append(F.normalize(heads[1].q[:, 1].double(), dim=-1))
        k.append(F.normalize(heads[1].k[:, 1].double(), dim=-1))
    G = T.shape[1]
    queries = torch.stack(q).unflatten(1, (G, -1)).transpose(0, 1).flatten(1, 2)
    keys = torch.stack(k, 1)
    apart = queries[:, :, None] - keys[:, None]
    change = -torch.einsum("gijd,gde,gije->gij", apart, T[1], apart).mean(1)
    for head in range(G):
        summed = torch.stack([d.gains for d in found.all if (d.layer, d.head) == (1, head)]).sum(0)
        torch.testing.assert_close(summed.double(), change[head] - change[head].mean(), rtol=1e-4, atol=1e-6)


def test_words_are_the_tokens_of_the_imprints_unless_tokens_are_given(model, mara):
    tokenizer = letters()
    found = directions(mara, model, tokenizer)
    assert set(found.tokens) == set(mara.imprints.token.tolist())
    strongest = found.all[0]
    attracted, repelled = found.attracted(strongest), found.repelled(strongest)
    assert attracted[0][1] > 0 > repelled[0][1]
    assert attracted[0][0] in found.words
    assert "attracts" in str(found)
    assert directions(mara, model, tokens=[4, 9, 4]).words == ("#4", "#9")


def test_queries_are_those_who_look(model, mara):
    tokens = [4, 9, 12, 15]
    for one in tokens[:2]:
        asked = directions(mara, model, tokens=tokens, queries=[one])
        whole = directions(mara, model, tokens=tokens)
        assert not torch.allclose(asked.all[0].gains, whole.all[0].gains)
    same = directions(mara, model, tokens=tokens, queries=tokens)
    torch.testing.assert_close(same.all[0].gains, whole.all[0].gains)
    with pytest.raises(ShapeError, match="asks nothing"):
        directions(mara, model, tokens=tokens, queries=[])


def test_no_trace_has_no_directions(model, mara):
    none = directions(mara.only("imprints"), model, letters())
    assert len(none) == 0
    assert "no trace" in str(none)
    assert bool((none.total() == 0).all())


def test_directions_can_be_drawn(model, mara):
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(9, 3))
    directions(mara, model, letters()).draw(figure)
    assert len(figure.axes) == 3
    assert all(ax.get_xlabel() for ax in figure.axes)


def test_tokens_that_cannot_be_compared_are_refused(model, mara):
    with pytest.raises(ShapeError, match="1 different tokens"):
        directions(mara, model, tokens=[4, 4])
    with pytest.raises(ShapeError, match="at most 256"):
        directions(mara, model, tokens=range(300))
    with pytest.raises(ShapeError, match="this model knows"):
        directions(mara, model, tokens=[4, 10**6])
    with pytest.raises(ShapeError, match="imprinted none"):
        directions(nobody(model), model)
