"""Episodes: a life of any length, turn by turn. What was said is kept as its tokens, and with what it takes to find it again.

    identity.episodes[-1].tokens          what was said
    identity.episodes[-1].keys            one vector a token: the model's own keys of a few layers, centred, of length 1, as bytes
    identity.episodes[-1].meaning         one vector for all of it, for each sentence and clause, where a sentence encoder was at hand

An episode is not read. A prompt brings one to mind (`read.recall`), and only then its keys and values are made again, by reading it.
So a token costs the same whatever the length of the life, and a token of the life about 1.2 KB. By choice (`Rule(episodes="kept")`) its keys
and values of all layers are kept beside it, some 12 KB a token more, and nothing is read again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import CheckpointError, StateError
from .packed import Packed

Role = Literal["user", "assistant"]
ROLES: tuple[Role, ...] = ("user", "assistant")
MOST_EPISODES = 1 << 20
MOST_MEANINGS = 16
PACKED = ("keys", "meaning", "k", "v")
TENSORS: tuple[str, ...] = ("tokens", *(f"{name}.{part}" for name in PACKED for part in ("codes", "scale")), "usual")


@dataclass(frozen=True, eq=False)
class Episode:
    """Something that somebody said, whole."""

    tokens: Int[Tensor, " n"]
    """Of what was said, without the markup of a chat."""
    keys: Packed
    """(n, W): what each token is found by."""
    role: Role
    source: str
    """Who or what wrote it: it is forgotten by this name."""
    position: int
    """How many tokens the identity had met before it."""
    usual: Float[Tensor, " 4"]
    """How near plain questions, which have nothing to do with anybody, come to it: mean and spread by keys, then by meaning."""
    meaning: Packed | None = None
    """(s, E): of all of it, then of its sentences and clauses where there are several; older ones have the first alone."""
    encoder: str = ""
    """What made `meaning`: vectors of two encoders are not compared."""
    asks: bool = False
    """Whether it ends as a question does: then what is said next may be its answer."""
    k: Packed | None = None
    """(n, L, G, D): keys and"""
    v: Packed | None = None
    """values of every layer, as it is read when it comes to mind alone; None where they are made again then."""

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def nbytes(self) -> int:
        return 4 * (len(self) + 4) + sum(x.nbytes for x in self._packed().values())

    def facts(self) -> dict[str, Any]:
        """All that is no tensor, as JSON."""
        facts = {
            "count": len(self),
            "role": self.role,
            "source": self.source,
            "position": self.position,
            "encoder": self.encoder,
            "asks": self.asks,
        }
        # One meaning is not counted: episodes from before sentences had any keep their names by content.
        meanings = 0 if self.meaning is None else len(self.meaning.codes)
        return facts | ({"meanings": meanings} if meanings > 1 else {}) | ({"kept": True} if self.k is not None else {})

    def tensors(self) -> dict[str, Tensor]:
        parts = {f"{name}.{part}": getattr(x, part) for name, x in self._packed().items() for part in ("codes", "scale")}
        return {"tokens": self.tokens, "usual": self.usual, **parts}

    def _packed(self) -> dict[str, Packed]:
        return {name: x for name in PACKED if (x := getattr(self, name)) is not None}

    @cached_property
    def digest(self) -> str:
        """A name by content."""
        h = hashlib.sha256(json.dumps(self.facts(), sort_keys=True).encode())
        for name, t in sorted(self.tensors().items()):
            h.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
            h.update(t.contiguous().numpy().tobytes())
        return h.hexdigest()

    @classmethod
    def build(cls, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Episode:
        """From what `facts` and `tensors` gave; whatever does not fit is refused before it is used."""
        given, t = dict(facts), dict(tensors)
        try:
            count, meanings, kept = given.pop("count"), given.pop("meanings", 1), given.pop("kept", False)
            packed = {n: Packed(t.pop(f"{n}.codes"), t.pop(f"{n}.scale")) for n in PACKED if f"{n}.codes" in t}
            episode = cls(t.pop("tokens"), usual=t.pop("usual"), **packed, **given)
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"this is no whole episode: {type(error).__name__} {error}") from error
        check_episode(episode)
        if t or type(count) is not int or count != len(episode):
            raise CheckpointError(
                f"an episode of {count!r:.40} tokens holds {len(episode)}, and {', '.join(t) or 'nothing'} more"
            )
        if type(meanings) is not int or meanings != episode.facts().get("meanings", 1):
            raise CheckpointError(f"an episode of {meanings!r:.40} meanings has others")
        if kept is not (episode.k is not None):
            raise CheckpointError(
                f"an episode says kept={kept!r:.40} of its keys and values, and has {'them' if episode.k else 'none'}"
            )
        return episode


def check_episode(e: Episode) -> None:
    """Shapes, types and finiteness; what is wrong is refused where it enters.

    Once for each: a life has thousands, and every write makes a new identity of them.
    """
    if "sound" in vars(e):
        return
    n = e.tokens.shape[0] if e.tokens.ndim == 1 else -1
    if e.tokens.dtype != torch.int32 or n < 1 or bool((e.tokens < 0).any()):
        raise StateError(f"the tokens of an episode are int32 (n), at least one, not {tuple(e.tokens.shape)} {e.tokens.dtype}")
    for name, packed in (("keys", e.keys), ("meaning", e.meaning)):
        if packed is None:
            continue
        shape = tuple(packed.codes.shape)
        rows = n if name == "keys" else min(max(shape[:1], default=0), MOST_MEANINGS)
        fits = len(shape) == 2 and shape[0] == rows > 0 and shape[1] > 0 and tuple(packed.scale.shape) == (rows, 1)
        if not fits or packed.codes.dtype != torch.int8 or packed.scale.dtype != torch.float16:
            raise StateError(f"the {name} of an episode of {n} tokens are {shape} {packed.codes.dtype}")
        if not bool(torch.isfinite(packed.scale).all()) or bool((packed.codes == -128).any()):
            raise StateError(f"the {name} of an episode are not finite")
    _check_kept(e, n)
    if e.usual.dtype != torch.float32 or tuple(e.usual.shape) != (4,) or not bool(torch.isfinite(e.usual).all()):
        raise StateError(f"usual of an episode is 4 finite numbers in float32, not {tuple(e.usual.shape)} {e.usual.dtype}")
    named = isinstance(e.source, str) and e.source and isinstance(e.encoder, str) and e.encoder.isprintable()
    if e.role not in ROLES or not named:
        raise StateError(
            f"an episode has a role of {', '.join(ROLES)}, a source and an encoder, not {e.role!r:.40}, {e.source!r:.40}"
        )
    if not isinstance(e.asks, bool):
        raise StateError(f"an episode asks or does not, and asks={e.asks!r:.40}")
    if type(e.position) is not int or not 0 <= e.position < 1 << 31:
        raise StateError(f"an episode's position counts tokens from 0, and is {e.position!r:.40}")
    vars(e)["sound"] = True


def _check_kept(e: Episode, n: int) -> None:
    if (e.k is None) is not (e.v is None):
        raise StateError("an episode keeps keys and values, or neither")
    for name, packed in (("k", e.k), ("v", e.v)):
        if packed is None or e.k is None:
            continue
        shape = tuple(packed.codes.shape)
        fits = len(shape) == 4 and shape[0] == n and min(shape) > 0 and tuple(packed.scale.shape) == (*shape[:3], 1)
        if not fits or shape[:3] != tuple(e.k.codes.shape[:3]):
            raise StateError(f"{name} of an episode of {n} tokens is (n, L, G, D), and this is {shape}")
        if packed.codes.dtype != torch.int8 or packed.scale.dtype != torch.float16:
            raise StateError(f"{name} of an episode is int8 with scales in float16, not {packed.codes.dtype}")
        if not bool(torch.isfinite(packed.scale).all()) or bool((packed.codes == -128).any()):
            raise StateError(f"{name} of an episode is not finite")


def packed_together(episodes: Sequence[Episode]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Facts and tensors of many episodes as one file holds them, row after row."""
    each = [e.tensors() for e in episodes]
    names = [n for n in TENSORS if any(n in x for x in each)]
    return [e.facts() for e in episodes], {n: torch.cat([_rows(n, x[n]) for x in each if n in x]).contiguous() for n in names}


