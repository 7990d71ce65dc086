"""What was settled on made-up people holds for people whom somebody wrote by hand, without knowing the rules.

One seed is one person of the fourth pool of `people.written`, by two authors: no grammar made them, and nothing was chosen on them. They were opened
for this study alone, once, when everything was settled on seven pools of `people.natural` and on the other pools of `people.written`.
SmolLM2 writes their episodes and is asked their questions in a fresh chat, greedily and in nats of the accepted answer: with nothing, with
the history in the context, with one and three turns as text by BM25 and by MiniLM, the turn that says it, episodes, and another person's. Nats under
episodes are over all that may come to mind (`identity.scoring`), as an answer is drawn at temperature 1.

Beside it: the rank of the right turn, against the turn of another question (shuffled); whether what was changed later is likelier than what it was; what
brings nothing to mind of the questions without an answer; and whether everyday questions are answered as without an identity, without a private word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import TYPE_CHECKING, cast

from ..identity.state import Identity, Recollection
from ..models.decode.sampling import Sampling
from .frame.figure import COLOURS, bars
from .frame.study import Plant, Record, Size, Study
from .frame.verdict import Check, Verdict, interval, judged
from .natural_recall import _changed as changed  # pyright: ignore[reportPrivateUsage]
from .people.asking import Ask, Examiner, Written, rank_of, write_episodes
from .people.baselines import Turns
from .people.natural import NaturalPerson, NaturalQuestion
from .people.written import WrittenPool, written, written_everyday
from .tasks.packaged import MINILM, SMOLLM2, sentence_vectors
from .tasks.pretrained import smollm2

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PEOPLE = 16
POOL: WrittenPool = "fourth"
STATES = (
    "nothing", "history in context", "BM25, 1 turn", "BM25, 3 turns", "MiniLM, 1 turn", "MiniLM, 3 turns", "the right turn",
    "episodes", "another's episodes",
)  # fmt: skip
WHOLE, RIVALS = STATES[1], STATES[2:6]


@dataclass(frozen=True)
class Plan:
    depth: int | None
    questions: int
    everyday: int
    answer: int
    """Tokens of a greedy answer at most."""


PLANS = {"mini": Plan(2, 2, 1, 2), "quick": Plan(None, 2, 4, 8), "full": Plan(None, 7, 48, 24)}


@cache
def _examiner(size: Size) -> Examiner:
    model, tokenizer = smollm2(PLANS[size].depth)
    return Examiner(model, tokenizer, Sampling(PLANS[size].answer, repetition_penalty=1.1))


@cache
def _lived(seed: int, size: Size) -> tuple[NaturalPerson, Written]:
    sentence_vectors(["."])  # an episode has a meaning only where the encoder is at hand
    person = written(POOL)[seed % PEOPLE]
    return person, write_episodes(_examiner(size), person.history)


def run(seed: int, size: Size) -> Record:
    plan, examiner = PLANS[size], _examiner(size)
    (person, mine), (_, other) = _lived(seed, size), _lived(seed + 1, size)
    asked = Random(seed).sample(person.questions, min(plan.questions, len(person.questions)))
    unanswered = [examiner.prompt([{"role": "user", "content": q}]) for q in person.unanswerable]
    return {
        "name": person.name,
        "listener": person.listener,
        "tokens": mine.identity.life.tokens,
        **_answers(person, mine, other, asked, examiner),
        "everyday": _everyday(person, mine, examiner, Random(seed).sample(written_everyday(POOL), plan.everyday)),
        "updates": [_update(q, mine, other, examiner) for q in person.questions if q.choices],
        "refused": [float(_refused(examiner.recalled(mine.identity, p))) for p in unanswered],
    }


def _update(q: NaturalQuestion, mine: Written, other: Written, examiner: Examiner) -> Record:
    """Nats of what is so now and of what was, by the own life and by another's."""
    plain = examiner.prompt([{"role": "user", "content": q.text}])
    minds = [examiner.recalled(who.identity, plain) for who in (mine, other)]
    said = examiner.ask_all([Ask(plain, value, mind, greedy=False) for mind in minds for value in (q.value, q.choices[0])])
    nats = [round(x.nats, 4) for x in said]
    return {"own": nats[:2], "another": nats[2:]}


