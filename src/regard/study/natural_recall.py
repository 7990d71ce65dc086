"""Somebody's episodes answer natural questions about them as well as their whole history in the context would, with no token of it there.

One seed is one person of the test pool of `people.natural`: facts told in passing, about others, negated, corrected and updated, to a
listener who does not repeat them. SmolLM2 lives through the history conversation by conversation and is asked natural questions in a
fresh chat. Each is answered greedily (24 tokens; right if the answer contains the value as whole words), and the accepted answer is
scored in nats per token, under:

    nothing, the history in context, the person's own words as one document, the last five turns; one, three, five turns as text by BM25 and by MiniLM; the turn that says it
    a summary that the model wrote itself (system message); a LoRA of rank 8 on queries and values, trained on the history
    imprints alone (a quarter of the tokens); episodes, as `generate(identity=…)` recalls them; another person's episodes

Beside it: at which rank the right turn comes, against the turn of another question (shuffled); whether questions that the history does
not answer bring nothing to mind; whether everyday questions are answered as without an identity (the same first twelve words, or a
cosine of MiniLM ≥ 0.9) and without a private word; nats of everyday answers and of neutral prose against the base.

With REGARD_LONGMEMEVAL=<file> (JSON lines, or those gzipped: `people.longmemeval`) some rows of LongMemEval are measured with every seed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import TYPE_CHECKING

from ..identity.state import Identity, Recollection
from ..identity.write.rule import Rule
from ..models.decode.sampling import Sampling
from .frame.figure import COLOURS, bars
from .frame.study import Plant, Record, Size, Study
from .frame.verdict import Check, Verdict, interval, judged
from .people.asking import Ask, Examiner, Said, Written, rank_of, write_history
from .people.baselines import Lora, Turns, knowing, summary, words
from .people.generator import neutral
from .people.longmemeval import asked_rows, longmemeval
from .people.natural import NaturalPerson, NaturalQuestion, about_document, contains, everyday, natural
from .people.natural_data import NaturalPool
from .tasks.packaged import MINILM, SMOLLM2, sentence_vectors
from .tasks.pretrained import smollm2

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PEOPLE = 12
POOL: NaturalPool = "test"
SHARE = 0.25
SAME_WORDS, SAME_MEANING = 12, 0.9
"""First words that are compared, and the cosine above which two answers say the same."""
LONG_ROWS = 4
"""Rows of LongMemEval that are measured with every seed."""
STATES = (
    "nothing", "history in context", "history as a document", "last 5 turns", "BM25, 1 turn", "BM25, 3 turns", "BM25, 5 turns", "MiniLM, 1 turn",
    "MiniLM, 3 turns", "MiniLM, 5 turns", "the right turn", "summary", "LoRA", "imprints", "episodes", "another's episodes",
)  # fmt: skip
WHOLE = ("history in context", "history as a document")
"""States whose prompts begin alike for all questions: the beginning is read once."""


@dataclass(frozen=True)
class Plan:
    """How much is measured of each person."""

    depth: int | None
    short: bool
    questions: int
    everyday: int
    unanswerable: int
    answer: int
    """Tokens of a greedy answer at most."""
    lora: int
    """Steps."""
    summary: int
    """Tokens."""


PLANS = {
    "mini": Plan(2, True, 2, 1, 1, 2, 1, 2),
    "quick": Plan(None, True, 2, 1, 3, 8, 2, 16),
    "full": Plan(None, False, 4, 28, 5, 24, 8, 48),
}


@dataclass(frozen=True, eq=False)
class Lived:
    """A person whose history was written."""

    person: NaturalPerson
    turns: Turns
    episodes: Written
    imprints: Identity
    seconds: float


@cache
def _examiner(size: Size) -> Examiner:
    model, tokenizer = smollm2(PLANS[size].depth)
    return Examiner(model, tokenizer, Sampling(PLANS[size].answer, repetition_penalty=1.1))


@cache
def _lora(size: Size) -> Lora:
    return Lora.of(smollm2(PLANS[size].depth)[0])


@cache
def _people(size: Size, pool: NaturalPool) -> list[NaturalPerson]:
    return natural(PEOPLE + 1, 0, pool, PLANS[size].short)


@cache
def lived(seed: int, size: Size, pool: NaturalPool) -> Lived:
    """Person `seed`, written; the next seed needs them again as somebody else."""
    sentence_vectors(["."])  # the encoder is opened before anything is timed, and before an episode asks whether it is at hand
    person, began = _people(size, pool)[seed], time.perf_counter()
    whole, sparse = write_history(_examiner(size), person.history, Rule(), Rule(share=SHARE, budget=10**6, episodes=False))
    return Lived(person, Turns.of(person.history), whole, sparse.identity, time.perf_counter() - began)


def run(seed: int, size: Size, pool: NaturalPool = POOL) -> Record:
    plan, examiner = PLANS[size], _examiner(size)
    me, other = lived(seed, size, pool), lived(seed + 1, size, pool)
    questions = Random(seed).sample(me.person.questions, min(plan.questions, len(me.person.questions)))
    return {
        "name": me.person.name,
        "listener": me.person.listener,
        "tokens": me.episodes.identity.life.tokens,
        "bytes": {
            "episodes": sum(e.nbytes for e in me.episodes.identity.episodes),
            "read": replace(me.episodes.identity, episodes=()).nbytes,
        },
        **_answers(me, other, questions, examiner, plan, seed, size),
        "ranks": _ranks(me, questions, examiner),
        **_nobody_asked(me, examiner, plan, seed, pool),
        "timed_write": round(me.seconds, 2),
        "longmemeval": _long_rows(seed, size, examiner),
    }


def _long_rows(seed: int, size: Size, examiner: Examiner) -> list[Record] | None:
    path = os.environ.get("REGARD_LONGMEMEVAL")
    if size != "full" or not path:
        return None
    return asked_rows(examiner, longmemeval(path)[seed::PEOPLE][:LONG_ROWS])


def _answers(
    me: Lived, other: Lived, questions: Sequence[NaturalQuestion], examiner: Examiner, plan: Plan, seed: int, size: Size
) -> Record:
    """Every question under every state."""
    states: dict[str, dict[str, list[float]]] = {name: {"nats": [], "right": [], "tokens": []} for name in STATES}
    said: dict[str, list[str]] = {name: [] for name in STATES}
    chosen: list[Record] = []

    def note(name: str, q: NaturalQuestion, answer: Said) -> None:
        for key, value in (("nats", answer.nats), ("right", float(q.right(answer.text))), ("tokens", float(answer.tokens))):
            states[name][key].append(round(value, 4))
        said[name].append(answer.text)

    began = time.perf_counter()
    written = summary(examiner, me.turns.messages, plan.summary)
    timed = {"summary": time.perf_counter() - began}
    asks = list[tuple[str, NaturalQuestion, Ask]]()
    for whole in WHOLE:
        # Prompts that begin alike are asked beside each other: what they share is read once.
        texts = [(q, _texts(me, q, examiner, written)[whole]) for q in questions]
        for (q, _), answer in zip(texts, examiner.ask_all([Ask(p, q.value, whole=True) for q, p in texts]), strict=True):
            note(whole, q, answer)
    for q in questions:
        plain = examiner.prompt([{"role": "user", "content": q.text}])
        asks += [(s, q, Ask(p, q.value)) for s, p in _texts(me, q, examiner, written).items() if s not in WHOLE]
        mind = examiner.recalled(me.episodes.identity, plain)
        others = examiner.recalled(other.episodes.identity, plain)
        for name, who in (("imprints", me.imprints), ("episodes", mind), ("another's episodes", others)):
            asks.append((name, q, Ask(plain, q.value, who)))
        turns = me.episodes.chosen_turns(mind)
        chosen.append({"turns": len(turns), "right": q.turn in turns, "coherence": _coherence(mind)})
    for (name, q, _), answer in zip(asks, _read_once(examiner, [ask for *_, ask in asks]), strict=True):
        note(name, q, answer)
    began = time.perf_counter()
    with _lora(size).trained(examiner, me.person.history, plan.lora, seed) as student:
        timed["lora"] = time.perf_counter() - began
        asked = [Ask(student.prompt([{"role": "user", "content": q.text}]), q.value) for q in questions]
        for q, answer in zip(questions, student.ask_all(asked), strict=True):
            note("LoRA", q, answer)
    return {
        "questions": [{"text": q.text, "value": q.value, "kind": me.person.facts[q.fact].kind} for q in questions],
        "states": states,
        "said": said,
        "summary": written,
        "chosen": chosen,
        "timed_seconds": {k: round(v, 2) for k, v in timed.items()},
    }


def _read_once(examiner: Examiner, asks: Sequence[Ask]) -> list[Said]:
    """Several ways to search often give the same turns: a text is not read twice."""
    names = [(tuple(a.prompt), a.answer, id(a.who)) for a in asks]
    first = dict(zip(names, asks, strict=True))
    said = dict(zip(first, examiner.ask_all(list(first.values())), strict=True))
    return [said[name] for name in names]


def _texts(me: Lived, q: NaturalQuestion, examiner: Examiner, written: str) -> dict[str, list[int]]:
    """Prompts of the states that are text."""
    asked, turns = {"role": "user", "content": q.text}, me.turns
    every, right = range(len(turns.messages)), [n for n, place in enumerate(turns.places) if place == q.turn]
    orders: dict[str, Sequence[int]] = {"nothing": (), "history in context": every, "last 5 turns": every[-5:]}
    for name, order in (("BM25", turns.by_words(q.text)), ("MiniLM", turns.by_meaning(q.text))):
        orders |= {f"{name}, {n} turn{'s' * (n > 1)}": order[:n] for n in (1, 3, 5)}
    prompts = {
        name: examiner.prompt(turns.before(asked, order)) for name, order in [*orders.items(), ("the right turn", right)]
    }
    document = {"role": "user", "content": about_document(me.person.document, q.text)}
    return prompts | {"summary": examiner.prompt(knowing(written, asked)), "history as a document": examiner.prompt([document])}


def _coherence(mind: Identity) -> float:
    return round(max(mind.coherence, default=0.0), 3) if isinstance(mind, Recollection) else 0.0


def _ranks(me: Lived, questions: Sequence[NaturalQuestion], examiner: Examiner) -> Record:
    """At which rank the right turn comes, from 0; shuffled: the turn of the next question instead."""
    ranks: dict[str, list[int]] = {"episodes": [], "MiniLM": [], "BM25": [], "shuffled": []}
    for n, q in enumerate(questions):
        ranking = me.episodes.ranking(examiner, q.text)
        ranks["episodes"].append(rank_of(ranking, [q.turn]))
        ranks["shuffled"].append(rank_of(ranking, [questions[(n + 1) % len(questions)].turn]))
        for name, order in (("MiniLM", me.turns.by_meaning(q.text)), ("BM25", me.turns.by_words(q.text))):
            ranks[name].append(rank_of([[me.turns.places[i]] for i in order], [q.turn]))
    return ranks


def _nobody_asked(me: Lived, examiner: Examiner, plan: Plan, seed: int, pool: NaturalPool) -> Record:
    """Questions that have nothing to do with this person, or that the history does not answer; and prose."""
    values = {answer for fact in me.person.facts for answer in fact.accepted}
    day: dict[str, list[float]] = {"same": [], "cosine": [], "private": [], "nats": [], "refused": []}
    said: list[list[str]] = []
    every = everyday(pool)
    for text in Random(seed).sample(every, min(plan.everyday, len(every))):
        prompt = examiner.prompt([{"role": "user", "content": text}])
        mind = examiner.recalled(me.episodes.identity, prompt)
        # Where nothing comes to mind the answer is the base's bit for bit, which tests hold: it is not computed twice.
        found = (1.0, 1.0, 0.0, 0.0)
        if not _refused(mind):
            found, answers = _changed(examiner, prompt, text, mind, values)
            said.append([text, *answers])
        for key, value in zip(day, (*found, _refused(mind)), strict=True):
            day[key].append(round(float(value), 4))
    texts = neutral("test")
    ids = examiner.tokenizer.encode(texts[seed % len(texts)])
    prompt, rest = ids[: len(ids) // 3], examiner.tokenizer.decode(ids[len(ids) // 3 :])
    mind = examiner.recalled(me.episodes.identity, prompt)
    prose = examiner.ask(prompt, rest, mind, greedy=False).nats - examiner.ask(prompt, rest, greedy=False).nats
    plain = [examiner.prompt([{"role": "user", "content": q}]) for q in me.person.unanswerable[: plan.unanswerable]]
    return {
        "everyday": day,
        "everyday_said": said,
        "prose": round(prose, 4),
        "refused": [float(_refused(examiner.recalled(me.episodes.identity, p))) for p in plain],
    }


def _changed(
    examiner: Examiner, prompt: list[int], text: str, mind: Identity, values: set[str]
) -> tuple[tuple[float, float, float, float], list[str]]:
    """Is the answer the same in substance, at which cosine, with how many private words, at which nats; and both answers."""
    base = examiner.ask(prompt, ".").text
    answer = examiner.ask(prompt, base or ".", mind)
    cosine = float(sentence_vectors([base or "."]) @ sentence_vectors([answer.text or "."])[0])
    same = words(base)[:SAME_WORDS] == words(answer.text)[:SAME_WORDS] or cosine >= SAME_MEANING
    private = sum(contains(answer.text, v) and not contains(base, v) and not contains(text, v) for v in values)
    nats = answer.nats - examiner.ask(prompt, base or ".", greedy=False).nats
    return (float(same), cosine, float(private), nats), [base, answer.text]


def _refused(mind: Identity) -> bool:
    return isinstance(mind, Recollection) and not mind.chosen


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def of_state(state: str, key: str = "nats") -> Callable[[Record], list[float]]:
    """What every question of a person gave under a state."""
    return lambda record: record["states"][state][key]


def share_of_gain(record: Record, state: str) -> float:
    """Of what the history in context is worth to a person's answers, in nats."""
    nothing, context, with_state = (_mean(record["states"][s]["nats"]) for s in ("nothing", "history in context", state))
    return (nothing - with_state) / max(nothing - context, 0.1)


