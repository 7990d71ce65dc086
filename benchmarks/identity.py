"""Decoding SmolLM2-135M with an identity beside decoding it without: rank-8 traces, a self and 64 imprints, in turns."""

from __future__ import annotations

from functools import cache
from statistics import median

import torch
from torch import Tensor

from regard.identity.body import base_of
from regard.identity.packed import Packed
from regard.identity.speaking import living
from regard.identity.state import Identity, Imprints, SelfState, TraceState
from regard.models import Sampling, generate
from regard.models import downloads as hub
from regard.models.base import Model

from .harness import UNWRITTEN, Bench, Case, Reach, Row, quartiles, take_turns

TITLE = "Decoding with an identity"
PEER = "without"


def cases(bench: Bench) -> list[Case]:
    n = 8 if bench.settings.quick else 64
    return [
        Case("trace, self, 64 imprints", lambda: _row(bench, n, ("self", "trace", "imprints"), Reach(1.04, "times"))),
        Case("64 imprints alone", lambda: _row(bench, n, ("imprints",), None)),
    ]


def _row(bench: Bench, new: int, parts: tuple[str, ...], reach: Reach | None) -> Row:
    model, identity = _model()
    who = identity.only(*parts)  # pyright: ignore
    tokens = torch.randint(100, 40000, (1, 32), generator=torch.Generator().manual_seed(0))

    def without() -> Tensor:
        return torch.tensor(generate(model, tokens, Sampling(max_tokens=new, stop_ids=UNWRITTEN)).tokens)

    def ours() -> Tensor:
        with living(model, who):
            return without()

    pairs = take_turns(ours, without, bench.settings)
    ratios = pairs.ratios("times")
    low, high = quartiles(ratios)
    what = "rank-8 trace, self, 64 imprints" if len(parts) == 3 else "64 imprints"
    return Row(what, f"{new} after 32", PEER, median(pairs.ours) / new, median(pairs.theirs) / new, median(ratios), low, high,
               reach, "times")  # fmt: skip


@cache
def _model() -> tuple[Model, Identity]:
    hub.get("smollm2")
    model, _ = hub.open_model("smollm2")
    base = base_of(model)
    L, G, D = base.depth, base.key_heads, base.head_width
    g = torch.Generator().manual_seed(0)
    ints = torch.arange(64, dtype=torch.int32)
    kept = Imprints(
        Packed.of(torch.randn(L, G, 64, D, generator=g)), Packed.of(torch.randn(L, G, 64, D, generator=g) * 0.1), ints, ints,
        torch.ones(64), torch.zeros(64, dtype=torch.int32), torch.full((L, G, 64), -1.0), torch.ones(64),
    )  # fmt: skip
    trace = TraceState(
        Packed.of(torch.randn(L, G, 8, D, generator=g) * 0.05), torch.tensor([1, 1, 1, 1, -1, -1, -1, -1], dtype=torch.int8)
    )
    me = SelfState(torch.randn(L, G * D, generator=g) * 0.01, "key_bias")
    return model, Identity(base, me, trace, kept, ("made up",))


__all__ = ["TITLE", "cases"]
