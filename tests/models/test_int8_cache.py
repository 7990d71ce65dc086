"""Keys and values in bytes: near what they were, the same however tokens came, and a quarter of the room."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_generate import PROMPT, SPECS, gpt2, llama

from regard.errors import SpecError, StateError
from regard.models import Sampling, generate, perplexity, stream
from regard.models.decode.cache import static_caches
from regard.models.decode.generate import logits_of
from regard.models.decode.int8_cache import GROUP, Bytes, int8_caches
from regard.models.decode.speculate import Speculation


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 4), st.integers(1, 80)),
    scale=st.sampled_from([1e-20, 1e-3, 1.0, 300.0]),
    seed=st.integers(0, 1 << 20),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_every_number_is_within_half_a_step_of_what_it_was(
    shape: tuple[int, int, int, int], scale: float, seed: int, dtype: torch.dtype
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype) * scale
    kept = Bytes.of(x)
    back = kept.numbers(dtype)
    assert back.shape == x.shape
    assert back.dtype == dtype
    for start in range(0, shape[3], GROUP):
        here, there = x[..., start : start + GROUP], back[..., start : start + GROUP]
        largest = here.abs().amax(-1, keepdim=True)
        # Half a step; a scale that bfloat16 rounded down cuts the largest number by as much again.
        assert ((here - there).abs() <= largest / 127 + 1e-28).all()


def test_what_is_not_finite_comes_out_as_nan_in_its_group_alone() -> None:
    x = torch.ones(1, 1, 2, 2 * GROUP)
    x[0, 0, 0, 3], x[0, 0, 1, GROUP] = float("inf"), float("nan")
    back = Bytes.of(x).numbers(torch.float32)
    assert back.isnan().view(2, 2, GROUP).all(-1).tolist() == [[True, False], [False, True]]
    torch.testing.assert_close(back[0, 0, 0, GROUP:], torch.ones(GROUP), rtol=1e-2, atol=0)


@pytest.mark.parametrize("spec", SPECS)
def test_one_by_one_gives_what_the_whole_gives(spec: str) -> None:
    model = llama(spec)
    out = generate(model, PROMPT, Sampling(max_tokens=8, logprobs=0), prefill=2, cache="int8")
    text = [*PROMPT, *out.tokens[0]]
    rates = logits_of(model, text, cache="int8")[len(PROMPT) - 1 : -1].log_softmax(-1)
    assert rates.argmax(-1).tolist() == out.tokens[0]
    assert out.logprobs is not None
    # Within a layer the bytes are the same; what the layer before it left differs in its last bits, and may round to the next byte.
    torch.testing.assert_close(torch.tensor(out.logprobs[0]), rates.amax(-1), rtol=1e-2, atol=2e-2)


def test_it_stays_near_what_float32_gives() -> None:
    model, text = llama(), [*PROMPT, *range(20)]
    exact, coarse = logits_of(model, text), logits_of(model, text, cache="int8")
    apart = (exact - coarse).abs().max() / exact.abs().max()
    assert 0 < apart < 0.05
    assert perplexity(model, text, cache="int8") == pytest.approx(perplexity(model, text), rel=0.05)


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_guesses_and_streams_give_the_same_text(make: Any, weights: Any) -> None:
    model, sampling = make(), Sampling(max_tokens=16, temperature=0.7, seed=2)
    said = generate(model, PROMPT, sampling, weights=weights, cache="int8").tokens[0]
    guessed = generate(
        model, PROMPT, sampling, weights=weights, cache="int8", speculate=Speculation(5, ((*PROMPT, *said[:6], 60, *said[7:]),))
    )
    assert guessed.tokens == [said]
    assert sum(guessed.accepted or ()) > 0
    assert [t.token for t in stream(model, PROMPT, sampling, weights=weights, cache="int8")] == said


def test_rows_beside_each_other_stay_near_what_they_are_alone() -> None:
    model, prompts = llama(), [PROMPT, PROMPT[::-1], PROMPT[:2]]
    alone = [generate(model, p, Sampling(max_tokens=1, logprobs=0), cache="int8").logprobs for p in prompts]
    together = generate(model, prompts, Sampling(max_tokens=1, logprobs=0), cache="int8").logprobs
    torch.testing.assert_close(torch.tensor(together), torch.tensor([x[0] for x in alone if x]), rtol=1e-2, atol=2e-2)


def test_two_ways_on_from_one_cache_do_not_meet() -> None:
    (cache,) = int8_caches(1, 4)
    x, y, z = (torch.randn(1, 2, n, 40) for n in (3, 2, 2))
    begun = cache.grown(x, x)
    one, other = begun.grown(y, y), begun.grown(z, z)
    assert len(one) == len(other) == 5
    assert torch.equal(one.keys()[:, :, :3], other.keys()[:, :, :3])
    assert torch.equal(one.values()[:, :, 3:], Bytes.of(y).numbers(torch.float32))
    assert torch.equal(other.keys()[:, :, 3:], Bytes.of(z).numbers(torch.float32))
    short = one.shortened(4)
    assert short is not None
    assert torch.equal(short.grown(z, z).keys()[:, :, 4:], Bytes.of(z).numbers(torch.float32))
    with pytest.raises(StateError, match="is to grow by"):
        begun.grown(y[..., :8], y[..., :8])


def test_it_takes_a_quarter_of_the_room() -> None:
    k = torch.randn(1, 3, 100, 64)
    plain, coarse = (caches(1, 100)[0].grown(k, k) for caches in (static_caches, int8_caches))
    assert plain.k is not None
    assert 3.7 < 2 * plain.k.nbytes / coarse.nbytes < 3.8  # type: ignore[union-attr]


def test_bfloat16_models_keep_bytes_too() -> None:
    model = llama().to(torch.bfloat16)
    assert len(generate(model, PROMPT, Sampling(max_tokens=4), cache="int8").tokens[0]) == 4


@pytest.mark.parametrize("bad", ["int4", None, 8, True, ["int8"]])
def test_an_unknown_cache_is_refused(bad: Any) -> None:
    with pytest.raises(SpecError, match="choose 'float32'"):
        generate(llama(), PROMPT, cache=bad)
