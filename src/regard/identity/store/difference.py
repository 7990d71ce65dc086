"""How two identities differ: part by part, in numbers that can be read at a glance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ...errors import StateError
from ..episodes import Episode
from ..state import Identity, Imprints, TraceState


@dataclass(frozen=True)
class Change:
    """Of one part: the cosine between before and after (mean and least over layers), and its size before and after."""

    cosine: float | None
    """None where one of the two is zero or absent."""
    least: float | None
    before: float
    after: float

    def __str__(self) -> str:
        turned = "" if self.cosine is None else f", cosine {self.cosine:.3f} (least of a layer {self.least:.3f})"
        return f"{self.before:.4g} → {self.after:.4g}{turned}"


@dataclass(frozen=True)
class EpisodeSummary:
    """Which episode it is, without what was said."""

    digest: str
    role: str
    source: str
    position: int
    tokens: int


@dataclass(frozen=True)
class Diff:
    a: str
    b: str
    self: Change
    """Sizes are the norm of s over all layers."""
    trace: Change
    """Sizes are the largest spectral norm of a layer's T."""
    added: int
    removed: int
    kept: int
    """Imprints of the same moment in both."""
    rewritten: int
    """Kept ones whose numbers changed, as sleep does."""
    episodes_added: tuple[EpisodeSummary, ...]
    episodes_removed: tuple[EpisodeSummary, ...]
    episodes_kept: int
    sources_added: tuple[str, ...]
    sources_removed: tuple[str, ...]
    experiences: int
    tokens: int
    sleeps: int
    bytes: int

    @property
    def same(self) -> bool:
        """True when nothing at all differs."""
        still = all(c.before == c.after and c.least in (None, 1.0) for c in (self.self, self.trace))
        counts = (self.added, self.removed, self.rewritten, self.experiences, self.tokens, self.sleeps, self.bytes)
        moved = (self.sources_added, self.sources_removed, self.episodes_added, self.episodes_removed)
        return still and not any(counts) and not any(moved)

    def __str__(self) -> str:
        lines = [
            f"{self.a} → {self.b}",
            f"  self      norm {self.self}",
            f"  trace     spectral norm {self.trace}",
            f"  imprints  +{self.added} −{self.removed}, {self.kept} kept, {self.rewritten} of them rewritten",
            f"  episodes  +{len(self.episodes_added)} −{len(self.episodes_removed)}, {self.episodes_kept} kept{self._whose()}",
            f"  life      {self.experiences:+d} experiences, {self.tokens:+d} tokens, {self.sleeps:+d} sleeps",
            f"  bytes     {self.bytes:+,d}",
        ]
        if self.sources_added or self.sources_removed:
            moved = [f"+{s}" for s in self.sources_added] + [f"−{s}" for s in self.sources_removed]
            lines.insert(-1, f"  sources   {', '.join(moved)}")
        return "\n".join(lines)

    def _whose(self) -> str:
        """Who said what came and what went."""
        signed = (("+", self.episodes_added), ("−", self.episodes_removed))
        counts = [f"{sign}{n} by {who}" for sign, some in signed for who, n in Counter(e.source for e in some).items()]
        return f": {', '.join(counts)}" if counts else ""


def compare(a: Identity, b: Identity, names: tuple[str, str] = ("a", "b")) -> Diff:
    if a.base.fingerprint != b.base.fingerprint:
        raise StateError(
            f"{names[0]} belongs to {a.base.name or a.base.family} ({a.base.fingerprint[:12]}) and {names[1]} to "
            f"{b.base.name or b.base.family} ({b.base.fingerprint[:12]}): identities of two models have no difference"
        )
    before, after = _moments(a), _moments(b)
    in_both = (before[0] & after[0]).total()
    lived = Counter(e.digest for e in a.episodes) & Counter(e.digest for e in b.episodes)
    depth = a.base.depth
    Ta, Tb = _dense(a.trace, a), _dense(b.trace, b)
    return Diff(
        *names,
        self=_change(_self(a).reshape(depth, -1), _self(b).reshape(depth, -1), _norm(_self(a)), _norm(_self(b))),
        trace=_change(Ta.reshape(depth, -1), Tb.reshape(depth, -1), _spectral(Ta), _spectral(Tb)),
        added=after[0].total() - in_both,
        removed=before[0].total() - in_both,
        kept=in_both,
        rewritten=in_both - (before[1] & after[1]).total(),
        episodes_added=_without(b.episodes, lived),
        episodes_removed=_without(a.episodes, lived),
        episodes_kept=lived.total(),
        sources_added=tuple(s for s in b.sources if s not in a.sources),
        sources_removed=tuple(s for s in a.sources if s not in b.sources),
        experiences=b.life.experiences - a.life.experiences,
        tokens=b.life.tokens - a.life.tokens,
        sleeps=b.life.sleeps - a.life.sleeps,
        bytes=_nbytes(b) - _nbytes(a),
    )


def _change(x_LN: Tensor, y_LN: Tensor, before: float, after: float) -> Change:
    if x_LN.shape != y_LN.shape:
        return Change(None, None, before, after)
    live = (x_LN.norm(dim=1) > 0) & (y_LN.norm(dim=1) > 0)
    if not bool(live.any()):
        return Change(None, None, before, after)
    x, y = x_LN[live].double(), y_LN[live].double()
    cosine = torch.where((x == y).all(1), 1.0, torch.cosine_similarity(x, y, dim=1))
    return Change(float(cosine.mean()), float(cosine.min()), before, after)


def _without(episodes: Sequence[Episode], others: Counter[str]) -> tuple[EpisodeSummary, ...]:
    left, rest = others.copy(), list[EpisodeSummary]()
    for e in episodes:
        if left[e.digest]:
            left[e.digest] -= 1
        else:
            rest.append(EpisodeSummary(e.digest, e.role, e.source, e.position, len(e)))
    return tuple(rest)


def _nbytes(identity: Identity) -> int:
    return identity.nbytes + sum(e.nbytes for e in identity.episodes)


def _self(identity: Identity) -> Tensor:
    return torch.zeros(identity.base.depth, 1) if identity.self is None else identity.self.s


def _dense(trace: TraceState | None, identity: Identity) -> Tensor:
    b = identity.base
    if trace is None:
        return torch.zeros(b.depth, b.key_heads, b.head_width, b.head_width)
    left = trace.left.dense()
    return torch.einsum("lgrd,r,lgre->lgde", left, trace.signs.float(), left)


def _norm(x: Tensor) -> float:
    return float(x.norm())


def _spectral(T: Tensor) -> float:
    return float(torch.linalg.eigvalsh(T).abs().max())


def _moments(identity: Identity) -> tuple[Counter[object], Counter[object]]:
    """Imprints by when and by whom, and by all their numbers too."""
    imprints: Imprints = identity.imprints
    when, whole = Counter[object](), Counter[object]()
    columns = [x.tolist() for x in (imprints.source, imprints.token, imprints.position)]
    for i, (source, token, position) in enumerate(zip(*columns, strict=True)):
        key = (identity.sources[source], token, position)
        numbers = [p.codes[:, :, i].numpy().tobytes() + p.scale[:, :, i].numpy().tobytes() for p in (imprints.k, imprints.v)]
        when[key] += 1
        whole[
            (
                *key,
                *numbers,
                *(getattr(imprints, f.name)[..., i].numpy().tobytes() for f in fields(imprints)[2:] if f.name != "source"),
            )
        ] += 1
    return when, whole


__all__ = ["Change", "Diff", "EpisodeSummary", "compare"]
