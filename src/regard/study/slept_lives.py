"""A night keeps more of a natural person than one pass does, and takes nothing from anybody.

One seed is one person of the test pool of `people.natural` in a short life (150 to 250 tokens): facts told in passing, to a listener who
does not repeat them. SmolLM2 lives through the history conversation by conversation and keeps a quarter of its tokens as imprints, and all
of it as episodes. Then it sleeps (`SleepRule()`), and is measured before and after the night:

    share of the in-context gain      nats of the assistant's words in the next conversation, imprints alone
    greedy recall                     all natural questions in fresh chats, 16 tokens; imprints alone, and everything (episodes come to mind)
    everyday questions                answered as without an identity, without a private word, everything on; and the base's own answers, token
                                      by token, under imprints alone, which have nothing to refuse with
    neutral prose                     nats above the base, everything on, and imprints alone

Beside it: another person's slept identity, the history in context, nobody; whether the night was refused and why; bytes of what is read with the
default rule and of episodes per token of life; CPU seconds until the first token of an answer about an old episode, and of each further one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import TYPE_CHECKING

import torch

from ..identity.body import frozen
from ..identity.sleep.answering import logs_along
from ..identity.sleep.consolidate import Slept, consolidate
from ..identity.sleep.items import answers_item, losses
from ..identity.sleep.lessons import Anchors, lessons_of
from ..identity.sleep.rule import SleepRule
from ..identity.speaking import living
from ..identity.state import Identity, Recollection
from ..identity.write.rule import Rule
from ..models.decode.sampling import Sampling
from .frame.figure import COLOURS, bars
from .frame.study import Plant, Record, Size, Study
from .frame.verdict import Check, Verdict, interval, judged
from .natural_recall import _changed as changed  # pyright: ignore[reportPrivateUsage]
from .people.asking import Examiner, write_history
from .people.generator import neutral
from .people.lab import text_item
from .people.natural import NaturalPerson, everyday, natural
from .people.natural_data import NaturalPool
from .tasks.packaged import MINILM, SMOLLM2, sentence_vectors
from .tasks.pretrained import smollm2

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CROWD = 24
"""People to draw from."""
POOL: NaturalPool = "test"
SHARE = 0.25
STATES = (
    "nothing",
    "history in context",
    "imprints, fast",
    "imprints, slept",
    "all, fast",
    "all, slept",
    "another's all",
)
FAST, SLEPT, FITTED = 0.7, 0.88, 0.8
"""Shares of the in-context gain that are asked for; values that are fitted in closed form lose to those that are opened (docs/identity_tried.md), and are no state here."""


@dataclass(frozen=True)
class Plan:
    """How much is measured of each person."""

    depth: int | None
    questions: int
    everyday: int
    prose: int
    answer: int
    """Tokens of a greedy answer at most."""
    rule: SleepRule


PLANS = {
    "mini": Plan(2, 1, 2, 1, 2, SleepRule(steps=1, look_every=1, statements=2, still=0.0)),
    "quick": Plan(None, 2, 4, 2, 8, SleepRule(steps=4, look_every=4, statements=4)),
    "full": Plan(None, 99, 14, 3, 16, SleepRule()),
}


@dataclass(frozen=True, eq=False)
class Lived:
    """A person before and after a night."""

    person: NaturalPerson
    fast: Identity
    slept: Identity
    default: Identity
    night: Slept
    seconds: dict[str, float]


@cache
def _examiner(size: Size) -> Examiner:
    model, tokenizer = smollm2(PLANS[size].depth)
    return Examiner(model, tokenizer, Sampling(PLANS[size].answer, repetition_penalty=1.1))


@cache
def _anchors(size: Size) -> Anchors:
    examiner = _examiner(size)
    return Anchors(examiner.body, examiner.tokenizer)


@cache
def lived(seed: int, size: Size, pool: NaturalPool, rule: SleepRule | None = None) -> Lived:
    """Person `seed`, written and slept over; the seed before needs them as somebody else."""
    sentence_vectors(["."])  # an episode has a meaning only where the encoder is at hand
    examiner, person = _examiner(size), natural(CROWD + 1, 0, pool, short=True)[seed]
    rule, history = rule or PLANS[size].rule, [[dict(m) for m in c] for c in person.history]
    seconds, began = dict[str, float](), time.process_time()
    quarter, default = write_history(examiner, person.history, Rule(share=SHARE, budget=10**6), Rule())
    seconds["write"] = time.process_time() - began
    anchors, began = _anchors(size), time.process_time()
    with frozen(examiner.model):
        lessons = lessons_of(history, rule, anchors)
    seconds["lessons"] = time.process_time() - began
    began = time.process_time()
    slept, night = quarter.identity, Slept((), 0)
    if lessons is not None:
        slept, night = consolidate(examiner.model, quarter.identity, history, examiner.tokenizer, rule, lessons=lessons)
    seconds["night"] = time.process_time() - began
    return Lived(person, quarter.identity, slept, default.identity, night, {k: round(v, 2) for k, v in seconds.items()})


def run(seed: int, size: Size, pool: NaturalPool = POOL, rule: SleepRule | None = None) -> Record:
    plan, examiner = PLANS[size], _examiner(size)
    me, other = lived(seed, size, pool, rule), lived(seed + 1, size, pool, rule)
    state, timed = _state(me, other, examiner)
    with frozen(examiner.model):
        return {
            "name": me.person.name,
            "listener": me.person.listener,
            "tokens": me.fast.life.tokens,
            "slots": len(me.fast.imprints),
            "night": {"helped": me.night.helped, "reason": me.night.reason, "step": me.night.best_step, "held": me.night.questions,
                      "looks": [list(x) for x in me.night.looks]},
            "nats": _nats(me, other, examiner),
            **_answers(me, other, examiner, plan),
            "everyday": _everyday(me, examiner, plan, seed, pool),
            "prose": _prose(me, examiner, plan, seed),
            "state": state,
            "timed": me.seconds | timed,
        }  # fmt: skip


@torch.no_grad()
def _nats(me: Lived, other: Lived, examiner: Examiner) -> Record:
    """Of the assistant's words in the next conversation."""
    body, tokenizer, person = examiner.body, examiner.tokenizer, me.person
    later, whole = (
        answers_item(body, tokenizer, x) for x in (person.next, [m for c in (*person.history, person.next) for m in c])
    )
    states = {"base": None, "fast": me.fast, "slept": me.slept, "another": other.slept}
    found: Record = {}
    for name, who in states.items():
        with living(examiner.model, None if who is None else who.only("imprints")):
            found[name] = round(float(losses(body, [later])[0]), 4)
    found["context"] = round(float(losses(body, [replace(whole, at=whole.at[-len(later.at) :])])[0]), 4)
    return found


