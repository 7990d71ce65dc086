"""A few people, one model: what each of them told it becomes an identity. All of them are scored; two, chosen by seed, are shown.

    found = measure(screen)                # opens SmolLM2, about three minutes on two cores
    found.crowd[0].right["own"], found.people[0].selves, found.asked[0].answers, found.people[1].losses["own"]

Everything here comes back as plain numbers, so that the page can be drawn and tested without a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

import torch
from torch import Tensor

from demo.screen import Screen
from regard.errors import CheckpointError
from regard.identity.body import Body, body_of, frozen
from regard.identity.experience import observe
from regard.identity.sleep.consolidate import consolidate
from regard.identity.sleep.items import Item, answers_item, losses
from regard.identity.sleep.lessons import Anchors, lessons_of
from regard.identity.sleep.rule import SleepRule
from regard.identity.speaking import living
from regard.identity.state import Form, Identity
from regard.identity.why import along
from regard.identity.write.rule import Rule, imprint
from regard.identity.write.self_state import SelfRule, fresh
from regard.identity.write.trace import TraceRule, cosine, spectrum
from regard.models.base import Model
from regard.models.continuation import Continuation
from regard.models.tokenizer import Tokenizer
from regard.study.people.lab import rotated, shuffled
from regard.study.people.natural import NaturalPerson, NaturalQuestion, natural

FORM: Form = "self_token"
RULE = Rule(share=0.5, trace=TraceRule(write="centred"), self=SelfRule(form=FORM))
SLEEP = SleepRule(parts=("self", "trace", "imprints"))
POOL = "test"
"""Of the people: one that nothing was chosen on."""
CROWD, SEED = 6, 0
"""How many are scored, and what two of them are drawn by."""
SCORED, SHOWN = 3, 2
"""Questions of each, in the score and on the page."""
LENGTH = 24
SEEDS = 3
"""Of every random control, whose mean is shown."""
MISSING = "SmolLM2 is not here, so nobody could be remembered: regard models get smollm2"
CONTROLS = {
    "nobody": "nobody: the model alone",
    "fast": "own identity, before sleep",
    "own": "own identity, after sleep",
    "other": "the other person's identity",
    "swapped": "own imprints, the other's trace and self",
    "shuffled": "own, shuffled",
    "random": "random, same spectrum",
    "context": "no identity, all of the history in context",
}


WHOSE = {
    "own": "own identity",
    "other": "another person's identity",
    "nobody": "the model alone",
    "context": "no identity, the whole history in context",
}
"""Who answers, in the score."""


@dataclass(frozen=True)
class Score:
    """One person of the crowd, before any night."""

    name: str
    questions: int
    right: dict[str, int]
    """Questions whose greedy answer has what the person told, by the names of `WHOSE`."""
    losses: dict[str, float]
    """Nats per token of the assistant's words in their next conversation."""
    chosen: bool = False
    """Whether the rest of the page is about them."""


@dataclass(frozen=True)
class Word:
    """An imprint: a token that was kept, how much it surprised the model, and which conversation it is from."""

    text: str
    shock: float
    source: int


@dataclass(frozen=True)
class Portrait:
    """What became of one person's conversations."""

    name: str
    told: tuple[str, ...]
    """What the person said, a line for each conversation."""
    met: int
    """Tokens that were said to the model and by it."""
    words: tuple[Word, ...]
    selves: tuple[tuple[float, ...], ...]
    """|s| of every layer: before, after each conversation, after sleep."""
    spectrum: tuple[tuple[float, ...], ...]
    """Eigenvalues of T in every layer, largest first, all key heads together."""
    losses: dict[str, float]
    """Nats per token of the assistant's words in the person's next conversation, by the names of `CONTROLS`."""
    night: tuple[tuple[int, float], ...]
    """Step, and KL on the questions that were held back."""
    nbytes: int


