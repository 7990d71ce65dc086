"""RoPE in a Hugging Face configuration: `rope_parameters` since transformers 5, `rope_theta` and `rope_scaling` before."""

from __future__ import annotations

import math
from typing import Any

from ...errors import CheckpointError
from ...position import Rope
from .fields import Fields

KINDS = {"default": "default", "linear": "linear", "dynamic": "dynamic", "llama3": "llama3", "yarn": "yarn"}


def read_rope(c: Fields, context: int) -> Rope:
    old, new = c.part("rope_scaling"), c.part("rope_parameters")
    given = new or old or Fields({}, c.origin)
    if "rope_type" not in given and "type" in given:
        given = Fields({**given.values, "rope_type": given.values["type"]}, given.origin)
    kind = given.word("rope_type", KINDS, "default")
    shared: dict[str, Any] = {
        "base": given.number("rope_theta", c.number("rope_theta", 10000.0)),
        "fraction": _fraction(c, given),
    }
    original = given.size("original_max_position_embeddings", c.size("original_max_position_embeddings", context))
    match kind:
        case "default":
            return Rope(**shared)
        case "linear":
            return Rope(**shared, scaling="linear", factor=given.number("factor"))
        case "dynamic":
            # transformers measures the text against the context, whatever `original` says.
            return Rope(**shared, scaling="dynamic", factor=given.number("factor"), original=context)
        case "llama3":
            return Rope(
                **shared, scaling="llama3", factor=given.number("factor"), original=original,
                low=given.number("low_freq_factor", 1.0), high=given.number("high_freq_factor", 4.0),
            )  # fmt: skip
        case _:
            if not given.flag("truncate", True):
                raise given.refuse("truncate", "the ramp of yarn is rounded to whole pairs here")
            factor = given.number("factor", context / original)
            return Rope(
                **shared, scaling="yarn", factor=factor, original=original, low=given.number("beta_slow", 1.0),
                high=given.number("beta_fast", 32.0), stretch=_stretch(given, factor),
            )  # fmt: skip


def _fraction(c: Fields, given: Fields) -> float:
    """transformers' LLaMA, Mistral and Qwen2 turn whole heads: plain RoPE ignores the field, scaled RoPE fails on it."""
    fraction = given.number("partial_rotary_factor", c.number("partial_rotary_factor", 1.0))
    # Earlier versions of regard wrote it, and meant it.
    if fraction != 1.0 and "regard" not in c:
        holder = given if "partial_rotary_factor" in given else c
        raise holder.refuse(
            "partial_rotary_factor",
            "this family turns whole heads: take the field out to read the model as transformers does, or ask for "
            f"attention='dot | softmax | rope(fraction={fraction:g})' then",
        )
    return fraction


def write_rope(rope: Rope) -> dict[str, Any]:
    """The fields for transformers 5, and the ones that versions before it read."""
    if rope.layout != "half" or rope.scaling == "ntk":
        raise CheckpointError(f"{rope}: Hugging Face's layout has half-split pairs and no fixed ntk; change config.rope first")
    if rope.fraction != 1.0:
        raise CheckpointError(
            f"{rope}: Hugging Face's LLaMA turns whole heads, and would ignore the fraction; keep it in config.attention, as "
            f"'dot | softmax | {rope}', which regard reads back"
        )
    scaling: dict[str, Any] = {"rope_type": rope.scaling or "default"}
    if rope.scaling is not None:
        scaling["factor"] = rope.factor
    if rope.scaling in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original
    if rope.scaling == "llama3":
        scaling |= {"low_freq_factor": rope.low, "high_freq_factor": rope.high or 4.0}
    if rope.scaling == "yarn":
        scaling |= {"beta_slow": rope.low, "beta_fast": rope.high or 32.0}
        scaling |= {} if rope.stretch is None else {"attention_factor": rope.stretch}
    whole = {**scaling, "rope_theta": rope.base}
    return {"rope_parameters": whole, "rope_theta": rope.base, "rope_scaling": scaling if rope.scaling else None}


def _stretch(given: Fields, factor: float) -> float | None:
    if "attention_factor" in given:
        return given.number("attention_factor")
    if "mscale" in given and "mscale_all_dim" in given:
        up, down = (0.1 * given.number(k) * math.log(max(factor, 1.0)) + 1 for k in ("mscale", "mscale_all_dim"))
        return up / down
    return None
