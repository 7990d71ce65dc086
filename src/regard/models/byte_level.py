"""How byte-level tokenizers write bytes, and how they cut text before looking for pairs."""

from __future__ import annotations

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {"llama-bpe": WORDS % "1,3", "llama3": WORDS % "1,3", "qwen2": WORDS % "1"}
"""How text is cut before the byte pairs, by the name that llama.cpp gives it, where it is not GPT-2's own way."""


def byte_characters() -> list[str]:
    """How byte-level tokenizers write each of the 256 bytes: as itself where it can be seen, else from U+0100 on."""
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(b) if b in seen else chr(next(others)) for b in range(256)]


__all__ = ["SPLITS", "byte_characters"]
