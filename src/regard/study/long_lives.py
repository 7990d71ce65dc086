"""A life may be of any length: what was told long ago is recalled as what was told today, an update wins, and a token costs the same.

One seed is one life of each length, of the test pool of `people.life`: facts at known ages, some updated later, and talk about nobody
between. SmolLM2 lives through it conversation by conversation; at its end questions are asked in a fresh chat, evenly over the ages.

    recall     greedy answers that contain the value, nats of it against nothing, and the rank of the right turn, by age
    updates    every fact that changed: the new value is likelier than the one that it replaced, in nats of both under what came to mind
    cost       milliseconds a token while somebody speaks (rounds over the lengths in turn), to choose, and seconds of the first answer
               about an episode and of the next; bytes for each token of a life

The control is another's life: the same questions, asked of the life of the next length. Lives are written by the layers that episodes are
found by, a third of the work; only the first seed lives the longest one. To choose is timed in milliseconds of CPU, on one
thread: five times for a question, once before with nothing held of the life (`timed_choose_cold_ms`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..identity.read.finding import finder_of
from ..identity.read.recall import scored
from ..identity.speaking import generate
from ..identity.state import Identity, Recollection
from ..models.decode.sampling import Sampling
from .frame.figure import COLOURS, MARKERS, line_with_band
from .frame.study import Plant, Record, Size, Study
from .frame.verdict import Check, Verdict, interval, judged
from .people.asking import Ask, Examiner, Written, rank_of, write_episodes
from .people.life import Life, LifeQuestion, life
from .people.natural import contains
from .tasks.packaged import MINILM, SMOLLM2, sentence_vectors
from .tasks.pretrained import smollm2

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEEDS, LONG_SEEDS = 5, 1
AGES = (250, 1000, 4000, 16_000, 1 << 20)
"""Upper ends of the bins of ages, in tokens."""
STORY = "Write a long story about a ship."
"""A prompt whose answer is long enough to be timed."""


@dataclass(frozen=True)
class Plan:
    depth: int | None
    lengths: tuple[int, ...]
    longest: tuple[int, ...]
    """Lengths that only the first seeds have."""
    questions: int
    """Of a life at most, evenly over the ages; whether updates win is asked of all that there are."""
    answer: int
    rounds: int
    """In which tokens are timed."""


PLANS = {
    "mini": Plan(2, (500, 600), (), 2, 2, 1),
    "quick": Plan(None, (1000, 2000), (), 3, 12, 1),
    "full": Plan(None, (1000, 4000, 16_000), (64_000,), 6, 24, 3),
}


@dataclass(frozen=True, eq=False)
class Lived:
    life: Life
    written: Written
    seconds: float


@cache
def _examiner(size: Size) -> Examiner:
    model, tokenizer = smollm2(PLANS[size].depth)
    return Examiner(model, tokenizer, Sampling(PLANS[size].answer, repetition_penalty=1.1))


@lru_cache(maxsize=4)
def _lived(length: int, seed: int, size: Size) -> Lived:
    examiner = _examiner(size)
    told = life(length, seed, "test", lambda text: len(examiner.tokenizer.encode(text, bos=False)))
    began = time.perf_counter()
    written = write_episodes(examiner, told.conversations)
    return Lived(told, written, time.perf_counter() - began)


def run(seed: int, size: Size) -> Record:
    plan, examiner = PLANS[size], _examiner(size)
    sentence_vectors(["."])  # an episode has a meaning only where the encoder is at hand
    lengths = [*plan.lengths, *(plan.longest if seed < LONG_SEEDS else ())]
    lives = [_lived(length, seed, size) for length in lengths]
    measured: dict[str, Record] = {}
    minds: dict[str, Identity | None] = {"nobody": None}
    for n, (length, mine) in enumerate(zip(lengths, lives, strict=True)):
        record, mind = _asked(mine, lives[(n + 1) % len(lives)].written.identity, examiner, plan.questions)
        measured[str(length)], minds[str(length)] = record, mind
    return {"lives": measured, "timed_token_ms": _token_ms(examiner, minds, plan.rounds)}


def _asked(mine: Lived, other: Identity, examiner: Examiner, most: int) -> tuple[Record, Identity]:
    """A life's questions, and the identity as the last of them read it."""
    identity, every = mine.written.identity, sorted(mine.life.questions, key=lambda q: q.age)
    picked = [every[round(n * (len(every) - 1) / max(most - 1, 1))] for n in range(min(most, len(every)))]
    rows: list[Record] = []
    mind = identity
    for q in picked:
        row, mind = _row(q, mine, other, examiner)
        rows.append(row)
    count = identity.life.tokens
    ranks = [rank_of(mine.written.ranking(examiner, q.text), [q.turn]) for q in every]
    return {
        "tokens": count,
        "episodes": len(identity.episodes),
        "bytes_per_token": sum(e.nbytes for e in identity.episodes) / max(1, sum(len(e) for e in identity.episodes)),
        "questions": rows,
        "updates": [_update(q, mine, other, examiner) for q in every if q.updated],
        "ranks": [[q.age, rank] for q, rank in zip(every, ranks, strict=True)],
        "refused": [float(_refused(examiner.recalled(identity, _plain(examiner, q)))) for q in mine.life.unanswerable[:most]],
        "timed_write_s": round(mine.seconds, 2),
    }, mind


