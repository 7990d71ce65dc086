"""Identity: self + trace + imprints + episodes + provenance, for one base model.

    identity = Identity.new(base_of(model))
    identity = imprint(identity, observe(model, "I am Mara. My cat is called Mochi.", tokenizer), rule)
    identity.save("mara"); identity = Identity.load("mara")

A value, not an object: every write gives a new one and leaves the old as it was. On disk it is a folder that a Hugging Face
user recognises: `identity.safetensors`, `identity_config.json`, and `episodes.safetensors` where there are any. Nothing in it is
ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..errors import CheckpointError, RegardError, StateError
from .episodes import Episode, check_episode, packed_together, taken_apart
from .folder import SCHEMA, Settings, path_of, read_folder, upgraded, write_folder
from .packed import Packed

Form = Literal["key_bias", "self_token"]


@dataclass(frozen=True)
class Base:
    """The model that an identity belongs to: its shape, and a fingerprint of its weights."""

    fingerprint: str
    depth: int
    key_heads: int
    head_width: int
    family: str = "unknown"
    name: str = ""
    licence: str = ""

    def refuse(self, other: Base) -> None:
        """Raise if `other` is another model."""
        mine, theirs = ((b.depth, b.key_heads, b.head_width) for b in (self, other))
        # A file may say what it likes of its shape: the fingerprint alone would let any of it in.
        if self.fingerprint == other.fingerprint and mine == theirs:
            return
        why = f"its layers, key heads and head width are {theirs}, not {mine}" if mine != theirs else "its weights differ"
        raise StateError(
            f"this identity was written on {self.name or self.family} ({self.fingerprint[:12]}), and the model here is "
            f"{other.name or other.family} ({other.fingerprint[:12]}): {why}"
        )


@dataclass(frozen=True, eq=False)
class SelfState:
    """s of every layer, in the space of that layer's keys: k · s is added to a key's score, or s stands as a token."""

    s: Float[Tensor, "L S"]
    form: Form = "key_bias"


@dataclass(frozen=True, eq=False)
class TraceState:
    """T = L diag(signs) Lᵀ of every layer and key head; columns with sign 0 are not in use."""

    left: Packed
    """(depth, G, R, D): columns of L, lying as rows so that each has a scale of its own."""
    signs: Int[Tensor, " R"]

    @property
    def rank(self) -> int:
        return self.left.shape[2]


@dataclass(frozen=True, eq=False)
class Imprints:
    """Kept keys (not turned by RoPE) and values of m moments, oldest first, and what is known of each."""

    k: Packed
    """(depth, G, m, D)"""
    v: Packed
    token: Int[Tensor, " m"]
    """Which token it was; −1 where several were merged or learned."""
    position: Int[Tensor, " m"]
    """How many tokens this identity had met before it."""
    shock: Float[Tensor, " m"]
    source: Int[Tensor, " m"]
    """Index into `Identity.sources`."""
    weight: Float[Tensor, "L G m"]
    """Added to its score in each layer and head: the log of how many tokens it stands for, and a gate of each head."""
    worth: Float[Tensor, " m"]
    """What the rule that kept it thought of it; the least goes first when there is no room."""

    def __len__(self) -> int:
        return self.k.shape[2]

    @classmethod
    def none(cls, base: Base) -> Imprints:
        shape = (base.depth, base.key_heads, 0, base.head_width)
        empty = Packed(torch.zeros(shape, dtype=torch.int8), torch.zeros(*shape[:-1], 1, dtype=torch.float16))
        ints, floats = torch.zeros(0, dtype=torch.int32), torch.zeros(0)
        return cls(empty, empty, ints, ints, floats, ints, torch.zeros(shape[:3]), floats)

    def pick(self, index: Tensor) -> Imprints:
        """Those at `index`, in its order."""
        rest = {f.name: getattr(self, f.name)[..., index] for f in fields(self) if f.name not in ("k", "v")}
        return Imprints(self.k.pick(index, 2), self.v.pick(index, 2), **rest)

    def joined(self, other: Imprints) -> Imprints:
        rest = {f.name: torch.cat([getattr(self, f.name), getattr(other, f.name)], -1) for f in fields(self)[2:]}
        return Imprints(self.k.joined(other.k, 2), self.v.joined(other.v, 2), **rest)


@dataclass(frozen=True)
class Life:
    """What an identity has been through, in numbers."""

    experiences: int = 0
    tokens: int = 0
    sleeps: int = 0
    shock_mean: float = 0.0
    shock_spread: float = 0.0
    """Of the surprisal of every token so far, in nats: what counts as a surprise is measured against it."""
    self_norms: tuple[float, ...] = ()
    """|s| after each experience: the way the self has gone."""


_NAMING: list[Callable[[nn.Module], Base]] = []


def names_bases(name: Callable[[nn.Module], Base]) -> Callable[[nn.Module], Base]:
    """`name` says which base a model is: whoever knows models tells the state, which does not."""
    _NAMING.append(name)
    return name


@dataclass(frozen=True, eq=False)
class Identity:
    base: Base
    self: SelfState | None = None
    trace: TraceState | None = None
    imprints: Imprints = field(default=None)  # pyright: ignore
    sources: tuple[str, ...] = ()
    """The names of whatever wrote here; `imprints.source` counts in it."""
    life: Life = Life()
    parent: str | None = None
    """The commit that it was made from, where a store keeps it."""
    episodes: tuple[Episode, ...] = ()
    """All that was said, oldest first: not read, but brought to mind by a prompt (`recall`)."""

    def __post_init__(self) -> None:
        check_base(self.base)
        if self.imprints is None:
            object.__setattr__(self, "imprints", Imprints.none(self.base))
        check(self)

    @classmethod
    def new(cls, base: Base | nn.Module) -> Identity:
        """The empty identity of a model, or of the base that `base_of` names it by: reading it changes nothing."""
        if isinstance(base, nn.Module):
            if not _NAMING:
                raise StateError("nothing that knows models is loaded: import regard.identity, or give base_of(model)")
            base = _NAMING[-1](base)
        if not isinstance(base, Base):
            raise StateError(f"{base!r:.60} is no model: Identity.new(model), or Identity.new(base_of(model))")
        return cls(base)

    @property
    def empty(self) -> bool:
        """True when there is nothing in it: it can change no answer."""
        return self.silent and not self.episodes

    @property
    def silent(self) -> bool:
        """True when reading it changes nothing, so that the base model's own path is taken; episodes are not read by themselves."""
        still = self.self is None or not bool(self.self.s.any())
        flat = self.trace is None or not bool((self.trace.left.codes.any(-1).any(0).any(0) & (self.trace.signs != 0)).any())
        return still and flat and not len(self.imprints)

    @property
    def nbytes(self) -> int:
        """Of what is read; `episodes` come on top of it."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def only(self, *parts: Literal["self", "trace", "imprints", "episodes"]) -> Identity:
        """The same with nothing but these parts, to see what each one does."""
        me, trace = self.self if "self" in parts else None, self.trace if "trace" in parts else None
        imprints = self.imprints if "imprints" in parts else Imprints.none(self.base)
        return replace(self, self=me, trace=trace, imprints=imprints, episodes=self.episodes if "episodes" in parts else ())

    def tensors(self) -> dict[str, Tensor]:
        """Every number that is read, by name; `Identity.build` is the way back."""
        tensors: dict[str, Tensor] = {}
        if self.self is not None:
            tensors["self.s"] = self.self.s
        if self.trace is not None:
            tensors |= {"trace.left.codes": self.trace.left.codes, "trace.left.scale": self.trace.left.scale}
            tensors["trace.signs"] = self.trace.signs
        if len(self.imprints):
            for name in ("k", "v"):
                packed: Packed = getattr(self.imprints, name)
                tensors |= {f"imprints.{name}.codes": packed.codes, f"imprints.{name}.scale": packed.scale}
            tensors |= {f"imprints.{f.name}": getattr(self.imprints, f.name) for f in fields(self.imprints)[2:]}
        # Fields may share memory, and a file may not.
        return {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}

    def config(self) -> Settings:
        return {
            "schema": SCHEMA,
            "base": asdict(self.base),
            "form": None if self.self is None else self.self.form,
            "sources": list(self.sources),
            "life": asdict(self.life),
            "parent": self.parent,
        }

    @classmethod
    def build(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor], episodes: tuple[Episode, ...] = ()) -> Identity:
        """From what `config` and `tensors` gave; whatever does not fit is refused before it is used."""
        try:
            config, tensors = upgraded(config, tensors)
            base = Base(**config["base"])
            if not isinstance(config["sources"], list | tuple):
                raise CheckpointError(f"the sources of an identity are a list of names, not {config['sources']!r}")
            life = dict(config["life"])
            life["self_norms"] = tuple(float(x) for x in life.get("self_norms", ()))
            t = dict(tensors)

            def packed(name: str) -> Packed:
                return Packed(t.pop(f"{name}.codes"), t.pop(f"{name}.scale"))

            me = SelfState(t.pop("self.s"), config["form"]) if "self.s" in t else None
            trace = TraceState(packed("trace.left"), t.pop("trace.signs")) if "trace.left.codes" in t else None
            more: dict[str, Imprints] = {}
            if "imprints.k.codes" in t:
                rest = {f.name: t.pop(f"imprints.{f.name}") for f in fields(Imprints)[2:]}
                more["imprints"] = Imprints(packed("imprints.k"), packed("imprints.v"), **rest)
            if t:
                raise CheckpointError(f"an identity has no tensor {sorted(t)[0]!r}")
            sources, parent = tuple(config["sources"]), config.get("parent")
            return cls(base, me, trace, episodes=episodes, sources=sources, life=Life(**life), parent=parent, **more)
        except RegardError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError) as error:
            raise CheckpointError(f"this is no whole identity: {type(error).__name__} {error}") from error

    def digest(self) -> str:
        """A name by content: the same state has the same digest, wherever it is."""
        return self.digest_with(e.digest for e in self.episodes)

    def digest_with(self, episodes: Iterable[str]) -> str:
        """The digest that it has with the episodes of these digests: a store checks thousands of states, and reads an episode once."""
        # Without the schema of files, which is not the state's: commits of every version keep their digests.
        h = hashlib.sha256(json.dumps({**self.config(), "parent": None, "schema": 1}, sort_keys=True).encode())
        for name, t in sorted(self.tensors().items()):
            h.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
            h.update(t.numpy().tobytes())
        h.update("".join(episodes).encode())
        return h.hexdigest()

    def save(self, folder: str | Path) -> None:
        """Write the folder, whole or not at all, and for its owner alone: what it holds can be read back as words.

        An identity that is there already is replaced; anything else is not.
        """
        if isinstance(self, Recollection):
            raise StateError("a recollection is made for one prompt, and is not saved: save the identity that it is of")
        facts, tensors = packed_together(self.episodes)
        write_folder(path_of(folder), {**self.config(), "episodes": facts}, self.tensors(), tensors)

    save_pretrained = save

    @classmethod
    def load(cls, folder: str | Path) -> Identity:
        """From a folder that `save` wrote; a file that is damaged or does not fit is refused."""
        config, tensors, episodes = read_folder(path_of(folder))
        return cls.build(config, tensors, taken_apart(config.pop("episodes", []), episodes))

    from_pretrained = load


LEAN = 0.5
"""How far what is said leans away from what would be said of nothing to speak of (`read/finding.NOTHING`), where something came to mind.

