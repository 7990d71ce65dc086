"""Kernels for entmax, sparsemax, top-k, hard and GD on CUDA: no tiles in Python, nothing of Q × K.

Their results and gradients are tested in Triton's interpreter, on CPU. **Their speed has never been measured by us**: no machine
of ours has such a device; `regard bench --device cuda` measures it. The plan chooses them on CUDA alone, and only `launch` and
`kernels` import triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...geometry.base import Lowered
from ..problem import Problem
from .choice import refusal


def attend(p: Problem, low: Lowered, dtype: torch.dtype) -> Tensor:
    """The result of a problem that no `refusal` keeps from the kernels, with products in `dtype`."""
    # triton is for those who have such a device: nobody else imports it.
    from .launch import attend

    return attend(p, low, dtype)


__all__ = ["attend", "refusal"]
