"""Consolidation: a night never makes it worse, is the same every time, can be broken off and gone on with, and the base is untouched."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields, replace

import pytest
import torch
from lives import FewAnchors, apart, lessons_in, letters, nobody, says, someone, speaking
from torch import Tensor

from regard.errors import RegardError, SpecError, StateError
from regard.identity.body import base_of, body_of, frozen
from regard.identity.experience import chat_tokens, observe
from regard.identity.packed import Packed
from regard.identity.sleep.answering import greedy
from regard.identity.sleep.consolidate import Look, SleepCheckpoint, Slept, consolidate, draft, still_directions
from regard.identity.sleep.items import Item, answers_item, item_loss, logs_at, losses
from regard.identity.sleep.lessons import Anchors, Lessons
from regard.identity.sleep.rule import SleepRule
from regard.identity.speaking import living
from regard.identity.state import Identity
from regard.identity.write.rule import Rule, SelfRule, imprint
from regard.identity.write.trace import TraceRule
from regard.models.base import Model

TALK = [says("I am Mara.", "Hello Mara!"), says("My cat is Mochi.", "What a name.")]
RULE = SleepRule(
    steps=6, look_every=2, parts=("self", "trace", "imprints"), form="key_bias", rate=0.02, self_rate=0.01, value_rate=0.04,
    batch=2, anchor=0.1, calm=0.1, still=0.5,
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Model:
    return speaking()


@pytest.fixture(scope="module")
def items(model: Model) -> Lessons:
    """What is held back is what is learned, so that learning helps."""
    return lessons_in(model, letters(), *TALK, TALK[0])


@pytest.fixture(scope="module")
def mara(model: Model) -> Identity:
    who = nobody(model)
    for n, chat in enumerate(TALK):
        rule = Rule(keep="shock", share=0.3, trace=TraceRule(rank=4), self=SelfRule("key_bias"))
        who = imprint(who, observe(model, chat, letters(), source=f"day {n}"), rule)
    return who


def held_loss(model: Model, who: Identity, items: Lessons) -> float:
    with living(model, who) as body, torch.no_grad():
        return float(item_loss(body, items.held[0].item))


def asleep(model: Model, who: Identity, items: Lessons, rule: SleepRule = RULE, **more):
    return consolidate(model, who, TALK, letters(), rule, lessons=items, **more)


def test_a_night_helps_where_there_is_something_to_learn(model: Model, mara: Identity, items: Lessons):
    told: list[float | None] = []
    woken, slept = asleep(model, mara, items, tell=lambda what, share: told.append(share))
    assert slept.helped
    assert slept.before == pytest.approx(held_loss(model, mara, items), abs=1e-4)
    assert [look.step for look in slept.looks] == [0, 2, 4, 6]
    assert slept.best == min(look.loss for look in slept.looks)
    # What is written is packed, which costs a little.
    assert held_loss(model, woken, items) == pytest.approx(slept.best, abs=0.02)
    assert held_loss(model, woken, items) < slept.before
    assert woken.life == replace(mara.life, sleeps=1)
    assert woken.sources == mara.sources
    assert told[-1] == 1.0


def test_a_night_that_does_not_help_gives_back_what_went_in(model: Model, mara: Identity, items: Lessons):
    body = body_of(model)
    with living(model, mara):
        # Nothing can be nearer to what the identity says than itself.
        item = items.held[0].item
        held = replace(items.held[0], item=replace(item, wanted=logs_at(body, item.ids, item.at)))
    woken, slept = asleep(model, mara, replace(items, held=[held]))
    assert not slept.helped
    assert woken is mara
    assert slept.best == slept.before < 1e-4
    assert "no state was 2% nearer" in slept.reason


class EverydayAsNow(FewAnchors):
    """The everyday answers that are judged are those of an identity: whatever changes them is a loss."""

    who: Identity

    def judged(self) -> list[Item]:
        item = self.calm(1)
        with living(self.body.model, self.who), torch.no_grad():
            ids = item.ids.clone()
            # One token after the other: each is what the identity says after those before it.
            for at in item.at.split(1):
                ids[at] = logs_at(self.body, ids, at).argmax(-1)
        return [replace(item, ids=ids, wanted=None)]


def test_a_night_that_changes_everyday_answers_is_refused_and_says_so(model: Model, mara: Identity, monkeypatch):
    anchors = EverydayAsNow(body_of(model), letters())
    anchors.who = mara
    lessons = lessons_in(model, letters(), *TALK, TALK[0], anchors=anchors)
    now = anchors.judged()
    monkeypatch.setattr(anchors, "judged", lambda: now)
    woken, slept = asleep(model, mara, lessons, replace(RULE, value_rate=0.5, rate=0.2, self_rate=0.2, still=0.0))
    assert slept.looks[-1].unchanged < slept.looks[0].unchanged == 1.0
    assert not slept.helped
    assert woken is mara
    assert "of everyday answers were the base's before it" in slept.reason


def test_a_look_that_recalls_more_is_better_and_one_that_recalls_less_has_lost():
    before, fewer, more, nearer = Look(0, 2.0, 2, 0.9), Look(2, 0.5, 1, 0.9), Look(4, 1.9, 3, 0.9), Look(6, 0.4, 2, 0.95)
    assert "2 questions" in fewer.loses(before)
    assert not more.loses(before)
    assert more.better(nearer)
    assert nearer.better(before)
    assert "90%" in Look(8, 0.1, 4, 0.89).loses(before)


def test_a_night_that_comes_nearer_by_a_hair_has_earned_nothing():
    before = Look(0, 2.0, 2, 0.9)
    assert not Look(8, 1.97, 2, 0.9).earns(before)
    assert Look(8, 1.95, 2, 0.9).earns(before)
    assert Look(8, 2.1, 3, 0.9).earns(before)
    hair = Slept((before, Look(8, 1.97, 2, 0.9)), 0, 3)
    assert "2% nearer" in hair.reason


def test_values_are_not_moved_where_unrelated_texts_read_them(model: Model, mara: Identity, items: Lessons):
    body = body_of(model)
    rule = replace(RULE, parts=("imprints",), still=0.9)
    still = still_directions(body, draft(mara, rule), items.anchors, rule.still)
    size = still.mT @ still
    assert apart(size, size * torch.eye(size.shape[-1])) < 1e-5
    assert 0 < float(size.diagonal(dim1=-2, dim2=-1).sum()) < still.shape[0] * still.shape[1] * len(mara.imprints)
    last: list[Tensor] = []
    asleep(model, mara, items, rule, on_step=lambda night: last.append(night.leaves["v"]))
    moved = last[-1] - mara.imprints.v.dense()
    assert float(moved.abs().max()) > 1e-3
    assert float((still.mT @ moved).abs().max()) < 1e-5


def test_a_life_without_questions_is_not_slept_over(model: Model, mara: Identity):
    woken, slept = consolidate(model, mara, [says("Why?", "Because.")], letters(), RULE)
    assert woken is mara
    assert not slept.helped
    assert "cannot be judged" in slept.reason


def test_a_night_is_the_same_every_time(model: Model, mara: Identity, items: Lessons):
    first, second = (asleep(model, mara, items) for _ in range(2))
    assert first[0].digest() == second[0].digest()
    assert first[1] == second[1]
    other, _ = asleep(model, mara, items, replace(RULE, seed=1))
    assert other.digest() != first[0].digest()


def test_ctrl_c_keeps_the_best_so_far(model: Model, mara: Identity, items: Lessons):
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
def test_a_night_that_was_broken_off_goes_on_as_it_would_have(model: Model, mara: Identity, items: Lessons, at: int):
    nights: dict[int, SleepCheckpoint] = {}
    whole, slept = asleep(model, mara, items, on_step=lambda night: nights.setdefault(night.step, deepcopy(night)))
    again, later = asleep(model, mara, items, night=nights[at])
    assert again.digest() == whole.digest()
    assert later == slept


def test_a_night_over_another_state_is_refused(model: Model, mara: Identity, items: Lessons):
    nights: list[SleepCheckpoint] = []
    asleep(model, mara, items, replace(RULE, steps=1), on_step=lambda night: nights.append(deepcopy(night)))
    with pytest.raises(StateError, match="another state"):
        asleep(model, mara.only("self", "trace"), items, night=nights[0])


def test_the_base_is_not_touched(model: Model, mara: Identity, items: Lessons):
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


def test_before_is_the_state_that_went_in_whatever_form_a_new_self_takes(model: Model, items: Lessons):
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
def test_only_the_parts_that_are_named_change(model: Model, mara: Identity, items: Lessons, part: str):
    woken, slept = asleep(model, mara, items, replace(RULE, parts=(part,), rate=3 * RULE.rate))
    assert slept.helped
    for other in ("self", "trace", "imprints"):
        mine, theirs = tensors_of(mara, other), tensors_of(woken, other)
        same = all(torch.equal(mine[n], theirs[n]) for n in mine)
        assert same == (other != part)
    assert torch.equal(mara.imprints.k.dense(), woken.imprints.k.dense()), "keys say when an imprint is read, and stay"
    for f in fields(mara.imprints):
        if f.name not in ("k", "v"):
            assert torch.equal(getattr(mara.imprints, f.name), getattr(woken.imprints, f.name))


def test_losses_together_are_those_one_by_one(model: Model):
    body = body_of(model)
    items = [answers_item(body, letters(), c) for c in (*TALK, TALK[0])]
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


def test_anchors_are_the_base_s_own_whoever_lives_in_the_model(model: Model, mara: Identity):
    body, words = body_of(model), letters()
    outside, inside = Anchors(body, words), Anchors(body, words)
    with living(model, mara):
        pairs = [(outside, n) for n in range(2)]
        items = [(inside.calm(n), inside.stranger(n), inside.everyday(n)) for _, n in pairs]
        assert items[0][0] is inside.calm(0)
    for (_, n), (calm, stranger, everyday) in zip(pairs, items, strict=True):
        for mine, plain in ((calm, outside.calm(n)), (stranger, outside.stranger(n)), (everyday, outside.everyday(n))):
            assert mine.wanted is not None
            assert plain.wanted is not None
            assert torch.equal(mine.wanted, plain.wanted)
            with torch.no_grad():
                assert float(item_loss(body, plain)) == pytest.approx(0, abs=1e-5)


def test_what_cannot_be_slept_over_is_refused(model: Model, mara: Identity, items: Lessons):
    for nothing in ([], [[]], [[], []]):
        with pytest.raises(StateError, match="no history"):
            consolidate(model, mara, nothing, letters(), RULE)
    with pytest.raises(StateError, match="weights differ"):
        asleep(speaking(1), mara, items)
    with pytest.raises(StateError, match="nothing to consolidate"):
        asleep(model, nobody(model), items, replace(RULE, parts=("imprints",)))


@pytest.mark.parametrize(
    "wrong",
    [{"steps": 0}, {"look_every": 0}, {"held_back": 0}, {"batch": 1}, {"still": 1.0}, {"parts": ()}, {"parts": ("soul",)}],
)
def test_rules_of_sleep_that_make_no_sense_are_refused(wrong: dict[str, object]):
    with pytest.raises(SpecError):
        SleepRule(**wrong)  # type: ignore[arg-type]


def test_a_night_over_an_identity_with_a_self_token_moves_that_token(model: Model, items: Lessons):
    who = someone(base_of(model), form="self_token", slots=2, rank=2)
    woken, _ = asleep(model, who, items, replace(RULE, parts=("self",), self_rate=0.05))
    assert woken.self is not None
    assert woken.self.form == "self_token"


def test_a_conversation_without_a_word_is_no_reason_to_fail(model: Model, mara: Identity, items: Lessons):
    quiet = [[{"role": "system", "content": "Be kind."}], *TALK]
    _, slept = consolidate(model, mara, quiet, letters(), RULE, lessons=items)
    assert len(slept.looks) == 4


def test_who_lives_in_the_model_does_not_change_a_night(model: Model, mara: Identity, items: Lessons):
    outside, _ = asleep(model, mara, items, replace(RULE, steps=2))
    with living(model, someone(base_of(model))):
        inside, _ = asleep(model, mara, items, replace(RULE, steps=2))
    assert inside.digest() == outside.digest()


@pytest.mark.parametrize("rank", [0, 3, 64])
def test_a_rank_that_no_trace_can_have_is_refused_before_the_night(model: Model, items: Lessons, rank: int):
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
    lessons = lessons_in(theirs, letters(), *TALK, TALK[0])
    woken, slept = consolidate(theirs, me, TALK, letters(), RULE, lessons=lessons)
    assert slept.helped
    with torch.no_grad(), living(theirs, woken):
        assert float(item_loss(body, lessons.held[0].item)) < slept.before
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