94 questions whose right turn came (written by hand, visitor, fresh, choose: 34, 19, 19, 22), right greedy answers and nats: away from the model by itself by ½
31 (7, 4, 8, 12), 3.06; away from `NOTHING` by ½ 40 (9, 5, 12, 14), 3.00, by ¾ 42, 3.00; from a greeting in its stead by ½ 38, 3.01; from things that
people tell, which are no nothing, 35, 3.03; by 1 and no word that is 20 times less likely than another 43."""


@dataclass(frozen=True, eq=False)
class Recollection(Identity):
    """An identity as one prompt reads it: what came to mind stands among its imprints, behind the head of that prompt."""

    head: int = 1
    """Tokens of the prompt that come before them: its sink, its system message."""
    chosen: tuple[int, ...] = ()
    """Which episodes came to mind, in the order in which they stand."""
    coherence: tuple[float, ...] = ()
    """Log-odds that each of these answers the prompt, 0 where that is just enough; of the best that was refused, where none came."""
    sure: float = 0.0
    """From 0 to 1: that what came was asked for."""
    lean: float = LEAN
    """How far words lean away from `beside`, where it is sure in full."""
    beside: Identity | None = None
    """Whom the words lean away from: the same prompt with nothing to speak of in the stead of what came; None for the model by itself."""


def check_base(b: Base) -> tuple[int, int, int]:
    """Layers, key heads and head width of a base, where they can be those of a model."""
    counts = (b.depth, b.key_heads, b.head_width)
    if not all(_is_count(n) and 0 < n <= 1 << 16 for n in counts):
        raise StateError(f"a base with layers, key heads and head width {counts} is no model")
    if not all(_is_text(x) for x in (b.fingerprint, b.family, b.name, b.licence)):
        raise StateError("the fingerprint, family, name and licence of a base are texts")
    return counts


def check(identity: Identity) -> None:
    """Shapes, types and finiteness of everything; a state that is wrong is refused where it enters."""
    me, trace, imprints = identity.self, identity.trace, identity.imprints
    L, G, D = check_base(identity.base)
    if me is not None:
        if me.form not in ("key_bias", "self_token"):
            raise StateError(f"the self has form={me.form!r}; it is 'key_bias' or 'self_token'")
        width = G * D * (1 if me.form == "key_bias" else 2)
        _expect("self.s", me.s, (L, width), torch.float32)
    if trace is not None:
        R = trace.signs.shape[0] if trace.signs.ndim == 1 else -1
        _expect("trace.signs", trace.signs, (R,), torch.int8)
        _expect_packed("trace.left", trace.left, (L, G, R, D))
        if R > D or bool(((trace.signs < -1) | (trace.signs > 1)).any()):
            raise StateError(f"a trace has at most {D} columns with signs −1, 0 or 1; this has {R}")
    m = imprints.token.shape[0] if imprints.token.ndim == 1 else -1
    _expect_packed("imprints.k", imprints.k, (L, G, m, D))
    _expect_packed("imprints.v", imprints.v, (L, G, m, D))
    for name in ("token", "position", "source"):
        _expect(f"imprints.{name}", getattr(imprints, name), (m,), torch.int32)
    for name in ("shock", "worth"):
        _expect(f"imprints.{name}", getattr(imprints, name), (m,), torch.float32)
    _expect("imprints.weight", imprints.weight, (L, G, m), torch.float32)
    named = frozenset(identity.sources) if identity.episodes and all(map(_is_text, identity.sources)) else frozenset[str]()
    for episode in identity.episodes:
        _expect_episode(episode, named)
    for e in identity.episodes:
        if e.k is not None and e.v is not None and {tuple(x.shape[1:]) for x in (e.k, e.v)} != {(L, G, D)}:
            raise StateError(f"an episode keeps keys of {tuple(e.k.shape)}, and this model's are (n, {L}, {G}, {D})")
    widths = {e.keys.shape[1] for e in identity.episodes}
    if len(widths) > 1:
        raise StateError(
            f"the keys of these episodes are {', '.join(map(str, sorted(widths)))} numbers wide: one model made them all"
        )
    if not all(_is_text(s) for s in identity.sources):
        raise StateError("the sources of an identity are names")
    if identity.parent is not None and not _is_text(identity.parent):
        raise StateError(f"the parent of an identity is the name of a commit, not {identity.parent!r}")
    if m and not 0 <= int(imprints.source.min()) <= int(imprints.source.max()) < len(identity.sources):
        raise StateError(f"imprints count sources up to {int(imprints.source.max())}, and {len(identity.sources)} are named")
    life = (identity.life.shock_mean, identity.life.shock_spread, *identity.life.self_norms)
    if not all(isinstance(x, int | float) and math.isfinite(x) for x in life):
        raise StateError("the counters of this identity are not finite numbers")
    counts = (identity.life.experiences, identity.life.tokens, identity.life.sleeps)
    if not all(_is_count(n) for n in counts):
        raise StateError(f"experiences, tokens and sleeps {counts} are not counted in whole numbers")


def _expect_episode(episode: object, sources: frozenset[str]) -> None:
    if not isinstance(episode, Episode):
        raise StateError(f"{episode!r:.60} is no episode")
    check_episode(episode)
    if episode.source not in sources:
        raise StateError(f"an episode is by {episode.source!r:.60}, which is not among the sources of this identity")


def _is_count(n: object) -> bool:
    """True for a whole number that positions of imprints, of 32 bits, can count to."""
    return isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 31


def _is_text(x: object) -> bool:
    """True for a text that can be written to a file: JSON can spell halves of characters that UTF-8 cannot."""
    return isinstance(x, str) and x == x.encode("utf-8", "ignore").decode("utf-8")


def _expect(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(x.shape) != shape or x.dtype != dtype:
        raise StateError(f"{name} is {tuple(x.shape)} {x.dtype}; this base needs {shape} {dtype}")
    if dtype.is_floating_point and not bool(torch.isfinite(x).all()):
        raise StateError(f"{name} has {int((~torch.isfinite(x)).sum())} numbers that are not finite; roll back")


def _expect_packed(name: str, x: Packed, shape: tuple[int, ...]) -> None:
    _expect(f"{name}.codes", x.codes, shape, torch.int8)
    _expect(f"{name}.scale", x.scale, (*shape[:-1], 1), torch.float16)


__all__ = ["Base", "Form", "Identity", "Imprints", "Life", "SelfState", "TraceState"]
