"""SentencePiece's tokenizers: BPE from a list of pieces and scores, as llama2.c and LLaMA's GGUF files keep it, and `.model` files.

Characters are joined in the order of the scores: always the best pair anywhere, until no pair is a piece. A character that
is no piece becomes its bytes. A `.model` file (BPE or unigram) becomes a tokenizer of the package `tokenizers`, which a
checkpoint can keep as tokenizer.json; its numbers are those of sentencepiece_model.proto.
"""

from __future__ import annotations

import heapq
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, needs_extra
from ..files import read_plain

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTE = re.compile(rb"<0x([0-9A-Fa-f]{2})>")
LONGEST, MOST_BYTES = 1 << 16, 16 << 20
BOS, EOS = 1, 2
"""SentencePiece's own ids. llama2.c's stories follow each other with a BOS between them, so that BOS ends one too."""


class Pieces:
    def __init__(self, pieces: Sequence[bytes], scores: Sequence[float], special: Sequence[int] = (0, 1, 2)) -> None:
        self.pieces, self.scores = list(pieces), list(scores)
        if len(self.scores) != len(self.pieces):
            raise CheckpointError(f"{len(self.pieces)} pieces and {len(self.scores)} scores; each piece has one")
        self.special = frozenset(special)
        self._ids = {p: i for i, p in reversed(list(enumerate(self.pieces))) if i not in self.special}
        self._bytes = {int(m.group(1), 16): i for i, p in enumerate(self.pieces) if (m := BYTE.fullmatch(p))}
        self._of_byte = {i: bytes([b]) for b, i in self._bytes.items()}

    def encode(self, text: str) -> list[int]:
        """A space comes before the first word, as in training."""
        ids: list[int] = []
        for char in (" " + text) if text else "":
            raw = char.encode("utf-8", errors="replace")
            ids.extend([self._ids[raw]] if raw in self._ids else (self._bytes.get(b, 0) for b in raw))
        return self._merged(ids)

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        # A model's vocabulary may be wider than its tokenizer's; `tokenizers` says nothing for such ids either.
        known = (i for i in ids if 0 <= i < len(self.pieces) and (special or i not in self.special))
        parts = [self._of_byte.get(i, self.pieces[i]) for i in known]
        text = b"".join(parts).decode("utf-8", errors="replace")
        return text.removeprefix(" ")

    def bytes_of(self, i: int) -> bytes:
        """What one token stands for; nothing for an id that there is none of."""
        return self._of_byte.get(i, self.pieces[i]) if 0 <= i < len(self.pieces) else b""

    def _merged(self, ids: list[int]) -> list[int]:
        """A heap of pairs over a linked list: n log n, where trying all pairs again each time would be n²."""
        after = [*range(1, len(ids)), -1]
        before = list(range(-1, len(ids) - 1))
        alive = [True] * len(ids)
        heap: list[tuple[float, int, int, int, int]] = []

        def offer(i: int) -> None:
            j = after[i] if i >= 0 else -1
            if j < 0:
                return
            joined = self._ids.get(self.pieces[ids[i]] + self.pieces[ids[j]])
            if joined is not None:
                heapq.heappush(heap, (-self.scores[joined], i, ids[i], ids[j], joined))

        for i in range(len(ids)):
            offer(i)
        while heap:
            _, i, left, right, joined = heapq.heappop(heap)
            j = after[i]
            # An entry is stale when a neighbour has been joined to something else meanwhile.
            if not alive[i] or j < 0 or ids[i] != left or ids[j] != right:
                continue
            ids[i], alive[j], after[i] = joined, False, after[j]
            if after[j] >= 0:
                before[after[j]] = i
            offer(before[i])
            offer(i)
        return [ids[i] for i in range(len(ids)) if alive[i]]


def read_tokenizer_bin(path: Path, special: Sequence[int] = (0, BOS, EOS)) -> Pieces:
    """llama2.c's tokenizer.bin: the longest piece, then a score, a length and bytes for each."""
    data = read_plain(path, MOST_BYTES, follow=True)
    at, pieces, scores = 4, list[bytes](), list[float]()
    while at < len(data):
        if at + 8 > len(data):
            raise CheckpointError(f"{path.name} ends inside a piece: it is cut short")
        score, length = struct.unpack_from("<fi", data, at)
        at += 8
        if not 0 <= length <= min(LONGEST, len(data) - at):
            raise CheckpointError(
                f"{path.name}: piece {len(pieces)} says that it has {length} bytes; {len(data) - at} are left"
            )
        pieces.append(data[at : at + length])
        scores.append(score)
        at += length
    if len(pieces) < 3:
        raise CheckpointError(f"{path.name} holds {len(pieces)} pieces; it is no llama2.c tokenizer")
    return Pieces(pieces, scores, special)


