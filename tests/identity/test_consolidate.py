"""Consolidation: a night never makes it worse, is the same every time, can be broken off and gone on with, and the base is untouched."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields, replace

import pytest
import torch
from lives import apart, letters, nobody, says, someone, speaking
from torch import Tensor

from regard.errors import RegardError, SpecError, StateError
from regard.identity.body import base_of, body_of, frozen
from regard.identity.experience import chat_tokens, observe
from regard.identity.packed import Packed
from regard.identity.sleep.consolidate import SleepCheckpoint, consolidate, draft
from regard.identity.sleep.items import Item, answers_item, item_loss, logs_at, losses
from regard.identity.sleep.lessons import INTERVIEW, PIECE, RETELL, Anchors, Lessons, _pieces, greedy, interview, retold
from regard.identity.sleep.rule import ALONE, SleepRule
from regard.identity.speaking import living
from regard.identity.state import Identity
from regard.identity.write.rule import Rule, SelfRule, imprint
from regard.identity.write.trace import TraceRule
from regard.models.base import Model
from regard.models.decode.generate import Sampling, generate

TALK = [says("I am Mara.", "Hello Mara!"), says("My cat is Mochi.", "What a name.")]
RULE = SleepRule(
    steps=6, look_every=2, questions=4, held_back=1, form="key_bias", rate=0.02, self_rate=0.01, value_rate=0.04, anchor=0.1,
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Model:
    return speaking()


@pytest.fixture(scope="module")
def items(model: Model) -> list[Item]:
    """What is held back is the history itself, so that reading it again helps."""
    body = body_of(model)
    return [answers_item(body, letters(), c) for c in (*TALK, *TALK)]


@pytest.fixture(scope="module")
def mara(model: Model) -> Identity:
    found = nobody(model)
    for n, chat in enumerate(TALK):
        rule = Rule(keep="shock", share=0.3, trace=TraceRule(rank=4), self=SelfRule("key_bias"))
        found = imprint(found, observe(model, chat, letters(), source=f"day {n}"), rule)
    return found


def held_loss(model: Model, who: Identity, items: list[Item]) -> float:
    with living(model, who) as body, torch.no_grad():
        return float(item_loss(body, items[0]))


def asleep(model: Model, who: Identity, items: list[Item], rule: SleepRule = RULE, **more):
    return consolidate(model, who, TALK, letters(), rule, items=items, **more)


def test_a_night_helps_where_there_is_something_to_learn(model: Model, mara: Identity, items: list[Item]):
    told: list[float | None] = []
    woken, slept = asleep(model, mara, items, tell=lambda what, share: told.append(share))
    assert slept.helped
    assert slept.before == pytest.approx(held_loss(model, mara, items), abs=1e-4)
    assert [step for step, _ in slept.looks] == [0, 2, 4, 6]
    assert slept.best == min(loss for _, loss in slept.looks)
    # What is written is packed, which costs a little.
    assert held_loss(model, woken, items) == pytest.approx(slept.best, abs=0.02)
    assert held_loss(model, woken, items) < slept.before
    assert woken.life == replace(mara.life, sleeps=1)
    assert woken.sources == mara.sources
    assert told[-1] == 1.0


def test_a_night_that_does_not_help_gives_back_what_went_in(model: Model, mara: Identity, items: list[Item]):
    body = body_of(model)
    with living(model, mara):
        # Nothing can be nearer to what the identity says than itself.
        best = [replace(i, wanted=logs_at(body, i.ids, i.at)) for i in items]
    woken, slept = asleep(model, mara, best)
    assert not slept.helped
    assert woken is mara
    assert slept.best == slept.before < 1e-4


def test_a_night_is_the_same_every_time(model: Model, mara: Identity, items: list[Item]):
    first, second = (asleep(model, mara, items) for _ in range(2))
    assert first[0].digest() == second[0].digest()
    assert first[1] == second[1]
    other, _ = asleep(model, mara, items, replace(RULE, seed=1))
    assert other.digest() != first[0].digest()


def test_ctrl_c_keeps_the_best_so_far(model: Model, mara: Identity, items: list[Item]):
    second: list[Tensor] = []

    def stop(night: SleepCheckpoint) -> None:
        if night.step == 2:
            second.append(Packed.of(night.leaves["v"]).dense())
        if night.step == 3:
            raise KeyboardInterrupt

    woken, slept = asleep(model, mara, items, on_step=stop)
    assert slept.interrupted
    assert slept.best_step == 2
    assert torch.equal(woken.imprints.v.dense(), second[0])


@pytest.mark.parametrize("at", [1, 2, 5, 6])
def test_a_night_that_was_broken_off_goes_on_as_it_would_have(model: Model, mara: Identity, items: list[Item], at: int):
    nights: dict[int, SleepCheckpoint] = {}
    whole, slept = asleep(model, mara, items, on_step=lambda night: nights.setdefault(night.step, deepcopy(night)))
    again, later = asleep(model, mara, items, night=nights[at])
    assert again.digest() == whole.digest()
    assert later == slept


def test_a_night_over_another_state_is_refused(model: Model, mara: Identity, items: list[Item]):
    nights: list[SleepCheckpoint] = []
    asleep(model, mara, items, replace(RULE, steps=1), on_step=lambda night: nights.append(deepcopy(night)))
    with pytest.raises(StateError, match="another state"):
        asleep(model, mara.only("self", "trace"), items, night=nights[0])


def test_the_base_is_not_touched(model: Model, mara: Identity, items: list[Item]):
    base = deepcopy(model)
    base.train()
    base.embed.weight.requires_grad_(False)
    before = {n: p.detach().clone() for n, p in base.named_parameters()}
    asleep(base, mara, items, replace(RULE, steps=2))
    for name, p in base.named_parameters():
        assert torch.equal(p, before[name])
        assert p.grad is None
        assert p.requires_grad == (name != "embed.weight")
    assert base.training
    with frozen(base):
        assert not any(p.requires_grad for p in base.parameters())
    with pytest.raises(KeyError), frozen(base):
        raise KeyError
    assert base.blocks[0].attention.q.weight.requires_grad


def test_a_night_from_nothing_starts_as_the_base(model: Model):
    work = draft(nobody(model), replace(RULE, parts=("self", "trace")))
    body = body_of(model)
    tokens = torch.tensor([[5, 9, 11, 3, 8]])
    with torch.no_grad():
        plain = body.logits(tokens)
    with body.read(work.reads(body.scales)):
        found = body.logits(tokens)
    assert apart(found, plain) < 1e-6 * float(plain.abs().max())
    grads = torch.autograd.grad(found.square().sum(), list(work.leaves.values()))
    assert all(float(g.abs().max()) > 1e-4 for g in grads), "a start from which nothing can be learned"
    assert work.identity().empty or work.identity().trace is not None


def test_before_is_the_state_that_went_in_whatever_form_a_new_self_takes(model: Model, items: list[Item]):
    _, slept = asleep(model, nobody(model), items, replace(RULE, steps=1, parts=("self",), form="self_token"))
    assert slept.before == pytest.approx(held_loss(model, nobody(model), items), abs=1e-4)


def test_a_draft_reads_what_its_identity_reads(model: Model, mara: Identity):
    tokens = torch.tensor([[5, 9, 11, 3, 8]])
    token = someone(base_of(model), form="self_token")
    for who in (mara, token, mara.only("imprints"), mara.only("self"), mara.only("trace")):
        for parts in (("self", "trace", "imprints"), ("self",), ("trace",)):
            work = draft(who, replace(RULE, parts=parts, form="key_bias"))
            body = body_of(model)
            with torch.no_grad(), body.read(work.reads(body.scales)):
                found = body.logits(tokens)
            with torch.no_grad(), living(model, who):
                assert apart(found, body.logits(tokens)) < 1e-4


def tensors_of(who: Identity, part: str) -> dict[str, Tensor]:
    return {n: x for n, x in who.tensors().items() if n.startswith(part)}


@pytest.mark.parametrize("part", ["self", "trace", "imprints"])
def test_only_the_parts_that_are_named_change(model: Model, mara: Identity, items: list[Item], part: str):
    woken, slept = asleep(model, mara, items, replace(RULE, parts=(part,)))
    assert slept.helped
    for other in ("self", "trace", "imprints"):
        mine, theirs = tensors_of(mara, other), tensors_of(woken, other)
        same = all(torch.equal(mine[n], theirs[n]) for n in mine)
        assert same == (other != part)
    assert torch.equal(mara.imprints.k.dense(), woken.imprints.k.dense()), "keys say when an imprint is read, and stay"
    for f in fields(mara.imprints):
        if f.name not in ("k", "v"):
            assert torch.equal(getattr(mara.imprints, f.name), getattr(woken.imprints, f.name))


def test_losses_together_are_those_one_by_one(model: Model, items: list[Item]):
    body = body_of(model)
    with torch.no_grad():
        wanted = torch.randn(len(items[1].at), 257).log_softmax(-1)
        mixed = [items[0], replace(items[1], wanted=wanted), items[2]]
        found = losses(body, mixed)
        for one, item in zip(found, mixed, strict=True):
            assert float(one) == pytest.approx(float(item_loss(body, item)), abs=1e-4)
        logs = body.logits(items[0].ids[None])[0].log_softmax(-1)
        plain = -sum(float(logs[i - 1, items[0].ids[i]]) for i in items[0].at.tolist()) / len(items[0].at)
        assert float(found[0]) == pytest.approx(plain, abs=1e-4)
        mine = logs_at(body, items[1].ids, items[1].at)
        kl = (wanted.exp() * (wanted - mine)).sum(-1).mean()
        assert float(found[1]) == pytest.approx(float(kl), abs=1e-4)


def test_only_the_assistant_is_scored_in_answers(model: Model):
    item = answers_item(body_of(model), letters(), TALK[0])
    assert letters().decode(item.ids[item.at].tolist()) == "Hello Mara!"


def test_an_interview_holds_the_model_s_own_answers_with_the_history_in_context(model: Model):
    body = body_of(model)
    history = [m for c in TALK for m in c]
    found = interview(body, letters(), history, RULE.questions, INTERVIEW[:5])
    assert len(found) == RULE.questions
    telling = [float(item_loss(body, i).detach()) for i in found]
    assert telling == pytest.approx(sorted(telling, reverse=True))
    asked = {tuple(letters().encode(letters().chat(says(q)))): q for q in INTERVIEW[:5]}
    for item in found:
        start = int(item.at[0])
        question = asked[tuple(item.ids[:start].tolist())]
        prompt = letters().encode(letters().chat([*history, *says(question)]))
        said = item.ids[start:].tolist()
        single = generate(model, prompt, Sampling(max_tokens=len(said), temperature=0)).tokens[0]
        assert said == single
        whole = torch.tensor([*prompt, *said])
        logs = logs_at(body, whole, torch.arange(len(prompt), len(whole)))
        assert item.wanted is not None
        assert apart(item.wanted, logs) < 1e-3


def test_what_was_said_is_retold_after_every_prompt_and_quoted_where_another_said_it(model: Model):
    body, words = body_of(model), letters()
    found = retold(body, words, [*TALK, [{"role": "system", "content": "Be kind."}]])
    assert len(found) == 4 * len(RETELL)
    said = [words.decode(i.ids[i.at].tolist()).strip() for i in found[:: len(RETELL)]]
    assert said == ['You told me: "I am Mara."', "Hello Mara!", 'You told me: "My cat is Mochi."', "What a name."]
    asked = [words.decode(i.ids[: int(i.at[0])].tolist()) for i in found[: len(RETELL)]]
    assert all(prompt in text and "Mara" not in text for prompt, text in zip(RETELL, asked, strict=True))


def test_a_long_text_is_retold_in_whole_sentences():
    text = "One fact. " * 40 + "これは猫です。犬もいます。\n\nA sentence " + "without an end " * 30
    found = _pieces(text)
    assert "".join("".join(found).split()) == "".join(text.split())
    assert all(p.endswith((".", "。")) for p in found[:-1])
    assert all(len(p) < PIECE for p in found[:-1])
    assert _pieces(" \n ") == []


def test_lessons_go_round_and_a_trace_alone_only_reads_again(model: Model):
    body, words = body_of(model), letters()
    asked, again, told = ([answers_item(body, words, says(str(n), "yes"))] for n in range(3))
    lessons = Lessons(asked, again, told, Anchors(body, words))
    pick = torch.Generator().manual_seed(0)

    def anchor(of: Item) -> str:
        return words.decode(of.ids.tolist())

    for step in range(12):
        *mine, (weight, held) = lessons.of(step, SleepRule(), pick)
        wanted = {0: [*told, *asked], 1: [*told, *told]}.get(step % 3)
        assert len(mine) == 1 if wanted is None else [i for _, i in mine] == wanted
        assert sum(w for w, _ in mine) == 1
        assert ("assistant" in anchor(held), weight) == ((True, 1.5) if step % 4 == 1 else (False, 4.0))
        assert held.wanted is not None
    for step in range(6):
        *mine, (weight, held) = lessons.of(step, ALONE, pick)
        assert len(mine) == 1
        assert ("assistant" in anchor(held), weight) == (step % 3 != 1, 3.0)
    quiet = replace(lessons, asked=[], retold=[])
    assert all(len(quiet.of(step, SleepRule(), pick)) == 2 for step in range(3))


def test_anchors_are_the_base_s_own_whoever_lives_in_the_model(model: Model, mara: Identity):
    body, words = body_of(model), letters()
    outside, inside = Anchors(body, words), Anchors(body, words)
    with living(model, mara):
        pairs = [(outside, n) for n in range(2)]
        found = [(inside.calm(n), inside.stranger(n)) for _, n in pairs]
        assert found[0][0] is inside.calm(0)
    for (_, n), (calm, stranger) in zip(pairs, found, strict=True):
        for mine, plain in ((calm, outside.calm(n)), (stranger, outside.stranger(n))):
            assert mine.wanted is not None
            assert plain.wanted is not None
            assert torch.equal(mine.wanted, plain.wanted)
            with torch.no_grad():
                assert float(item_loss(body, plain)) == pytest.approx(0, abs=1e-5)


def test_an_interview_is_made_where_none_is_given(model: Model, mara: Identity):
    _, slept = consolidate(model, mara, TALK, letters(), replace(RULE, steps=1))
    assert len(slept.looks) == 2
    assert all(torch.isfinite(torch.tensor(loss)) for _, loss in slept.looks)


def test_what_cannot_be_slept_over_is_refused(model: Model, mara: Identity, items: list[Item]):
    for nothing in ([], [[]], [[], []]):
        with pytest.raises(StateError, match="no history"):
            consolidate(model, mara, nothing, letters(), RULE)
    with pytest.raises(StateError, match="weights differ"):
        asleep(speaking(1), mara, items)
    with pytest.raises(StateError, match="nothing to consolidate"):
        asleep(model, nobody(model), items, replace(RULE, parts=("imprints",)))


@pytest.mark.parametrize(
    "wrong",
    [{"steps": 0}, {"look_every": 0}, {"held_back": 0}, {"held_back": 4, "questions": 4}, {"parts": ()}, {"parts": ("soul",)}],
)
def test_rules_of_sleep_that_make_no_sense_are_refused(wrong: dict[str, object]):
    with pytest.raises(SpecError):
        SleepRule(**wrong)  # type: ignore[arg-type]


def test_a_night_over_an_identity_with_a_self_token_moves_that_token(model: Model, items: list[Item]):
    who = someone(base_of(model), form="self_token", slots=2, rank=2)
    woken, _ = asleep(model, who, items, replace(RULE, parts=("self",), self_rate=0.05))
    assert woken.self is not None
    assert woken.self.form == "self_token"


def test_a_conversation_without_a_word_is_no_reason_to_fail(model: Model, mara: Identity, items: list[Item]):
    quiet = [[{"role": "system", "content": "Be kind."}], *TALK]
    _, slept = consolidate(model, mara, quiet, letters(), RULE, items=items)
    assert len(slept.looks) == 4


def test_who_lives_in_the_model_does_not_change_a_night(model: Model, mara: Identity, items: list[Item]):
    outside, _ = asleep(model, mara, items, replace(RULE, steps=2))
    with living(model, someone(base_of(model))):
        inside, _ = asleep(model, mara, items, replace(RULE, steps=2))
    assert inside.digest() == outside.digest()


@pytest.mark.parametrize("rank", [0, 3, 64])
def test_a_rank_that_no_trace_can_have_is_refused_before_the_night(model: Model, items: list[Item], rank: int):
    steps: list[int] = []
    with pytest.raises(RegardError):
        asleep(
            model,
            nobody(model),
            items,
            replace(RULE, parts=("trace",), rank=rank),
            on_step=lambda night: steps.append(night.step),
        )
    assert steps == []


def test_nothing_held_back_is_refused(model: Model, mara: Identity):
    with pytest.raises(RegardError):
        asleep(model, mara, [])


def test_the_history_of_a_model_of_transformers_is_slept_over_too():
    import transformers as hf

    config = hf.LlamaConfig(
        vocab_size=257, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        pad_token_id=0, bos_token_id=1, eos_token_id=256,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = hf.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.mul_(8 if p.ndim > 1 else 1)
    body = body_of(theirs)
    e = observe(theirs, TALK[0], letters(), source="monday")
    assert e.k.shape == (2, 2, len(e), 8)
    me = imprint(Identity.new(base_of(theirs)), e, Rule(keep="shock", share=0.3))
    items = [answers_item(body, letters(), c) for c in (*TALK, *TALK)]
    woken, slept = consolidate(theirs, me, TALK, letters(), RULE, items=items)
    assert slept.helped
    with torch.no_grad(), living(theirs, woken):
        assert float(item_loss(body, items[0])) < slept.before
    ids, _ = chat_tokens(TALK[0], letters())
    with torch.no_grad():
        assert torch.isfinite(theirs(torch.tensor([ids])).logits).all()


@pytest.mark.parametrize("past", [(), TALK[0]])
def test_questions_answered_together_are_answered_as_they_would_be_alone(
    model: Model, mara: Identity, past: list[dict[str, str]]
):
    body, words = body_of(model), letters()
    questions = ["Who?", "Why me?", "What is it?", "Who!", "And then, after all of that?"]
    for who in (None, mara):
        with living(model, who), torch.no_grad():
            together = greedy(body, words, past, questions, 6)
            for q, (said, logs) in zip(questions, together, strict=True):
                ((alone, theirs),) = greedy(body, words, past, [q], 6)
                assert said == alone
                assert apart(logs, theirs) < 1e-4
