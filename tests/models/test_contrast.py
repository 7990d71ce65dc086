"""Words of somebody, held against those of the model by itself: the definition, every way of decoding, and nothing where nobody asks for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import lives
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import SpecError
from regard.identity import generate, stream
from regard.identity.body import base_of
from regard.identity.speaking import living, read_by
from regard.identity.state import LEAN, Identity, Recollection
from regard.models import Sampling
from regard.models.base import Model
from regard.models.decode import native
from regard.models.decode.contrast import BOUND, Contrasted, contrasted
from regard.models.decode.prepare import prepare
from regard.models.decode.rows import OneByOne, finished, rows_of

PROMPTS = [[5, 9, 11, 3, 8, 60, 2], [7, 3, 30, 21, 9, 14, 2, 33, 50], [40], [12, 4, 4, 31]]
MORE = 8


@pytest.fixture(params=["llama", "gpt2", "llama, windowed"])
def model(request: pytest.FixtureRequest) -> Model:
    return lives.MODELS[request.param]()


def mind(model: Model, seed: int = 1, beside: Identity | None = None) -> Recollection:
    """Somebody to whom something has come."""
    someone = lives.someone(base_of(model), seed, rank=2)
    parts = {f.name: getattr(someone, f.name) for f in fields(Identity) if f.name != "episodes"}
    return Recollection(**parts, head=1, chosen=(0,), coherence=(2.0,), sure=1.0, beside=beside)


def held_against_another(model: Model) -> Recollection:
    """Somebody whose words lean away from those of another, and not from the model's own."""
    return mind(model, 1, beside=mind(model, 7))


@torch.no_grad()
def defined(model: Model, who: Identity | None, prompt: list[int], contrast: float) -> list[int]:
    """Token by token, from whole forwards of both."""
    said = list(prompt)
    for _ in range(MORE):
        with living(model, who):
            a = model(torch.tensor([said])).logits[0, -1].log_softmax(-1)
        with living(model, who.beside if isinstance(who, Recollection) else None):
            b = model(torch.tensor([said])).logits[0, -1].log_softmax(-1)
        said.append(int((a + contrast * (a - b).clamp(-BOUND, BOUND)).argmax()))
    return said[len(prompt) :]


def said(model: Model, who: Any, prompts: Any, contrast: float | None = None, **how: Any) -> list[list[int]]:
    return generate(model, prompts, Sampling(MORE, contrast=contrast), identity=who, **how).tokens


@pytest.mark.parametrize("made", [mind, held_against_another])
@pytest.mark.parametrize("contrast", [None, 0.0, 0.5, 2.0])
def test_what_is_said_is_the_definition(model: Model, contrast: float | None, made: Callable[[Model], Recollection]):
    who = made(model)
    for prompt in PROMPTS:
        expected = defined(model, who, prompt, LEAN if contrast is None else contrast)
        assert said(model, who, prompt, contrast)[0] == expected
    plain, leaning = (defined(model, who, PROMPTS[0], c) for c in (0.0, 2.0))
    assert plain != leaning, "the case is not trivial"


def test_only_what_came_to_mind_leans_by_itself(model: Model):
    someone = lives.someone(base_of(model), 1, rank=2)
    assert said(model, someone, PROMPTS[0])[0] == defined(model, someone, PROMPTS[0], 0.0)
    assert said(model, someone, PROMPTS[0], 2.0)[0] == defined(model, someone, PROMPTS[0], 2.0)
    assert said(model, None, PROMPTS[0], 2.0)[0] == defined(model, None, PROMPTS[0], 0.0)


@pytest.mark.parametrize("sure", [0.0, 0.5, 1.0])
def test_words_lean_as_far_as_it_is_sure_that_they_were_asked_for(model: Model, sure: float):
    who = replace(mind(model), sure=sure)
    assert said(model, who, PROMPTS[0])[0] == defined(model, who, PROMPTS[0], sure * LEAN)
    assert said(model, who, PROMPTS[0], 2.0)[0] == defined(model, who, PROMPTS[0], 2.0)


