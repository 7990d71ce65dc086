"""A training step of a small GPT (6 layers, width 384, 6 heads, 256 tokens) beside the same model in other libraries.

A step is forward, loss, backward and AdamW; data is given. Each library is trained as its own documentation shows: its model, and
`torch.optim.AdamW` as it comes; ours with what `regard train` uses. x-transformers is met twice, as it is installed and with its
option `attn_flash`; `transformers` uses SDPA by itself. GPT-2's weights are copied, so that both sides walk through the same
losses; x-transformers' model differs in details (no biases in attention, its own start), so both sides only have to learn.

Compiled rows give both sides what torch has for anyone: `torch.compile` of the model and its loss in one graph, and AdamW in one fused
pass. Compiling takes minutes, so that a quick run leaves them out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models import GPT2Config
from regard.train import OptimConfig
from regard.train.optim import adamw

from .harness import Bench, Case, Reach, Row

TITLE = "a training step"
VOCABULARY, WIDTH, DEPTH, HEADS, LENGTH, BATCH = 65, 384, 6, 6, 256, 8
RATE = 1e-4
"""Small enough to fall from the first step on, without a warmup."""
STEPS = 4
"""Steps before the clock in which both models must begin to learn the batch."""


def cases(bench: Bench) -> list[Case]:
    return [
        Case("training against x-transformers", lambda: _against(bench, "x-transformers", _x_transformers(False), "gelu", Reach(1.15, "faster"))),
        Case(
            "training against x-transformers, attn_flash",
            lambda: _against(bench, "x-transformers (attn_flash)", _x_transformers(True), "gelu", Reach(1.15, "faster")),
        ),
        Case("training against transformers GPT-2", lambda: _against(bench, "transformers", _gpt2(), "gelu_tanh", Reach(1.1, "faster"))),
        *([] if bench.settings.quick else [
            Case(
                f"training against x-transformers, {peer}, both compiled",
                lambda p=peer, f=flash: _against(
                    bench, f"x-transformers ({p}), both compiled", _x_transformers(f), "gelu", Reach(1.15, "faster"), compiled=True
                ),
            )
            for peer, flash in (("as installed", False), ("attn_flash", True))
        ]),
    ]  # fmt: skip


Forward = Callable[[Tensor], Tensor]


def _against(
    bench: Bench, peer: str, theirs: tuple[nn.Module, Forward], activation: Any, reach: Reach, compiled: bool = False
) -> Row:
    draw = torch.Generator().manual_seed(0)
    length, batch = bench.settings.size(LENGTH), 2 if bench.settings.quick else BATCH
    x, y = (torch.randint(0, VOCABULARY, (batch, length), generator=draw) for _ in range(2))
    torch.manual_seed(0)
    model = GPT2Config(VOCABULARY, WIDTH, DEPTH, HEADS, context=LENGTH, activation=activation).build()
    other, forward = theirs
    same = type(other).__name__ == "GPT2LMHeadModel"
    if same:
        _copy(other, model)
    optimizers = (
        adamw(model, OptimConfig(lr=RATE, beta_2=0.999, weight_decay=0.01)),
        torch.optim.AdamW(other.parameters(), lr=RATE, fused=True if compiled else None),
    )
    sides = zip((lambda t: model(t).logits, forward), optimizers, strict=True)
    mine, others = (_step(f, optimizer, x, y, compiled) for f, optimizer in sides)
    for step in (mine, others):
        seen = [float(step()) for _ in range(STEPS)]
        if not min(seen[1:]) < seen[0]:
            raise AssertionError(f"a side does not learn: losses {seen}")
    row = bench.compare(
        "GPT 6 × 384",
        f"training step, {batch} × {length} tokens",
        peer,
        mine,
        others,
        reach,
        # AdamW as it comes decays biases too, which moves the losses of equal models apart in the fourth digit.
        tolerance=1e-3 if same else 0.5,
        note=f"{sum(p.numel() for p in model.parameters()):,} parameters against {sum(p.numel() for p in other.parameters()):,}.",
    )
    print(f"{peer}: {batch * length / row.ours:,.0f} tokens/s against {batch * length / row.theirs:,.0f}")
    return row


def _step(
    forward: Forward, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, compiled: bool = False
) -> Callable[[], Tensor]:
    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(forward(x).flatten(0, 1), y.flatten())

    made = torch.compile(loss_of) if compiled else loss_of

    def call() -> Tensor:
        loss = made(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return call


def _x_transformers(flash: bool) -> tuple[nn.Module, Forward]:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=WIDTH, depth=DEPTH, heads=HEADS, attn_flash=flash)
    model = TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=LENGTH, attn_layers=layers)
    return model, model


def _gpt2() -> tuple[nn.Module, Forward]:
    from transformers import GPT2Config as TheirConfig
    from transformers import GPT2LMHeadModel

    sizes = {"n_positions": LENGTH, "n_embd": WIDTH, "n_layer": DEPTH, "n_head": HEADS}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(TheirConfig(vocab_size=VOCABULARY, use_cache=False, **sizes, **none))
    return model, lambda x: model(x).logits


def _copy(theirs: Any, ours: Any) -> None:
    """Their GPT-2's weights into ours; they keep matrices transposed, and q, k and v in one."""
    body = theirs.transformer
    with torch.no_grad():
        ours.embed.weight.copy_(body.wte.weight)
        ours.place.weight.copy_(body.wpe.weight)
        _copy_all(ours.norm, body.ln_f)
        for mine, other in zip(ours.blocks, body.h, strict=True):
            _copy_all(mine.norm_1, other.ln_1)
            _copy_all(mine.norm_2, other.ln_2)
            parts = zip(other.attn.c_attn.weight.chunk(3, dim=1), other.attn.c_attn.bias.chunk(3), strict=True)
            for linear, (weight, bias) in zip((mine.attention.q, mine.attention.k, mine.attention.v), parts, strict=True):
                linear.weight.copy_(weight.T)
                linear.bias.copy_(bias)
            for linear, conv in (
                (mine.attention.out, other.attn.c_proj),
                (mine.ffn.up, other.mlp.c_fc),
                (mine.ffn.down, other.mlp.c_proj),
            ):
                linear.weight.copy_(conv.weight.T)
                linear.bias.copy_(conv.bias)


def _copy_all(mine: nn.Module, other: nn.Module) -> None:
    for a, b in zip(mine.parameters(), other.parameters(), strict=True):
        a.copy_(b)
