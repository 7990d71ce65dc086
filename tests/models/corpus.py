"""One small checkpoint of every kind that is read, and the ways in which a file gets damaged."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from exports import write_bin, write_gguf
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from regard.models import LlamaConfig, Model
from regard.models.bert import BertConfig
from regard.models.energy import EnergyConfig
from regard.models.generation_info import GenerationInfo
from regard.models.gpt2 import GPT2Config
from regard.models.ngpt import NGPTConfig
from regard.models.recurrent import RecurrentConfig
from regard.models.routing import RoutingConfig
from regard.models.sentencepiece import Pieces, tokenizer_bin
from regard.models.t5 import T5Config

SMALL = LlamaConfig(vocabulary=40, width=16, depth=2, heads=4, key_heads=2, hidden=23, context=12)
SPECIAL = ["<unk>", "<s>", "</s>"]
LETTERS = list("abcdehlnoprstuw .")
WORDS = ["on", "ce", "up", "once", "upon"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if loop.first and m.role == 'system' %}{{ m.content | trim }}{% else %}"
    "{{ '<|' + m['role'] + '|>' ~ m.content[:9] }}{% endif %}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
TALK = [{"role": "user", "content": "once upon a time"}]


def sentencepiece() -> Inner:
    """As LLaMA's: a space before the first word, bytes for what is no piece."""
    names = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), *(x.replace(" ", "▁") for x in LETTERS), *WORDS, "▁once", "▁upon"]
    merges = [("o", "n"), ("c", "e"), ("on", "ce"), ("u", "p"), ("up", "on"), ("▁", "once"), ("▁", "upon")]
    inner = Inner(models.BPE({x: i for i, x in enumerate(names)}, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(SPECIAL)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return inner


def byte_level() -> Inner:
    """As GPT-2's."""
    names = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "on", "ce", "Ġu", "Ġup"]
    inner = Inner(models.BPE({x: i for i, x in enumerate(names)}, [("o", "n"), ("c", "e"), ("Ġ", "u"), ("Ġu", "p")]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens(SPECIAL)
    return inner


def wordpiece() -> Inner:
    """As BERT's."""
    names = [*SPECIAL, "once", "up", "##on", "a", "time", "##s", ".", "the", "don", "'", "t"]
    inner = Inner(models.WordPiece({x: i for i, x in enumerate(names)}, unk_token="<unk>"))
    inner.normalizer, inner.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    inner.add_special_tokens(SPECIAL)
    return inner


def unigram() -> Inner:
    """As T5's."""
    names = [*SPECIAL, *(x.replace(" ", "▁") for x in LETTERS), "▁once", "▁upon", "▁a", "time"]
    inner = Inner(models.Unigram([(x, -float(i)) for i, x in enumerate(names)], unk_id=0))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    inner.add_special_tokens(SPECIAL)
    return inner


TOKENIZERS: dict[str, Callable[[], Inner]] = {
    "sentencepiece": sentencepiece,
    "byte level": byte_level,
    "wordpiece": wordpiece,
    "unigram": unigram,
}


def pieces() -> Pieces:
    """The tokenizer of llama2.c, and of LLaMA's GGUF files."""
    names = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{i:02X}>" for i in range(256)), *LETTERS, *WORDS, " once", " upon"]
    scores = [0.0] * 259 + [-90.0 - i for i in range(len(LETTERS))] + [-9.0, -8.0, -7.0, -6.0, -5.0, -4.0, -3.0]
    return Pieces([x.encode() for x in names], scores)


def write_tokenizer(folder: Path, inner: Inner) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "add_bos_token": False, "chat_template": TEMPLATE}))
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def write_checkpoints(root: Path) -> None:
    """Folders of every family, a GGUF file and llama2.c exports."""
    torch.manual_seed(0)
    info = GenerationInfo(
        {"bos_token_id": 1, "eos_token_id": [2, 5], "pad_token_id": 0}, {"eos_token_id": [2, 6], "temperature": 0.6}
    )
    lines = ("cosine(temperature=learned) | softmax", "dot | entmax(learned)")
    built: dict[str, Model] = {
        "llama": LlamaConfig(**{**vars(SMALL), "attention": lines}).build(),
        "qwen2": LlamaConfig(**{**vars(SMALL), "attention_bias": "qkv", "head_width": 6}).build(),
        "gpt2": GPT2Config(40, 16, 2, 4, context=9).build(),
        "bert": BertConfig(40, 16, 2, 4, 23, 9).build(),
        "t5": T5Config(40, 16, 2, 1, 4, 6, 23).build(),
        "ngpt": NGPTConfig(40, 16, 2, 4).build(),
        "energy": EnergyConfig(40, 16, 1, 2, heads=4, memories=9, context=9).build(),
        "recurrent": RecurrentConfig("lstm", 40, 16, 2, attention="dot | softmax").build(),
        "routing": RoutingConfig(40, 16, 2, 4, experts=3, clusters=2).build(),
    }
    for i, (name, model) in enumerate(built.items()):
        model.generation_info = info
        model.save_pretrained(root / name)
        write_tokenizer(root / name, list(TOKENIZERS.values())[i % len(TOKENIZERS)]())
    _shard(root / "llama", root / "sharded")
    for name in ("gguf", "bin 0", "bin 1"):
        (root / name).mkdir()
    for words in ("gpt2", "llama"):
        write_gguf(root / "gguf" / f"{words}.gguf", words=words)
    for version in (0, 1):
        write_bin(root / f"bin {version}" / "m.bin", bool(version), True)
        (root / f"bin {version}" / "tokenizer.bin").write_bytes(tokenizer_bin(pieces()))


