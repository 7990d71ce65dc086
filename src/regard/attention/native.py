"""Selections in C (`rows.c`), compiled on the first use where a compiler is found; tiles of torch do the same, only slower.

One call is one parallel piece of work: blocks of query rows are handed out one by one, a block's scores stay in its core's cache,
and nobody waits for a thread that has not got a core. REGARD_NATIVE=0 turns it off; `why_not` says why a problem is left to torch.
C checks nothing, so every shape, type and stride is checked here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .. import compiled
from ..geometry.base import Lowered
from ..geometry.euclidean import Distance
from ..selection.base import Kernel
from .allow import All, Allow, Both, BoundPadding, Causal, Document, Mask, Prefix, Tile, Window, allowed_in
from .problem import Problem, not_finite

SOURCE = Path(__file__).with_name("rows.c")
MOST = 1 << 24
"""Keys at most: their numbers pass through float32."""
ROWS = 256
"""Rows of one call under a rule that C does not know, whose mask torch makes."""
SHARES = 8
"""Into how many pieces, at least, backward is cut where there are rows enough; each has gradients of its own for keys and values."""
_KINDS = {"relaxed": 0, "entmax": 1, "topk": 2, "picks": 3}
_SOFTMAX = Kernel("relaxed")
_NOT_FINITE, _NO_MEMORY = 1, 2
_P, _L, _D = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_POINTERS = (
    "q", "k", "v", "out", "bias", "alpha", "slot_score", "slot_value", "mask", "ids", "first", "last", "top", "best",
    "slope",
)  # fmt: skip
_NUMBERS = (
    "B", "H", "G", "Q", "K", "W", "E", "slots", "k_kept",
    "q_batch", "q_head", "q_row", "k_batch", "k_head", "k_row", "v_batch", "v_head", "v_row",
    "start", "stop", "offset", "back", "ahead", "low", "high", "bias_heads", "bias_batch",
    "mask_batch", "mask_head", "mask_row", "mask_key", "mask_first", "ids_batch",
)  # fmt: skip
_GRADIENTS = ("grad", "dq", "dk", "dv", "d_bias", "d_alpha", "d_slot_score", "d_slot_value")


class Call(ctypes.Structure):
    """A call as rows.c reads it; the tensors that its addresses are of live as long as it is used."""

    _fields_: ClassVar = [
        *((n, _P) for n in _POINTERS),
        *((n, _L) for n in _NUMBERS),
        *((n, _P) for n in _GRADIENTS),
        ("splits", _L),
        ("scale_by", _D),
        ("excess", _D),
        ("kind", _L),
        ("tie_right", _L),
        ("threads", _L),
        ("own", _L * 8),
    ]


class Centre(ctypes.Structure):
    """Keys and queries to be centred, as rows.c reads them."""

    _fields_: ClassVar = [
        *((n, _P) for n in ("q", "k", "new_q", "new_k", "bias")),
        *((n, _L) for n in ("B", "H", "G", "Q", "K", "W", "q_batch", "q_head", "q_row", "k_batch", "k_head", "k_row")),
        ("c", _D),
        ("threads", _L),
        ("own", _L),
    ]


SIGNATURES: compiled.Signatures = {
    "rows_centre": ([ctypes.POINTER(Centre)], ctypes.c_int),
    "rows_backward": ([ctypes.POINTER(Call)], ctypes.c_int),
    "rows_attend": ([ctypes.POINTER(Call)], ctypes.c_int),
    "rows_use_wide": ([ctypes.c_int], ctypes.c_int),
}


@cache
def library() -> Any:
    """The compiled library, or None where it cannot be had."""
    return _loaded()[0]


def reason() -> str | None:
    """Why torch selects instead; None where C does."""
    return None if library() is not None else _loaded()[1] or "it was turned off"


@cache
def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    return compiled.loaded(SOURCE, SIGNATURES)


def kernel_of(p: Problem) -> Kernel | None:
    """The row map as C has it, or None."""
    if p.inner.both_sides or p.inner.carries or p.inner.weighs_vectors:
        return None
    if p.inner.softmax_temperature is not None:
        return _SOFTMAX if p.inner.softmax_temperature == 1.0 else None
    made = p.kernel
    # GD among all coherent keys is a softmax with keys refused, which C has not.
    return None if made is None or made.kind == "relaxed" else made


def why_not(p: Problem) -> str | None:
    """Why C does not run a problem; None where it does."""
    # Asked by the plan, by whoever lowers and by whoever runs: the answer stays with the problem.
    known, with_library = vars(p), library()
    if "why_not_native" not in known or known["why_not_native"][0] is not with_library:
        known["why_not_native"] = with_library, _why_not(p)
    return known["why_not_native"][1]


def _why_not(p: Problem) -> str | None:
    if kernel_of(p) is None:
        return f"{p.inner.name} is not written in C"
    if p.points:
        return "C reads values, and pointer returns the weights themselves"
    if p.q.device.type != "cpu":
        return f"C is for the CPU, and these tensors are on {p.q.device}"
    if p.q.dtype == torch.float64:
        return "C computes in float32"
    if not p.geometry.lowers:
        return f"{p.geometry.name} is no dot product"
    if p.spec.position.biases and p.spec.position.slope_per_head(1) is None:
        return f"{p.spec.position.name} adds a bias to each pair, and no line by distance"
    if p.k.shape[2] >= MOST:
        return f"there are {p.k.shape[2]} keys, and C counts to {MOST}"
    return reason()


@dataclass(frozen=True)
class Met:
    """Which keys a query meets, as C reads it: those from `back` before it to `ahead` after it, and all else that is given."""

    back: int = -1
    ahead: int = -1
    high: int = MOST
    padding: BoundPadding | None = None
    ids: Tensor | None = None
    mask: Tensor | None = None


def met(allow: Allow) -> Met | None:
    """A bound rule as C reads it; None where it cannot be written so."""
    # By the very type: a rule that somebody derived from one of these may allow something else.
    written = _MET.get(type(allow))
    return None if written is None else written(allow)


def _met_both(both: Both) -> Met | None:
    x, y = met(both.a), met(both.b)
    if x is None or y is None:
        return None
    if any(getattr(x, n) is not None and getattr(y, n) is not None for n in ("padding", "ids", "mask")):
        return None
    back, ahead = (max(s, t) if min(s, t) < 0 else min(s, t) for s, t in ((x.back, y.back), (x.ahead, y.ahead)))
    ids, mask = (s if t is None else t for s, t in ((x.ids, y.ids), (x.mask, y.mask)))
    return Met(back, ahead, min(x.high, y.high), x.padding or y.padding, ids, mask)


_MET: dict[type[Allow], Callable[[Any], Met | None]] = {
    All: lambda _: Met(),
    Causal: lambda _: Met(ahead=0),
    Window: lambda a: Met(back=int(a.keys) - 1, ahead=int(a.ahead)),
    Prefix: lambda a: Met(high=min(int(a.n), MOST)),
    BoundPadding: lambda a: Met(padding=a),
    Document: lambda a: Met(ids=a.ids),
    Mask: lambda a: Met(mask=a.allowed),
    Both: _met_both,
}


def softens(p: Problem) -> bool:
    """True where C is the faster softmax: several rows, nothing trained, and vectors of sixteen; by eight torch's kernel is as fast.

    Where each pair has a bias, torch's kernel with a row of them is as fast at 1024 keys, and at 4096 the faster one.
    """
    rows = p.q.shape[1] // p.k.shape[1] * p.q.shape[2]
    if rows < 4 or p.spec.position.biases or p.inner.softmax_temperature != 1.0 or why_not(p) is not None or not _is_wide():
        return False
    return not _trains(p)


def _trains(p: Problem) -> bool:
    """True where a gradient may be asked for: a traced call is run without one first, with a memo for its backward."""
    if not torch.is_grad_enabled() and p.memo is None:
        return False
    return any(x.requires_grad for x in (p.q, p.k, p.v, *(x for _, x in p.state.tensors() if isinstance(x, Tensor))))


@cache
def _is_wide() -> bool:
    return bool(library().rows_use_wide(1))


def lower(p: Problem) -> Lowered:
    """The problem as a dot product; a distance in one piece of work where C runs it and nothing trains."""
    if not isinstance(p.geometry, Distance) or _trains(p) or why_not(p) is not None:
        return p.lower()
    q, k = p.turn(p.q, p.k)
    if not (_readable(q) and _readable(k)) or 0 in q.shape or 0 in k.shape:
        return p.lower()
    q, k = _rows_adjacent(q), _rows_adjacent(k)
    (B, H, Q, W), (_, G, K, _) = q.shape, k.shape
    c = p.geometry.factor(W)
    new_q, new_k, bias = q.new_empty(B, H, Q, W), k.new_empty(B, G, K, W), k.new_empty(B, G, K)
    call = Centre(
        q.data_ptr(), k.data_ptr(), new_q.data_ptr(), new_k.data_ptr(), bias.data_ptr(), B, H, G, Q, K, W,
        *q.stride()[:3], *k.stride()[:3], c, torch.get_num_threads(),
    )  # fmt: skip
    _done(p, library().rows_centre(ctypes.byref(call)))
    return Lowered(new_q, new_k, 2 * c, bias, lambda: -c * new_q.square().sum(-1))


def takes(p: Problem, tensors: Iterable[Tensor]) -> bool:
    """True where C runs a problem that was lowered to these tensors."""
    return why_not(p) is None and all(map(_readable, tensors))


def attend(p: Problem, x: Mapping[str, Tensor], scale: float) -> Tensor:
    """The output of a problem that C takes, from its lowered tensors, named as tiles name them; an error where it is not finite."""
    kernel = kernel_of(p)
    assert kernel is not None
    held: list[Tensor] = []
    call = _call(p, x, scale, kernel, held)
    B, H, Q = call.B, call.H, call.Q
    threshold = None if p.refusal is None else p.refusal.threshold
    out = torch.empty((B, H, Q, call.E), dtype=torch.float32, device="cpu")
    top = None if threshold is None else out.new_empty(B, H, Q)
    best = None if kernel.least is None else out.new_empty(B, H, Q)
    call.out, call.top, call.best = out.data_ptr(), _address(top, held), _address(best, held)
    _run(p, call, held, library().rows_attend)
    kept: Tensor | None = None
    if best is not None and kernel.least is not None:
        kept = (best + x["row_bias"] if "row_bias" in x else best) >= kernel.least
    if top is not None and threshold is not None:
        reached = (top + x["row_bias"] if "row_bias" in x and not p.inner.absolute else top) >= threshold
        kept = reached if kept is None else kept & reached
    return out if kept is None else out.mul_(kept.unsqueeze(-1))


def differentiates(p: Problem, tensors: Iterable[Tensor]) -> bool:
    """True where C has the gradients of a problem too: of the row maps with few weights that are not zero, none of them refused."""
    kernel = kernel_of(p)
    lists = kernel is not None and kernel.kind in ("entmax", "topk")
    return lists and (p.refusal is None or p.refusal.threshold is None) and takes(p, tensors)


def gradients(p: Problem, x: Mapping[str, Tensor], scale: float, grad: Tensor) -> dict[str, Tensor]:
    """The gradients of all lowered tensors, given the output's. Forward is done again: its scores are nowhere."""
    kernel = kernel_of(p)
    assert kernel is not None
    held: list[Tensor] = []
    call = _call(p, x, scale, kernel, held)
    B, H, G, Q, K, W, E, slots = (getattr(call, n) for n in ("B", "H", "G", "Q", "K", "W", "E", "slots"))
    # As many shares of the work whatever the number of threads, so that sums are made in one order.
    call.splits = S = max(1, min(SHARES // (B * G), -(-H // G * Q // 64)))
    call.grad = _address(grad.float().contiguous(), held)

    def zeros(name: str, *shape: int) -> Tensor:
        made = torch.zeros(shape, dtype=torch.float32, device="cpu")
        setattr(call, name, _address(made, held))
        return made

    dq, dk, dv = zeros("dq", B, H, Q, W), zeros("dk", S, B, G, K, W), zeros("dv", S, B, G, K, E)
    d_bias = d_score = d_value = d_alpha = None
    if "key_bias" in x:
        heads = x["key_bias"].shape[1]
        d_bias = zeros("d_bias", S, B, G if heads <= G and G % heads == 0 else H, K)
    if "param.alpha" in x:
        d_alpha = zeros("d_alpha", B, H, Q)
    if slots:
        d_score = zeros("d_slot_score", B, H, Q, slots)
        d_value = zeros("d_slot_value", S, B, H, slots, E) if "slot_value" in x else None
    _run(p, call, held, library().rows_backward)
    found = {"q": dq, "k": dk[0] if S == 1 else dk.sum(0), "v": dv[0] if S == 1 else dv.sum(0)}
    if d_bias is not None:
        bias = x["key_bias"]
        found["key_bias"] = d_bias.sum(0).view(B, bias.shape[1], -1, K).sum(2).sum_to_size(bias.shape)
    if d_alpha is not None:
        found["param.alpha"] = d_alpha.sum((0, 2)).view_as(x["param.alpha"])
    if d_score is not None:
        found["slot_score"] = d_score
        if "row_bias" in x and not p.inner.absolute:
            found["row_bias"] = -d_score.sum(-1)
    if d_value is not None:
        found["slot_value"] = d_value.sum(0)
    return found


def _call(p: Problem, x: Mapping[str, Tensor], scale: float, kernel: Kernel, held: list[Tensor]) -> Call:
    """What forward and backward read; `held` keeps the tensors that the addresses are of."""
    q, k, v = (_rows_adjacent(x[n]) for n in "qkv")
    (B, H, Q, W), (_, G, K, E) = q.shape, v.shape
    call = Call(B=B, H=H, G=G, Q=Q, K=K, W=W, E=E, k_kept=kernel.keep, offset=p.offset)
    held += (q, k, v)
    call.q, call.k, call.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
    call.q_batch, call.q_head, call.q_row, _ = q.stride()
    call.k_batch, call.k_head, call.k_row, _ = k.stride()
    call.v_batch, call.v_head, call.v_row, _ = v.stride()
    call.scale_by, call.kind, call.tie_right = scale, _KINDS[kernel.kind], kernel.right
    call.threads = torch.get_num_threads()
    slopes = p.spec.position.slope_per_head(H)
    if slopes is not None:
        call.slope = _address(torch.tensor(slopes, dtype=torch.float32, device="cpu"), held)
    if kernel.kind == "entmax":
        if kernel.alpha == "learned":
            call.alpha = _address(x["param.alpha"].contiguous(), held)
        else:
            call.excess = kernel.alpha - 1
    if "key_bias" in x:
        bias = x["key_bias"].contiguous()
        call.bias, call.bias_heads, call.bias_batch = (
            _address(bias, held),
            bias.shape[1],
            bias[0].numel() if bias.shape[0] > 1 else 0,
        )
    if "slot_score" in x:
        score = x["slot_score"]
        if "row_bias" in x and not p.inner.absolute:
            score = score - x["row_bias"].unsqueeze(-1)
        call.slots, call.slot_score = score.shape[-1], _address(score.contiguous(), held)
        call.slot_value = _address(x["slot_value"].contiguous(), held) if "slot_value" in x else None
    return call


def _address(x: Tensor | None, held: list[Tensor]) -> int | None:
    if x is None:
        return None
    held.append(x)
    return x.data_ptr()


def _run(p: Problem, call: Call, held: list[Tensor], entry: Callable[[Any], int]) -> None:
    """All rows at once or, under a rule that C does not know, some rows and their mask at a time."""
    keys = met(p.allow)
    if keys is not None:
        # Values that no row reaches are not looked at.
        span = p.allow.span(p.offset, p.offset + call.Q - 1, call.K).clip(call.K)
        call.stop, call.back, call.ahead, call.low, call.high = call.Q, keys.back, keys.ahead, span.lo, min(span.hi, keys.high)
        if keys.padding is not None:
            first, last = (n.to(torch.int64).contiguous() for n in (keys.padding.first, keys.padding.last))
            held += [first, last]
            call.first, call.last = first.data_ptr(), last.data_ptr()
        if keys.ids is not None:
            ids = keys.ids.to(torch.int64).contiguous()
            held.append(ids)
            call.ids, call.ids_batch = ids.data_ptr(), call.K if ids.ndim == 2 and ids.shape[0] > 1 else 0
        if keys.mask is not None:
            _set_mask(call, keys.mask, 0, held)
        _done(p, entry(ctypes.byref(call)))
        return
    for t in _tiles(p):
        call.start, call.stop, call.low, call.high = t.start, t.stop, t.lo, t.hi
        call.back = call.ahead = -1
        # Nothing is kept but the mask of these rows.
        kept: list[Tensor] = []
        _set_mask(call, allowed_in(p.allow, t), t.lo, kept)
        _done(p, entry(ctypes.byref(call)))


def _tiles(p: Problem) -> Iterator[Tile]:
    Q, K = p.q.shape[2], p.k.shape[2]
    for start in range(0, Q, ROWS):
        stop = min(start + ROWS, Q)
        span = p.allow.span(start + p.offset, stop - 1 + p.offset, K).clip(K)
        yield Tile(start, stop, span.lo, span.hi, p.offset, p.q.device)


def _set_mask(call: Call, mask: Tensor, first: int, held: list[Tensor]) -> None:
    held.append(mask)
    call.mask, call.mask_first = mask.data_ptr(), first
    steps = [0 if size == 1 else step for size, step in zip(mask.shape, mask.stride(), strict=True)]
    call.mask_batch, call.mask_head, call.mask_row, call.mask_key = steps


def _done(p: Problem, found: int) -> None:
    if found & _NO_MEMORY:
        raise MemoryError(f"no memory is left for a block of scores with {p.k.shape[2]} keys")
    if found & _NOT_FINITE:
        raise not_finite(p)


def _readable(x: Tensor) -> bool:
    """True where x has memory of its own, of float32 on the CPU; subclasses (fake, functional, distributed) have none."""
    return type(x) in (Tensor, nn.Parameter) and x.dtype is torch.float32 and x.is_cpu and x.layout is torch.strided


def _rows_adjacent(x: Tensor) -> Tensor:
    """x with its last dimension adjacent; a negated view has other numbers in memory than it shows."""
    if (x.stride(-1) == 1 or x.shape[-1] == 1) and not x.is_neg() and not x.data_ptr() & 3:
        return x
    return x.detach().resolve_neg().clone(memory_format=torch.contiguous_format)
