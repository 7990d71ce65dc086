"""Guessed tokens change how soon a text is there, and nothing of the text: greedy or sampled, whatever the mechanism and the row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_generate import PROMPT, SPECS, Letters, gpt2, llama, stretched

from regard.errors import SpecError
from regard.models import FAMILIES, Model, generate, stream
from regard.models.decode.cache import static_caches
from regard.models.decode.generate import Sampling, Token
from regard.models.decode.prepare import prepare
from regard.models.decode.speculate import LONGEST, Lookup, Speculation

DRAWN = Sampling(max_tokens=24, temperature=0.9, top_p=0.95, seed=5, logprobs=2)
GREEDY = Sampling(max_tokens=24, logprobs=2)


def with_slips(prompt: list[int], tokens: list[int], every: int = 5) -> tuple[int, ...]:
    """What was written, with a wrong token now and then: guesses from it are right for a while."""
    return (*prompt, *((t + 1) % 61 if i % every == every - 1 else t for i, t in enumerate(tokens)))


def assert_same(model: Model, prompt: Any, sampling: Sampling, every: int = 5, exact: bool = True, **more: Any) -> None:
    plain = generate(model, prompt, sampling, **more)
    rows = [prompt] if isinstance(prompt[0], int) else prompt
    texts = tuple(with_slips(p, t, every) for p, t in zip(rows, plain.tokens, strict=True))
    out = generate(model, prompt, sampling, speculate=Speculation(6, texts), **more)
    assert (out.tokens, out.finish, out.text) == (plain.tokens, plain.finish, plain.text)
    assert out.drafted is not None
    assert out.accepted is not None
    assert 0 < sum(out.accepted) < sum(out.drafted)
    if plain.logprobs is not None:
        assert out.logprobs is not None
        for a, b in zip(out.logprobs, plain.logprobs, strict=True):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=0 if exact else 1e-3, atol=0 if exact else 1e-4)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "sampled"])
@pytest.mark.parametrize("spec", SPECS)
def test_every_mechanism_writes_what_it_writes_one_by_one(spec: str, sampling: Sampling) -> None:
    # Of the others a chunk is multiplied in another order than a token: equal to rounding.
    assert_same(llama(spec), PROMPT, sampling, exact=False)


def test_angles_that_grow_with_the_text_are_not_moved_by_guesses() -> None:
    for seed in range(4):
        model = stretched(seed)
        plain = generate(model, PROMPT, GREEDY)
        texts = (with_slips(PROMPT, plain.tokens[0]),)
        assert generate(model, PROMPT, GREEDY, speculate=Speculation(6, texts)).logprobs == plain.logprobs


@pytest.mark.parametrize("name", ["gpt2", "ngpt", "recurrent", "routing"])
def test_every_family_writes_what_it_writes_one_by_one(name: str) -> None:
    sizes = {"vocabulary": 61, "width": 24, "depth": 2, "heads": 4}
    torch.manual_seed(0)
    model = FAMILIES[name].config(**FAMILIES[name].settings(sizes)).build().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3) if p.ndim > 1 else None
    assert_same(model, PROMPT, DRAWN, exact=False)


@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "sampled"])
def test_where_c_multiplies_the_numbers_are_the_same_too(weights: Any, sampling: Sampling) -> None:
    assert_same(llama(), PROMPT, sampling, weights=weights)


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "sampled"])
def test_rows_of_a_batch_go_on_as_far_as_all_of_them_were_guessed(make: Any, sampling: Sampling) -> None:
    assert_same(make(), [PROMPT, PROMPT[::-1], PROMPT[:2]], sampling, every=9, exact=False)


@given(
    seed=st.integers(0, 1000),
    limit=st.integers(1, 20),
    tokens=st.integers(1, 30),
    temperature=st.sampled_from([0.0, 0.7]),
    penalty=st.sampled_from([1.0, 1.3]),
    stops=st.lists(st.integers(0, 60), max_size=3),
)
def test_any_settings_give_the_same_text(
    seed: int, limit: int, tokens: int, temperature: float, penalty: float, stops: list[int]
) -> None:
    model = _MODEL
    sampling = Sampling(
        tokens, temperature, repetition_penalty=penalty, presence_penalty=penalty - 1, seed=seed, stop_ids=tuple(stops)
    )
    prompt = torch.randint(0, 61, (7,), generator=torch.Generator().manual_seed(seed)).tolist() * 2
    plain = generate(model, prompt, sampling)
    texts = (with_slips(prompt, plain.tokens[0], 3), tuple(plain.tokens[0]))
    for speculate in (limit, Speculation(limit, texts)):
        out = generate(model, prompt, sampling, speculate=speculate)
        assert (out.tokens, out.finish) == (plain.tokens, plain.finish)


_MODEL = llama()


def test_stop_texts_and_streams_see_the_same_tokens() -> None:
    plain = generate(_MODEL, PROMPT, GREEDY, tokenizer=Letters())
    assert plain.text is not None
    sampling = Sampling(max_tokens=24, stop=(plain.text[0][9:11],))
    assert_same(_MODEL, PROMPT, sampling, tokenizer=Letters())
    seen: list[Token] = []
    texts = (with_slips(PROMPT, plain.tokens[0]),)
    out = generate(_MODEL, PROMPT, GREEDY, tokenizer=Letters(), speculate=Speculation(6, texts), on_token=seen.append)
    again = list(stream(_MODEL, PROMPT, GREEDY, tokenizer=Letters(), speculate=Speculation(6, texts)))
    assert seen == again
    assert "".join(t.text for t in seen) == plain.text[0]
    assert out.accepted == [sum(t.guessed for t in seen)]
    assert out.accepted_share == sum(t.guessed for t in seen) / (out.drafted or [0])[0]


def test_fewer_steps_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, steps = prepare(_MODEL), list[int]()
    call = type(decoder).__call__

    def counted(self: Any, tokens: Any, *args: Any, **kwargs: Any) -> Any:
        steps.append(tokens.shape[1])
        return call(self, tokens, *args, **kwargs)

    monkeypatch.setattr(type(decoder), "__call__", counted)
    plain = generate(_MODEL, PROMPT, GREEDY)
    assert len(steps) == 24
    steps.clear()
    out = generate(_MODEL, PROMPT, GREEDY, speculate=Speculation(8, ((*PROMPT, *plain.tokens[0]),)))
    assert out.tokens == plain.tokens
    assert out.accepted is not None
    assert len(steps) == 24 - out.accepted[0] < 12
    assert max(steps) > 5


def test_nothing_is_guessed_where_nothing_repeats() -> None:
    out = generate(_MODEL, list(range(20)), Sampling(max_tokens=1), speculate="lookup")
    assert (out.drafted, out.accepted, out.accepted_share) == ([0], [0], None)
    assert generate(_MODEL, PROMPT, Sampling(max_tokens=1)).drafted is None


def test_guesses_come_from_the_latest_place_and_go_round_in_circles() -> None:
    lookup = Lookup([[1, 2, 3, 4], [9, 1, 2, 7, 8, 1, 2]])
    assert lookup.guess(2) == [7, 8]
    lookup.push(3)
    assert lookup.guess(9) == [4]  # where the text that it stood in ended
    circle = Lookup([[5, 6, 5, 6]])
    assert circle.guess(5) == [5, 6, 5, 6, 5]


def test_longer_matches_go_first() -> None:
    text = [*range(LONGEST + 1), 50, 99, LONGEST - 1, LONGEST, 60]
    assert Lookup([[*text, *range(LONGEST + 1)]]).guess(1) == [50]
    assert Lookup([[*text, LONGEST - 1, LONGEST]]).guess(1) == [60]


@pytest.mark.parametrize("bad", [0, -1, 257, "prompt", 1.5, True, [4], Speculation])
def test_what_is_no_number_of_tokens_is_refused(bad: Any) -> None:
    with pytest.raises(SpecError, match="speculate="):
        generate(_MODEL, PROMPT, speculate=bad)


def test_a_cache_gives_back_its_last_tokens_without_moving() -> None:
    (cache,) = static_caches(1, 16)
    first, second = (torch.randn(1, 2, n, 4) for n in (5, 3))
    whole = cache.grown(first, first).grown(second, second)
    short = whole.shortened(6)
    assert short is not None
    assert len(short) == 6
    again = short.grown(second, second)
    assert again.k is whole.k
    assert torch.equal(again.keys(), torch.cat([first, second[:, :, :1], second], 2))
    assert whole.shortened(8) is whole
    carried = type(cache)(carry=torch.zeros(1), written=4)
    assert carried.shortened(3) is None
