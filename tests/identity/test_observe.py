"""Observing: what a text did to the model is measured as it is defined, and what cannot be observed is refused."""

from __future__ import annotations

import math
from threading import Thread

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from lives import HISTORY, TEXT, apart, gpt2, heard, letters, llama, logits, says, speaking

from regard.attention.allow import Causal
from regard.errors import RegardError, ShapeError, StateError
from regard.identity.body import body_of
from regard.identity.experience import LONGEST, chat_tokens, observe
from regard.identity.read.body import fingerprint
from regard.identity.shock import WINDOW, Norm, checked_affect, entropy, estimated_affect, rarity, surprisal


def test_surprisal_is_the_cross_entropy_of_each_token():
    torch.manual_seed(1)
    scores, tokens = torch.randn(9, 11) * 3, torch.randint(11, (9,))
    found = surprisal(scores, tokens)
    assert found[0] == 0
    assert torch.allclose(found[1:], F.cross_entropy(scores[:-1], tokens[1:], reduction="none"), atol=1e-6)


def test_entropy_is_that_of_the_expectation_before_each_token():
    scores = torch.tensor([[0.0, 0.0, 0.0, 0.0], [100.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]])
    assert torch.allclose(entropy(scores), torch.tensor([0.0, math.log(4), 0.0]), atol=1e-6)


shocks = st.lists(st.floats(0, 30, width=32), min_size=1, max_size=300)


@given(shocks, st.lists(st.integers(0, 300), max_size=4))
def test_what_is_normal_does_not_depend_on_how_a_life_was_cut(values: list[float], cuts: list[int]):
    assert len(values) < WINDOW
    norm, at = Norm(), 0
    for cut in [*sorted(c for c in cuts if c <= len(values)), len(values)]:
        norm, at = norm.after(torch.tensor(values[at:cut])), cut
    exact = torch.tensor(values, dtype=torch.float64)
    assert norm.count == len(values)
    assert norm.mean == pytest.approx(float(exact.mean()), rel=1e-4, abs=1e-4)
    # The spread is the root of a difference of squares, which float sums leave this much of.
    assert norm.spread == pytest.approx(float(exact.std(correction=0)), rel=1e-3, abs=2e-2)


def test_a_long_life_forgets_what_was_normal():
    calm = Norm().after(torch.ones(10 * WINDOW))
    wild = calm.after(torch.full((WINDOW,), 5.0))
    assert wild.mean == pytest.approx(3.0)
    assert wild.count == 11 * WINDOW
    assert Norm().after(torch.zeros(0)) == Norm()


def test_scores_are_spreads_from_the_mean():
    found = Norm().scored(torch.tensor([1.0, 2.0, 3.0]))
    assert torch.allclose(found, torch.tensor([-1.0, 0.0, 1.0]) * math.sqrt(1.5), atol=1e-5)
    assert bool(torch.isfinite(Norm().scored(torch.ones(4))).all())


@given(shocks, shocks)
def test_affect_lies_between_minus_one_and_one(a: list[float], b: list[float]):
    n = min(len(a), len(b))
    assert -1 <= estimated_affect(torch.tensor(a[:n]), torch.tensor(b[:n])) <= 1


def test_affect_is_above_zero_where_a_text_went_better_than_expected():
    scores = torch.zeros(4, 5)
    scores[:, 2] = 2.0
    good, bad = torch.tensor([2, 2, 2, 2]), torch.tensor([1, 1, 1, 1])
    expected = entropy(scores)
    assert estimated_affect(surprisal(scores, good), expected) > 0.1
    assert estimated_affect(surprisal(scores, bad), expected) < -0.1
    assert estimated_affect(torch.zeros(3), torch.zeros(3)) == 0


@pytest.mark.parametrize("wrong", [1.01, -2, float("nan"), float("inf"), "high", None])
def test_an_affect_that_is_none_is_refused(wrong: object):
    with pytest.raises(StateError, match="from −1 to 1"):
        checked_affect(wrong)  # type: ignore[arg-type]
    with pytest.raises(StateError, match="from −1 to 1"):
        observe(llama(), TEXT, affect=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [llama, gpt2])
def test_an_experience_is_what_every_layer_projected(make):
    model = make()
    e = observe(model, TEXT, source="diary", affect=0.5)
    scores = logits(model, TEXT)[0]
    assert torch.allclose(e.shock, surprisal(scores, torch.tensor(TEXT)), atol=1e-5)
    x, block = model.embed(torch.tensor(TEXT)), model.blocks[0]
    if make is gpt2:
        x = x + model.place(torch.arange(len(TEXT)))
    for name, found in (("q", e.q), ("k", e.k), ("v", e.v)):
        flat = getattr(block.attention, name)(block.norm_1(x))
        assert apart(found[0], flat.unflatten(-1, (found.shape[1], -1)).transpose(0, 1)) < 1e-5
    assert (e.source, e.affect, len(e)) == ("diary", 0.5, len(TEXT))
    assert e.content.tolist() == [False] + [True] * (len(TEXT) - 1), "the first token is the sink"
    assert not e.k.requires_grad


def test_attention_of_an_experience_is_the_model_s_own():
    model = llama()
    e = heard(model)
    first = model.blocks[0]
    x = first.norm_1(model.embed(torch.tensor([HISTORY])))
    weights = first.attention.inspect(x, allow=Causal()).weights()[0].mean(0)
    assert apart(e.attention[0], weights) < 1e-5
    assert torch.allclose(e.attention.sum(-1), torch.ones(3, len(HISTORY)), atol=1e-5)
    assert not e.attention.triu(1).any()


