"""One question under one state: what the model answers greedily, and what the accepted answer costs in nats.

    examiner = Examiner(model, tokenizer)
    said = examiner.ask(examiner.prompt([{"role": "user", "content": "Where do I live?"}]), "Lyon", mara)
    said.text, said.nats

The prompt is read once for both: the accepted answer and the greedy one go on from the same cache. A history that stands before
several questions is read once for all of them (`read_before`). `ask_all` asks many side by side, in a third of the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...identity.body import body_of
from ...identity.experience import Chat, Experience, observe, tokenised
from ...identity.read.body import OwnBody
from ...identity.read.finding import finder_of
from ...identity.read.recall import MOST, Asking, asking
from ...identity.scoring import log_probabilities
from ...identity.speaking import overrides_of
from ...identity.speech import MARKUP, Speech
from ...identity.state import Identity, Recollection
from ...identity.store.replay import cut
from ...identity.write.rule import Rule, imprint
from ...models.base import Model
from ...models.decode.cache import StaticCache, static_caches
from ...models.decode.contrast import Contrasted, Pair, contrast_of
from ...models.decode.generate import Overrides
from ...models.decode.prepare import prepare
from ...models.decode.rows import finished, rows_of
from ...models.decode.sampling import Drawer, Sampling
from ...models.tokenizer import Tokenizer
from ...nn import bound
from .generator import Conversation
from .natural import Turn

EPISODES = Rule(keep=None)
GREEDY = Sampling(24, repetition_penalty=1.1)
Message = Mapping[str, str]
Caches = tuple[StaticCache, ...]


@dataclass(frozen=True)
class Said:
    """What came of a question."""

    nats: float
    """Per token of the accepted answer."""
    text: str
    """The greedy answer; empty where none was asked for."""
    tokens: int
    """Of the prompt."""


class Ask(NamedTuple):
    """A question to be asked beside others."""

    prompt: Sequence[int]
    answer: str
    who: Identity | None = None
    greedy: bool = True
    whole: bool = False
    """Whether its prompt begins as that of all others does that say so."""


def _common(prompts: Sequence[Sequence[int]], grain: int) -> int:
    """How many tokens all of these begin with, in whole grains; the last of a prompt is never one of them."""
    shared = 0
    while shared < min(map(len, prompts)) - 1 and len({p[shared] for p in prompts}) == 1:
        shared += 1
    return shared // grain * grain


@dataclass(frozen=True, eq=False)
class Past:
    """The beginning of several prompts, read once."""

    ids: list[int]
    caches: Caches


@dataclass(eq=False)
class Examiner:
    """A model, its tokenizer, and how it answers."""

    model: Model
    tokenizer: Tokenizer
    sampling: Sampling = GREEDY
    asked: WeakKeyDictionary[Identity, Asking] = field(default_factory=WeakKeyDictionary, repr=False)
    """Of each that `recalled` gave, what else might have come to mind, and how likely that was."""

    @cached_property
    def body(self) -> OwnBody:
        return cast(OwnBody, body_of(self.model))

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        return self.tokenizer.encode(self.tokenizer.chat([dict(m) for m in messages]))

    def read_before(self, prompts: Sequence[Sequence[int]]) -> Past:
        """What these prompts begin with, read by the model alone and once."""
        shared = 0
        # The last token of a prompt is left to whoever asks: its logits are the answer's first.
        while shared < min(map(len, prompts)) - 1 and len({p[shared] for p in prompts}) == 1:
            shared += 1
        ids, decoder = list(prompts[0][:shared]), prepare(self.model)
        caches = static_caches(decoder.depth, max(map(len, prompts)) + 2 * self.sampling.max_tokens)
        return Past(ids, cast(Caches, decoder(torch.tensor([ids]), caches)[1]) if ids else caches)

    def ask(
        self, prompt: Sequence[int], answer: str, who: Identity | None = None, past: Past | None = None, *, greedy: bool = True
    ) -> Said:
        """Under an identity as it stands: whoever has episodes is brought to mind before (`recalled`)."""
        overrides = self._overrides(who)
        if contrast_of(overrides, self.sampling) or (who is not None and who in self.asked):
            return self.ask_all([Ask(prompt, answer, who, greedy)])[0]
        decoder, ids = prepare(self.model), self.tokenizer.encode(answer, bos=False)
        caches, start = static_caches(decoder.depth, len(prompt) + len(ids) + self.sampling.max_tokens), 0
        if past is not None and list(prompt[: len(past.ids)]) == past.ids:
            caches, start = past.caches, len(past.ids)
        with torch.inference_mode(), bound(overrides):
            first, read = decoder(torch.tensor([list(prompt[start:])]), caches)
            first, read = first.clone(), cast(Caches, read)
            logits = first
            if len(ids) > 1:
                logits = torch.cat([first, decoder(torch.tensor([ids[:-1]]), read, every=True)[0][0]])
            logs = logits.float().log_softmax(-1)
            nats = -float(logs.gather(-1, torch.tensor(ids)[:, None]).mean())
            text = self._greedy(prompt, first, read) if greedy else ""
        return Said(nats, text, len(prompt))

    def ask_all(self, asks: Sequence[Ask]) -> list[Said]:
        """Each as `ask` would have it, side by side: every weight is read once for all of them, and a beginning that several share once."""
        rows = Contrasted(rows_of(prepare(self.model)))
        with torch.inference_mode():
            opened = [self._opened(rows, ask, n, asks) for n, ask in enumerate(asks)]
            known = dict[int, tuple[Pair, int]]()
            firsts = list[Tensor]()
            for n, (row, shared) in enumerate(opened):
                prompt, start = asks[n].prompt, 0
                begun = rows.copy(known[shared][0], 0, known[shared][1]) if shared is not None and shared in known else None
                if begun is not None and shared is not None:
                    start = known[shared][1]
                    rows.restore(row, [begun], start)
                elif shared is not None:
                    # Whoever comes first reads the beginning in one piece: the others go on from its end.
                    start = _common([asks[m].prompt for m, (_, s) in enumerate(opened) if s == shared], rows.grain)
                    finished(rows.read(row, prompt[:start])) if start else None
                    known[shared] = row, start
                firsts.append(finished(rows.read(row, prompt[start:])))
            nats = [self._nats(rows, row, first, ask) for (row, _), first, ask in zip(opened, firsts, asks, strict=True)]
            texts = self._said(rows, [row for row, _ in opened], firsts, asks)
        return [Said(nat, text, len(ask.prompt)) for nat, text, ask in zip(nats, texts, asks, strict=True)]

    def _overrides(self, who: Identity | None) -> Overrides:
        return overrides_of(self.model, who)

    def _opened(self, rows: Contrasted, ask: Ask, n: int, asks: Sequence[Ask]) -> tuple[Pair, int | None]:
        """A row for an ask, and the first of those whose prompt begins as its does."""
        same = [m for m, x in enumerate(asks) if x.who is None and ask.who is None and x.whole and ask.whole]
        return self._open(rows, ask), same[0] if len(same) > 1 else None

    def _open(self, rows: Contrasted, ask: Ask) -> Pair:
        overrides = self._overrides(ask.who)
        room = len(ask.prompt) + len(self.tokenizer.encode(ask.answer, bos=False)) + self.sampling.max_tokens + 1
        return rows.open(overrides, room, contrast_of(overrides, self.sampling))

    def _nats(self, rows: Contrasted, row: Pair, first: Tensor, ask: Ask) -> float:
        """Of the answer, whatever came to mind: −log of the mean probability over all that might have."""
        ids = self.tokenizer.encode(ask.answer, bos=False)
        logs, weights = [log_probabilities(rows, row, first, ids).sum()], [1.0]
        if ask.who is not None and (asked := self.asked.get(ask.who)) is not None and len(asked.likely) > 1:
            weights = [p for _, p in asked.likely]
            for unit, _ in asked.likely[1:]:
                other = self._open(rows, ask._replace(who=asked.read([unit])))
                logs.append(log_probabilities(rows, other, finished(rows.read(other, ask.prompt)), ids).sum())
        return -float((torch.stack(logs) + torch.tensor(weights).log()).logsumexp(0)) / len(ids)

    def _said(self, rows: Contrasted, opened: Sequence[Pair], firsts: Sequence[Tensor], asks: Sequence[Ask]) -> list[str]:
        ends, said = set(self.tokenizer.eos_ids), [list[int]() for _ in asks]
        draws = [Drawer(self.sampling, [list(ask.prompt)], x.shape[-1], [0], ends) for ask, x in zip(asks, firsts, strict=True)]
        logits = dict(enumerate(firsts))
        for n, ask in enumerate(asks):
            if not ask.greedy:
                del logits[n]
        while logits:
            tokens = {n: int(draws[n](x[None])) for n, x in logits.items()}
            for n, token in tokens.items():
                if token not in ends:
                    said[n].append(token)
            on = [n for n, token in tokens.items() if token not in ends and len(said[n]) < self.sampling.max_tokens]
            stepped = rows.step([opened[n] for n in on], [tokens[n] for n in on]) if on else []
            for x in stepped:
                if isinstance(x, Exception):
                    raise x
            logits = {n: cast(Tensor, x) for n, x in zip(on, stepped, strict=True)}
        return [self.tokenizer.decode(ids).strip() for ids in said]

    def _greedy(self, prompt: Sequence[int], logits: Tensor, caches: Caches) -> str:
        decoder, ends = prepare(self.model), set(self.tokenizer.eos_ids)
        draw = Drawer(self.sampling, [list(prompt)], logits.shape[-1], [0], ends)
        said: list[int] = []
        for _ in range(self.sampling.max_tokens):
            token = int(draw(logits))
            if token in ends:
                break
            said.append(token)
            if len(said) < self.sampling.max_tokens:
                logits, more = decoder(torch.tensor([[token]]), caches)
                caches = cast(Caches, more)
        return self.tokenizer.decode(said).strip()

    def recalled(self, who: Identity, prompt: Sequence[int]) -> Identity:
        """The identity as this prompt reads it, as `generate(…, identity=who)` has it."""
        asked = asking(self.model, who, prompt, self.tokenizer)
        if asked is None:
            return who
        if not asked.likely:
            return asked.together(MOST)
        mind = asked.read([asked.likely[0][0]])
        self.asked[mind] = asked
        return mind


@dataclass(frozen=True, eq=False)
class Written:
    """A history as an identity holds it, and where each of its episodes was said."""

    identity: Identity
    places: list[Turn]

    def chosen_turns(self, mind: Identity) -> list[Turn]:
        """Where what came to mind was said; nothing where it was refused."""
        return [self.places[i] for i in mind.chosen] if isinstance(mind, Recollection) else []

    def ranking(self, examiner: Examiner, question: str) -> list[list[Turn]]:
        """Where the units of this life were said, the fittest first, whether or not they cohere; those that are looked at by how surely they answer."""
        prompt = examiner.prompt([{"role": "user", "content": question}])
        asked = asking(examiner.model, self.identity, prompt, examiner.tokenizer)
        return [] if asked is None else [[self.places[i] for i in asked.scores.units[u]] for u in asked.ranking]


def rank_of(ranking: Sequence[Sequence[Turn]], turns: Sequence[Turn]) -> int:
    """How many units stand before the first that was said at one of these places; all of them where none was."""
    wanted = set(turns)
    return next((n for n, unit in enumerate(ranking) if wanted & set(unit)), len(ranking))


def write_history(examiner: Examiner, history: Sequence[Conversation], *rules: Rule) -> list[Written]:
    """The history lived through conversation by conversation, once for all these rules."""
    identities = [Identity.new(examiner.body.base) for _ in rules]
    places: list[list[Turn]] = [[] for _ in rules]
    for c, conversation in enumerate(history):
        before = [len(i.episodes) for i in identities]
        for part in cut([dict(m) for m in conversation], examiner.tokenizer):
            experience = observe(examiner.model, part, examiner.tokenizer, source=f"conversation {c}")
            identities = [imprint(i, experience, rule) for i, rule in zip(identities, rules, strict=True)]
        for n, identity in enumerate(identities):
            texts = [examiner.tokenizer.decode(e.tokens.tolist()) for e in identity.episodes[before[n] :]]
            places[n] += [(c, m) for m in said_in(texts, [m["content"] for m in conversation])]
    return [Written(*pair) for pair in zip(identities, places, strict=True)]


def write_episodes(examiner: Examiner, history: Sequence[Conversation]) -> Written:
    """The same as `write_history` with episodes alone, by the layers that these are found by: a third of the work.

    Neither shock nor imprints are known: what an identity reads before its first night is the same, what it is is not.
    """
    tokenizer, body = examiner.tokenizer, examiner.body
    layers = finder_of(body, tokenizer).layers
    identity, places = Identity.new(body.base), list[Turn]()
    for c, conversation in enumerate(history):
        before = len(identity.episodes)
        for part in cut([dict(m) for m in conversation], tokenizer):
            identity = imprint(identity, _glanced(body, layers, part, tokenizer, f"conversation {c}"), EPISODES)
        texts = [tokenizer.decode(e.tokens.tolist()) for e in identity.episodes[before:]]
        places += [(c, m) for m in said_in(texts, [m["content"] for m in conversation])]
    return Written(identity, places)


@torch.no_grad()
def _glanced(body: OwnBody, layers: range, text: str | Chat, tokenizer: Tokenizer, source: str) -> Experience:
    """An experience of which no more is known than episodes need."""
    ids, roles = tokenised(text, tokenizer)
    tokens, none = torch.tensor(ids), torch.zeros(len(ids))
    with body.read([None] * body.base.depth):
        keys = body.keys(tokens, layers)
    k = torch.cat([keys.new_zeros(layers.start, *keys.shape[1:]), keys])
    content, speech = torch.tensor(roles) != MARKUP, Speech.of(ids, roles, tokenizer)
    return Experience(body.base, tokens, content, none, k, k, k, body, source=source, speech=speech, tokenizer=tokenizer)


def said_in(pieces: Sequence[str], messages: Sequence[str]) -> list[int]:
    """In which message each piece was said; pieces and messages are in order, and a message is cut into one piece or more."""
    places: list[int] = []
    at, start = 0, 0
    for piece in pieces:
        words = piece.strip()
        later = [(n, messages[n].find(words, start if n == at else 0)) for n in range(at, len(messages))]
        # A piece that no message holds as it is was changed by the template: it is where the one before it was.
        at, start = next(((n, i + len(words)) for n, i in later if i >= 0), (at, start))
        places.append(at)
    return places


__all__ = ["GREEDY", "Ask", "Examiner", "Past", "Said", "Written", "rank_of", "said_in", "write_episodes", "write_history"]
