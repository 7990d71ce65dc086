"""What a checkpoint says beside its architecture: the ids that start and end a text, and how its authors generate.

No layer needs it, and whoever saves the model again must not lose it: it comes in with the weights, goes out with them, and
is left as it was written, a number or a list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ID_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id", "unk_token_id")


@dataclass(frozen=True)
class GenerationInfo:
    ids: Mapping[str, int | list[int] | None] = field(default_factory=dict[str, int | list[int] | None])
    """The fields of config.json that end in `_token_id`, as they stand there."""
    config: Mapping[str, Any] | None = None
    """generation_config.json, whole; None where there is none."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends a text, from generation_config.json where it says so, else from config.json."""
        chosen = (self.config or {}).get("eos_token_id")
        return as_ids(self.ids.get("eos_token_id") if chosen is None else chosen)


def as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Ids as Hugging Face writes them: one, a list, or none; -1 stands for none too."""
    given = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(i for i in given if i >= 0))


__all__ = ["ID_FIELDS", "GenerationInfo", "as_ids"]
