"""recall: what comes to mind at a prompt. Episodes are chosen by coherence or refused, read once more, and stand among the slots.

    mind = recall(model, mara, tokenizer.encode(tokenizer.chat(messages)), tokenizer)
    mind.chosen, mind.coherence                     which episodes, and how well they fit
    generate(model, prompt, identity=mind)          `generate(…, identity=mara)` does all of this by itself

Which fit, and whether anything is asked for, is said by `scores`: below `THRESHOLD` nothing comes to mind, and the answer is nobody's.
What comes to mind stands where it would stand in the text, right behind the prompt's head (`layer.py`): a token costs the same whatever
the length of the life.

Where the model can say which of them answers (`answering`), one thing comes to mind, and is read alone: which one it is is drawn as a word is
drawn, p(u) ∝ exp(log-odds / temperature), so that at temperature 0 it is the surest. `minds` are all of them with their probabilities. Where
it cannot, up to three come together, the youngest nearest to the question, as it may correct the older.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from ...errors import StateError
from ...models.decode.sampling import Sampling
from ...models.tokenizer import Tokenizer
from ..body import body_of
from ..state import LEAN, Identity, Imprints, Recollection
from .about import asks_listener
from .answering import LookedAt, answering_for, looked_at
from .finding import Finder, finder_of
from .focus import focus
from .reader import reader_for
from .scores import Scores, scored
from .slots import nothing_told, slots_of

SLOTS = 128
"""Slots that are read at most while something comes to mind, and"""
HEARD = 288
"""where the question asks for what the listener said, whose messages are longer.

17 such questions of LongMemEval, rows 0 to 96: nats below nothing 0.59 by 128 slots, 1.37 by 288, no more by 448; of the 71 other questions those
about what the user said 2.33 and 2.13, the rest the same."""
MOST = 3
"""Episodes that come to mind at once at most where nothing says which of them answers, and of which one comes where something does; a
listener's question and the answer to it are counted as one."""
THRESHOLD = {True: 0.0, False: 0.0}
"""Coherence below which nothing comes to mind, with an encoder of meanings and without."""

SURE = 1.0
"""Coherence from which on words lean and the best sentence is looked at more, in full from 1 above it: of 672 everyday questions of four pools 9 bring something to mind, at up to 1.3; right questions of
the same people have a median of 1.4 to 3.9."""


READ = 0.35
"""How far words lean where a reader (`reader.py`) reads: it says by itself that the text is to be answered from. Right unit, 28 questions of the second pool by
hand, right greedy answers and nats by ½, 0.35, ¼ and 0: 21, 21, 21, 20; 1.50, 1.50, 1.53, 1.74. By ½ a name comes out misspelt ("Biscketu")."""


def recall(
    model: nn.Module,
    identity: Identity,
    prompt: Sequence[int],
    tokenizer: Tokenizer,
    *,
    about: str | None = None,
    most: int | None = None,
    sampling: Sampling | None = None,
    row: int = 0,
) -> Identity:
    """The identity as this prompt reads it; `about` is what it asks, by default the last that the user said in it.

    The same identity where it has no episodes; where none of them coheres, `chosen` is empty. `most` units are read together; without it one where
    the model says which answers, three elsewhere. With `sampling` that one is drawn, for a row of its batch.
    """
    asked = asking(model, identity, prompt, tokenizer, about)
    if asked is None:
        return identity
    if most is not None or asked.looks is None:
        return asked.together(MOST if most is None else most)
    return asked.read([_drawn(asked.likely, sampling, row)]) if asked.likely else asked.refused()


def minds(
    model: nn.Module, identity: Identity, prompt: Sequence[int], tokenizer: Tokenizer, *, about: str | None = None
) -> list[tuple[Identity, float]]:
    """All that may come to mind at a prompt, each as `recall` would read it, with its probability; the likeliest first."""
    asked = asking(model, identity, prompt, tokenizer, about)
    if asked is None:
        return [(identity, 1.0)]
    return [(asked.read([u]), p) for u, p in asked.likely] or [(asked.together(MOST), 1.0)]


def _drawn(likely: Sequence[tuple[int, float]], sampling: Sampling | None, row: int) -> int:
    """The likeliest, or one by its probability, as the words of this row would be drawn."""
    temperature = 0.0 if sampling is None else sampling.temperature
    if sampling is None or temperature == 0:
        return likely[0][0]
    weights = (torch.tensor([p for _, p in likely]).log() / temperature).softmax(0)
    # A seed of its own: the first word is no echo of this draw.
    generator = torch.Generator().manual_seed((sampling.seed + row) ^ 0x6D696E64)
    return likely[int(torch.multinomial(weights, 1, generator=generator))][0]