def _shard(source: Path, target: Path) -> None:
    from safetensors.torch import load_file, save_file

    target.mkdir()
    tensors = list(load_file(source / "model.safetensors").items())
    parts = {"a.safetensors": dict(tensors[::2]), "b.safetensors": dict(tensors[1::2])}
    for file, part in parts.items():
        save_file(part, target / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    (target / "config.json").write_bytes((source / "config.json").read_bytes())


VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 2**15, 2**27, 2**30, 2**31, 2**63, 10**30, 0.5, -0.5, 1e308, float("nan"), float("inf"),
    "", "x", "llama", "\ud800", "▁", "{{ 2 ** 10 ** 9 }}", [], {}, [1], [[]], ["x"] * 3, {"a": 1}, {"content": 7}, [None] * 40,
]  # fmt: skip


@dataclass(frozen=True)
class Damage:
    """One seeded damage to a file's bytes."""

    seed: int

    def __call__(self, data: bytes, is_json: bool) -> bytes:
        dice = random.Random(self.seed)
        kind = dice.choice(
            ["cut", "flip", "insert", "remove", "extreme", "repeat"] + ["value", "value", "key", "drop"] * is_json
        )
        if kind in ("value", "key", "drop"):
            return self._json(data, kind, dice)
        # Headers are where a few bytes decide over much.
        at = dice.randrange(min(len(data), dice.choice([16, 64, 400, 4000, len(data) or 1])) or 1)
        match kind:
            case "cut":
                return data[:at]
            case "flip":
                return data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1 :] if data else b"\xff"
            case "insert":
                return data[:at] + dice.randbytes(dice.randint(1, 9)) + data[at:]
            case "remove":
                return data[:at] + data[at + dice.randint(1, 9) :]
            case "extreme":
                number = dice.choice([0, 1, 2**31 - 1, 2**32 - 1, 2**27, 2**40, 2**61, 2**63 - 1, 2**64 - 1])
                return data[:at] + struct.pack("<Q", number) + data[at + 8 :]
            case _:
                return data[:at] + data[at // 2 : at] + data[at:]

    def _json(self, data: bytes, kind: str, dice: random.Random) -> bytes:
        whole = json.loads(data)
        places: list[tuple[Any, Any]] = []
        open_: list[Any] = [whole]
        while open_:
            x = open_.pop()
            if isinstance(x, dict | list):
                inner = list(x.items() if isinstance(x, dict) else enumerate(x))
                # A vocabulary of hundreds has one say, not hundreds.
                places += [(x, key) for key, _ in (inner if len(inner) < 60 else dice.sample(inner, 3))]
                open_ += [value for _, value in inner if isinstance(value, dict | list)]
        if not places:
            return b"{}"
        holder, key = dice.choice(places)
        if kind == "drop":
            del holder[key]
        elif kind == "key" and isinstance(holder, dict):
            holder[dice.choice(["", "x", "type", "version", "attention"])] = holder.pop(key)
        else:
            holder[key] = dice.choice(VALUES)
        return json.dumps(whole).encode("utf-8")


def files(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*") if p.is_file())
