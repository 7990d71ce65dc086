"""Tiny identities, and writes that stand in for a model's: two layers, one key head, four numbers to a head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from hypothesis import strategies as st
from lives import episode

from regard.identity.episodes import Episode
from regard.identity.packed import Packed
from regard.identity.state import Base, Identity, Imprints, Life, SelfState, TraceState
from regard.identity.store import Event

L, G, D = 2, 1, 4
BASE = Base("ab" * 32, L, G, D, "llama", "tiny", "MIT")
OTHER = replace(BASE, fingerprint="cd" * 32, name="another")


def person(
    seed: int = 0,
    *,
    imprints: int = 3,
    rank: int = 2,
    sources: Sequence[str] = ("mara",),
    form: str | None = "key_bias",
    episodes: int = 2,
) -> Identity:
    g = torch.Generator().manual_seed(seed)
    width = G * D * (2 if form == "self_token" else 1)
    me = None if form is None else SelfState(torch.randn(L, width, generator=g), form)  # pyright: ignore
    trace = TraceState(Packed.of(torch.randn(L, G, rank, D, generator=g)), torch.ones(rank, dtype=torch.int8))
    ints = torch.arange(imprints, dtype=torch.int32)
    shape = (L, G, imprints, D)
    kept = replace(
        Imprints.none(BASE), k=Packed.of(torch.randn(shape, generator=g)), v=Packed.of(torch.randn(shape, generator=g)),
        token=ints + 7, position=ints + 100 * seed, source=ints % len(sources),
        weight=torch.rand(shape[:3], generator=g), **{name: torch.rand(imprints, generator=g) for name in ("shock", "worth")},
    )  # fmt: skip
    life = Life(seed + 1, 10 * seed, 0, 3.5, 1.25, (0.5, 0.75))
    lived = tuple(episode(100 * seed + i, source=sources[i % len(sources)]) for i in range(episodes))
    return Identity(BASE, me, trace, kept, tuple(sources), life, episodes=lived)


def imprint(identity: Identity, event: Event) -> Identity:
    """A write that mixes what it reads with all that was there, as real ones do."""
    sources = identity.sources if event.source in identity.sources else (*identity.sources, str(event.source))
    g = torch.Generator().manual_seed(sum(map(ord, event.text or "")) + (event.seed or 0))
    old = torch.zeros(L, G * D) if identity.self is None else identity.self.s
    one = torch.zeros(1, dtype=torch.int32)
    shape = (L, G, 1, D)
    moment = replace(
        Imprints.none(BASE), k=Packed.of(torch.randn(shape, generator=g)), v=Packed.of(torch.randn(shape, generator=g)),
        token=one + 5, position=one + identity.life.tokens, source=one + sources.index(str(event.source)),
        weight=torch.ones(shape[:3]), **{name: one.float() + 1.0 for name in ("shock", "worth")},
    )  # fmt: skip
    life = replace(identity.life, experiences=identity.life.experiences + 1, tokens=identity.life.tokens + 11)
    me = SelfState(torch.tanh(0.9 * old + 0.1 * torch.randn(L, G * D, generator=g)))
    lived = (*identity.episodes, said(event, identity.life.tokens))
    return replace(identity, self=me, imprints=identity.imprints.joined(moment), sources=sources, life=life, episodes=lived)


def said(event: Event, position: int) -> Episode:
    """What an event said, a token a letter."""
    letters = torch.tensor(list((event.text or "?").encode("utf-8", "surrogatepass")[:400]), dtype=torch.int32)
    keys = Packed.of(torch.cos(letters[:, None] * torch.arange(1.0, 1.0 + G * D)))
    return Episode(letters, keys, "user", str(event.source), position, torch.zeros(4))


def replay(identity: Identity, events: Sequence[Event]) -> Identity:
    for event in events:
        identity = imprint(identity, event)
    return identity


def heard(source: str, text: str, seed: int = 0) -> Event:
    return Event("imprint", source=source, text=text, rule={"rate": 0.1}, seed=seed)


def people() -> st.SearchStrategy[Identity]:
    names = st.lists(
        st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=20), min_size=1, max_size=4, unique=True
    )
    return st.builds(
        person,
        st.integers(0, 10**6),
        imprints=st.integers(0, 5),
        episodes=st.integers(0, 4),
        rank=st.integers(0, D),
        sources=names,
        form=st.sampled_from([None, "key_bias", "self_token"]),
    )
