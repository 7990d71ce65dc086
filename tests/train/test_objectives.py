"""What families learn from: which tokens are hidden or cut out, that a step is the same whoever takes it, and that runs resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import CombinationError
from regard.models import FAMILIES, generate
from regard.models.downloads import open_model
from regard.models.objectives import END, IGNORED, MASK, Marks, Masked, NextToken, Spans, TextToText
from regard.train import ConfigError, DataError, TrainError, config, train
from regard.train.checkpoint import iter_metrics
from regard.train.data import find_text, tokens
from regard.train.examples import Drawing, Pairs, Windows, marks_of

MARKS = Marks(vocabulary=50, mask=50, pad=51, end=52, start=51, sentinels=tuple(range(60, 70)))
FORMS = [("bert", "masked"), ("energy", "masked"), ("t5", "spans"), ("t5", "pairs")]
FORM = pytest.mark.parametrize(("family", "objective"), FORMS)


def windows(length: int, rows: int = 3) -> list[tuple[torch.Tensor]]:
    return [(torch.randint(0, 50, (length + 1,), generator=torch.Generator().manual_seed(i)),) for i in range(rows)]


@given(length=st.integers(1, 200), rate=st.floats(0.01, 0.99), seed=st.integers(0, 2**62))
def test_masked_hides_a_fixed_share_and_asks_for_nothing_else(length: int, rate: float, seed: int):
    rows = windows(length)
    batch = Masked(rate=rate).batch(rows, MARKS, [seed, seed + 1, seed + 2])
    whole = torch.stack([r[0][:-1] for r in rows])
    asked = batch.targets != IGNORED
    assert (asked.sum(1) == max(1, round(rate * length))).all()
    assert torch.equal(batch.targets[asked], whole[asked])
    assert torch.equal(batch.inputs["tokens"][~asked], whole[~asked])


def test_of_the_hidden_tokens_eight_in_ten_are_masks_one_another_and_one_itself():
    rows = windows(4000)
    batch = Masked(rate=0.5).batch(rows, MARKS, [1, 2, 3])
    asked = batch.targets != IGNORED
    shown, right = batch.inputs["tokens"][asked], batch.targets[asked]
    assert float((shown == MARKS.mask).float().mean()) == pytest.approx(0.8, abs=0.02)
    # A token drawn at random is the right one once in fifty times.
    assert float((shown == right).float().mean()) == pytest.approx(0.1 + 0.1 / 50, abs=0.02)


@given(length=st.integers(1, 200), rate=st.floats(0.01, 0.99), span=st.floats(1, 20), seed=st.integers(0, 2**62))
def test_what_is_left_and_what_is_cut_out_join_to_the_window_again(length: int, rate: float, span: float, seed: int):
    rows = windows(length)
    batch = Spans(rate=rate, span=span).batch(rows, MARKS, [seed, seed + 1, seed + 2])
    for (row,), source, target, written in zip(
        rows, batch.inputs["source"], batch.targets, batch.inputs["tokens"], strict=True
    ):
        cut = parts(target.tolist())
        joined = [x for token in source.tolist()[:-1] for x in (cut[token] if token in MARKS.sentinels else [token])]
        assert joined == row[:-1].tolist()
        assert source[-1] == target[-1] == MARKS.end
        assert written.tolist() == [MARKS.start, *target.tolist()[:-1]]
        assert sum(map(len, cut.values())) == min(max(1, round(rate * length)), max(1, length - 1))


def parts(target: list[int]) -> dict[int, list[int]]:
    """What stands after each sentinel."""
    spans: dict[int, list[int]] = {}
    for token in target[:-1]:
        if token in MARKS.sentinels:
            spans[token] = []
        else:
            spans[list(spans)[-1]].append(token)
    return spans


@pytest.fixture
def pairs_file(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    rows = [{"task": ("copy", "twice")[i % 2], "source": f"n{i}", "target": f"n{i}" * (1 + i % 2)} for i in range(40)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def made(small, pairs_file):
    def make(family: str, objective: str, *more: str):
        source = [f"data.source={pairs_file}", "data.context=16"] if objective == "pairs" else []
        return small(f"model.family={family}", f"objective.name={objective}", *source, *more)

    return make


def losses(run: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in iter_metrics(run) if "loss" in r}


def validations(run: Path) -> dict[int, float]:
    return {r["step"]: r["validation"] for r in iter_metrics(run) if "validation" in r}


@FORM
def test_a_resumed_run_walks_through_the_same_losses(made, tmp_path, family, objective):
    train(made(family, objective), tmp_path / "whole", quiet=True)
    train(made(family, objective, "train.steps=3"), tmp_path / "first", quiet=True)
    whole, first = losses(tmp_path / "whole"), losses(tmp_path / "first")
    # The cosine is as long as the run, so only what does not depend on its length is compared with the shorter one.
    assert first[1] == whole[1]
    cut = made(family, objective)
    from regard.train.loop import Trainer

    step = Trainer.step

    def stopped(self: Trainer, at: int) -> tuple[float, float, bool]:
        loss, norm, _ = step(self, at)
        return loss, norm, at == 2

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", stopped)
        assert train(cut, tmp_path / "cut", quiet=True).stopped == "interrupted"
    train(cut, tmp_path / "cut", resume=True, quiet=True)
    assert losses(tmp_path / "cut") == whole
    assert validations(tmp_path / "cut")[6] == validations(tmp_path / "whole")[6]


@FORM
def test_accumulated_parts_are_one_big_batch(made, tmp_path, family, objective):
    train(made(family, objective), tmp_path / "one", quiet=True)
    train(made(family, objective, "train.accumulate=2"), tmp_path / "parts", quiet=True)
    one, parts = losses(tmp_path / "one"), losses(tmp_path / "parts")
    assert all(abs(one[s] - parts[s]) < 1e-5 for s in one)


@FORM
@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
def test_a_run_answers_from_its_folder(made, tmp_path, family, objective, tokenizer):
    train(made(family, objective, f"data.tokenizer={tokenizer}", "train.steps=2"), tmp_path / "run", quiet=True)
    model, words = open_model(tmp_path / "run")
    asked = "copy: n1" if objective == "pairs" else f"n{MASK}1"
    if objective == "pairs":
        assert isinstance(model.answer(asked, words, 4), str)
    elif family == "t5":
        reply = model.answer("merc<mask> is", words, 4)
        assert reply.startswith("merc")
        assert reply.endswith(" is")
    else:
        reply = model.answer("merc<mask> i<mask>", words)
        assert reply.startswith("merc")
        assert MASK not in reply
        with pytest.raises(CombinationError, match="has no <mask>"):
            model.answer("mercy", words)
    with pytest.raises(CombinationError, match=r"continues none|continues no text|writes another"):
        generate(model, "mercy", tokenizer=words)


def test_bert_learns_to_fill_in_and_the_energy_transformer_too(small, tmp_path):
    for family in ("bert", "energy"):
        c = small(
            f"model.family={family}", "train.steps=80", "train.batch=8", "optim.lr=1e-2", "data.context=16", "model.width=32"
        )
        found = train(c, tmp_path / family, quiet=True)
        assert found.validation is not None
        assert found.validation < 2.75, "less than the entropy of single letters, 2.9"


def test_t5_learns_a_task_by_its_prefix(small, pairs_file, tmp_path):
    rows = [{"task": t, "source": s, "target": a} for s in "abcdef" for t, a in (("same", s), ("next", chr(ord(s) + 1)))]
    pairs_file.write_text("\n".join(map(json.dumps, rows * 6)))
    more = (
        "train.steps=150",
        "train.batch=8",
        "optim.lr=1e-2",
        "model.width=32",
        "data.context=16",
        f"data.source={pairs_file}",
    )
    train(small("model.family=t5", "objective.name=pairs", *more), tmp_path / "run", quiet=True)
    model, words = open_model(tmp_path / "run")
    assert [model.answer(f"{task}: c", words) for task in ("same", "next")] == ["c", "d"]


def test_pairs_are_read_back_as_they_stand(small, pairs_file):
    c = small("model.family=t5", "objective.name=pairs", f"data.source={pairs_file}", "data.context=16")
    made = tokens(c.data, text=find_text(c.data, c.objective.pair_fields), special=c.objective.tokens)
    marks = marks_of(c.objective, made.tokenizer, made.tokenizer.size)
    first, last = Pairs.split(made.values, 0.25, 16, Drawing(4, 0, c.objective, marks))
    assert (first.count, last.count) == (30, 10)
    read = [[made.tokenizer.decode(t.tolist()) for t in row] for row in last.rows([0, 9])]
    assert read == [["copy: n30", "n30"], ["twice: n39", "n39n39"]]
    batch = first.at(0)
    assert batch.asked == int((batch.targets != IGNORED).sum())
    assert first.at(0, 1, 2).asked == batch.asked / 2


@pytest.mark.parametrize(
    ("line", "says"),
    [('{"source": "x"}', "no text in 'target'"), ("[1]", "write an object in each line"), ("{", "is not JSON"),
     ('{"source": "a", "target": "b", "task": 3}', "no text in 'task'")],
)  # fmt: skip
def test_a_bad_pair_is_named(small, pairs_file, tmp_path, line, says):
    pairs_file.write_text('{"source": "a", "target": "b"}\n' + line)
    with pytest.raises(DataError, match=says):
        train(small("model.family=t5", "objective.name=pairs", f"data.source={pairs_file}"), tmp_path / "run", quiet=True)


def test_a_pair_that_is_longer_than_the_context_is_named(made, tmp_path):
    with pytest.raises(DataError, match=r"pair 12 has 11 tokens, its end included; data\.context=10"):
        train(made("t5", "pairs", "data.context=10"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_text_is_no_file_of_pairs(small, tmp_path):
    with pytest.raises(DataError, match="is no file of pairs"):
        train(small("model.family=t5", "objective.name=pairs"), tmp_path / "run", quiet=True)


def test_a_run_goes_on_by_another_objective_only_if_told_to(made, tmp_path, pairs_file):
    train(made("t5", "spans"), tmp_path / "run", quiet=True)
    with pytest.raises(TrainError, match=r"objective\.rate=0\.3"):
        train(made("t5", "spans", "objective.rate=0.3", "train.steps=8"), tmp_path / "run", resume=True, quiet=True)


def test_what_was_learned_by_spans_is_taught_tasks(made, tmp_path, pairs_file):
    train(made("t5", "spans"), tmp_path / "first", quiet=True)
    pairs_file.write_text("\n".join(json.dumps({"source": "mercy", "target": "rain"}) for _ in range(8)))
    start = open_model(tmp_path / "first")
    more = [
        "objective.name=pairs",
        f"data.source={pairs_file}",
        f"data.cache={tmp_path / 'cache'}",
        "train.steps=2",
        "train.batch=4",
    ]
    found = train(config({}, more, initial=start[0]), tmp_path / "second", initial=start, quiet=True)
    assert found.validation is not None


def test_every_family_names_what_it_learns_from():
    for name, family in FAMILIES.items():
        kinds = family.model.objectives
        assert kinds, name
        assert (NextToken in kinds.values()) is (family.model.instead is None)


def test_settings_of_an_objective_are_read_back(small):
    c = small("model.family=bert", "objective.rate=0.3")
    assert c.objective == Masked(rate=0.3)
    assert config(c.tree()).objective == c.objective
    with pytest.raises(ConfigError, match="a t5 learns by spans or pairs"):
        small("model.family=t5", "objective.name=masked")
    assert isinstance(small("model.family=t5", "objective.name=pairs").objective, TextToText)


def test_rows_are_hidden_alike_at_every_validation():
    import numpy as np

    w = Windows(np.arange(101, dtype=np.uint16) % 50, 10, Drawing(4, 3, Masked(), MARKS))
    first, again = ([b.inputs["tokens"].tolist() for b in w.in_order()] for _ in range(2))
    assert first == again
    assert w.at(1).inputs["tokens"].tolist() != w.at(2).inputs["tokens"].tolist()
    joined = torch.cat([w.at(7, p, 2).inputs["tokens"] for p in range(2)])
    assert torch.equal(joined, w.at(7).inputs["tokens"])


def test_special_tokens_are_spelled_by_no_text(small, text):
    text.write_text(f"{MASK}{END} is text here. " * 20)
    c = small("model.family=bert")
    made = tokens(c.data, special=c.objective.tokens)
    assert made.tokenizer.special.mask not in set(made.values.tolist())
    assert made.tokenizer.decode(made.values[:12].tolist()) == f"{MASK}{END}"[:12]
