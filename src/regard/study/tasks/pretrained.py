"""The pretrained model that studies look into, opened once a process; fewer of its layers where only the steps are tried."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from ...errors import CheckpointError
from ...models.llama import Llama
from ...models.tokenizer import Tokenizer
from .packaged import fetched, opened


@cache
def smollm2(depth: int | None = None) -> tuple[Llama, Tokenizer]:
    """SmolLM2-135M-Instruct, from the package that carries it; with `depth`, its first layers alone."""
    # A model of its own where layers are taken away, the shared one otherwise.
    model, tokenizer = opened("smollm2") if depth is None else fetched("smollm2")
    if not isinstance(model, Llama):
        raise CheckpointError(f"smollm2 is a {type(model).__name__} here; a Llama is expected")
    if depth is not None:
        model.blocks, model.config = model.blocks[:depth], replace(model.config, depth=depth)
    return model.eval(), tokenizer
