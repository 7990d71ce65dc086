"""GGUF files of LLaMA and Qwen2: metadata and tensors, mapped, and written out as float32 where a weight is made of them.

The header is read here and not by gguf's reader: every length is held against the size of the file before it is believed,
so a damaged or hostile file is an error and never an allocation. llama.cpp keeps q and k of LLaMA with neighbouring
dimensions paired for RoPE; they are put back into the half-split order on the way in.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError, needs_extra
from ...files import require_plain
from ...position import Rope
from ..base import Model
from ..generation_info import GenerationInfo, as_ids
from ..llama import LlamaConfig
from ..packed import KINDS, Kind, PackedWeight
from .fields import DEEPEST, Fields, changed
from .layout import Share, TensorLayout, TensorPlace, assemble

with needs_extra("models"):
    import numpy as np

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
MOST_VALUES = 1 << 23
"""Values in the arrays of one file, all together: the largest vocabularies have a few hundred thousand tokens."""
TOKENIZER = "tokenizer.ggml."
FREQUENCIES = "rope_freqs.weight"
PERMUTED = {"llama": True, "qwen2": False}
"""The architectures read here, and whether q and k have to be put back in order."""


@dataclass(frozen=True)
class TensorInfo:
    shape: tuple[int, ...]
    number: int
    """What the file calls its kind."""
    kind: Kind
    start: int

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.kind.block * self.kind.size


class GGUF:
    """An open file: `metadata` and, by name, tensors."""

    def __init__(self, path: Path) -> None:
        self.origin, self._values = path.name, 0
        if require_plain(path).stat().st_size < 24:
            raise self._bad("it is shorter than a header")
        # Private pages: whoever writes to a tensor that lies here changes no file.
        self._data = np.memmap(path, dtype=np.uint8, mode="c")
        # A view without numpy's own checks: a vocabulary has a hundred thousand strings.
        self._view, self._at = self._data.data, 0
        if bytes(self._take(4)) != b"GGUF":
            raise self._bad("it does not start with GGUF")
        version = self._scalar("<I")
        if version not in (2, 3):
            raise self._bad(f"it is version {version}; 2 and 3 are read (a big-endian file shows a huge number)")
        count, pairs = self._scalar("<Q"), self._scalar("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("<I"))
        self.tensors = self._directory(count)
        self.shapes: Mapping[str, tuple[int, ...]] = {name: info.shape for name, info in self.tensors.items()}

    def read(self, name: str) -> Tensor:
        packed = self.packed(name)
        if packed is not None:
            return packed.unpacked()
        info = self.tensors[name]
        from gguf import GGMLQuantizationType, dequantize

        try:
            values = dequantize(self._raw(info).numpy(), GGMLQuantizationType(info.number))
        except NotImplementedError as error:
            raise self._bad(f"{name} is {info.kind.name}, which gguf cannot dequantise") from error
        return torch.from_numpy(np.require(values, np.float32, ["C", "O", "W"])).reshape(info.shape)

    def packed(self, name: str, heads: int = 0) -> PackedWeight | None:
        """A tensor as it lies in the file; None where its kind is one of those that are rare."""
        info = self.tensors[name]
        return PackedWeight(info.kind, info.shape, self._raw(info), heads) if info.number in KINDS else None

    def _raw(self, info: TensorInfo) -> Tensor:
        whole = self._data[info.start : info.start + info.rows * info.row_bytes]
        return torch.from_numpy(np.asarray(whole).reshape(info.rows, info.row_bytes))

    def _directory(self, count: int) -> dict[str, TensorInfo]:
        entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name, dims = self._string(), self._scalar("<I")
            if not 1 <= dims <= 4 or name in entries:
                raise self._bad(f"tensor {name[:80]!r} has {dims} dimensions or stands there twice")
            # GGUF counts dimensions from the fastest one.
            shape = tuple(self._scalar("<Q") for _ in range(dims))[::-1]
            entries[name] = shape, self._scalar("<I"), self._scalar("<Q")
        align = self.metadata.get("general.alignment", 32)
        if not isinstance(align, int) or not 1 <= align <= 1 << 20:
            raise self._bad(f"general.alignment is {align!r:.40}")
        base = -(-self._at // align) * align
        tensors: dict[str, TensorInfo] = {}
        for name, (shape, number, offset) in entries.items():
            kind = KINDS.get(number) or _rare(number)
            if kind is None:
                raise self._bad(f"{name} has the unknown type {number}")
            if min(shape) < 1 or shape[-1] % kind.block:
                raise self._bad(f"{name} is {shape}, and {kind.name} holds blocks of {kind.block}")
            info = TensorInfo(shape, number, kind, base + offset)
            if info.start + info.rows * info.row_bytes > len(self._data):
                raise self._bad(f"{name} ends past the end of the file: it is cut short")
            tensors[name] = info
        # Tensors that share bytes would let a small file ask for any amount of memory.
        end = 0
        for name, info in sorted(tensors.items(), key=lambda item: item[1].start):
            if info.start < end:
                raise self._bad(f"{name} starts inside the tensor before it")
            end = info.start + info.rows * info.row_bytes
        return tensors

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind in SCALARS:
            return self._scalar(SCALARS[kind])
        if kind != ARRAY:
            raise self._bad(f"a value has the unknown type {kind}")
        inner, count = self._scalar("<I"), self._scalar("<Q")
        self._values += count
        if self._values > MOST_VALUES:
            raise self._bad(f"its arrays announce {self._values:,} values; {MOST_VALUES:,} are read")
        if inner == STRING:
            return self._strings(self._fits(count, 8))
        if inner not in SCALARS:
            raise self._bad(f"an array holds the unknown type {inner}")
        size = struct.calcsize(SCALARS[inner])
        return np.frombuffer(self._take(self._fits(count, size) * size), dtype=SCALARS[inner]).tolist()

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        # A vocabulary has a hundred thousand: each is a length that is held against the file, and its bytes.
        view, at, end, length = self._view, self._at, len(self._view), _LENGTH.unpack_from
        strings: list[str] = []
        try:
            for _ in range(count):
                (size,) = length(view, at)
                if size > end - at - 8:
                    raise self._bad(f"it announces {size} values at byte {at}, more than are left")
                at += 8 + size
                strings.append(str(view[at - size : at], "utf-8"))
        except UnicodeDecodeError as error:
            raise self._bad("a string is not UTF-8") from error
        except struct.error as error:
            raise self._bad(f"it ends inside a string, at byte {at}") from error
        self._at = at
        return strings

    def _scalar(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _fits(self, count: int, size: int) -> int:
        if count * size > len(self._view) - self._at:
            raise self._bad(f"it announces {count} values at byte {self._at}, more than are left")
        return count

    def _take(self, size: int) -> memoryview:
        part = self._view[self._at : self._at + self._fits(size, 1)]
        self._at += size
        return part

    def _bad(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.origin} is not a GGUF file that can be read: {why}")


def _rare(number: int) -> Kind | None:
    """A kind that only `gguf` knows."""
    with needs_extra("models"):
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    known = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}.get(number)
    return None if known is None else Kind(GGMLQuantizationType(number).name, *known)


def load_gguf(path: Path, dtype: torch.dtype, changes: Mapping[str, Any], progress: Share) -> Model:
    file = GGUF(path)
    config, permuted = read_config(file)
    where = layout(config, permuted)
    model = assemble(changed(config, changes), where, file, dtype, progress)
    model.generation_info = _generation_info(file)
    return model


def _generation_info(file: GGUF) -> GenerationInfo:
    """The ids that the file gives its tokens' roles; one that ends a turn ends a text too."""
    c = Fields({k.removeprefix(TOKENIZER): v for k, v in file.metadata.items() if k.startswith(TOKENIZER)}, file.origin)
    bos, eos, eot, pad = (c.ids(f"{name}_token_id") for name in ("bos", "eos", "eot", "padding"))
    ends = list(as_ids([*as_ids(eos), *as_ids(eot)]))
    ids: dict[str, int | list[int] | None] = {"bos_token_id": bos, "pad_token_id": pad}
    if ends:
        ids["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return GenerationInfo({name: i for name, i in ids.items() if i is not None})


def read_config(file: GGUF) -> tuple[LlamaConfig, bool]:
    whole = Fields(file.metadata, file.origin)
    kind = whole.word("general.architecture", tuple(PERMUTED))
    start = f"{kind}."
    c = Fields({k.removeprefix(start): v for k, v in file.metadata.items() if k.startswith(start)}, f"{file.origin}, {kind}")
    if c.values.get("expert_count"):
        raise c.refuse("expert_count", "mixtures of experts are not read here")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.origin} lacks token_embd.weight")
    depth = c.size("block_count", largest=DEEPEST)
    heads, width = c.size("attention.head_count"), c.size("embedding_length")
    head_width = c.size("attention.key_length", max(width // heads, 1))
    rope = _rope(c, head_width, file.read(FREQUENCIES) if FREQUENCIES in file.tensors else None)
    if rope.fraction != 1.0 and PERMUTED[kind]:
        # Pairs of a part of a head would have to be put back in order within that part.
        raise c.refuse("rope.dimension_count", f"heads of {kind} turn whole, and they are {head_width} wide")
    config = LlamaConfig(
        vocabulary=file.tensors["token_embd.weight"].shape[0],
        width=width,
        depth=depth,
        heads=heads,
        key_heads=c.size("attention.head_count_kv", heads),
        hidden=c.size("feed_forward_length"),
        head_width=None if head_width * heads == width else head_width,
        rope=rope,
        # Stored in float32: 1e-5 comes back as 9.9999997e-06.
        eps=float(f"{c.number('attention.layer_norm_rms_epsilon', 1e-5):.6g}"),
        tied="output.weight" not in file.tensors,
        attention_bias="qkv" if "blk.0.attn_q.bias" in file.tensors else False,
        context=c.size("context_length", 2048),
    )
    return config, PERMUTED[kind]


def layout(config: LlamaConfig, permuted: bool) -> TensorLayout:
    block = "blk.{}."
    return TensorLayout(
        {
            "embed": "token_embd",
            "blocks.{}.attention.q": TensorPlace(f"{block}attn_q", heads=config.heads if permuted else 0),
            "blocks.{}.attention.k": TensorPlace(f"{block}attn_k", heads=config.key_heads if permuted else 0),
            "blocks.{}.attention.v": f"{block}attn_v",
            "blocks.{}.attention.out": f"{block}attn_output",
            **{f"blocks.{{}}.ffn.{x}": f"{block}ffn_{x}" for x in ("gate", "up", "down")},
            "blocks.{}.norm_1": f"{block}attn_norm",
            "blocks.{}.norm_2": f"{block}ffn_norm",
            "norm": "output_norm",
            "head": "output",
        },
        spare=(rf"^{re.escape(FREQUENCIES)}$",),
    )


def _rope(c: Fields, head_width: int, divisors: Tensor | None) -> Rope:
    kind = c.word("rope.scaling.type", ("none", "linear", "yarn"), "none")
    fraction = c.size("rope.dimension_count", head_width) / head_width
    rope = Rope(base=c.number("rope.freq_base", 10000.0), fraction=fraction)
    if divisors is not None:
        # Llama 3.1 and later keep what their scaling does to each pair, and not the numbers behind it, which are these.
        known = Rope(rope.base, fraction, scaling="llama3", factor=float(divisors.max()), original=8192)
        made = (rope.rates(head_width)[0] / known.rates(head_width)[0]).float()
        if made.shape != divisors.shape or not torch.allclose(made, divisors, rtol=1e-3):
            raise CheckpointError(f"{c.origin}: {FREQUENCIES} is not Llama 3's scaling of RoPE")
        return known
    if kind == "none":
        return rope
    factor = c.number("rope.scaling.factor")
    if kind == "linear":
        return Rope(rope.base, fraction, scaling="linear", factor=factor)
    original = c.size("rope.scaling.original_context_length", c.size("context_length", 2048))
    return Rope(rope.base, fraction, scaling="yarn", factor=factor, original=original)
