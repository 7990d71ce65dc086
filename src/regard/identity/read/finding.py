"""What an episode is found by: the model's own keys of a few layers, and a sentence encoder's vector where one is at hand.

    keys      one unit vector a token: keys of layers a fifth to two fifths up, all heads in a row, less their mean on plain text
    nearness  of a question to an episode: each token of the question takes its nearest in the episode; the mean of these cosines
    meaning   by MiniLM if it is among the models here (`regard models get minilm`): one vector for all of an episode, one for each sentence
              and one for each clause, as much is told in passing
    about     whether a question is about the life of whoever asks it, by its keys and by its meaning (`about`)

Plain questions, which anybody may ask anybody, say how near is usual.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ...models import downloads
from ...models.subwords import TokenizerError
from ...models.tokenizer import Tokenizer
from ..sleep.texts import NEUTRAL
from ..speech import SENTENCE
from .about import CHANGED, EVERYDAY, LIFE, TOLD, TOLD_FIRST, About
from .frame import Frame

if TYPE_CHECKING:
    from .body import Body

FIRST, LAST = 0.2, 0.4
"""Where the layers are whose keys are compared, as shares of the depth."""
WIDEST = 1200
"""Numbers that a token is found by at most: wide models use fewer layers."""
ENCODER = "minilm"
AT_ONCE = 16
"""Texts that the encoder reads at once at most."""
PARTS, WORDS = 15, 2
"""Sentences and clauses of an episode that have a meaning of their own at most, and words of such a one at least."""
TOLD_SHARE, TOLD_SPREAD = 0.8, 0.03
"""What the way in which such things are told counts beside the question itself, and the cosine by which a likelier question counts e times more.

The right turn among the first three, pools train / choose, on which this was chosen: 94 / 97% without, 99 / 99% with it; test, final, fresh: 90, 92,
88% without, 91, 89, 94% with it."""
CLAUSE = re.compile(r"[,;:](?=\s)|[()–—\n]|[.!?…]+(?=\s|$)")
"""What ends a clause."""
PLAIN = (
    "What is the capital of France?", "How do I boil an egg?", "Can you write a short poem about the sea?",
    "What is seven times eight?", "Why is the sky blue?", "Tell me a joke.", "How far away is the moon?",
    "What should I cook tonight?", "Who wrote Hamlet?", "How are you today?", "Can you help me with something?",
    "What did we talk about?", "What do you know about me?", "Where do I come from?", "What is my favourite song?",
    "Who is my best friend?", "When is my birthday?", "How much did I pay for it?", "What was the name of the book?",
    "Which bus do I take?", "What am I afraid of?", "How long have I been doing that?", "What is the weather like?",
    "What did my doctor say?",
)  # fmt: skip
"""Have nothing to do with anybody in particular; how near they come to an episode is what is usual."""


NOTHING = "It was an ordinary day. Nothing in particular happened, and there is nothing much to tell about it."
"""Stands in the stead of what came to mind where words lean away from what would be said with nothing to speak of before one's eyes."""


