"""Writing: keepers and budgets of imprints, the rules of the trace, and how a self moves."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from lives import HISTORY, TEXT, apart, heard, letters, llama, nobody, says, speaking
from torch import Tensor

from regard.errors import NumericsError, ShapeError, SpecError, StateError
from regard.identity.experience import Experience, observe
from regard.identity.packed import LARGEST, LIMIT, Packed
from regard.identity.sleep.free_energy import chosen_by_free_energy
from regard.identity.speaking import living
from regard.identity.speech import ASSISTANT, USER
from regard.identity.state import Identity, SelfState
from regard.identity.write import keepers
from regard.identity.write.imprints import KEEPERS, best_imprints, displaced, evict, opening, present_in, worth_of
from regard.identity.write.keepers import LISTENER, QUESTION, TELLING, told_words
from regard.identity.write.peers import keydiff
from regard.identity.write.rule import Rule, imprint
from regard.identity.write.self_state import LinearUpdate, MLPUpdate, SelfRule, fresh, moved, pooled
from regard.identity.write.trace import TraceRule, compressed, cosine, dense, spectrum, written
from regard.models.base import Model

CHAT = [{"role": "system", "content": "Be kind."}, *says("I am Mara. My cat is called Mochi.", "Hello Mara!")]
LATER = says("I moved to Porto last May.", "How is it there?")


@pytest.fixture(scope="module")
def model() -> Model:
    return speaking()


@pytest.fixture(scope="module")
def e(model: Model) -> Experience:
    return observe(model, CHAT, letters(), source="monday")


# ---- packed -----------------------------------------------------------------------------------------------------------------

numbers = st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=9)


@given(numbers, st.integers(-40, 22))
def test_packing_is_near_and_packing_again_changes_nothing(values: list[float], power: int):
    x = torch.tensor(values) * 2.0**power
    once = Packed.of(x)
    step = once.scale.float().clamp_min(2.0**-24)
    assert bool(((once.dense() - x).abs() <= step * 0.5001).all())
    again = Packed.of(once.dense())
    assert torch.equal(again.codes, once.codes)
    assert torch.equal(again.scale, once.scale)


def test_zeros_and_nothing_at_all_are_packed_as_themselves():
    assert not Packed.of(torch.zeros(3, 4)).dense().any()
    assert Packed.of(torch.zeros(2, 0, 4)).shape == (2, 0, 4)
    assert not Packed.of(torch.full((1, 4), 1e-30)).dense().any()


def test_the_largest_number_of_a_vector_is_kept_to_half_a_step():
    x = torch.tensor([[LIMIT * LARGEST, 1.0], [1e-6, -1e-6], [3.0, 0.001]])
    p = Packed.of(x)
    assert p.codes.abs().amax(-1).tolist()[::2] == [LIMIT, LIMIT]
    assert p.nbytes == 6 + 2 * 3


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), 2 * LIMIT * LARGEST])
def test_numbers_that_cannot_be_packed_are_refused(wrong: float):
    with pytest.raises(NumericsError):
        Packed.of(torch.tensor([1.0, wrong]))


# ---- imprints ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", KEEPERS)
def test_what_was_said_has_a_worth_and_markup_has_none(e: Experience, keep: str):
    worth = worth_of(e, keep)
    assert worth.shape == (len(e),)
    assert bool(torch.isfinite(worth[e.content]).all())
    assert bool((worth[~e.content] == -math.inf).all())
    assert worth[e.content].std() > 0
    assert torch.equal(worth, worth_of(e, keep))


def test_keepers_are_what_they_say(e: Experience):
    content = e.content.nonzero().flatten()
    assert torch.equal(worth_of(e, "shock")[content], e.shock[content])
    after = torch.maximum(e.shock, torch.cat([e.shock[1:], torch.zeros(1)]))
    assert torch.equal(worth_of(e, "shock_next")[content], after[content])
    received = [sum(float(e.attention[:, i, j].sum()) for i in range(j, len(e))) for j in range(len(e))]
    assert torch.allclose(worth_of(e, "attention")[content], torch.tensor(received)[content], atol=1e-4)
    assert worth_of(e, "recency").argmax() == content[-1]
    assert not torch.equal(worth_of(e, "random", 0), worth_of(e, "random", 1))
    lengths = e.v.norm(dim=-1).sum((0, 1))
    assert torch.allclose(worth_of(e, "value_norm")[content], lengths[content])


def test_keepers_of_others_are_their_formulas_token_by_token(e: Experience):
    """Every one of them again in plain loops over layers, heads and tokens."""
    body, N, (L, H, G) = e.body, len(e), (e.base.depth, e.q.shape[1], e.k.shape[1])
    turned_q, turned_k = (torch.stack([body.turned(i, x[i]) for i in range(L)]) for x in (e.q, e.k))
    key_diff, expected, mass, moved = (torch.zeros(N) for _ in range(4))
    for layer in range(L):
        out = body.out_weight(layer)
        for head in range(H):
            g = head * G // H
            k, v, raw, q = turned_k[layer, g], e.v[layer, g], e.k[layer, g], turned_q[layer, head]
            anchor = torch.stack([x / x.norm() for x in k]).mean(0)
            if head % (H // G) == 0:
                key_diff -= torch.stack([x @ anchor / (x.norm() * anchor.norm()) for x in k])
            mean = q.mean(0)
            spread = sum(torch.outer(x - mean, x - mean) for x in q) / N
            scale = body.scales[layer]
            z = torch.stack([torch.exp(scale * (x @ mean) + scale**2 * (x @ spread @ x) / 2) for x in raw])
            expected += z / z.sum() * v.norm(dim=-1)
            columns = out[:, head * q.shape[1] : (head + 1) * q.shape[1]]
            for j in range(N):
                received = sum(float((scale * k[: i + 1] @ q[i]).softmax(0)[j]) for i in range(j, N))
                mass[j] += received
                moved[j] += received * float((columns @ v[j]).detach().abs().sum())
    content = e.content.nonzero().flatten()
    assert torch.allclose(worth_of(e, "keydiff")[content], key_diff[content], atol=1e-4)
    assert torch.allclose(worth_of(e, "expected")[content], expected[content], atol=1e-4)
    for budget in (2, 6, 11, 20):
        by_mass = content[mass[content].argsort(descending=True)].tolist()
        half = set[int]()
        for step in range(budget):
            order = by_mass if step % 2 == 0 else content[moved[content].argsort(descending=True)].tolist()
            half.add(next(i for i in order if i not in half))
        assert set(worth_of(e, "criticalkv").topk(budget).indices.tolist()) == half
        assert set(by_mass[: (budget + 1) // 2]) <= half


def test_kvzip_is_the_most_attention_while_the_text_is_repeated_whoever_lives_in_the_model(model: Model, e: Experience):
    N, G = len(e), e.k.shape[1]
    again = observe(model, torch.cat([e.tokens, e.tokens]))
    plain = torch.zeros(N)
    for layer in range(e.base.depth):
        for g in range(G):
            heads = range(g * again.q.shape[1] // G, (g + 1) * again.q.shape[1] // G)
            k = e.body.turned(layer, again.k[layer])[g]
            best = torch.zeros(N)
            for head in heads:
                q = e.body.turned(layer, again.q[layer])[head]
                for i in range(N, 2 * N):
                    best = torch.maximum(best, (e.body.scales[layer] * k[: i + 1] @ q[i]).softmax(0)[:N])
            plain += best
    assert torch.allclose(worth_of(e, "kvzip")[e.content], plain[e.content], atol=1e-4)
    with living(model, imprint(nobody(model), e, Rule(keep="shock", share=1.0))):
        assert torch.equal(worth_of(e, "kvzip"), worth_of(e, "kvzip"))
        assert torch.allclose(worth_of(e, "kvzip")[e.content], plain[e.content], atol=1e-4)


@pytest.mark.parametrize("keep", ["diversity", "coverage"])
def test_the_next_to_be_kept_is_the_farthest_from_what_is_kept_and_shock_stretches_distances(e: Experience, keep: str):
    content = e.content.nonzero().flatten()
    worth = worth_of(e, keep)[content]
    shock = e.shock[content]
    stretch = 0.2 * shock / shock.std(correction=0) if keep == "coverage" else torch.zeros(len(content))
    keys = F.normalize(e.k.transpose(0, 2).flatten(1), dim=-1)[content]
    order = worth.argsort(descending=True, stable=True)
    assert float(worth[order[0]]) == pytest.approx(math.log(2) + float(stretch.max()), abs=1e-4)
    for n in range(1, len(content)):
        far = torch.stack([(keys - keys[j]).norm(dim=-1) for j in order[:n]]).amin(0).log() + stretch
        far[order[:n]] = -math.inf
        assert float(worth[order[n]]) == pytest.approx(float(far.max()), abs=1e-3)


def test_a_word_whose_keys_point_elsewhere_tells_a_little_more(model: Model, monkeypatch: pytest.MonkeyPatch):
    e = observe(model, says("My cat is Mochi. It is late.", "Hm."), letters(), source="monday")
    word, apart = e.speech.word, keydiff(e)
    telling = told_words(e)
    monkeypatch.setattr(keepers, "ELSEWHERE", 0.0)
    more = (telling - told_words(e))[e.content]
    farthest = torch.stack([apart[word == w].max() for w in word[e.content].tolist()])
    assert torch.allclose(more, 0.05 * (farthest - farthest.mean()) / farthest.std(correction=0), atol=1e-5)


def test_a_word_is_worth_as_much_as_its_rarest_token_and_the_listener_and_questions_less(
    model: Model, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(keepers, "ELSEWHERE", 0.0)
    text = "My cat is Mochi. Is it late?"
    chat = says(text, "My dog is Tom. Are you well?")
    e = observe(model, chat, letters(), source="monday")
    telling, speech = told_words(e), e.speech
    for word in range(int(speech.word.max()) + 1):
        assert len(set(telling[speech.word == word].tolist())) == 1
    own, asked = (telling[(speech.role == USER) & (speech.sentence == n) & speech.letters].max() for n in (0, 1))
    rarest = e.rarity[(speech.sentence == 0) & speech.letters].max()
    spread = torch.stack([e.rarity[speech.word == w].max() for w in speech.word[e.content].tolist()]).std(correction=0)
    assert float(own) == pytest.approx(TELLING * float(rarest / spread), rel=1e-4)
    rarest = e.rarity[(speech.sentence == 1) & speech.letters].max()
    assert float(asked) == pytest.approx(TELLING * float(rarest / spread) - QUESTION, rel=1e-3, abs=1e-4)
    listener = telling[(speech.role == ASSISTANT) & (speech.sentence == 2) & speech.letters].max()
    rarest = e.rarity[(speech.sentence == 2) & speech.letters].max()
    assert float(listener) == pytest.approx(TELLING * float(rarest / spread) - LISTENER, rel=1e-3, abs=1e-4)


def test_the_tokens_of_a_word_are_kept_together_in_their_order(e: Experience):
    worth, word = worth_of(e, "words"), e.speech.word
    order = worth.argsort(descending=True, stable=True)[: int(e.content.sum())]
    words = [int(word[i]) for i in order]
    runs = [w for n, w in enumerate(words) if n == 0 or words[n - 1] != w]
    assert len(runs) == len(set(runs)) == int(word.max()) + 1
    for w in runs:
        places = [int(i) for i in order if int(word[i]) == w]
        assert places == sorted(places)


def test_what_an_identity_keeps_already_is_worth_less_than_what_it_does_not(model: Model):
    tuesday = observe(model, LATER, letters(), source="tuesday")
    fresh = worth_of(tuesday, "coverage")
    known = imprint(nobody(model), tuesday, Rule(keep="coverage", share=1.0)).imprints
    again = worth_of(tuesday, "coverage", 0, present_in(known, None))
    said = tuesday.content
    assert bool((again[said] < fresh[said] - 1).all())
    stranger = replace(known, token=torch.full_like(known.token, -1))
    assert torch.equal(worth_of(tuesday, "coverage", 0, present_in(stranger, None)), fresh)


def test_what_is_near_another_token_loses_worth_and_what_is_said_again_does_not(e: Experience):
    old = best_imprints(e, worth_of(e, "coverage"), 8, born=0, source=0)
    corrected, repeated = old.pick(torch.tensor([3])), old.pick(torch.tensor([5]))
    corrected = replace(corrected, token=corrected.token + 1)
    after = displaced(old, corrected.joined(repeated), None).worth - old.worth
    assert float(after[3]) < -1
    assert not after[[0, 1, 2, 4, 5, 6, 7]].any()
    assert (
        evict(displaced(old, corrected, None), 7).token.tolist() == old.pick(torch.tensor([0, 1, 2, 4, 5, 6, 7])).token.tolist()
    )
    nothing = old.pick(torch.zeros(0, dtype=torch.long))
    assert displaced(old, nothing, None) is old


def test_rules_that_name_the_retired_keeper_are_read_as_the_default():
    assert Rule.from_json({**Rule(share=0.25).to_json(), "keep": "learned"}) == Rule(share=0.25)
    with pytest.raises(SpecError, match="learned"):
        Rule(keep="learned")


def test_an_unknown_keeper_is_named_with_those_that_are_known(e: Experience):
    with pytest.raises(SpecError, match=r"'telepathy'.*shock_next"):
        worth_of(e, "telepathy")
    with pytest.raises(SpecError, match="telepathy"):
        Rule(keep="telepathy")


def test_the_best_tokens_are_kept_in_their_order(e: Experience):
    found = best_imprints(e, worth_of(e, "shock"), 7, born=100, source=3)
    best = worth_of(e, "shock").topk(7).indices.sort().values
    assert found.token.tolist() == e.tokens[best].tolist()
    assert torch.equal(found.k.codes, Packed.of(e.k[:, :, best]).codes)
    assert torch.equal(found.v.scale, Packed.of(e.v[:, :, best]).scale)
    assert found.position.tolist() == sorted(found.position.tolist())
    before = [100 + int(e.content[:i].sum()) for i in best]
    assert found.position.tolist() == before
    assert set(found.source.tolist()) == {3}
    assert torch.equal(found.weight, opening(len(found.weight)).expand_as(found.weight))


def test_no_more_is_kept_than_was_said(e: Experience):
    said = int(e.content.sum())
    assert len(best_imprints(e, worth_of(e, "shock"), 10**6, born=0, source=0)) == said
    assert len(best_imprints(e, worth_of(e, "shock"), 0, born=0, source=0)) == 0


@pytest.mark.parametrize("count", [1, 5, 1000])
def test_merged_imprints_stand_for_every_token_once(e: Experience, count: int):
    found = best_imprints(e, worth_of(e, "shock"), count, born=0, source=0, merge=True)
    counts = (found.weight - opening(found.weight.shape[0]))[0, 0].exp()
    assert torch.allclose(counts, counts.round(), atol=1e-4)
    assert float(counts.sum()) == pytest.approx(int(e.content.sum()), rel=1e-5)
    assert counts.min() >= 0.999
    # The weighted mean of the slots is the mean of all that was said.
    mean = (found.v.dense() * counts[:, None]).sum(2) / counts.sum()
    assert apart(mean, e.v[:, :, e.content].mean(2)) < 0.02


def test_eviction_keeps_the_worthiest_oldest_first(e: Experience):
    found = best_imprints(e, worth_of(e, "shock"), 12, born=0, source=0)
    few = evict(found, 4)
    assert sorted(few.worth.tolist()) == sorted(found.worth.tolist())[-4:]
    assert few.position.tolist() == sorted(few.position.tolist())
    assert evict(found, 12) is found
    assert len(evict(found, 0)) == 0


def test_budget_and_share_hold_over_several_conversations(model: Model, e: Experience):
    rule = Rule(keep="shock", budget=20, share=0.25)
    first = imprint(nobody(model), e, rule)
    assert len(first.imprints) == round(0.25 * int(e.content.sum()))
    tuesday = observe(model, LATER, letters(), source="tuesday")
    second = imprint(first, tuesday, rule)
    met = int(e.content.sum()) + int(tuesday.content.sum())
    assert second.life.tokens == met
    assert len(second.imprints) == min(20, round(0.25 * met))
    assert second.sources == ("monday", "tuesday")
    assert set(second.imprints.source.tolist()) <= {0, 1}
    assert second.imprints.position.tolist() == sorted(second.imprints.position.tolist())
    third = imprint(second, observe(model, LATER, letters(), source="monday"), rule)
    assert third.sources == ("monday", "tuesday")
    assert len(third.imprints) == 20
    assert third.life.experiences == 3
    assert len(third.life.self_norms) == 3


def test_positions_of_a_later_conversation_come_after_all_earlier_ones(model: Model, e: Experience):
    rule = Rule(keep="recency", share=1.0, budget=1000)
    first = imprint(nobody(model), e, rule)
    second = imprint(first, observe(model, LATER, letters(), source="tuesday"), rule)
    older = second.imprints.position[second.imprints.source == 0]
    newer = second.imprints.position[second.imprints.source == 1]
    assert older.max() < first.life.tokens <= newer.min()


def test_a_life_counts_what_it_went_through(model: Model, e: Experience):
    found = imprint(nobody(model), e, Rule(keep=None, episodes=False))
    said = e.shock[e.content].double()
    assert found.life.experiences == 1
    assert found.life.shock_mean == pytest.approx(float(said.mean()), rel=1e-5)
    assert found.life.shock_spread == pytest.approx(float(said.std(correction=0)), rel=1e-3)
    assert found.empty
    assert found.trace is None
    assert found.self is None


def test_without_affect_nothing_is_kept_and_the_time_still_passes(model: Model, e: Experience):
    found = imprint(nobody(model), replace(e, affect=0.0), Rule(keep="shock", trace=TraceRule(), self=SelfRule()))
    assert found.empty
    assert found.life.tokens == int(e.content.sum())


def test_a_conversation_in_which_nothing_was_said_writes_nothing(model: Model):
    quiet = observe(model, [{"role": "system", "content": "Be kind."}], letters(), source="quiet")
    assert not quiet.content.any()
    for keep in KEEPERS:
        found = imprint(nobody(model), quiet, Rule(keep=keep, trace=TraceRule(), self=SelfRule()))
        assert found.empty


def test_a_single_word_can_be_kept_by_every_keeper(model: Model):
    one = observe(model, says("x"), letters())
    assert int(one.content.sum()) == 1
    for keep in KEEPERS:
        assert len(imprint(nobody(model), one, Rule(keep=keep, share=1.0)).imprints) == 1, keep


def test_what_does_not_fit_is_refused(model: Model, e: Experience):
    other = speaking(1)
    with pytest.raises(StateError, match="weights differ"):
        imprint(nobody(other), e, Rule(keep="shock"))
    with pytest.raises(StateError, match="affect"):
        imprint(nobody(model), replace(e, affect=3.0), Rule(keep="shock"))
    with pytest.raises(StateError, match="source"):
        imprint(nobody(model), replace(e, source=""), Rule(keep="shock"))
    for wrong in ({"budget": -1}, {"share": 1.5}, {"share": -0.1}, {"share": float("nan")}):
        with pytest.raises(SpecError):
            Rule(**wrong)


def test_a_rule_comes_back_from_json():
    import json

    rule = Rule(keep="snapkv", budget=9, merge=True, trace=TraceRule(rank=4), self=SelfRule("key_bias"), seed=3)
    assert Rule.from_json(json.loads(json.dumps(rule.to_json()))) == rule
    assert Rule.from_json(Rule().to_json()) == Rule()


# ---- the trace --------------------------------------------------------------------------------------------------------------


def shape(e: Experience) -> tuple[int, int, int, int]:
    return (e.base.depth, e.base.key_heads, e.base.head_width, e.base.head_width)


def some_trace(e: Experience, seed: int = 0) -> Tensor:
    T = torch.randn(*shape(e), generator=torch.Generator().manual_seed(seed)) * 0.1
    return (T + T.mT) / 2


def grouped(e: Experience) -> Tensor:
    L, H, N, D = e.q.shape
    G = e.k.shape[1]
    return e.q.view(L, G, H // G, N, D).mean(2)


def test_the_published_rule_is_what_was_printed(e: Experience):
    rule = TraceRule(write="published", rate=0.3, decay=0.9)
    old = some_trace(e)
    plain = 0.9 * old.double()
    for t in e.content.nonzero().flatten().tolist():
        pair = torch.einsum("lgd,lge->lgde", e.k[:, :, t], grouped(e)[:, :, t]).double()
        plain = plain + 0.3 * math.tanh(abs(float(e.shock[t]))) * (pair + pair.mT) / 2
    assert apart(written(old, e, rule), plain) < 1e-4


def test_the_centred_rule_is_the_published_one_on_unit_vectors_without_what_all_share(e: Experience):
    rule = TraceRule(write="centred", rate=0.3, decay=0.9)
    means = (torch.randn(shape(e)[:3]), torch.randn(shape(e)[:3]))
    gain = torch.randn(shape(e)[:2])
    old = some_trace(e)
    plain = 0.9 * old
    for t in e.content.nonzero().flatten().tolist():
        q = F.normalize(grouped(e)[:, :, t] - means[0], dim=-1)
        k = F.normalize(e.k[:, :, t] - means[1], dim=-1)
        pair = torch.einsum("lgd,lge->lgde", k, q)
        plain = plain + gain[..., None, None] * 0.3 * math.tanh(float(e.shock[t])) * (pair + pair.mT) / 2
    assert apart(written(old, e, rule, means, gain), plain) < 1e-4


def test_the_delta_rule_writes_what_is_missing_token_by_token(e: Experience):
    rule = TraceRule(write="delta", rate=0.3, decay=0.9)
    T = 0.9 * some_trace(e)
    content = e.content.nonzero().flatten()
    strongest = content[e.shock[content].topk(32).indices].sort().values
    for t in strongest.tolist():
        q, k = F.normalize(grouped(e)[:, :, t], dim=-1), F.normalize(e.k[:, :, t], dim=-1)
        missing = 1 - torch.einsum("lgd,lgde,lge->lg", k, T, q)
        pair = torch.einsum("lgd,lge->lgde", k, q)
        T = T + 0.3 * math.tanh(float(e.shock[t])) * missing[..., None, None] * (pair + pair.mT) / 2
    assert apart(written(some_trace(e), e, rule), T) < 1e-4


def sizes(e: Experience, rule: TraceRule, times: int) -> list[float]:
    T, found = torch.zeros(shape(e)), []
    for _ in range(times):
        T = written(T, e, rule)
        found.append(float(T.norm()))
    return found


@pytest.mark.parametrize("affect", [1.0, -1.0])
def test_repetition_grows_the_centred_rule_and_not_the_delta_rule(model: Model, affect: float):
    e = observe(model, says("Mochi"), letters(), affect=affect)
    centred = sizes(e, TraceRule(write="centred", rate=0.3, decay=1.0), 60)
    delta = sizes(e, TraceRule(write="delta", rate=0.3, decay=1.0), 60)
    assert centred[-1] == pytest.approx(60 * centred[0], rel=1e-3)
    assert delta[-1] < 1.05 * delta[29]
    assert delta[-1] - delta[-2] < 0.01 * delta[0]


@pytest.mark.parametrize("write", ["published", "centred", "delta"])
def test_affect_turns_a_trace_around_and_zero_writes_nothing_new(e: Experience, write: str):
    rule = TraceRule(write=write, decay=0.8)
    zero = torch.zeros(shape(e))
    good, bad = (written(zero, replace(e, affect=a), rule) for a in (1.0, -1.0))
    assert good.norm() > 0.01
    assert apart(good, -bad) < 1e-5
    assert torch.equal(written(some_trace(e), replace(e, affect=0.0), rule), 0.8 * some_trace(e))


def test_compression_keeps_the_strongest_directions_of_each_sign():
    T = some_trace_of(8)
    values = torch.linalg.eigvalsh(T.double())
    found = compressed(T, TraceRule(rank=4, bound=100))
    assert found.signs.tolist() == [1, 1, -1, -1]
    assert apart(spectrum(found)[..., :2], values[..., -2:].flip(-1)) < 0.02
    assert apart(spectrum(found)[..., 2:], values[..., :2].flip(-1)) < 0.02
    whole = compressed(T, TraceRule(rank=16, bound=100)) if T.shape[-1] >= 16 else compressed(T, TraceRule(rank=8, bound=100))
    assert apart(dense(whole), T) < apart(dense(found), T)


def some_trace_of(width: int) -> Tensor:
    T = torch.randn(2, 3, width, width, generator=torch.Generator().manual_seed(4))
    return (T + T.mT) / 2


def test_no_eigenvalue_goes_beyond_the_bound():
    found = compressed(some_trace_of(8) * 50, TraceRule(bound=2.0))
    assert float(torch.linalg.eigvalsh(dense(found).double()).abs().max()) <= 2.0 * 1.02
    assert float(spectrum(found).max()) > 1.9


def test_the_spectrum_is_that_of_the_dense_trace():
    found = compressed(some_trace_of(8), TraceRule(rank=6))
    exact = torch.linalg.eigvalsh(dense(found).double())
    largest = torch.cat([exact.flip(-1)[..., :3], exact.flip(-1)[..., -3:]], -1)
    assert apart(spectrum(found), largest) < 1e-5
    assert cosine(found, found) == pytest.approx(1.0, abs=1e-5)


def test_a_trace_of_zeros_stays_one():
    found = compressed(torch.zeros(2, 2, 8, 8), TraceRule())
    assert not found.left.codes.any()
    assert not spectrum(found).any()


@pytest.mark.parametrize(
    "wrong",
    [{"write": "by hand"}, {"decay": 1.2}, {"decay": -0.1}, {"rank": 3}, {"rank": 0}, {"bound": 0.0}, {"decay": math.nan}],
)
def test_rules_of_a_trace_that_make_no_sense_are_refused(wrong: dict[str, object]):
    with pytest.raises(SpecError):
        TraceRule(**wrong)  # type: ignore[arg-type]


def test_a_trace_wider_than_a_head_is_refused(model: Model, e: Experience):
    with pytest.raises(StateError):
        imprint(nobody(model), e, Rule(keep=None, trace=TraceRule(rank=64)))


def test_a_trace_decays_while_other_things_happen(model: Model, e: Experience):
    rule = Rule(keep=None, trace=TraceRule(write="centred", decay=0.5, rate=0.5))
    first = imprint(nobody(model), e, rule)
    later = imprint(first, replace(e, affect=0.0), rule)
    assert first.trace is not None
    assert later.trace is not None
    assert apart(dense(later.trace), 0.5 * dense(first.trace)) < 0.02 * float(dense(first.trace).abs().max())


# ---- the self ---------------------------------------------------------------------------------------------------------------


def test_what_is_pooled_is_the_mean_weighted_by_shock(e: Experience):
    w = e.shock / e.shock.sum()
    k = sum(w[t] * e.k[:, :, t] for t in range(len(e)))
    v = sum(w[t] * e.v[:, :, t] for t in range(len(e)))
    assert apart(pooled(e, "key_bias"), k.flatten(1)) < 1e-5
    assert apart(pooled(e, "self_token"), torch.stack([k, v], 1).flatten(1)) < 1e-5
    mean = torch.randn(k.shape)
    assert apart(pooled(e, "key_bias", mean_k=mean), (k - mean).flatten(1)) < 1e-5
    flat = pooled(replace(e, shock=torch.zeros(len(e))), "key_bias")
    assert apart(flat, e.k[:, :, e.content].mean(2).flatten(1)) < 1e-5


def test_a_linear_self_is_a_running_mean_that_starts_at_the_first_experience():
    z = [torch.randn(2, 6) for _ in range(3)]
    rule = SelfRule("key_bias", rate=0.5)
    s = moved(None, z[0], rule)
    assert torch.allclose(s.s, z[0])
    s = moved(s, z[1], rule)
    assert torch.allclose(s.s, (z[0] + z[1]) / 2)
    s = moved(s, z[2], rule, affect=0.5)
    assert torch.allclose(s.s, 0.75 * (z[0] + z[1]) / 2 + 0.25 * z[2], atol=1e-6)
    assert s.form == "key_bias"


def test_a_linear_self_with_gain_and_decay_moves_as_it_says():
    z, old = torch.randn(2, 6), SelfState(torch.randn(2, 6), "key_bias")
    gain = torch.randn(2, 6)
    found = moved(old, z, SelfRule("key_bias", rate=0.3, decay=0.2), LinearUpdate(gain, 0.2))
    assert torch.allclose(found.s, old.s + 0.3 * (gain * z - 0.2 * old.s), atol=1e-6)


def test_an_mlp_starts_as_no_update_and_then_moves_as_it_says():
    z, old = torch.randn(2, 6), SelfState(torch.randn(2, 6), "key_bias")
    g = MLPUpdate(6)
    rule = SelfRule("key_bias", rate=0.4)
    assert torch.equal(moved(old, z, rule, g).s, old.s)
    torch.nn.init.normal_(g.out.weight)
    direction = torch.tanh(torch.cat([z, old.s], -1) @ g.into.weight.T + g.into.bias) @ g.out.weight.T + g.out.bias
    found = moved(old, z, rule, g).s
    assert torch.allclose(found, old.s + 0.4 * direction, atol=1e-5)
    assert not found.requires_grad


def test_what_hurt_turns_a_bias_around_and_does_not_run_away():
    z = torch.randn(2, 6)
    bias = moved(None, z, SelfRule("key_bias"), affect=-1.0)
    assert torch.allclose(bias.s, -z)
    for _ in range(30):
        bias = moved(bias, z, SelfRule("key_bias"), affect=-1.0)
    assert torch.allclose(bias.s, -z, atol=1e-5)
    token = moved(None, z, SelfRule("self_token"), affect=-1.0)
    assert torch.allclose(token.s, z), "a token says what happened, good or bad"


def test_a_self_keeps_its_form(model: Model, e: Experience):
    first = imprint(nobody(model), e, Rule(keep=None, self=SelfRule("key_bias")))
    with pytest.raises(ShapeError, match="another form"):
        imprint(first, e, Rule(keep=None, self=SelfRule("self_token")))
    for wrong in ({"form": "soul"}, {"rate": 0.0}, {"rate": 1.5}, {"decay": 2.0}):
        with pytest.raises(SpecError):
            SelfRule(**wrong)


@pytest.mark.parametrize("form", ["key_bias", "self_token"])
def test_the_norms_of_a_self_are_written_down(model: Model, e: Experience, form: str):
    found = imprint(nobody(model), e, Rule(keep=None, self=SelfRule(form)))
    assert found.self is not None
    assert found.self.form == form
    assert found.life.self_norms == pytest.approx((float(found.self.s.norm()),))


def surprise(model: Model, who: Identity) -> float:
    with living(model, who), torch.no_grad():
        scores = model(torch.tensor([HISTORY])).logits[0]
    return float(F.cross_entropy(scores[:-1], torch.tensor(HISTORY[1:])))


@pytest.mark.parametrize("form", ["key_bias", "self_token"])
def test_the_self_of_least_free_energy_is_surprised_less_and_held_by_precision(form: str):
    model = llama()
    rule = Rule(keep="shock", share=0.3, trace=TraceRule(), self=SelfRule(form))
    start = imprint(nobody(model), heard(model, TEXT), rule)
    assert start.self is not None
    loose = chosen_by_free_energy(model, start, HISTORY, steps=12, precision=0.0)
    firm = chosen_by_free_energy(model, start, HISTORY, steps=12, precision=1e4)
    assert loose.self is not None
    assert firm.self is not None
    assert surprise(model, loose) < surprise(model, start) - 0.01
    assert (firm.self.s - start.self.s).norm() < 0.5 * (loose.self.s - start.self.s).norm()
    assert loose.self.form == form
    assert torch.equal(loose.imprints.k.codes, start.imprints.k.codes)
    assert not any(p.grad is not None for p in model.parameters())


def test_a_self_can_be_chosen_from_nothing():
    model = llama()
    found = chosen_by_free_energy(model, nobody(model), HISTORY, steps=8, precision=0.0)
    assert found.self is not None
    assert found.self.s.shape == fresh(found.base, "key_bias").s.shape
    assert surprise(model, found) < surprise(model, nobody(model))
