"""Text to a memory-mapped file of tokens, made once; and the windows of each step, the same on any number of ranks.

A token file is a folder named after a hash of the text and of the tokenizer's settings:

    tokens.bin       uint16, or uint32 from 65,536 tokens of vocabulary on
    tokenizer.json, tokenizer_config.json    what made them
    meta.json        how many there are, their type, and a digest that a damaged file does not match
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files import home, new_folder, read_plain, reading, require_plain, sweep
from ..models.tokenizer import Tokenizer, load_tokenizer
from .corpus import Corpus, DataError, numpy, open_corpus
from .settings import DataConfig
from .tokenizer import closed, learn

VERSION = 2
BLOCK = 1 << 20
SAMPLED = 64
LARGEST_META = 1 << 16
"""Bytes of a meta.json."""

Say = Callable[[str, int, int], None]
"""Told what is being done, how far it is and how far it goes, in bytes."""


@dataclass(frozen=True, eq=False)
class Tokens:
    values: Any
    """The whole file, memory-mapped."""
    tokenizer: Tokenizer
    folder: Path
    text: str = ""
    """The fingerprint of the text."""

    def split(self, validation: float, context: int) -> tuple[Any, Any]:
        """The first part to train on and the last to validate on; each holds at least one window."""
        n = len(self.values)
        cut = n - max(int(n * validation), min(context + 1, n))
        if cut < context + 1:
            raise DataError(
                f"{n} tokens are too few: training and validation each need a window of data.context + 1 = {context + 1}"
            )
        return self.values[:cut], self.values[cut:]


def find_text(c: DataConfig) -> tuple[Corpus, str]:
    """The source, and the fingerprint of its text."""
    with reading(f"data.source={c.source}", DataError):
        corpus = open_corpus(c)
        return corpus, corpus.fingerprint()


def tokens(
    c: DataConfig, say: Say | None = None, tokenizer: Tokenizer | None = None, found: tuple[Corpus, str] | None = None
) -> Tokens:
    """The tokens of a source, if need be one that was found before: from the cache if they are there and whole, made otherwise.

    They are a given tokenizer's, or else those of one that is learned from the source as the settings say.
    """
    corpus, text = found or find_text(c)
    folder = cache_folder(c) / key(c, text)
    held = opened(folder)
    if tokenizer is not None and (held is None or held.tokenizer.files() != tokenizer.files()):
        folder = cache_folder(c) / key(c, text, tokenizer)
        held = opened(folder)
    if held is None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            sweep(folder.parent)
            build(corpus, c, folder, say or (lambda *_: None), tokenizer)
        except OSError as error:
            raise DataError(f"the tokens of {corpus.name} cannot be written to {folder.parent}: {error}") from error
        held = opened(folder)
        if held is None:
            raise DataError(f"{folder} was just written and cannot be read back; is the disk full or failing?")
    return replace(held, text=text)


def cache_folder(c: DataConfig) -> Path:
    if c.cache is not None:
        return Path(c.cache)
    return home() / "tokens"


def key(c: DataConfig, text: str, tokenizer: Tokenizer | None = None) -> str:
    settings: list[Any] = [VERSION, c.tokenizer, c.vocabulary if c.tokenizer == "bpe" else 0, text]
    if tokenizer is not None:
        settings += [hashlib.sha256(data).hexdigest() for data in tokenizer.files().values()]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:24]


def build(corpus: Corpus, c: DataConfig, folder: Path, say: Say, tokenizer: Tokenizer | None = None) -> None:
    total = corpus.size()

    def watched(label: str) -> Iterator[tuple[str, bool]]:
        done = 0
        for text, ends in corpus.pieces():
            yield text, ends
            done += len(text)
            say(label, min(done, total), total)

    tokenizer = tokenizer or learn(c.tokenizer, (text for text, _ in watched("reading")), c.vocabulary)
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
    found = hashlib.blake2b(str(size).encode())
    with open(path, "rb") as file:
        for block in picked:
            file.seek(block * BLOCK)
            found.update(file.read(BLOCK))
    return found.hexdigest()


@dataclass(frozen=True, eq=False)
class Windows:
    """What to train on at each step: a pure function of the seed and the step, so that resuming needs nothing else."""

    values: Any
    context: int
    batch: int
    seed: int
    vocabulary: int = 1 << 32
    """A token from here on is damage that the digest of a large file, taken in samples, has missed."""

    def at(self, step: int, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
        """Inputs and targets (B / parts, N). The parts of a step, whoever takes them, join to its whole batch in order."""
        np = numpy()
        starts = np.random.default_rng([self.seed, step]).integers(0, len(self.values) - self.context, size=self.batch)
        share = self.batch // parts
        return self.cut(starts[part * share : (part + 1) * share])

    def cut(self, starts: Any) -> tuple[Tensor, Tensor]:
        np = numpy()
        picked = self.values[np.asarray(starts)[:, None] + np.arange(self.context + 1)]
        if picked.size and int(picked.max()) >= self.vocabulary:
            raise DataError(
                f"the token file holds token {int(picked.max())} of a vocabulary of {self.vocabulary}: it is damaged; "
                "remove data.cache, and it is made again"
            )
        both = torch.from_numpy(picked.astype(np.int64))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def in_order(self, rank: int = 0, world: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Every window once, side by side, in batches; a rank takes its share of each batch.

        All ranks take equally many batches, as sharded models need: what is missing in the last is a window whose targets
        are −100, which the loss passes over.
        """
        np = numpy()
        count = (len(self.values) - 1) // self.context
        share = max(1, self.batch // world)
        for first in range(0, count, share * world):
            mine = np.arange(first + rank * share, first + (rank + 1) * share)
            x, y = self.cut(np.minimum(mine, count - 1) * self.context)
            y[torch.from_numpy(mine >= count)] = -100
            yield x, y
