"""What runs on another device than this CPU: columns, FlexAttention and the Triton kernels, for whoever has one.

`regard bench --device cuda` measures against SDPA, against FlexAttention, and for entmax against the package `entmax` put in
softmax's place and against AdaSplash, where they are installed. Results are compared with our own tiles on the same device.
No figure of it is ours: no machine of the project has such a device. `--device cpu` runs the same code on this one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard.attention import flex
from regard.attention.plan import preferring
from regard.position.alibi import slopes

from .harness import Bench, Case, Row

TITLE = "on another device"
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LENGTHS = (1024, 4096)
WINDOW = 512
HEADS, WIDTH = 8, 64
SPECS: dict[str, regard.Allow] = {
    "euclidean": regard.Causal(), "trace(gamma=0.3)": regard.Causal(), "alibi": regard.Causal(),
    "abstain(softmax, null_logit=0)": regard.Causal(), "dot": regard.Causal() & regard.Window(WINDOW),
    "sparsemax": regard.Causal(), "entmax(1.5)": regard.Causal(), "topk(8)": regard.Causal(), "hard": regard.Causal(),
    "gd": regard.Causal(),
}  # fmt: skip

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Where:
    """A device, and how numbers are held on it."""

    device: torch.device
    dtype: torch.dtype

    @property
    def tolerance(self) -> float:
        return 1e-3 if self.dtype == torch.float32 else 6e-2

    def wait(self) -> None:
        """Until all that was asked for is done: calls return before that."""
        if self.device.type != "cpu":
            getattr(torch, self.device.type).synchronize(self.device)

    def environment(self) -> dict[str, Any]:
        module = getattr(torch, self.device.type, None)
        name = (
            getattr(module, "get_device_name", lambda _: self.device.type)(self.device) if self.device.type != "cpu" else "cpu"
        )
        return {"device": name, "dtype": str(self.dtype).removeprefix("torch.")}


def missing(device: str) -> str | None:
    """Why nothing can be measured on a device of this name, or None."""
    try:
        kind = torch.device(device).type
    except RuntimeError:
        return f"{device!r} names no device of torch; write cuda, cuda:1, xpu, mps or cpu"
    if kind == "cpu":
        return None
    module = getattr(torch, kind, None)
    if module is None or not hasattr(module, "is_available") or not module.is_available():
        return f"torch {torch.__version__} finds no {kind} device here: run it where there is one, with torch's build for it"
    return None


def cases(bench: Bench, where: Where) -> list[Case]:
    found: list[Case] = []
    for length in LENGTHS:
        for train in (False, True):
            for spec, allow in SPECS.items():
                for peer in peers(spec, where):
                    label = f"{spec} against {peer}, N={length}{', training' * train}"
                    found.append(Case(label, lambda a=(spec, allow, peer, length, train): _row(bench, where, *a)))
    return found


def peers(spec: str, where: Where) -> list[str]:
    names = ["SDPA"]
    if spec in ("alibi", "dot") and where.device.type in flex.DEVICES:
        names.append("FlexAttention")
    if spec in ("sparsemax", "entmax(1.5)"):
        names += ["package entmax"] if importlib.util.find_spec("entmax") else []
        names += ["AdaSplash"] if where.device.type == "cuda" and importlib.util.find_spec("adasplash") else []
    return names


def _row(bench: Bench, where: Where, spec: str, allow: regard.Allow, peer: str, length: int, train: bool) -> Row:
    x = _inputs(where, bench.settings.size(length), train)
    state = regard.State(trace=torch.eye(WIDTH, device=where.device).expand(HEADS, WIDTH, WIDTH)) if "trace" in spec else None

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.attend(q, k, v, spec, allow=allow, state=state)

    def tiles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with preferring("tiled"):
            return ours(q, k, v)

    backend = regard.explain(*x, spec, allow=allow, state=state).backend
    return bench.compare(
        f"{spec} ({backend})",
        f"forward{' + backward' * train}, N={x[0].shape[2]}",
        peer,
        _call(ours, x, where, train),
        _call(_peer(peer, spec, x[0].shape[2], where), x, where, train),
        None,
        truth=_call(tiles, x, where, train),
        tolerance=where.tolerance,
    )


def _inputs(where: Where, length: int, train: bool) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    made = (torch.randn(1, HEADS, length, WIDTH, generator=draw) for _ in range(3))
    return [x.to(where.device, where.dtype).requires_grad_(train) for x in made]


def _call(f: Attention, x: Sequence[Tensor], where: Where, train: bool) -> Callable[[], tuple[Tensor, ...]]:
    upstream = torch.randn(x[0].shape, generator=torch.Generator().manual_seed(1)).to(where.device, where.dtype)

    def call() -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(train):
            out = f(*x)
            found = (out.detach(), *(torch.autograd.grad(out, x, upstream) if train else ()))
        where.wait()
        return found

    return call


def _peer(name: str, spec: str, length: int, where: Where) -> Attention:
    if name == "package entmax":
        import entmax as package

        row_map = package.sparsemax if spec == "sparsemax" else package.entmax15
        hidden = torch.full((length, length), float("-inf"), device=where.device).triu(1)
        return lambda q, k, v: row_map(q @ k.mT * q.shape[-1] ** -0.5 + hidden, dim=-1).to(v.dtype) @ v
    if name == "AdaSplash":
        from adasplash import adasplash  # pyright: ignore

        alpha = {} if spec == "entmax(1.5)" else {"alpha": 2.0}
        return lambda q, k, v: adasplash(q, k, v, is_causal=True, **alpha)
    if name == "FlexAttention":
        return _flex(spec, length, where)
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _flex(spec: str, length: int, where: Where) -> Attention:
    """As its own documentation writes it: a function of a score, and one of a pair whose blocks are found once."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    slope = torch.tensor(slopes(HEADS), device=where.device)
    score = (lambda s, b, h, i, j: s - slope[h] * (i - j)) if spec == "alibi" else None
    near = length if spec == "alibi" else WINDOW
    mask = create_block_mask(lambda b, h, i, j: (j <= i) & (i - j < near), None, None, length, length, where.device.type)
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, score_mod=score, block_mask=mask)
