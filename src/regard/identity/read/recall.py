"""recall: what comes to mind at a prompt. Episodes are chosen by coherence or refused, read once more, and stand among the slots.

    mind = recall(model, mara, tokenizer.encode(tokenizer.chat(messages)), tokenizer)
    mind.chosen, mind.coherence                     which episodes, and how well they fit
    generate(model, prompt, identity=mind)          `generate(…, identity=mara)` does all of this by itself

Which fit, and whether anything is asked for, is said by `scores`: below `THRESHOLD` nothing comes to mind, and the answer is nobody's.
What comes to mind stands where it would stand in the text, right behind the prompt's head (`layer.py`), the youngest nearest to the
question, as it may correct the older: a token costs the same whatever the length of the life.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from torch import nn

from ...errors import StateError
from ...models.tokenizer import Tokenizer
from ..body import body_of
from ..state import Identity, Imprints, Recollection
from .about import asks_listener
from .answering import answering_for, looked_at
from .finding import Finder, finder_of
from .focus import focus
from .scores import scored
from .slots import nothing_told, slots_of

SLOTS = 128
"""Slots that are read at most while something comes to mind, and"""
HEARD = 288
"""where the question asks for what the listener said, whose messages are longer.

17 such questions of LongMemEval, rows 0 to 96: nats below nothing 0.59 by 128 slots, 1.37 by 288, no more by 448; of the 71 other questions those
about what the user said 2.33 and 2.13, the rest the same."""
MOST = 3
"""Episodes that come to mind at once at most, a listener's question and the answer to it counted as one."""
THRESHOLD = {True: 0.0, False: 0.0}
"""Coherence below which nothing comes to mind, with an encoder of meanings and without."""

SURE = 1.0
"""Coherence from which on words lean and the best sentence is looked at more, in full from 1 above it: of 672 everyday questions of four pools 9 bring something to mind, at up to 1.3; right questions of
the same people have a median of 1.4 to 3.9."""


def recall(
    model: nn.Module,
    identity: Identity,
    prompt: Sequence[int],
    tokenizer: Tokenizer,
    *,
    about: str | None = None,
    most: int = MOST,
) -> Identity:
    """The identity as this prompt reads it; `about` is what it asks, by default the last that the user said in it.

    The same identity where it has no episodes; where none of them coheres, `chosen` is empty.
    """
    body = body_of(model)
    identity.base.refuse(body.base)
    if not identity.episodes or isinstance(identity, Recollection):
        return identity
    if not len(prompt):
        raise StateError("an empty prompt brings nothing to mind: give its tokens")
    finder = finder_of(body, tokenizer)
    asked = tokenizer.encode(about, bos=False) if about is not None else finder.frame.question_of(prompt)
    if not asked:
        return identity
    width = identity.episodes[0].keys.shape[1]
    if width != len(finder.mean):
        raise StateError(f"these episodes are found by {width} numbers a token, and this model's keys have {len(finder.mean)}")
    text = about or tokenizer.decode(asked)
    scores = scored(finder, identity.episodes, asked, text)
    readable = HEARD if asks_listener(text) else SLOTS
    room = readable - len(finder.frame.before) - len(finder.frame.after)
    best, looks = scores.best(most) - THRESHOLD[scores.has_meanings], None
    if best >= 0 and (answering := answering_for(body)) is not None:
        looks = looked_at(finder, scores, answering, asked, prompt)
        best = looks.best
    chosen = [] if best < 0 else (looks or scores).chosen(most, room)
    if not chosen:
        # Nobody asked, or nothing that was told answers: imprints stay silent, and the answer is what it would be without them.
        return _recollection(identity, Imprints.none(identity.base), (), (best,))
    turns = [i for unit in chosen for i in scores.units[unit]]
    less = scores.taken_back(turns, asked, tokenizer)
    came = [identity.episodes[i] for i in turns]
    coherence = tuple(float(scores.coherence[u]) if looks is None else looks.odds[u] for u in chosen)
    sure = sureness(coherence) if looks is None else min(best, 1.0)
    more = [] if scores.asked is None else [sure * x for x in focus(came, scores.asked, tokenizer)]
    slots = slots_of(body, finder, identity, came, prompt, less, more)
    if identity.life.sleeps:
        # What a night has distilled speaks beside it, the worthiest where there is little room; before that, imprints only disturb: of 21
        # natural questions (pool "choose") 7 were answered without them, 4 with them.
        worth = identity.imprints.worth
        room = max(0, min(len(worth), readable - len(slots)))
        slots = identity.imprints.pick(worth.topk(room).indices.sort().values).joined(slots)
    mind = replace(_recollection(identity, slots, tuple(turns), coherence), sure=sure)
    if not body.has_heads:
        return mind
    head = finder.frame.head_of(prompt)
    return replace(mind, head=head, beside=_nobody(finder, identity, prompt, head) if finder.nothing else None)


def sureness(coherence: Sequence[float]) -> float:
    """From 0 to 1: that what came to mind was asked for."""
    return min(max(max(coherence) - SURE, 0.0), 1.0)


def _nobody(finder: Finder, identity: Identity, prompt: Sequence[int], head: int) -> Identity:
    """Whom the words lean away from: somebody who was told nothing to speak of, and reads it as what came to mind is read."""
    nobody = replace(Identity.new(identity.base), sources=("nothing",))
    return replace(_recollection(nobody, nothing_told(finder, prompt), (), ()), head=head)


def _recollection(
    identity: Identity, imprints: Imprints, chosen: tuple[int, ...], coherence: tuple[float, ...]
) -> Recollection:
    others = (f.name for f in fields(Identity) if f.name not in ("imprints", "episodes"))
    parts: dict[str, Any] = {name: getattr(identity, name) for name in others}
    return Recollection(**parts, imprints=imprints, chosen=chosen, coherence=coherence)


__all__ = ["recall", "scored", "sureness"]
