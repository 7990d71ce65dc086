"""Products in C, compiled on the first use where a compiler is found; everything runs without them, only slower.

torch's products are made for many rows. For one to eight, on AVX2, these read weights at the memory's speed from one core
already, take int8 weights without rounding activations to bytes, and cost 3 µs to call. REGARD_NATIVE=0 turns them off.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files import home

SOURCE = Path(__file__).with_name("products.c")
FLAGS = ("-O3", "-mavx2", "-mfma", "-fno-math-errno", "-fPIC")
ROWS = 8
STEP = 32
"""The width of an input has to be a multiple of it."""

_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float


def serves(x: Tensor) -> bool:
    """True where x (rows, in) can be multiplied here."""
    rows, width = x.shape
    return rows <= ROWS and width % STEP == 0 and x.dtype == torch.float32 and x.is_cpu and library() is not None


def product(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, onto: Tensor | None = None) -> Tensor:
    """x (rows, in) with weight (out, in), float32, or int8 with a scale per output; `onto` is added to, in place."""
    (rows, inside), outside = x.shape, weight.shape[0]
    x = x if x.is_contiguous() else x.contiguous()
    y = torch.empty(rows, outside) if onto is None else onto
    library().product(
        x.data_ptr(), weight.data_ptr(), None if scale is None else scale.data_ptr(), None if bias is None else bias.data_ptr(),
        y.data_ptr(), rows, inside, outside, onto is not None, torch.get_num_threads(),
    )  # fmt: skip
    return y


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = torch.empty_like(x)
    library().rms(x.data_ptr(), weight.data_ptr(), eps, y.data_ptr(), *x.shape)
    return y


def swiglu(x: Tensor) -> Tensor:
    """silu of the first half of each row times the second."""
    y = torch.empty(x.shape[0], x.shape[1] // 2)
    library().swiglu(x.data_ptr(), y.data_ptr(), *y.shape)
    return y


def turn(x: Tensor, cos: Tensor, sin: Tensor, heads: int, width: int) -> None:
    """The first heads of each row, in place, all by the same angles."""
    rows, stride = x.shape
    library().turn(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), rows, stride, heads, width, cos.shape[-1])


def bend(
    x: Tensor, angles: tuple[Tensor, Tensor] | None, heads: tuple[int, int, int], wide: int, scale: float,
    left: Tensor | None, signs: Tensor | None, bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries, keys and values of one token per row, turned and `wide` columns wide, as an identity bends them.

    x (rows, (H + 2G)·D) is not turned yet; left is (G, R, D), signs (R), bias (G, D)."""
    rows, (H, G, D) = x.shape[0], heads
    q, k, v = torch.empty(rows, H, 1, wide), torch.empty(rows, G, 1, wide), torch.empty(rows, G, 1, wide)
    cos, sin = angles or (None, None)
    library().bend(
        x.data_ptr(), *(None if t is None else t.data_ptr() for t in (cos, sin, left, signs, bias)), scale,
        q.data_ptr(), k.data_ptr(), v.data_ptr(), rows, x.shape[1], H, G, D, 0 if cos is None else cos.shape[-1],
        0 if left is None else left.shape[1], wide,
    )  # fmt: skip
    return q, k, v


@cache
def library() -> Any:
    """The compiled library, or None where it cannot be had."""
    if os.environ.get("REGARD_NATIVE") == "0" or not sys.platform.startswith("linux"):
        return None
    if platform.machine() != "x86_64" or not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return None
    try:
        loaded = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError):
        return None
    loaded.product.argtypes = [_P, _P, _P, _P, _P, _L, _L, _L, _I, _I]
    loaded.rms.argtypes = [_P, _P, _F, _P, _L, _L]
    loaded.swiglu.argtypes = [_P, _P, _L, _L]
    loaded.turn.argtypes = [_P, _P, _P, _L, _L, _L, _L, _L]
    loaded.bend.argtypes = [_P, _P, _P, _P, _P, _P, _F, _P, _P, _P, *[_L] * 8]
    for f in (loaded.product, loaded.rms, loaded.swiglu, loaded.turn, loaded.bend):
        f.restype = None
    return loaded


def _compiled() -> Path:
    # torch's own OpenMP: a second one would bring threads of its own, and both would wait for the cores.
    openmp = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if not openmp or compiler is None:
        raise OSError("no compiler, or torch was built with another OpenMP")
    text = SOURCE.read_bytes()
    key = hashlib.sha256(b"\0".join([text, *map(str.encode, FLAGS), str(openmp[0]).encode()])).hexdigest()[:16]
    target = home() / "native" / f"products-{key}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        part = Path(scratch) / "products"
        # -fopenmp is for compiling only: at linking it would bring the compiler's own OpenMP in.
        commands = (
            [compiler, *FLAGS, "-fopenmp", "-c", str(SOURCE), "-o", f"{part}.o"],
            [compiler, "-shared", f"{part}.o", str(openmp[0]), "-lm", "-o", f"{part}.so"],
        )
        for command in commands:
            subprocess.run(command, check=True, capture_output=True, timeout=120)
        Path(f"{part}.so").replace(target)
    return target