def taken_apart(facts: object, tensors: Mapping[str, Tensor]) -> tuple[Episode, ...]:
    """The way back from `packed_together`."""
    if not isinstance(facts, list) or len(cast(list[Any], facts)) > MOST_EPISODES:
        raise CheckpointError(f"the episodes of an identity are a list of at most {MOST_EPISODES:,}, not {facts!r:.60}")
    if set(tensors) - set(TENSORS):
        raise CheckpointError(f"an episode has no tensor {min(set(tensors) - set(TENSORS))!r:.60}")
    at = dict.fromkeys(TENSORS, 0)
    episodes: list[Episode] = []
    for fact in cast(list[Any], facts):
        if not isinstance(fact, dict) or type(fact.get("count")) is not int or fact["count"] < 1:
            raise CheckpointError(f"{fact!r:.80} describes no episode")
        mine: dict[str, Tensor] = {}
        for name in TENSORS:
            part = name.partition(".")[0]
            if (part == "meaning" and not fact.get("encoder")) or (part in ("k", "v") and not fact.get("kept")):
                continue
            rows = _meanings(fact) if part == "meaning" else 1 if part == "usual" else fact["count"]
            if name not in tensors or at[name] + rows > (tensors[name].shape or (0,))[0]:
                raise CheckpointError(f"{name} of the episodes ends before {fact!r:.80} does")
            taken = tensors[name][at[name] : at[name] + rows]
            mine[name] = taken[0] if name == "usual" else taken
            at[name] += rows
        episodes.append(Episode.build(cast(dict[str, Any], fact), mine))
    left = [n for n in tensors if at[n] != (tensors[n].shape or (-1,))[0]]
    if left:
        raise CheckpointError(f"{left[0]} of the episodes goes on after the last of them")
    return tuple(episodes)


def _meanings(fact: Mapping[str, Any]) -> int:
    count = fact.get("meanings", 1)
    if type(count) is not int or not 1 <= count <= MOST_MEANINGS:
        raise CheckpointError(f"an episode has 1 to {MOST_MEANINGS} meanings, and {count!r:.40} are named")
    return count


def _rows(name: str, x: Tensor) -> Tensor:
    return x[None] if name == "usual" else x


__all__ = ["PACKED", "ROLES", "Episode", "Role", "check_episode", "packed_together", "taken_apart"]
