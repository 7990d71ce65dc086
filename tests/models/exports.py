"""Tiny models in the layouts of llama.cpp and llama2.c, written here by hand."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import torch

from regard.models import Llama, LlamaConfig

SMALL = LlamaConfig(vocabulary=31, width=16, depth=2, heads=4, key_heads=2, hidden=23, context=12)


def interleaved(x: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of the rows of q and k."""
    return x.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def write_gguf(path: Path, kind: str = "llama", divisors: np.ndarray | None = None, words: str = "", **metadata: int) -> Llama:
    """A tiny model in the layout that llama.cpp's converter writes; `words` is the kind of tokenizer, gpt2 or llama, in it."""
    import gguf

    bias = "qkv" if kind == "qwen2" else False
    model = LlamaConfig(**{**vars(SMALL), "width": 32, "hidden": 64, "tied": False, "attention_bias": bias}).build()
    c, writer = model.config, gguf.GGUFWriter(path, kind)
    writer.add_block_count(c.depth)
    writer.add_embedding_length(c.width)
    writer.add_head_count(c.heads)
    writer.add_head_count_kv(c.key_heads)
    writer.add_feed_forward_length(c.hidden)
    writer.add_layer_norm_rms_eps(c.eps)
    writer.add_context_length(c.context)
    for name, value in metadata.items():
        writer.add_uint32(f"{kind}.{name}", value)
    if words:
        tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "c", "Ġ", "ab", "bc", "▁a", *(f"<0x{i:02X}>" for i in range(20))]
        writer.add_tokenizer_model(words)
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(i) for i in range(31)])
        writer.add_token_types([2, 3, 3, *[1] * 8, *[6] * 20])
        writer.add_token_merges(["a b", "b c"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(8)
        writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    names = {"attention.q": "attn_q", "attention.k": "attn_k", "attention.v": "attn_v", "attention.out": "attn_output",
             "ffn.gate": "ffn_gate", "ffn.up": "ffn_up", "ffn.down": "ffn_down", "norm_1": "attn_norm", "norm_2": "ffn_norm"}  # fmt: skip
    for name, p in model.named_parameters():
        module, _, leaf = name.rpartition(".")
        x = p.detach()
        if module.startswith("blocks."):
            _, layer, part = module.split(".", 2)
            heads = {"attention.q": c.heads, "attention.k": c.key_heads}.get(part)
            x = interleaved(x, heads) if heads and kind == "llama" else x
            theirs = f"blk.{layer}.{names[part]}.{leaf}"
        else:
            theirs = {"embed": "token_embd", "norm": "output_norm", "head": "output"}[module] + f".{leaf}"
        writer.add_tensor(theirs, x.numpy())
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def write_bin(path: Path, versioned: bool, tied: bool) -> Llama:
    model = LlamaConfig(**{**vars(SMALL), "tied": tied}).build()
    c = model.config
    numbers = [
        c.width,
        c.hidden,
        c.depth,
        c.heads,
        c.key_heads,
        c.vocabulary if tied or versioned else -c.vocabulary,
        c.context,
    ]
    blocks = list(model.blocks)

    def attention(name: str) -> list[torch.Tensor]:
        heads = {"q": c.heads, "k": c.key_heads}.get(name)
        found = [getattr(b.attention, name).weight for b in blocks]
        return [interleaved(x, heads) if heads else x for x in found]

    norms_1, norms_2 = [b.norm_1.weight for b in blocks], [b.norm_2.weight for b in blocks]
    qkvo = [x for name in ("q", "k", "v", "out") for x in attention(name)]
    ffn = [getattr(b.ffn, name).weight for name in ("gate", "down", "up") for b in blocks]
    last = [] if tied else [model.head.weight]
    if versioned:
        header = (b"24ka" + struct.pack("<i7iB", 1, *numbers, tied)).ljust(256, b"\0")
        order = [*norms_1, *norms_2, model.norm.weight, model.embed.weight, *qkvo, *ffn, *last]
    else:
        header = struct.pack("<7i", *numbers)
        angles = torch.zeros(c.context, c.width // c.heads)
        order = [model.embed.weight, *norms_1, *qkvo, *norms_2, *ffn, model.norm.weight, angles, *last]
    path.write_bytes(header + b"".join(x.detach().contiguous().numpy().astype("<f4").tobytes() for x in order))
    return model
