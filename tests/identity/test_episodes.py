"""Episodes: what was said is kept whole, found again by a prompt or refused, and read where it would stand in the text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lives import TEXT, apart, letters, llama, logits, nobody, says, speaking

from regard.errors import CheckpointError, RegardError, ShapeError, SpecError, StateError
from regard.identity import Identity, Rule, generate, imprint, living, observe
from regard.identity.body import body_of
from regard.identity.episodes import Episode, check_episode, packed_together, taken_apart
from regard.identity.packed import Packed
from regard.identity.read import recall as recalling
from regard.identity.read import slots as reading
from regard.identity.read.about import LISTENER
from regard.identity.read.finding import NOTHING, finder_of, finding_layers
from regard.identity.read.frame import READ, Frame
from regard.identity.read.layer import LayerRead, Place
from regard.identity.read.recall import recall
from regard.identity.state import Imprints, Recollection
from regard.identity.write.episodes import LONGEST
from regard.models.base import Model
from regard.models.decode.sampling import Sampling
from regard.nn import Cache

FOUR = Packed.of(torch.ones(3, 2, 2, 4))
HEAD, TURN = [7, 3, 30], [21, 9, 14, 2, 33]
RULE = Rule(keep=None, episodes=True)
KEPT = Rule(keep=None, episodes="kept")
CHATML = (
    "{% if messages[0].role != 'system' %}<s>system\nBe kind.</s>\n{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
INST = "{{ '#' }}{% for m in messages %}{% if m.role == 'user' %}[I] {{ m.content }} [/I]{% else %} {{ m.content }};{% endif %}{% endfor %}"


@pytest.fixture(scope="module")
def model() -> Model:
    return speaking()


@pytest.fixture(autouse=True)
def anything_comes_to_mind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best that fits, without an encoder: what is at hand on this machine does not decide, nor how a random model coheres."""
    monkeypatch.setattr(recalling, "THRESHOLD", {True: -1e9, False: -1e9})
    for where in ("regard.identity.read.finding", "regard.identity.read.scores", "regard.identity.write.episodes"):
        monkeypatch.setattr(f"{where}.encoder_name", lambda: "")


def told(model: Model, *texts: str | list[dict[str, str]], source: str = "a test", rule: Rule = RULE) -> Identity:
    me = nobody(model)
    for text in texts:
        me = imprint(me, observe(model, text, letters(), source=source), rule)
    return me


def said(me: Identity) -> list[str]:
    return [letters().decode(e.tokens.tolist()) for e in me.episodes]


def ask(text: str) -> list[int]:
    return letters().encode(letters().chat([{"role": "user", "content": text}]))


# -- reading -------------------------------------------------------------------------------------------------------------------


def read_behind(model: Model, head: list[int], turn: list[int]) -> list[LayerRead | None]:
    """A turn as slots behind a head."""
    body = body_of(model)
    heads = body.heads(torch.tensor([*head, *turn]))
    n, m = len(head), len(turn)
    return [
        LayerRead(s, h.k[None, :, n:], h.v[None, :, n:], places=(Place(n, m),)) for s, h in zip(body.scales, heads, strict=True)
    ]


def test_a_turn_read_as_slots_behind_the_head_is_the_turn_read_as_text() -> None:
    model = llama()
    whole = logits(model, [*HEAD, *TURN, *TEXT])[:, len(HEAD) + len(TURN) :]
    with body_of(model).read(read_behind(model, HEAD, TURN)):
        slots = logits(model, [*HEAD, *TEXT])
    assert apart(slots[:, len(HEAD) :], whole) < 1e-4
    assert apart(slots[:, : len(HEAD)], logits(model, HEAD)) < 1e-4, "the head meets no slot"


def test_what_words_lean_away_from_is_the_same_prompt_with_nothing_told_before_it(model: Model) -> None:
    me, prompt = told(model, "My cat is called Mochi."), ask("cat is called?")
    mind = recall(model, me, prompt, letters())
    assert isinstance(mind, Recollection)
    assert isinstance(mind.beside, Recollection)
    assert mind.beside.head == mind.head
    frame = finder_of(body_of(model), letters()).frame
    text = [*prompt[: mind.head], *frame.read([letters().encode(NOTHING)], prompt)[0], *prompt[mind.head :]]
    with torch.no_grad():
        whole = model(torch.tensor([text])).logits[0, -1]
        with living(model, mind.beside):
            slots = model(torch.tensor([prompt])).logits[0, -1]
        with living(model, mind):
            own = model(torch.tensor([prompt])).logits[0, -1]
    assert apart(slots, whole) < 0.05, "but for the bytes that slots are packed into"
    assert apart(own, whole) > 0.1, "the case is not trivial"


