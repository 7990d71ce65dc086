"""Imprint energy: how much lower the free energy of a text stands with what is imprinted than without.

    surprise    U = mean_t −log p(x_t | x_<t, identity) + log p(x_t | x_<t)      nats a token; below 0 where the identity expected the text
    attention   A = mean_i −log Σ_text+slots e^score + log Σ_text e^score = log(1 − share_i)
    code        the bits of the state, in nats: what it costs to say which identity this is

U is the definition that survives: 0 for an empty identity, of either sign, and own differs from another's. A is the change of the
free energy that softmax minimises, −⟨p, score⟩ − H(p), when slots are offered beside the text: never above 0, whoever's the slots are, so
it says how much a memory is looked at and not whether it belongs. A free energy with the whole cost of the state in it,
U · tokens + code, is above 0 for every life that is shorter than `repaid` tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..errors import StateError
from ..models.tokenizer import Tokenizer
from .body import Body, body_of
from .experience import Chat, tokenised
from .read.body import Heads
from .read.layer import LayerRead, layer_reads
from .shock import surprisal
from .speech import MARKUP
from .state import Identity


@dataclass(frozen=True, eq=False)
class ImprintEnergy:
    """What an identity does to the free energy of one text."""

    surprise: float
    """U, nats a token."""
    attention: Float[Tensor, "L H"]
    """A of each layer and query head; 0 where there are no slots."""
    tokens: int
    """Tokens of the text that count."""
    code: float
    """Nats of the state itself, at the bits that it is stored in."""

    @property
    def share(self) -> Float[Tensor, "L H"]:
        """The attention that slots take, as a geometric mean over the tokens: 1 − e^A."""
        return 1 - self.attention.exp()

    @property
    def repaid(self) -> float:
        """Tokens like these after which the state has saved what it costs to store; infinite where it saves nothing."""
        return self.code / -self.surprise if self.surprise < 0 else math.inf

    def __str__(self) -> str:
        return (
            f"imprint energy {self.surprise:+.4f} nats a token over {self.tokens:,} tokens; attention {float(self.attention.mean()):+.4f} "
            f"(slots hold {float(self.share.mean()):.1%}); stored in {self.code:,.0f} nats, repaid after {self.repaid:,.0f} tokens"
        )


@torch.no_grad()
def imprint_energy(
    model: nn.Module, identity: Identity, text: str | Chat | list[int] | Tensor, tokenizer: Tokenizer | None = None
) -> ImprintEnergy:
    """The imprint energy of an identity on a text: its own history, or another's as the control."""
    body = body_of(model)
    identity.base.refuse(body.base)
    ids, roles = tokenised(text, tokenizer)
    body.expect_room(len(ids))
    tokens, content = torch.tensor(ids, device=body.device), torch.tensor(roles, device=body.device) != MARKUP
    # The first token surprises no one, and meets no slot.
    content = content & (torch.arange(len(ids), device=body.device) > 0)
    if not bool(content.any()):
        raise StateError(f"{len(ids)} tokens, none of them said after the first: there is nothing to be surprised by")
    reads = layer_reads([identity], body.scales, device=body.device)
    was_training = model.training
    model.eval()
    try:
        with body.read([None] * len(reads)):
            plain = body.logits(tokens[None])[0]
        with body.read(reads):
            logits, heads = body.watched(tokens)
    finally:
        model.train(was_training)
    moved = (surprisal(logits, tokens) - surprisal(plain, tokens))[content]
    attention = torch.stack([_attention(body, i, r, h, content) for i, (r, h) in enumerate(zip(reads, heads, strict=True))])
    return ImprintEnergy(
        float(moved.double().mean()),
        attention.cpu(),
        int(content.sum()),
        0.0 if identity.empty else identity.nbytes * 8 * math.log(2),
    )


def _attention(body: Body, layer: int, read: LayerRead | None, heads: Heads, content: Tensor) -> Tensor:
    """A of one layer, (H)."""
    q, k = heads.q.float(), heads.k.float()
    if read is None or read.k is None:
        return q.new_zeros(q.shape[0])
    m, G = read.slots, k.shape[0]
    # Only distances count, so the slots stand at 0 … m − 1 and the text after them.
    turned_q = body.turned(layer, torch.cat([q.new_zeros(q.shape[0], m, q.shape[-1]), q], 1))[:, m:]
    turned_k = body.turned(layer, torch.cat([read.k[0].float(), k], 1))
    slots, text = turned_k[:, :m], turned_k[:, m:]
    if read.wide:
        asks, tells = read.columns(q[None], k[None])
        turned_q, text = torch.cat([turned_q, asks[0]], -1), torch.cat([text, tells[0]], -1)
        slots = read.slot_heads(slots[None])[0][0]
    rows = turned_q.unflatten(0, (G, -1)) * read.scale
    own = rows @ text[:, None].mT
    later = torch.ones_like(own[0, 0], dtype=torch.bool).triu(1)
    by_text, by_slots = own.masked_fill(later, float("-inf")).logsumexp(-1), (rows @ slots[:, None].mT).logsumexp(-1)
    # log(1 − share) = −log(1 + e^(slots − text))
    return -torch.nn.functional.softplus(by_slots - by_text)[..., content].double().mean(-1).flatten()


__all__ = ["ImprintEnergy", "imprint_energy"]