def _plain(examiner: Examiner, question: str) -> list[int]:
    return examiner.prompt([{"role": "user", "content": question}])


def _refused(mind: Identity) -> bool:
    return isinstance(mind, Recollection) and not mind.chosen


def _row(q: LifeQuestion, mine: Lived, other: Identity, examiner: Examiner) -> tuple[Record, Identity]:
    plain, identity = _plain(examiner, q.text), mine.written.identity
    chosen, choose, cold = _choosing(examiner, identity, q.text)
    mind, remember = _timed(lambda: examiner.recalled(identity, plain))
    own, answer = _timed(lambda: examiner.ask(plain, q.value, mind))
    again = _timed(lambda: examiner.recalled(identity, plain))[1]
    other_mind = examiner.recalled(other, plain)
    theirs, nothing = examiner.ask_all([Ask(plain, q.value, other_mind), Ask(plain, q.value, greedy=False)])
    turns = mine.written.chosen_turns(mind)
    row: Record = {
        "age": q.age,
        "value": q.value,
        "said": own.text,
        "right": float(q.right(own.text)),
        "nats": own.nats,
        "nothing": nothing.nats,
        "other_right": float(q.right(theirs.text)),
        "other_nats": theirs.nats,
        "came": float(q.turn in turns),
        "refused": float(not turns),
        "units": chosen,
        "timed_choose_ms": choose,
        "timed_choose_cold_ms": cold,
        "timed_first_s": remember + answer,
        "timed_next_s": again + answer,
    }
    if q.updated:
        row["old_said"] = float(contains(own.text, q.old) and not q.right(own.text))
    return row, mind


def _update(q: LifeQuestion, mine: Lived, other: Identity, examiner: Examiner) -> Record:
    """Nats of the new value and of the old one, by the own life and by another's."""
    plain = _plain(examiner, q.text)
    mind, other_mind = (examiner.recalled(x, plain) for x in (mine.written.identity, other))
    pairs = [(value, who) for who in (mind, other_mind, None) for value in (q.value, q.old)]
    said = examiner.ask_all([Ask(plain, value, who, greedy=False) for value, who in pairs])
    new, old, other_new, other_old, plain_new, plain_old = (round(x.nats, 4) for x in said)
    turns = mine.written.chosen_turns(mind)
    return {
        "age": q.age,
        "value": q.value,
        "old": q.old,
        "came": float(q.turn in turns),
        "refused": float(not turns),
        "nats": [new, old],
        "other_nats": [other_new, other_old],
        "plain_nats": [plain_new, plain_old],
    }


def _scored(examiner: Examiner, identity: Identity, question: str) -> int:
    asked = examiner.tokenizer.encode(question, bos=False)
    return len(scored(finder_of(examiner.body, examiner.tokenizer), identity.episodes, asked, question).units)


def _choosing(examiner: Examiner, identity: Identity, question: str) -> tuple[int, float, float]:
    """Units that were chosen among; milliseconds of CPU to choose, the median of five; and the first time."""
    examiner.body.made.pop("lives", None)
    each: list[float] = []
    units = 0
    for _ in range(6):
        began = time.process_time()
        units = _scored(examiner, identity, question)
        each.append(1000 * (time.process_time() - began))
    return units, statistics.median(each[1:]), each[0]


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    made = call()
    return made, time.perf_counter() - began