@pytest.mark.parametrize("pieces", [(1, 1, 1, 1, 1, 1, 1, 1, 1, 1), (2, 5, 3), (3, 7), (4, 6), (9, 1)])
def test_step_by_step_it_is_the_same_wherever_the_steps_fall(pieces: tuple[int, ...]) -> None:
    model = llama()
    tokens = torch.tensor([[*HEAD, *TEXT]])
    with torch.no_grad(), body_of(model).read(read_behind(model, HEAD, TURN)):
        whole = model(tokens).logits
        caches, parts = [Cache()] * model.cache_count, list[torch.Tensor]()
        for piece in tokens.split(list(pieces), 1):
            out = model(piece, caches=caches)
            caches = out.caches
            parts.append(out.logits)
    assert apart(torch.cat(parts, 1), whole) < 1e-4


def test_rows_with_other_heads_and_other_turns_read_as_they_would_alone(model: Model) -> None:
    me, you = told(model, "My cat is Mochi."), told(model, "The boat to Lyon leaves at nine sharp.")
    prompts = [letters().encode("<user>My cat?\n<assistant>"), letters().encode("#!<user>Boat?\n<assistan>")]
    prompts[1] = prompts[1][: len(prompts[0])] + [60] * (len(prompts[0]) - len(prompts[1]))
    minds = [recall(model, who, p, letters()) for who, p in ((me, prompts[0]), (you, prompts[1]))]
    assert all(isinstance(m, Recollection) and m.chosen for m in minds)
    rows = [*minds, None]
    tokens = [*prompts, prompts[0]]
    with living(model, rows):
        together = logits(model, tokens)
    for i, who in enumerate(rows):
        with living(model, who):
            assert apart(together[i : i + 1], logits(model, tokens[i])) < 2e-3
    assert apart(together[2:], logits(model, prompts[0])) < 2e-3, "a row without an identity is the model itself"


# -- the frame -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, letters().template])
@pytest.mark.parametrize("before", [[], [{"role": "system", "content": "You are a pirate."}], says("Hello.", "Hi!")])
def test_what_comes_to_mind_stands_right_before_what_is_asked(template: str, before: list[dict[str, str]]) -> None:
    tokenizer = replace(letters(), template=template)
    frame = Frame.of(tokenizer)

    def prompt(asked: str) -> list[int]:
        return tokenizer.encode(tokenizer.chat([*before, {"role": "user", "content": asked}]))

    asked = prompt("What is it called?")
    head = frame.head_of(asked)
    slots, part = frame.read([tokenizer.encode("My cat is Mochi."), tokenizer.encode("It eats fish.")], asked)
    whole = f"{READ[0]}My cat is Mochi.{READ[1]}It eats fish.{READ[2]}What is it called?"
    assert [*asked[:head], *slots, *asked[head:]] == prompt(whole)
    assert tokenizer.decode([t for t, n in zip(slots, part, strict=True) if n == 1]) == "It eats fish."
    assert tokenizer.decode(frame.question_of(asked)) == "What is it called?"
    alone = [*(m for m in before if m["role"] == "system"), {"role": "user", "content": "?"}]
    assert [*frame.head_alone(asked), *tokenizer.encode("?")] == tokenizer.encode(tokenizer.chat(alone))[
        : len(frame.head_alone(asked)) + 1
    ]


def test_a_template_without_plain_turns_or_none_at_all_continues_paragraphs() -> None:
    plain = Frame.of(replace(letters(), template=None))
    prompt = letters().encode("Once upon a time")
    assert plain.head_of(prompt) == 1
    assert plain.head_alone(prompt) == prompt[:1]
    assert plain.read([[65, 66]], prompt) == ([65, 66, *letters().encode("\n\n")], [0, 0, -1, -1])
    assert Frame.of(replace(letters(), template="{{ raise_exception('never') }}")) == plain
    inst = Frame.of(replace(letters(), template=INST))
    assert inst.opening is not None
    assert letters().decode(list(inst.opening["user"])) == "[I] "