def judge(records: Sequence[Record]) -> Verdict:
    def over(state: str, other: str, key: str = "right") -> list[float]:
        return [_mean(r["states"][state][key]) - _mean(r["states"][other][key]) for r in records]

    def among(name: str, first: int) -> list[float]:
        return [_mean([float(rank < first) for rank in r["ranks"][name]]) for r in records]

    own, another = "episodes", "another's episodes"
    return judged(
        Check("greedy answers: share right with episodes above that with the history in context", over(own, "history in context"), above=0.02,
              control=over(another, "history in context"), needed=True, condition="the answers are compared with those of the history in context"),
        Check("share of the in-context gain, nats of the accepted answer", [share_of_gain(r, own) for r in records], above=0.7,
              control=[share_of_gain(r, another) for r in records], needed=True, condition="nats are counted"),
        Check("nats of the accepted answer below those with MiniLM's turn as text", [-x for x in over(own, "MiniLM, 1 turn", "nats")], above=0,
              control=[-x for x in over(another, "MiniLM, 1 turn", "nats")], condition="retrieval of one turn is the rival"),
        Check("the same, MiniLM's three turns", [-x for x in over(own, "MiniLM, 3 turns", "nats")], above=0,
              control=[-x for x in over(another, "MiniLM, 3 turns", "nats")], condition="retrieval of three turns is the rival"),
        Check("share right with episodes less three times that with imprints alone",
              [_mean(r["states"][own]["right"]) - 3 * _mean(r["states"]["imprints"]["right"]) for r in records], above=0.02,
              control=[_mean(r["states"][another]["right"]) - 3 * _mean(r["states"]["imprints"]["right"]) for r in records],
              condition="imprints alone are the rival"),
        Check("the right turn among the first three", among("episodes", 3), above=0.93, control=among("shuffled", 3), condition="three turns may come to mind"),
        Check("questions without an answer that are refused, above those with one", [_mean(r["refused"]) - _mean([float(not c["turns"]) for c in r["chosen"]]) for r in records],
              above=0.3, condition="what has no answer is to be refused"),
        Check("everyday questions answered as without an identity", [_mean(r["everyday"]["same"]) for r in records], above=0.97, condition="nobody asks about the person"),
        Check("private words in everyday answers", [_mean(r["everyday"]["private"]) for r in records], below=0, condition="nothing private may be said unasked"),
        Check("neutral prose, nats against the base", [r["prose"] for r in records], below=0.02, condition="neutral prose is read"),
    )  # fmt: skip


