"""llama2.c exports: one header of seven numbers, then float32 tensors in a fixed order (github.com/karpathy/llama2.c).

The first version ("legacy") starts with the numbers themselves, and a negative vocabulary says that the head is not tied.
Version 1 starts with `ak42` in 256 bytes of header and puts the norms first. Version 2 is quantised and is not read.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...errors import CheckpointError, needs_extra
from ..base import Model
from ..generation_info import GenerationInfo
from ..llama import LlamaConfig
from ..sentencepiece import BOS, EOS
from .fields import DEEPEST, Fields, changed
from .layout import Share, TensorsInMemory, assemble
from .llama import layout

with needs_extra("models"):
    import numpy as np

MAGIC = b"24ka"
"""0x616b3432, little-endian."""
NAMES = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")
LAYERED = {
    "rms_att": "input_layernorm", "wq": "self_attn.q_proj", "wk": "self_attn.k_proj", "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj", "rms_ffn": "post_attention_layernorm", "w1": "mlp.gate_proj", "w2": "mlp.down_proj",
    "w3": "mlp.up_proj",
}  # fmt: skip
ALONE = {"embed": "model.embed_tokens.weight", "rms_final": "model.norm.weight", "wcls": "lm_head.weight"}


@dataclass(frozen=True)
class Header:
    config: LlamaConfig
    start: int
    norms_first: bool

    def order(self) -> list[tuple[str, tuple[int, ...]]]:
        """The tensors as they follow each other, those of all layers in one."""
        c = self.config
        L, M, kv = c.depth, c.width, c.width // c.heads * c.key_heads
        shapes = {
            "rms_att": (L, M), "rms_ffn": (L, M), "rms_final": (M,), "embed": (c.vocabulary, M), "wq": (L, M, M),
            "wk": (L, kv, M), "wv": (L, kv, M), "wo": (L, M, M), "w1": (L, c.hidden, M), "w2": (L, M, c.hidden),
            "w3": (L, c.hidden, M), "angles": (2, c.context, M // c.heads // 2), "wcls": (c.vocabulary, M),
        }  # fmt: skip
        if self.norms_first:
            names = ["rms_att", "rms_ffn", "rms_final", "embed", "wq", "wk", "wv", "wo", "w1", "w2", "w3"]
        else:
            names = ["embed", "rms_att", "wq", "wk", "wv", "wo", "rms_ffn", "w1", "w2", "w3", "rms_final", "angles"]
        return [(n, shapes[n]) for n in names + ([] if c.tied else ["wcls"])]


def load_bin(path: Path, dtype: torch.dtype, changes: Mapping[str, object], progress: Share) -> Model:
    header = read_header(path)
    c = header.config
    tensors: dict[str, Tensor] = {}
    at, size = header.start, path.stat().st_size
    needed = at + 4 * sum(int(np.prod(shape, dtype=object)) for _, shape in header.order())
    if needed != size:
        raise CheckpointError(f"{path.name} has {size} bytes, and its header asks for {needed}: it is cut short or damaged")
    data = np.memmap(path, dtype="<f4", mode="r", offset=at)
    at = 0
    for name, shape in header.order():
        count = int(np.prod(shape))
        whole = torch.from_numpy(np.array(data[at : at + count])).reshape(shape)
        at += count
        if name in LAYERED:
            tensors |= {f"model.layers.{i}.{LAYERED[name]}.weight": whole[i] for i in range(c.depth)}
        elif name in ALONE:
            tensors[ALONE[name]] = whole
    where = layout(c, interleaved=True)
    model = assemble(changed(c, changes), where, TensorsInMemory(tensors, path.name), dtype, progress)
    if c.vocabulary > max(BOS, EOS):
        model.generation_info = GenerationInfo({"bos_token_id": BOS, "eos_token_id": [EOS, BOS]})
    return model


def read_header(path: Path) -> Header:
    with path.open("rb") as file:
        first = file.read(256)
    versioned = first[:4] == MAGIC
    if len(first) < (256 if versioned else 28):
        raise CheckpointError(f"{path.name} has {len(first)} bytes; a llama2.c header is longer")
    start = 8 if versioned else 0
    if versioned and (version := struct.unpack_from("<i", first, 4)[0]) != 1:
        raise CheckpointError(f"{path.name} is llama2.c version {version}; float32 exports (legacy and 1) are read")
    values: dict[str, int] = dict(zip(NAMES, struct.unpack_from("<7i", first, start), strict=True))
    tied = bool(first[36]) if versioned else values["vocab_size"] > 0
    if not versioned:
        values["vocab_size"] = abs(values["vocab_size"])
    c = Fields(values, f"{path.name} (read as llama2.c)")
    width, heads, key_heads = c.size("dim"), c.size("n_heads"), c.size("n_kv_heads")
    if width % heads or heads % key_heads or width // heads % 2:
        raise c.refuse("dim", f"with {heads} heads and {key_heads} key heads no even head width divides it")
    config = LlamaConfig(
        vocabulary=c.size("vocab_size"),
        width=width,
        depth=c.size("n_layers", largest=DEEPEST),
        heads=heads,
        key_heads=key_heads,
        hidden=c.size("hidden_dim"),
        tied=tied,
        context=c.size("seq_len"),
    )
    return Header(config, 256 if versioned else 28, norms_first=versioned)