def test_estimated_affect_is_measured_on_the_text():
    model = llama()
    e = observe(model, TEXT, affect="estimated")
    scores = logits(model, TEXT)[0]
    assert e.affect == pytest.approx(estimated_affect(e.shock, entropy(scores)), abs=1e-5)
    assert e.affect != 0


def test_training_mode_and_gradients_are_left_as_they_were():
    model = gpt2(dropout=0.5).train()
    first, second = observe(model, TEXT), observe(model, TEXT)
    assert torch.equal(first.shock, second.shock), "dropout must be off while a text is observed"
    assert model.training
    assert not any(m._forward_hooks for m in model.modules())
    assert not any(p.grad is not None for p in model.parameters())


def test_two_threads_that_observe_at_once_see_each_their_own_text():
    model = llama()
    texts = [HISTORY, TEXT * 5]
    expected = [observe(model, t) for t in texts]
    wrong: list[object] = []

    def watch(i: int) -> None:
        try:
            for _ in range(15):
                found = observe(model, texts[i])
                if found.k.shape != expected[i].k.shape or not torch.equal(found.k, expected[i].k):
                    wrong.append(i)
        except BaseException as error:
            wrong.append(error)

    threads = [Thread(target=watch, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert wrong == []


def test_what_is_no_experience_is_refused():
    model = llama()
    for few in ([], [5]):
        with pytest.raises(RegardError):
            observe(model, few)
    with pytest.raises(ShapeError, match="pieces"):
        observe(model, [1] * (LONGEST + 1))
    with pytest.raises(StateError, match="tokenizer"):
        observe(model, "a text")
    with pytest.raises(ShapeError, match="at least two"):
        observe(model, "", letters())
    with pytest.raises(ShapeError, match="this model knows"):
        observe(model, [1, 10**6])
    with pytest.raises(ShapeError, match="this model knows"):
        observe(model, [1, -5])
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize(
    "chat", [["hello"], [{"role": "user"}], [{"content": "x"}], [{"role": "user", "content": 3}], [None, None], [3.5, 2.0]]
)
def test_what_is_no_chat_is_refused(chat: list[object]):
    with pytest.raises(RegardError, match="is no message"):
        observe(speaking(), chat, letters())  # type: ignore[arg-type]


def test_weights_that_are_not_finite_are_refused():
    model = llama()
    model.norm.weight.data[3] = float("nan")
    with pytest.raises(StateError, match="not finite"):
        observe(model, TEXT)


def test_what_was_said_is_told_apart_from_markup():
    chat = [{"role": "system", "content": "Be kind."}, *says("I am Mara.", " Hello Mara! ")]
    ids, said = chat_tokens(chat, letters())
    assert letters().decode([i for i, s in zip(ids, said, strict=True) if s]) == "I am Mara.Hello Mara!"
    e = observe(speaking(), chat, letters())
    assert e.content.tolist() == said
    assert not e.shock[~e.content].any()
    assert e.shock[e.content].min() > 0


def test_rarity_is_the_mean_probability_of_a_token_over_all_places_where_something_is_said():
    torch.manual_seed(0)
    scores, tokens = torch.randn(6, 9), torch.tensor([3, 1, 4, 1, 5, 2])
    said = torch.tensor([False, False, True, True, False, True])
    places = [scores[i - 1].softmax(-1) for i in range(6) if said[i]]
    plain = [-math.log(sum(float(p[t]) for p in places) / len(places)) for t in tokens.tolist()]
    assert rarity(scores, tokens, said).tolist() == pytest.approx(plain, rel=1e-5)
    assert not rarity(scores, tokens, torch.zeros(6, dtype=torch.bool)).any()
    e = observe(speaking(), says("I am Mara.", "Hello!"), letters())
    assert bool((e.rarity[e.content] <= e.shock[e.content] + math.log(int(e.content.sum())) + 1e-4).all())
    assert not e.rarity[~e.content].any()


def test_words_that_occur_in_the_markup_too_are_found_in_their_place():
    ids, said = chat_tokens(says("user", "assistant"), letters())
    text = letters().decode(ids)
    assert text == "<user>user\n<assistant>assistant\n"
    assert sum(said) == len("user") + len("assistant")


def test_a_template_that_rewrites_what_was_said_leaves_all_of_it_said():
    from dataclasses import replace

    shouting = replace(letters(), template="{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    _, said = chat_tokens(says("hello"), shouting)
    assert said == [True] * 5


def test_a_body_is_made_once_and_anew_when_the_weights_change():
    model = llama()
    first = body_of(model)
    assert body_of(model) is first
    with torch.no_grad():
        model.embed.weight[0] += 1
    assert body_of(model) is not first
    assert body_of(model).base.fingerprint != first.base.fingerprint
    assert fingerprint([torch.zeros(2, 3)]) != fingerprint([torch.zeros(3, 2)])


def test_a_model_that_is_no_decoder_is_refused():
    from regard.models import BertConfig

    model = BertConfig(vocabulary=16, width=16, depth=1, heads=2, hidden=16).build()
    with pytest.raises(RegardError, match="no decoder"):
        body_of(model)