def _answers(me: Lived, other: Lived, examiner: Examiner, plan: Plan) -> Record:
    """Every question under every state: nats of the accepted answer, and whether the greedy one has it."""
    questions = me.person.questions[: plan.questions]
    states: dict[str, dict[str, list[float]]] = {name: {"nats": [], "right": []} for name in STATES}
    said: list[Record] = []
    history = [m for c in me.person.history for m in c]
    long = [examiner.prompt([*history, {"role": "user", "content": q.text}]) for q in questions]
    past = examiner.read_before(long)
    for q, whole in zip(questions, long, strict=True):
        plain = examiner.prompt([{"role": "user", "content": q.text}])
        minds: dict[str, Identity | None] = {
            "nothing": None, "imprints, fast": me.fast.only("imprints"), "imprints, slept": me.slept.only("imprints"),
            "all, fast": examiner.recalled(me.fast, plain), "all, slept": examiner.recalled(me.slept, plain), "another's all": examiner.recalled(other.slept, plain),
        }  # fmt: skip
        texts: dict[str, str] = {}
        for name in STATES:
            if name == "history in context":
                answer = examiner.ask(whole, q.value, None, past)
            else:
                answer = examiner.ask(plain, q.value, minds[name])
            states[name]["nats"].append(round(answer.nats, 4))
            states[name]["right"].append(float(q.right(answer.text)))
            texts[name] = answer.text
        said.append({"text": q.text, "value": q.value, "said": texts})
    return {"states": states, "questions": said}


