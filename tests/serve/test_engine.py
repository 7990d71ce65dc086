"""The engine gives every job the tokens that it would get alone, whoever comes, goes, or breaks beside it."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, cast

import lives
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard import NumericsError, ShapeError, SpecError
from regard.identity import generate
from regard.identity.body import base_of
from regard.identity.speaking import living
from regard.identity.state import Identity, Recollection
from regard.models import Sampling
from regard.models.base import Model
from regard.models.decode import native
from regard.models.decode.generate import Generated, logits_of
from regard.models.decode.rows import Together
from regard.serve import engine as engine_module
from regard.serve.contract import NO_TOKEN, DrainingError, Job, Piece, QueueFullError, Score
from regard.serve.engine import Engine
from regard.serve.plain import PlainRun


@contextmanager
def running(model: Model, **more: Any) -> Generator[Engine]:
    engine = Engine(model, lives.letters(), **more)
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


def written(run: PlainRun) -> list[Piece]:
    return list(run.pieces())


def recollected(identity: Identity, head: int, chosen: tuple[int, ...] = ()) -> Identity:
    """As if its imprints had come to mind at a prompt with a head of so many tokens; with an episode its words are contrasted."""
    parts = {f.name: getattr(identity, f.name) for f in fields(Identity) if f.name != "episodes"}
    return Recollection(**parts, head=head, chosen=chosen, coherence=(2.0,) * len(chosen), sure=float(bool(chosen)))


def people(model: Model) -> dict[str, Identity | None]:
    base = base_of(model)
    return {
        "": None,
        "trace": lives.someone(base, 1, slots=0, form=None),
        "bias": lives.someone(base, 2, slots=0, rank=0),
        "imprints": lives.someone(base, 3, rank=0, form=None),
        "plain imprints": lives.someone(base, 4, rank=0, form=None, weighed=False),
        "token": lives.someone(base, 5, rank=0, slots=0, form="self_token"),
        "all": lives.someone(base, 6, slots=7, rank=3),
        "recollection": recollected(lives.someone(base, 7, slots=9, rank=0, form=None, weighed=False), 4, (0,)),
        "slept recollection": recollected(lives.someone(base, 8, slots=3, rank=2), 3),
        "nobody": Identity.new(base),
    }


def alone(model: Model, job: Job, weights: str = "float32", cache: str = "float32") -> Generated:
    who: Any = "here" if job.identity is None else job.identity
    return generate(
        model,
        list(job.prompt),
        job.sampling,
        identity=who,
        tokenizer=lives.letters(),
        weights=cast(Any, weights),
        cache=cast(Any, cache),
    )


def same(pieces: list[Piece], expected: Generated) -> bool:
    """Whether a run gave these tokens, this text and these numbers, and ended so."""
    (tokens,), (ending,), text = expected.tokens, expected.finish, (expected.text or [""])[0]
    own = [p for p in pieces if p.token != NO_TOKEN]
    # A token that ends a text by its id is told, and none of the text's.
    own = own[: len(tokens)] if len(own) == len(tokens) + 1 and pieces[-1].ending == "stop" else own
    numbers = True
    if expected.logprobs is not None:
        numbers = [p.logprob for p in own] == expected.logprobs[0]
    return (
        [p.token for p in own] == tokens and "".join(p.text for p in pieces) == text and pieces[-1].ending == ending and numbers
    )


def jobs_of(seed: int, who: dict[str, Identity | None], count: int, longest: int = 70) -> list[Job]:
    draw = random.Random(seed)
    common = [draw.randrange(256) for _ in range(longest)]
    jobs: list[Job] = []
    for _ in range(count):
        # Some begin alike, some are the same, some share nothing.
        own = [draw.randrange(256) for _ in range(draw.randint(1, longest))]
        kept = draw.choice([0, draw.randrange(longest), longest])
        prompt = (common[:kept] + own)[: draw.randint(5, longest)]
        name = draw.choice(list(who))
        sampling = Sampling(
            max_tokens=draw.randint(1, 12),
            temperature=(temperature := draw.choice([0.0, 0.0, 0.9])),
            top_p=0.9 if temperature and draw.random() < 0.5 else None,
            top_k=7 if temperature and draw.random() < 0.5 else None,
            repetition_penalty=draw.choice([1.0, 1.0, 1.3]),
            seed=draw.randrange(1000),
            stop=draw.choice([(), (), ("a", "\x00b")]),
            stop_ids=draw.choice([(), (), (7, 200)]),
            logprobs=draw.choice([None, 0, 3]),
        )
        jobs.append(Job(tuple(prompt), sampling, who[name], version=name))
    return jobs


MODELS: dict[str, Callable[[], Model]] = {
    "llama": lives.speaking,
    "odd widths": lambda: lives.speaking(width=30, heads=3, key_heads=3, hidden=37, head_width=10),
    "gpt2": lambda: lives.gpt2(vocabulary=257, context=200),
    "biased": lambda: lives.speaking(attention_bias=True),
    "windowed": lambda: lives.speaking(window=4),
}


@pytest.mark.parametrize(
    ("weights", "cache"), [("float32", "float32"), ("int8", "float32"), ("float32", "int8"), ("q4", "int8")]
)
@pytest.mark.parametrize("name", MODELS)
def test_jobs_that_come_at_random_get_the_tokens_they_would_get_alone(name: str, weights: Any, cache: Any) -> None:
    model = MODELS[name]()
    jobs = jobs_of(sum(map(ord, name)), people(model), 40)
    draw = random.Random(0)
    with running(model, weights=weights, cache=cache, rows=5) as engine:
        runs: list[PlainRun] = []
        for job in jobs:
            runs.append(engine.submit(job))
            if draw.random() < 0.3:
                time.sleep(draw.random() * 0.02)
        given = [written(run) for run in runs]
    assert [
        i
        for i, (job, pieces) in enumerate(zip(jobs, given, strict=True))
        if not same(pieces, alone(model, job, weights, cache))
    ] == []


class ByHand(Engine):
    """An engine whose rounds the test takes, so that a schedule is the same every time."""

    def start(self) -> None:
        raise AssertionError("the test takes its rounds itself")

    @torch.inference_mode()
    def round(self) -> None:
        if self._waiting or self._running or self._forgotten:
            self._round()

    def finish(self) -> None:
        while self._waiting or self._running:
            self.round()


@dataclass(frozen=True)
class Arrival:
    job: int
    after: int
    """Rounds since the one before."""
    leaves: int | None
    """Rounds after which it is cancelled."""


@cache
def known() -> tuple[Model, list[Job], list[Generated]]:
    model = lives.speaking()
    jobs = jobs_of(5, people(model), 20)
    return model, jobs, [alone(model, job) for job in jobs]


arrivals = st.builds(Arrival, st.integers(0, 19), st.integers(0, 6), st.none() | st.integers(0, 9))


@settings(max_examples=40, deadline=None)
@given(st.lists(arrivals, min_size=1, max_size=14), st.integers(1, 6), st.sampled_from([0, 40_000, 1 << 24]))
def test_whoever_stays_gets_their_own_tokens_under_any_schedule(plan: list[Arrival], rows: int, cache_bytes: int) -> None:
    model, jobs, expected = known()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "PAUSE", 0.0)
        engine = ByHand(model, lives.letters(), rows=rows, cache_bytes=cache_bytes)
        begun: list[tuple[Arrival, PlainRun, int]] = []
        for arrival in plan:
            for _ in range(arrival.after):
                engine.round()
                _cancel(begun)
            begun.append((arrival, engine.submit(jobs[arrival.job]), 0))
        while engine.stats().queued or engine.stats().running:
            begun = [(a, run, age + 1) for a, run, age in begun]
            _cancel(begun)
            engine.round()
    for arrival, run, _ in begun:
        pieces = written(run)
        if pieces[-1].ending == "cancelled":
            assert run.stopped.is_set()
            full = expected[arrival.job].tokens[0]
            assert [p.token for p in pieces[:-1]] == full[: len(pieces) - 1]
        else:
            assert same(pieces, expected[arrival.job])
    assert engine.stats().cache_bytes <= cache_bytes


def _cancel(begun: list[tuple[Arrival, PlainRun, int]]) -> None:
    for arrival, run, age in begun:
        if arrival.leaves is not None and age >= arrival.leaves:
            run.cancel()


def hostile(model: Model) -> Identity:
    """An identity whose numbers overflow in its own row."""
    who = lives.someone(base_of(model), 9, rank=0, slots=0)
    assert who.self is not None
    return replace(who, self=replace(who.self, s=who.self.s.sign() * 3e38))


def test_row_that_is_not_finite_ends_alone() -> None:
    model = lives.speaking()
    good = [Job((1, 2, 3, i), Sampling(max_tokens=9)) for i in range(3)]
    with running(model) as engine:
        runs = [engine.submit(x) for x in (good[0], Job((5, 6), identity=hostile(model)), *good[1:])]
        with pytest.raises(NumericsError, match="not finite"):
            written(runs[1])
        for job, run in zip(good, [runs[0], *runs[2:]], strict=True):
            assert same(written(run), alone(model, job))
        assert engine.stats().running == 0


def test_what_breaks_in_one_row_breaks_no_other() -> None:
    model = lives.speaking()
    engine = ByHand(model, lives.letters())
    jobs = [Job((1, 2, 3, i), Sampling(max_tokens=9)) for i in range(3)]
    runs = [engine.submit(job) for job in jobs]
    engine.round()
    engine.round()

    def broken(logits: object) -> Piece:
        raise RuntimeError("as a test asked")

    engine._running[1].write = broken  # pyright: ignore
    engine.finish()
    with pytest.raises(RuntimeError, match="as a test asked"):
        written(runs[1])
    assert same(written(runs[0]), alone(model, jobs[0]))
    assert same(written(runs[2]), alone(model, jobs[2]))


def test_identity_of_another_model_is_refused_where_its_pieces_are_read() -> None:
    model = lives.speaking()
    with running(model) as engine:
        run = engine.submit(Job((1, 2), identity=lives.someone(base_of(lives.speaking(3)), 1)))
        with pytest.raises(ValueError, match="weights differ"):
            written(run)
        assert written(engine.submit(Job((1, 2), Sampling(max_tokens=2))))


def test_cancelled_row_gets_no_further_token() -> None:
    engine = ByHand(lives.speaking(), lives.letters())
    run = engine.submit(Job((1, 2, 3), Sampling(max_tokens=50)))
    while not run._ready:  # pyright: ignore
        engine.round()
    engine.round()
    before = engine.stats().completion_tokens
    run.cancel()
    engine.round()
    assert engine.stats().completion_tokens == before
    pieces = written(run)
    assert (pieces[-1].ending, pieces[-1].token) == ("cancelled", NO_TOKEN)
    assert engine.stats().running == 0


@pytest.mark.parametrize("rows_taken", [0, 1])
def test_deadline_ends_a_job_where_it_stands(rows_taken: int) -> None:
    engine = ByHand(lives.speaking(), lives.letters(), rows=1)
    others = [engine.submit(Job((9,), Sampling(max_tokens=50))) for _ in range(rows_taken)]
    run = engine.submit(Job((1, 2, 3), Sampling(max_tokens=50), deadline=time.monotonic() - 1))
    engine.round()
    engine.round()
    assert [p.ending for p in written(run)] == ["deadline"]
    assert engine.stats().running == rows_taken
    for other in others:
        other.cancel()


def test_full_queue_refuses_and_says_when_to_come_back() -> None:
    engine = ByHand(lives.speaking(), lives.letters(), rows=1, queue=2)
    job = Job((1, 2), Sampling(max_tokens=30))
    engine.submit(job)
    engine.round()
    runs = [engine.submit(job) for _ in range(2)]
    with pytest.raises(QueueFullError, match="2 requests are waiting") as refused:
        engine.submit(job)
    assert 1 <= refused.value.retry_after <= 300
    runs[0].cancel()
    engine.round()
    engine.submit(job)


def test_draining_finishes_what_was_begun_and_takes_nothing_new() -> None:
    model = lives.speaking()
    job = Job((1, 2), Sampling(max_tokens=20))
    with running(model, rows=1) as engine:
        runs = [engine.submit(job) for _ in range(3)]
        assert engine.drain(60)
        with pytest.raises(DrainingError):
            engine.submit(job)
        assert all(same(written(run), alone(model, job)) for run in runs)


def test_drain_says_when_it_ran_out_of_time() -> None:
    engine = ByHand(lives.speaking(), lives.letters())
    run = engine.submit(Job((1, 2)))
    assert not engine.drain(0.01)
    engine.close()
    with pytest.raises(DrainingError):
        written(run)


def test_close_leaves_nobody_waiting() -> None:
    with running(lives.speaking(), rows=2) as engine:
        runs = [engine.submit(Job((1, 2), Sampling(max_tokens=4000))) for _ in range(5)]
        for run in runs[:2]:
            # Both rows are taken before the end comes.
            next(run.pieces())
    endings: list[object] = []
    for run in runs:
        try:
            endings.append(written(run)[-1].ending)
        except DrainingError:
            endings.append("refused")
    assert endings == ["cancelled", "cancelled", "refused", "refused", "refused"]
    with pytest.raises(DrainingError):
        engine.submit(Job((1, 2)))
    with pytest.raises(DrainingError):
        asyncio.run(engine.call(int))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_engine_that_stops_says_so_to_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(lives.speaking(), rows=1) as engine:
        runs = [engine.submit(Job((1, 2), Sampling(max_tokens=4000))) for _ in range(2)]
        next(runs[0].pieces())
        monkeypatch.setattr(engine, "_step", lambda: 1 / 0)
        for run in runs:
            with pytest.raises(ZeroDivisionError):
                written(run)
        engine.close()
        with pytest.raises(RuntimeError, match="has stopped"):
            engine.submit(Job((1, 2)))
        assert not engine.drain(1)


@pytest.mark.parametrize("who", ["", "all", "recollection"])
def test_prompt_scores_are_the_log_probabilities_of_its_own_tokens(who: str) -> None:
    model = lives.speaking()
    identity = people(model)[who]
    prompt = [random.Random(3).randrange(256) for _ in range(61)]
    with running(model) as engine:
        run = engine.submit(Job(tuple(prompt), Sampling(max_tokens=3), identity, who, prompt_logprobs=2))
        assert same(written(run), alone(model, run.job))
        plain = engine.submit(Job(tuple(prompt), Sampling(max_tokens=3), identity, who))
        assert same(written(plain), alone(model, run.job))
    with living(model, identity):
        rates = torch.log_softmax(logits_of(model, prompt), -1)
    scores = run.prompt_scores
    assert scores is not None
    assert plain.prompt_scores is None
    assert [s.token for s in scores] == prompt
    assert scores[0].logprob is None
    for i, score in enumerate(scores[1:]):
        assert score.logprob == pytest.approx(float(rates[i, score.token]), abs=2e-5)
        assert [t for t, _ in score.top] == rates[i].topk(2).indices.tolist()


def test_prompt_of_one_token_has_nothing_to_score() -> None:
    engine = ByHand(lives.speaking(), lives.letters())
    run = engine.submit(Job((5,), Sampling(max_tokens=1), prompt_logprobs=300))
    longer = engine.submit(Job((5, 6), Sampling(max_tokens=1), prompt_logprobs=300))
    engine.finish()
    assert len(written(run)) == len(written(longer)) == 1
    assert run.prompt_scores == [Score(5, None)]
    assert longer.prompt_scores is not None
    # No more than there are.
    assert len(longer.prompt_scores[1].top) == 257


def test_answer_is_given_though_there_is_no_memory_to_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lives.speaking()
    engine = ByHand(model, lives.letters())
    job = Job(tuple(range(40)), Sampling(max_tokens=9))

    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(engine.rows, "copy", full)
    run = engine.submit(job)
    engine.finish()
    assert same(written(run), alone(model, job))
    assert engine.stats().cache_bytes == 0


def test_step_that_fails_for_all_is_taken_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lives.speaking()
    engine = ByHand(model, lives.letters())
    meet = native.meet

    def crowded(x: Any, angles: Any, texts: Any, *more: Any) -> Any:
        if len(texts) > 1:
            raise MemoryError("as a test asked")
        return meet(x, angles, texts, *more)

    monkeypatch.setattr(native, "meet", crowded)
    jobs = [Job((1, 2, 3, i), Sampling(max_tokens=9)) for i in range(3)]
    runs = [engine.submit(job) for job in jobs]
    engine.finish()
    assert all(same(written(run), alone(model, job)) for job, run in zip(jobs, runs, strict=True))


def test_rows_step_together_where_they_can() -> None:
    assert isinstance(ByHand(lives.speaking(), None).rows.rows, Together)
    assert isinstance(ByHand(lives.gpt2(), None, weights="int8").rows.rows, Together)
    reason = ByHand(lives.speaking(window=4), None).rows.reason
    assert reason is not None
    assert "only causal texts" in reason


def test_what_does_not_fit_is_refused_before_it_waits() -> None:
    engine = ByHand(lives.gpt2(), None)
    with pytest.raises(ShapeError, match="ask for at most 62"):
        engine.submit(Job((1, 2, 3), Sampling(max_tokens=63)))
    with pytest.raises(ShapeError, match="shorten"):
        engine.submit(Job((1,) * 65, Sampling(max_tokens=1)))
    with pytest.raises(ShapeError, match="this model knows"):
        engine.submit(Job((1, 999)))
    with pytest.raises(ShapeError, match="there is no prompt"):
        engine.submit(Job(()))
    with pytest.raises(SpecError, match="without a tokenizer"):
        engine.submit(Job((1,), Sampling(stop=("x",))))
    for wrong in ({"rows": 0}, {"queue": -1}, {"cache_bytes": 1.5}):
        with pytest.raises(SpecError, match=next(iter(wrong))):
            Engine(lives.gpt2(), None, **cast(Any, wrong))
    assert engine.stats().queued == 0
    run = engine.submit(Job((1, 2, 3), Sampling(max_tokens=62)))
    engine.finish()
    assert len(written(run)) == 62


def test_other_work_runs_beside_decoding_and_one_at_a_time() -> None:
    model = lives.speaking()
    busy = threading.Lock()

    def work() -> int:
        assert busy.acquire(blocking=False)
        time.sleep(0.01)
        busy.release()
        return threading.get_ident()

    async def ask(engine: Engine) -> tuple[list[int], list[Piece]]:
        run = engine.submit(Job((1, 2), Sampling(max_tokens=20)))
        threads = await asyncio.gather(*(engine.call(work) for _ in range(4)))
        return threads, [piece async for piece in run]

    with running(model) as engine:
        threads, pieces = asyncio.run(ask(engine))
        assert len(set(threads)) == 1
        assert threading.get_ident() not in threads
        assert same(pieces, alone(model, Job((1, 2), Sampling(max_tokens=20))))


def test_pieces_are_read_from_several_event_loops_at_once() -> None:
    model = lives.speaking()
    job = Job((1, 2), Sampling(max_tokens=20))

    async def read(run: PlainRun) -> list[Piece]:
        return [piece async for piece in run]

    results: list[list[Piece]] = []
    with running(model) as engine:
        threads = [threading.Thread(target=lambda: results.append(asyncio.run(read(engine.submit(job))))) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert len(results) == 4
    assert all(same(pieces, alone(model, job)) for pieces in results)


def test_hundreds_of_jobs_leave_no_memory_behind() -> None:
    import gc

    model = lives.speaking(depth=1)
    who = lives.someone(base_of(model), 1)
    engine = ByHand(model, lives.letters(), cache_bytes=30_000, queue=100)

    def some(first: int) -> int:
        for n in range(first, first + 300, 50):
            runs = [
                engine.submit(Job((i % 251, i % 13, 5), Sampling(max_tokens=1 + i % 3), who if i % 2 else None, str(i)))
                for i in range(n, n + 50)
            ]
            for run in runs[::7]:
                run.cancel()
            engine.finish()
        gc.collect()
        return len(gc.get_objects())

    some(0)
    before = some(300)
    after = some(600)
    assert after - before < 300
    assert engine.stats().cache_bytes <= 30_000


def test_mechanism_without_a_fast_way_is_decoded_as_it_would_be_alone() -> None:
    for spec in ("cosine | entmax(1.5) | rope", "dot | linear", "dot | softmax | alibi"):
        model = lives.speaking(attention=spec)
        jobs = [Job(tuple(range(1, 9 + i)), Sampling(max_tokens=6)) for i in range(3)]
        with running(model) as engine:
            assert engine.rows.reason
            runs = [engine.submit(job) for job in (*jobs, jobs[0])]
            for job, run in zip((*jobs, jobs[0]), runs, strict=True):
                assert same(written(run), alone(model, job))


@pytest.mark.parametrize("cache", ["float32", "int8"])
def test_rows_are_written_without_compiled_products_too(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    model = lives.speaking()
    jobs = jobs_of(11, people(model), 12)
    with running(model, cache=cache, rows=4) as engine:
        assert engine.rows.reason
        runs = [engine.submit(job) for job in jobs]
        assert all(same(written(run), alone(model, job, cache=cache)) for job, run in zip(jobs, runs, strict=True))
