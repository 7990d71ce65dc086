"""The tokenizer that came with a checkpoint: text to ids and back, and messages to text.

tokenizer = load_tokenizer("model.gguf")          # or a folder, a tokenizer.json, a .model, a llama2.c tokenizer.bin
ids = tokenizer.encode(tokenizer.chat([{"role": "user", "content": "Hello"}]))
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..errors import CheckpointError, needs_extra
from ..files import read_plain, reading, write_bytes, write_text
from .byte_level import SPLITS, byte_characters
from .chat import LONGEST, render
from .continuation import continued
from .convert.fields import Fields, read_json
from .generation_info import as_ids
from .runs import checkpoint_folder, verify
from .sentencepiece import BOS, EOS, Pieces, as_tokenizer, read_model, read_tokenizer_bin, tokenizer_bin
from .subwords import EACH, Bytes, Characters, Subwords, TokenizerError, subwords

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Inner
    from tokenizers.pre_tokenizers import PreTokenizer

JSON_BYTES = 256 << 20
CONFIG, GENERATION, OWN = "tokenizer_config.json", "generation_config.json", "regard"
CONTROL, USER_DEFINED = 3, 4
"""Kinds of tokens in a GGUF file that are never split: they are written out in full, or not at all."""


Value = TypeVar("Value")


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
    mask: int | None = None
    """Stands for a token that is to be filled in."""


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

    def decode(self, ids: Sequence[int], *, special: bool = False, after: Sequence[int] = ()) -> str:
        """The text; special tokens are left out unless asked for. `after` are the ids before it, such as a prompt's: the
        first word of a continuation keeps the space that it has there."""

        def decode(given: list[int]) -> str:
            return self.coder.decode(given, special=special)

        return continued(decode, [int(i) for i in after], [int(i) for i in ids])

    def chat(self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True, **values: object) -> str:
        """The conversation as the model was trained to see it, open for the model's turn."""
        if self.template is None:
            raise CheckpointError("this tokenizer came without a chat template: it belongs to a model that only continues text")
        known = {f"{n}_token": self.text_of(i) for n, i in (("bos", self.special.bos), ("eos", self.special.eos))}
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
        """Beside a model: tokenizer.json and tokenizer_config.json for Hugging Face, or llama2.c's tokenizer.bin.

        Ids that end a turn beside eos go to generation_config.json, where Hugging Face looks for them.
        """
        for name, data in self.files().items():
            write_bytes(Path(folder) / name, data)
        if self.special.stops:
            _add_stops(Path(folder) / GENERATION, self.eos_ids)

    def files(self) -> dict[str, bytes]:
        """What `save` writes, by name: two tokenizers of the same files are the same."""
        s = self.special
        values: dict[str, object] = {} if self.template is None else {"chat_template": self.template}
        if isinstance(self.coder, Pieces):
            main = {"tokenizer.bin": tokenizer_bin(self.coder)}
            # The file has no room for which ids are which.
            values[OWN] = {**vars(s), "stops": list(s.stops), "special": sorted(self.coder.special)}
        elif isinstance(self.coder, Subwords):
            main = {"tokenizer.json": self.coder.inner.to_str().encode("utf-8")}
            names = {"bos_token": s.bos, "eos_token": s.eos, "pad_token": s.pad, "unk_token": s.unknown, "mask_token": s.mask}
            known = {n: self.text_of(i) for n, i in names.items() if i is not None}
            values = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": s.add_bos, **known, **values}
        else:
            raise CheckpointError(f"a {type(self.coder).__name__} has no file format of its own")
        return {**main, CONFIG: (json.dumps(values, indent=2) + "\n").encode()}

    def id_of(self, text: str) -> int | None:
        """The token that is written like this, or None."""
        return self.coder.id_of(text) if isinstance(self.coder, Subwords) else None

    def text_of(self, i: int | None) -> str:
        """How a token is written; nothing for None."""
        own = self.coder.text_of if isinstance(self.coder, Subwords) else None
        return "" if i is None else own(i) if own else self.coder.decode([i], special=True)


def _add_stops(path: Path, ends: tuple[int, ...]) -> None:
    values = dict(read_json(path).values) if path.exists() else {}
    known = as_ids(values.get("eos_token_id"))
    if not set(ends) <= set(known):
        values["eos_token_id"] = list(dict.fromkeys((*known, *ends)))
        write_text(path, json.dumps(values, indent=2) + "\n")