@cache
def _plain_answers(size: Size, pool: NaturalPool) -> list[tuple[str, list[int], str]]:
    """Everyday questions as prompts, with the model's own answers."""
    examiner = _examiner(size)
    prompts = [(text, examiner.prompt([{"role": "user", "content": text}])) for text in everyday(pool)]
    return [(text, prompt, examiner.ask(prompt, ".").text or ".") for text, prompt in prompts]


def _everyday(me: Lived, examiner: Examiner, plan: Plan, seed: int, pool: NaturalPool) -> Record:
    values = {answer for fact in me.person.facts for answer in fact.accepted}
    known = next(size for size, p in PLANS.items() if p is plan)
    asked = Random(seed).sample(_plain_answers(known, pool), min(plan.everyday, len(everyday(pool))))
    day: dict[str, list[float]] = {"same": [], "cosine": [], "private": [], "nats": [], "refused": []}
    for text, prompt, _ in asked:
        mind = examiner.recalled(me.slept, prompt)
        refused = isinstance(mind, Recollection) and not mind.chosen
        # Where nothing comes to mind the answer is the base's bit for bit, which tests hold: it is not computed twice.
        found = (1.0, 1.0, 0.0, 0.0) if refused else changed(examiner, prompt, text, mind, values)[0]
        for key, value in zip(day, (*found, refused), strict=True):
            day[key].append(round(float(value), 4))
    texts = list[tuple[torch.Tensor, torch.Tensor]]()
    for _, prompt, answer in asked:
        ids = torch.tensor([*prompt, *examiner.tokenizer.encode(answer, bos=False)])
        texts.append((ids, torch.arange(len(prompt), len(ids))))
    alone: Record = {}
    base = _along(examiner, None, texts)
    for name, who in (("fast", me.fast), ("slept", me.slept)):
        own = _along(examiner, who, texts)
        chosen = [
            x.gather(-1, ids[at, None]).mean() - y.gather(-1, ids[at, None]).mean()
            for x, y, (ids, at) in zip(base, own, texts, strict=True)
        ]
        first = torch.cat([(x.argmax(-1) == y.argmax(-1)).float() for x, y in zip(base, own, strict=True)])
        alone[name] = {"nats": round(float(torch.stack(chosen).mean()), 4), "first": round(float(first.mean()), 4)}
    return day | {"alone": alone}