def test_rows_of_a_batch_are_each_what_they_are_alone(model: Model):
    rows = [mind(model, 1), None, lives.someone(base_of(model), 3), held_against_another(model)]
    assert said(model, rows, PROMPTS) == [said(model, who, prompt)[0] for who, prompt in zip(rows, PROMPTS, strict=True)]


def test_words_are_held_against_whoever_stands_beside_them(model: Model):
    alone, who = mind(model), held_against_another(model)
    assert said(model, alone, PROMPTS[0], 2.0) != said(model, who, PROMPTS[0], 2.0)
    assert said(model, alone, PROMPTS[0], 0.0) == said(model, who, PROMPTS[0], 0.0)
    digests = [read_by(model, x)[1][0].digest for x in (alone, who)]  # pyright: ignore
    assert digests[0] != digests[1], "a cache that was filled beside another is not gone on with"


@pytest.mark.parametrize("how", [{}, {"cache": "int8"}, {"weights": "int8"}, {"speculate": "lookup"}, {"prefill": 2}])
@pytest.mark.parametrize("made", [mind, held_against_another])
def test_a_stream_gives_what_generate_gives(model: Model, how: dict[str, Any], made: Callable[[Model], Recollection]):
    who, prompt = made(model), PROMPTS[1]
    tokens = [t.token for t in stream(model, prompt, Sampling(MORE), identity=who, **how)]
    assert tokens == said(model, who, prompt, **how)[0]


def test_without_a_compiler_the_same_is_said(model: Model, monkeypatch: pytest.MonkeyPatch):
    who = held_against_another(model)
    expected = said(model, who, PROMPTS[0])
    monkeypatch.setattr(native, "library", lambda: None)
    assert isinstance(rows_of(prepare(model)), OneByOne)
    assert said(model, who, PROMPTS[0]) == expected


def test_whoever_lives_here_is_held_against_the_model_by_itself(model: Model):
    who, other = mind(model), lives.someone(base_of(model), 5)
    expected = defined(model, who, PROMPTS[0], LEAN)
    with living(model, other):
        assert said(model, who, PROMPTS[0])[0] == expected


def test_slots_that_may_be_refused_are_read_without_a_contrast(model: Model):
    who = mind(model)
    with living(model, who, beta=2.0):
        out = generate(model, PROMPTS[0], Sampling(MORE))
    assert len(out.tokens[0]) == MORE


def test_a_beginning_is_copied_with_what_stands_beside_it():
    model = lives.speaking()
    rows = Contrasted(rows_of(prepare(model)))
    who = held_against_another(model)
    body, reads = read_by(model, who)
    overrides = dict(zip(body.layers, reads, strict=True))  # pyright: ignore
    prompt = list(range(40))
    with torch.inference_mode():
        first, second = (rows.open(overrides, 60, 0.5) for _ in range(2))  # pyright: ignore
        expected = finished(rows.read(first, prompt))
        parts = rows.copy(first, 0, 32)
        assert parts is not None
        rows.restore(second, [parts], 32)
        assert torch.equal(finished(rows.read(second, prompt[32:])), expected)
        plain = rows.open(overrides, 60)  # pyright: ignore
        assert plain.plain is None
        assert not torch.equal(finished(rows.read(plain, prompt)), expected)


@given(st.integers(0, 10_000), st.floats(0, 3))
def test_a_contrast_is_finite_and_raises_what_somebody_adds(seed: int, contrast: float):
    g = torch.Generator().manual_seed(seed)
    a, b = (8 * torch.randn(2, 17, generator=g) for _ in range(2))
    z = contrasted(a, b, contrast)
    assert bool(torch.isfinite(z).all())
    assert torch.allclose(contrasted(a, a, contrast).softmax(-1), a.softmax(-1), atol=1e-6)
    moved = z.log_softmax(-1) - a.log_softmax(-1)
    apart = (a.log_softmax(-1) - b.log_softmax(-1)).clamp(-BOUND, BOUND)
    order = apart.argsort(-1)
    assert bool((moved.gather(-1, order).diff(dim=-1) >= -1e-4).all())


@pytest.mark.parametrize("wrong", [-0.1, float("nan"), float("inf"), "much"])
def test_a_contrast_that_is_none_is_refused(wrong: Any):
    with pytest.raises(SpecError, match="contrast"):
        Sampling(contrast=wrong)
