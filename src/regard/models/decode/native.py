"""Products in C, compiled on the first use where a compiler is found; everything runs without them, only slower.

torch's products are made for many rows. For a few, on AVX2, these read weights at the memory's speed from one core already, take
int8 weights without rounding activations to bytes, and cost 3 µs to call; for many they are as fast. A row's numbers are the same bits
however many rows there are. REGARD_NATIVE=0 turns them off, and `reason()` says why they are not used. C checks nothing, so every
shape, type and stride is checked here.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from threading import Lock, Thread
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ... import compiled
from ...errors import ShapeError
from .int8_cache import GROUP, Bytes
from .tiles import Tiles

SOURCE = Path(__file__).with_name("products.c")

ROWS = 1 << 20
"""Rows at most, so that no product of sizes overflows."""
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu")
"""As meeting.h counts them."""
_P, _L, _I, _D = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double
_SIGNATURES: compiled.Signatures = {
    "product": ([_P, _P, _P, _L, _I, _I], _I),
    "step": ([*[_P] * 9, *[_L] * 5, _I], _I),
    "peak": ([_P, _L], _L),
    "use_wide": ([_I], _I),
    "checksum": ([_P, _L, _I], ctypes.c_uint64),
    "rms": ([_P, _P, _D, _P, _L, _L], None),
    "layer_norm": ([_P, _P, _P, _D, _P, _L, _L], None),
    "act": ([_P, _P, _L, _L, _I, _I], None),
    "meet": ([_P, _P, _P, _P, _P, *[_L] * 6, _D, _I], _I),
}


class Text(ctypes.Structure):
    """A text and its new tokens as meeting.h reads them; whoever keeps it keeps the tensors that its addresses are of."""

    _fields_: ClassVar = (
        [(n, _P) for n in ("left", "signs", "bias", "k", "v")]
        + [(n, _L) for n in ("first", "tokens", "length", "capacity", "lead", "head", "R", "W")]
        + [(n, _P) for n in ("k_scales", "v_scales")]
    )


def serves(x: Tensor) -> bool:
    """True where C takes x (rows, in): plain float32 on the CPU, and no gradient asked."""
    if type(x) is not Tensor or x.dtype is not _F32 or not x.is_cpu or x.requires_grad or library() is None:
        return False
    shape = x.shape
    return len(shape) == 2 and 0 < shape[0] <= ROWS and shape[1] > 0


class Linear(ctypes.Structure):
    """Matrices as products.c reads them."""

    _fields_: ClassVar = [(n, _P) for n in ("weights", "biases", "outs", "kinds", "scales")] + [
        (n, _L) for n in ("parts", "inside", "total", "needs")
    ]


Weight = Tensor | Tiles
"""A matrix (out, in): float32, int8, or codes in tiles."""


class Matrices:
    """Weights (out, in), read where they lie, their outputs side by side: float32, int8 with a scale per output, or tiles."""

    def __init__(
        self, weights: Sequence[Weight], biases: Sequence[Tensor | None], scale: Tensor | Sequence[Tensor] | None = None
    ) -> None:
        inside = weights[0].shape[-1]
        scales = [None] * len(weights) if scale is None else [scale] if isinstance(scale, Tensor) else scale
        kinds, needs = list[int](), 0
        if len(scales) != len(weights):
            raise ShapeError(f"{len(weights)} int8 matrices and {len(scales)} scales; each has its own")
        for w, b, one in zip(weights, biases, scales, strict=True):
            if isinstance(w, Tiles):
                if w.shape[1] != inside or w.data.numel() != w.nbytes:
                    raise ShapeError(f"tiles of {tuple(w.shape)} in {w.data.numel():,} bytes beside weights of width {inside}")
                _require(w.data, "a tile", (w.nbytes,), torch.uint8)
            else:
                _require(w, "a weight", (w.shape[0], inside), torch.float32 if one is None else torch.int8)
            if one is not None:
                _require(one, "the scale", (w.shape[0],))
            if b is not None:
                _require(b, "a bias", (w.shape[0],))
            kinds.append(w.kind.number if isinstance(w, Tiles) else 0 if one is None else 1)
            needs |= 4 if isinstance(w, Tiles) else 1 if one is None else 2
        if inside < 1:
            raise ShapeError(f"a weight is {tuple(weights[0].shape)}: there is nothing to multiply")
        tensors = [w.data if isinstance(w, Tiles) else w for w in weights]
        # Detached aliases hold the memory for as long as its addresses are kept here.
        self.held = [x.detach() for x in (*tensors, *biases, *scales) if x is not None]
        self.inside, parts = inside, len(weights)
        self.outs = [w.shape[0] for w in weights]
        self.outside = sum(self.outs)
        self._arrays = (
            (_P * parts)(*(w.data_ptr() for w in tensors)),
            (_P * parts)(*(None if b is None else b.data_ptr() for b in biases)),
            (_L * parts)(*self.outs),
            (_L * parts)(*kinds),
            (_P * parts)(*(None if x is None else x.data_ptr() for x in scales)),
        )
        self.record = Linear(*map(ctypes.addressof, self._arrays), parts, inside, self.outside, needs)
        self.address = ctypes.addressof(self.record)


def product(x: Tensor, matrices: Matrices, onto: Tensor | None = None) -> Tensor | None:
    """x (rows, in) with matrices (out, in); `onto` (rows, out) is added to, in place. None where C does not serve x."""
    # `serves`, written out: this runs a hundred times and more for every token.
    if type(x) is not Tensor or x.dtype is not _F32 or not x.is_cpu or x.requires_grad or (c := library()) is None:
        return None
    shape = x.shape
    if len(shape) != 2:
        return None
    rows, inside = shape
    if not 0 < rows <= ROWS:
        return None
    total = matrices.outside
    if inside != matrices.inside:
        raise ShapeError(f"x is {_said(x)}; these weights take rows of width {matrices.inside}")
    source = x.data_ptr()
    if source & 3 or not x.is_contiguous() or x.is_neg():
        # A negated view is contiguous too, and its memory holds the opposite.
        x = x.resolve_neg().clone(memory_format=torch.contiguous_format)
        source = x.data_ptr()
    if onto is None:
        y = torch.empty((rows, total))
        y = y if y.dtype is _F32 and y.is_cpu else x.new_empty((rows, total))
        target = y.data_ptr()
    else:
        y = onto
        if y.shape != (rows, total) or type(y) is not Tensor or y.dtype is not _F32 or y.requires_grad or not _lies(y):
            raise ShapeError(f"onto is {_said(y)}; it is written in place, and has to be ({rows}, {total}), contiguous float32")
        target = y.data_ptr()
        if source < target + 4 * rows * total and target < source + 4 * rows * inside:
            x = x.clone()
            source = x.data_ptr()
    failed: int = c.product(source, matrices.address, target, rows, onto is not None, torch.get_num_threads())
    if failed:
        raise MemoryError(f"no memory is left for a copy of {rows} rows of width {inside}")
    return y


def checksum(x: Tensor) -> int | None:
    """A number that changes with any byte of x and with their order. None where C cannot read x."""
    c = library()
    if c is None or type(x) is not Tensor or not x.is_cpu or not x.is_contiguous() or x.is_neg():
        return None
    return c.checksum(x.data_ptr(), x.numel() * x.element_size(), torch.get_num_threads())


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
    """x / sqrt(mean of x² + eps) · weight, row by row. None where C does not serve them."""
    if not serves(x) or not _lies(x):
        return None
    rows, width = x.shape
    if weight.shape != (width,) or type(weight) not in _PLAIN or weight.dtype is not _F32 or not _lies(weight):
        if weight.shape != (width,):
            raise ShapeError(f"weight is {_said(weight)}; rows of width {width} have as many")
        return None
    y = _empty(x, rows, width)
    library().rms(x.data_ptr(), weight.data_ptr(), eps, y.data_ptr(), rows, width)
    return y


def layer_norm(x: Tensor, weight: Tensor, shift: Tensor | None, eps: float) -> Tensor | None:
    """(x - mean) / sqrt(variance + eps) · weight + shift, row by row. None where C does not serve them."""
    if not serves(x) or not _lies(x):
        return None
    rows, width = x.shape
    for name, w in (("weight", weight), ("shift", shift)):
        if w is not None and w.shape != (width,):
            raise ShapeError(f"{name} is {_said(w)}; rows of width {width} have as many")
        if w is not None and not readable(w):
            return None
    y = _empty(x, rows, width)
    shifts = None if shift is None else shift.data_ptr()
    library().layer_norm(x.data_ptr(), weight.data_ptr(), shifts, eps, y.data_ptr(), rows, width)
    return y


def act(x: Tensor, kind: str, gated: bool = False) -> Tensor | None:
    """An activation of each row or, where gated, of its first half times its second. None where C does not serve x."""
    if not serves(x) or not _lies(x):
        return None
    rows, width = x.shape
    if kind not in ACTIVATIONS:
        raise ShapeError(f"kind={kind!r} is not one of {', '.join(ACTIVATIONS)}")
    if gated and width % 2:
        raise ShapeError(f"x is {_said(x)}; gate and up are equal halves of its rows")
    y = _empty(x, rows, width // 2 if gated else width)
    library().act(x.data_ptr(), y.data_ptr(), rows, y.shape[1], gated, ACTIVATIONS.index(kind))
    return y


Room = Tensor | Bytes
"""Keys or values (G, capacity, W), float32 or bytes."""


def text(
    k: Room, v: Room, heads: tuple[int, int], left: Tensor | None = None, signs: Tensor | None = None,
    bias: Tensor | None = None, *, lead: int = 0, head: int = 1,
) -> Text:  # fmt: skip
    """A text whose keys and values lie in k and v (G, capacity, W), for (G, D) heads; `meet` fills its tokens in."""
    (G, D), (_, capacity, W) = heads, k.shape if len(k.shape) == 3 else (0, 0, 0)
    R = 0 if left is None else left.shape[-2]
    if left is not None:
        _require(left, "left", (G, R, D))
        if signs is None:
            raise ShapeError(f"left is {_said(left)} without signs; each of its {R} columns has one")
        _require(signs, "signs", (R,))
    if bias is not None:
        _require(bias, "bias", (G, D))
    if type(k) is not type(v) and (isinstance(k, Bytes) or isinstance(v, Bytes)):
        raise ShapeError(f"k is {type(k).__name__} and v {type(v).__name__}; both are numbers, or both are bytes")
    for name, x in (("k", k), ("v", v)):
        if isinstance(x, Bytes):
            _require(x.q, name, (G, capacity, W), torch.int8)
            _require(x.scale, f"the scale of {name}", (G, capacity, -(-W // GROUP)), torch.bfloat16)
        else:
            _require(x, name, (G, capacity, W))
    if W < D + R + 1 and (W != D or R or bias is not None):
        raise ShapeError(
            f"the cache keeps keys {W} wide, and this identity reads {D + R + 1} columns (heads of {D}, {R} of the trace, 1): "
            "a cache is read by whoever filled it"
        )
    if not 0 <= lead <= capacity or head < 0:
        raise ShapeError(f"{lead} slots in a room for {capacity}, behind a head of {head}")
    addresses = (None if x is None else x.data_ptr() for x in (left, signs, bias))
    rooms = [x.q if isinstance(x, Bytes) else x for x in (k, v)]
    scales = [x.scale.data_ptr() if isinstance(x, Bytes) else None for x in (k, v)]
    return Text(*addresses, *(x.data_ptr() for x in rooms), 0, 0, lead, capacity, lead, head, R, W, *scales)


def meet(
    x: Tensor, angles: tuple[Tensor, Tensor] | None, texts: ctypes.Array[Text], counts: Sequence[int], lengths: Sequence[int],
    heads: tuple[int, int, int], scale: float,
) -> Tensor:  # fmt: skip
    """New tokens meet the keys of their own texts, which get theirs: heads (tokens, H·D) of x (tokens, (H + 2G)·D), not turned.

    The tokens of text i are the next counts[i] rows of x, and it has lengths[i] already.
    """
    (H, G, D), tokens = heads, x.shape[0]
    if G < 1 or H % G or D < 1:
        raise ShapeError(f"{H} query heads over {G} key heads of width {D}: H is a multiple of G")
    _require(x, "x", (tokens, (H + 2 * G) * D))
    first = 0
    for t, n, length in zip(texts, counts, lengths, strict=True):
        if n < 1 or length < 0 or t.lead + length + n > t.capacity or t.W < D:
            raise ShapeError(
                f"{n} tokens after {length} and {t.lead} slots, in a room for {t.capacity} keys of width {t.W}; each text has new "
                f"ones, and room for them"
            )
        t.first, t.tokens, t.length = first, n, t.lead + length
        first += n
    if first != tokens:
        raise ShapeError(f"x is {_said(x)}, and the texts have {first} new tokens")
    if scale == 0:
        raise ShapeError("scale=0: every score would be 0")
    cos, sin = angles or (x, x)
    pairs = 0
    if angles is not None:
        pairs = cos.shape[-1]
        if 2 * pairs > D:
            raise ShapeError(f"cos is {_said(cos)}; heads of width {D} turn by at most {D // 2} angles")
        _require(cos, "cos", (tokens, pairs))
        _require(sin, "sin", (tokens, pairs))
    y = _empty(x, tokens, H * D)
    failed: int = library().meet(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), ctypes.addressof(texts), y.data_ptr(), len(texts), x.shape[1], H, G, D,
        pairs, scale, torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError(f"no memory is left for the scores of {tokens} tokens")
    return y


NEAR = 64
"""Rows that `step` takes at most."""


class Norm(ctypes.Structure):
    _fields_: ClassVar = [("weight", _P), ("shift", _P), ("eps", _D), ("centred", _L)]


class Layer(ctypes.Structure):
    """A layer as step.h reads it."""

    _fields_: ClassVar = [
        *((n, _P) for n in ("qkv", "out", "into", "down")), ("before", Norm), ("between", Norm),
        *((n, _L) for n in ("kind", "gated", "H", "G", "D", "pairs")), ("scale", _D),
    ]  # fmt: skip


class Whole:
    """All layers of a model, for `step`: what it holds is checked here, once."""

    def __init__(self, layers: Sequence[Layer], matrices: Sequence[Matrices], norm: Norm | None, head: Matrices | None) -> None:
        """Layers name the matrices by their addresses; these are held here, four of each layer in the order of their use."""
        self.held, self.depth = [*matrices, head], len(layers)
        self.layers = (Layer * self.depth)(*layers)
        self.norm, self.head = norm, head
        self.width = matrices[0].inside
        self.pairs, self.widest_head = layers[0].pairs, max(x.D for x in layers)
        for x, four in zip(layers, zip(*[iter(matrices)] * 4, strict=True), strict=True):
            qkv, out, into, down = four
            H, G, D, hidden = x.H, x.G, x.D, down.inside
            fits = (
                x.kind in range(len(ACTIVATIONS)) and x.scale != 0 and G > 0 and H % G == 0 and 0 <= 2 * x.pairs <= D and x.pairs == self.pairs
                and [x.qkv, x.out, x.into, x.down] == [m.address for m in four]
                and (qkv.inside, qkv.outside) == (self.width, (H + 2 * G) * D) and (out.inside, out.outside) == (H * D, self.width)
                and into.inside == self.width and into.outs == [hidden] * (1 + x.gated) and down.outside == self.width
            )  # fmt: skip
            if not fits:
                raise ShapeError(
                    f"a layer of {H} heads over {G} of width {D} with products {[(m.inside, m.outside) for m in four]}: "
                    f"they do not fit rows of width {self.width}"
                )
        if head is not None and (norm is None or head.inside != self.width):
            raise ShapeError(f"the head takes rows of {head.inside}, and the layers leave {self.width}")


class Texts:
    """Texts (depth, count) in one array, whose new tokens are filled in for all layers at once."""

    def __init__(self, layers: Sequence[Sequence[Text]], turns: Sequence[int]) -> None:
        """`turns`: which of the angles of a call each layer turns by."""
        self.depth, self.count = len(layers), len(layers[0])
        if not self.count or any(len(texts) != self.count for texts in layers) or len(turns) != self.depth:
            raise ShapeError(f"{self.depth} layers have {[len(t) for t in layers]} texts and {len(turns)} turns")
        self.array = (Text * (self.depth * self.count))(*(t for texts in layers for t in texts))
        # Every field of a text is eight bytes.
        table = torch.frombuffer(self.array, dtype=torch.int64).view(self.depth, self.count, -1)
        self._first, self._tokens, self._length = (table[..., i] for i in (5, 6, 7))
        self._lead = table[..., 9].clone()
        self.rooms: list[int] = (table[..., 8] - self._lead).amin(dim=0).tolist()
        self.narrowest = min(t.W for texts in layers for t in texts)
        self.turns, self.angles = (_L * self.depth)(*turns), 1 + max(turns)
        self._counts: list[int] = []
        self.tokens = 0
        """New ones, of all texts."""

    def layer(self, i: int) -> ctypes.Array[Text]:
        """The texts of one layer, in the memory of all of them, for `meet` to fill in."""
        self._counts = []
        return (Text * self.count).from_buffer(self.array, i * self.count * ctypes.sizeof(Text))

    def place(self, counts: Sequence[int], lengths: Sequence[int]) -> int:
        """Text i has lengths[i] tokens and gets counts[i] new ones, the next rows of a call; gives how many rows they are."""
        for n, length, room in zip(counts, lengths, self.rooms, strict=True):
            if n < 1 or length < 0 or length + n > room:
                raise ShapeError(f"{n} tokens after {length} in a room for {room}; each text has new ones, and room for them")
        if self._counts != counts:
            self._counts = list(counts)
            starts = [0, *itertools.accumulate(counts)]
            self._first.copy_(torch.tensor(starts[:-1]))
            self._tokens.copy_(torch.tensor(self._counts))
        torch.add(self._lead, lengths[0] if self.count == 1 else torch.tensor(lengths), out=self._length)
        self.tokens = sum(counts)
        return self.tokens


def step(
    whole: Whole, x: Tensor, angles: Sequence[tuple[Tensor, Tensor] | None], texts: Texts, picks: Sequence[int] = ()
) -> Tensor | None:
    """Rows x go through all layers, in place; logits (picks, V) of some of them where there is a head. `texts` are placed."""
    rows = x.shape[0]
    _require(x, "x", (rows, whole.width))
    if not 0 < rows <= NEAR or texts.depth != whole.depth or texts.narrowest < whole.widest_head or len(angles) < texts.angles:
        raise ShapeError(
            f"{rows} rows with {len(angles)} turns, and texts of {texts.depth} layers whose keys are {texts.narrowest} wide; {NEAR} rows "
            f"at most go through {whole.depth} layers whose heads are {whole.widest_head} wide"
        )
    if texts.tokens != rows:
        raise ShapeError(f"x is {_said(x)}, and the texts have {texts.tokens} new tokens")
    turns = (_P * (2 * len(angles)))()
    for i, pair in enumerate(angles):
        if pair is not None:
            for name, part in zip(("cos", "sin"), pair, strict=True):
                _require(part, name, (rows, whole.pairs))
        cos, sin = pair or (x, x)
        turns[2 * i], turns[2 * i + 1] = cos.data_ptr(), sin.data_ptr()
    if whole.pairs and None in angles:
        raise ShapeError(f"heads turn by {whole.pairs} angles, and there are none")
    if any(not 0 <= i < rows for i in picks):
        raise ShapeError(f"rows {list(picks)} of {rows} are to be read out")
    logits, head = None, whole.head if picks else None
    if head is not None:
        logits = _empty(x, len(picks), head.outside)
    chosen = (_L * len(picks))(*picks)
    failed: int = library().step(
        ctypes.addressof(whole.layers), ctypes.addressof(turns), ctypes.addressof(texts.turns), ctypes.addressof(texts.array),
        None if head is None else ctypes.addressof(whole.norm), None if head is None else head.address,  # pyright: ignore
        ctypes.addressof(chosen), x.data_ptr(), None if logits is None else logits.data_ptr(), whole.depth, texts.count, rows,
        whole.width, len(picks), torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError(f"no memory is left for {rows} rows in {whole.depth} layers")
    return logits


def peaks(logits: Tensor) -> list[int] | None:
    """The most likely token of each row (the first of equals), -1 where a row is not finite. None where C does not serve them."""
    if not serves(logits) or not _lies(logits):
        return None
    (rows, width), at, find = logits.shape, logits.data_ptr(), library().peak
    return [find(at + 4 * width * r, width) for r in range(rows)]


@cache
def library() -> Any:
    """The compiled library, or None where it cannot be had."""
    # Whoever asks while it is being compiled waits for that, and does not compile it again.
    with _LOADING:
        return _loaded()[0]


def begin() -> Thread:
    """Have it compiled beside other work, before the first product asks for it."""
    thread = Thread(target=library, name="regard-native", daemon=True)
    thread.start()
    return thread


def reason() -> str | None:
    """Why torch multiplies instead; None where C does."""
    return None if library() is not None else _loaded()[1] or "it was turned off"


def bound(path: str) -> ctypes.CDLL:
    """The library in a file, with the types of its functions."""
    return compiled.bound(path, _SIGNATURES)


@cache
def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    return compiled.loaded(SOURCE, _SIGNATURES)


_LOADING = Lock()
_PLAIN = (Tensor, nn.Parameter)
_F32 = torch.float32


def _lies(x: Tensor) -> bool:
    # A negated view is contiguous too, and its memory holds the opposite.
    return x.is_cpu and x.is_contiguous() and not x.is_neg() and not x.data_ptr() & 3


def _empty(x: Tensor, *shape: int) -> Tensor:
    # Half as long as x.new_empty; but torch's default may be of another size, or on another device.
    y = torch.empty(shape)
    return y if y.dtype is torch.float32 and y.is_cpu else x.new_empty(shape)


def readable(x: Tensor, shape: tuple[int, ...] | None = None, kind: torch.dtype = torch.float32) -> bool:
    """True where C can read x as it lies, and it has this shape."""
    # Subclasses (DTensor, functional and fake tensors) have no memory of their own; a negated view holds the opposite.
    return (
        (shape is None or x.shape == shape)
        and x.dtype is kind
        and x.is_cpu
        and x.is_contiguous()
        and type(x) in _PLAIN
        and not x.is_neg()
        and not x.data_ptr() & (min(kind.itemsize, 4) - 1)
    )


def _require(x: Tensor, name: str, shape: tuple[int, ...], kind: torch.dtype = torch.float32) -> None:
    if not readable(x, shape, kind):
        raise ShapeError(f"{name} is {_said(x)}; C reads ({', '.join(map(str, shape))}) of {kind}, contiguous, on the CPU")


def _said(x: Tensor) -> str:
    strides = "" if x.layout is not torch.strided or x.is_contiguous() else f" with strides {tuple(x.stride())}"
    return f"{tuple(x.shape)} of {x.dtype} on {x.device}{strides}"
