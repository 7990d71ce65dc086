"""What is kept of prompts is found again by whoever begins alike as the same person, changes no bit, and is never anybody else's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lives
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import ByHand, alone, people, same, written

from regard import StateError
from regard.identity.body import base_of
from regard.models import Sampling
from regard.models.decode.int8_cache import Bytes
from regard.models.decode.prepare import prepare
from regard.models.decode.rows import OneByOne, Part, Together
from regard.serve.contract import Job
from regard.serve.prefix import PrefixCache
from regard.serve.row import overrides_of

PROMPT = tuple(int(x) for x in torch.randint(0, 256, (70,), generator=torch.Generator().manual_seed(2)))
GRAIN = Together.grain


def ran(engine: ByHand, job: Job) -> tuple[list[Any], int]:
    run = engine.submit(job)
    engine.finish()
    return written(run), run.cached_tokens


@pytest.mark.parametrize(("weights", "cache"), [("float32", "float32"), ("int8", "float32"), ("float32", "int8")])
@pytest.mark.parametrize("who", ["", "all", "recollection", "plain imprints"])
def test_warm_prompt_says_what_a_cold_one_says(who: str, weights: Any, cache: Any) -> None:
    model = lives.speaking()
    engine = ByHand(model, lives.letters(), weights=weights, cache=cache)
    assert isinstance(engine.rows.rows, Together)
    sampling = Sampling(max_tokens=9, logprobs=2, temperature=0.8, seed=4)
    first = Job(PROMPT, sampling, people(model)[who], "v1")
    for job, cached in (
        (first, 0),
        (first, len(PROMPT)),
        (replace(first, prompt=PROMPT[:50]), 48),
        (replace(first, prompt=(*PROMPT[:40], *PROMPT[:40])), 32),
        (replace(first, prompt=PROMPT[:48]), 32),
        (replace(first, prompt=(1, *PROMPT)), 0),
    ):
        pieces, found = ran(engine, job)
        assert found == cached
        assert same(pieces, alone(model, job, weights, cache))
    assert engine.stats().cache_hits == 4


def test_bytes_of_prompts_take_a_third_of_the_room_of_their_numbers() -> None:
    model = lives.speaking()
    kept: list[int] = []
    for cache in ("float32", "int8"):
        engine = ByHand(model, lives.letters(), cache=cache)  # pyright: ignore[reportArgumentType]
        ran(engine, Job(PROMPT, Sampling(max_tokens=1)))
        kept.append(engine.stats().cache_bytes)
    # Beside keys and values, tokens and logits are kept either way.
    assert kept[1] < kept[0] * 0.6


@pytest.mark.parametrize("kind", [OneByOne, Together])
@torch.inference_mode()
def test_bytes_are_copied_and_restored_as_they_are(kind: Any) -> None:
    """Not as numbers: those that were rounded once round to others again."""
    model = lives.speaking()
    rows = kind(prepare(model), cache="int8")
    overrides = overrides_of(model, Job(PROMPT, identity=people(model)["all"]))[0]
    first, second = (rows.open(overrides, 90) for _ in range(2))
    for _ in rows.read(first, PROMPT):
        pass
    rows.restore(second, [rows.copy(first, 0, 32), rows.copy(first, 32, 70)], 70)
    for a, b in zip(rows.copy(first, 0, 70), rows.copy(second, 0, 70), strict=True):
        for mine, theirs in ((a.k, b.k), (a.v, b.v)):
            assert isinstance(mine, Bytes)
            assert torch.equal(mine.q, theirs.q)
            assert torch.equal(mine.scale, theirs.scale)
    assert torch.equal(rows.step([first], [5])[0], rows.step([second], [5])[0])


def test_next_turn_finds_the_answer_of_the_last_one_too() -> None:
    model = lives.speaking()
    engine = ByHand(model, lives.letters())
    answer, _ = ran(engine, Job(PROMPT, Sampling(max_tokens=30)))
    text = (*PROMPT, *(p.token for p in answer), 5, 6, 7)
    job = Job(text, Sampling(max_tokens=9, logprobs=0))
    pieces, cached = ran(engine, job)
    assert cached == (len(PROMPT) + 29) // GRAIN * GRAIN
    assert same(pieces, alone(model, job))


def test_commit_makes_what_was_kept_before_it_unreachable() -> None:
    model = lives.speaking()
    mara = people(model)["all"]
    engine = ByHand(model, lives.letters())
    for version, cached in (("a:1", 0), ("a:1", 70), ("a:2", 0), ("a:1", 70), ("b:1", 0)):
        assert ran(engine, Job(PROMPT, Sampling(max_tokens=1), mara, version))[1] == cached
    engine.forget("a:")
    for version, cached in (("a:1", 0), ("a:2", 0), ("b:1", 70)):
        assert ran(engine, Job(PROMPT, Sampling(max_tokens=1), mara, version))[1] == cached


def test_nobody_reads_what_another_identity_left_though_the_versions_are_one() -> None:
    model = lives.speaking()
    engine = ByHand(model, lives.letters())
    everyone = people(model)
    sampling = Sampling(max_tokens=4, logprobs=0)
    silent = {"", "nobody"}
    for round_ in range(2):
        for name, who in everyone.items():
            job = Job(PROMPT, sampling, who, "the same version")
            pieces, cached = ran(engine, job)
            # Whoever holds nothing is the model itself.
            assert cached == (70 if round_ or name == "nobody" else 0), name
            assert same(pieces, alone(model, job))
    assert len(everyone) - len(silent) > 5


@torch.inference_mode()
def goes_on(rows: Any, row: Any, parts: Any) -> None:
    rows.restore(row, [parts], 64)
    for _ in rows.read(row, PROMPT[64:]):
        pass


@pytest.mark.parametrize("cache", ["float32", "int8"])
@pytest.mark.parametrize("kind", [OneByOne, Together])
def test_keys_of_another_are_refused_even_by_hand(kind: Any, cache: Any) -> None:
    model = lives.speaking()
    rows = kind(prepare(model), cache=cache)
    mara, tom = (lives.someone(base_of(model), seed) for seed in (1, 2))
    read: dict[str, Any] = {}
    for name, who in (("mara", mara), ("tom", tom), ("", None)):
        row = rows.open(overrides_of(model, Job(PROMPT, identity=who))[0], 90)
        with torch.inference_mode():
            for _ in rows.read(row, PROMPT):
                pass
        read[name] = rows.copy(row, 0, 64)
    for name, who in (("mara", mara), ("tom", tom), ("", None)):
        for other in {"mara", "tom", ""} - {name}:
            row = rows.open(overrides_of(model, Job(PROMPT, identity=who))[0], 90)
            with pytest.raises(StateError, match="belong"):
                goes_on(rows, row, read[other])


def part(n: int) -> list[Part]:
    return [Part(torch.zeros(1, n, 4), torch.zeros(1, n, 4), None)]


texts = st.lists(st.integers(0, 1), min_size=1, max_size=11)
asked = st.lists(st.tuples(st.sampled_from("xyz"), texts, st.booleans()), max_size=30)


@settings(max_examples=60)
@given(asked, st.sampled_from([0, 300, 900, 5000]))
def test_cache_holds_what_was_kept_last_within_its_bytes(plan: list[tuple[str, list[int], bool]], most: int) -> None:
    cache = PrefixCache(most, 3)
    kept: set[tuple[str, tuple[int, ...]]] = set()
    for root, tokens, keeps in plan:
        hit = cache.find(root, tokens)
        known = {len(t) for r, t in kept if r == root and tuple(tokens[: len(t)]) == t}
        assert hit.tokens == 0 or hit.tokens in known
        assert sum(p[0].k.shape[1] for p in hit.parts) == hit.tokens
        assert (hit.logits is not None) == (hit.tokens == len(tokens))
        if keeps:
            cache.keep(root, tokens, lambda a, b: part(b - a), torch.tensor([float(len(tokens))]))
            kept |= {(root, tuple(tokens[:n])) for n in {*range(3, len(tokens), 3), len(tokens)}}
            if most == 5000:
                assert cache.find(root, tokens).tokens == len(tokens)
        assert cache.nbytes <= most
    for root in "xyz":
        cache.forget(lambda r, root=root: r == root)
    assert cache.nbytes == 0
    assert not cache._ages  # pyright: ignore
    assert not cache._roots  # pyright: ignore


def test_what_was_used_longest_ago_goes_first() -> None:
    # Four tokens in runs of two, 32 + 64 bytes a token: three such texts fit.
    cache = PrefixCache(3 * 4 * 96 + 3 * 4, 2)
    for root in "abc":
        cache.keep(root, [1, 2, 3, 4], lambda a, b: part(b - a), torch.zeros(1))
    assert cache.find("a", [1, 2, 3, 4]).tokens == 4
    cache.keep("d", [1, 2], lambda a, b: part(b - a), torch.zeros(1))
    found = {root: cache.find(root, [1, 2, 3, 4, 5]).tokens for root in "abcd"}
    assert found == {"a": 4, "b": 2, "c": 4, "d": 2}
