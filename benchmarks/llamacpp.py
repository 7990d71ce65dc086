"""llama.cpp in this process, where its wheel `xllamacpp` is installed: the same GGUF, as many threads, greedy."""

from __future__ import annotations

import importlib
import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

from regard.models import downloads as hub

SLOTS = 8


@cache
def installed() -> Any:
    try:
        return importlib.import_module("xllamacpp")
    except ImportError:
        return None


def gguf() -> Path:
    return next(hub.place("smollm2").glob("*.gguf"))


@cache
def server() -> Any:
    x = installed()
    p = x.CommonParams()
    p.model.path = str(gguf())
    p.n_parallel, p.n_ctx, p.port, p.verbosity = SLOTS, SLOTS * 1024, 0, -1
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = torch.get_num_threads()
    return x.Server(p)


def texts(prompts: list[list[int]], new: int) -> list[str]:
    """What it writes after each prompt, all of them at once in slots of their own."""

    def one(prompt: list[int]) -> str:
        asked = {"prompt": prompt, "max_tokens": new, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
        said = server().handle_completions(asked)
        answer = json.loads(said) if isinstance(said, str) else said
        assert answer["usage"]["completion_tokens"] == new, answer["usage"]
        return answer["choices"][0]["text"]

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, prompts))


__all__ = ["SLOTS", "gguf", "installed", "server", "texts"]