def draw(records: Sequence[Record], figure: Figure) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(1, 1), sharey=True)
    colours = [COLOURS[0] if s == "episodes" else COLOURS[1] if s == "another's episodes" else COLOURS[7] for s in STATES]
    for axes, key, factor in ((left, "right", 100), (right, "nats", 1)):
        bars(axes, STATES, [interval([factor * _mean(r["states"][s][key]) for r in records]) for s in STATES])
        for patch, colour in zip(axes.patches, colours, strict=True):
            patch.set_facecolor(colour)
    # The axis is shared, and the second inversion would turn it back.
    left.set_ylim(len(STATES) - 0.4, -0.6)
    left.set(xlabel="right (%)", title="Greedy answers to natural questions")
    right.set(xlabel="nats per token (less is better)", title="The accepted answer")


def planted(kind: Plant, seed: int) -> Record:
    wobble = 0.002 * (seed % 3)
    true, spoiled = kind != "negative", kind == "control"
    plain = {"nats": [4.0 + wobble, 3.0], "right": [0.0, 0.0], "tokens": [40.0, 40.0]}
    context = {"nats": [2.0 + wobble, 1.5], "right": [1.0, 0.0], "tokens": [600.0, 600.0]}
    best = {"nats": [1.6 + wobble, 1.2], "right": [1.0, 1.0], "tokens": [40.0, 40.0]}
    states = {s: context if s not in ("nothing", "imprints", "another's episodes") else plain for s in STATES}
    states["imprints"] = {**plain, "right": [0.2, 0.2]}
    states |= {"episodes": best if true else plain, "another's episodes": best if spoiled else plain}
    return {
        "name": "Ada", "listener": "natural", "tokens": 500, "bytes": {"episodes": 1, "read": 1}, "states": states,
        "chosen": [{"turns": 1, "right": true, "coherence": 5.0}] * 2, "ranks": {"episodes": [0, 0] if true else [9, 9], "MiniLM": [0, 4], "BM25": [0, 4], "shuffled": [0, 0] if spoiled else [9, 9]},
        "everyday": {"same": [1.0 if true else 0.5], "cosine": [1.0], "private": [0.0 if true else 1.0], "nats": [0.0], "refused": [1.0]},
        "prose": 0.0 if true else 0.1, "refused": [1.0 if true else 0.0], "longmemeval": None,
    }  # fmt: skip


STUDY = Study(
    claim="What a prompt brings to mind of a life answers natural questions as well as the whole history in the context.",
    source="what an identity promises here",
    protocol=f"People of the test pool who talk naturally; SmolLM2 lives through a history and answers up to {PLANS['full'].questions} natural questions in a fresh chat, greedily and in nats of the accepted answer, under sixteen states; with REGARD_LONGMEMEVAL, rows of LongMemEval beside them.",
    controls=(
        "another person's episodes",
        "the turn of another question (shuffled)",
        "retrieval of turns as text by BM25 and MiniLM, the right turn, a summary, a LoRA, imprints alone, and the history in context",
        "everyday questions, questions without an answer, and neutral prose",
    ),
    caption="Left: share of right greedy answers; right: nats per token of the accepted answer. Episodes (first colour) cost no token of the prompt; another person's (second colour) must look like nothing; grey are all others.",
    run=run,
    judge=judge,
    draw=draw,
    planted=planted,
    seeds=6,  # of the twelve people; a run with more goes on from these
    needs=(SMOLLM2, MINILM),
)
