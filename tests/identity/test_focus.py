"""Which words of what came to mind are looked at more: those of the sentence that fits the question best, and only where it is sure."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from lives import letters, nobody, speaking

from regard.identity import Identity, Rule, imprint, observe
from regard.identity.body import body_of
from regard.identity.episodes import Episode
from regard.identity.packed import Packed
from regard.identity.read.finding import finder_of
from regard.identity.read.focus import FOCUS, focus
from regard.identity.read.recall import SURE, sureness
from regard.identity.read.slots import slots_of
from regard.models.base import Model

ASKED = torch.tensor([1.0, 0.0])


@pytest.fixture(scope="module")
def model() -> Model:
    return speaking()


def told(model: Model, *texts: str) -> Identity:
    me = nobody(model)
    for text in texts:
        me = imprint(me, observe(model, text, letters(), source="a test"), Rule(keep=None))
    return me


def meant(episode: Episode, *cosines: float) -> Episode:
    """The same, of which all and each sentence is so near to what is asked."""
    rows = torch.tensor([[c, (1 - c * c) ** 0.5] for c in cosines])
    return replace(episode, meaning=Packed.of(F.normalize(rows, dim=-1)), encoder="plane")


def looked_at(episodes: list[Episode]) -> list[dict[str, float]]:
    """The runs of letters that are looked at alike, and by how much."""
    out = list[dict[str, float]]()
    for e, more in zip(episodes, focus(episodes, ASKED, letters()), strict=True):
        assert len(more) == len(e)
        text, runs = letters().decode(e.tokens.tolist()), dict[str, float]()
        for value in more.unique().tolist():
            runs["".join(c for c, x in zip(text, more.tolist(), strict=True) if x == value).strip()] = round(value, 2)
        out.append(runs)
    return out


def test_the_sentence_that_fits_best_is_looked_at_most(model: Model) -> None:
    (e,) = told(model, "The bus was late. My cat is Mochi. It rains here.").episodes
    (runs,) = looked_at([meant(e, 0.5, 0.1, 0.9, 0.2)])
    assert runs["My cat is Mochi."] == pytest.approx(FOCUS, abs=0.02)
    assert runs["The bus was late. It rains here."] == 0
    (even,) = looked_at([meant(e, 0.5, 0.1, 0.9, 0.7)])
    assert 0 < even["It rains here."] < FOCUS


def test_of_one_sentence_nothing_stands_out(model: Model) -> None:
    (e,) = told(model, "My cat is called Mochi.").episodes
    assert not focus([meant(e, 0.9)], ASKED, letters())[0].any()


def test_turns_are_weighed_against_one_another(model: Model) -> None:
    first, second = told(model, "My cat is Mochi.", "The bus was late. It rains.").episodes
    one, other = looked_at([meant(first, 0.8), meant(second, 0.3, 0.2, 0.1)])
    assert list(one.values()) == [pytest.approx(FOCUS, abs=0.02)]
    assert set(other.values()) == {0.0}


def test_an_episode_from_before_sentences_had_a_meaning_is_one(model: Model) -> None:
    (e,) = told(model, "The bus was late. My cat is Mochi.").episodes
    assert not focus([meant(e, 0.9)], ASKED, letters())[0].any()


def test_more_sentences_than_have_a_meaning_belong_to_the_last_that_has(model: Model) -> None:
    (e,) = told(model, "It is hot. My cat is Mochi. My hat is red. The end of it.").episodes
    (runs,) = looked_at([meant(e, 0.5, 0.1, 0.9)])
    assert runs["My cat is Mochi. My hat is red. The end of it."] == pytest.approx(FOCUS, abs=0.02)


def test_late_layers_look_more_and_the_words_around_are_as_they_were(model: Model) -> None:
    me, body = told(model, "My cat is Mochi."), body_of(model)
    finder, prompt = finder_of(body, letters()), letters().encode(letters().chat([{"role": "user", "content": "cat?"}]))
    more = torch.arange(float(len(me.episodes[0])))
    plain, lower = (slots_of(body, finder, me, list(me.episodes), prompt, (), x) for x in ([], [more]))
    added, before = lower.weight - plain.weight, finder.frame.around(prompt)[0]
    at = slice(len(before), len(before) + len(more))
    assert torch.allclose(added[-1, :, at], more.expand(added.shape[1], -1), atol=1e-5)
    assert not added[0].any()
    assert not added[..., : at.start].any()
    assert not added[..., at.stop :].any()


def test_where_it_is_not_sure_nothing_is_looked_at_more() -> None:
    assert sureness((0.2, SURE)) == 0
    assert sureness((SURE + 0.25, -3.0)) == pytest.approx(0.25)
    assert sureness((9.0,)) == 1
