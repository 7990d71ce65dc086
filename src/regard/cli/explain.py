"""`regard explain`: which backend runs a mechanism at given shapes, at which cost, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from .console import fail, verb

TYPES = ("float32", "float64", "bfloat16", "float16")


@verb
def explain(
    spec: Annotated[str, typer.Argument(help='a mechanism: "cosine | entmax(1.5) | alibi"')] = "dot | softmax",
    q: Annotated[str, typer.Option("--q", help="shape of q: B,H,Q,D")] = "1,8,1024,64",
    k: Annotated[str | None, typer.Option("--k", help="shape of k: B,G,K,D [default: that of q]")] = None,
    v: Annotated[str | None, typer.Option("--v", help="shape of v: B,G,K,E [default: that of k]")] = None,
    allow: Annotated[str, typer.Option(help="causal, all, or window:N")] = "causal",
    dtype: Annotated[str, typer.Option(help=", ".join(TYPES))] = "float32",
) -> None:
    """What `regard.attend` would do with these shapes; computes nothing.

    \b
    regard explain "cosine | entmax(1.5) | alibi" --q 1,8,1024,64
    regard explain "dot | softmax" --q 1,9,1,64 --k 1,3,512,64
    regard explain "dot | softmax" --q 1,8,8192,64 --allow window:512
    """
    if dtype not in TYPES:
        fail(f"--dtype {dtype}: choose one of {', '.join(TYPES)}")
    shapes = [_shape("q", q), _shape("k", k or q), _shape("v", v or k or q)]
    import torch

    from ..attention.allow import All, Allow, Causal, Window
    from ..attention.operator import explain as plan
    from ..attention.spec import parse
    from ..state import State

    kind, _, number = allow.partition(":")
    rules: dict[str, Allow] = {"causal": Causal(), "all": All()}
    if kind == "window" and number.isdecimal() and len(number) < 19 and int(number):
        rule: Allow = Causal() & Window(int(number))
    elif allow in rules:
        rule = rules[allow]
    else:
        fail(f"--allow {allow}: choose causal, all or window:N, such as window:512")
    parsed = parse(spec)
    D, G = shapes[0][3], shapes[1][1]
    try:
        q_BHQD, k_BGKD, v_BGKE = (torch.empty(s, dtype=getattr(torch, dtype)) for s in shapes)
        # A trace of zeros would be bypassed; a plan asks what one that is there costs.
        state = State(trace=torch.eye(D).expand(G, D, D)) if "trace" in parsed.geometry.needs else None
    except (RuntimeError, TypeError, MemoryError):
        # The numbers are never written, but torch reserves the room for them.
        fail(f"--q {q}: tensors of these shapes are larger than this machine can hold")
    typer.echo(str(plan(q_BHQD, k_BGKD, v_BGKE, parsed, allow=rule, state=state)))


def _shape(name: str, text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(x) for x in text.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if len(shape) != 4 or min(shape) < 0:
        fail(f"--{name} {text[:80]}: a shape is four numbers, batch,heads,length,width, such as 1,8,1024,64")
    return shape