def tokenizer_bin(pieces: Pieces) -> bytes:
    """What `read_tokenizer_bin` reads."""
    longest = max(map(len, pieces.pieces))
    parts = [struct.pack("<i", longest)]
    for piece, score in zip(pieces.pieces, pieces.scores, strict=True):
        parts.append(struct.pack("<fi", score, len(piece)) + piece)
    return b"".join(parts)


UNIGRAM, BPE = 1, 2
"""`trainer_spec.model_type`."""
CONTROL, USER_DEFINED = 3, 4
"""Types of pieces that are never split."""
SPACE = "▁"


@dataclass(frozen=True)
class ModelFile:
    """What a `.model` says: pieces as (text, score, type), and how text is prepared."""

    pieces: list[tuple[str, float, int]]
    kind: int
    byte_fallback: bool
    ids: dict[str, int]
    """unknown, bos, eos and pad, those that there are."""
    charsmap: bytes
    dummy_prefix: bool
    single_spaces: bool


def read_model(path: Path) -> ModelFile:
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(read_plain(path, MOST_BYTES, follow=True), path.name):
        if number in (1, 2, 3) and not isinstance(value, bytes):
            raise CheckpointError(f"{path.name} is no SentencePiece model: field {number} is no message")
        if number == 1:
            piece = dict(_fields(value, path.name))
            pieces.append((piece.get(1, b"").decode("utf-8"), _float(piece.get(2, 0)), piece.get(3, 1)))
        elif number in (2, 3):
            (trainer if number == 2 else normalizer).update(_fields(value, path.name))
    kind = trainer.get(3, UNIGRAM)
    if len({piece for piece, _, _ in pieces}) != len(pieces) or not pieces:
        raise CheckpointError(f"{path.name} is no SentencePiece model: {len(pieces)} pieces, and not each once")
    if kind not in (UNIGRAM, BPE) or trainer.get(24):
        raise CheckpointError(
            f"{path.name} is a SentencePiece model of type {kind}; unigram (1) and BPE (2) with spaces before words are read: "
            "save the tokenizer as tokenizer.json with transformers"
        )
    # A negative id, written in ten bytes, says that there is none.
    ids = {name: trainer.get(40 + i, i if i < 3 else -1) for i, name in enumerate(("unknown", "bos", "eos", "pad"))}
    ids = {name: i for name, i in ids.items() if 0 <= i < len(pieces)}
    if "unknown" not in ids:
        raise CheckpointError(f"{path.name} has no piece for what is unknown")
    charsmap, dummy, single = normalizer.get(2, b""), normalizer.get(3, 1), normalizer.get(4, 1)
    return ModelFile(pieces, kind, bool(trainer.get(35, 0)), ids, charsmap, bool(dummy), bool(single))


def as_tokenizer(model: ModelFile) -> Tokenizer:
    """The `tokenizers.Tokenizer` that cuts text as SentencePiece does."""
    with needs_extra("models"):
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    scores = [(piece, score) for piece, score, _ in model.pieces]
    if model.kind == UNIGRAM:
        inner = Tokenizer(models.Unigram(scores, model.ids["unknown"], model.byte_fallback))
    else:
        vocabulary = {piece: i for i, (piece, _) in enumerate(scores)}
        unknown = model.pieces[model.ids["unknown"]][0]
        bpe = models.BPE(vocabulary, _merges(scores), unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback)
        inner = Tokenizer(bpe)
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.single_spaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    steps += [normalizers.Prepend(SPACE)] if model.dummy_prefix else []
    inner.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    ends: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*ends, *([decoders.Strip(" ", 1, 0)] if model.dummy_prefix else [])])
    for wanted, special in ((CONTROL, True), (USER_DEFINED, False)):
        inner.add_tokens([AddedToken(p, special=special, normalized=False) for p, _, kind in model.pieces if kind == wanted])
    return inner


def _merges(scores: list[tuple[str, float]]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, the best piece first."""
    known = dict(scores)
    order = sorted(range(len(scores)), key=lambda i: (-scores[i][1], i))
    words = (scores[i][0] for i in order)
    return [(w[:n], w[n:]) for w in words for n in range(1, len(w)) if w[:n] in known and w[n:] in known]


def _fields(data: bytes, origin: str) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: numbers, four or eight bytes as they are, or a length and bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while at < len(data) and shift < 70:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value
        raise CheckpointError(f"{origin} is no SentencePiece model: it ends inside a number")

    while at < len(data):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            value = varint()
            yield number, value - (1 << 64) if value >> 63 else value
            continue
        if kind not in (1, 2, 5):
            raise CheckpointError(f"{origin} is no SentencePiece model: its field {number} has the unknown type {kind}")
        size = {1: 8, 5: 4}.get(kind) or varint()
        if size > len(data) - at:
            raise CheckpointError(
                f"{origin} is no whole SentencePiece model: {size} bytes are announced, {len(data) - at} are left"
            )
        yield number, data[at : at + size]
        at += size


def _float(raw: object) -> float:
    return struct.unpack("<f", raw)[0] if isinstance(raw, bytes) and len(raw) == 4 else 0.0
