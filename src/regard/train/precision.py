"""Which precision a run multiplies in: bfloat16 where the processor has instructions for it, and where they work."""

from __future__ import annotations

import subprocess
import sys
import warnings
from functools import cache

import torch

from ..errors import RegardWarning

_TRIED = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(x, x)"


def uses_bfloat16(dtype: str, device: torch.device) -> bool:
    """Without instructions for it, a CPU emulates bfloat16 and is slower than in float32."""
    if dtype != "auto":
        return dtype == "bfloat16"
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    able = capabilities()
    if device.type != "cpu" or not (able.get("amx_bf16") or able.get("avx512_bf16")):
        return False
    if able.get("amx_bf16") and bfloat16_faults():
        warnings.warn(
            "this machine announces tiles for bfloat16 (AMX), and a product with them ends the process: training in float32. "
            "With ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 set before it starts, bfloat16 works without them",
            RegardWarning,
            stacklevel=2,
        )
        return False
    return True


def capabilities() -> dict[str, bool]:
    """What the processor announces; an older torch (2.8) is asked for each by itself."""
    whole = getattr(torch.cpu, "get_capabilities", None)
    if whole is not None:
        return whole()
    each = {"avx512_bf16": "_is_avx512_bf16_supported", "amx_bf16": "_is_amx_tile_supported"}
    return {name: bool(getattr(torch.cpu, asked, bool)()) for name, asked in each.items()}


@cache
def bfloat16_faults() -> bool:
    """Whether one product in bfloat16 kills a process, as on virtual machines that announce AMX and do not have it: torch believes them.

    Tried in a process of its own, since nobody survives it.
    """
    try:
        tried = subprocess.run([sys.executable, "-c", _TRIED], capture_output=True, check=False, timeout=120)
    except (OSError, subprocess.SubprocessError):
        return False
    return tried.returncode < 0


__all__ = ["bfloat16_faults", "capabilities", "uses_bfloat16"]
