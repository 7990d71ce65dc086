"""An identity for people to read: its imprints as words, its numbers as bars, and nothing that could steer a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from ..models.tokenizer import Tokenizer
    from .state import Identity

BARS = "▁▂▃▄▅▆▇█"


def words(identity: Identity, tokenizer: Tokenizer, index: Iterable[int] | None = None) -> list[str]:
    """Imprints as words, the worthiest first: tokens that followed each other read together."""
    imprints = identity.imprints
    chosen = sorted(range(len(imprints)) if index is None else index)
    position, token, source, worth = (
        cast(list[Any], x.tolist()) for x in (imprints.position, imprints.token, imprints.source, imprints.worth)
    )
    runs: list[list[int]] = []
    for i in chosen:
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and position[i] == position[last] + 1
            and source[i] == source[last]
            and min(token[i], token[last]) >= 0
        ):
            runs[-1].append(i)
        else:
            runs.append([i])
    runs.sort(key=lambda run: -max(worth[i] for i in run))
    return [word(tokenizer, [token[i] for i in run]) for run in runs]


def word(tokenizer: Tokenizer | None, tokens: Sequence[int]) -> str:
    """Tokens to be read by a person; one that stands for several merged moments has no word."""
    if tokenizer is None or any(t < 0 for t in tokens):
        return "·" if any(t < 0 for t in tokens) else " ".join(f"#{t}" for t in tokens)
    return clean(tokenizer.decode(tokens, special=True)).replace("\n", "⏎").strip() or "␣"


def clean(text: str) -> str:
    """Text that cannot steer a terminal: control characters are shown, not sent."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


def spark(values: Sequence[float], width: int = 40) -> str:
    """A line of bars; of many values, evenly picked ones and always the last."""
    if len(values) > width:
        values = [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    top = max(values, default=0.0)
    return "".join(BARS[min(int(v / top * len(BARS)), len(BARS) - 1)] if top > 0 else BARS[0] for v in values)


def size(count: int) -> str:
    return f"{count:,} bytes" if count < 10_000 else f"{count / 1000:,.0f} KB"


def several(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


__all__ = ["clean", "several", "size", "spark", "word", "words"]