def finding_layers(depth: int, width: int) -> range:
    """Layers whose keys are compared, of a model with keys of `width` numbers in each."""
    first = int(FIRST * depth)
    count = max(1, min(int(LAST * depth) - first, WIDEST // max(width, 1)))
    return range(first, first + count)


@dataclass(eq=False)
class Finder:
    """Questions and episodes of one model as vectors that can be compared."""

    body: Body
    tokenizer: Tokenizer
    frame: Frame

    @cached_property
    def layers(self) -> range:
        base = self.body.base
        return finding_layers(base.depth, base.key_heads * base.head_width)

    @cached_property
    def mean(self) -> Float[Tensor, " W"]:
        """The mean key on plain text."""
        texts = [ids for text in NEUTRAL if len(ids := self._ids(text)) > 1]
        base = self.body.base
        none = torch.zeros(len(self.layers) * base.key_heads * base.head_width)
        return torch.cat([self._rows(ids, 1) for ids in texts]).mean(0) if texts else none

    def unit(self, keys: Float[Tensor, "L G N D"]) -> Float[Tensor, "N W"]:
        """Keys of all layers, as each token is found by."""
        rows = keys[self.layers.start : self.layers.stop].permute(2, 0, 1, 3).flatten(1).float().cpu()
        return F.normalize(rows - self.mean, dim=-1)

    def asked(self, tokens: Sequence[int]) -> Float[Tensor, "N W"]:
        """A question read alone, as it is compared."""
        ids, at = self.frame.alone("user", tokens, self.tokenizer.encode("", bos=None))
        at = max(at, 1) if len(ids) > 1 else 0
        return F.normalize(self._rows(ids, at) - self.mean, dim=-1)

    def question(self, tokens: Sequence[int]) -> tuple[Float[Tensor, "N W"], float]:
        """`asked` and `about_life` of a question, which is read once for both: a text's keys do not know what stands behind it."""
        framed, at = self.frame.alone("user", tokens, self.tokenizer.encode("", bos=None))
        at = max(at, 1) if len(framed) > 1 else 0
        first = self._first
        bare = [*first, *tokens]
        length = max(len(framed), len(bare))
        both = torch.tensor([[*ids, *ids[:1] * (length - len(ids))] for ids in (list(framed), bare)], device=self.body.device)
        with torch.no_grad(), self.body.read([None] * self.body.base.depth):
            keys = self.body.keys_of_many(both, self.layers).permute(0, 3, 1, 2, 4).flatten(2).float().cpu()
        asked, mean = F.normalize(keys - self.mean, dim=-1)
        start = 1 if first or len(tokens) > 1 else 0
        about = 0.0 if self.about is None else self.about(mean[start : len(bare)].mean(0))
        return asked[at : len(framed)], about

    @cached_property
    def _first(self) -> list[int]:
        """The first token that a text has, or none."""
        return list(self.frame.head[:1]) or list(self.tokenizer.encode("", bos=None)[:1])

    @cached_property
    def usual_head(self) -> list[int]:
        """The head of a prompt with the template's own system message; without a template, the first token that a text has."""
        opening = self.frame.opening
        return list(self._first or self.frame.paragraph[:1]) if opening is None else [*self.frame.head, *opening["user"]]

    @cached_property
    def plain(self) -> list[Float[Tensor, "N W"]]:
        """The plain questions, as keys."""
        return [self.asked(ids) for q in PLAIN if (ids := self._ids(q))]

    @cached_property
    def about(self) -> About | None:
        """What tells a question about somebody's life by its keys; None for a tokenizer without letters for them."""
        lists = [[ids for q in some if (ids := self._ids(q))] for some in (LIFE, EVERYDAY)]
        return About.fitted(*map(self._means, lists)) if all(lists) else None

    def about_life(self, asked: Sequence[int]) -> float:
        """How much a question sounds like one about the asker's own life, as this model reads it."""
        return 0.0 if self.about is None else self.about(self._means([asked])[0])

    def _means(self, texts: Sequence[Sequence[int]]) -> Float[Tensor, "n W"]:
        """The mean of each text's keys, each read behind the first token that a text has."""
        first = self._first
        means = torch.empty(len(texts), len(self.mean))
        for length in {len(ids) for ids in texts}:
            rows = [n for n, ids in enumerate(texts) if len(ids) == length]
            tokens = torch.tensor([[*first, *texts[n]] for n in rows], device=self.body.device)
            with torch.no_grad(), self.body.read([None] * self.body.base.depth):
                keys = self.body.keys_of_many(tokens, self.layers)
            # Without such a token the first of the question is the sink, which is compared with nothing.
            keys = keys.permute(0, 3, 1, 2, 4).flatten(2).float().cpu()[:, 1 if first or length > 1 else 0 :]
            means[rows] = F.normalize(keys - self.mean, dim=-1).mean(1)
        return means

    @cached_property
    def words(self) -> frozenset[int]:
        """Tokens of the plain questions: to have them in common says nothing."""
        return frozenset(t for q in PLAIN for said in (q, f" {q.lower()}") for t in self._ids(said))

    def usual(self, keys: Float[Tensor, "N W"], meaning: Float[Tensor, " E"] | None) -> Float[Tensor, " 4"]:
        """Median and spread of how near plain questions come to something, by keys and by meaning."""
        by_meaning = plain_meanings()
        unknown = torch.tensor([0.0, 1.0])
        near = _spread(torch.stack([(q @ keys.mT).amax(-1).mean() for q in self.plain])) if self.plain else unknown
        alike = unknown if meaning is None or by_meaning is None else _spread(by_meaning @ meaning)
        return torch.cat([near, alike]).float()

    @cached_property
    def nothing(self) -> list[int]:
        """`NOTHING`, as tokens."""
        return self._ids(NOTHING)

    def _ids(self, text: str) -> list[int]:
        """The tokens of a text; none where the tokenizer has no letters for it, as one of a single book's characters may not."""
        try:
            return self.tokenizer.encode(text, bos=False)
        except TokenizerError:
            return []

    def _rows(self, ids: Sequence[int], start: int) -> Tensor:
        tokens = torch.tensor(list(ids), device=self.body.device)
        with torch.no_grad(), self.body.read([None] * self.body.base.depth):
            keys = self.body.keys(tokens, self.layers)
        return keys.permute(2, 0, 1, 3).flatten(1).float().cpu()[start:]


def _spread(x: Tensor) -> Tensor:
    """Median and spread, by the median distance from it: one plain question that happens to fit changes neither."""
    middle = x.median()
    return torch.stack([middle, (1.4826 * (x - middle).abs().median()).clamp_min(1e-3)])


def finder_of(body: Body, tokenizer: Tokenizer) -> Finder:
    """Made once for a model as it is, and a tokenizer."""
    made: Finder | None = body.made.get("finder")
    if made is None or made.tokenizer is not tokenizer:
        made = body.made["finder"] = Finder(body, tokenizer, Frame.of(tokenizer))
    return made


_READING = threading.Lock()


@lru_cache(maxsize=1)
def _encoder() -> tuple[torch.nn.Module, Tokenizer]:
    model, tokenizer = downloads.open_model(ENCODER)
    return model.eval(), tokenizer


def encoder_name() -> str:
    """Of the sentence encoder that is at hand; empty where there is none."""
    return ENCODER if downloads.present(ENCODER) else ""


@torch.no_grad()
def meanings(texts: Sequence[str]) -> Float[Tensor, "n E"] | None:
    """Unit vectors of texts; None where no encoder is at hand."""
    if not encoder_name() or not texts:
        return None
    from ...models import mean_pooled

    with _READING:
        model, tokenizer = _encoder()
    ids = [tokenizer.encode(text, framed=True)[: int(model.context or 512)] for text in texts]  # pyright: ignore
    rows: dict[int, Tensor] = {}
    for length in sorted({len(x) for x in ids}):
        # Texts of one length are read at once: nothing is padded, and each is what it would be alone.
        every = [n for n, x in enumerate(ids) if len(x) == length]
        for some in (every[at : at + AT_ONCE] for at in range(0, len(every), AT_ONCE)):
            rows |= zip(some, mean_pooled(model(torch.tensor([ids[n] for n in some])).last), strict=True)
    return torch.stack([rows[n] for n in range(len(texts))])


def meanings_within(texts: Sequence[str]) -> list[Float[Tensor, "s E"]] | None:
    """The meaning of each text, and behind it those of its sentences and clauses where there are several; None without an encoder."""
    parts = [[text, *(said for said, _, _ in parts_within(text))] for text in texts]
    vectors = meanings([part for some in parts for part in some])
    return None if vectors is None else list(vectors.split([len(some) for some in parts]))


Part = tuple[str, int, int]
"""What is said in it, and where it begins and ends."""


def parts_within(text: str) -> list[Part]:
    """Sentences first, then clauses that are no sentence; none of either where there is but one. A word alone is of the clause before it."""
    sentences, clauses = sentences_within(text), list[Part]()
    ends = [(m.start(), m.end()) for m in CLAUSE.finditer(text)]
    for start, stop in zip((0, *(end for _, end in ends)), (*(begin for begin, _ in ends), len(text)), strict=True):
        said = text[start:stop].strip(" \"'*-")
        if said and (not clauses or len(said.split()) >= WORDS):
            clauses.append((said, start, stop))
        elif said:
            before, began, _ = clauses[-1]
            clauses[-1] = (f"{before}, {said}", began, stop)
    known = {said.rstrip(" .!?…") for said, _, _ in sentences}
    parts = sentences if len(sentences) > 1 else []
    return [*parts, *(c for c in clauses if c[0] not in known)][:PARTS] if len(clauses) > 1 or parts else []


def sentences_within(text: str) -> list[Part]:
    return [(said, *m.span()) for m in SENTENCE.finditer(text) if len((said := m.group().strip()).split()) >= WORDS]


def plain_meanings() -> Float[Tensor, "P E"] | None:
    """Of the plain questions, made once for an encoder: one that comes to hand later is asked anew. None where none is at hand."""
    return _plain_meanings(encoder_name())


@lru_cache(maxsize=1)
def _plain_meanings(encoder: str) -> Float[Tensor, "P E"] | None:
    return meanings(PLAIN)


@dataclass(frozen=True, eq=False)
class LifeMeanings:
    """What the sentence encoder at hand makes of questions about somebody's life."""

    about: About
    mean: Float[Tensor, " E"]
    """Of such questions: what all of them have in common says nothing of which episode is asked for."""
    asked: Float[Tensor, "n E"]
    """Questions about one thing or another, and"""
    told: Float[Tensor, "n E"]
    """what is told of it, the mean of a few statements."""
    change: About
    """How much a statement sounds like news of a change, not like what is told for the first time."""

    def sought(self, question: Float[Tensor, " E"]) -> Float[Tensor, " E"]:
        """What a question is about, and, of the questions most like it, how that is told."""
        return question - self.mean + TOLD_SHARE * ((self.asked @ question / TOLD_SPREAD).softmax(0) @ self.told)


def life_meanings() -> LifeMeanings | None:
    """Made once for an encoder; None where none is at hand."""
    return _life_meanings(encoder_name()) if encoder_name() else None


@lru_cache(maxsize=1)
def _life_meanings(encoder: str) -> LifeMeanings:
    life, everyday, changed, first = (_meant(some) for some in (LIFE, EVERYDAY, CHANGED, TOLD_FIRST))
    return LifeMeanings(About.fitted(life, everyday), life.mean(0), *_told_meanings(), About.fitted(changed, first))


def _meant(texts: Sequence[str]) -> Float[Tensor, "n E"]:
    vectors = meanings(texts)
    assert vectors is not None
    return vectors


def _told_meanings() -> tuple[Float[Tensor, "n E"], Float[Tensor, "n E"]]:
    asked, told = _meant([q for some, _ in TOLD for q in some]), _meant([said for _, some in TOLD for said in some])
    means = torch.stack([part.mean(0) for part in told.split([len(said) for _, said in TOLD])])
    return asked, means.repeat_interleave(torch.tensor([len(some) for some, _ in TOLD]), 0)


__all__ = [
    "ENCODER",
    "PLAIN",
    "Finder",
    "LifeMeanings",
    "encoder_name",
    "finder_of",
    "finding_layers",
    "life_meanings",
    "meanings",
    "meanings_within",
    "plain_meanings",
    "sentences_within",
]
