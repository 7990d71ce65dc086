"""An identity as bytes and back: one safetensors file, its settings in the header, everything checked before it is used. An episode
likewise, in a file of its own; only an export has both in one.

The header's only entry is the settings: safetensors keeps several in no fixed order, and one state must have one hash.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields

import torch
from torch import Tensor

from ...errors import CheckpointError, RegardError, StateError
from ..episodes import PACKED, Episode, packed_together, taken_apart
from ..folder import LARGEST, MOST_EPISODES, Settings, unpack, upgraded
from ..state import Base, Identity, Imprints, Life
from .errors import StoreError
from .records import canonical, checked_source, strict_json

ENTRY = "identity"
MOST_HEADER = 4 << 20
MOST_SOURCES = 4096
_WORDS = {torch.float32: "F32", torch.int32: "I32", torch.float16: "F16", torch.int8: "I8"}
_PACKED = {"codes": "I8", "scale": "F16"}
_NONE = Imprints.none(Base("", 1, 1, 1))
TYPES = {
    "self.s": "F32",
    "trace.signs": "I8",
    **{f"{part}.{name}": dtype for part in ("trace.left", "imprints.k", "imprints.v") for name, dtype in _PACKED.items()},
    **{f"imprints.{f.name}": _WORDS[getattr(_NONE, f.name).dtype] for f in fields(_NONE) if f.name not in ("k", "v")},
}
EPISODE = "episode"
EPISODE_TYPES = {
    "tokens": "I32",
    "usual": "F32",
    **{f"{part}.{name}": dtype for part in PACKED for name, dtype in _PACKED.items()},
}
LIVED = "episodes."
"""Begins the names of the episodes' tensors in a file that holds them beside their identity."""
BYTES = {"F32": 4, "I32": 4, "F16": 2, "I8": 1}


def encode(identity: Identity, **more: object) -> bytes:
    """All but its episodes."""
    from safetensors.torch import save

    data = save(identity.tensors(), metadata={ENTRY: canonical({**identity.config(), "parent": None, **more})})
    if len(data) > LARGEST:
        raise StoreError(f"an identity of {len(data) / 1e6:,.0f} MB; at most {LARGEST / 1e6:.0f} MB are kept: drop imprints")
    return data


def encode_whole(identity: Identity, **more: object) -> bytes:
    """With its episodes."""
    from safetensors.torch import save

    facts, lived = packed_together(identity.episodes)
    tensors = identity.tensors() | {f"{LIVED}{name}": t for name, t in lived.items()}
    return save(tensors, metadata={ENTRY: canonical({**identity.config(), "parent": None, "episodes": facts, **more})})


def encode_episode(episode: Episode) -> bytes:
    from safetensors.torch import save

    # Copies, because safetensors refuses tensors that are views of one memory, as those of a folder are.
    tensors = {name: t.clone(memory_format=torch.contiguous_format) for name, t in episode.tensors().items()}
    return save(tensors, metadata={EPISODE: canonical(episode.facts())})


def decode_episode(data: bytes, digest: str, what: str) -> Episode:
    """The episode of that digest; anything else is refused."""
    extra = read_header(data, what, EPISODE_TYPES).pop("__metadata__", None)
    if not isinstance(extra, dict) or set(extra) != {EPISODE}:
        raise CheckpointError(f"{what} is damaged: it holds no episode; restore it or roll back")
    facts = strict_json(extra[EPISODE], f"the facts in {what}")
    if not isinstance(facts, dict):
        raise CheckpointError(f"{what} is damaged: the facts of its episode are {facts!r:.60}; restore it or roll back")
    try:
        episode = Episode.build(facts, unpack(data))
    except RegardError as error:
        raise CheckpointError(f"{what} is damaged: {error}; restore it or roll back") from error
    if episode.digest != digest:
        raise CheckpointError(f"{what} is damaged: it holds another episode; restore it or roll back")
    return episode


def decode(data: bytes, what: str) -> tuple[Identity, Settings]:
    """The identity without episodes, and whatever else stands beside its settings."""
    config, more = _settings(read_header(data, what, TYPES), what)
    return build(config, unpack(data), what), more


def decode_whole(data: bytes, what: str) -> tuple[Identity, Settings]:
    """The identity with its episodes."""
    types = TYPES | {f"{LIVED}{name}": dtype for name, dtype in EPISODE_TYPES.items()}
    config, more = _settings(read_header(data, what, types), what)
    tensors = unpack(data, LARGEST + MOST_EPISODES)
    lived = {name.removeprefix(LIVED): tensors.pop(name) for name in list(tensors) if name.startswith(LIVED)}
    return build(config, tensors, what, taken_apart(more.pop("episodes", []), lived)), more