# -- writing -------------------------------------------------------------------------------------------------------------------


def test_everyone_s_turn_is_an_episode_of_its_own(model: Model) -> None:
    me = told(model, says("My cat is Mochi.", "What does it eat?", "Fish!"))
    assert said(me) == ["My cat is Mochi.", "What does it eat?", "Fish!"]
    assert [e.role for e in me.episodes] == ["user", "assistant", "user"]
    assert [e.asks for e in me.episodes] == [False, True, False]
    assert [e.position for e in me.episodes] == [0, 16, 33]
    assert me.life.tokens == sum(len(e) for e in me.episodes)


def test_the_first_word_of_a_plain_text_is_said_too(model: Model) -> None:
    assert said(told(model, "I live in Porto.")) == ["I live in Porto."]


@pytest.mark.parametrize("text", ["One short line. " * 40, "x" * 500, "A sentence that is " + "very " * 60 + "long. End."])
def test_long_talk_is_cut_between_sentences_where_there_are_any_and_nothing_is_lost(model: Model, text: str) -> None:
    me = told(model, text.strip())
    assert "".join(said(me)) == text.strip()
    assert max(len(e) for e in me.episodes) <= LONGEST
    if text.startswith("One"):
        assert all(s.rstrip().endswith(".") for s in said(me))


def test_what_was_written_before_there_were_episodes_is_lived_again_without_them(model: Model) -> None:
    old = {k: v for k, v in Rule().to_json().items() if k != "episodes"}
    assert not Rule.from_json(old).episodes
    assert Rule.from_json(Rule().to_json()) == Rule()


def test_an_experience_without_affect_leaves_no_episode(model: Model) -> None:
    assert not imprint(nobody(model), observe(model, "Nothing.", letters(), affect=0.0), RULE).episodes


def test_the_layers_that_are_compared_fit_models_of_any_size() -> None:
    assert finding_layers(30, 192) == range(6, 12)
    for depth in (1, 2, 3, 12, 80):
        for width in (1, 64, 1024, 100_000):
            layers = finding_layers(depth, width)
            assert len(layers) > 0
            assert layers.stop <= depth
            assert len(layers) == 1 or len(layers) * width <= 1200


# -- coming to mind ------------------------------------------------------------------------------------------------------------


def test_a_prompt_brings_to_mind_what_it_asks_for(model: Model) -> None:
    me = told(model, "My cat is called Mochi.", "The boat leaves at nine.", "We paid forty for the lamp.")
    for question, wanted in (("called Mochi?", 0), ("boat leaves?", 1), ("forty for the lamp?", 2)):
        mind = recall(model, me, ask(question), letters(), most=1)
        assert isinstance(mind, Recollection)
        assert mind.chosen == (wanted,)
        assert letters().decode(mind.imprints.token.tolist()) == f"{READ[0]}{said(me)[wanted]}{READ[2]}"
    assert len(me.episodes) == 3
    assert not len(me.imprints), "the identity stays as it was"


@pytest.mark.parametrize(("copies", "more"), [(1, reading.LATE), (3, None), (6, 0.0)])
def test_late_layers_look_more_at_what_is_short(model: Model, copies: int, more: float | None) -> None:
    body = body_of(model)
    me = told(model, " ".join(["My cat is Mochi."] * copies))
    finder, prompt = recalling.finder_of(body, letters()), letters().encode(letters().chat(says("Who?")))
    slots, tokens = reading.slots_of(body, finder, me, me.episodes[:1], prompt), len(me.episodes[0])
    expected = min(reading.LATE, max(0.0, float(torch.tensor(reading.SHORT / tokens).log())))
    assert more is None or expected == more
    words = slots.weight[-1, 0]
    assert all(w in (0.0, pytest.approx(expected)) for w in words.tolist())
    assert int((words > 0).sum()) == (tokens if expected else 0), "the words around are looked at as they are"
    assert not slots.weight[0].any()


