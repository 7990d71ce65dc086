"""torch's private CPU flash operator: what of it we call, and why not where this torch has another one or none.

The public call refuses a bias together with causality and gives no log-sum-exp, so the fastest route on CPU is an operator that
no version of torch promises. It is looked for once, its arguments are read, and the plan goes another way without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

NAME = "_scaled_dot_product_flash_attention_for_cpu"
_FORWARD = ("query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale")
_BACKWARD = (
    "grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal", "attn_mask", "scale",
)  # fmt: skip


@dataclass(frozen=True)
class Operator:
    """Both directions, or why they cannot be called."""

    forward: Any = None
    backward: Any = None
    missing: str | None = None


def find(ops: Any = None) -> Operator:
    """The operator among torch's own, or among `ops`."""
    ops = torch.ops.aten if ops is None else ops
    found: list[Any] = []
    for name, expected, results in ((NAME, _FORWARD, 2), (f"{NAME}_backward", _BACKWARD, 3)):
        op = getattr(ops, name, None)
        if op is None:
            return Operator(missing=f"torch {torch.__version__} has no aten::{name}")
        why = _differs(op, expected, results)
        if why is not None:
            return Operator(missing=f"aten::{name} of torch {torch.__version__} {why}")
        found.append(op)
    return Operator(*found)


def _differs(op: Any, expected: tuple[str, ...], results: int) -> str | None:
    """What of an operator is not as we call it; arguments that came later and have a default are welcome."""
    try:
        schema = op.default._schema
        arguments, returns = list(schema.arguments), list(schema.returns)
    except (AttributeError, RuntimeError, TypeError):
        return "has no default overload whose arguments can be read"
    in_order = [a.name for a in arguments if not a.kwarg_only]
    named = {a.name for a in arguments if a.kwarg_only}
    if tuple(in_order[: len(expected) - 2]) != expected[:-2] or not named >= set(expected[-2:]):
        return f"takes ({', '.join(a.name for a in arguments)}); ({', '.join(expected)}) was expected"
    extra = [a.name for a in arguments if a.name not in expected and not a.has_default_value()]
    if extra:
        return f"also asks for {', '.join(extra)}"
    return None if len(returns) == results else f"gives {len(returns)} results; {results} were expected"


OPERATOR = find()
