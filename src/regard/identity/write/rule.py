"""imprint: the fast write. One experience into an identity, in one pass and without a gradient; the old one stays as it was.

    identity = imprint(identity, observe(model, chat, tokenizer, source="monday"), Rule())

The best tokens become imprints, the trace and the self are updated; affect scales all three. Gains per layer and head were learned
once on generated people (`regard.study.people.fast_write`) and come with the package.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from ...errors import SpecError, StateError
from ..experience import Experience
from ..shock import Norm, checked_affect
from ..state import Identity, Imprints, Life
from .episodes import episodes_of
from .fast_write import shipped_for
from .imprints import DEFAULT, KEEPERS, best_imprints, displaced, evict, present_in, worth_of
from .self_state import SelfRule, moved, pooled
from .trace import TraceRule, compressed, dense, written

RETIRED = ("learned",)
"""Keepers of earlier versions, which were the default of their time: their events happen again with the default of this one."""


@dataclass(frozen=True)
class Rule:
    """How an experience is written. None for a part leaves it as it is."""

    keep: str | None = DEFAULT
    """A keeper of imprints, by name."""
    budget: int = 64
    """Slots that an identity has at most."""
    share: float = 0.5
    """Slots for each token that it has met: a short life has few."""
    merge: bool = False
    episodes: bool | Literal["kept"] = True
    """Whether what was said is written whole as well, to come to mind when a prompt asks for it; "kept": with the keys and values that are read then,
    which otherwise are made again (docs/episodes.md says what either costs)."""
    trace: TraceRule | None = None
    self: SelfRule | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep not in KEEPERS:
            raise SpecError(f"keep={self.keep!r} is not one of {', '.join(KEEPERS)}, or None to keep nothing")
        if self.episodes not in (True, False, "kept"):
            raise SpecError(
                f'episodes={self.episodes!r:.40} is not True (made again when they come to mind), "kept", or False for none'
            )
        if self.budget < 0 or not 0 <= self.share <= 1:
            raise SpecError(f"{self}: budget is at least 0 and share lies in 0..1")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> Rule:
        # What was written before there were episodes is lived again without them.
        settings: dict[str, Any] = {"episodes": False, **given}
        if settings.get("keep") in RETIRED:
            settings["keep"] = DEFAULT
        for name, kind in (("trace", TraceRule), ("self", SelfRule)):
            if isinstance(settings.get(name), dict):
                settings[name] = kind(**settings[name])
        return cls(**settings)


def imprint(identity: Identity, experience: Experience, rule: Rule | None = None) -> Identity:
    """The identity after an experience."""
    rule, e = rule or Rule(), experience
    _expect(identity, Identity, "an identity comes first")
    _expect(e, Experience, "then what it went through, observe(model, text, tokenizer)")
    _expect(rule, Rule, "then how it is written, Rule(…), or nothing for the usual way")
    identity.base.refuse(e.base)
    checked_affect(e.affect)
    if not isinstance(e.source, str) or not e.source:
        raise StateError(f"source={e.source!r}: an experience has a name, so that it can be forgotten by it")
    life = identity.life
    said = e.shock[e.content].float().cpu()
    norm = Norm(life.shock_mean, life.shock_spread, life.tokens).after(said)
    new_identity = identity
    sources = identity.sources if e.source in identity.sources else (*identity.sources, e.source)
    if rule.keep is not None and e.affect != 0:
        room = min(rule.budget, round(rule.share * norm.count))
        imprints = _imprints(identity, e, rule, rule.keep, room, sources.index(e.source))
        new_identity = replace(new_identity, sources=sources, imprints=imprints)
    if rule.trace is not None:
        learned = shipped_for(e.base)
        size = (e.base.depth, e.base.key_heads, e.base.head_width, e.base.head_width)
        old = torch.zeros(size) if new_identity.trace is None else dense(new_identity.trace)
        T = written(old, e, rule.trace, learned.means if learned else None, learned.trace_gain if learned else None)
        new_identity = replace(new_identity, trace=compressed(T, rule.trace))
    if rule.self is not None:
        learned = shipped_for(e.base)
        z = pooled(e, rule.self.form, mean_k=learned.means[1] if learned else None)
        gain = learned.self_gain(rule.self.form) if learned else 1.0
        new_identity = replace(new_identity, self=moved(new_identity.self, gain * z, rule.self, affect=e.affect))
    if rule.episodes and e.affect != 0:
        told = episodes_of(e, life.tokens, kept=rule.episodes == "kept")
        new_identity = replace(new_identity, sources=sources, episodes=(*new_identity.episodes, *told))
    norm_s = 0.0 if new_identity.self is None else float(new_identity.self.s.norm())
    after = Life(life.experiences + 1, norm.count, life.sleeps, norm.mean, norm.spread, (*life.self_norms, norm_s))
    return replace(new_identity, sources=sources, life=after, parent=identity.parent)


def _imprints(identity: Identity, e: Experience, rule: Rule, keep: str, room: int, source: int) -> Imprints:
    """What is left of old and new imprints where there is room for so many."""
    learned = shipped_for(e.base)
    old = identity.imprints
    worth = worth_of(e, keep, rule.seed, present_in(old, learned))
    new = best_imprints(e, worth, room, born=identity.life.tokens, source=source, merge=rule.merge, learned=learned)
    if KEEPERS[keep].covers:
        old = displaced(old, new, learned)
    return evict(old.joined(new), room)


def _expect(given: object, kind: type, what: str) -> None:
    if not isinstance(given, kind):
        raise StateError(f"imprint(identity, experience, rule): {what}, and this is a {type(given).__name__}")


__all__ = ["Rule", "imprint"]
