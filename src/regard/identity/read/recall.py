"""recall: what comes to mind at a prompt. An episode is chosen by coherence or refused, read once more, and stands among the slots.

    mind = recall(model, mara, tokenizer.encode(tokenizer.chat(messages)), tokenizer)
    mind.chosen, mind.coherence                     which episodes, and how well they fit
    generate(model, prompt, identity=mind)          `generate(…, identity=mara)` does all of this by itself

    rank       = z(nearness by keys) + 2 z(likeness of meaning) + ½ z(words in common)    each over the episodes of the life
    coherence  = Σ (nearness − usual) / spread, by keys and by meaning                    against plain questions
    refused    below `THRESHOLD`: nothing comes to mind, and the answer is nobody's

Of two that fit alike, the younger comes: it may correct the older. What comes to mind stands where it would stand in the text, right
behind the prompt's head (`layer.py`): a token costs the same whatever the length of the life.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ...errors import StateError
from ...models.tokenizer import Tokenizer
from ..body import body_of
from ..episodes import Episode
from ..packed import Packed
from ..state import Identity, Imprints, Recollection
from .body import Body
from .finding import Finder, encoder_name, finder_of, meanings

SLOTS = 128
"""Slots that are read at most while something comes to mind."""
MOST = 2
"""Episodes that come to mind at once at most."""
THRESHOLD = {True: 5.0, False: 3.0}
"""Coherence below which nothing comes to mind, with an encoder of meanings and without. At 5, of six people of the pools "train" and
"choose" each: 75 and 79% of the right episodes come, 13% of what has no answer, 14 and 6% of everyday questions bring something."""
COMMON, MEANING = 0.5, 2.0
"""What tokens in common and likeness of meaning count in rank beside nearness by keys."""
YOUNGER = 0.5
"""What it is worth in rank to be the youngest of a life rather than the oldest."""
OTHERS = -1.4
"""What it costs in rank that somebody else said it."""
STRANGER = 3.0
"""What it costs in coherence."""
QUESTION = 24
"""Tokens of a listener's question that comes to mind with the answer to it, at most."""
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
    scores = scored(finder, identity.episodes, asked, about or tokenizer.decode(asked))
    chosen = scores.chosen(most)
    if not chosen:
        # Nobody asked: imprints stay silent, and the answer is what it would be without them.
        return _recollection(identity, Imprints.none(identity.base), (), (float(scores.coherence.max()),))
    turns = [i for unit in chosen for i in scores.units[unit]]
    slots = _remade(body, finder, identity, [identity.episodes[i] for i in turns], prompt)
    if identity.life.sleeps:
        # What a night has distilled speaks beside it, the worthiest where there is little room; before that, imprints only disturb: of 21
        # natural questions (pool "choose") 7 were answered without them, 4 with them.
        worth = identity.imprints.worth
        room = max(0, min(len(worth), SLOTS - len(slots)))
        slots = identity.imprints.pick(worth.topk(room).indices.sort().values).joined(slots)
    mind = _recollection(identity, slots, tuple(turns), tuple(float(scores.coherence[u]) for u in chosen))
    return replace(mind, head=finder.frame.head_of(prompt)) if body.has_heads else mind


def _recollection(
    identity: Identity, imprints: Imprints, chosen: tuple[int, ...], coherence: tuple[float, ...]
) -> Recollection:
    others = (f.name for f in fields(Identity) if f.name not in ("imprints", "episodes"))
    parts: dict[str, Any] = {name: getattr(identity, name) for name in others}
    return Recollection(**parts, imprints=imprints, chosen=chosen, coherence=coherence)


@dataclass(frozen=True, eq=False)
class Scores:
    """How the episodes of a life fit a question. A short question of the listener's and the answer to it are one."""

    episodes: Sequence[Episode]
    units: list[tuple[int, ...]]
    rank: Float[Tensor, " U"]
    coherence: Float[Tensor, " U"]
    threshold: float
    room: int
    """Slots for what was said; the words around it have theirs."""

    def chosen(self, most: int) -> list[int]:
        """Units that come to mind, oldest first, so that what is youngest stands nearest to the prompt."""
        rank = self.rank.masked_fill(self.coherence < self.threshold, -math.inf)
        chosen: list[int] = []
        room = self.room
        for u in rank.argsort(descending=True)[: 2 * most].tolist():
            if len(chosen) == most or rank[u] == -math.inf:
                break
            size = sum(len(self.episodes[i]) + 1 for i in self.units[u])
            if size <= room or not chosen:
                chosen.append(u)
                room -= size
        return sorted(chosen)