def load_tokenizer(source: str | Path) -> Tokenizer:
    """From a `.gguf`, a Hugging Face folder or its tokenizer.json, SentencePiece's `.model`, a run, a llama2.c tokenizer.bin, or a
    folder that has one."""
    path = Path(source)
    with reading(f"{path.name:.80}"):
        path = checkpoint_folder(path)
        if path.suffix == ".gguf":
            from .convert.gguf import GGUF

            return from_gguf(GGUF(path).metadata, path.name)
        if path.name == "tokenizer.json":
            path = path.parent
        if (path / "tokenizer.json").exists():
            return from_folder(path)
        for model in (path,) if path.suffix == ".model" else (path / "tokenizer.model", path / "spiece.model"):
            if model.exists():
                return from_model(model)
        # A llama2.c model is a file, and its tokenizer stands beside it.
        binary = path / "tokenizer.bin" if path.suffix != ".bin" or path.is_dir() else path
        binary = binary if binary.name.startswith("tok") else path.parent / "tokenizer.bin"
        if binary.exists():
            return from_bin(binary)
    raise CheckpointError(
        f"{path.name}: it has no tokenizer.json, no tokenizer.model and no tokenizer.bin; name another with --tokenizer"
    )


def from_bin(path: Path) -> Tokenizer:
    """llama2.c's own, or pieces that `Tokenizer.save` wrote, with their ids in tokenizer_config.json."""
    config = path.parent / CONFIG
    verify(path.parent, (path.name, CONFIG))
    values = read_json(config) if config.exists() else Fields({}, path.name)
    own = values.part(OWN)
    if own is None:
        return Tokenizer(read_tokenizer_bin(path), Specials(bos=BOS, eos=EOS, unknown=0, add_bos=True, stops=(BOS,)))
    coder = read_tokenizer_bin(path, as_ids(own.ids("special")))
    ids = {name: own.ids(name) for name in ("bos", "eos", "pad", "unknown")}
    for name, i in ids.items():
        if isinstance(i, list) or not -1 < (0 if i is None else i) < len(coder.pieces):
            raise own.refuse(name, f"it must be the number of one of {len(coder.pieces)} tokens")
    one = {name: i for name, i in ids.items() if not isinstance(i, list)}
    specials = Specials(**one, add_bos=own.flag("add_bos", True), stops=as_ids(own.ids("stops")))
    return Tokenizer(coder, specials, _template(values, path.parent))


