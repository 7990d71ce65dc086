"""Nats of an answer: over all that may have come to mind, as it would be drawn."""

from __future__ import annotations

import math

import pytest
import torch
from lives import letters, nobody, says, speaking
from torch import Tensor

from regard.errors import RegardError
from regard.identity import Identity, Rule, imprint, living, observe, surprisal
from regard.models.base import Model


@pytest.fixture(scope="module")
def model() -> Model:
    return speaking()


def plain(model: Model, who: Identity | None, prompt: list[int], answer: list[int]) -> Tensor:
    """The same by one forward."""
    with torch.no_grad(), living(model, who):
        logs = model(torch.tensor([prompt + answer])).logits[0].float().log_softmax(-1)
    return -logs[len(prompt) - 1 : -1].gather(-1, torch.tensor(answer)[:, None])[:, 0]


def told(model: Model, text: str) -> Identity:
    return imprint(nobody(model), observe(model, text, letters(), source="a test"), Rule(episodes=False))


def test_of_somebody_who_holds_no_episodes_it_is_that_of_a_forward(model: Model) -> None:
    prompt, answer = letters().encode(letters().chat(says("My cat?"))), letters().encode("Mochi", bos=False)
    for who in (None, told(model, "My cat is called Mochi.")):
        found = surprisal(model, prompt, "Mochi", identity=who, tokenizer=letters())
        torch.testing.assert_close(found, plain(model, who, prompt, answer), atol=1e-4, rtol=1e-4)
        assert torch.equal(found, surprisal(model, prompt, answer, identity=who, tokenizer=letters()))


def test_several_minds_are_a_mixture_whose_parts_add_up(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, answer = letters().encode(letters().chat(says("My cat?"))), letters().encode("Mochi", bos=False)
    one, other = told(model, "My cat is called Mochi."), told(model, "The boat leaves at nine, from the quay.")
    monkeypatch.setattr("regard.identity.scoring.minds", lambda *_given, **_named: [(one, 0.75), (other, 0.25)])
    found = surprisal(model, prompt, answer, identity=one, tokenizer=letters())
    a, b = (plain(model, who, prompt, answer).double() for who in (one, other))
    whole = -math.log(0.75 * math.exp(-float(a.sum())) + 0.25 * math.exp(-float(b.sum())))
    assert float(found.sum()) == pytest.approx(whole, abs=1e-3)
    assert float(found[0]) == pytest.approx(-math.log(0.75 * math.exp(-float(a[0])) + 0.25 * math.exp(-float(b[0]))), abs=1e-3)
    assert abs(float(a.sum() - b.sum())) > 0.01, "two that say the same show nothing"


def test_no_answer_has_no_surprise(model: Model) -> None:
    with pytest.raises(RegardError, match="empty answer"):
        surprisal(model, [1, 2], "", tokenizer=letters())
