"""SentencePiece's BPE from a list of pieces and scores, as llama2.c and LLaMA's GGUF files keep it.

Characters are joined in the order of the scores: always the best pair anywhere, until no pair is a piece. A character that
is no piece becomes its bytes.
"""

from __future__ import annotations

import heapq
import re
import struct
from collections.abc import Sequence
from pathlib import Path

from ..errors import CheckpointError
from ..files import read_plain

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