def _template(values: Fields, folder: Path) -> str | None:
    """A chat template in a file of its own goes before one in tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return read_plain(file, LONGEST, follow=True).decode("utf-8")
    given = values.values.get("chat_template")
    return given if isinstance(given, str) else None


def from_gguf(metadata: Mapping[str, object], origin: str) -> Tokenizer:
    def get(name: str, kind: type[Value]) -> Value | None:
        value = metadata.get(f"tokenizer.ggml.{name}")
        if value is not None and not isinstance(value, kind):
            raise CheckpointError(f"{origin}: tokenizer.ggml.{name} is {value!r:.60}; it must be a {kind.__name__}")
        return value

    def many(name: str, kind: type[Value], default: list[Value]) -> list[Value]:
        values: list[Value] | None = get(name, list)
        # An array has one type: its first value shows it.
        if values and not isinstance(values[0], kind):
            raise CheckpointError(
                f"{origin}: tokenizer.ggml.{name} starts with {values[0]!r:.60}; it holds {kind.__name__} values"
            )
        return default if values is None else values

    tokens = many("tokens", str, [])
    kinds = many("token_type", int, [1] * len(tokens))
    if not tokens or len(kinds) != len(tokens):
        raise CheckpointError(f"{origin} has {len(tokens)} tokens and {len(kinds)} token types; it carries no whole tokenizer")
    ids = {n: get(f"{n}_token_id", int) for n in ("bos", "eos", "padding", "unknown", "eot")}
    for name, i in ids.items():
        if i is not None and not 0 <= i < len(tokens):
            raise CheckpointError(f"{origin}: {name}_token_id is {i}, and there are {len(tokens)} tokens")
    model = get("model", str)
    if model == "gpt2":
        pre = get("pre", str)
        pairs = _byte_pairs(tokens, kinds, many("merges", str, []), "gpt-2" if pre is None else pre, origin)
        coder: Coder = Subwords(pairs)
    elif model == "llama":
        scores = many("scores", float, [0.0] * len(tokens))
        special = [i for i, kind in enumerate(kinds) if kind in (2, CONTROL)]
        coder = Pieces([t.replace("▁", " ").encode("utf-8") for t in tokens], scores, special)
    else:
        raise CheckpointError(f"{origin}: tokenizer.ggml.model is {model!r}; gpt2 (byte pairs) and llama (pieces) are read")
    stops = tuple(i for i in (ids["eot"],) if i is not None and i != ids["eos"])
    add_bos = get("add_bos_token", bool)
    add_bos = model == "llama" if add_bos is None else add_bos
    specials = Specials(ids["bos"], ids["eos"], ids["padding"], ids["unknown"], add_bos, stops)
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(coder, specials, template if isinstance(template, str) else None)


def _byte_pairs(tokens: list[str], kinds: list[int], merges: list[str], pre: str, origin: str) -> Inner:
    with needs_extra("models"):
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    cuts: dict[str, PreTokenizer] = {
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
    with reading(f"{origin}: merges and tokens that do not fit"):
        inner = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=pairs))  # type: ignore[arg-type]
    inner.pre_tokenizer = cuts[pre]
    inner.decoder = decoders.ByteLevel()
    whole = [(t, kind) for t, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, USER_DEFINED)]
    for control in (True, False):
        added = [AddedToken(t, special=control, normalized=False) for t, kind in whole if (kind == CONTROL) is control]
        inner.add_special_tokens(added) if control else inner.add_tokens(added)
    return inner


def from_folder(folder: Path) -> Tokenizer:
    with needs_extra("models"):
        from tokenizers import Tokenizer as Inner

    verify(folder, ("tokenizer.json", CONFIG))
    data = read_plain(folder / "tokenizer.json", JSON_BYTES, follow=True)
    with reading("tokenizer.json"):
        inner = Inner.from_buffer(data)
        # A checkpoint may ask for every text to be cut or filled to one length; that is the caller's to decide.
        inner.no_truncation()
        inner.no_padding()
        coder = subwords(inner)
    return _with_config(coder, folder, Specials())


def from_model(path: Path) -> Tokenizer:
    """SentencePiece's own file. It says which ids there are; what tokenizer_config.json says beside it goes before that."""
    model = read_model(path)
    own = Specials(*map(model.ids.get, ("bos", "eos", "pad", "unknown")), add_bos=model.ids.get("bos") is not None)
    return _with_config(Subwords(as_tokenizer(model)), path.parent, own)


def _with_config(coder: Subwords, folder: Path, usual: Specials) -> Tokenizer:
    """A coder with the ids and the chat template that the files of its folder name, and `usual` where they name none."""
    known: dict[str, Any] = {}
    for file in ("special_tokens_map.json", CONFIG):
        known |= read_json(folder / file).values if (folder / file).exists() else {}
    values = Fields(known, CONFIG)

    def id_of(name: str) -> int | None:
        token = known.get(f"{name}_token")
        return coder.id_of(token.get("content") if isinstance(token, dict) else token)

    given = zip(map(id_of, ("bos", "eos", "pad", "unk")), (usual.bos, usual.eos, usual.pad, usual.unknown), strict=True)
    bos, eos, pad, unknown = (own if i is None else i for i, own in given)
    # Where no field says it, the frame that the tokenizer puts around a text does.
    framed = bos is not None and coder.framed("")[:1] == [bos]
    stops = tuple(i for i in _ends(folder) if i != eos and i < coder.size)
    add_bos = values.flag("add_bos_token", framed or usual.add_bos)
    specials = Specials(bos, eos, pad, unknown, add_bos, stops, id_of("mask"))
    return Tokenizer(coder, specials, _template(values, folder))


def _ends(folder: Path) -> tuple[int, ...]:
    """The ids that end a text: those of generation_config.json, or where it names none, of config.json."""
    for file in (GENERATION, "config.json"):
        if (folder / file).exists() and (ends := as_ids(read_json(folder / file).ids("eos_token_id"))):
            return ends
    return ()


__all__ = [
    "EACH",
    "Bytes",
    "Characters",
    "Specials",
    "Subwords",
    "Tokenizer",
    "TokenizerError",
    "byte_characters",
    "load_tokenizer",
    "subwords",
]
