"""Where each of our parameters stands in somebody else's file, and the two ways through that table: in and out.

A layout pairs our module names with theirs, `{}` for the number of a layer; `.weight` and `.bias` follow. A tensor that a
file lacks, has too much, or has in another shape is an error that names it, before any data is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...errors import CheckpointError
from ..base import Model
from ..packed import PackedWeight, keep_packed
from ..parameters import assign, owners_of

SHOWN = 5
"""How many names an error lists before it only counts."""
MOST_PARTS = 1 << 16
"""No model here has more layers and experts; each costs kilobytes before it holds a number."""
MOST_READERS = 4
OWN_ELEMENTS = 1 << 20
"""A spec may train this many numbers that the file does not hold, however small the file."""


Share = Callable[[float], None]
"""Hears which share of the tensors has been read."""


def _silent(share: float) -> None: ...


@dataclass(frozen=True)
class TensorPlace:
    """One tensor of a file, and how ours lies in it."""

    name: str
    transposed: bool = False
    """GPT-2 keeps its weights (in, out)."""
    part: tuple[int, int] = (0, 1)
    """Ours is piece i of n, one under the other (GPT-2's fused q, k, v)."""
    heads: int = 0
    """Rows of each head pair dimension 2i with 2i+1 for RoPE there, i with i + D/2 here; 0: the same order."""
    also: tuple[str, ...] = ()
    """Other names under which a file may keep it."""

    @property
    def is_whole(self) -> bool:
        """True where ours is the whole tensor, but for the order of its rows."""
        return not self.transposed and self.part == (0, 1)

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        whole = (ours[0] * self.part[1], *ours[1:])
        return whole[::-1] if self.transposed else whole

    def take(self, stored: Tensor) -> Tensor:
        x = stored.T if self.transposed and stored.ndim == 2 else stored
        x = x.chunk(self.part[1])[self.part[0]]
        if self.heads:
            x = x.unflatten(0, (self.heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return x

    def give(self, pieces: list[Tensor]) -> Tensor:
        x = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        return (x.T if self.transposed and x.ndim == 2 else x).contiguous()


@dataclass(frozen=True)
class TensorLayout:
    table: Mapping[str, TensorPlace | str]
    prefix: str = ""
    """What a model with a head puts before the names of its body; a file without it is read too."""
    spare: tuple[str, ...] = ()
    """Patterns of tensors that files carry and nobody needs: masks, position numbers, copies of a tied weight."""

    def place(self, ours: str) -> TensorPlace | None:
        number = re.search(r"\.(\d+)\.", ours)
        layer = "" if number is None else number.group(1)
        general = ours if number is None else ours.replace(f".{layer}.", ".{}.", 1)
        module, _, leaf = general.rpartition(".")
        for key, tail in ((ours, ""), (general, ""), (module, f".{leaf}")):
            row = self.table.get(key)
            if row is not None:
                place = TensorPlace(row) if isinstance(row, str) else row
                return replace(
                    place,
                    name=place.name.replace("{}", layer) + tail,
                    also=tuple(n.replace("{}", layer) + tail for n in place.also),
                )
        return None


class Stored(Protocol):
    """The tensors of an open file."""

    @property
    def origin(self) -> str: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> Tensor: ...


@runtime_checkable
class StoredPacked(Stored, Protocol):
    """Those of a file that keeps weights in blocks."""

    def packed(self, name: str, heads: int = 0) -> PackedWeight | None: ...


@dataclass(frozen=True)
class TensorsInMemory:
    """Tensors that are in memory already."""

    tensors: Mapping[str, Tensor]
    origin: str = "memory"
    shapes: Mapping[str, tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shapes", {n: tuple(t.shape) for n, t in self.tensors.items()})

    def read(self, name: str) -> Tensor:
        return self.tensors[name]


def assemble(config: Any, layout: TensorLayout, stored: Stored, dtype: torch.dtype, progress: Share = _silent) -> Model:
    """The model of a config with the numbers of a file. Nothing that takes memory is made before the file has been seen to
    hold every tensor of it."""
    parts, held = getattr(config, "parts", config.depth), len(stored.shapes)
    if parts > MOST_PARTS or 2 * parts > held:
        raise CheckpointError(
            f"{stored.origin}: its configuration asks for {parts} layers (and experts), with two tensors each at least; "
            f"the file has {held} tensors in all"
        )
    numbered = {number.group(1) for name in stored.shapes if (number := re.search(r"\.(\d+)\.", name))}
    if config.depth > len(numbered):
        raise CheckpointError(
            f"{stored.origin}: its configuration asks for {config.depth} layers; its tensors number {len(numbered)}"
        )
    model = _unfilled(config)
    places = _places(model, layout, stored)
    own = own_names(model, layout)
    if own:
        # A spec trains tensors of its own, and these start at their defaults: the model is made for real.
        size, room = sum(model.get_parameter(n).numel() for n in own), sum(map(math.prod, stored.shapes.values()))
        if size > max(room, OWN_ELEMENTS):
            raise CheckpointError(f"{stored.origin}: its attention trains {size:,} numbers, and the file holds {room:,} in all")
        model = config.build()
    owners = owners_of(model)
    # Memory that was never touched is given page by page, which takes longer than writing to it: by several threads at once.
    with ThreadPoolExecutor(min(MOST_READERS, torch.get_num_threads())) as readers:
        values = readers.map(lambda place: _value(place, stored, dtype), places.values())
        for done, (ours, (value, packed)) in enumerate(zip(places, values, strict=True)):
            progress(done / len(places))
            assign(owners, model.get_parameter(ours), value)
            if packed is not None and packed.kind.block > 1:
                keep_packed(model.get_parameter(ours), packed)
    return model


def _value(place: TensorPlace, stored: Stored, dtype: torch.dtype) -> tuple[Tensor, PackedWeight | None]:
    """A weight, and the blocks that it was written out from."""
    # Of a vector there are no rows to put in order.
    in_rows = place.is_whole and len(stored.shapes[place.name]) == 2
    packed = stored.packed(place.name, place.heads) if in_rows and isinstance(stored, StoredPacked) else None
    value = place.take(stored.read(place.name)) if packed is None else packed.unpacked()
    if not value.is_floating_point():
        raise CheckpointError(f"{stored.origin}: {place.name} holds {value.dtype}; weights are floating point")
    return value.to(dtype).contiguous(), packed


class _NoDraws(TorchFunctionMode):
    """Random numbers for a tensor without memory would import torch's compiler, a second or more, and nobody sees them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.normal_, Tensor.uniform_) or getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def _unfilled(config: Any) -> Model:
    """The model of a config with shapes and no numbers."""
    with torch.device("meta"), _NoDraws():
        return config.build()


def own_names(model: nn.Module, layout: TensorLayout) -> list[str]:
    """Parameters that an attention spec asked for and a foreign layout has no place for."""
    return [n for n, _ in model.named_parameters() if ".trained." in n and layout.place(n) is None]


def _places(model: Model, layout: TensorLayout, stored: Stored) -> dict[str, TensorPlace]:
    """Where each parameter stands in the file; one that is missing, too much or of another shape is an error."""
    bare = not any(n.startswith(layout.prefix) for n in stored.shapes)
    places: dict[str, TensorPlace] = {}
    missing, wrong, used = list[str](), list[str](), set[str]()
    for ours, parameter in model.named_parameters():
        place = layout.place(ours)
        if place is None:
            if ".trained." not in ours:
                missing.append(ours)
            continue
        names = [place.name, *place.also]
        names += [n.removeprefix(layout.prefix) for n in names] if bare else []
        real = next((n for n in names if n in stored.shapes), None)
        if real is None:
            missing.append(place.name)
            continue
        used.add(real)
        places[ours] = replace(place, name=real)
        want = place.shape(tuple(parameter.shape))
        if tuple(stored.shapes[real]) != want:
            wrong.append(f"{real} is {tuple(stored.shapes[real])}, and the configuration asks for {want}")
    spare = re.compile("|".join(f"(?:{p})" for p in layout.spare) or r"(?!)")
    extra = [n for n in stored.shapes if n not in used and not spare.search(n)]
    for what, names in (("lacks", missing), ("has a wrong shape:", wrong), ("has nothing here to fill with", extra)):
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            raise CheckpointError(f"{stored.origin} {what} {', '.join(sorted(names)[:SHOWN])}{more}")
    return places


def spread(model: Model, layout: TensorLayout) -> dict[str, Tensor]:
    """The parameters under their foreign names; tied ones once."""
    pieces: dict[str, list[tuple[int, Tensor, TensorPlace]]] = {}
    for ours, parameter in model.named_parameters():
        place = layout.place(ours)
        if place is not None:
            pieces.setdefault(place.name, []).append((place.part[0], parameter.detach(), place))
        elif ".trained." not in ours:
            raise CheckpointError(f"{model.family} has no place for {ours} in its Hugging Face layout")
    # safetensors refuses tensors that share memory, and a transposed view of a parameter would.
    return {
        name: parts[0][2].give([x for _, x, _ in sorted(parts, key=lambda f: f[0])]).clone() for name, parts in pieces.items()
    }