def _token_ms(examiner: Examiner, minds: dict[str, Identity | None], rounds: int) -> dict[str, float]:
    """Milliseconds between two tokens, the median of all; rounds go over the lengths in turn, so that a busy minute meets all of them."""
    prompt, sampling = _plain(examiner, STORY), Sampling(examiner.sampling.max_tokens)
    between: dict[str, list[float]] = {name: [] for name in minds}
    for _ in range(rounds):
        for name, mind in minds.items():
            at: list[float] = []
            generate(examiner.model, prompt, sampling, identity=mind, on_token=lambda _, at=at: at.append(time.perf_counter()))
            between[name] += [b - a for a, b in pairwise(at)]
    return {name: 1000 * statistics.median(x) if x else 0.0 for name, x in between.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)


def rows_of(record: Record) -> list[Record]:
    return [row for each in record["lives"].values() for row in each["questions"]]


def older_less_younger(record: Record, key: str) -> float:
    """The mean over the older half of a seed's questions less that over the younger half."""
    rows = sorted(rows_of(record), key=lambda row: row["age"])
    half = len(rows) // 2
    return _mean([r[key] for r in rows[half:]]) - _mean([r[key] for r in rows[:half]])


def update_wins(record: Record, key: str = "nats") -> list[float]:
    """1 where the new value is likelier than the old one."""
    each = [row[key] for mine in record["lives"].values() for row in mine["updates"]]
    return [float(new < old) for new, old in each]


def _longest(record: Record) -> str:
    return max(record["lives"], key=int)


def judge(records: Sequence[Record]) -> Verdict:
    rows = [rows_of(r) for r in records]
    changed = [r for r in records if update_wins(r)]
    ratio = [r["timed_token_ms"][_longest(r)] / max(r["timed_token_ms"][min(r["lives"], key=int)], 1e-9) for r in records]
    far = [r["lives"][_longest(r)]["questions"] for r in records]
    checks = [
        Check("nats of the answer below those of nothing", [_mean([q["nothing"] - q["nats"] for q in x]) for x in rows], above=0.5,
              control=[_mean([q["nothing"] - q["other_nats"] for q in x]) for x in rows], needed=True, condition="it is the own life"),
        Check("greedy answers right, above those with another's life", [_mean([q["right"] - q["other_right"] for q in x]) for x in rows], above=0.2,
              condition="it is the own life"),
        Check("greedy answers right about the older half less about the younger", [older_less_younger(r, "right") for r in records], above=-0.1,
              condition="recall may fall by ten points with age"),
        Check("the right turn comes to mind, older half less younger", [older_less_younger(r, "came") for r in records], above=-0.1,
              condition="recall may fall by ten points with age"),
        Check("a token in the longest life against one in the shortest, milliseconds", ratio, below=1.05, condition="time for a token is counted"),
        Check("milliseconds to choose in the longest life", [statistics.median(q["timed_choose_ms"] for q in x) for x in far], below=150,
              condition="time to choose is counted"),
        Check("seconds of the first answer about an episode", [statistics.median(q["timed_first_s"] for q in x) for x in far], below=1.5,
              condition="the first answer is timed"),
        Check("bytes for a token of a life", [r["lives"][_longest(r)]["bytes_per_token"] for r in records], below=1536, condition="bytes are counted"),
    ]  # fmt: skip
    if changed:
        checks.append(Check("updates that are likelier than what they replace", [_mean(update_wins(r)) for r in changed], above=0.8,
                            control=[_mean(update_wins(r, "other_nats")) for r in changed], condition="a fact has changed"))  # fmt: skip
    return judged(*checks)


