"""Whoever speaks says the same with guesses from their own words as without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lives
import pytest
import torch
from lives import TEXT, letters, speaking

from regard.identity import Person, Rule, generate
from regard.identity.body import base_of
from regard.identity.speaking import living, own_words
from regard.models import Sampling
from regard.models.decode.generate import logits_of
from regard.models.decode.speculate import Speculation


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("beta", [None, 2.0])
@pytest.mark.parametrize("name", lives.MODELS)
def test_an_identity_says_the_same_with_guesses(name: str, beta: float | None, temperature: float) -> None:
    model = lives.MODELS[name]()
    a, b = (lives.someone(base_of(model), seed) for seed in (1, 2))
    sampling = Sampling(max_tokens=20, temperature=temperature, seed=3)
    for who, prompts in ((a, [TEXT]), ([a, None, b], [TEXT] * 3), (None, [TEXT])):
        with living(model, who, beta=beta):
            plain = generate(model, prompts, sampling)
            said = plain.tokens[0]
            out = generate(model, prompts, sampling, speculate=Speculation(5, ((*TEXT, *said[:7], 63, *said[8:]),)))
        assert out.tokens == plain.tokens
        assert out.drafted is not None
        # Rows that say different things have a guess in common only by chance.
        assert len(prompts) > 1 or sum(out.accepted or ()) > 0


def test_own_words_are_runs_of_imprints_and_episodes() -> None:
    model = lives.llama()
    who = lives.someone(base_of(model), 1)
    assert len(who.imprints) == 5
    token, position = (torch.tensor(x, dtype=torch.int32) for x in ([7, 8, 9, -1, 3], [0, 1, 5, 6, 7]))
    who = replace(who, imprints=replace(who.imprints, token=token, position=position), episodes=())
    # One beside a gap, and one behind what was merged of several, stand alone: nothing is looked up by a single token.
    assert own_words(who) == [(7, 8)]
    said = [lives.episode(seed) for seed in (1, 2)]
    assert own_words(replace(who, episodes=tuple(said)))[1:] == [tuple(e.tokens.tolist()) for e in said]


def test_a_person_answers_the_same_with_guesses(tmp_path: Path) -> None:
    with Person("mara", speaking(), letters(), rule=Rule(keep="shock"), store=tmp_path / "people.db") as mara:
        mara.tell("I live in Porto and my cat is called Mochi.")
        asked: dict[str, Any] = {"max_tokens": 12}
        plain = mara.ask("Who is my cat?", **asked)
        assert mara.ask("Who is my cat?", speculate="lookup", **asked) == plain
        assert "".join(mara.ask("Who is my cat?", speculate=3, stream=True, **asked)) == plain


@pytest.mark.parametrize("name", lives.MODELS)
def test_an_identity_reads_bytes_as_it_reads_numbers(name: str) -> None:
    model = lives.MODELS[name]()
    who = lives.someone(base_of(model), 1)
    said = generate(model, TEXT, Sampling(max_tokens=8, logprobs=0), identity=who)
    text = [*TEXT, *said.tokens[0]]
    with living(model, who):
        exact, coarse, bare = logits_of(model, text), logits_of(model, text, cache="int8"), None
    bare = logits_of(model, text)
    assert (exact - coarse).abs().mean() < 0.25 * (exact - bare).abs().mean()
    guessed = generate(model, TEXT, Sampling(max_tokens=8), identity=who, cache="int8", speculate="lookup")
    assert guessed.tokens == generate(model, TEXT, Sampling(max_tokens=8), identity=who, cache="int8").tokens
