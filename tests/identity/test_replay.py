"""Replay: an event means the same now and later, and what a source wrote leaves no trace when it is left out."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lives import short_sleeps

from regard.errors import RegardError, RegardWarning
from regard.identity import Identity, IdentityStore, Rule, SelfRule, SleepRule, TraceRule, base_of
from regard.identity.sleep.consolidate import Look, consolidate
from regard.identity.speaking import living
from regard.identity.store import Event
from regard.identity.store.replay import apply_event, content, cut, history, imprint_event, replay, sleep_event, sleep_rule
from regard.models import LlamaConfig
from regard.models.base import Model
from regard.models.tokenizer import Specials, Subwords, Tokenizer

RULE = Rule(keep="shock", budget=16, trace=TraceRule(), self=SelfRule())
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def letters() -> Tokenizer:
    """One token a byte."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    inner = Inner(models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return Tokenizer(Subwords(inner), Specials(), TEMPLATE)


TOKENIZER = letters()


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return LlamaConfig(vocabulary=256, width=32, depth=2, heads=4, key_heads=2, hidden=48).build().eval()


def life(model: Model, *events: Event) -> Identity:
    return replay(model, TOKENIZER)(Identity.new(base_of(model)), events)


DIARY = imprint_event("I am Mara. My cat is called Mochi.", source="diary", rule=RULE)
CHAT = imprint_event([{"role": "user", "content": "Hello, I live in Porto."}, {"role": "assistant", "content": "Hello!"}], source="chat", rule=RULE, affect=0.5)  # fmt: skip
LETTER = imprint_event("The boat leaves at nine.", source="letter", rule=RULE, affect="estimated")


def test_replay_comes_to_the_same_state_bit_for_bit(model: Model):
    first, second = (life(model, DIARY, CHAT, LETTER) for _ in range(2))
    assert first.digest() == second.digest()
    assert first.sources == ("diary", "chat", "letter")
    assert first.life.experiences == 3
    assert first.digest() != life(model, CHAT, DIARY, LETTER).digest()


def test_what_happens_does_not_depend_on_who_lives_in_the_model(model: Model):
    mara = life(model, DIARY)
    with living(model, mara):
        inside = apply_event(model, TOKENIZER, mara, CHAT)
    assert inside.digest() == apply_event(model, TOKENIZER, mara, CHAT).digest()


def test_an_event_read_back_from_json_writes_the_same(model: Model):
    again = Event.read(json.loads(CHAT.body()))
    assert life(model, again).digest() == life(model, CHAT).digest()


def test_events_that_keep_the_books_write_nothing(model: Model):
    assert life(model, Event("new"), DIARY, Event("rollback"), Event("forget")).digest() == life(model, DIARY).digest()


def test_forget_proves_that_the_rest_is_all_there_is(model: Model, tmp_path: Path):
    with IdentityStore(tmp_path / "people.db") as store:
        store.new("mara", Identity.new(base_of(model)))
        for event in (DIARY, CHAT, LETTER):
            store.update("mara", lambda me, event=event: apply_event(model, TOKENIZER, me, event), event=event)
        assert store.head("mara").digest == life(model, DIARY, CHAT, LETTER).digest()
        proof = store.forget("mara", "chat", replay(model, TOKENIZER))
        assert proof.after == proof.again == life(model, DIARY, LETTER).digest()
        assert store.load("mara").sources == ("diary", "letter")


def test_events_that_name_the_retired_keeper_happen_again_with_the_default_and_can_be_forgotten(model: Model, tmp_path: Path):
    def told(text: str, source: str, keep: str) -> Event:
        event = imprint_event(text, source=source, rule=Rule(share=0.5, episodes=False))
        return replace(event, rule={**event.rule, "keep": keep}, time=0.0)

    old, new = (
        [told("I am Mara.", "diary", keep), told("The boat leaves at nine.", "letter", keep)]
        for keep in ("learned", Rule().keep or "")
    )
    assert len(life(model, *old).imprints) > 0
    assert life(model, *old).digest() == life(model, *new).digest()
    with IdentityStore(tmp_path / "people.db") as store:
        store.new("mara", Identity.new(base_of(model)))
        for event in old:
            store.update("mara", lambda me, event=event: apply_event(model, TOKENIZER, me, event), event=event)
        proof = store.forget("mara", "diary", replay(model, TOKENIZER))
        assert proof.after == proof.again == life(model, new[1]).digest()
        assert store.load("mara").sources == ("letter",)


def test_a_night_is_slept_again_to_the_same_state(model: Model, monkeypatch: pytest.MonkeyPatch):
    short_sleeps(monkeypatch)
    module = sys.modules[consolidate.__module__]
    # A random model has nothing to learn: here a night helps until its third step, and then hurts.
    monkeypatch.setattr(module, "_looked", lambda body, who, lessons, step: Look(step, abs(step - 3.0), 0, 1.0))
    mara = life(model, DIARY, CHAT)
    rule = SleepRule(steps=5, look_every=1, batch=2)
    after, slept = consolidate(model, mara, history([DIARY, CHAT], TOKENIZER), TOKENIZER, rule)
    assert 0 < slept.best_step < rule.steps
    night = sleep_event(rule, slept)
    assert sleep_rule(Event.read(json.loads(night.body())).rule) == rule
    assert life(model, DIARY, CHAT, night).digest() == after.digest() != mara.digest()
    assert life(model, night).digest() == Identity.new(base_of(model)).digest()