def _answers(
    person: NaturalPerson, mine: Written, other: Written, asked: Sequence[NaturalQuestion], examiner: Examiner
) -> Record:
    turns = Turns.of(person.history)
    every = range(len(turns.messages))
    states: dict[str, dict[str, list[float]]] = {name: {"nats": [], "right": []} for name in STATES}
    ranks: dict[str, list[int]] = {"episodes": [], "MiniLM": [], "shuffled": []}
    came: list[Record] = []
    said: list[Record] = []
    minds = list[Identity]()
    asks = dict[tuple[int, str], Ask]()
    for n, q in enumerate(asked):
        question = {"role": "user", "content": q.text}
        plain, by_words, by_meaning = examiner.prompt([question]), turns.by_words(q.text), turns.by_meaning(q.text)
        orders = [(), every, by_words[:1], by_words[:3], by_meaning[:1], by_meaning[:3], [turns.places.index(q.turn)]]
        for name, order in zip(STATES, orders, strict=False):
            asks[n, name] = Ask(examiner.prompt(turns.before(question, order)), q.value, whole=name == WHOLE)
        for name, who in zip(STATES[len(orders) :], (mine, other), strict=True):
            asks[n, name] = Ask(plain, q.value, examiner.recalled(who.identity, plain))
        minds.append(cast(Identity, asks[n, "episodes"].who))
    answers = examiner.ask_all(list(asks.values()))
    texts = [dict[str, str]() for _ in asked]
    for (n, name), answer in zip(asks, answers, strict=True):
        states[name]["nats"].append(round(answer.nats, 4))
        states[name]["right"].append(float(asked[n].right(answer.text)))
        texts[n][name] = answer.text
    for n, (q, mind) in enumerate(zip(asked, minds, strict=True)):
        ranking = mine.ranking(examiner, q.text)
        ranks["episodes"].append(rank_of(ranking, [q.turn]))
        ranks["shuffled"].append(rank_of(ranking, [asked[(n + 1) % len(asked)].turn]))
        ranks["MiniLM"].append(rank_of([[turns.places[i]] for i in turns.by_meaning(q.text)], [q.turn]))
        came.append({"turns": len(mine.chosen_turns(mind)), "right": q.turn in mine.chosen_turns(mind)})
        said.append({"text": q.text, "value": q.value, "kind": person.facts[q.fact].kind, "said": texts[n]})
    return {"states": states, "ranks": ranks, "chosen": came, "questions": said}


def _everyday(person: NaturalPerson, mine: Written, examiner: Examiner, texts: Sequence[str]) -> Record:
    values = {answer for fact in person.facts for answer in fact.accepted}
    day: dict[str, list[float]] = {"same": [], "cosine": [], "private": [], "nats": [], "refused": []}
    for text in texts:
        prompt = examiner.prompt([{"role": "user", "content": text}])
        mind = examiner.recalled(mine.identity, prompt)
        found = (1.0, 1.0, 0.0, 0.0) if _refused(mind) else changed(examiner, prompt, text, mind, values)[0]
        for key, value in zip(day, (*found, float(_refused(mind))), strict=True):
            day[key].append(round(value, 4))
    return day


