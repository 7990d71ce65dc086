"""The attention of a model, row by row: what a page shows is what the model computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cli.test_cli_identity import tiny

from regard.errors import CombinationError, ShapeError, SpecError
from regard.identity import Identity, Rule, imprint, living, observe
from regard.identity.body import base_of, body_of
from regard.identity.moved import introducing, moved_by, words_of
from regard.identity.read.recall import THRESHOLD, recall
from regard.identity.why import kl, moved, why
from regard.models import Model
from regard.models.base import Look
from regard.models.downloads import open_model
from regard.models.tokenizer import Tokenizer
from regard.serve import attention as module
from regard.serve.attention import AttentionReader

TEXT = "My cat is called Mochi."


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Tokenizer]:
    model, tokenizer = open_model(tiny(tmp_path_factory.mktemp("tiny"), 0))
    return model.eval(), tokenizer


@pytest.fixture
def reader(opened: tuple[Model, Tokenizer]) -> AttentionReader:
    return AttentionReader(*opened)


@pytest.fixture(scope="module")
def mara(opened: tuple[Model, Tokenizer]) -> Identity:
    model, tokenizer = opened
    return imprint(Identity.new(base_of(model)), observe(model, "I am Mara.", tokenizer), Rule())


def test_rows_are_those_of_the_whole_forward(reader: AttentionReader):
    tokens = reader.encode(TEXT)
    with torch.no_grad():
        whole = reader.model(torch.tensor([tokens]), look=Look(attention=True)).attended
    for layer in (0, 1):
        seen = reader.read(tokens, layer).rows([3, 7], [0, 2])
        torch.testing.assert_close(seen.weights, whole[layer].weights()[:, [0, 2]][:, :, [3, 7]])
        assert seen.accepted.all()


def test_another_mechanism_weighs_the_same_queries_and_keys(reader: AttentionReader):
    tokens = reader.encode(TEXT)
    own, hard = (reader.read(tokens, 1, spec=spec).rows([9], [1]).weights for spec in (None, "hard"))
    assert hard.max() == 1
    assert int((hard > 0).sum()) == 1
    assert int(hard.argmax()) == int(own.argmax())
    assert reader.read(tokens, 1, spec="hard").spec.startswith("dot | hard | rope")


def test_mechanism_everywhere_reaches_a_layer_by_another_way(reader: AttentionReader):
    tokens = reader.encode(TEXT)
    here, everywhere = (reader.read(tokens, 1, spec="hard", everywhere=e).attended.output for e in (False, True))
    assert not torch.equal(here, everywhere)
    with torch.no_grad():
        swapped = reader.model.with_attention("hard")(torch.tensor([tokens]), look=Look(attention=True)).attended
    torch.testing.assert_close(everywhere, swapped[1].output)


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("spec", [None, "hard", "topk(3)"])
@pytest.mark.parametrize("who", ["nobody", "mara"])
def test_many_layers_in_one_way_are_those_read_one_by_one(
    reader: AttentionReader, mara: Identity, spec: str | None, everywhere: bool, who: str
):
    tokens, identity = reader.encode(TEXT), None if who == "nobody" else mara
    together = list(reader.read_layers(tokens, [0, 1], spec=spec, everywhere=everywhere, identity=identity))
    assert [s.layer for s in together] == [0, 1]
    for seen in together:
        alone = reader.read(tokens, seen.layer, spec=spec, everywhere=everywhere, identity=identity)
        assert (alone.spec, alone.slots, alone.heads) == (seen.spec, seen.slots, seen.heads)
        torch.testing.assert_close(seen.attended.weights(), alone.attended.weights())


def test_refused_rows_are_marked(reader: AttentionReader):
    tokens = reader.encode(TEXT)
    seen = reader.read(tokens, 0, spec="abstain(softmax, null_logit=30)")
    rows = seen.rows(range(len(tokens)), [0, 1, 2, 3])
    assert not rows.accepted.any()
    torch.testing.assert_close(rows.accepted, seen.attended.accepted)
    open_ = reader.read(tokens, 0, spec="abstain(softmax, null_logit=-30)")
    assert open_.rows(range(len(tokens)), [0, 1, 2, 3]).accepted.all()


@pytest.mark.parametrize("spec", ["softmax", "gd(coherence=1)", "abstain(softmax, null_logit=0)", "topk(2)"])
def test_acceptance_of_some_rows_is_that_of_all(reader: AttentionReader, spec: str):
    tokens = reader.encode(TEXT)
    seen = reader.read(tokens, 1, spec=spec)
    rows = [0, 5, len(tokens) - 1]
    torch.testing.assert_close(seen.rows(rows, [3, 0]).accepted, seen.attended.accepted[:, [3, 0]][:, :, rows])


def test_what_an_identity_keeps_stands_before_the_text(reader: AttentionReader, mara: Identity):
    tokens = reader.encode(TEXT)
    seen = reader.read(tokens, 1, identity=mara)
    rows = seen.rows([0, 8], [0]).weights[0, 0]
    assert len(seen.slots) == len(mara.imprints) > 0
    assert rows.shape[1] == len(seen.slots) + len(tokens)
    assert not rows[0, : len(seen.slots)].any(), "the first token meets no slot"
    assert (rows[1, : len(seen.slots)] > 0).all()
    torch.testing.assert_close(rows.sum(-1), torch.ones(2))


def test_looking_at_an_identity_gives_what_it_says(reader: AttentionReader, mara: Identity):
    """Its output is the one that the layer goes on with."""
    tokens = torch.tensor([reader.encode(TEXT)])
    with torch.no_grad(), living(reader.model, mara):
        said, looked = reader.model(tokens).logits, reader.model(tokens, look=Look(attention=True)).logits
    torch.testing.assert_close(said, looked)


def test_identity_with_another_geometry_is_refused_by_name(reader: AttentionReader, mara: Identity):
    with pytest.raises(CombinationError, match="an identity overrides scaled dot products"):
        reader.read(reader.encode(TEXT), 0, spec="cosine", identity=mara)


def test_more_weights_than_an_answer_holds_are_refused_with_what_fits(reader: AttentionReader, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MOST_WEIGHTS", 100)
    tokens = reader.encode(TEXT)
    with pytest.raises(ShapeError, match="ask for 4 rows at a time"):
        reader.read(tokens, 0).rows(range(len(tokens)), [0])
    assert reader.read(tokens, 0).rows(range(4), [0]).weights.numel() == 4 * len(tokens)


@pytest.mark.parametrize(
    ("tokens", "layer", "said"),
    [((), 0, "1 to 4,096"), ((1,) * 5000, 0, "1 to 4,096"), ((1, 999), 0, "token 999"), ((1, 2), 2, "layers 0 to 1"), ((1, -1), 0, "token -1")],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(reader: AttentionReader, tokens: tuple[int, ...], layer: int, said: str):
    with pytest.raises(ShapeError, match=said):
        reader.read(tokens, layer)


def test_mechanism_without_values_is_refused(reader: AttentionReader):
    with pytest.raises(SpecError, match="pointer"):
        reader.read(reader.encode(TEXT), 0, spec="pointer")


def test_last_layers_stay_at_hand_and_older_ones_go(reader: AttentionReader):
    tokens = reader.encode(TEXT)
    first = reader.read(tokens, 0)
    assert reader.read(tokens, 0) is first
    for i in range(module.KEPT):
        reader.read(tokens[: 5 + i], 0)
    assert reader.read(tokens, 0) is not first


def test_letter_of_several_tokens_is_shown_once(reader: AttentionReader):
    words = reader.words(reader.encode("aé日b"))
    assert words == ["a", "", "é", "", "", "日", "b"]


def test_heads_are_told_apart_by_what_they_look_at(reader: AttentionReader):
    tokens = reader.encode(TEXT)
    scores = reader.head_scores(tokens)
    with torch.no_grad():
        w = reader.model(torch.tensor([tokens]), look=Look(attention=True)).attended[1].weights()[0]
    assert {name: tuple(x.shape) for name, x in scores.items()} == dict.fromkeys(("previous", "sink", "induction"), (2, 4))
    n = len(tokens)
    torch.testing.assert_close(scores["previous"][1, 2], sum(w[2, i, i - 1] for i in range(1, n)) / (n - 1))
    torch.testing.assert_close(scores["sink"][1, 3], w[3, 1:, 0].mean())


def test_induction_is_the_weight_on_what_followed_the_same_token(reader: AttentionReader):
    twice = reader._said_twice()
    half = twice.shape[1] // 2
    with torch.no_grad():
        w = reader.model(twice, look=Look(attention=True)).attended[0].weights()[0, 1]
    by_hand = torch.stack([w[i, i - half + 1] for i in range(half, 2 * half)]).mean()
    torch.testing.assert_close(reader.head_scores(reader.encode(TEXT))["induction"][0, 1], by_hand)


# -- what moved an answer -----------------------------------------------------------------------------------------------


def test_nats_of_an_answer_are_those_of_moved(opened: tuple[Model, Tokenizer], mara: Identity):
    model, tokenizer = opened
    prompt, answer = tokenizer.encode("Who?"), tokenizer.encode("Mara")
    seen = moved_by(model, mara, prompt, answer, tokenizer=tokenizer)
    assert list(seen.nats) == pytest.approx(moved(model, mara, prompt, answer), abs=1e-6)


def test_leaving_a_word_out_is_leaving_its_imprint_out(opened: tuple[Model, Tokenizer], mara: Identity):
    """A word of one imprint moves the first token of an answer as far as `why` says."""
    model, tokenizer = opened
    apart = replace(mara.imprints, position=torch.arange(0, 2 * len(mara.imprints), 2, dtype=torch.int32))
    mara = replace(mara, imprints=apart)
    prompt = tokenizer.encode("Who are you?")
    reason = why(model, mara, prompt)
    seen = moved_by(model, mara, prompt, tokenizer.encode("M"), tokenizer=tokenizer)
    assert [m.imprints for m in seen.movers] == [(i,) for i in range(len(apart))]
    for mover in seen.movers:
        assert mover.nats[0] == pytest.approx(reason.imprints[mover.imprints[0]], abs=1e-6)


def test_only_the_steepest_runs_are_left_out(opened: tuple[Model, Tokenizer], monkeypatch: pytest.MonkeyPatch):
    from regard.identity import moved as by

    model, tokenizer = opened
    who = Identity.new(base_of(model))
    for n in range(4):
        who = imprint(who, observe(model, f"Line {n}: my {n}th boat.", tokenizer, source=f"s{n}"), Rule())
    assert len(words_of(who, tokenizer)) > 2
    monkeypatch.setattr(by, "RUNS", 2)
    prompt, answer = tokenizer.encode("Which boat?"), tokenizer.encode("red")
    few = moved_by(model, who, prompt, answer, tokenizer=tokenizer)
    assert len(few.movers) == 2
    assert few.most(0) in few.movers


def test_imprints_that_make_a_word_are_left_out_together(opened: tuple[Model, Tokenizer]):
    model, tokenizer = opened
    said = observe(model, "my red boat", tokenizer)
    who = imprint(Identity.new(base_of(model)), said, Rule(keep="shock", share=1.0))
    runs = words_of(who, tokenizer)
    whole = ["".join(tokenizer.decode([int(who.imprints.token[i])]) for i in run) for run in runs]
    # The first token has no shock, and is not kept.
    assert whole == ["y", " red", " boat"]


def test_words_that_introduce_what_came_to_mind_are_no_imprints(
    opened: tuple[Model, Tokenizer], monkeypatch: pytest.MonkeyPatch
):
    model, tokenizer = opened
    for encoder in (True, False):
        monkeypatch.setitem(THRESHOLD, encoder, -1e9)
    who = imprint(Identity.new(base_of(model)), observe(model, "I am Mara.", tokenizer), Rule())
    prompt = tokenizer.encode(tokenizer.chat([{"role": "user", "content": "Who?"}]))
    mind = recall(model, who, prompt, tokenizer)
    around = introducing(body_of(model), mind, tokenizer)
    rest = [int(t) for i, t in enumerate(mind.imprints.token) if i not in around]
    assert tokenizer.decode(rest) == "I am Mara."
    seen = moved_by(model, mind, prompt, tokenizer.encode("M"), tokenizer=tokenizer)
    (frame,) = (m for m in seen.movers if m.kind == "frame")
    assert frame.source == ""
    assert introducing(body_of(model), who, tokenizer) == ()


def test_nobody_moves_nothing(opened: tuple[Model, Tokenizer]):
    model, tokenizer = opened
    seen = moved_by(model, Identity.new(base_of(model)), tokenizer.encode("a"), tokenizer.encode("bc"))
    assert seen.nats == (0.0, 0.0)
    assert seen.most(0) is None
    assert kl(torch.zeros(3), torch.zeros(3)) == 0
