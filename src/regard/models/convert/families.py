"""The families that Hugging Face knows. A row here is all that a new one needs."""

from __future__ import annotations

from . import gpt2, llama
from .family import Family

FAMILIES: dict[str, Family] = {"gpt2": gpt2.FAMILY, "llama": llama.FAMILY}
