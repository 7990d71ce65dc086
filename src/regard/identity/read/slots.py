"""The keys and values of what comes to mind: made again by reading it, or put together from what was kept.

    made again    head, "Read the text …", the episodes one after the other, "Question:"     one pass over all of it, before the question
    kept          every episode as it was read alone when it was written, between the same words, which were read around nothing

What is kept costs no pass over the episodes and ten times the bytes, and episodes that come together have not seen one another.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..episodes import Episode
from ..packed import Packed
from ..state import Identity, Imprints
from .body import Body
from .finding import Finder
from .reader import reader_for

LATE, SHORT = 1.0, 84
"""Nats by which the last layer looks more at what came to mind, at most, the first not at all, those between in proportion (`write/imprints.py`); and
tokens from which on nothing is added, as what is long is looked at anyway: log(SHORT / tokens) where that is less (docs/episodes.md)."""
REMADE = 16
"""Episodes whose keys and values are held in memory after they came to mind."""

Pair = tuple[Packed, Packed]
"""Keys and values, (L, G, n, D)."""


def slots_of(
    body: Body,
    finder: Finder,
    identity: Identity,
    episodes: Sequence[Episode],
    prompt: Sequence[int],
    less: Sequence[Tensor | None] = (),
    more: Sequence[Tensor] = (),
    sure: float = 0.0,
) -> Imprints:
    """What comes to mind as slots, behind the head that a prompt would have with nothing before it.

    `less` is added to the scores of each episode's tokens, if it has any; `more` in late layers. The words around are those of a reader
    (`reader.py`) as far as it is `sure` that something was asked.
    """
    kept = [(e.k, e.v) for e in episodes if e.k is not None and e.v is not None]
    slots, owner = _slots(
        finder,
        prompt,
        [e.tokens.tolist() for e in episodes],
        tuple(e.digest for e in episodes),
        kept if len(kept) == len(episodes) else None,
        sure,
    )
    sources = torch.tensor([identity.sources.index(e.source) for e in episodes], dtype=torch.int32)
    position = torch.tensor([e.position for e in episodes], dtype=torch.int32)
    weight = slots.weight.clone()
    for n, x in enumerate(less):
        if x is not None:
            weight[..., owner == n] += x
    for n, x in enumerate(more):
        weight[..., owner == n] += _late(len(weight)) * x
    slots = replace(slots, position=position[owner] + _within(owner), source=sources[owner], weight=weight)
    # In front of the text the words around would stand where nothing is asked: only what was said goes there.
    return slots if body.has_heads else slots.pick((owner >= 0).nonzero().flatten())


def nothing_told(finder: Finder, prompt: Sequence[int], sure: float = 0.0) -> Imprints:
    """What a prompt would be read with if all that anybody had ever said were `NOTHING`."""
    return _slots(finder, prompt, [finder.nothing], ("nothing",), None, sure)[0]


def _slots(
    finder: Finder,
    prompt: Sequence[int],
    said: Sequence[Sequence[int]],
    names: tuple[str, ...],
    kept: Sequence[Pair] | None,
    sure: float,
) -> tuple[Imprints, Tensor]:
    """What was said, between the words of the frame, as slots of nobody; and of which part each is."""
    head = finder.frame.head_alone(prompt)
    tokens, part = finder.frame.read(said, prompt)
    if kept is None:
        k, v = _held(finder.body, names, head, tokens)
    else:
        k, v = _put_together(finder.body, finder, kept, head, prompt)
    before, _, after = finder.frame.around(prompt)
    if sure and (reader := reader_for(finder.body, len(before), len(after))) is not None:
        k, v = reader.moved(k, v, sure)
    owner = torch.tensor(part)
    zeros, is_said = torch.zeros(len(tokens)), owner >= 0
    more = min(LATE, max(0.0, math.log(SHORT / max(int(is_said.sum()), 1))))
    weight = (more * _late(k.shape[0]) * is_said).expand(*k.shape[:3]).contiguous()
    nowhere = torch.zeros(len(tokens), dtype=torch.int32)
    return Imprints(k, v, torch.tensor(tokens, dtype=torch.int32), nowhere, zeros, nowhere, weight, zeros), owner


def _late(depth: int) -> Tensor:
    """From the first layer to the last, (L, 1, 1)."""
    return torch.linspace(0, 1, depth)[:, None, None]


def read_alone(finder: Finder, tokens: Sequence[int]) -> Pair:
    """Keys and values of an episode as it is read when it alone comes to mind, (n, L, G, D): what an episode keeps."""
    head, frame = finder.usual_head, finder.frame
    before = frame.around(head)[0]
    k, v = _made(finder.body, [*head, *before], tokens)
    return _token_first(k), _token_first(v)


def _put_together(body: Body, finder: Finder, kept: Sequence[Pair], head: Sequence[int], prompt: Sequence[int]) -> Pair:
    around = finder.frame.around(prompt)
    sizes = [len(words) for words in around]
    words = _held(body, (), head, [t for some in around for t in some])
    out: list[Packed] = []
    for side, x in enumerate(words):
        before, between, after = (Packed(*pair) for pair in zip(x.codes.split(sizes, 2), x.scale.split(sizes, 2), strict=True))
        joined = before
        for n, pair in enumerate(kept):
            said = Packed(pair[side].codes.permute(1, 2, 0, 3), pair[side].scale.permute(1, 2, 0, 3))
            joined = (joined.joined(between, 2) if n else joined).joined(said, 2)
        out.append(joined.joined(after, 2))
    return out[0], out[1]


def _held(body: Body, names: tuple[str, ...], head: Sequence[int], tokens: Sequence[int]) -> Pair:
    """Made once and held for the next time."""
    held: OrderedDict[tuple[tuple[str, ...], tuple[int, ...]], Pair] = body.made.setdefault("remade", OrderedDict())
    name = names, tuple(head)
    if name in held:
        held.move_to_end(name)
    else:
        held[name] = _made(body, head, tokens)
        while len(held) > REMADE:
            held.popitem(last=False)
    return held[name]


def _made(body: Body, head: Sequence[int], tokens: Sequence[int]) -> Pair:
    with torch.no_grad(), body.read([None] * body.base.depth):
        heads = body.heads(torch.tensor([*head, *tokens], device=body.device))
    k, v = (Packed.of(torch.stack([getattr(h, n)[:, len(head) :].float() for h in heads])) for n in "kv")
    return k, v


def _token_first(x: Packed) -> Packed:
    return Packed(x.codes.permute(2, 0, 1, 3).contiguous(), x.scale.permute(2, 0, 1, 3).contiguous())


def _within(owner: Tensor) -> Tensor:
    """The how-manieth of its part each token is."""
    at = torch.arange(len(owner))
    first = torch.where(F.pad(owner[1:] != owner[:-1], (1, 0), value=True), at, 0).cummax(0).values
    return (at - first).to(torch.int32)


__all__ = ["read_alone", "slots_of"]
