"""An index of a life: all that is the same whatever is asked, so that a question to a long life costs few products and no walk over it.

    index = index_of(finder, identity.episodes, meanings=True)        made once for these episodes, and held while they are asked
    index.units                                                       an episode, or a listener's short question with the answer to it

The rows of all meanings and the mean key of every episode stand in one matrix each; keys of single tokens stay where they are, as only
those of the fittest few are compared. A life that goes on has a new index, which costs about as much as one question did without it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..episodes import Episode

QUESTION = 24
"""Tokens of a listener's question that comes to mind with the answer to it, at most."""
SHORT = 16
"""Tokens of a unit below which it has hardly room to tell anything."""
HELD, TOKENS = 4, 1 << 18
"""Lives whose index is held at most, and tokens of all of them; the last one is held whatever its length."""


@dataclass(frozen=True, eq=False)
class Index:
    episodes: Sequence[Episode]

    @cached_property
    def units(self) -> list[tuple[int, ...]]:
        units: list[tuple[int, ...]] = []
        for i, e in enumerate(self.episodes):
            before = self.episodes[i - 1] if i else None
            answers = before is not None and before.asks and before.role == "assistant" and before.source == e.source
            if answers and before is not None and e.role == "user" and len(before) <= QUESTION:
                units[-1] = (i - 1, i)
            else:
                units.append((i,))
        return units

    @cached_property
    def first(self) -> Int[Tensor, " U"]:
        return torch.tensor([u[0] for u in self.units])

    @cached_property
    def last(self) -> Int[Tensor, " U"]:
        return torch.tensor([u[-1] for u in self.units])

    @cached_property
    def lengths(self) -> Int[Tensor, " E"]:
        return torch.tensor([len(e) for e in self.episodes])

    @cached_property
    def tokens(self) -> Int[Tensor, " n"]:
        return torch.cat([e.tokens for e in self.episodes])

    @cached_property
    def owner(self) -> Int[Tensor, " n"]:
        """Which episode each token is of."""
        return torch.arange(len(self.episodes)).repeat_interleave(self.lengths)

    @cached_property
    def spread(self) -> Int[Tensor, " V"]:
        """How many episodes hold each token, by its id."""
        size = int(self.tokens.max()) + 1
        held = (self.owner * size + self.tokens.long()).unique() % size
        return held.bincount(minlength=size)

    @cached_property
    def usual(self) -> Float[Tensor, "E 4"]:
        return torch.stack([e.usual for e in self.episodes])

    @cached_property
    def others(self) -> Float[Tensor, " U"]:
        """1 where somebody else than the user said it."""
        return torch.tensor([float(self.episodes[u[-1]].role != "user") for u in self.units])

    @cached_property
    def asks(self) -> Float[Tensor, " U"]:
        """1 where the user only asked, perhaps."""
        last = [self.episodes[u[-1]] for u in self.units]
        return torch.tensor([float(e.role == "user" and e.asks) for e in last])

    @cached_property
    def room(self) -> Float[Tensor, " U"]:
        """log of the length against `SHORT`, 0 for all that is longer."""
        sizes = torch.tensor([float(sum(len(self.episodes[i]) for i in u)) for u in self.units])
        return (sizes / SHORT).clamp_max(1).log()

    @cached_property
    def goes_on(self) -> Bool[Tensor, " U"]:
        """Whether what follows a unit is of the same source; the last is followed by nothing."""
        sources = [self.episodes[u[-1]].source for u in self.units]
        return torch.tensor([a == b for a, b in zip(sources, [*sources[1:], None], strict=True)])

    @cached_property
    def meaning_counts(self) -> Int[Tensor, " E"]:
        return torch.tensor([0 if e.meaning is None else len(e.meaning.codes) for e in self.episodes])

    @cached_property
    def meanings(self) -> Float[Tensor, "R W"]:
        """Of every episode the whole, then its parts; episodes one after the other."""
        packed = [e.meaning for e in self.episodes if e.meaning is not None]
        return torch.cat([p.codes for p in packed]).float() * torch.cat([p.scale for p in packed]).float()

    @cached_property
    def together(self) -> Float[Tensor, "U W"]:
        """The meaning of a question with its answer, or of an episode alone."""
        whole = self.meanings[self.meaning_counts.cumsum(0) - self.meaning_counts]
        return F.normalize(whole[self.first] + whole[self.last], dim=-1)

    @cached_property
    def pooled(self) -> Float[Tensor, "E W"]:
        """The mean key of every episode."""
        return torch.stack([e.keys.dense().mean(0) for e in self.episodes])

    def encoders(self) -> set[str]:
        """What made the meanings; an episode without one counts as made by nothing."""
        return self._encoders

    @cached_property
    def _encoders(self) -> set[str]:
        return {"" if e.meaning is None else e.encoder for e in self.episodes}


_LOCK = threading.Lock()


def index_of(held: OrderedDict[int, Index], episodes: Sequence[Episode]) -> Index:
    """The index of these very episodes, from those that are held or made now."""
    with _LOCK:
        known = held.get(id(episodes))
        # The index holds its episodes, so no other sequence can have come to stand where they do.
        if known is None or known.episodes is not episodes:
            known = held[id(episodes)] = Index(episodes)
        held.move_to_end(id(episodes))
        while len(held) > 1 and (len(held) > HELD or sum(len(x.tokens) for x in held.values()) > TOKENS):
            held.popitem(last=False)
        return known


__all__ = ["Index", "index_of"]
