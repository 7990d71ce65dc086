"""Which problems the kernels take. Imports no triton."""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache

import torch

from ..problem import Problem
from . import rule

WIDEST = 256
"""Numbers of a key or of a value that a program holds at once."""
MOST_KEPT = 64


def refusal(p: Problem, asked: bool = False) -> str | None:
    """Why no kernel takes a problem; None where one does. Triton's interpreter serves whoever `asked` for the kernels."""
    made = p.kernel
    table = p.spec.position.table(p.state)
    if made is None:
        return f"{p.inner.name} has no kernel"
    if p.q.device.type != "cuda" and not (asked and interpreted()):
        return "kernels of our own are for CUDA"
    if not installed():
        return "triton is not installed (pip install 'regard[triton]')"
    if p.q.dtype == torch.float64 and not interpreted():
        return "float64 is for tiles"
    if p.points or p.inner.both_sides:
        return "the weights themselves are asked for"
    if not p.geometry.lowers:
        return f"{p.geometry.name} is no dot product"
    if p.geometry.slotted or (p.refusal is not None and p.refusal.null_logit is not None):
        return "a slot beside the keys is for tiles"
    if p.spec.position.biases and not p.spec.position.shift_invariant:
        return f"{p.spec.position.name} is more than a bias by distance"
    if made.flat_at_top and p.spec.position.biases and p.spec.position.slope_per_head(1) is None:
        return f"{p.spec.position.name} may raise a score above that of distance 0, where {p.inner.name} is flat"
    if table is not None and table.requires_grad and torch.is_grad_enabled():
        return f"{p.spec.position.name}'s table is being trained"
    if not rule.known(p.allow):
        return "the rule is no range of keys with at most one mask and one list of documents"
    width = p.geometry.lowered_width(p.q.shape[-1], p.spec.position.turns, p.state)
    if max(width, p.v.shape[-1]) > WIDEST:
        return f"heads wider than {WIDEST} are for tiles"
    if made.keep > MOST_KEPT:
        return f"more than {MOST_KEPT} keys a row are for tiles"
    return None


@lru_cache
def installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """True where kernels run in Triton's interpreter, which is asked for before triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"