@dataclass(frozen=True)
class Answer:
    """An answer in pieces, and how far another would have gone another way at each of them, in nats."""

    who: str
    pieces: tuple[str, ...]
    apart: tuple[float, ...] = ()
    """KL(this one ‖ the other person) at each token; empty where there is no other."""
    from_base: float | None = None
    """Mean KL(this one ‖ the model alone) per token."""
    cut: bool = False
    """Whether it would have gone on."""

    @property
    def text(self) -> str:
        return "".join(self.pieces).strip() + "…" * self.cut


@dataclass(frozen=True)
class Asked:
    prompt: str
    answers: tuple[Answer, ...]
    whose: str
    """Who asks."""
    accepted: tuple[str, ...]
    """What would be right: what they told."""


@dataclass(frozen=True)
class Two:
    crowd: tuple[Score, ...]
    people: tuple[Portrait, Portrait]
    asked: tuple[Asked, ...]
    paths: tuple[tuple[tuple[float, float], ...], ...]
    """Of each person: the self before, after each conversation and after sleep, in the plane that shows most of both."""
    shown: float
    """Which share of the way they went that plane shows."""
    trace_cosine: float
    self_cosine: float


def measure(screen: Screen) -> Two | None:
    """None, and a word on the screen, where the model cannot be had."""
    from regard.models import downloads as hub

    try:
        with screen.steps("opening SmolLM2", 1) as tick:
            hub.get("smollm2")
            model, tokenizer = hub.open_model("smollm2")
            tick()
        return Study(model, tokenizer).of(natural(CROWD, 0, POOL, short=True), screen)
    except (CheckpointError, ImportError) as error:
        screen.say(f"{MISSING} ({error})")
        return None


