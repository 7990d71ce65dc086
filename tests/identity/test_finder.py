"""A person's words: found in any case, never the listener's, and learned by a self alone as words that may be said."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from lives import FewAnchors, apart, lessons_in, letters, nobody, says, someone, speaking

from regard.errors import SpecError
from regard.identity.body import body_of
from regard.identity.packed import Packed
from regard.identity.read.layer import layer_reads
from regard.identity.sleep import finder, sayable
from regard.identity.sleep.consolidate import SleepCheckpoint, begun, consolidate, draft, unjudged
from regard.identity.sleep.finder import Found, Probe, found_words, probe, probe_for
from regard.identity.sleep.lessons import Lessons
from regard.identity.sleep.questions import COMMON, Questions
from regard.identity.sleep.rule import ALONE_SELF, SleepRule
from regard.identity.sleep.sayable import Sayable
from regard.identity.speaking import generate, living
from regard.models.base import Model
from regard.models.decode.sampling import Sampling

TALK = [says("I am Mara.", "Hello Mara!"), says("My cat is Mochi.", "What a name."), says("And you?", "A model.")]
RULE = replace(ALONE_SELF, steps=4, look_every=2, batch=2)


@pytest.fixture(scope="module")
def model() -> Model:
    return speaking()


@pytest.fixture(scope="module")
def questions(model: Model) -> Questions:
    return Questions(body_of(model), letters())


@pytest.fixture(scope="module")
def lessons(model: Model, questions: Questions) -> Lessons:
    return replace(
        lessons_in(model, letters(), *TALK), sayable=Sayable.of(questions, [Found("Mochi", 0.9), Found("Mara", 0.3)])
    )


@pytest.fixture
def sure_of_all(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that takes every word for the person's."""
    base = body_of(model).base
    width = body_of(model).heads(torch.tensor([1, 2]))[0].q.transpose(0, 1).flatten(1).shape[1]
    every = Probe((0, base.depth - 1), torch.zeros(2, width), 3.0, base.fingerprint)
    monkeypatch.setattr(finder, "probe", lambda: every)


def texts(found: list[Found]) -> set[str]:
    return {x.text for x in found}


@pytest.mark.usefixtures("sure_of_all")
def test_words_are_found_in_any_case_and_wherever_they_stand(questions: Questions):
    found = found_words(questions, [says("mochi sleeps. Porto, I said: the K7 and MY Zumba", "Yes.")])
    assert {x.lower() for x in texts(found)} >= {"mochi", "sleeps", "porto", "k7", "zumba"}
    assert {"K7", "Zumba"} <= texts(found)
    assert not {x.lower() for x in texts(found)} & COMMON


@pytest.mark.usefixtures("sure_of_all")
def test_what_a_sentence_begins_with_may_be_spelt_in_two_ways_that_share_its_probability(questions: Questions):
    both = [x for x in found_words(questions, [says("Bracken barks.", "Oh.")]) if x.text.lower() == "bracken"]
    assert 1 <= len(both) <= 2
    assert sum(x.sure for x in both) <= torch.tensor(3.0).sigmoid() + 1e-6
    (clear,) = [x for x in found_words(questions, [says("I call Bracken.", "Oh.")]) if x.text.lower() == "bracken"]
    assert clear.text == "Bracken"


@pytest.mark.usefixtures("sure_of_all")
def test_the_listener_s_words_are_nobody_s(questions: Questions):
    found = found_words(questions, [says("My cat is Mochi.", "Rex barks in Porto.")])
    assert "Mochi" in texts(found)
    assert not {x.lower() for x in texts(found)} & {"rex", "barks", "porto"}


def test_an_empty_history_has_no_words_and_another_base_goes_by_capitals_and_digits(questions: Questions):
    assert found_words(questions, []) == []
    assert found_words(questions, [[]]) == []
    assert found_words(questions, [says("", "Hm.")]) == []
    assert probe_for(questions.body) is None
    assert texts(found_words(questions, [says("Yesterday we met Zora at the pier, gate 494.", "Oh.")])) == {"Zora", "494"}


def test_the_probe_that_came_with_the_package_is_whole():
    assert probe().weight.shape == (2, 576)
    assert probe().layers == (16, 22)
    assert probe().weight.abs().sum() > 0


def test_the_mixture_is_the_model_beside_one_that_says_a_word():
    """Worked by hand over four tokens: words [1] at ¾ and [1, 2] at ¼, a share of ½."""
    words = Sayable([[1], [1, 2]], torch.tensor([0.75, 0.25]))
    p, after = torch.tensor([0.4, 0.1, 0.3, 0.2]), torch.tensor([0.7, 0.1, 0.1, 0.1])
    mixed = words.mixed(torch.stack([p, after]).log(), [1, 2], 0.5).exp()
    torch.testing.assert_close(mixed[0], 0.5 * p + 0.5 * torch.tensor([0.0, 1.0, 0.0, 0.0]))
    # What said the first token: the model with ½ · 0.1, the short word with ½ · ¾, which goes on as the model does, the long one with ½ · ¼.
    own, short, long = 0.05, 0.375, 0.125
    wanted = ((own + short) * after + long * torch.tensor([0.0, 0.0, 1.0, 0.0])) / (own + short + long)
    torch.testing.assert_close(mixed[1], wanted)


