"""Text to numbers and back: bytes, characters, or byte pairs learned from the corpus. Saved as JSON, never pickled."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from ..errors import RegardError
from ..files import read_plain, reading, write_text

END = "<|end|>"
LARGEST = 1 << 30
"""Bytes of a tokenizer.json; a vocabulary of two million tokens has a tenth of it."""


class TokenizerError(RegardError):
    """Text that a tokenizer cannot hold, or a file that is none."""


class Tokenizer(ABC):
    kind: ClassVar[str]
    end: int | None = None
    """The token that closes a document; None where documents are joined by a line break."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def decode(self, tokens: Iterable[int]) -> str: ...

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """What `from_record` reads back."""

    def text(self) -> str:
        """What stands in tokenizer.json."""
        return json.dumps({"format": "regard-tokenizer-1", "kind": self.kind, **self.record()}, ensure_ascii=False, indent=1)

    def save(self, path: str | Path) -> None:
        write_text(path, self.text())


@dataclass(frozen=True)
class Byte(Tokenizer):
    """UTF-8 bytes, and one token more that closes a document: any text fits, nothing is learned."""

    kind = "byte"
    end = 256

    def __len__(self) -> int:
        return 257

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(t for t in tokens if 0 <= t < 256).decode("utf-8", errors="replace")

    def record(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Char(Tokenizer):
    """One token for each character of the corpus."""

    kind = "char"
    characters: str

    def __len__(self) -> int:
        return len(self.characters)

    @cached_property
    def _number(self) -> dict[str, int]:
        return {c: i for i, c in enumerate(self.characters)}

    def encode(self, text: str) -> list[int]:
        try:
            return [self._number[c] for c in text]
        except KeyError as error:
            raise TokenizerError(
                f"character {error.args[0]!r} was not in the corpus this tokenizer was made of ({len(self)} characters); "
                "data.tokenizer=byte takes any text"
            ) from None

    def decode(self, tokens: Iterable[int]) -> str:
        # A model may have more outputs than there are characters (`model.vocabulary`); those beyond say nothing.
        return "".join(self.characters[t] for t in tokens if 0 <= t < len(self.characters))

    def record(self) -> dict[str, Any]:
        return {"characters": self.characters}


@dataclass(frozen=True)
class BPE(Tokenizer):
    """Byte pairs over UTF-8, by the `tokenizers` package: any text fits and comes back as it was."""

    kind = "bpe"
    definition: str
    """The package's own JSON."""

    @cached_property
    def _inner(self) -> Any:
        package = _tokenizers()
        with reading("the definition of this tokenizer", TokenizerError):
            return package.Tokenizer.from_str(self.definition)

    @property
    def end(self) -> int | None:  # type: ignore[override]
        return self._inner.token_to_id(END)

    def __len__(self) -> int:
        return self._inner.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        with reading("this text", TokenizerError):
            return self._inner.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Iterable[int]) -> str:
        with reading("these tokens", TokenizerError):
            return self._inner.decode(list(tokens), skip_special_tokens=False)

    def record(self) -> dict[str, Any]:
        return {"definition": json.loads(self.definition)}

    def numbers(self) -> list[int]:
        return list(self._inner.get_vocab().values())


KINDS: dict[str, type[Tokenizer]] = {"byte": Byte, "char": Char, "bpe": BPE}


def learn(kind: str, texts: Iterable[str], vocabulary: int = 4096) -> Tokenizer:
    """A tokenizer of this kind for these texts."""
    if kind == "byte":
        return Byte()
    if kind == "char":
        # Documents are joined by a line break, so it is always there.
        found = {"\n"}
        for text in texts:
            found |= set(text)
        return Char("".join(sorted(found)))
    if kind == "bpe":
        return _learn_bpe(texts, vocabulary)
    raise TokenizerError(f"tokenizer {kind!r} is not one of {', '.join(KINDS)}")


def _learn_bpe(texts: Iterable[str], vocabulary: int) -> BPE:
    t = _tokenizers()
    inner = t.Tokenizer(t.models.BPE())
    inner.pre_tokenizer = t.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = t.decoders.ByteLevel()
    trainer = t.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        # All 256 bytes, seen or not, so that no later text is unknown.
        initial_alphabet=t.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return BPE(inner.to_str())


def load(path: str | Path) -> Tokenizer:
    path = Path(path)
    with reading(f"{path}, as a tokenizer,", TokenizerError):
        record: Any = json.loads(read_plain(path, LARGEST).decode("utf-8"))
        if (
            not isinstance(record, dict)
            or record.get("format") != "regard-tokenizer-1"
            or record.get("kind") not in list(KINDS)
        ):
            raise TokenizerError(f"{path} is not a tokenizer of regard; `format` should be regard-tokenizer-1")
        match record["kind"]:
            case "byte":
                return Byte()
            case "char":
                return _char(record.get("characters"), path)
            case _:
                return _bpe(record.get("definition"), path)


def _char(characters: Any, path: Path) -> Char:
    if not isinstance(characters, str) or not characters or len(set(characters)) != len(characters):
        raise TokenizerError(f"{path} is damaged: `characters` should be text in which each character stands once")
    return Char(characters)


def _bpe(definition: Any, path: Path) -> BPE:
    if not isinstance(definition, dict):
        raise TokenizerError(f"{path} is damaged: `definition` should be what the package tokenizers wrote")
    found = BPE(json.dumps(definition, ensure_ascii=False))
    numbers = found.numbers()
    if sorted(numbers) != list(range(len(found))):
        raise TokenizerError(f"{path} is damaged: its {len(found)} tokens are not numbered from 0 on, each once")
    return found


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise TokenizerError("data.tokenizer=bpe needs the package tokenizers: pip install 'regard[train]'") from error
    return tokenizers


def joined(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    """A document's tokens with what closes it."""
    return [*tokens, *(tokenizer.encode("\n") if tokenizer.end is None else [tokenizer.end])]