def draw(records: Sequence[Record], figure: Figure) -> None:
    left, middle, right = figure.subplots(1, 3)
    rows = [row for r in records for row in rows_of(r)]
    bins = [[row for row in rows if low <= row["age"] < high] for low, high in zip((0, *AGES), AGES, strict=False)]
    ends = [(f"< {high:,}" if high < 1 << 20 else f"≥ {AGES[-2]:,}") for high in AGES]
    shown = [(name, some) for name, some in zip(ends, bins, strict=True) if some]
    for n, (key, name) in enumerate(
        (("right", "own life"), ("other_right", "another's life"), ("came", "the right turn came"))
    ):
        line_with_band(
            left, range(len(shown)), [interval([100 * row[key] for row in some]) for _, some in shown], name, (0, 1, 7)[n]
        )
    left.set_xticks(range(len(shown)), [name for name, _ in shown])
    left.set(xlabel="tokens said since", ylabel="questions (%)", title="Greedy answers by age", ylim=(-2, 102))
    left.legend()
    lengths = sorted({length for r in records for length in r["lives"]}, key=int)
    for n, first in enumerate((1, 3)):
        shares = [interval([100.0 * (rank < first) for r in records for _, rank in r["lives"].get(x, {"ranks": []})["ranks"]]) for x in lengths]  # fmt: skip
        line_with_band(middle, range(len(lengths)), shares, f"among the first {first}", (0, 4)[n])
    middle.set_xticks(range(len(lengths)), [f"{int(x):,}" for x in lengths])
    middle.set(xlabel="tokens of a life", ylabel="the right turn (%)", title="Where it is ranked", ylim=(-2, 102))
    middle.legend()
    for n, name in enumerate(("token", "choose")):
        points = [[_ms(r, name, x) for r in records if x in r["lives"]] for x in lengths]
        means = [interval(p) for p in points]
        spread = [[m.mean - m.low for m in means], [m.high - m.mean for m in means]]
        right.errorbar(range(len(lengths)), [m.mean for m in means], yerr=spread, fmt=f"{MARKERS[n]}-", color=COLOURS[n], capsize=2, label=("a token", "choosing")[n])  # fmt: skip
    right.set_xticks(range(len(lengths)), [f"{int(x):,}" for x in lengths])
    right.set(xlabel="tokens of a life", ylabel="milliseconds", title="What it costs", ylim=(0, None))
    right.legend()


def _ms(record: Record, name: str, length: str) -> float:
    if name == "token":
        return record["timed_token_ms"][length]
    return statistics.median(q["timed_choose_ms"] for q in record["lives"][length]["questions"])


def planted(kind: Plant, seed: int) -> Record:
    true, spoiled, wobble = kind != "negative", kind == "control", 0.002 * (seed % 3)
    good = {"right": 1.0, "nats": 1.5 + wobble}
    bad = {"right": 0.0, "nats": 4.0 + wobble}
    own, other = good if true else bad, good if spoiled else bad
    row: Record = {
        "age": 100, **own, "nothing": 4.0, "other_right": other["right"], "other_nats": other["nats"], "came": own["right"], "refused": 0.0,
        "timed_choose_ms": 40.0 if true else 400.0, "timed_first_s": 1.0, "timed_next_s": 0.8,
    }  # fmt: skip
    old = {**row, "age": 800, "right": row["right"] if true else 0.0}
    update = {"nats": [own["nats"], 3.0], "other_nats": [other["nats"], 3.0]}
    each = {
        "tokens": 1000,
        "bytes_per_token": 1200.0,
        "questions": [row, old],
        "updates": [update],
        "ranks": [[100, 0], [800, 0 if true else 9]],
    }
    return {
        "lives": {"1000": each, "4000": each},
        "timed_token_ms": {"nobody": 30.0, "1000": 31.0, "4000": 31.0 if true else 40.0},
    }


STUDY = Study(
    claim="A life of any length is recalled alike: at any age, by its latest word, and at the same cost for a token.",
    source="what an identity promises here",
    protocol="Lives of the test pool of 1, 4 and 16 thousand tokens, and of 64 thousand for the first seed; SmolLM2 lives through each and is asked up to six natural questions in a fresh chat, evenly over the ages, and of every fact that changed for its new and its old value; times in rounds over the lengths in turn.",
    controls=(
        "another's life, that of the next length, for the same questions",
        "the model by itself",
        "the value that an update replaced",
        "questions without an answer",
    ),
    caption="Left: greedy answers by how long ago the answer was told; middle: the rank of the right turn among all turns of a life; right: milliseconds for a token and for choosing, which a longer life should not raise.",
    run=run,
    judge=judge,
    draw=draw,
    planted=planted,
    seeds=SEEDS,
    needs=(SMOLLM2, MINILM),
)