class Study:
    """One model, and what is measured of people on it."""

    def __init__(self, model: Model, tokenizer: Tokenizer, rule: Rule = RULE, sleep: SleepRule = SLEEP) -> None:
        self.model, self.tokenizer, self.rule, self.sleep = model, tokenizer, rule, sleep
        self.body: Body = body_of(model)
        self.anchors = Anchors(self.body, tokenizer)
        """What every night is held to, read once for all of them."""

    def of(self, crowd: Sequence[NaturalPerson], screen: Screen, seed: int = SEED) -> Two:
        with screen.steps(f"{len(crowd)} people: what they told, written once", len(crowd)) as tick, frozen(self.model):
            fast = [self.lived(who, tick) for who in crowd]
        chosen = sorted(Random(seed).sample(range(len(crowd)), 2))
        with screen.steps("all of them, scored", len(crowd)) as tick, frozen(self.model):
            scores = tuple(
                self.score(who, fast[n][-1], fast[(n + 1) % len(crowd)][-1], n in chosen, tick) for n, who in enumerate(crowd)
            )
        people, lives = [crowd[n] for n in chosen], [fast[n] for n in chosen]
        nights: list[tuple[tuple[int, float], ...]] = []
        for n, who in enumerate(people):
            with screen.steps(f"{who.name}, chosen by seed, sleeps", self.sleep.steps) as tick:
                woken, night = self.night(who, lives[n][-1], tick)
            lives[n] = [*lives[n], woken]
            nights.append(night)
        with screen.steps("the same words to both", SHOWN * len(people)) as tick, frozen(self.model):
            asked = tuple(
                self.ask(q, who, people, [life[-1] for life in lives], tick)
                for n, who in enumerate(people)
                for q in _some(who, SHOWN, seed + n)
            )
        with screen.steps("controls", len(people) * len(CONTROLS)) as tick, frozen(self.model):
            losses_ = [self.controls(who, lives[n], lives[1 - n][-1], tick) for n, who in enumerate(people)]
        portraits = [
            self.portrait(who, life, night, loss) for who, life, night, loss in zip(people, lives, nights, losses_, strict=True)
        ]
        paths, shown = plane([torch.stack([_self(i) for i in life]) for life in lives])
        traces = [life[-1].trace for life in lives]
        alike = cosine(*traces) if traces[0] is not None and traces[1] is not None else 0.0  # pyright: ignore
        near = float(torch.cosine_similarity(_self(lives[0][-1]), _self(lives[1][-1]), dim=0))
        return Two(scores, (portraits[0], portraits[1]), asked, paths, shown, alike, near)

    def lived(self, who: NaturalPerson, tick: Callable[[], None]) -> list[Identity]:
        """The identity before, and after every conversation."""
        life = [Identity.new(self.body.base)]
        for n, chat in enumerate(who.history):
            seen = observe(self.model, [dict(m) for m in chat], self.tokenizer, source=f"conversation {n + 1}")
            life.append(imprint(life[-1], seen, self.rule))
        tick()
        return life

    def score(self, who: NaturalPerson, own: Identity, other: Identity, chosen: bool, tick: Callable[[], None]) -> Score:
        """A few questions of theirs, by seed, and their next conversation: under their identity, another's, none, and the history."""
        past = [dict(m) for chat in who.history for m in chat]
        item, whole = (answers_item(self.body, self.tokenizer, x) for x in (who.next, [*past, *who.next]))
        states = {"own": own, "other": other, "nobody": None}
        nats = {name: self.loss(state, item) for name, state in states.items()}
        nats["context"] = self.loss(None, replace(whole, at=whole.at[-len(item.at) :]))
        right = dict.fromkeys(WHOSE, 0)
        asked = _some(who, SCORED, 0)
        for q in asked:
            for name in WHOSE:
                ids = self.asking(past if name == "context" else [], q.text)
                right[name] += q.right(self.tokenizer.decode(self.greedy(states.get(name), ids)))
        tick()
        return Score(who.name, len(asked), right, nats, chosen)

    def night(
        self, who: NaturalPerson, last: Identity, tick: Callable[[], None]
    ) -> tuple[Identity, tuple[tuple[int, float], ...]]:
        """The identity after a night over all that was said, and KL on what was held back as it went."""
        with frozen(self.model):
            lessons = lessons_of(who.history, self.sleep, self.anchors)
        if lessons is None:
            return last, ((0, 0.0),)
        woken, slept = consolidate(
            self.model, last, who.history, self.tokenizer, self.sleep, on_step=lambda night: tick(), lessons=lessons
        )
        if slept.interrupted:
            raise KeyboardInterrupt
        looks = ((x.step, x.loss) for x in slept.looks[1:] if x.step <= slept.best_step)
        return woken, ((0, slept.before), *looks)

    def ask(
        self,
        question: NaturalQuestion,
        whose: NaturalPerson,
        people: Sequence[NaturalPerson],
        who: Sequence[Identity],
        tick: Callable[[], None],
    ) -> Asked:
        ids = self.asking([], question.text)
        living_ones: list[Identity | None] = [None, *who]
        said = [self.greedy(i, ids) for i in living_ones]
        answers = [Answer("nobody", self.pieces(said[0], ids), cut=len(said[0]) == LENGTH)]
        for n, person in enumerate(people):
            mine, base, other = (along(self.model, i, ids, said[n + 1]) for i in (who[n], None, who[1 - n]))
            apart, from_base = kl_each(mine, other), kl_each(mine, base)
            line = said[n + 1]
            answers.append(
                Answer(person.name, self.pieces(line, ids), tuple(apart.tolist()), float(from_base.mean()), len(line) == LENGTH)
            )
        for person in people:
            past = [dict(m) for chat in person.history for m in chat]
            whole = self.asking(past, question.text)
            line = self.greedy(None, whole)
            answers.append(Answer(f"{person.name}, history in context", self.pieces(line, whole), cut=len(line) == LENGTH))
        tick()
        return Asked(question.text, tuple(answers), whose.name, question.answers)

    def asking(self, past: list[dict[str, str]], prompt: str) -> list[int]:
        return self.tokenizer.encode(self.tokenizer.chat([*past, {"role": "user", "content": prompt}]))

    def greedy(self, who: Identity | None, ids: list[int]) -> list[int]:
        from regard.models.decode.generate import Sampling, generate

        with living(self.model, who):
            out = generate(self.model, [ids], Sampling(max_tokens=LENGTH), tokenizer=self.tokenizer).tokens[0]
        ends = set(self.tokenizer.eos_ids)
        line = [t for t in out if t not in ends]
        return line or out

    def pieces(self, ids: Sequence[int], after: Sequence[int]) -> tuple[str, ...]:
        """The text that each token adds; whatever only several of them make together stands with the last."""
        written, ends = Continuation(self.tokenizer.decode, after), [0]
        for token in ids:
            written.push(token)
            ends.append(len(written.stable))
        return tuple(written.stable[a:b] for a, b in pairwise(ends))

    @torch.no_grad()
    def loss(self, who: Identity | None, item: Item) -> float:
        with living(self.model, who):
            return float(losses(self.body, [item])[0])

    def controls(self, who: NaturalPerson, life: list[Identity], other: Identity, tick: Callable[[], None]) -> dict[str, float]:
        item = answers_item(self.body, self.tokenizer, who.next)
        past = [dict(m) for chat in who.history for m in chat]
        whole = answers_item(self.body, self.tokenizer, [*past, *who.next])
        own = life[-1]
        ways: dict[str, Callable[[], float]] = {
            "nobody": lambda: self.loss(None, item),
            "fast": lambda: self.loss(life[-2], item),
            "own": lambda: self.loss(own, item),
            "other": lambda: self.loss(other, item),
            "swapped": lambda: self.loss(replace(own, trace=other.trace, self=other.self), item),
            "shuffled": lambda: sum(self.loss(shuffled(own, s), item) for s in range(SEEDS)) / SEEDS,
            "random": lambda: sum(self.loss(rotated(own, s), item) for s in range(SEEDS)) / SEEDS,
            "context": lambda: self.loss(None, replace(whole, at=whole.at[-len(item.at) :])),
        }
        found: dict[str, float] = {}
        for name in CONTROLS:
            found[name] = ways[name]()
            tick()
        return found

    def portrait(
        self, who: NaturalPerson, life: list[Identity], night: tuple[tuple[int, float], ...], loss: dict[str, float]
    ) -> Portrait:
        last = life[-1]
        kept = last.imprints
        rows = zip(kept.token.tolist(), kept.shock.tolist(), kept.source.tolist(), strict=True)
        values = [] if last.trace is None else spectrum(last.trace).flatten(1).sort(-1, descending=True).values.tolist()
        return Portrait(
            who.name,
            tuple(" ".join(m["content"] for m in chat if m["role"] == "user") for chat in who.history),
            last.life.tokens,
            tuple(Word(self.tokenizer.decode([t]) if t >= 0 else "·", shock, n) for t, shock, n in rows),
            tuple(tuple(_self(i).view(i.base.depth, -1).norm(dim=-1).tolist()) for i in life),
            tuple(tuple(row) for row in values),
            loss,
            night,
            last.nbytes,
        )


