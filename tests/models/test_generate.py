"""Decoding: cached equals uncached for every mechanism that can be decoded, and a seed fixes the text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import State
from regard.errors import NumericsError, RegardError, ShapeError, SpecError
from regard.models import FAMILIES, GPT2Config, LlamaConfig, generate, perplexity
from regard.models.base import Model
from regard.models.decode.generate import Sampling, Token, logits_of, stream
from regard.models.generation_info import GenerationInfo
from regard.position import Rope
from regard.selection import SELECTIONS

LLAMA = LlamaConfig(vocabulary=61, width=24, depth=2, heads=6, key_heads=2, hidden=40, context=64)
GPT = GPT2Config(vocabulary=61, width=24, depth=2, heads=4, context=64)
SPECS = [
    *(f"dot | {s}" for s in SELECTIONS if s not in ("energy", "gd", "abstain", "pointer", "topk", "entmax")),
    "dot | topk(3)", "dot | entmax(1.5)", "euclidean | gd", "cosine | softmax", "euclidean | softmax | alibi",
    "abstain(softmax, null_logit=0.5)", "dot | softmax | sinusoidal", "dot | monotonic(hard)",
]  # fmt: skip
PROMPT = [5, 17, 3, 40, 8]


class Letters:
    """Token i is the letter i."""

    eos_ids = (60,)

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 33 for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(33 + i) for i in ids)


def llama(spec: str = "dot | softmax", seed: int = 0) -> Model:
    torch.manual_seed(seed)
    model = dataclasses.replace(LLAMA, attention=spec).build().eval()
    for p in model.parameters():  # larger than at the start of training, so that attention has something to choose
        torch.nn.init.normal_(p, std=0.3) if p.ndim > 1 else None
    return model


def gpt2(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    model = GPT.build().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3) if p.ndim > 1 else None
    return model


@torch.no_grad()
def uncached(model: Model, prompt: list[int], n: int, states: State | None = None) -> tuple[list[int], Tensor]:
    """The definition: the whole text through the model, again for each token."""
    tokens, rows = list(prompt), list[Tensor]()
    for _ in range(n):
        rows.append(model(torch.tensor([tokens]), states=states).logits[0, -1])
        tokens.append(int(rows[-1].argmax()))
    return tokens[len(prompt) :], torch.stack(rows)


@pytest.mark.parametrize("spec", SPECS)
def test_cached_decoding_equals_uncached_for_every_mechanism(spec: str):
    model = llama(spec)
    wanted, logits = uncached(model, PROMPT, 8)
    out = generate(model, PROMPT, Sampling(max_tokens=8, logprobs=0), prefill=2)
    assert out.tokens == [wanted]
    assert out.logprobs is not None
    rates = torch.log_softmax(logits, -1)[torch.arange(8), torch.tensor(wanted)]
    torch.testing.assert_close(torch.tensor(out.logprobs[0]), rates, rtol=1e-3, atol=1e-4)


def test_cached_decoding_equals_uncached_with_a_trace():
    model = llama("trace | softmax")
    state = State(trace=torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1)) * 0.3)
    bent, _ = uncached(model, PROMPT, 8, state)
    straight, _ = uncached(model, PROMPT, 8, State(trace=torch.zeros(2, 4, 4)))
    assert bent != straight
    assert generate(model, PROMPT, Sampling(max_tokens=8), states=state).tokens == [bent]


def test_window_of_the_model_holds_in_decoding():
    torch.manual_seed(0)
    model = dataclasses.replace(LLAMA, window=3).build().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3) if p.ndim > 1 else None
    assert generate(model, PROMPT, Sampling(max_tokens=8)).tokens == [uncached(model, PROMPT, 8)[0]]


@pytest.mark.parametrize("prefill", [1, 2, 3, 512])
def test_chunks_of_the_prompt_do_not_change_the_text(prefill: int):
    model = llama()
    assert generate(model, PROMPT, Sampling(max_tokens=6), prefill=prefill).tokens == [uncached(model, PROMPT, 6)[0]]


@pytest.mark.parametrize("model", [llama(), llama("cosine | entmax(1.5)"), llama("dot | selective"), gpt2()])
def test_each_row_of_a_batch_is_what_it_is_alone(model: Model):
    prompts = [PROMPT, [9], [1, 2, 3, 4, 5, 6, 7], [30, 31]]
    together = generate(model, prompts, Sampling(max_tokens=6), prefill=3)
    assert together.tokens == [uncached(model, p, 6)[0] for p in prompts]


def stretched(seed: int = 0) -> Model:
    """Angles that grow with the text, from its sixth token on."""
    torch.manual_seed(seed)
    model = dataclasses.replace(LLAMA, rope=Rope(scaling="dynamic", factor=4.0, original=6)).build().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3) if p.ndim > 1 else None
    return model


@pytest.mark.parametrize("seed", range(4))
def test_a_row_whose_angles_grow_with_the_text_is_what_it_is_alone(seed: int):
    model, s = stretched(seed), Sampling(max_tokens=9, logprobs=0)
    prompts = [PROMPT * 3, [9], [30, 31]]
    together, alone = generate(model, prompts, s), [generate(model, p, s) for p in prompts]
    assert together.tokens == [x.tokens[0] for x in alone]
    assert together.logprobs is not None
    for row, x in zip(together.logprobs, alone, strict=True):
        assert x.logprobs is not None
        assert row == pytest.approx(x.logprobs[0], abs=1e-4)


def test_same_seed_gives_the_same_text_and_another_seed_another():
    model = llama()
    s = Sampling(max_tokens=20, temperature=1.5, top_p=0.95, seed=3)
    first = generate(model, PROMPT, s).tokens
    assert generate(model, PROMPT, s).tokens == first
    assert generate(model, PROMPT, dataclasses.replace(s, seed=4)).tokens != first


def test_a_row_draws_alike_whoever_else_is_in_the_batch():
    model = llama()
    s = Sampling(max_tokens=10, temperature=1.2, seed=7)
    alone = generate(model, [PROMPT], s).tokens[0]
    assert generate(model, [PROMPT, [1, 2, 3], [4]], s).tokens[0] == alone


def test_global_random_state_is_left_alone():
    model = llama()
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    generate(model, PROMPT, Sampling(max_tokens=3, temperature=1.0))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_sampling_follows_the_model_distribution():
    model = llama()
    with torch.no_grad():
        wanted = torch.softmax(model(torch.tensor([PROMPT])).logits[0, -1], -1)
    out = generate(model, [PROMPT] * 400, Sampling(max_tokens=1, temperature=1.0)).tokens
    found = torch.bincount(torch.tensor([t[0] for t in out]), minlength=61) / 400
    assert float((found - wanted).abs().sum()) < 0.5
    assert float(wanted.max()) < 0.9


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        (Sampling(temperature=1.0, top_k=2), {0, 1}),
        (Sampling(temperature=1.0, top_p=0.6), {0, 1}),
        (Sampling(temperature=1.0, min_p=0.5), {0, 1}),
        (Sampling(temperature=1.0, top_k=3, min_p=0.9), {0}),
        (Sampling(temperature=1.0), {0, 1, 2, 3}),
    ],
)
def test_cuts_keep_exactly_these_tokens(cut: Sampling, kept: set[int]):
    from regard.models.decode.sampling import cut as distribution

    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    probabilities, index = distribution(logits, cut)
    assert set(index[probabilities > 0].tolist()) == kept


def test_repetition_penalty_turns_the_model_away_from_what_was_said():
    model = llama()
    plain = generate(model, PROMPT, Sampling(max_tokens=30)).tokens[0]
    shy = generate(model, PROMPT, Sampling(max_tokens=30, repetition_penalty=5.0)).tokens[0]
    assert len(set(shy)) > len(set(plain))


def test_repetition_penalty_leaves_the_token_that_ends_a_row_as_likely_as_it_was():
    from regard.models.decode.sampling import Drawer

    logits = torch.tensor([[2.0, 1.9, 1.0], [2.0, 1.9, 1.0]])
    prompts, s = [[0, 1], [0, 1]], Sampling(repetition_penalty=1.5)
    assert Drawer(s, prompts, 3, [0, 1], stop_ids={0})(logits).tolist() == [0, 0]
    assert Drawer(s, prompts, 3, [0, 1])(torch.tensor([[2.0, 1.9, 1.4], [2.0, 1.9, 1.0]])).tolist() == [2, 0]
    model = llama()
    free = generate(model, PROMPT, Sampling(max_tokens=30)).tokens[0]
    at = next(i for i, t in enumerate(free) if t in [*PROMPT, *free[:i]])
    prompt, shy = [*PROMPT, *free[:at]], Sampling(max_tokens=1, repetition_penalty=50.0)
    assert generate(model, prompt, shy).tokens != [[free[at]]], "it was said before, and is not said again"
    assert generate(model, prompt, dataclasses.replace(shy, stop_ids=(free[at],))).finish == ["stop"]


def test_presence_and_frequency_are_taken_from_the_logits_of_what_was_drawn_and_a_bias_is_added():
    logits = torch.tensor([[2.0, 1.0, 0.5]])
    from regard.models.decode.sampling import Drawer

    once = Drawer(Sampling(presence_penalty=1.25), [[0]], 3, [0])
    assert [once(logits).item() for _ in range(3)] == [0, 1, 0], "2, then 2 − 1.25 < 1, then 0.75 > 1 − 1.25 and 0.5"
    often = Drawer(Sampling(frequency_penalty=1.25), [[0]], 3, [0])
    assert [often(logits).item() for _ in range(4)] == [0, 1, 0, 2], "each time counts: 2 − 2 · 1.25 < 0.5"
    assert Drawer(Sampling(bias=((2, 1.75), (99, 5.0))), [[0]], 3, [0])(logits).item() == 2
    for wrong in ({"bias": ((1, float("nan")),)}, {"bias": (("x", 1.0),)}, {"presence_penalty": float("inf")}):
        with pytest.raises(SpecError):
            Sampling(**wrong)


def test_what_is_penalised_may_be_said_instead_of_taken_from_the_prompt():
    from regard.models.decode.sampling import Drawer

    logits = torch.tensor([[2.0, 1.9, 1.0]])
    for penalised, first in ((None, 1), ((), 0), ((0, 99), 1), ((1,), 0)):
        s = Sampling(repetition_penalty=1.5, penalised=penalised)
        assert Drawer(s, [[0]], 3, [0])(logits).tolist() == [first], penalised
    for wrong in ("ab", (1.5,), 3):
        with pytest.raises(SpecError, match=r"penalised=.* a tuple of token ids"):
            Sampling(penalised=wrong)  # pyright: ignore


def test_stop_text_ends_the_row_and_is_not_part_of_it():
    model, letters = llama(), Letters()
    said = letters.decode(generate(model, PROMPT, Sampling(max_tokens=12), tokenizer=letters).tokens[0])
    stop = said[4:6]
    out = generate(model, PROMPT, Sampling(max_tokens=12, stop=(stop,)), tokenizer=letters)
    assert out.text == [said[: said.index(stop)]]
    assert out.finish == ["stop"]


def test_streamed_pieces_join_to_the_text_and_never_show_a_stop():
    model, letters = llama(), Letters()
    said = letters.decode(generate(model, PROMPT, Sampling(max_tokens=12), tokenizer=letters).tokens[0])
    seen: list[Token] = []
    out = generate(model, PROMPT, Sampling(max_tokens=12, stop=(said[4:7],)), tokenizer=letters, on_token=seen.append)
    assert out.text == ["".join(t.text for t in seen)]
    assert seen[-1].ending == "stop"
    assert all(t.ending is None for t in seen[:-1])


def test_half_a_character_waits_for_its_other_half():
    class Bytes(Letters):
        def decode(self, ids: Sequence[int]) -> str:
            return bytes([0xC3, 0xA9][i % 2] for i in range(len(ids))).decode(errors="replace")

    seen: list[Token] = []
    # A prompt of whole characters: a continuation is read after it.
    generate(llama(), PROMPT[:4], Sampling(max_tokens=4), tokenizer=Bytes(), on_token=seen.append)
    assert [t.text for t in seen] == ["", "é", "", "é"]


def test_stop_id_ends_the_row():
    model = llama()
    free = generate(model, PROMPT, Sampling(max_tokens=10)).tokens[0]
    out = generate(model, PROMPT, Sampling(max_tokens=10, stop_ids=(free[3],)))
    assert out.tokens[0] == free[: free.index(free[3])]
    assert out.finish == ["stop"]


def test_interrupt_gives_back_what_there_is():
    model = llama()
    wanted = generate(model, PROMPT, Sampling(max_tokens=10)).tokens[0]
    count = 0

    def press(_: Token) -> None:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt

    out = generate(model, PROMPT, Sampling(max_tokens=10), on_token=press)
    assert out.tokens[0] == wanted[:4]
    assert out.finish == ["interrupted"]


def test_top_logprobs_begin_with_the_greedy_token():
    out = generate(llama(), PROMPT, Sampling(max_tokens=4, logprobs=3))
    assert out.top is not None
    assert out.logprobs is not None
    for token, own, top in zip(out.tokens[0], out.logprobs[0], out.top[0], strict=True):
        assert top[0] == (token, pytest.approx(own))
        assert len(top) == 3


def test_changed_weights_are_seen_by_the_next_call():
    model = llama()
    before = generate(model, PROMPT, Sampling(max_tokens=6)).tokens
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(-1.3)
    after = generate(model, PROMPT, Sampling(max_tokens=6)).tokens
    assert after != before
    assert after == [uncached(model, PROMPT, 6)[0]]


def test_perplexity_is_exp_of_the_mean_surprise():
    model = llama()
    text = [*PROMPT, 2, 11]
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(torch.tensor([text])).logits[0, :-1], torch.tensor(text[1:]))
    assert perplexity(model, text) == pytest.approx(float(loss.exp()), rel=1e-4)
    assert logits_of(model, text).shape == (7, 61)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"temperature": -1}, "temperature=-1"),
        ({"top_p": 0.0, "temperature": 1.0}, "top_p=0.0"),
        ({"top_k": 0, "temperature": 1.0}, "top_k=0"),
        ({"top_p": 0.9}, "greedy"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"stop": ("",)}, "stop="),
        ({"stop": 5}, "stop=5"),
        ({"stop_ids": ("a",)}, "token ids"),
        ({"stop_ids": 5}, "token ids"),
        ({"max_tokens": 1.5}, "whole number"),
        ({"max_tokens": None}, "whole number"),
        ({"temperature": "warm"}, "a number"),
        ({"seed": "x"}, "whole number"),
        ({"seed": 1 << 70}, "64 bits"),
    ],
)
def test_wrong_sampling_says_what_to_write(wrong: dict[str, object], says: str):
    with pytest.raises(SpecError, match=says):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_a_text_that_may_become_endless_takes_no_endless_room():
    model = llama()
    found = stream(model, PROMPT, Sampling(max_tokens=10**15))
    wanted = uncached(model, PROMPT, 3)[0]
    assert [next(found).token for _ in range(3)] == wanted


def test_wrong_prompts_say_what_to_write():
    model = llama()
    for prompt, says in (([99], "0..60"), ([[]], "empty"), ("text", "tokenizer"), (torch.rand(3), "integers")):
        with pytest.raises(ShapeError, match=says):
            generate(model, prompt)
    with pytest.raises(SpecError, match="tokenizer"):
        generate(model, PROMPT, Sampling(stop=("a",)))
    with pytest.raises(RegardError, match="energy"):
        generate(llama("dot | softmax"), PROMPT) and generate(regard.models.LlamaConfig(
            vocabulary=61, width=24, depth=1, heads=4, key_heads=4, hidden=40, attention="energy").build(), PROMPT)  # fmt: skip


WRONG: dict[str, tuple[tuple[object, ...], dict[str, object], str]] = {
    "no prompt": ((None,), {}, r"the prompt is None; give token ids such as \[1, 2\]"),
    "a number as prompt": ((5,), {}, "the prompt is 5; give token ids"),
    "a set as prompt": (({1, 2},), {}, r"the prompt is \{1, 2\}; give token ids"),
    "a row that is nothing": (([None],), {}, "prompt 0 is None; give token ids"),
    "a number among rows": (([[1], 2],), {}, "prompt 1 is 2; give token ids"),
    "half a token": (([1.5, 2],), {}, "prompt 0 holds 1.5, which is no token id"),
    "a letter as token": (([["a"]],), {}, "prompt 0 holds 'a', which is no token id"),
    "truth as tokens": (([True, False],), {}, "prompt 0 holds True, which is no token id"),
    "a tensor of truth": ((torch.tensor([True]),), {}, "torch.bool; token ids are integers"),
    "sampling of another kind": ((PROMPT, "x"), {}, r"sampling='x': it must be a Sampling, such as Sampling\(max_tokens=64\)"),
    "chunks that are no number": ((PROMPT,), {"prefill": "a"}, "prefill='a': .* a whole number from 1"),
    "chunks of half a token": ((PROMPT,), {"prefill": 2.5}, "prefill=2.5"),
    "a name as tokenizer": ((PROMPT,), {"tokenizer": "x"}, "tokenizer='x': it must have encode, decode and eos_ids"),
    "a name as listener": ((PROMPT,), {"on_token": "x"}, "on_token='x': it must be a function"),
    "a name as state": ((PROMPT,), {"states": "x"}, r"states='x': give a regard.State"),
    "numbers as states": ((PROMPT,), {"states": [1, 2]}, r"states=\[1, 2\]: give a regard.State"),
    "weights without a name": ((PROMPT,), {"weights": []}, r"weights=\[\]: choose 'float32'"),
}


@pytest.mark.parametrize(("given", "named", "says"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_of_generate_is_echoed_with_what_to_write(given: tuple[Any, ...], named: dict[str, Any], says: str):
    model = llama()
    with pytest.raises(RegardError, match=says):
        regard.generate(model, *given, **named)
    if "on_token" not in named:
        with pytest.raises(RegardError, match=says):
            list(regard.stream(model, *given, **named))


FORWARD: dict[str, tuple[object, dict[str, object], str]] = {
    "no caches": ([[1]], {"caches": []}, "0 caches; this model keeps 2"),
    "a name as caches": ([[1]], {"caches": "x"}, "caches='x': give what the last call returned"),
    "caches that are nothing": ([[1]], {"caches": [None, None]}, r"caches=\[None, None\]: give what the last call returned"),
    "a token beyond the vocabulary": ([[1, 61]], {}, r"the tokens hold 61; this model knows 0\.\.60"),
    "a token below it": ([[-1]], {}, r"the tokens hold -1; this model knows 0\.\.60"),
    "half a token": ([[1.5]], {}, "torch.float32; token ids are integers"),
}


@pytest.mark.parametrize(("tokens", "named", "says"), FORWARD.values(), ids=FORWARD)
@pytest.mark.parametrize("family", ["llama", "ngpt", "recurrent", "routing"])
def test_a_wrong_argument_of_a_model_is_echoed_with_what_to_write(tokens: Any, named: dict[str, Any], says: str, family: str):
    sizes = {"vocabulary": 61, "width": 24, "depth": 2, "heads": 4}
    row = FAMILIES[family]
    model = row.config(**row.settings(sizes)).build()
    with pytest.raises(RegardError, match=says):
        model(torch.tensor(tokens), **named)


def test_a_text_ends_where_the_model_says_unless_the_call_says_where():
    model = llama()
    free = generate(model, PROMPT, Sampling(max_tokens=10)).tokens[0]
    model.generation_info = GenerationInfo({"eos_token_id": free[3]})
    ended = generate(model, PROMPT, Sampling(max_tokens=10))
    assert (ended.tokens, ended.finish) == ([free[: free.index(free[3])]], ["stop"])
    last = next(t for t in free if t != free[3] and free.index(t) > free.index(free[3]))
    assert generate(model, PROMPT, Sampling(max_tokens=10, stop_ids=(last,))).tokens == [free[: free.index(last)]]
    assert generate(model, PROMPT, Sampling(max_tokens=10), tokenizer=Letters()).tokens == [free]


def test_broken_weights_are_named_instead_of_spoken():
    model = llama()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(NumericsError, match="finite"):
        generate(model, PROMPT)
