"""A self chosen by free energy: the one that expects to be surprised least, found by a few gradient steps."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from ..body import body_of
from ..state import Form, Identity, SelfState
from ..write.self_state import fresh
from .consolidate import Draft


def chosen_by_free_energy(
    model: nn.Module, identity: Identity, tokens: list[int], *, form: Form = "key_bias", steps: int = 8, rate: float = 0.02,
    precision: float = 1.0,
) -> Identity:  # fmt: skip
    """The self that expects to be surprised least: a few gradient steps on surprise + precision/2 · |s − s₀|².

    s₀ is where the self stands now, so precision says how firmly it is held there.
    """
    body = body_of(model)
    identity.base.refuse(body.base)
    start = identity.self if identity.self is not None else fresh(identity.base, form)
    s = start.s.clone().requires_grad_()
    ids = torch.tensor([tokens], device=body.device)
    optimiser = torch.optim.Adam([s], lr=rate)
    work = Draft(replace(identity, self=start), {"s": s}, form=start.form)
    L, G = identity.base.depth, identity.base.key_heads
    for _ in range(steps):
        with torch.enable_grad(), body.read(work.reads(body.scales, body.device)):
            logits = body.logits(ids)[0]
            surprise = torch.nn.functional.cross_entropy(logits[:-1].float(), ids[0, 1:])
            energy = surprise + precision / 2 * (s - start.s).square().sum() / (L * G)
            (grad,) = torch.autograd.grad(energy, [s])
        s.grad = grad
        optimiser.step()
    return replace(identity, self=SelfState(s.detach(), start.form))


__all__ = ["chosen_by_free_energy"]
