"""Text to a memory-mapped file of tokens, made once.

A token file is a folder named after a hash of the text and of the tokenizer's settings:

    tokens.bin       uint16, or uint32 from 65,536 tokens of vocabulary on
    tokenizer.json, tokenizer_config.json    what made them
    meta.json        how many there are, their type, and a digest that a damaged file does not match
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import home, new_folder, read_plain, reading, require_plain, sweep
from ..models.tokenizer import Tokenizer, load_tokenizer
from .corpus import Corpus, DataError, PairFields, numpy, open_corpus
from .settings import DataConfig
from .tokenizer import closed, learn

if TYPE_CHECKING:
    from .examples import Values

VERSION = 2
BLOCK = 1 << 20
SAMPLED = 64
LARGEST_META = 1 << 16
"""Bytes of a meta.json."""

Say = Callable[[str, int, int], None]
"""Told what is being done, how far it is and how far it goes, in bytes."""


@dataclass(frozen=True, eq=False)
class Tokens:
    values: Values
    """The whole file, memory-mapped."""
    tokenizer: Tokenizer
    folder: Path
    text: str = ""
    """The fingerprint of the text."""


Text = tuple[Corpus, str]
"""A source, and the fingerprint of its text."""


def find_text(c: DataConfig, pairs: PairFields | None = None) -> Text:
    """The source, and the fingerprint of its text; with `pairs`, of its pairs in these fields."""
    with reading(f"data.source={c.source}", DataError):
        corpus = open_corpus(c, pairs)
        return corpus, corpus.fingerprint()


def tokens(
    c: DataConfig,
    say: Say | None = None,
    tokenizer: Tokenizer | None = None,
    text: Text | None = None,
    special: Sequence[str] = (),
) -> Tokens:
    """The tokens of a source, if need be one that was opened before: from the cache if they are there and whole, made otherwise.

    They are a given tokenizer's, or else those of one that is learned from the source as the settings say, with `special` tokens beside the text's.
    """
    corpus, fingerprint = text or find_text(c)
    folder = cache_folder(c) / key(c, fingerprint, special=special)
    cached = opened(folder)
    if tokenizer is not None and (cached is None or cached.tokenizer.files() != tokenizer.files()):
        folder = cache_folder(c) / key(c, fingerprint, tokenizer)
        cached = opened(folder)
    if cached is None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            sweep(folder.parent)
            build(corpus, c, folder, say or (lambda *_: None), tokenizer, special)
        except OSError as error:
            raise DataError(f"the tokens of {corpus.name} cannot be written to {folder.parent}: {error}") from error
        cached = opened(folder)
        if cached is None:
            raise DataError(f"{folder} was just written and cannot be read back; is the disk full or failing?")
    return replace(cached, text=fingerprint)


def cache_folder(c: DataConfig) -> Path:
    if c.cache is not None:
        return Path(c.cache)
    return home() / "tokens"


def key(c: DataConfig, text: str, tokenizer: Tokenizer | None = None, special: Sequence[str] = ()) -> str:
    settings: list[object] = [VERSION, c.tokenizer, c.vocabulary if c.tokenizer == "bpe" else 0, text, *special]
    if tokenizer is not None:
        settings += [hashlib.sha256(data).hexdigest() for data in tokenizer.files().values()]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:24]


def build(
    corpus: Corpus, c: DataConfig, folder: Path, say: Say, tokenizer: Tokenizer | None = None, special: Sequence[str] = ()
) -> None:
    total = corpus.size()

    def watched(label: str) -> Iterator[tuple[str, bool]]:
        done = 0
        for text, ends in corpus.pieces():
            yield text, ends
            done += len(text)
            say(label, min(done, total), total)

    tokenizer = tokenizer or learn(c.tokenizer, (text for text, _ in watched("reading")), c.vocabulary, special)
    np = numpy()
    kind = np.uint16 if tokenizer.size <= 1 << 16 else np.uint32
    with new_folder(folder) as draft:
        count, starts = 0, True
        with open(draft / "tokens.bin", "wb") as file:
            for text, ends in watched("tokenizing"):
                ids = tokenizer.encode(text, bos=None if starts else False)
                ids, starts = closed(tokenizer, ids) if ends else ids, ends
                np.asarray(ids, dtype=kind).tofile(file)
                count += len(ids)
        if count == 0:
            raise DataError(f"{corpus.name} holds no text")
        tokenizer.save(draft)
        meta = {"version": VERSION, "count": count, "dtype": np.dtype(kind).name, "digest": digest(draft / "tokens.bin")}
        (draft / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


def opened(folder: Path) -> Tokens | None:
    """The token file in a folder; None if there is none or it is damaged, and then it is made again."""
    np = numpy()
    try:
        meta: Any = json.loads(read_plain(folder / "meta.json", LARGEST_META).decode("utf-8"))
        kind, count = np.dtype({"uint16": np.uint16, "uint32": np.uint32}[meta["dtype"]]), meta["count"]
        path = require_plain(folder / "tokens.bin")
        if path.stat().st_size != count * kind.itemsize or digest(path) != meta["digest"]:
            return None
        return Tokens(np.memmap(path, dtype=kind, mode="r", shape=(count,)), load_tokenizer(folder), folder)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def digest(path: Path) -> str:
    """A hash of the whole of a file up to 64 MiB, and of as much, evenly spread, of a larger one: constant time at any size."""
    size = path.stat().st_size
    blocks = -(-size // BLOCK)
    picked = range(blocks) if blocks <= SAMPLED else (i * (blocks - 1) // (SAMPLED - 1) for i in range(SAMPLED))
    sampled = hashlib.blake2b(str(size).encode())
    with open(path, "rb") as file:
        for block in picked:
            file.seek(block * BLOCK)
            sampled.update(file.read(BLOCK))
    return sampled.hexdigest()
