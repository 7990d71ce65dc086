"""The families that Hugging Face knows. A row here is all that a new one needs."""

from __future__ import annotations

from . import bert, gpt2, llama, t5
from .family import Family

FAMILIES: dict[str, Family] = {
    "gpt2": gpt2.FAMILY,
    "llama": llama.FAMILY,
    "bert": bert.FAMILY,
    "t5": t5.FAMILY,
}