def _along(examiner: Examiner, who: Identity | None, texts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    with living(examiner.model, None if who is None else who.only("imprints")):
        return logs_along(examiner.body, texts)


@torch.no_grad()
def _prose(me: Lived, examiner: Examiner, plan: Plan, seed: int) -> Record:
    """Neutral texts, nats above the base: imprints alone from the first word, and everything from where a third of the text was read."""
    texts = Random(seed).sample(neutral("test"), min(plan.prose, len(neutral("test"))))
    items = [text_item(examiner.body, examiner.tokenizer, t) for t in texts]

    def alone(who: Identity | None) -> float:
        with living(examiner.model, None if who is None else who.only("imprints")):
            return float(torch.stack(losses(examiner.body, items)).mean())

    base, everything = alone(None), list[float]()
    for item in items:
        ids = item.ids.tolist()
        prompt, rest = ids[: len(ids) // 3], examiner.tokenizer.decode(ids[len(ids) // 3 :])
        mind = examiner.recalled(me.slept, prompt)
        if isinstance(mind, Recollection) and not mind.chosen:
            everything.append(0.0)
        else:
            everything.append(
                examiner.ask(prompt, rest, mind, greedy=False).nats - examiner.ask(prompt, rest, greedy=False).nats
            )
    return {
        "fast": round(alone(me.fast) - base, 4),
        "slept": round(alone(me.slept) - base, 4),
        "all": round(sum(everything) / len(everything), 4),
    }


def _state(me: Lived, other: Lived, examiner: Examiner) -> tuple[Record, dict[str, float]]:
    """Bytes, and CPU seconds of an answer about what was told first."""
    who = me.default
    oldest = min(me.person.questions, key=lambda q: q.turn)
    prompt = examiner.prompt([{"role": "user", "content": oldest.text}])
    value = examiner.tokenizer.encode(oldest.value, bos=False)[:1]
    examiner.recalled(other.default, prompt)  # what a model works out once, for everybody, is not timed
    began = time.process_time()
    mind = examiner.recalled(who, prompt)
    examiner.ask(prompt, examiner.tokenizer.decode(value), mind, greedy=False)
    first = time.process_time() - began
    more = {name: _each_token(examiner, prompt, x) for name, x in (("with", mind), ("plain", None))}
    tokens = max(1, sum(len(e.tokens) for e in who.episodes))
    state = {
        "read": replace(who, episodes=()).nbytes,
        "episodes_per_token": round(sum(e.nbytes for e in who.episodes) / tokens, 1),
    }
    return state, {"first": round(first, 3)} | {f"token_{k}": round(v, 4) for k, v in more.items()}


def _each_token(examiner: Examiner, prompt: list[int], who: Identity | None) -> float:
    """CPU seconds of a further token of an answer."""
    counts = list[tuple[float, int]]()
    for answer in (".", examiner.tokenizer.decode(prompt[:12])):
        ids, began = len(examiner.tokenizer.encode(answer, bos=False)), time.process_time()
        text = examiner.ask(prompt, answer, who, greedy=True).text
        counts.append((time.process_time() - began, ids + len(examiner.tokenizer.encode(text, bos=False))))
    return min(seconds / max(1, n) for seconds, n in counts)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def shares_of(records: Sequence[Record], name: str) -> list[float]:
    """What each person gains, in means of what people gain from their whole history in context: whoever gains little there weighs little."""
    whole = _mean([r["nats"]["base"] - r["nats"]["context"] for r in records])
    return [(r["nats"]["base"] - r["nats"][name]) / whole for r in records]


def right_of(state: str) -> Callable[[Record], float]:
    return lambda r: _mean(r["states"][state]["right"])


def judge(records: Sequence[Record]) -> Verdict:
    def less(state: str, other: str) -> list[float]:
        return [right_of(state)(r) - right_of(other)(r) for r in records]

    another = shares_of(records, "another")
    return judged(
        Check("share of the in-context gain, fast", shares_of(records, "fast"), above=FAST, control=another, condition="it is the fast write"),
        Check("share of the in-context gain, slept", shares_of(records, "slept"), above=SLEPT, control=another, needed=True, condition="the next conversation is looked at"),
        Check("greedy recall after the night less before it, everything on", less("all, slept", "all, fast"), above=0, condition="recall by episodes is looked at"),
        Check("the same, imprints alone", less("imprints, slept", "imprints, fast"), above=0, condition="recall by imprints alone is looked at"),
        Check("greedy recall after the night less that with the history in context", less("all, slept", "history in context"), above=0,
              control=less("another's all", "history in context"), condition="the history in context is the rival"),
        Check("greedy recall by another's slept identity", [right_of("another's all")(r) for r in records], below=0.05, condition="another's identity is asked"),
        Check("everyday questions answered as without an identity", [_mean(r["everyday"]["same"]) for r in records], above=0.97, condition="nobody asks about the person"),
        Check("private words in everyday answers", [_mean(r["everyday"]["private"]) for r in records], below=0, condition="nothing private may be said unasked"),
        Check("everyday chat, nats against the base, everything on", [_mean(r["everyday"]["nats"]) for r in records], below=0, condition="everyday chat is read"),
        Check("neutral prose, nats against the base, everything on", [r["prose"]["all"] for r in records], below=0.02, condition="neutral prose is read with everything on"),
        Check("neutral prose, nats added by the night, imprints alone", [r["prose"]["slept"] - r["prose"]["fast"] for r in records], below=0.02, condition="neutral prose is read by imprints alone"),
        Check("megabytes of what is read, default rule", [r["state"]["read"] / 1e6 for r in records], below=1.0, condition="the state is weighed"),
        Check("kilobytes of episodes a token of life", [r["state"]["episodes_per_token"] / 1e3 for r in records], below=1.5, condition="the episodes are weighed"),
        Check("CPU seconds to the first token of an answer about the oldest episode", [r["timed"]["first"] for r in records], below=1.5, condition="the first answer is timed"),
        Check("CPU seconds of a further token, in those of the base", [r["timed"]["token_with"] / r["timed"]["token_plain"] for r in records], below=1.5, condition="further tokens are timed"),
    )  # fmt: skip


def draw(records: Sequence[Record], figure: Figure) -> None:
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1.3, 1))
    names = ("fast", "slept", "another")
    bars(left, ("fast", "slept", "another's"), [interval([100 * x for x in shares_of(records, n)]) for n in names])
    left.axvline(100 * FAST, color=COLOURS[7], lw=1, ls=":")
    left.axvline(100 * SLEPT, color=COLOURS[7], lw=1, ls="--")
    left.set(xlabel="share of the in-context gain (%)", title="The next conversation")
    bars(middle, STATES, [interval([100 * right_of(s)(r) for r in records]) for s in STATES], 1)
    middle.set(xlabel="right (%)", title="Greedy answers")
    harm = {
        "prose, fast": [r["prose"]["fast"] for r in records],
        "prose, slept": [r["prose"]["slept"] for r in records],
        "prose, all": [r["prose"]["all"] for r in records],
        "everyday, fast": [r["everyday"]["alone"]["fast"]["nats"] for r in records],
        "everyday, slept": [r["everyday"]["alone"]["slept"]["nats"] for r in records],
        "everyday, all": [_mean(r["everyday"]["nats"]) for r in records],
    }
    bars(right, list(harm), [interval(x) for x in harm.values()], 2)
    right.axvline(0.02, color=COLOURS[7], lw=1, ls="--")
    right.set(xlabel="nats above the base", title="What nobody asked for")