@dataclass(frozen=True, eq=False)
class Asking:
    """A prompt, and how the episodes of a life fit what it asks."""

    finder: Finder
    identity: Identity
    prompt: Sequence[int]
    tokenizer: Tokenizer
    asked: Sequence[int]
    scores: Scores
    readable: int
    """Slots."""
    best: float
    """How surely anything answers, or coheres: below 0 nothing does."""
    looks: LookedAt | None = None
    """None where nothing was looked at."""

    @property
    def room(self) -> int:
        return self.readable - len(self.finder.frame.before) - len(self.finder.frame.after)

    @property
    def likely(self) -> list[tuple[int, float]]:
        """Units of which one may come to mind alone, and how likely each is, the likeliest first."""
        return [] if self.looks is None else self.looks.likely(MOST)

    @property
    def ranking(self) -> list[int]:
        """All units of the life, those that were looked at first, by how surely they answer."""
        odds = {} if self.looks is None else self.looks.odds
        rest = self.scores.rank.argsort(descending=True).tolist()
        return [*sorted(odds, key=lambda u: -odds[u]), *(u for u in rest if u not in odds)]

    def together(self, most: int) -> Identity:
        """Several units, oldest first."""
        chosen = [] if self.best < 0 else (self.looks or self.scores).chosen(most, self.room)
        return self.read(chosen) if chosen else self.refused()

    def refused(self) -> Identity:
        """Nobody asked, or nothing that was told answers: imprints stay silent, and the answer is what it would be without them."""
        return _recollection(self.identity, Imprints.none(self.identity.base), (), (self.best,))

    def read(self, units: Sequence[int]) -> Identity:
        """These, oldest first, as they are read together."""
        finder, identity, scores = self.finder, self.identity, self.scores
        body = finder.body
        turns = [i for unit in units for i in scores.units[unit]]
        came = [identity.episodes[i] for i in turns]
        coherence = tuple(float(scores.coherence[u]) if self.looks is None else self.looks.odds[u] for u in units)
        sure = sureness(coherence) if self.looks is None else min(max(self.best, 0.0), 1.0)
        less = scores.taken_back(turns, self.asked, self.tokenizer)
        more = [] if scores.asked is None else [sure * x for x in focus(came, scores.asked, self.tokenizer)]
        slots = slots_of(body, finder, identity, came, self.prompt, less, more, sure)
        if identity.life.sleeps:
            # What a night has distilled speaks beside it, the worthiest where there is little room; before that, imprints only disturb: of 21
            # natural questions (pool "choose") 7 were answered without them, 4 with them.
            worth = identity.imprints.worth
            room = max(0, min(len(worth), self.readable - len(slots)))
            slots = identity.imprints.pick(worth.topk(room).indices.sort().values).joined(slots)
        mind = replace(_recollection(identity, slots, tuple(turns), coherence), sure=sure)
        if not body.has_heads:
            return mind
        head, around = finder.frame.head_of(self.prompt), finder.frame.around(self.prompt)
        lean = LEAN if reader_for(body, len(around[0]), len(around[2])) is None else READ
        return replace(
            mind, head=head, lean=lean, beside=_nobody(finder, identity, self.prompt, head, sure) if finder.nothing else None
        )


def asking(
    model: nn.Module, identity: Identity, prompt: Sequence[int], tokenizer: Tokenizer, about: str | None = None
) -> Asking | None:
    """None where nothing is to be brought to mind."""
    body = body_of(model)
    identity.base.refuse(body.base)
    if not identity.episodes or isinstance(identity, Recollection):
        return None
    if not len(prompt):
        raise StateError("an empty prompt brings nothing to mind: give its tokens")
    finder = finder_of(body, tokenizer)
    asked = tokenizer.encode(about, bos=False) if about is not None else finder.frame.question_of(prompt)
    if not asked:
        return None
    width = identity.episodes[0].keys.shape[1]
    if width != len(finder.mean):
        raise StateError(f"these episodes are found by {width} numbers a token, and this model's keys have {len(finder.mean)}")
    text = about or tokenizer.decode(asked)
    scores = scored(finder, identity.episodes, asked, text)
    found = Asking(
        finder, identity, prompt, tokenizer, asked, scores,
        readable=HEARD if asks_listener(text) else SLOTS,
        best=scores.best(MOST) - THRESHOLD[scores.has_meanings],
    )  # fmt: skip
    if found.best < 0 or (answering := answering_for(body)) is None:
        return found
    looks = looked_at(finder, scores, answering, asked, prompt)
    return replace(found, best=looks.best, looks=looks)


def sureness(coherence: Sequence[float]) -> float:
    """From 0 to 1: that what came to mind was asked for."""
    return min(max(max(coherence) - SURE, 0.0), 1.0)


def _nobody(finder: Finder, identity: Identity, prompt: Sequence[int], head: int, sure: float) -> Identity:
    """Whom the words lean away from: somebody who was told nothing to speak of, and reads it as what came to mind is read."""
    nobody = replace(Identity.new(identity.base), sources=("nothing",))
    return replace(_recollection(nobody, nothing_told(finder, prompt, sure), (), ()), head=head)


def _recollection(
    identity: Identity, imprints: Imprints, chosen: tuple[int, ...], coherence: tuple[float, ...]
) -> Recollection:
    others = (f.name for f in fields(Identity) if f.name not in ("imprints", "episodes"))
    parts: dict[str, Any] = {name: getattr(identity, name) for name in others}
    return Recollection(**parts, imprints=imprints, chosen=chosen, coherence=coherence)


__all__ = ["Asking", "asking", "minds", "recall", "scored", "sureness"]
