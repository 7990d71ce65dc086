"""recall: what comes to mind at a prompt. Episodes are chosen by coherence or refused, read once more, and stand among the slots.

    mind = recall(model, mara, tokenizer.encode(tokenizer.chat(messages)), tokenizer)
    mind.chosen, mind.coherence                     which episodes, and how well they fit
    generate(model, prompt, identity=mind)          `generate(…, identity=mara)` does all of this by itself

Which fit, and whether anything is asked for, is said by `scores`: below `THRESHOLD` nothing comes to mind, and the answer is nobody's.
What comes to mind stands where it would stand in the text, right behind the prompt's head (`layer.py`), the youngest nearest to the
question, as it may correct the older: a token costs the same whatever the length of the life.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import StateError
from ...models.tokenizer import Tokenizer
from ..body import body_of
from ..episodes import Episode
from ..packed import Packed
from ..state import Identity, Imprints, Recollection
from .about import asks_listener
from .body import Body
from .finding import Finder, finder_of
from .scores import scored

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
LATE, SHORT = 1.0, 84
"""Nats by which the last layer looks more at what came to mind, at most, the first not at all, those between in proportion (`write/imprints.py`); and
tokens from which on nothing is added, as what is long is looked at anyway: log(SHORT / tokens) where that is less (docs/identity.md)."""
REMADE = 16
"""Episodes whose keys and values are held in memory after they came to mind."""


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
    chosen = scores.chosen(most, readable - len(finder.frame.before) - len(finder.frame.after))
    if not chosen or scores.best(most) < THRESHOLD[scores.has_meanings]:
        # Nobody asked: imprints stay silent, and the answer is what it would be without them.
        return _recollection(identity, Imprints.none(identity.base), (), (scores.best(most),))
    turns = [i for unit in chosen for i in scores.units[unit]]
    slots = _remade(body, finder, identity, [identity.episodes[i] for i in turns], prompt)
    if identity.life.sleeps:
        # What a night has distilled speaks beside it, the worthiest where there is little room; before that, imprints only disturb: of 21
        # natural questions (pool "choose") 7 were answered without them, 4 with them.
        worth = identity.imprints.worth
        room = max(0, min(len(worth), readable - len(slots)))
        slots = identity.imprints.pick(worth.topk(room).indices.sort().values).joined(slots)
    mind = _recollection(identity, slots, tuple(turns), tuple(float(scores.coherence[u]) for u in chosen))
    return replace(mind, head=finder.frame.head_of(prompt)) if body.has_heads else mind


def _recollection(
    identity: Identity, imprints: Imprints, chosen: tuple[int, ...], coherence: tuple[float, ...]
) -> Recollection:
    others = (f.name for f in fields(Identity) if f.name not in ("imprints", "episodes"))
    parts: dict[str, Any] = {name: getattr(identity, name) for name in others}
    return Recollection(**parts, imprints=imprints, chosen=chosen, coherence=coherence)


def _remade(body: Body, finder: Finder, identity: Identity, episodes: Sequence[Episode], prompt: Sequence[int]) -> Imprints:
    """The keys and values of what comes to mind, read behind the head that a prompt would have with nothing before it."""
    held: OrderedDict[tuple[tuple[str, ...], tuple[int, ...]], tuple[Packed, Packed]]
    held = body.made.setdefault("remade", OrderedDict())
    head = finder.frame.head_alone(prompt)
    tokens, part = finder.frame.read([e.tokens.tolist() for e in episodes], prompt)
    name = tuple(e.digest for e in episodes), tuple(head)
    if name in held:
        held.move_to_end(name)
    else:
        with torch.no_grad(), body.read([None] * body.base.depth):
            heads = body.heads(torch.tensor([*head, *tokens], device=body.device))
        k, v = (torch.stack([getattr(h, n)[:, len(head) :].float() for h in heads]) for n in "kv")
        held[name] = Packed.of(k), Packed.of(v)
        while len(held) > REMADE:
            held.popitem(last=False)
    k, v = held[name]
    owner = torch.tensor(part)
    sources = torch.tensor([identity.sources.index(e.source) for e in episodes], dtype=torch.int32)
    position = torch.tensor([e.position for e in episodes], dtype=torch.int32)
    zeros, said = torch.zeros(len(tokens)), owner >= 0
    more = min(LATE, max(0.0, math.log(SHORT / max(int(said.sum()), 1))))
    weight = more * torch.linspace(0, 1, k.shape[0])[:, None, None] * said
    imprints = Imprints(
        k, v, torch.tensor(tokens, dtype=torch.int32), position[owner] + _within(owner), zeros, sources[owner],
        weight.expand(*k.shape[:3]).contiguous(), zeros,
    )  # fmt: skip
    # In front of the text the words around would stand where nothing is asked: only what was said goes there.
    return imprints if body.has_heads else imprints.pick((owner >= 0).nonzero().flatten())


def _within(owner: Tensor) -> Tensor:
    """The how-manieth of its part each token is."""
    at = torch.arange(len(owner))
    first = torch.where(F.pad(owner[1:] != owner[:-1], (1, 0), value=True), at, 0).cummax(0).values
    return (at - first).to(torch.int32)


__all__ = ["recall", "scored"]