def _settings(header: Settings, what: str) -> tuple[Settings, Settings]:
    extra = header.pop("__metadata__", None)
    config = strict_json(extra[ENTRY], f"the settings in {what}") if isinstance(extra, dict) and ENTRY in extra else None
    if not isinstance(config, dict):
        raise CheckpointError(f"{what} has no settings of an identity in its header")
    known = set(Identity.new(Base("", 1, 1, 1)).config())
    more = {key: config.pop(key) for key in set(config) - known}
    return config, more


def build(config: Settings, tensors: Mapping[str, Tensor], what: str, episodes: tuple[Episode, ...] = ()) -> Identity:
    try:
        # In this schema first: what is checked is what is built.
        config, tensors = upgraded(config, tensors)
        check_config(config)
        identity = Identity.build(config, tensors, episodes)
        # Asked from below: the absolute value of an int8's −128 is −128 again.
        if identity.trace is not None and bool((identity.trace.signs < -1).any()):
            raise StateError(f"the signs of a trace are −1, 0 or 1, not {int(identity.trace.signs.min())}")
        return identity
    except CheckpointError:
        raise
    except (RegardError, ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"{what} holds no sound identity: {error}") from error


def read_header(data: bytes, what: str, types: Mapping[str, str]) -> Settings:
    """Names, types, shapes and places of all tensors, refused here if they do not fit each other or the file."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(len(data) - 8, MOST_HEADER):
        raise CheckpointError(
            f"{what} is no safetensors file: a header of {size:,} bytes in a file of {len(data):,}, at most {MOST_HEADER:,}"
        )
    header = strict_json(data[8 : 8 + size], f"the header of {what}")
    if not isinstance(header, dict):
        raise CheckpointError(f"the header of {what} is a {type(header).__name__}")
    end = len(data) - 8 - size
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if name not in types:
            raise CheckpointError(f"{what} has a tensor {name!r:.80}, and there is none of that name in such a file")
        match entry:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(stop)]}:
                fits = all(type(n) is int and n >= 0 for n in shape) and dtype == types[name] and 0 <= start <= stop <= end
                if not fits or math.prod(shape) * BYTES[dtype] != stop - start:
                    raise CheckpointError(f"{name} of {what} is {dtype} {shape!r:.80} in {stop - start} bytes of {end}")
            case _:
                raise CheckpointError(f"{name} of {what} is described by {entry!r:.80}")
    return header


def check_config(config: Settings) -> None:
    """Types of all settings; the identity itself then checks what they mean."""
    if set(config) != {"schema", "base", "form", "sources", "life", "parent"}:
        raise CheckpointError(f"the settings of an identity are not {', '.join(sorted(map(str, config)))[:200]}")
    base, life, sources = config["base"], config["life"], config["sources"]
    _typed(base, {f.name: (int if f.type == "int" else str) for f in fields(Base)}, "base")
    _typed(life, {f.name: {"int": int, "float": float}.get(str(f.type), list) for f in fields(Life)}, "life")
    if not all(isinstance(n, int | float) and not isinstance(n, bool) for n in life["self_norms"]):
        raise CheckpointError("the self's norms are not all numbers")
    if not isinstance(sources, list) or len(sources) > MOST_SOURCES or len(set(map(str, sources))) != len(sources):
        raise CheckpointError(f"the sources of an identity are a list of up to {MOST_SOURCES} different names")
    for source in sources:
        checked_source(source)
    if not isinstance(config["parent"], str | None) or not isinstance(config["form"], str | None):
        raise CheckpointError(f"parent={config['parent']!r:.80} and form={config['form']!r:.80} are names or nothing")


def _typed(section: object, types: Mapping[str, type], what: str) -> None:
    if not isinstance(section, dict) or set(section) != set(types):
        raise CheckpointError(f"the {what} of an identity has {', '.join(types)} and nothing else; this is {section!r:.120}")
    for name, kind in types.items():
        value = section[name]
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
            raise CheckpointError(f"{what}.{name} is {value!r:.80}; it is a {kind.__name__}")
        if kind is int and not 0 <= value < 1 << 53:
            raise CheckpointError(f"{what}.{name} is {value!r:.80}; it counts from 0 up")


def readable(identity: Identity, data: bytes) -> None:
    """What would not come back as it was must not be written."""
    try:
        back = decode(data, "this identity")[0].digest_with(e.digest for e in identity.episodes)
    except CheckpointError as error:
        raise StateError(f"this identity would not be read back: {error}") from error
    if back != identity.digest():
        odd = json.dumps(identity.config()["life"])[:200]
        raise StateError(f"this identity would come back with other numbers; give its counters as plain ints and floats: {odd}")


def readable_episode(episode: Episode, data: bytes) -> None:
    try:
        decode_episode(data, episode.digest, "it")
    except CheckpointError as error:
        raise StateError(f"an episode by {episode.source!r:.60} would not be read back: {error}") from error


__all__ = [
    "build", "decode", "decode_episode", "decode_whole", "encode", "encode_episode", "encode_whole", "readable", "readable_episode",
]  # fmt: skip