def _some(who: NaturalPerson, count: int, seed: int) -> list[NaturalQuestion]:
    """A few of a person's questions, drawn by seed."""
    return Random(f"{who.name} {seed}").sample(who.questions, min(count, len(who.questions)))


def kl_each(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q) at every token, from log-probabilities (N, V); what rounding takes below 0 is 0."""
    p, q = (x.double().log_softmax(-1) for x in (p, q))
    return (p.exp() * (p - q)).sum(-1).clamp_min(0)


def _self(identity: Identity) -> Tensor:
    return (identity.self or fresh(identity.base, FORM)).s.flatten()


def plane(ways: Sequence[Tensor]) -> tuple[tuple[tuple[tuple[float, float], ...], ...], float]:
    """Each way (N, S) in the two directions that show most of all of them, seen from where they begin; and the share shown."""
    points = torch.cat([w - w[:1] for w in ways]).double()
    _, size, directions = torch.linalg.svd(points, full_matrices=False)
    flat = points @ directions[:2].mT
    total = float(size.square().sum())
    shown = float(size[:2].square().sum()) / total if total > 0 else 1.0
    split = flat.split([len(w) for w in ways])
    return tuple(tuple((float(x), float(y)) for x, y in part) for part in split), shown


__all__ = ["CONTROLS", "WHOSE", "Answer", "Asked", "Portrait", "Score", "Two", "Word", "kl_each", "measure", "plane"]