def planted(kind: Plant, seed: int) -> Record:
    """A night that keeps nearly all and harms nothing, one that does the contrary, or one that gives another's as much."""
    true, spoiled, wobble = kind != "negative", kind == "control", 0.001 * (seed % 3)
    own, another = (3.0 - 1.9 * good + wobble for good in (true, spoiled))
    yes, no = {"nats": [1.0], "right": [1.0]}, {"nats": [4.0], "right": [0.0]}
    states = dict.fromkeys(STATES, no) | {
        "history in context": {"nats": [1.5], "right": [0.5]},
        "imprints, fast": no if true else yes,
        "all, fast": no if true else yes,
    }
    states |= {
        "all, slept": yes if true else no,
        "imprints, slept": yes if true else no,
        "another's all": yes if spoiled else no,
    }
    harm = 0.0 if true else 0.2
    return {
        "name": "Ada", "listener": "silent", "tokens": 200, "slots": 50,
        "night": {"helped": true, "reason": "", "step": 16, "held": 4, "looks": [[0, 1.0, 0, 1.0]]},
        "nats": {"base": 3.0, "context": 1.0, "fast": own, "slept": own, "another": another},
        "states": states, "questions": [],
        "everyday": {"same": [1.0 - harm], "cosine": [1.0], "private": [harm], "nats": [harm], "refused": [1.0],
                     "alone": {k: {"nats": harm, "first": 1.0 - harm} for k in ("fast", "slept")}},
        "prose": {"fast": 0.0, "slept": harm, "all": harm},
        "state": {"read": 8e5 if true else 2e6, "episodes_per_token": 1200.0 if true else 9000.0},
        "timed": {"first": 0.5 if true else 5.0, "token_with": 0.03 if true else 0.3, "token_plain": 0.03},
    }  # fmt: skip


STUDY = Study(
    claim="A night keeps more of a natural person than one pass does, and takes nothing from what is said to others.",
    source="what an identity promises here",
    protocol="People of the test pool in short natural lives; SmolLM2 keeps a quarter of the tokens as imprints and all of it as episodes, sleeps once by the default rule, and is "
    "measured before and after: nats of the next conversation, greedy answers to all natural questions, everyday questions, neutral prose, bytes and CPU seconds.",
    controls=("another person's slept identity", "the history in context, and nobody", "everyday questions and neutral prose"),
    caption="Left: share of the in-context gain in the next conversation, by imprints alone (dotted: asked of the fast write; dashed: of a night). Middle: right greedy answers. "
    "Right: nats above the base on neutral prose and on the base's own everyday answers, by imprints alone and with everything on (dashed: what prose may cost).",
    run=run,
    judge=judge,
    draw=draw,
    planted=planted,
    seeds=8,
    needs=(SMOLLM2, MINILM),
    parts={"Identity": "identity.md"},
)
