"""The tokenizer that came with a checkpoint: text to ids and back, and messages to text.

tokenizer = load_tokenizer("model.gguf")          # or a Hugging Face folder, a tokenizer.json, a llama2.c tokenizer.bin
ids = tokenizer.encode(tokenizer.chat([{"role": "user", "content": "Hello"}]))
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..errors import CheckpointError
from .chat import render
from .pieces import Pieces, read_tokenizer_bin, write_tokenizer_bin

CONTROL, USER_DEFINED = 3, 4
"""Kinds of tokens in a GGUF file that are never split: they are written out in full, or not at all."""
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {"llama-bpe": WORDS % "1,3", "llama3": WORDS % "1,3", "qwen2": WORDS % "1"}
"""How text is cut before the byte pairs, by the name that llama.cpp gives it, where it is not GPT-2's own way."""


class Coder(Protocol):
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int], special: bool = False) -> str: ...


@dataclass(frozen=True)
class Specials:
    """Ids with a meaning of their own; None where a tokenizer has none."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    unknown: int | None = None
    add_bos: bool = False
    """True when every text is to start with bos."""
    stops: tuple[int, ...] = ()
    """Further ids that end a turn."""


@dataclass(frozen=True)
class Tokenizer:
    coder: Coder
    special: Specials = field(default_factory=Specials)
    template: str | None = None
    """The chat template, in Jinja."""

    def encode(self, text: str, *, bos: bool | None = None, framed: bool = False) -> list[int]:
        """Special tokens that the text spells out are read as such: never hand a stranger's text over unchecked.

        `framed` puts around it what the checkpoint asks for, such as BERT's [CLS] and [SEP].
        """
        if framed and isinstance(self.coder, Subwords):
            return self.coder.framed(text)
        bos = self.special.add_bos if bos is None else bos
        start = [self.special.bos] if bos and self.special.bos is not None else []
        ids = self.coder.encode(text)
        return ids if start and ids[:1] == start else [*start, *ids]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text; special tokens are left out unless asked for."""
        return self.coder.decode([int(i) for i in ids], special=special)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **values: Any) -> str:
        """The conversation as the model was trained to see it, open for the model's turn."""
        if self.template is None:
            raise CheckpointError("this tokenizer came without a chat template: it belongs to a model that only continues text")
        known = {f"{n}_token": self._text(i) for n, i in (("bos", self.special.bos), ("eos", self.special.eos))}
        return render(self.template, messages, add_generation_prompt=add_generation_prompt, **known, **values)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends a text or a turn."""
        own = () if self.special.eos is None else (self.special.eos,)
        return tuple(dict.fromkeys((*own, *self.special.stops)))

    @property
    def size(self) -> int:
        coder = self.coder
        return len(coder.pieces) if isinstance(coder, Pieces) else coder.size if isinstance(coder, Subwords) else 0

    def save(self, folder: str | Path) -> None:
        """Beside a model: tokenizer.json and tokenizer_config.json for Hugging Face, or llama2.c's tokenizer.bin."""
        folder = Path(folder)
        if isinstance(self.coder, Pieces):
            write_tokenizer_bin(self.coder, folder / "tokenizer.bin")
            return
        if not isinstance(self.coder, Subwords):
            raise CheckpointError(f"a {type(self.coder).__name__} has no file format of its own")
        (folder / "tokenizer.json").write_text(self.coder.inner.to_str(), encoding="utf-8")
        s = self.special
        names = {"bos_token": s.bos, "eos_token": s.eos, "pad_token": s.pad, "unk_token": s.unknown}
        known = {n: self._text(i) for n, i in names.items() if i is not None}
        values = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": s.add_bos, **known}
        if self.template is not None:
            values["chat_template"] = self.template
        (folder / "tokenizer_config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    def _text(self, i: int | None) -> str:
        return "" if i is None else self.coder.decode([i], special=True)


class Subwords:
    """A `tokenizers.Tokenizer` behind our two verbs."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.size: int = inner.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text, add_special_tokens=False).ids

    def framed(self, text: str) -> list[int]:
        return self.inner.encode(text, add_special_tokens=True).ids

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=not special)


def load_tokenizer(source: str | Path) -> Tokenizer:
    """From a `.gguf`, a Hugging Face folder or its tokenizer.json, a llama2.c tokenizer.bin, or a folder that has one."""
    path = Path(source)
    if path.suffix == ".gguf":
        from .convert.gguf import GGUF

        return from_gguf(GGUF(path).metadata, path.name)
    if path.name == "tokenizer.json":
        path = path.parent
    if path.is_dir() and (path / "tokenizer.json").is_file():
        return from_folder(path)
    # A llama2.c model is a file, and its tokenizer stands beside it.
    binary = path / "tokenizer.bin" if path.suffix != ".bin" or path.is_dir() else path
    binary = binary if binary.name.startswith("tok") else path.parent / "tokenizer.bin"
    if binary.is_file():
        return Tokenizer(read_tokenizer_bin(binary), Specials(bos=1, eos=2, unknown=0, add_bos=True))
    raise CheckpointError(f"{path.name}: it has no tokenizer.json and no tokenizer.bin")


def from_gguf(metadata: Mapping[str, Any], origin: str) -> Tokenizer:
    def get(name: str, kind: type, default: Any = None) -> Any:
        value = metadata.get(f"tokenizer.ggml.{name}", default)
        if value is not None and not isinstance(value, kind):
            raise CheckpointError(f"{origin}: tokenizer.ggml.{name} is {value!r:.60}; it must be a {kind.__name__}")
        return value

    tokens: list[str] = get("tokens", list, [])
    kinds: list[int] = get("token_type", list, [1] * len(tokens))
    if not tokens or len(kinds) != len(tokens):
        raise CheckpointError(f"{origin} has {len(tokens)} tokens and {len(kinds)} token types; it carries no whole tokenizer")
    ids = {n: get(f"{n}_token_id", int) for n in ("bos", "eos", "padding", "unknown", "eot")}
    for name, i in ids.items():
        if i is not None and not 0 <= i < len(tokens):
            raise CheckpointError(f"{origin}: {name}_token_id is {i}, and there are {len(tokens)} tokens")
    model = get("model", str)
    if model == "gpt2":
        coder: Coder = Subwords(_byte_pairs(tokens, kinds, get("merges", list, []), get("pre", str, "gpt-2"), origin))
    elif model == "llama":
        scores: list[float] = get("scores", list, [0.0] * len(tokens))
        special = [i for i, kind in enumerate(kinds) if kind in (2, CONTROL)]
        coder = Pieces([t.replace("▁", " ").encode("utf-8") for t in tokens], scores, special)
    else:
        raise CheckpointError(f"{origin}: tokenizer.ggml.model is {model!r}; gpt2 (byte pairs) and llama (pieces) are read")
    stops = tuple(i for i in (ids["eot"],) if i is not None)
    add_bos = get("add_bos_token", bool, model == "llama")
    specials = Specials(ids["bos"], ids["eos"], ids["padding"], ids["unknown"], add_bos, stops)
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(coder, specials, template if isinstance(template, str) else None)


def _byte_pairs(tokens: list[str], kinds: list[int], merges: list[str], pre: str, origin: str) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    cuts: dict[str, Any] = {
        "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "default": pre_tokenizers.ByteLevel(add_prefix_space=False),
        # SmolLM reads numbers digit by digit, then as GPT-2 does.
        "smollm": pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
    }
    for name, words in SPLITS.items():
        split = pre_tokenizers.Split(Regex(words), behavior="isolated")
        cuts[name] = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    if pre not in cuts:
        raise CheckpointError(f"{origin}: tokenizer.ggml.pre is {pre!r}; known here: {', '.join(cuts)}")
    pairs = [tuple(m.split(" ", 1)) for m in merges]
    try:
        inner = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=pairs))  # type: ignore[arg-type]
    except Exception as error:
        raise CheckpointError(f"{origin}: its merges do not fit its tokens: {error}") from error
    inner.pre_tokenizer = cuts[pre]
    inner.decoder = decoders.ByteLevel()
    whole = [(t, kind) for t, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, USER_DEFINED)]
    for control in (True, False):
        added = [AddedToken(t, special=control, normalized=False) for t, kind in whole if (kind == CONTROL) is control]
        inner.add_special_tokens(added) if control else inner.add_tokens(added)
    return inner


def from_folder(folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Inner

    from .convert.fields import read_json

    try:
        inner = Inner.from_file(str(folder / "tokenizer.json"))
    except Exception as error:
        raise CheckpointError(f"tokenizer.json cannot be read: {error}") from error
    # A checkpoint may ask for every text to be cut or filled to one length; that is the caller's to decide.
    inner.no_truncation()
    inner.no_padding()
    path = folder / "tokenizer_config.json"
    values = read_json(path).values if path.is_file() else {}

    def id_of(name: str) -> int | None:
        token = values.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        return inner.token_to_id(token) if isinstance(token, str) else None

    stops: list[int] = []
    for file in ("generation_config.json", "config.json"):
        if (folder / file).is_file():
            ends = read_json(folder / file).values.get("eos_token_id")
            stops += [
                i for i in (ends if isinstance(ends, list) else [ends]) if isinstance(i, int) and i < inner.get_vocab_size()
            ]
            break
    template = values.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    specials = Specials(
        id_of("bos"), id_of("eos"), id_of("pad"), id_of("unk"), bool(values.get("add_bos_token", False)), tuple(stops)
    )
    return Tokenizer(Subwords(inner), specials, template if isinstance(template, str) else None)
