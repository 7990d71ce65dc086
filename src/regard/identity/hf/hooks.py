"""An identity read by the layers of a Hugging Face decoder: for one thread or for all, with caches.

A hook on each projection catches q and k before RoPE turns them, and the further columns of a key (`read/layer.py`) are laid next to
it just before it goes into the cache. So they are in the cache itself, and whatever is done to that, beams reordered, tokens
cropped, rows picked, a room of fixed size, is done to them too. Slots stand in no cache: they come in front at every call.
"""

from __future__ import annotations

import hashlib
import inspect
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...attention.spec import Spec
from ...errors import CombinationError, ShapeError
from ...geometry import Dot
from ..read.layer import LayerRead
from .caches import Filler, guard
from .flight import LOCK, Handle, call_of, expect_original, flight, has_ended, hook
from .install import install
from .interface import FOR_ALL, HERE, InterfaceCall, Result, reader_of
from .probe import catches

if TYPE_CHECKING:
    from .body import HubBody


class ActiveReads:
    """What the layers of one model read of an identity, or of one for each row."""

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
            raise ShapeError(f"{read.batch} identities are read here, one for each row, and the batch has {batch} rows")
        # Beams and several answers to one prompt: `generate` repeats every row as often, and keeps repeated rows together.
        if (module, batch) not in self._rows:
            index = torch.arange(read.batch).repeat_interleave(batch // read.batch)
            self._rows[module, batch] = read.rows(index)
        return self._rows[module, batch]

    def slots(self, module: nn.Module, read: LayerRead, first: Tensor | None, q: Tensor) -> tuple[Tensor, Tensor]:
        """The slots of a layer as keys and values for each row, in front of its first token at position `first`, or 0."""
        own, B, m = read.k, q.shape[0], read.slots
        assert own is not None
        assert read.v is not None
        keep = first is None and not any(x is not None and x.requires_grad for x in _tensors(read))
        if keep and (module, B, q.dtype) in self._slots:
            return self._slots[module, B, q.dtype]
        at, turn = torch.arange(-m, 0, device=own.device)[None], self.turns[module]
        if first is not None and turn is not None:
            at = at + first[:, None].to(at.device)
            own = own.expand(B, -1, -1, -1)
            read = replace(read, k=own, v=read.v.expand(B, -1, -1, -1))
        k, v = (x.to(q).expand(B, -1, -1, -1) for x in read.slot_heads(own if turn is None else turn(own, at)))
        if keep:
            self._slots[module, B, q.dtype] = k, v
        return k, v

    def answer(self, call: InterfaceCall, spec: Spec | None) -> Result:
        """One call of a layer that reads."""
        frame, read = _LOCAL.frame, self.at(call.module, call.q.shape[0])
        assert frame is not None
        assert read is not None
        if spec is not None and (not isinstance(spec.geometry, Dot) or spec.geometry.scale not in (None, read.scale)):
            raise CombinationError(f"an identity changes dot products at the model's own scale, and this layer is {spec}")
        q, k, v, allow, bias = call.q, call.k, call.v, call.allow, call.bias
        if read.wide:
            k = k if frame.asks is not None else frame.widen(k)
            assert frame.asks is not None
            q = torch.cat([q, frame.asks.to(q.dtype)], -1)
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

    def _met(self, read: LayerRead, call: InterfaceCall, q: Tensor) -> Tensor:
        """Which keys a query may look at, those of the slots first."""
        allow, (B, _, Q, _), K = call.allow, q.shape, call.k.shape[2]
        last, mine = _LOCAL.met, (self, read.slots)
        if last is not None and last[0] is allow and last[1] == mine and read.beta is None:
            return last[2]
        given = allow
        allow = torch.ones(1, 1, Q, K, dtype=torch.bool, device=q.device) if allow is None else allow
        front = allow.new_ones(B, 1, Q, read.slots)
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

    code = inspect.unwrap(vars(GenerationMixin)["generate"]).__code__
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


@contextmanager
def reading(body: HubBody, reads: Sequence[LayerRead | None]) -> Generator[None]:
    """Inside, the layers read these; without any, the model is by itself."""
    here = ActiveReads(body, _by_module(body, reads)) if any(reads) else None
    # Threads and tasks that were started inside may outlast the block, and need the hooks for as long.
    detach = None if here is None else attach(body)
    try:
        with HERE.held(dict.fromkeys(body.layers, here), end=detach):
            yield
    finally:
        # What was interrupted inside would keep its tensors and its model until this thread's next forward.
        if flight() is None and _at_work() is None:
            _LOCAL.first = _LOCAL.met = None


def attach_for_all(body: HubBody, reads: Sequence[LayerRead | None]) -> Callable[[], None]:
    """The layers read these in every thread; what is given back undoes it."""
    here = ActiveReads(body, _by_module(body, reads))
    with LOCK:
        detach = attach(body)
        for layer in body.layers:
            FOR_ALL.setdefault(layer, []).append(here)

    def undo() -> None:
        with LOCK:
            for layer in body.layers:
                FOR_ALL[layer].remove(here)
                if not FOR_ALL[layer]:
                    del FOR_ALL[layer]
            detach()

    return undo


def _by_module(body: HubBody, reads: Sequence[LayerRead | None]) -> dict[nn.Module, LayerRead]:
    return {m: r for m, r in zip(body.layers, reads, strict=True) if r is not None}


def attach(body: HubBody) -> Callable[[], None]:
    """Hooks on the model and its layers; what is given back removes them."""
    with LOCK:
        uninstall = install(body.model, body.layers, follow)
        unhook = [
            hook("heads", body.layers, lambda layer: catches(layer, body.layout, _caught)),
            hook("places", [body.trunk], lambda trunk: [trunk.register_forward_pre_hook(_placed, with_kwargs=True)]),
        ]

    def undo() -> None:
        for one in unhook:
            one()
        uninstall()

    return undo


def follow(module: nn.Module) -> list[Handle]:
    """Hooks on a layer, which know when it is at work and what cache it was given."""
    return [
        module.register_forward_pre_hook(_open, with_kwargs=True),
        module.register_forward_hook(_close, always_call=True),
    ]


@dataclass(eq=False)
class Frame:
    """One layer at work in this thread: what its projections gave, and whether its keys have met their columns."""

    module: nn.Module
    active: ActiveReads | None
    caught: dict[str, Tensor]
    call: FrameType | None
    """Of the layer: while it runs, the layer is at work."""
    asks: Tensor | None = None

    def rows(self, batch: int) -> tuple[int, ...] | None:
        """Which of several identities each row of a batch is."""
        read = None if self.active is None else self.active.at(self.module, batch)
        return None if read is None else read.arranged

    def widen(self, k: Tensor) -> Tensor:
        """Keys as the model turned them, with their columns; the columns of the queries are kept for the call."""
        read = None if self.active is None else self.active.at(self.module, k.shape[0])
        if read is None or not read.wide:
            return k
        self.asks, tells = read.columns(self.caught["q"], self.caught["k"])
        return torch.cat([k, tells.to(k.dtype)], -1)


class _ThreadFrame(threading.local):
    frame: Frame | None = None
    first: Tensor | None = None
    met: tuple[Tensor, tuple[ActiveReads, int], Tensor] | None = None


_LOCAL = _ThreadFrame()


def _now() -> tuple[Filler, Frame | None]:
    """Who fills a cache in this thread, at this moment."""
    frame, way = _at_work(), flight()
    who = None if frame is None or frame.active is None else frame.active.digest
    return Filler(who, "" if way is None else way.name), frame


def _at_work() -> Frame | None:
    """The layer that is at work in this thread; one that was interrupted has told nobody, and speaks for nobody."""
    if _LOCAL.frame is not None and _LOCAL.frame.call is not None and has_ended(_LOCAL.frame.call):
        _LOCAL.frame = None
    return _LOCAL.frame


def _caught(module: nn.Module, name: str, x: Tensor) -> None:
    frame = _LOCAL.frame
    if frame is not None and frame.module is module and frame.active is not None:
        frame.caught[name] = x


def _open(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    expect_original(module)
    here = reader_of(module)
    _LOCAL.frame = Frame(module, here if isinstance(here, ActiveReads) else None, {}, call_of(inspect.currentframe()))
    cache = _given(module, args, kwargs).get("past_key_values")
    if cache is not None:
        guard(cache, int(getattr(module, "layer_idx", None) or 0), _now()[0], _now)


def _close(module: nn.Module, args: object, out: object) -> None:
    _LOCAL.frame = None


def _placed(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
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


def _given(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, Any]:
    """Arguments of a forward by their names."""
    names = _NAMES.get(type(module))
    if names is None:
        names = _NAMES[type(module)] = list(inspect.signature(type(module).forward).parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


__all__ = ["attach_for_all", "follow", "reading"]
