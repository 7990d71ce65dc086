"""What a night learns: only what the person stated counts, a question never holds its answer, and an update wins over what it corrects."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lives import lessons_in, letters, says, someone, speaking

from regard.errors import SpecError
from regard.identity.body import body_of, frozen
from regard.identity.sleep import teaching
from regard.identity.sleep.answering import Answer, _Beside, continued, logs_along
from regard.identity.sleep.items import ALIKE, Item, _alike, item_said, logs_at, losses
from regard.identity.sleep.lessons import JUDGED, Anchors, lessons_of
from regard.identity.sleep.questions import ASKED, Question, Questions, second_person, statements, words
from regard.identity.sleep.rule import ALONE, SleepRule
from regard.identity.sleep.teaching import Taught, said_back, taught
from regard.identity.sleep.texts import EVERYDAY, NEUTRAL, SAID_BACK
from regard.identity.speaking import living
from regard.models.base import Model

STATED = "My cat Mochi broke a vase."
CAT = Question("What is my cat's name?", "Your cat's name is")


@pytest.fixture(scope="module")
def model() -> Model:
    return speaking()


@pytest.fixture(scope="module")
def questions(model: Model) -> Questions:
    return Questions(body_of(model), letters())


def answered(text: str) -> Answer:
    """A teacher that is nearly sure of this answer."""
    tokens = letters().encode(text, bos=False)
    logs = torch.full((len(tokens), 257), -9.0)
    logs[torch.arange(len(tokens)), torch.tensor(tokens)] = -0.1
    return Answer(tokens, logs)


def lesson(questions: Questions, text: str, question: Question = CAT) -> Taught | None:
    return lesson_of(questions, answered(text), question)


def lesson_of(questions: Questions, answer: Answer, question: Question = CAT) -> Taught | None:
    of = teaching._named(questions, question, words(STATED), answer)
    if of is None:
        return None
    text = teaching._text(questions, questions.prompt(question), answer.tokens)
    return teaching._lesson(questions, question, 0, of, answer, logs_at(questions.body, *text))


def test_only_the_user_s_statements_are_asked_about():
    history = [
        says("I am Mara. Is it late?", "You are Tom, and it is late."),
        [{"role": "system", "content": "Be kind."}, *says("Who invented the zip?", "Judson.")],
    ]
    assert statements(history) == ["I am Mara. Is it late?"]
    long = "One fact is here. " * 40
    assert "".join("".join(statements([says(long)])).split()) == "".join(long.split())
    assert len(statements([says(long)])) > 1


def test_a_question_is_asked_about_whatever_a_person_calls_theirs(questions: Questions):
    asked = questions.about(STATED)
    assert CAT in asked
    assert not any("mochi" in words(q.text) | words(q.beginning) for q in asked)
    assert set(questions.matched(STATED)) <= {Question(*pair) for pair in ASKED}
    assert questions.matched("?!") == questions.matched("what is it") == []


def test_listed_questions_are_matched_by_the_word_that_their_beginning_expects(questions: Questions, monkeypatch):
    first = letters().encode(" cat", bos=False)[0]
    z = torch.zeros(len(ASKED), 257)
    z[7, first] = 5.0
    monkeypatch.setitem(questions.__dict__, "expects", z)
    assert questions.matched("cat") == [Question(*ASKED[7])]
    assert questions.fits(Question(*ASKED[7]), "cat")
    assert not questions.fits(Question(*ASKED[8]), "cat")
    assert questions.fits(CAT, "anything")


def test_an_answer_is_learned_up_to_the_person_s_last_word_its_beginning_included(questions: Questions):
    one = lesson(questions, " Mochi. What a name!")
    assert one is not None
    assert one.answer == ("mochi",)
    assert letters().decode(one.item.ids[one.item.at].tolist()) == "Your cat's name is Mochi."
    prompt = letters().decode(one.item.ids[: int(one.item.at[0])].tolist())
    assert STATED not in prompt, "the student reads the question alone"
    assert one.item.wanted is not None
    begun = len(letters().encode(CAT.beginning, bos=False))
    assert one.item.wanted[:begun].argmax(-1).tolist() == one.item.ids[one.item.at[:begun]].tolist()
    assert one.confidence == pytest.approx(-0.1)


@pytest.mark.parametrize("said", [" Luna.", " a cat.", " I am sorry, it is Mochi."])
def test_what_the_person_did_not_state_or_the_question_says_itself_is_no_answer(questions: Questions, said: str):
    assert lesson(questions, said) is None


def test_a_word_that_the_base_says_without_the_statement_is_no_answer(questions: Questions):
    body = questions.body
    answer = answered(" Mochi.")
    prompt = questions.prompt(CAT)
    ids = torch.tensor([*prompt, *answer.tokens])
    base = logs_at(body, ids, torch.arange(len(prompt), len(ids)))
    assert lesson_of(questions, Answer(answer.tokens, base)) is None


def test_the_youngest_statement_answers_and_each_statement_answers_few(questions: Questions, monkeypatch):
    item = Item(torch.arange(4), torch.tensor([3]))

    def told(_: Questions, n: int, statement: str, asked: object) -> list[Taught]:
        return [
            Taught(Question(q), item, (statement,), -0.1 * n, n) for q in ("Where?", *(f"{statement} {i}?" for i in range(4)))
        ]

    monkeypatch.setattr(teaching, "_answered", told)
    lessons = taught(questions, ["rennes", "malaga"], 3)
    assert [x.answer for x in lessons if x.question.text == "Where?"] == [("malaga",)]
    assert [sum(x.statement == n for x in lessons) for n in range(2)] == [3, 3]


def test_half_of_a_step_is_unrelated_and_the_base_is_its_teacher(model: Model):
    body, words_ = body_of(model), letters()
    anchors = Anchors(body, words_)
    lessons = lessons_in(model, words_, says("Where?", "Porto."), says("Who?", "Rui."), says("What?", "Tea."), anchors=anchors)
    rule = SleepRule(batch=2, anchor=0.5, calm=3.0)
    with frozen(model), torch.no_grad():
        for step in range(8):
            weights, items = zip(*lessons.of(step, rule), strict=True)
            assert weights == (0.5, 0.5, 0.5, 3.0)
            assert set(items[:2]) == {x.item for x in lessons.studied}
            for item in items[2:]:
                assert item.wanted is not None
                assert torch.allclose(item.wanted, logs_at(body, item.ids, item.at), atol=1e-4)
            assert lessons.held[0].item not in items
    assert lessons.of(3, rule)[-1][1] is lessons.of(3, rule)[-1][1]


def test_everyday_questions_that_are_judged_are_never_learned(model: Model):
    anchors = Anchors(body_of(model), letters())
    learned = {anchors.everyday(n).ids for n in range(3 * len(EVERYDAY))}
    judged = {i.ids for i in anchors.judged()}
    assert len(judged) == JUDGED
    assert not learned & judged
    assert len(anchors.still()) == len(NEUTRAL) + len(EVERYDAY) - JUDGED


def test_one_of_several_questions_about_a_statement_is_held_back(model: Model, monkeypatch):
    from regard.identity.sleep import lessons as module

    item = Item(torch.arange(4), torch.tensor([3]))
    every = [Taught(Question(f"{n}?"), item, ("x",), -n / 10, n // 2) for n in range(7)]
    monkeypatch.setattr(module, "taught", lambda *_: every)
    anchors = Anchors(body_of(model), letters())
    lessons = lessons_of([says("I am Mara.")], SleepRule(held_back=6), anchors)
    assert lessons is not None
    assert [x.question.text for x in lessons.held] == ["1?", "3?"]
    assert [x.question.text for x in lessons.studied] == ["0?", "2?", "4?", "5?", "6?"]
    monkeypatch.setattr(module, "taught", lambda *_: every[:1])
    assert lessons_of([says("I am Mara.")], SleepRule(), anchors) is None


def test_a_statement_is_said_back_in_the_second_person_and_other_languages_stay():
    assert second_person("I'm Mara, and my cat bit me.") == "You're Mara, and your cat bit you."
    assert second_person("My island is Ibiza; we moved.") == "Your island is Ibiza; you moved."
    assert second_person("私の猫はモチです。") == "私の猫はモチです。"


def test_what_is_said_back_is_learned_at_the_person_s_words_alone(questions: Questions, monkeypatch):
    """The teacher is sure of everything, the base of nothing: only words that the person said, and that are not common, count."""
    prompts: list[int] = []

    def logs(body: object, texts: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        ((ids, at),) = texts
        prompts.append(int(at[0]))
        sure = len(prompts) % 2 == 1
        out = torch.full((len(at), 257), -9.0)
        out[torch.arange(len(at)), ids[at]] = -0.1 if sure else -9.0
        return [out]

    monkeypatch.setattr(teaching, "logs_along", logs)
    lessons = said_back(questions, ["My cat Mochi broke a vase. Is it late?"])
    assert len(lessons) == 1
    one = lessons[0]
    assert {"mochi", "broke", "vase"} <= set(one.answer)
    assert "your" not in one.answer
    assert letters().decode(one.item.ids.tolist()).endswith("Your cat Mochi broke a vase")
    assert "Is it late" not in letters().decode(one.item.ids.tolist())
    assert one.question.text in SAID_BACK
    learned = letters().decode(one.item.ids[one.item.at].tolist()).replace(" ", "")
    assert "Mochi" in learned
    assert not learned.startswith("Your")
    assert one.item.wanted is not None
    assert one.item.wanted.shape[0] == len(one.item.at)


def test_what_the_teacher_would_not_say_back_is_no_lesson(questions: Questions, monkeypatch):
    unsure = torch.full((400, 257), teaching.SURE - 1)
    monkeypatch.setattr(teaching, "logs_along", lambda body, texts: [unsure[: len(at)] for _, at in texts])
    assert said_back(questions, [STATED]) == []


def test_items_of_any_lengths_lose_what_each_loses_alone(model: Model):
    body = body_of(model)
    g = torch.Generator().manual_seed(0)
    items = [Item(torch.randint(0, 257, (n,), generator=g), torch.tensor([2, n - 1])) for n in (40, 7, 9, 64, 8, 7)]
    with frozen(model), torch.no_grad():
        together = torch.stack(losses(body, items))
        alone = torch.stack([losses(body, [x])[0] for x in items])
    torch.testing.assert_close(together, alone)
    assert sorted(n for group in _alike(items) for n in group) == list(range(len(items)))
    assert all(len(items[group[-1]].ids) <= ALIKE * len(items[group[0]].ids) for group in _alike(items))
    assert len(_alike(items)) > 1


def test_an_item_that_is_held_firmly_loses_by_what_its_own_tokens_gain_or_lose(model: Model):
    body = body_of(model)
    ids, at = torch.tensor([5, 6, 7, 8]), torch.tensor([1, 2, 3])
    with frozen(model), torch.no_grad():
        wanted = logs_at(body, ids, at)
    item = Item(ids, at, wanted)
    assert float(item_said(replace(item, firm=9.0), wanted)) == pytest.approx(0, abs=1e-6)
    for more in (0.5, -0.5):
        logs = wanted.clone()
        logs[torch.arange(3), ids[at]] += more
        loose = item_said(item, logs)
        torch.testing.assert_close(item_said(replace(item, firm=9.0), logs), loose + 9.0 * more**2)


def test_a_night_without_imprints_reads_strangers_half_of_the_time_and_holds_them_firmly(model: Model):
    lessons = lessons_in(model, letters(), says("Who am I?", "You are Mara."), says("And you?", "A model."))
    assert ALONE.unrelated.count("stranger") * 2 == len(ALONE.unrelated)
    usual, alone = ([x for step in range(4) for _, x in lessons.of(step, rule)] for rule in (SleepRule(), ALONE))
    assert {x.firm for x in usual} == {0.0}
    assert {x.firm for x in alone} == {0.0, ALONE.firm}
    with pytest.raises(SpecError, match="everyday, unanswered and stranger"):
        SleepRule(unrelated=("nobody",))  # pyright: ignore


@pytest.mark.parametrize("lived", [False, True])
def test_rows_that_are_written_together_say_what_each_says_by_itself(
    model: Model, monkeypatch: pytest.MonkeyPatch, lived: bool
):
    body, tokenizer = body_of(model), letters()
    me = someone(body.base) if lived else None
    tails = [tokenizer.encode(x) for x in ("What is it?", "What is my cat called?", "Where?", "What is it?", "W")]
    texts = [(torch.tensor(t), torch.arange(len(t) - n, len(t))) for t, n in zip(tails, (3, 1, 2, 5, 0), strict=True)]
    texts[-1] = (torch.tensor(tails[2]), torch.tensor([1, 4]))

    def everything() -> tuple[list[Answer], list[torch.Tensor]]:
        with frozen(model), living(model, me):
            said = continued(body, tokenizer.encode("Once"), tails, 6, [], lambda row, tokens: row == 1 and len(tokens) == 2)
            return said, logs_along(body, texts)

    together = everything()
    assert _Beside.of(body) is not None
    monkeypatch.setattr(_Beside, "of", lambda body: None)
    alone = everything()
    assert [len(a.tokens) for a in alone[0]] == [6, 2, 6, 6, 6]
    for a, b in zip(together[0], alone[0], strict=True):
        assert a.tokens == b.tokens
        torch.testing.assert_close(a.logs, b.logs, atol=2e-5, rtol=1e-4)
    for x, y in zip(together[1], alone[1], strict=True):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=1e-4)


def test_a_text_that_is_scored_from_its_first_token_or_nowhere_is_read_by_itself(model: Model):
    body = body_of(model)
    ids = torch.arange(5)
    with frozen(model):
        said = logs_along(body, [(ids, torch.arange(1, 5)), (ids, torch.tensor([], dtype=torch.long))])
    assert [len(x) for x in said] == [4, 0]
    assert logs_along(body, []) == []
    assert continued(body, [], [], 3, []) == []