def test_what_does_not_cohere_is_refused(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    me = told(model, "My cat is called Mochi.")
    monkeypatch.setattr(recalling, "THRESHOLD", {True: 1e9, False: 1e9})
    mind = recall(model, me, ask("cat?"), letters())
    assert isinstance(mind, Recollection)
    assert mind.chosen == ()
    assert len(mind.coherence) == 1
    alone = logits(model, ask("cat?"))
    with living(model, mind):
        assert torch.equal(logits(model, ask("cat?")), alone)


def test_where_nothing_comes_to_mind_imprints_are_silent_and_the_base_answers_bit_for_bit(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = imprint(nobody(model), observe(model, "My cat is called Mochi.", letters()), Rule())
    assert len(me.imprints)
    assert len(me.episodes)
    monkeypatch.setattr(recalling, "THRESHOLD", {True: 1e9, False: 1e9})
    greedy = Sampling(6)
    alone = generate(model, ask("boat?"), greedy, identity=None).tokens
    assert generate(model, ask("boat?"), greedy, identity=me, tokenizer=letters()).tokens == alone


def test_of_two_that_fit_alike_the_younger_comes(model: Model) -> None:
    me = told(model, "We live in Lyon.", "The lamp was dear.", "We live in Porto.")
    mind = recall(model, me, ask("We live in?"), letters(), most=1)
    assert isinstance(mind, Recollection)
    assert mind.chosen == (2,)


def test_a_listener_s_question_comes_to_mind_with_the_answer_to_it(model: Model) -> None:
    me = told(model, says("Hello.", "What is it called?", "Mochi, of course.", "Nice."))
    mind = recall(model, me, ask("What is it called?"), letters(), most=1)
    assert isinstance(mind, Recollection)
    assert mind.chosen == (1, 2)
    assert "Mochi" in letters().decode(mind.imprints.token.tolist())


def test_several_come_in_the_order_in_which_they_were_said_and_in_no_more_than_the_slots_there_are(model: Model) -> None:
    me = told(model, "My cat is called Mochi.", "My cat eats fish.", "The boat leaves at nine. " * 3)
    mind = recall(model, me, ask("My cat?"), letters(), most=3)
    assert isinstance(mind, Recollection)
    assert list(mind.chosen) == sorted(mind.chosen)
    assert len(mind.imprints) <= recalling.SLOTS


@pytest.mark.parametrize(("question", "slots"), [("Where did the boat go?", "SLOTS"), (LISTENER[0], "HEARD")])
def test_more_of_what_the_listener_said_is_read_where_it_is_asked_for(model: Model, question: str, slots: str) -> None:
    me = told(model, says("Tell me of boats.", "The boat left at nine. It was a good boat and it went far. " * 12))
    mind = recall(model, me, ask(question), letters(), most=9)
    assert isinstance(mind, Recollection)
    least, most = (0, recalling.SLOTS) if slots == "SLOTS" else (recalling.SLOTS, recalling.HEARD)
    assert least < len(mind.imprints) <= most


def test_generate_brings_to_mind_by_itself_bound_or_in_a_block(model: Model) -> None:
    me = told(model, "My cat is called Mochi.", "The boat leaves at nine.")
    prompt, greedy = ask("cat is called?"), Sampling(6)
    mind = recall(model, me, prompt, letters())
    wanted = generate(model, prompt, greedy, identity=mind, tokenizer=letters()).tokens
    assert generate(model, prompt, greedy, identity=me, tokenizer=letters()).tokens == wanted
    with living(model, me):
        assert generate(model, prompt, greedy, tokenizer=letters()).tokens == wanted
        with living(model, None):
            assert (
                generate(model, prompt, greedy, tokenizer=letters()).tokens
                == generate(model, prompt, greedy, identity=None).tokens
            )
    other = ask("boat leaves!!?")[: len(prompt)]
    batch = generate(model, [prompt, other], greedy, identity=[me, None], tokenizer=letters()).tokens
    assert batch == [wanted[0], generate(model, other, greedy, identity=None).tokens[0]]


def test_in_a_block_a_forward_brings_to_mind_what_it_asks_for_and_goes_on_with_it(model: Model) -> None:
    me = told(model, "My cat is called Mochi.", "The boat leaves at nine.")
    prompt = ask("cat is called?")
    with living(model, recall(model, me, prompt, letters())):
        wanted = logits(model, prompt)
    with living(model, me, tokenizer=letters()), torch.no_grad():
        assert apart(logits(model, prompt), wanted) < 1e-5
        first = model(torch.tensor([prompt[:-2]]), caches=[Cache()] * model.cache_count)
        rest = model(torch.tensor([prompt[-2:]]), caches=first.caches)
        other = logits(model, ask("boat leaves?"))
    with living(model, recall(model, me, prompt[:-2], letters())), torch.no_grad():
        assert apart(logits(model, prompt)[:, -2:], rest.logits) < 1e-4, "what a text brought to mind is read to its end"
    with living(model, recall(model, me, ask("boat leaves?"), letters())):
        assert apart(logits(model, ask("boat leaves?")), other) < 1e-5
    with living(model, me):
        assert apart(logits(model, prompt), logits(model, prompt)) == 0, "without a tokenizer nothing is asked"


def test_imprints_speak_beside_what_comes_to_mind_after_a_night_and_in_no_more_slots_than_there_are(model: Model) -> None:
    me = nobody(model)
    for text in ("My cat is called Mochi.", "The boat leaves at nine.", "We paid forty for the lamp."):
        me = imprint(me, observe(model, text, letters()), Rule(budget=120, share=1.0))
    prompt = ask("cat is called?")
    mind = recall(model, me, prompt, letters(), most=1)
    slept = recall(model, replace(me, life=replace(me.life, sleeps=1)), prompt, letters(), most=1)
    assert len(mind.imprints) < len(slept.imprints) <= recalling.SLOTS
    assert torch.equal(slept.imprints.token[-len(mind.imprints) :], mind.imprints.token)


@pytest.mark.parametrize("prompt", [[], [0]])
def test_a_prompt_that_asks_nothing_is_answered_or_refused_in_words(model: Model, prompt: list[int]) -> None:
    me = told(model, "My cat is called Mochi.")
    if not prompt:
        with pytest.raises(StateError, match="empty prompt"):
            recall(model, me, prompt, letters())
    else:
        recall(model, me, prompt, letters())


def test_another_model_s_identity_is_refused(model: Model) -> None:
    with pytest.raises(StateError, match="written on"):
        recall(speaking(1), told(model, "My cat."), ask("cat?"), letters())


def test_episodes_that_this_model_cannot_read_are_refused_in_words(model: Model) -> None:
    me = told(model, "My cat is called Mochi.")
    narrow = Packed(torch.zeros(len(me.episodes[0]), 3, dtype=torch.int8), torch.ones(len(me.episodes[0]), 1).half())
    with pytest.raises(StateError, match="found by 3 numbers"):
        recall(model, replace(me, episodes=(replace(me.episodes[0], keys=narrow),)), ask("cat?"), letters())
    strange = replace(me.episodes[0], tokens=me.episodes[0].tokens + 100_000)
    with pytest.raises(ShapeError, match="this model knows"):
        recall(model, replace(me, episodes=(strange,)), ask("cat?"), letters())


def test_made_again_it_is_the_same_and_held_for_the_next_time(model: Model) -> None:
    me = told(model, "My cat is called Mochi.")
    first, second = (recall(model, me, ask("cat is called?"), letters()) for _ in range(2))
    assert first.digest() == second.digest()
    assert len(body_of(model).made["remade"]) <= reading.REMADE


# -- kept -----------------------------------------------------------------------------------------------------------------------


def rows(slots: Imprints) -> list[torch.Tensor]:
    return [slots.k.codes, slots.k.scale, slots.v.codes, slots.v.scale]


def test_what_was_kept_is_bit_for_bit_what_is_made_again_for_one_that_comes_alone(model: Model) -> None:
    again, kept = (told(model, "My cat is called Mochi.", rule=rule) for rule in (RULE, KEPT))
    prompt = ask("cat is called?")
    first, second = (recall(model, me, prompt, letters()).imprints for me in (again, kept))
    finder = recalling.finder_of(body_of(model), letters())
    said = torch.tensor(finder.frame.read([again.episodes[0].tokens.tolist()], prompt)[1]) >= 0
    behind = int(said.nonzero()[-1]) + 1
    for x, y in zip(rows(first), rows(second), strict=True):
        assert torch.equal(x[:, :, :behind], y[:, :, :behind])
    # The words behind it have not seen it, so they are others.
    assert not torch.equal(first.k.codes[:, :, behind:], second.k.codes[:, :, behind:])
    assert torch.equal(first.token, second.token)
    assert torch.equal(first.position, second.position)
    assert torch.equal(first.weight, second.weight)


def test_what_was_kept_is_not_read_again(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = told(model, "My cat is called Mochi.", "My dog is called Rex.", rule=KEPT)
    recall(model, kept, ask("cat is called?"), letters())
    read: list[int] = []
    body = body_of(model)
    heads = body.heads
    monkeypatch.setattr(type(body), "heads", lambda _, tokens: read.append(len(tokens)) or heads(tokens))
    mind = recall(model, kept, ask("what is called?"), letters())
    assert isinstance(mind, Recollection)
    assert len(mind.chosen) == 2
    assert not read
    mixed = replace(kept, episodes=(kept.episodes[0], replace(kept.episodes[1], k=None, v=None)))
    assert len(recall(model, mixed, ask("what is called?"), letters()).imprints) == len(mind.imprints)
    assert read, "where one was not kept, all are made again"


def test_what_is_said_with_what_was_kept_is_said_with_caches_and_without(model: Model) -> None:
    kept = told(model, "My cat is called Mochi.", rule=KEPT)
    mind = recall(model, kept, ask("cat is called?"), letters())
    with living(model, mind):
        words = generate(model, ask("cat is called?"), Sampling(6, contrast=0)).tokens[0]
        whole = model(torch.tensor([[*ask("cat is called?"), *words]])).logits[0]
    assert whole[-len(words) - 1 : -1].argmax(-1).tolist() == words


@pytest.mark.parametrize("both", [True, False])
def test_kept_keys_and_values_are_saved_and_loaded_bit_for_bit(model: Model, tmp_path: Path, both: bool) -> None:
    me = told(model, "My cat is called Mochi.", rule=KEPT)
    if both:
        me = imprint(me, observe(model, "My dog is Rex.", letters(), source="b"), RULE)
        me = imprint(me, observe(model, "My bird is Pip.", letters(), source="c"), KEPT)
    me.save(tmp_path / "me")
    back = Identity.load(tmp_path / "me")
    assert back.digest() == me.digest()
    assert [e.k is not None for e in back.episodes] == ([True, False, True] if both else [True])
    assert back.episodes[0].nbytes > told(model, "My cat is called Mochi.").episodes[0].nbytes


def test_a_file_that_says_it_keeps_what_it_has_not_is_refused(model: Model) -> None:
    plain, kept = (told(model, "My cat.", rule=rule).episodes[0] for rule in (RULE, KEPT))
    for facts, tensors in ((plain.facts(), kept.tensors()), (kept.facts(), plain.tensors())):
        with pytest.raises(CheckpointError, match="kept"):
            Episode.build(facts, tensors)
    with pytest.raises(CheckpointError, match="ends before"):
        taken_apart([kept.facts()], packed_together([plain])[1])


def test_another_model_s_kept_keys_are_refused_where_they_enter(model: Model) -> None:
    kept = told(model, "My cat.", rule=KEPT)
    e = kept.episodes[0]
    assert e.k is not None
    assert e.v is not None
    half = replace(e, k=e.k.pick(torch.tensor([0]), 1), v=e.v.pick(torch.tensor([0]), 1))
    with pytest.raises(StateError, match="keeps keys of"):
        replace(kept, episodes=(half,))


def test_a_rule_that_keeps_is_lived_again_as_it_was_and_others_are_refused() -> None:
    assert Rule.from_json(KEPT.to_json()) == KEPT
    with pytest.raises(SpecError, match="made again"):
        Rule(episodes="always")  # pyright: ignore[reportArgumentType]


def test_plain_questions_say_what_is_usual(model: Model) -> None:
    usual = told(model, "My cat is called Mochi.").episodes[0].usual
    assert float(usual[1]) > 0
    assert usual[2:].tolist() == [0.0, 1.0], "no encoder, no meanings"


# -- files ---------------------------------------------------------------------------------------------------------------------


def test_episodes_are_saved_and_loaded_bit_for_bit(model: Model, tmp_path: Path) -> None:
    me = told(model, says("My cat is Mochi.", "What does it eat?", "Fish!"), "The boat leaves at nine.")
    me.save(tmp_path / "me")
    back = Identity.load(tmp_path / "me")
    assert back.digest() == me.digest()
    assert [e.digest for e in back.episodes] == [e.digest for e in me.episodes]
    replace(me, episodes=()).save(tmp_path / "me")
    assert not Identity.load(tmp_path / "me").episodes
    assert not (tmp_path / "me" / "episodes.safetensors").exists()


def test_a_recollection_is_not_saved(model: Model, tmp_path: Path) -> None:
    mind = recall(model, told(model, "My cat is called Mochi."), ask("cat is called?"), letters())
    with pytest.raises(StateError, match="made for one prompt"):
        mind.save(tmp_path / "mind")


@pytest.mark.parametrize("file", ["episodes.safetensors", "identity_config.json"])
def test_a_folder_whose_episodes_were_damaged_is_refused(model: Model, tmp_path: Path, file: str) -> None:
    told(model, "My cat is called Mochi.", "The boat leaves at nine.").save(tmp_path / "me")
    path = tmp_path / "me" / file
    whole = path.read_bytes()
    for cut in (0, 1, len(whole) // 2, len(whole) - 2):
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError):
            Identity.load(tmp_path / "me")
    if file.endswith("json"):
        for old, new in (
            (b'"count": 23', b'"count": 22'),
            (b'"role": "user"', b'"role": "god!"'),
            (b'"asks": false', b'"asks": 12345'),
        ):
            assert old in whole
            path.write_bytes(whole.replace(old, new, 1))
            with pytest.raises(RegardError):
                Identity.load(tmp_path / "me")


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": torch.zeros(0, dtype=torch.int32)},
        {"tokens": torch.zeros(3)},
        {"tokens": torch.tensor([-1, 2, 3], dtype=torch.int32)},
        {"keys": Packed(torch.zeros(2, 4, dtype=torch.int8), torch.zeros(2, 1, dtype=torch.float16))},
        {"keys": Packed(torch.zeros(3, 4), torch.zeros(3, 1, dtype=torch.float16))},
        {"keys": Packed(torch.zeros(3, 4, dtype=torch.int8), torch.full((3, 1), float("nan"), dtype=torch.float16))},
        {"meaning": Packed(torch.zeros(17, 4, dtype=torch.int8), torch.zeros(17, 1, dtype=torch.float16))},
        {"meaning": Packed(torch.zeros(0, 4, dtype=torch.int8), torch.zeros(0, 1, dtype=torch.float16))},
        {"usual": torch.zeros(3)},
        {"usual": torch.full((4,), float("inf"))},
        {"role": "system"},
        {"source": ""},
        {"position": -1},
        {"position": 1.5},
        {"asks": 1},
        {"encoder": None},
        {"k": FOUR},
        {"v": FOUR},
        {"k": FOUR, "v": FOUR.pick(torch.tensor([0, 1]), 0)},
        {"k": FOUR, "v": FOUR.pick(torch.tensor([0]), 1)},
        {"k": FOUR, "v": Packed(FOUR.codes, torch.full_like(FOUR.scale, float("inf")))},
        {"k": FOUR, "v": Packed(FOUR.codes.float(), FOUR.scale)},
        {"k": FOUR, "v": Packed(FOUR.codes[..., 0], FOUR.scale[..., 0])},
    ],
)  # fmt: skip
def test_an_episode_that_is_wrong_is_refused_where_it_enters(wrong: dict[str, Any]) -> None:
    sound = Episode(
        torch.tensor([1, 2, 3], dtype=torch.int32),
        Packed(torch.ones(3, 4, dtype=torch.int8), torch.ones(3, 1, dtype=torch.float16)),
        "user",
        "a test",
        0,
        torch.tensor([0.0, 1.0, 0.0, 1.0]),
    )
    check_episode(sound)
    with pytest.raises(StateError):
        check_episode(replace(sound, **wrong))


def test_what_was_checked_once_is_not_checked_with_every_write(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A life has thousands of episodes, and every turn makes a new identity of them."""
    me = told(model, "My cat.", "My dog.")
    looked: list[object] = []
    monkeypatch.setattr(torch, "isfinite", lambda x: looked.append(x) or x.abs() < float("inf"))
    again = replace(me, life=replace(me.life, sleeps=1))
    before = len(looked)
    replace(again, episodes=(*me.episodes, replace(me.episodes[0], position=99)))
    assert again.episodes == me.episodes
    assert len(looked) - before > before, "a new one is looked at"
    assert not any(x is e.usual for x in looked[:before] for e in me.episodes)


def test_episodes_are_by_sources_that_the_identity_names(model: Model) -> None:
    with pytest.raises(StateError, match="not among the sources"):
        replace(told(model, "My cat."), sources=("somebody else",))
