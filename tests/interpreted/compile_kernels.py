"""Every kernel through Triton's compiler, for GPUs that are not here: `python compile_kernels.py front|whole`.

The interpreter takes Python that the compiler refuses. `front` reads and types each kernel as the compiler does, in a fraction
of a second; `whole` goes on to machine code, and says how much shared memory a program takes.
"""

import itertools
import sys
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from regard.attention.triton import kernels

TARGETS = {"cuda 8.0": GPUTarget("cuda", 80, 32), "cuda 9.0": GPUTarget("cuda", 90, 32)}
SWITCHES = ("BIAS", "POSITION", "MASK", "IDS", "FLOOR")
ONES = ("Q", "K", "H", "G", "D", "E", "offset", "bias_heads", "bias_step", "mask_k")
NUMBERS = {"scale": "fp32", "narrow": "fp32"}
POINTERS = {"lo_ptr": "i32", "hi_ptr": "i32", "index_ptr": "i32", "ids": "i64", "mask": "u8"}
REAL = (
    "most_ptr", "tau_ptr", "total_ptr", "alpha_ptr", "weight_ptr", "mean_ptr", "dalpha_ptr", "dbias_ptr", "bias", "position", "floor",
)  # fmt: skip


def source(kernel: Any, constants: dict[str, Any], held: str) -> ASTSource:
    """A kernel as it is launched with inputs of a dtype."""
    signature: dict[str, str] = {}
    for name in kernel.arg_names:
        summed = name in REAL or (kernel is kernels.topk_backward and name in ("dk_ptr", "dv_ptr"))
        if name in constants:
            signature[name] = "constexpr"
        elif name in POINTERS or name in REAL or name.endswith("_ptr"):
            signature[name] = "*" + POINTERS.get(name, "fp32" if summed else held)
        else:
            signature[name] = NUMBERS.get(name, "i32")
    return ASTSource(fn=kernel, signature=signature, constexprs=constants)


def cases(width: int, rows: int) -> list[tuple[Any, dict[str, Any]]]:
    size = {"M": rows, "WIDE": width, "VALUE": width, "REAL": kernels.tl.float32}
    found: list[tuple[Any, dict[str, Any]]] = []
    for on in (True, False):
        block = {**size, "N": rows, "WIDEN": False} | dict.fromkeys(SWITCHES, on)
        found += [(kernels.entmax_forward, {**block, "KIND": kind}) for kind in (1, 2, 3)]
        found += [(kernels.softmax_forward, {**block, "PICKS": picks, "RIGHT": on}) for picks in (True, False)]
        found += [(kernels.backward_rows, {**block, "KIND": kind, "LEARNED": kind == 3 and on}) for kind in range(4)]
        found += [(kernels.backward_keys, {**block, "KIND": kind, "PICKS": kind == 0 and on}) for kind in range(4)]
        found.append((kernels.topk_forward, {**block, "KEEP": 5, "ROOM": 8}))
        found.append((kernels.topk_backward, {**size, "BIAS": on, "KEEP": 5}))
    return found


def main(how: str) -> None:
    done = 0
    turn = itertools.cycle(TARGETS.items())
    for (kernel, constants), held in zip(
        cases(64, 64), itertools.cycle(("bf16", "fp32", "fp16") if how == "front" else ("bf16", "fp16")), strict=False
    ):
        made = source(kernel, constants, held)
        if how == "front" and done % 2:
            # Triton makes a constant of every number that is 1.
            ones = [n for n in kernel.arg_names if n not in constants and n in ONES]
            made = source(kernel, constants | dict.fromkeys(ones, 1), held)
        if how == "front":
            backend = make_backend(TARGETS["cuda 8.0"])
            options = backend.parse_options({"num_warps": 4, "enable_fp_fusion": False})
            context = ir.context()
            ir.load_dialects(context)
            backend.load_dialects(context)
            codegen, modules = backend.get_codegen_implementation(options), backend.get_module_map()
            assert "tt.func" in str(made.make_ir(TARGETS["cuda 8.0"], options, codegen, modules, context))
        else:
            name, target = next(turn)
            binary = triton.compile(made, target=target, options={"num_warps": 4, "enable_fp_fusion": False})
            print(f"{kernel.__name__} for {name}: {binary.metadata.shared:,} bytes of shared memory", flush=True)
            assert binary.metadata.shared <= 100_000
        done += 1
    print(f"{done} kernels")


if __name__ == "__main__":
    main(sys.argv[1])