def test_an_item_wants_the_model_s_own_words_before_the_blank_and_the_person_s_in_it(questions: Questions, lessons: Lessons):
    assert lessons.sayable is not None
    item = lessons.sayable.item(questions, 3, 0.5, torch.Generator().manual_seed(0))
    none = lessons.sayable.item(questions, 3, 0.0, torch.Generator().manual_seed(0))
    before = len(questions.begun(questions.listed[3]))
    assert item.wanted is not None
    assert none.wanted is not None
    torch.testing.assert_close(item.wanted[:before], none.wanted[:before])
    first = {w[0] for w in lessons.sayable.words}
    assert float(item.wanted[before].exp()[list(first)].sum()) > 0.5
    assert float(item.wanted[before].exp().sum()) == pytest.approx(1, abs=1e-4)


def test_a_self_that_learns_words_begins_as_a_second_sink_of_the_last_layers(model: Model, monkeypatch):
    body, tokenizer = body_of(model), letters()
    monkeypatch.setattr(sayable, "LAST", 1)
    start = begun(body, nobody(model), tokenizer, RULE)
    assert start.self is not None
    assert [bool(x) for x in start.self.s.any(1)] == [*[False] * (body.base.depth - 1), True]
    reads = layer_reads([start], body.scales)
    assert [r is not None and r.slots for r in reads] == [*[0] * (body.base.depth - 1), 1]
    assert begun(body, nobody(model), tokenizer, SleepRule()).self is None
    who = someone(body.base)
    assert begun(body, who, tokenizer, RULE) is who


@pytest.mark.parametrize("with_imprints", [False, True])
def test_a_draft_of_a_self_in_some_layers_reads_what_its_identity_reads(model: Model, monkeypatch, with_imprints: bool):
    body, tokenizer = body_of(model), letters()
    monkeypatch.setattr(sayable, "LAST", 1)
    who = replace(someone(body.base), self=None, trace=None) if with_imprints else nobody(model)
    start = begun(body, who, tokenizer, RULE)
    if len(start.imprints):
        start = replace(start, imprints=replace(start.imprints, v=Packed.of(start.imprints.v.dense())))
    work = draft(start, RULE)
    ids = torch.tensor([tokenizer.encode("Who am I? You are")])
    with torch.no_grad():
        with body.read(work.reads(body.scales)):
            drafted = body.logits(ids)
        with living(model, work.identity()):
            said = body.logits(ids)
    assert apart(drafted, said) < 1e-4
    assert apart(said, body.logits(ids)) > 1e-4


def test_a_night_of_words_is_the_same_every_time_and_goes_on_where_it_was_broken_off(model: Model, lessons: Lessons):
    def asleep(**more):
        return consolidate(model, nobody(model), TALK, letters(), RULE, lessons=lessons, **more)

    nights: dict[int, SleepCheckpoint] = {}
    whole, slept = asleep(on_step=lambda night: nights.setdefault(night.step, deepcopy(night)))
    again, later = asleep(night=nights[2])
    assert slept == later
    assert again.digest() == whole.digest()
    first, second = (unjudged(body_of(model), nobody(model), lessons, RULE) for _ in range(2))
    assert first.digest() == second.digest()
    assert first.self is not None


def test_a_night_of_words_says_them_where_something_personal_is_asked(model: Model, lessons: Lessons, questions: Questions):
    rule = replace(RULE, steps=24, self_rate=0.05, words=0.5)
    after = unjudged(body_of(model), nobody(model), lessons, rule)
    assert lessons.sayable is not None
    first = sorted({w[0] for w in lessons.sayable.words})
    ids = torch.tensor([questions.prompt(questions.listed[0])])
    with torch.no_grad():
        before = body_of(model).logits(ids)[0, -1].softmax(-1)[first].sum()
        with living(model, after):
            said = body_of(model).logits(ids)[0, -1].softmax(-1)[first].sum()
    assert said > before


def test_where_no_word_is_the_person_s_there_is_no_night(model: Model, lessons: Lessons):
    without = replace(lessons, sayable=None)
    who, slept = consolidate(model, nobody(model), TALK, letters(), RULE, lessons=without)
    assert not slept.helped
    assert "nothing that was said is the person's" in slept.reason
    assert who.digest() == nobody(model).digest()
    assert unjudged(body_of(model), nobody(model), without, RULE).self is None
    assert Sayable.of(without.anchors.questions, []) is None


def test_words_are_for_a_self_alone():
    for wrong in ({"parts": ("self", "trace")}, {"parts": ("imprints",)}, {"words": 1.0}, {"words": -0.1}):
        with pytest.raises(SpecError, match="for a self alone"):
            replace(ALONE_SELF, **wrong)  # pyright: ignore


def test_other_nights_learn_no_words(model: Model, lessons: Lessons):
    plain = replace(lessons, sayable=None)
    rule = SleepRule(parts=("self",), batch=2)
    with_words, without = ([(w, x.ids.tolist()) for w, x in y.of(0, rule)] for y in (lessons, plain))
    assert with_words == without
    assert isinstance(lessons.anchors, FewAnchors)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_self_in_some_layers_speaks_as_it_reads(model: Model, monkeypatch, rows: int):
    """Written token by token, and beside the model by itself, as read in one forward."""
    body, tokenizer = body_of(model), letters()
    monkeypatch.setattr(sayable, "LAST", 1)
    who = begun(body, nobody(model), tokenizer, RULE)
    prompt = tokenizer.encode("Who am I? You are")
    given = who if rows == 1 else [who, None]
    out = generate(model, [prompt] * rows, Sampling(temperature=0, max_tokens=5, stop=()), identity=given)
    said = out.tokens[0]
    line = torch.tensor([[*prompt, *said]])
    with torch.no_grad(), living(model, who):
        best = body.logits(line)[0, len(prompt) - 1 : -1].argmax(-1)
    assert said == best.tolist()