def _refused(mind: Identity) -> bool:
    return isinstance(mind, Recollection) and not mind.chosen


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def judge(records: Sequence[Record]) -> Verdict:
    def above(state: str, other: str, key: str) -> list[float]:
        return [_mean(r["states"][state][key]) - _mean(r["states"][other][key]) for r in records]

    def below(state: str, other: str) -> list[float]:
        return [-x for x in above(state, other, "nats")]

    def among(name: str) -> list[float]:
        return [_mean([float(rank < 3) for rank in r["ranks"][name]]) for r in records]

    def won(who: str) -> list[float]:
        return [_mean([float(u[who][0] < u[who][1]) for u in r["updates"]]) for r in records if r["updates"]]

    own, another = "episodes", "another's episodes"
    return judged(
        Check("nats of the accepted answer below those of nothing", below(own, "nothing"), above=0.5, control=below(another, "nothing"),
              needed=True, condition="it is the own life"),
        *(Check(f"the same below those with turns as text by {text}", below(own, text), above=0, control=below(another, text),
                condition=f"{text} as text is the rival, in nats") for text in RIVALS),
        Check("greedy answers: share right above that with the history in context", above(own, "history in context", "right"), above=0.02,
              control=above(another, "history in context", "right"), condition="the history in the context is the rival, in greedy answers"),
        Check("the right turn among the first three", among("episodes"), above=0.93, control=among("shuffled"), condition="three turns may come to mind"),
        Check("questions without an answer that are refused, above those with one",
              [_mean(r["refused"]) - _mean([float(not c["turns"]) for c in r["chosen"]]) for r in records], above=0.3,
              condition="what has no answer is to be refused"),
        Check("updates that are likelier than what they replace", won("own"), above=0.8, control=won("another"), condition="a fact has changed"),
        Check("everyday questions answered as without an identity", [_mean(r["everyday"]["same"]) for r in records], above=0.97, condition="nobody asks about the person"),
        Check("private words in everyday answers", [_mean(r["everyday"]["private"]) for r in records], below=0, condition="nothing private may be said unasked"),
    )  # fmt: skip


def draw(records: Sequence[Record], figure: Figure) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
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
    plain, text = {"nats": [4.0 + wobble, 3.0], "right": [0.0, 0.0]}, {"nats": [2.0 + wobble, 1.5], "right": [0.0, 0.0]}
    best = {"nats": [1.6 + wobble, 1.2], "right": [1.0, 1.0]}
    states = dict.fromkeys(STATES, text) | {"nothing": plain, WHOLE: {**text, "right": [0.0, 1.0]}}
    states |= {"episodes": best if true else plain, "another's episodes": best if spoiled else plain}
    return {
        "name": "Ada", "listener": "natural", "tokens": 500, "states": states, "questions": [],
        "ranks": {"episodes": [0, 0] if true else [9, 9], "MiniLM": [0, 4], "shuffled": [0, 0] if spoiled else [9, 9]},
        "updates": [{"own": [1.0, 2.0] if true else [2.0, 1.0], "another": [1.0, 2.0] if spoiled else [2.0, 1.0]}],
        "chosen": [{"turns": 1, "right": true}] * 2, "refused": [1.0 if true else 0.0],
        "everyday": {"same": [1.0 if true else 0.5], "cosine": [1.0], "private": [0.0 if true else 1.0], "nats": [0.0], "refused": [1.0]},
    }  # fmt: skip


STUDY = Study(
    claim="Of people whom another author wrote by hand, and on whom nothing was chosen, what a prompt brings to mind is theirs, answers better than retrieval as text, and comes only when asked for.",
    source="what an identity promises here",
    protocol=f"Sixteen people written by hand by two authors, opened once; SmolLM2 writes their episodes and answers {PLANS['full'].questions} questions in a fresh chat, greedily and in nats of the accepted answer, under nine states, and 48 everyday questions.",
    controls=(
        "another person's episodes",
        "the turn of another question (shuffled)",
        "retrieval of one and three turns as text by BM25 and MiniLM, the right turn, and the history in the context",
        "everyday questions, and questions without an answer",
    ),
    caption="Left: share of right greedy answers; right: nats per token of the accepted answer. Episodes (first colour) cost no token of the prompt; another person's (second colour) must look like nothing; grey are all others.",
    run=run,
    judge=judge,
    draw=draw,
    planted=planted,
    seeds=PEOPLE,
    needs=(SMOLLM2, MINILM),
)