def scored(finder: Finder, episodes: Sequence[Episode], asked: Sequence[int], text: str) -> Scores:
    """Rank and coherence of every episode, with what belongs to it."""
    units = _units(episodes)
    near, common = _nearness(finder.asked(asked), episodes), _common([t for t in asked if t not in finder.words], episodes)
    usual = torch.stack([e.usual for e in episodes])
    coherence = (near - usual[:, 0]) / usual[:, 1]
    alike = _likeness(text, episodes)
    signals = [(1.0, near), (COMMON, common)] + ([] if alike is None else [(MEANING, alike)])
    if alike is not None:
        coherence = coherence + (alike - usual[:, 2]) / usual[:, 3]
    rank = torch.stack([weight * _z(_best(x, units)) for weight, x in signals]).sum(0)
    last = [episodes[u[-1]] for u in units]
    others = torch.tensor([float(e.role != "user") for e in last])
    rank = rank + YOUNGER * torch.linspace(0, 1, len(units)) + OTHERS * others
    # What only asks tells nothing, and a listener has to fit better than the person whose life it is.
    coherence = _best(coherence, units) - STRANGER * others
    coherence = coherence.masked_fill(torch.tensor([e.asks and e.role == "user" for e in last]), -math.inf)
    room = SLOTS - len(finder.frame.before) - len(finder.frame.after)
    return Scores(episodes, units, rank, coherence, THRESHOLD[alike is not None], room)


def _units(episodes: Sequence[Episode]) -> list[tuple[int, ...]]:
    units: list[tuple[int, ...]] = []
    for i, e in enumerate(episodes):
        before = episodes[i - 1] if i else None
        answers = before is not None and before.asks and before.role == "assistant" and before.source == e.source
        if answers and before is not None and e.role == "user" and len(before) <= QUESTION:
            units[-1] = (i - 1, i)
        else:
            units.append((i,))
    return units


def _best(x: Float[Tensor, " E"], units: Sequence[tuple[int, ...]]) -> Float[Tensor, " U"]:
    return torch.maximum(x[[u[0] for u in units]], x[[u[-1] for u in units]])


def _likeness(text: str, episodes: Sequence[Episode]) -> Float[Tensor, " E"] | None:
    """Cosines of meanings; None where not all episodes have one by the encoder that is at hand."""
    name = encoder_name()
    if not name or any(e.meaning is None or e.encoder != name for e in episodes):
        return None
    meaning = meanings([text])
    assert meaning is not None
    return torch.cat([e.meaning.dense() for e in episodes if e.meaning is not None]) @ meaning[0]


def _nearness(asked: Float[Tensor, "n W"], episodes: Sequence[Episode]) -> Float[Tensor, " E"]:
    """Each token of the question takes its nearest in an episode: the mean of these cosines."""
    out: list[Tensor] = []
    # A few thousand tokens at a time: a long life as floats would be as large as the model.
    for part in _batches(episodes):
        codes, scale = torch.cat([e.keys.codes for e in part]), torch.cat([e.keys.scale for e in part])
        cosines = (asked @ codes.float().mT) * scale.float().mT
        nearest = cosines.new_full((len(asked), len(part)), -1.0)
        owner = _owners(part).expand(len(asked), -1)
        out.append(nearest.scatter_reduce(1, owner, cosines, "amax").mean(0))
    return torch.cat(out)


def _batches(episodes: Sequence[Episode], tokens: int = 4096) -> list[list[Episode]]:
    batches: list[list[Episode]] = []
    room = 0
    for e in episodes:
        if not batches or room < len(e):
            batches.append([])
            room = tokens
        batches[-1].append(e)
        room -= len(e)
    return batches


def _owners(episodes: Sequence[Episode]) -> Tensor:
    """Which episode each token of all of them is of."""
    return torch.arange(len(episodes)).repeat_interleave(torch.tensor([len(e) for e in episodes]))


def _common(asked: Sequence[int], episodes: Sequence[Episode]) -> Float[Tensor, " E"]:
    """Okapi's BM25 over tokens: what few episodes hold says most."""
    if not asked:
        return torch.zeros(len(episodes))
    words = torch.tensor(sorted(set(asked)), dtype=torch.int32)
    same = (torch.cat([e.tokens for e in episodes])[:, None] == words).float()
    counts = torch.zeros(len(episodes), len(words)).index_add(0, _owners(episodes), same)
    lengths = torch.tensor([float(len(e)) for e in episodes])
    held = (counts > 0).sum(0)
    rarity = ((len(episodes) - held + 0.5) / (held + 0.5) + 1).log()
    return (rarity * counts * 2.2 / (counts + 1.2 * (0.25 + 0.75 * (lengths / lengths.mean())[:, None]))).sum(-1)


def _z(x: Tensor) -> Tensor:
    return (x - x.mean()) / x.std(correction=0).clamp_min(1e-6)


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
    zeros = torch.zeros(len(tokens))
    imprints = Imprints(
        k, v, torch.tensor(tokens, dtype=torch.int32), position[owner] + _within(owner), zeros, sources[owner],
        torch.zeros(*k.shape[:3]), zeros,
    )  # fmt: skip
    # In front of the text the words around would stand where nothing is asked: only what was said goes there.
    return imprints if body.has_heads else imprints.pick((owner >= 0).nonzero().flatten())


def _within(owner: Tensor) -> Tensor:
    """The how-manieth of its part each token is."""
    at = torch.arange(len(owner))
    first = torch.where(F.pad(owner[1:] != owner[:-1], (1, 0), value=True), at, 0).cummax(0).values
    return (at - first).to(torch.int32)


__all__ = ["Scores", "recall", "scored"]