RETELLING = {
    "steps": 12, "parts": ["self", "imprints"], "form": "self_token", "rank": 8, "rate": 0.009, "self_rate": 0.015,
    "value_rate": 0.04, "anchor": 1.5, "calm": 4.0, "questions": 10, "held_back": 3, "look_every": 6, "seed": 7, "until": 6,
}  # fmt: skip


def test_a_night_that_retold_is_slept_again_by_the_rule_of_today_and_says_so(model: Model, monkeypatch: pytest.MonkeyPatch):
    short_sleeps(monkeypatch)
    assert sleep_rule(RETELLING) == SleepRule(parts=("self", "imprints"), seed=7)
    seen: list[SleepRule] = []
    module = sys.modules["regard.identity.store.replay"]

    def night(model: Model, who: Identity, *rest: object, **more: object) -> tuple[Identity, None]:
        seen.extend(x for x in rest if isinstance(x, SleepRule))
        return who, None

    monkeypatch.setattr(module, "consolidate", night)
    with pytest.warns(RegardWarning, match="slept again by today's rule"):
        life(model, DIARY, Event("sleep", rule=RETELLING, seed=7))
    assert seen == [SleepRule(parts=("self", "imprints"), seed=7)]


def test_a_rule_of_another_version_and_an_event_without_text_are_refused(model: Model):
    with pytest.raises(RegardError, match="not one that this version knows"):
        life(model, Event("imprint", source="x", text="hello", rule={"telepathy": True}))
    with pytest.raises(RegardError, match="kept no text"):
        life(model, Event("imprint", source="x"))
    with pytest.raises(RegardError, match="not one that this version knows"):
        sleep_rule({"dreams": 3})


def test_replay_refuses_an_identity_of_another_model(model: Model):
    other = LlamaConfig(vocabulary=256, width=32, depth=3, heads=4, key_heads=2, hidden=48).build()
    with pytest.raises(RegardError, match="this identity was written on"):
        replay(other, TOKENIZER)(Identity.new(base_of(model)), [DIARY])


@given(st.text(max_size=300), st.integers(4, 50))
def test_pieces_of_a_text_fit_and_lose_nothing_but_space(text: str, most: int):
    pieces = [p for p in cut(text, TOKENIZER, most) if isinstance(p, str)]
    assert all(len(TOKENIZER.encode(p)) <= most for p in pieces)
    # A single byte between two cuts is no experience, and only it may go.
    kept, whole = "".join("".join(pieces).split()), "".join(text.split())
    letters = iter(whole)
    assert all(c in letters for c in kept)
    assert len(whole) - len(kept) <= sum(len(c.encode()) == 1 for c in whole)
    assert kept == whole or any(len(c.encode()) == 1 for c in whole)


def test_a_text_is_cut_between_paragraphs_before_sentences_before_words():
    assert cut("One two.\n\nThree four. Five", TOKENIZER, 18) == ["One two.", "Three four. Five"]
    assert cut("One two. Three four. Five", TOKENIZER, 15) == ["One two.", "Three four.", "Five"]
    assert cut("onetwothree fourfive", TOKENIZER, 15) == ["onetwothree", "fourfive"]
    assert cut("x" * 20, TOKENIZER, 8) == ["x" * 8, "x" * 8, "x" * 4]
    assert cut(" \n ", TOKENIZER, 8) == []


def test_a_chat_is_cut_between_messages_and_keeps_its_roles():
    chat = [
        {"role": "user", "content": "a" * 6},
        {"role": "assistant", "content": "b" * 6},
        {"role": "user", "content": "c" * 20},
    ]
    assert cut(chat, TOKENIZER, 12) == [
        chat[:2],
        [{"role": "user", "content": "c" * 12}],
        [{"role": "user", "content": "c" * 8}],
    ]


def test_long_texts_are_several_experiences(model: Model):
    long = imprint_event("One two three. " * 30, source="long", rule=RULE, piece=100)
    assert life(model, long).life.experiences == 5


@pytest.mark.parametrize("text", ["[1, 2]", "[]", '[{"role": 1, "content": "x"}]', "[not json", "plain", '{"role": "user"}'])
def test_only_a_list_of_messages_is_a_chat(text: str):
    assert content(text) == text


def test_history_is_what_was_said_and_the_youngest_of_it_where_it_is_long():
    whole = history([DIARY, Event("rollback"), CHAT], TOKENIZER)
    assert [m["content"] for c in whole for m in c] == [
        "I am Mara. My cat is called Mochi.",
        "Hello, I live in Porto.",
        "Hello!",
    ]
    assert history([DIARY, CHAT], TOKENIZER, most=60) == whole[1:]
    assert history([DIARY, CHAT], TOKENIZER, most=1) == whole[1:]
    assert history([], TOKENIZER) == []
