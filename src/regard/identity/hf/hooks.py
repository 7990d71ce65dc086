"""Living in a Hugging Face decoder: what its layers read, thread by thread, caches and all.

A hook on each projection catches q and k before RoPE turns them, and the further columns of a key (`read.py`) are laid next to
it just before it goes into the cache. So they are in the cache itself, and whatever is done to that, beams reordered, tokens
cropped, rows picked, a room of fixed size, is done to them too. Slots stand in no cache: they come in front at every call.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ...attention.spec import Spec
from ...errors import CombinationError, ShapeError
from ...geometry import Dot
from ..read.layer import LayerRead
from .caches import Filler, guard
from .flight import LOCK, call_of, expect_original, flight, has_ended, hook
from .install import put_in
from .interface import FOR_ALL, HERE, Call, Result, lived_in
from .probe import catches

if TYPE_CHECKING:
    from .body import HubBody


class Lived:
    """What the layers of one model read for as long as somebody lives in it."""

    def __init__(self, body: HubBody, reads: Mapping[nn.Module, LayerRead]) -> None:
        self.turns, self._reads = body.turns, dict(reads)
        self._rows: dict[tuple[nn.Module, int], LayerRead] = {}
        self._slots: dict[tuple[nn.Module, int, torch.dtype], tuple[Tensor, Tensor]] = {}

    @cached_property
    def digest(self) -> str:
        """A name by content: a conversation may go on in another `with` block of the same identity, and in no other's."""
        h = hashlib.sha256()
        for module, read in self._reads.items():
            h.update(f"{getattr(module, 'layer_idx', None)} {read.digest} {read.arranged} ".encode())
        return h.hexdigest()

    def reads(self, module: nn.Module) -> bool:
        return module in self._reads

    def at(self, module: nn.Module, batch: int) -> LayerRead | None:
        """What this layer reads of a batch."""
        read = self._reads.get(module)
        if read is None or read.batch in (1, batch):
            return read
        if batch % read.batch or not _generating():
            raise ShapeError(f"{read.batch} identities live here, one for each row, and the batch has {batch} rows")
        # Beams and several answers to one prompt: `generate` repeats every row as often, and keeps repeated rows together.
        if (module, batch) not in self._rows:
            index = torch.arange(read.batch).repeat_interleave(batch // read.batch)
            self._rows[module, batch] = read.rows(index)
        return self._rows[module, batch]

    def slots(self, module: nn.Module, read: LayerRead, first: Tensor | None, q: Tensor) -> tuple[Tensor, Tensor]:
        """The slots of a layer as keys and values for each row, in front of its first token at position `first`, or 0."""
        assert read.k is not None
        assert read.v is not None
        B, m = q.shape[0], read.slots
        keep = first is None and not any(x is not None and x.requires_grad for x in _tensors(read))
        if keep and (module, B, q.dtype) in self._slots:
            return self._slots[module, B, q.dtype]
        at, turn = torch.arange(-m, 0, device=read.k.device)[None], self.turns[module]
        if first is not None and turn is not None:
            at = at + first[:, None].to(at.device)
            read = replace(read, k=read.k.expand(B, -1, -1, -1), v=read.v.expand(B, -1, -1, -1))
        own = cast(Tensor, read.k)
        k, v = (x.to(q).expand(B, -1, -1, -1) for x in read.slot_heads(own if turn is None else turn(own, at)))
        if keep:
            self._slots[module, B, q.dtype] = k, v
        return k, v

    def answer(self, call: Call, spec: Spec | None) -> Result:
        """One call of a layer that reads."""
        frame, read = cast(Frame, _LOCAL.frame), cast(LayerRead, self.at(call.module, call.q.shape[0]))
        if spec is not None and (not isinstance(spec.geometry, Dot) or spec.geometry.scale not in (None, read.scale)):
            raise CombinationError(f"an identity bends dot products at the model's own scale, and this layer is {spec}")
        q, k, v, allow, bias = call.q, call.k, call.v, call.allow, call.bias
        if read.wide:
            k = k if frame.asks is not None else frame.widen(k)
            q = torch.cat([q, cast(Tensor, frame.asks).to(q.dtype)], -1)
        m = read.slots
        if m:
            slot_k, slot_v = self.slots(call.module, read, _LOCAL.first, q)
            k, v = torch.cat([slot_k, k], 2), torch.cat([slot_v, v], 2)
            allow = self._met(read, call, frame.caught["q"])
            if bias is not None:
                bias = nn.functional.pad(bias, (m, 0))
        out, weights = replace(call, q=q, k=k, v=v, allow=allow, bias=bias).answered(spec)
        # Whoever asks for weights counts the keys of the context: what a row lacks of 1 went to the slots.
        return out, None if weights is None else weights[..., m:]

    def _met(self, read: LayerRead, call: Call, q: Tensor) -> Tensor:
        """Which keys a query may look at, those of the slots first."""
        allow, (B, _, Q, _), K = call.allow, q.shape, call.k.shape[2]
        last, mine = _LOCAL.met, (self, read.slots, read.alone)
        if last is not None and last[0] is allow and last[1] == mine and read.beta is None:
            return last[2]
        given = allow
        allow = torch.ones(1, 1, Q, K, dtype=torch.bool, device=q.device) if allow is None else allow
        front = allow.new_ones(B, 1, Q, read.slots)
        if read.alone:
            # Who sees one key sees itself: the first token of a text, wherever padding or packing has put it.
            front = front & (allow.sum(-1, keepdim=True) != 1)
        refused = read.refused(q)
        front = front if refused is None else front & ~refused
        shape = torch.broadcast_shapes(front.shape[:3], allow.shape[:3])
        met = torch.cat([front.expand(*shape, -1), allow.expand(*shape, -1)], -1)
        if given is not None and refused is None:
            # The layers of one forward share their mask; the next forward may have written into it.
            _LOCAL.met = given, mine, met
        return met


def _tensors(read: LayerRead) -> list[Tensor | None]:
    return [x for x in (getattr(read, f.name) for f in fields(read)) if x is None or isinstance(x, Tensor)]


def _generating() -> bool:
    """Whether transformers' `generate` is what calls us."""
    from transformers import GenerationMixin

    code = inspect.unwrap(cast(Any, GenerationMixin).generate).__code__
    frame = sys._getframe()  # pyright: ignore
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


@contextmanager
def lived(body: HubBody, reads: Sequence[LayerRead | None]) -> Generator[None]:
    """Inside, the layers read these; without any, the model is by itself."""
    here = Lived(body, _by_module(body, reads)) if any(reads) else None
    # Whoever was started inside may live on when the block has ended, and needs the hooks for as long.
    move_out = None if here is None else move_in(body)
    try:
        with HERE.held(dict.fromkeys(body.layers, here), end=move_out):
            yield
    finally:
        # What was interrupted inside would keep its tensors and its model until this thread's next forward.
        if flight() is None and _at_work() is None:
            _LOCAL.first = _LOCAL.met = None


def move_in_for_all(body: HubBody, reads: Sequence[LayerRead | None]) -> Callable[[], None]:
    """The layers read these in every thread; what is given back undoes it."""
    here = Lived(body, _by_module(body, reads))
    with LOCK:
        move_out = move_in(body)
        for layer in body.layers:
            FOR_ALL.setdefault(layer, []).append(here)

    def undo() -> None:
        with LOCK:
            for layer in body.layers:
                FOR_ALL[layer].remove(here)
                if not FOR_ALL[layer]:
                    del FOR_ALL[layer]
            move_out()

    return undo


def _by_module(body: HubBody, reads: Sequence[LayerRead | None]) -> dict[nn.Module, LayerRead]:
    return {m: r for m, r in zip(body.layers, reads, strict=True) if r is not None}


def move_in(body: HubBody) -> Callable[[], None]:
    """Hooks on the model and its layers; what is given back removes them."""
    with LOCK:
        take_out = put_in(body.model, body.layers, follow)
        unhook = [
            hook("heads", body.layers, lambda layer: catches(layer, body.layout, _caught)),
            hook("places", [body.trunk], lambda trunk: [trunk.register_forward_pre_hook(_placed, with_kwargs=True)]),
        ]

    def undo() -> None:
        for one in unhook:
            one()
        take_out()

    return undo


def follow(module: nn.Module) -> list[Any]:
    """Hooks on a layer, which know when it is at work and what cache it was given."""
    return [
        module.register_forward_pre_hook(_open, with_kwargs=True),
        module.register_forward_hook(_close, always_call=True),
    ]


@dataclass(eq=False)
class Frame:
    """One layer at work in this thread: what its projections gave, and whether its keys have met their columns."""

    module: nn.Module
    lived: Lived | None
    caught: dict[str, Tensor]
    call: FrameType
    """Of the layer: while it runs, the layer is at work."""
    asks: Tensor | None = None

    def rows(self, batch: int) -> tuple[int, ...] | None:
        """Which of several identities each row of a batch is."""
        read = None if self.lived is None else self.lived.at(self.module, batch)
        return None if read is None else read.arranged

    def widen(self, k: Tensor) -> Tensor:
        """Keys as the model turned them, with their columns; the columns of the queries are kept for the call."""
        read = None if self.lived is None else self.lived.at(self.module, k.shape[0])
        if read is None or not read.wide:
            return k
        self.asks, tells = read.columns(self.caught["q"], self.caught["k"])
        return torch.cat([k, tells.to(k.dtype)], -1)


class _Local(threading.local):
    frame: Frame | None = None
    first: Tensor | None = None
    met: tuple[Tensor, Any, Tensor] | None = None


_LOCAL = _Local()


def _now() -> tuple[Filler, Frame | None]:
    """Who fills a cache in this thread, at this moment."""
    frame, way = _at_work(), flight()
    who = None if frame is None or frame.lived is None else frame.lived.digest
    return Filler(who, "" if way is None else way.name), frame


def _at_work() -> Frame | None:
    """The layer that is at work in this thread; one that was interrupted has told nobody, and speaks for nobody."""
    if _LOCAL.frame is not None and has_ended(_LOCAL.frame.call):
        _LOCAL.frame = None
    return _LOCAL.frame


def _caught(module: nn.Module, name: str, x: Tensor) -> None:
    frame = _LOCAL.frame
    if frame is not None and frame.module is module and frame.lived is not None:
        frame.caught[name] = x


def _open(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    expect_original(module)
    here = cast(Lived | None, lived_in(module))
    _LOCAL.frame = Frame(module, here, {}, call_of(sys._getframe()))  # pyright: ignore[reportPrivateUsage]
    cache = _given(module, args, kwargs).get("past_key_values")
    if cache is not None:
        guard(cache, int(getattr(module, "layer_idx", None) or 0), _now()[0], _now)


def _close(module: nn.Module, args: Any, out: Any) -> None:
    _LOCAL.frame = None


def _placed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _LOCAL.first, _LOCAL.met = _first(_given(module, args, kwargs)), None


def _first(given: dict[str, Any]) -> Tensor | None:
    """The position of the first real token of each row; None where it is 0 in all of them.

    With padding on the left, `generate` counts positions from the first real token and a plain forward from the padding.
    """
    allowed, at, tokens = given.get("attention_mask"), given.get("position_ids"), given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    if tokens is None or (at is not None and at.ndim != 2):
        return None
    N = tokens.shape[1]
    if allowed is None:
        cache = given.get("past_key_values")
        first = None if at is None else at[:, 0] - (0 if cache is None else int(cache.get_seq_length()))
    elif isinstance(allowed, Tensor) and allowed.ndim == 2:
        allowed = allowed.bool()
        pad = allowed.int().argmax(-1)
        if at is None:
            first = pad
        else:
            at = at.expand(allowed.shape[0], -1)
            here = pad - (allowed.shape[1] - N)
            inside = at.gather(1, here.clamp(0, N - 1)[:, None])[:, 0]
            first = torch.where(here >= 0, inside, at[:, -1] - allowed.sum(-1) + 1)
    else:
        first = None
    return None if first is None or not bool(first.any()) else first.expand(tokens.shape[0])


_NAMES: dict[type, list[str]] = {}


def _given(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a forward by their names."""
    names = _NAMES.get(type(module))
    if names is None:
        names = _NAMES[type(module)] = list(inspect.signature(type(module).forward).parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


__all__ = ["follow", "lived", "move_in_for_all"]
