"""Whoever speaks goes on speaking: generators, tasks, threads and copied contexts are right or refused, never somebody else."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import hubs
import lives
import pytest
import torch
from lives import HISTORY, TEXT

from regard import CombinationError, RegardError, ShapeError, StateError
from regard.identity import generate, stream
from regard.identity.body import base_of
from regard.identity.speaking import living
from regard.models import Sampling

STEPS = 5
SAMPLING = Sampling(max_tokens=STEPS, temperature=0)


class People:
    """A model, two who live in it, and what each of them and the model itself say of a text."""

    def __init__(self, name: str) -> None:
        if name.startswith("theirs"):
            self.model: Any = hubs.hub("llama", "eager" if "eager" in name else "sdpa")
            self.a, self.b = (hubs.someone(base_of(self.model), seed) for seed in (1, 2))
        else:
            self.model = lives.llama() if name == "llama" else lives.gpt2()
            self.a, self.b = (lives.someone(base_of(self.model), seed) for seed in (1, 2))
        self.bare = self.says()
        with living(self.model, self.a):
            self.as_a = self.says()
        with living(self.model, self.b):
            self.as_b = self.says()
        assert not torch.equal(self.as_a, self.as_b)
        assert not torch.equal(self.as_a, self.bare)

    @torch.no_grad()
    def says(self) -> torch.Tensor:
        return self.model(torch.tensor([TEXT])).logits

    def is_bare(self) -> bool:
        return torch.equal(self.says(), self.bare)

    def speaks(self, who: Any) -> Iterator[torch.Tensor]:
        with living(self.model, who):
            for _ in range(STEPS):
                yield self.says()

    async def speaks_later(self, who: Any) -> AsyncIterator[torch.Tensor]:
        with living(self.model, who):
            for _ in range(STEPS):
                await asyncio.sleep(0)
                yield self.says()


@pytest.fixture(scope="module", params=["llama", "gpt2", "theirs, eager", "theirs, sdpa"])
def people(request: pytest.FixtureRequest) -> People:
    return People(request.param)


@pytest.fixture(autouse=True)
def _everyone_has_left(people: People) -> Iterator[None]:
    yield
    gc.collect()
    assert people.is_bare()
    if hasattr(people.model, "generation_config"):
        assert people.model.config._attn_implementation in ("eager", "sdpa")


def test_two_generators_in_turns_are_two_people_and_their_caller_is_neither(people: People):
    one, two = people.speaks(people.a), people.speaks(people.b)
    for _ in range(STEPS):
        assert torch.equal(next(one), people.as_a)
        assert people.is_bare()
        assert torch.equal(next(two), people.as_b)
        assert people.is_bare()
    assert next(one, None) is None
    assert people.is_bare()
    assert next(two, None) is None


def test_a_generator_inside_another_life_is_its_own_and_so_is_the_life(people: People):
    stream_of_a = people.speaks(people.a)
    with living(people.model, people.b):
        assert torch.equal(next(stream_of_a), people.as_a)
        assert torch.equal(people.says(), people.as_b)
        assert torch.equal(next(stream_of_a), people.as_a)
    assert torch.equal(next(stream_of_a), people.as_a)
    with living(people.model, None):
        assert torch.equal(next(stream_of_a), people.as_a)
        assert people.is_bare()


def test_a_generator_that_is_dropped_in_the_middle_leaves_nobody_behind(people: People):
    abandoned = people.speaks(people.a)
    next(abandoned)
    del abandoned
    gc.collect()
    assert people.is_bare()


def test_helpers_of_a_generator_speak_as_it_does(people: People):
    def helper() -> torch.Tensor:
        with ExitStack() as stack:
            stack.enter_context(living(people.model, people.b))
            return people.says()

    def speaks() -> Iterator[torch.Tensor]:
        with living(people.model, people.a):
            yield from (people.says() for _ in range(2))
            yield helper()
            yield people.says()

    wanted = [people.as_a, people.as_a, people.as_b, people.as_a]
    for said, want in zip(speaks(), wanted, strict=True):
        assert torch.equal(said, want)
        assert people.is_bare()


def test_steps_in_copied_contexts_and_in_threads_of_a_pool_keep_the_identity(people: People):
    one, two = people.speaks(people.a), people.speaks(people.b)
    for _ in range(2):
        assert torch.equal(contextvars.copy_context().run(next, one), people.as_a)
        assert torch.equal(contextvars.copy_context().run(next, two), people.as_b)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            assert torch.equal(pool.submit(next, one).result(), people.as_a)
            assert torch.equal(pool.submit(contextvars.copy_context().run, next, two).result(), people.as_b)
    assert people.is_bare()
    one.close()  # type: ignore[attr-defined]
    two.close()  # type: ignore[attr-defined]


def test_async_generators_in_turns_are_two_people_and_their_task_is_neither(people: People):
    async def run() -> None:
        one, two = people.speaks_later(people.a), people.speaks_later(people.b)
        for _ in range(STEPS - 1):
            assert torch.equal(await anext(one), people.as_a)
            assert people.is_bare()
            assert torch.equal(await anext(two), people.as_b)
            assert people.is_bare()
        # Another task, in a context of its own, may take the next step.
        assert torch.equal(await asyncio.create_task(anext(one)), people.as_a)  # type: ignore[arg-type]
        await one.aclose()  # type: ignore[attr-defined]
        assert people.is_bare()
        await two.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())


def test_an_async_generator_that_is_left_early_leaves_nobody_behind(people: People):
    async def run() -> None:
        async for said in people.speaks_later(people.a):
            assert torch.equal(said, people.as_a)
            break
        gc.collect()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert people.is_bare()

    asyncio.run(run())


def test_tasks_are_each_their_own_and_those_started_inside_are_who_started_them(people: People):
    async def speak(who: Any, want: torch.Tensor) -> None:
        with living(people.model, who):
            for _ in range(3):
                await asyncio.sleep(0)
                assert torch.equal(people.says(), want)
                assert torch.equal(await asyncio.create_task(inherited()), want)

    async def inherited() -> torch.Tensor:
        await asyncio.sleep(0)
        return await asyncio.to_thread(people.says)

    async def run() -> None:
        pairs = [(people.a, people.as_a), (people.b, people.as_b), (None, people.bare)]
        await asyncio.gather(*(speak(who, want) for who, want in pairs))
        assert people.is_bare()

    asyncio.run(run())


def test_a_task_that_was_started_inside_goes_on_when_the_block_has_ended(people: People):
    async def later(gate: asyncio.Event) -> torch.Tensor:
        await gate.wait()
        return people.says()

    async def run() -> None:
        gate = asyncio.Event()
        with living(people.model, people.a):
            task = asyncio.create_task(later(gate))
            await asyncio.sleep(0)
        assert people.is_bare()
        gate.set()
        assert torch.equal(await task, people.as_a)

    asyncio.run(run())


def test_a_task_with_a_copy_of_a_generators_context_is_refused(people: People):
    async def run() -> None:
        one = people.speaks(people.a)
        next(one)
        with pytest.raises(StateError, match="nobody can tell"):
            await asyncio.create_task(asyncio.to_thread(people.says))
        one.close()  # type: ignore[attr-defined]
        assert torch.equal(await asyncio.to_thread(people.says), people.bare)

    asyncio.run(run())


def test_threads_find_the_model_by_itself_unless_they_bring_their_context(people: People):
    found: list[torch.Tensor] = []
    with living(people.model, people.a), ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(people.says).result(), people.bare)
        assert torch.equal(pool.submit(contextvars.copy_context().run, people.says).result(), people.as_a)
        thread = threading.Thread(target=contextvars.copy_context().run, args=(lambda: found.append(people.says()),))
        thread.start()
        thread.join(30)
    assert torch.equal(found[0], people.as_a)


def test_a_generator_that_stands_for_a_block_is_as_good_as_the_block(people: People):
    @contextmanager
    def as_a() -> Iterator[None]:
        with living(people.model, people.a):
            yield

    with as_a():
        assert torch.equal(people.says(), people.as_a)
        with ExitStack() as stack:
            stack.enter_context(living(people.model, people.b))
            assert torch.equal(people.says(), people.as_b)
        assert torch.equal(people.says(), people.as_a)


def test_a_block_that_an_expression_enters_is_that_of_who_will_leave_it(people: People):
    with ExitStack() as stack:
        tuple(stack.enter_context(living(people.model, who)) for who in (people.b, people.a))
        assert torch.equal(people.says(), people.as_a)
    assert people.is_bare()


def test_a_generator_that_ended_inside_a_block_is_not_taken_for_nobody(people: People):
    stack = ExitStack()

    def entered() -> Iterator[None]:
        stack.enter_context(living(people.model, people.a))
        yield
        assert torch.equal(people.says(), people.as_a)

    steps = entered()
    next(steps)
    assert people.is_bare()
    assert next(steps, None) is None
    with pytest.raises(StateError, match="ended without leaving"):
        people.says()
    with living(people.model, people.b):
        assert torch.equal(people.says(), people.as_b)
    stack.close()
    assert people.is_bare()


@pytest.fixture
def lived_in(people: People) -> Iterator[None]:
    with living(people.model, people.a):
        yield


def test_a_fixture_that_yields_inside_holds_in_the_test(people: People, lived_in: None):
    assert torch.equal(people.says(), people.as_a)


def test_blocks_that_are_left_out_of_order_each_take_out_their_own(people: People):
    one, two = living(people.model, people.a), living(people.model, people.b)
    one.__enter__()
    two.__enter__()
    assert torch.equal(people.says(), people.as_b)
    one.__exit__(None, None, None)
    assert torch.equal(people.says(), people.as_b)
    two.__exit__(None, None, None)
    assert people.is_bare()


def test_a_block_that_is_left_in_another_context_makes_its_own_unclear(people: People):
    def run() -> None:
        block = living(people.model, people.a)
        block.__enter__()
        contextvars.copy_context().run(block.__exit__, None, None, None)
        with pytest.raises(StateError, match="has ended"):
            people.says()
        with living(people.model, people.b):
            assert torch.equal(people.says(), people.as_b)
        with living(people.model, None):
            assert people.is_bare()

    contextvars.copy_context().run(run)


# The call that is bound: `generate` and `stream` of our own models.


@pytest.fixture(params=["llama", "gpt2"])
def ours(request: pytest.FixtureRequest) -> People:
    return People(request.param)


@pytest.fixture
def said(ours: People) -> Callable[[Any], list[int]]:
    def by(who: Any) -> list[int]:
        with living(ours.model, who):
            return generate(ours.model, TEXT, SAMPLING).tokens[0]

    assert by(ours.a) != by(ours.b) != by(None)
    return by


def test_identity_of_a_call_comes_before_whoever_lives_here(ours: People, said: Callable[[Any], list[int]]):
    for who in (ours.a, ours.b, None):
        assert generate(ours.model, TEXT, SAMPLING, identity=who).tokens[0] == said(who)
        with living(ours.model, ours.b):
            assert generate(ours.model, TEXT, SAMPLING, identity=who).tokens[0] == said(who)
            assert [t.token for t in stream(ours.model, TEXT, SAMPLING, identity=who)] == said(who)
    prompts = [TEXT, HISTORY, TEXT]
    rows = generate(ours.model, prompts, SAMPLING, identity=[ours.a, None, ours.b]).tokens
    for row, prompt, who in zip(rows, prompts, [ours.a, None, ours.b], strict=True):
        assert row == generate(ours.model, prompt, SAMPLING, identity=who).tokens[0]


def test_streams_in_turns_speak_as_whoever_they_were_made_for(ours: People, said: Callable[[Any], list[int]]):
    with living(ours.model, ours.a):
        one = stream(ours.model, TEXT, SAMPLING)
    two, alone = stream(ours.model, TEXT, SAMPLING, identity=ours.b), stream(ours.model, TEXT, SAMPLING)
    found: list[list[int]] = [[], [], []]
    for _ in range(STEPS):
        for tokens, row in zip((one, two, alone), found, strict=True):
            with living(ours.model, ours.b if tokens is one else ours.a):
                row.append(next(tokens).token)
            assert ours.is_bare()
    assert found == [said(ours.a), said(ours.b), said(None)]


def test_the_tokens_of_a_stream_may_be_taken_by_any_thread(ours: People, said: Callable[[Any], list[int]]):
    tokens = stream(ours.model, TEXT, SAMPLING, identity=ours.a)
    with ThreadPoolExecutor(3) as pool:
        assert [pool.submit(next, tokens).result().token for _ in range(STEPS)] == said(ours.a)


def test_a_block_that_ends_in_the_middle_of_a_generation_does_not_change_who_speaks(
    ours: People, said: Callable[[Any], list[int]]
):
    block = living(ours.model, ours.a)
    block.__enter__()

    def leave(token: Any) -> None:
        if block is not None and not left:
            left.append(block.__exit__(None, None, None))
            assert ours.is_bare()

    left: list[Any] = []
    assert generate(ours.model, TEXT, SAMPLING, on_token=leave).tokens[0] == said(ours.a)
    assert left


def test_a_stream_is_what_generate_gives_and_checks_before_its_first_token(ours: People):
    out = generate(ours.model, [TEXT, TEXT[:3]], SAMPLING, identity=ours.a)
    tokens = list(stream(ours.model, [TEXT, TEXT[:3]], SAMPLING, identity=ours.a))
    assert [[t.token for t in tokens if t.row == row] for row in (0, 1)] == out.tokens
    assert tokens[-1].ending == "length"
    for bad in (partial(stream, ours.model, []), partial(stream, ours.model, TEXT, prefill=0)):
        with pytest.raises(RegardError):
            bad()
    with pytest.raises(StateError, match="is no identity"):
        stream(ours.model, TEXT, SAMPLING, identity="mara")  # type: ignore[arg-type]


def test_a_model_that_trains_trains_on_between_the_tokens_of_a_stream():
    model = lives.llama().train()
    tokens = stream(model, TEXT, SAMPLING)
    next(tokens)
    assert model.training
    assert len(list(tokens)) == STEPS - 1
    assert model.training


def test_more_than_a_table_of_places_holds_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch):
    from regard.models.decode.generate import logits_of
    from regard.models.decode.prepare import Decoder, prepare

    model = lives.gpt2(context=8)
    assert len(generate(model, TEXT, Sampling(max_tokens=2)).tokens[0]) == 2
    with pytest.raises(ShapeError, match="past this model's context of 8"):
        prepare(model)(torch.tensor([list(range(9))]), tuple(prepare_caches(model)))
    monkeypatch.setattr(Decoder, "__call__", lambda *a, **k: pytest.fail("work was done"))
    for more, match in ((3, "at most 2"), (100, "at most 2")):
        with pytest.raises(ShapeError, match=match):
            generate(model, TEXT, Sampling(max_tokens=more))
    with pytest.raises(ShapeError, match="shorten the prompt"):
        stream(model, list(range(9)), Sampling(max_tokens=1))
    with pytest.raises(ShapeError, match="context of 8"):
        logits_of(model, list(range(9)))


def prepare_caches(model: Any) -> Any:
    from regard.models.decode.cache import static_caches

    return static_caches(model.cache_count)


def test_a_prompt_longer_than_a_rope_model_was_trained_on_is_said():
    with pytest.warns(UserWarning, match="past this model's context of 4"):
        generate(lives.llama(context=4), TEXT, Sampling(max_tokens=1))


def test_what_continues_no_text_is_refused_by_name_with_what_to_call():
    from regard.models import BertConfig, T5Config
    from regard.models.decode.generate import perplexity

    t5 = T5Config(vocabulary=16, width=8, depth=1, heads=2, hidden=8, head_width=4).build()
    bert = BertConfig(vocabulary=16, width=8, depth=1, heads=2, hidden=8).build()
    for model, match in ((t5, "respond"), (bert, "both sides"), (hubs.hub("llama"), "model.generate"), ("llama", "str")):
        for call in (partial(generate, model, [1, 2]), partial(perplexity, model, [1, 2])):
            with pytest.raises(CombinationError, match=match):
                call()
