"""Whether what came to mind answers: the model's own reading of the question behind it, and what comes where something does, or nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lives import letters, nobody, says, speaking
from safetensors.torch import save_file
from torch import Tensor

from regard.errors import RegardError
from regard.identity import Identity, Rule, imprint, observe, recall
from regard.identity.body import body_of
from regard.identity.read import answering
from regard.identity.read import recall as recalling
from regard.identity.read.answering import Answering, LookedAt, answering_for, hidden_behind, shipped
from regard.identity.read.finding import Finder, finder_of
from regard.identity.read.recall import minds
from regard.identity.read.scores import Scores
from regard.identity.state import Recollection
from regard.models import Sampling
from regard.models.base import Model

DEPTH = 1


@pytest.fixture(scope="module")
def model() -> Model:
    return speaking()


@pytest.fixture(scope="module")
def finder(model: Model) -> Finder:
    return finder_of(body_of(model), letters())


def told(model: Model, *texts: str) -> Identity:
    me = nobody(model)
    for n, text in enumerate(texts):
        me = imprint(me, observe(model, text, letters(), source=f"test {n}"), Rule(keep=None))
    return me


def asking(question: str) -> tuple[list[int], list[int]]:
    return letters().encode(question, bos=False), letters().encode(letters().chat(says(question)))


def plain(finder: Finder, said: list[list[int]], asked: list[int], prompt: list[int]) -> Tensor:
    """The same in one forward, without anything that was read before."""
    head = finder.frame.head_alone(prompt)
    text = [*head, *finder.frame.read(said, prompt)[0], *asked]
    left = list[Tensor]()
    model = finder.body.model
    assert isinstance(model, Model)
    hook = model.get_submodule(f"blocks.{DEPTH - 1}").register_forward_hook(lambda _module, _given, out: left.append(out[0][0]))
    with torch.no_grad():
        model(torch.tensor([text]))
    hook.remove()
    return left[0][-len(asked) :]


def constant(model: Model, bias: float, weight: float = 0.0) -> Answering:
    """A map that says the same of everything, but for how far it stands behind."""
    width = model.config.width
    return Answering(DEPTH, torch.full((width,), weight), 1.0, 0.0, bias, body_of(model).base.fingerprint)


@pytest.mark.parametrize("said", [["My cat is Mochi."], ["What is it called?", "Mochi, of course."]])
def test_a_question_is_read_behind_what_came_as_in_one_text(finder: Finder, said: list[str]) -> None:
    asked, prompt = asking("What is my cat called?")
    tokens = [letters().encode(text, bos=False) for text in said]
    first = hidden_behind(finder, tokens, asked, prompt, DEPTH)
    assert first.shape == (len(asked), finder.body.model.config.width)  # pyright: ignore
    torch.testing.assert_close(first, plain(finder, tokens, asked, prompt), atol=1e-5, rtol=1e-4)
    again = hidden_behind(finder, tokens, asked, prompt, DEPTH)
    assert torch.equal(first, again), "the head is read once, and nothing that stood behind it stays"


def test_heads_of_prompts_are_held_and_let_go(finder: Finder) -> None:
    asked, _ = asking("cat?")
    tokens = [letters().encode("My cat.", bos=False)]
    for n in range(answering.BEGUN + 2):
        prompt = letters().encode(letters().chat([{"role": "system", "content": "ab" * (n + 1)}, *says("cat?")]))
        hidden_behind(finder, tokens, asked, prompt, DEPTH)
    assert len(finder.body.made["begun"]) <= answering.BEGUN


def test_log_odds_are_those_of_the_mean_of_rows_of_one_length() -> None:
    a = Answering(3, torch.tensor([1.0, -1.0]), 0.5, 0.25, 2.0, "")
    rows = torch.tensor([[3.0, 0.0], [0.0, 0.1]])
    mean = torch.tensor([2**0.5, 2**0.5]) / 2
    expected = float(mean[0] - mean[1]) + 0.5 * -2.0 + 0.25 * 4.0 + 2.0
    assert a.odds(rows, -2.0, 4.0) == pytest.approx(expected)
    assert a.odds(torch.zeros(2, 2), 0.0, 0.0) == 2.0, "nothing that is no number"


def scores_of(sizes: list[int], newer: dict[int, int] | None = None, beside: int | None = None) -> Scores:
    """Units of so many tokens, the first in rank first."""

    class Said:
        def __init__(self, n: int) -> None:
            self.n = n

        def __len__(self) -> int:
            return self.n

    rank = -torch.arange(len(sizes)).float()
    said = [Said(n) for n in sizes]
    return Scores(said, [(i,) for i in range(len(sizes))], rank, rank, True, newer or {}, beside)  # pyright: ignore


def test_the_surest_come_in_the_order_in_which_they_were_said() -> None:
    looked = LookedAt(scores_of([9, 9, 9]), {0: 3.0 - answering.CLOSE + 0.1, 1: 3.0 - answering.CLOSE - 0.1, 2: 3.0})
    assert looked.chosen(3, 100) == [0, 2]
    assert looked.chosen(1, 100) == [2]
    assert LookedAt(scores_of([9, 9]), {0: 0.1, 1: -0.1}).chosen(3, 100) == [0], "what does not answer stays away, however near"


def test_nothing_comes_where_nothing_answers() -> None:
    looked = LookedAt(scores_of([9, 9]), {0: -0.2, 1: -3.0})
    assert looked.chosen(3, 100) == []
    assert looked.best == -0.2


def test_there_is_room_for_the_surest_at_least() -> None:
    assert LookedAt(scores_of([50, 50]), {0: 1.0, 1: 1.2}).chosen(3, 60) == [1]
    assert LookedAt(scores_of([500]), {0: 1.0}).chosen(3, 60) == [0]


def test_what_corrects_comes_in_the_stead_of_what_it_corrects_where_it_answers_nearly_as_surely() -> None:
    near, far = 2.0 - answering.NEWER + 0.1, 2.0 - answering.NEWER - 0.1
    assert LookedAt(scores_of([9, 9], {0: 1}), {0: 2.0, 1: near}).chosen(3, 100) == [1]
    assert LookedAt(scores_of([9, 9], {0: 1}), {0: 2.0, 1: far}).chosen(1, 100) == [0]
    assert LookedAt(scores_of([9, 9], {0: 1}), {0: 2.0}).chosen(3, 100) == [0], "what was not looked at corrects nothing"


def test_how_likely_each_is_goes_by_how_surely_it_answers() -> None:
    (first, p), (second, q) = LookedAt(scores_of([9, 9, 9]), {0: 1.0, 1: 3.0, 2: -9.0}).likely(2)
    assert (first, second) == (1, 0)
    assert p + q == pytest.approx(1)
    assert p / q == pytest.approx(math.exp(2), rel=1e-5)
    assert LookedAt(scores_of([9]), {0: -0.1}).likely(3) == [], "nothing is likely where nothing answers"


def test_what_corrects_is_as_likely_as_what_it_corrects() -> None:
    near = 2.0 - answering.NEWER + 0.1
    (first, p), (second, _) = LookedAt(scores_of([9, 9, 9], {0: 1}), {0: 2.0, 1: near, 2: 1.0}).likely(3)
    assert (first, second) == (1, 2)
    assert p == pytest.approx(1 / (1 + math.exp(-1)))


def test_one_comes_to_mind_and_is_drawn_as_words_are(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recalling, "THRESHOLD", {True: -1e9, False: -1e9})
    monkeypatch.setattr(answering, "shipped", lambda: constant(model, 9.0))
    monkeypatch.setattr(LookedAt, "likely", lambda _self, _most: [(0, 0.6), (1, 0.4)])
    me, prompt = told(model, "My cat is called Mochi.", "The boat leaves at nine."), asking("called Mochi?")[1]

    def comes(sampling: Sampling | None, row: int = 0) -> tuple[int, ...]:
        mind = recall(model, me, prompt, letters(), sampling=sampling, row=row)
        assert isinstance(mind, Recollection)
        return mind.chosen

    assert comes(None) == comes(Sampling()) == (0,), "the likeliest"
    drawn = [comes(Sampling(temperature=1.0, seed=n)) for n in range(200)]
    assert drawn == [comes(Sampling(temperature=1.0), row=n) for n in range(200)], "a row draws by seed + row"
    assert 0.5 < drawn.count((0,)) / 200 < 0.7
    cold = [comes(Sampling(temperature=0.1, seed=n)) for n in range(50)]
    assert cold.count((0,)) > 45, "0.6^10 against 0.4^10"
    each = minds(model, me, prompt, letters())
    assert [(m.chosen, p) for m, p in each if isinstance(m, Recollection)] == [((0,), 0.6), ((1,), 0.4)]


@pytest.mark.parametrize(("bias", "comes"), [(1.0, True), (answering.ANSWERED - 2, False)])
def test_recall_brings_what_answers_and_refuses_what_does_not(
    model: Model, monkeypatch: pytest.MonkeyPatch, bias: float, comes: bool
) -> None:
    monkeypatch.setattr(recalling, "THRESHOLD", {True: -1e9, False: -1e9})
    monkeypatch.setattr(answering, "shipped", lambda: constant(model, bias))
    me = told(model, "My cat is called Mochi.", "The boat leaves at nine.")
    mind = recall(model, me, asking("called Mochi?")[1], letters())
    assert isinstance(mind, Recollection)
    assert bool(mind.chosen) is comes
    assert bool(len(mind.imprints)) is comes
    if comes:
        assert mind.sure == 1.0
        assert all(c >= 0 for c in mind.coherence)
    else:
        assert mind.sure == 0.0
        assert mind.coherence[0] < 0


def test_how_sure_it_is_goes_from_nothing_to_one(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recalling, "THRESHOLD", {True: -1e9, False: -1e9})
    monkeypatch.setattr(answering, "shipped", lambda: constant(model, answering.ANSWERED + 0.25))
    mind = recall(model, told(model, "My cat is called Mochi."), asking("called Mochi?")[1], letters())
    assert isinstance(mind, Recollection)
    assert mind.sure == pytest.approx(0.25, abs=1e-5)


def test_nobody_is_looked_at_where_nobody_asked(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_given: object) -> LookedAt:
        raise AssertionError("looked at")

    monkeypatch.setattr(recalling, "THRESHOLD", {True: 1e9, False: 1e9})
    monkeypatch.setattr(recalling, "looked_at", never)
    monkeypatch.setattr(answering, "shipped", lambda: constant(model, 9.0))
    mind = recall(model, told(model, "My cat is called Mochi."), asking("called Mochi?")[1], letters())
    assert isinstance(mind, Recollection)
    assert not mind.chosen


def test_a_map_is_of_the_base_that_it_was_fitted_on(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answering_for(body_of(model)) is None, "this model is no SmolLM2"
    monkeypatch.setattr(answering, "shipped", lambda: replace(constant(model, 0.0), fingerprint="another"))
    assert answering_for(body_of(model)) is None
    monkeypatch.setattr(answering, "shipped", lambda: constant(model, 0.0))
    assert answering_for(body_of(model)) is not None


def test_the_map_that_came_with_the_package_is_whole() -> None:
    mine = shipped()
    assert (mine.depth, tuple(mine.weight.shape)) == (18, (576,))
    assert bool(mine.weight.any())
    assert mine.behind > 0
    assert mine.coherence > 0
    assert len(mine.fingerprint) == 64


@pytest.mark.parametrize(
    "numbers",
    [
        {"weight": torch.full((4,), torch.nan), "others": torch.zeros(3)},
        {"weight": torch.zeros(2, 2), "others": torch.zeros(3)},
        {"weight": torch.zeros(4), "others": torch.zeros(2)},
        {"weight": torch.zeros(4)},
    ],
)
def test_a_damaged_map_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: dict[str, Tensor]) -> None:
    file = tmp_path / "answering.safetensors"
    save_file(numbers, file, metadata={"about": '{"depth": 1, "fingerprint": "x"}'})
    monkeypatch.setattr(answering, "FILE", file)
    answering.shipped.cache_clear()
    try:
        with pytest.raises(RegardError):
            shipped()
        file.write_bytes(file.read_bytes()[:40])
        with pytest.raises(RegardError):
            shipped()
    finally:
        monkeypatch.undo()
        answering.shipped.cache_clear()
    assert shipped().depth == 18
