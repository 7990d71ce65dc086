"""Two people, one model: what each of them told it becomes an identity, and what it then says to the same words is compared.

    found = measure(screen)                # opens SmolLM2, about two minutes on two cores
    found.people[0].selves, found.asked[0].answers, found.people[1].losses["own"]

Everything here comes back as plain numbers, so that the page can be drawn and tested without a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from demo.pair import MARA, PROMPTS, TOM, Someone
from demo.screen import Screen
from regard.errors import CheckpointError
from regard.identity.body import Body, body_of, frozen
from regard.identity.experience import observe
from regard.identity.sleep.consolidate import consolidate
from regard.identity.sleep.items import Item, answers_item, losses
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

FORM: Form = "self_token"
RULE = Rule(share=0.5, trace=TraceRule(write="centred"), self=SelfRule(form=FORM))
SLEEP = SleepRule(parts=("self", "trace", "imprints"), look_every=4)
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


@dataclass(frozen=True)
class Two:
    people: tuple[Portrait, Portrait]
    asked: tuple[Asked, ...]
    paths: tuple[tuple[tuple[float, float], ...], ...]
    """Of each person: the self before, after each conversation and after sleep, in the plane that shows most of both."""
    shown: float
    """Which share of the way they went that plane shows."""
    trace_cosine: float
    self_cosine: float


def measure(screen: Screen, people: tuple[Someone, Someone] = (MARA, TOM), prompts: Sequence[str] = PROMPTS) -> Two | None:
    """None, and a word on the screen, where the model cannot be had."""
    from regard.models import downloads as hub

    try:
        with screen.steps("opening SmolLM2", 1) as tick:
            hub.get("smollm2")
            model, tokenizer = hub.open_model("smollm2")
            tick()
        return Study(model, tokenizer).of(people, prompts, screen)
    except (CheckpointError, ImportError) as error:
        screen.say(f"{MISSING} ({error})")
        return None


class Study:
    """One model, and what is measured of people on it."""

    def __init__(self, model: Model, tokenizer: Tokenizer, rule: Rule = RULE, sleep: SleepRule = SLEEP) -> None:
        self.model, self.tokenizer, self.rule, self.sleep = model, tokenizer, rule, sleep
        self.body: Body = body_of(model)

    def of(self, people: tuple[Someone, Someone], prompts: Sequence[str], screen: Screen) -> Two:
        lives: list[list[Identity]] = []
        nights: list[tuple[tuple[int, float], ...]] = []
        for who in people:
            with screen.steps(f"{who.name}: three conversations, then sleep", len(who.history) + self.sleep.steps) as tick:
                life, night = self.live(who, tick)
            lives.append(life)
            nights.append(night)
        with screen.steps("the same words to both", len(prompts)) as tick, frozen(self.model):
            asked = tuple(self.ask(p, people, [life[-1] for life in lives], tick) for p in prompts)
        with screen.steps("controls", len(people) * len(CONTROLS)) as tick, frozen(self.model):
            found = [self.controls(who, lives[n], lives[1 - n][-1], tick) for n, who in enumerate(people)]
        portraits = [
            self.portrait(who, life, night, loss) for who, life, night, loss in zip(people, lives, nights, found, strict=True)
        ]
        paths, shown = plane([torch.stack([_self(i) for i in life]) for life in lives])
        traces = [life[-1].trace for life in lives]
        alike = cosine(*traces) if traces[0] is not None and traces[1] is not None else 0.0  # pyright: ignore
        near = float(torch.cosine_similarity(_self(lives[0][-1]), _self(lives[1][-1]), dim=0))
        return Two((portraits[0], portraits[1]), asked, paths, shown, alike, near)

    def live(self, who: Someone, tick: Callable[[], None]) -> tuple[list[Identity], tuple[tuple[int, float], ...]]:
        """The identity before, after every conversation, and after a night over all of them."""
        life = [Identity.new(self.body.base)]
        for n, chat in enumerate(who.history):
            life.append(imprint(life[-1], observe(self.model, chat, self.tokenizer, source=f"conversation {n + 1}"), self.rule))
            tick()
        woken, slept = consolidate(self.model, life[-1], who.history, self.tokenizer, self.sleep, on_step=lambda night: tick())
        if slept.interrupted:
            raise KeyboardInterrupt
        looks = ((x.step, x.loss) for x in slept.looks[1:] if x.step <= slept.best_step)
        return [*life, woken], ((0, slept.before), *looks)

    def ask(self, prompt: str, people: Sequence[Someone], who: Sequence[Identity], tick: Callable[[], None]) -> Asked:
        ids = self.asking([], prompt)
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
            whole = self.asking(past, prompt)
            line = self.greedy(None, whole)
            answers.append(Answer(f"{person.name}, history in context", self.pieces(line, whole), cut=len(line) == LENGTH))
        tick()
        return Asked(prompt, tuple(answers))

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

    def controls(self, who: Someone, life: list[Identity], other: Identity, tick: Callable[[], None]) -> dict[str, float]:
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
        self, who: Someone, life: list[Identity], night: tuple[tuple[int, float], ...], loss: dict[str, float]
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


__all__ = ["CONTROLS", "Answer", "Asked", "Portrait", "Two", "Word", "kl_each", "measure", "plane"]
