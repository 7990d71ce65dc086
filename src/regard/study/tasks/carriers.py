"""States that a small model may carry from one window of tokens to the next, at equal parameters: a self, and its peers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...attention.allow import Causal
from ...nn import Attention
from ...state import Self, State

WIDTH, HEADS, SELF = 32, 2, 8
ETA = 1.0
"""How far one window moves what is carried."""
PARAMETERS = 9000
"""Of every reader, within 2%: the feed-forward takes what the carried state leaves."""
FORMS = ("uniform", "temperature", "key_bias", "low_rank", "self_token", "null_slot", "affect")
PEERS = ("rnn", "memory", "fast", "output")


class Carrier(nn.Module):
    """Nothing is carried. Others say what is carried, what it does to the embeddings or to attention, and how a window moves it."""

    spec = "dot"
    size: tuple[int, ...] = (1,)

    def start(self, rows: int) -> Tensor:
        return torch.zeros(rows, *self.size)

    def added(self, x: Tensor, carried: Tensor) -> Tensor:
        return x

    def state(self, carried: Tensor) -> State | None:
        return None

    def after(self, carried: Tensor, hidden: Tensor) -> Tensor:
        return carried


class OwnSelf(Carrier):
    """s enters the scores; s' = s + η g(z, s)."""

    size = (SELF,)

    def __init__(self, form: str) -> None:
        super().__init__()
        self.spec = "affect" if form == "affect" else f"self_conditioned(form={form})"
        self.into, self.out = nn.Linear(WIDTH + SELF, 16), nn.Linear(16, SELF)

    def state(self, carried: Tensor) -> State:
        return State(self=Self(carried))

    def after(self, carried: Tensor, hidden: Tensor) -> Tensor:
        z = hidden.mean(1)
        return carried + ETA * self.out(torch.tanh(self.into(torch.cat([z, carried], -1))))


class OwnOutput(Carrier):
    """The layer's own output conditions the next window, as a self that keeps nothing of what it was."""

    spec, size = "self_conditioned(form=key_bias)", (SELF,)

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, SELF)

    def state(self, carried: Tensor) -> State:
        return State(self=Self(carried))

    def after(self, carried: Tensor, hidden: Tensor) -> Tensor:
        return ETA * self.map(hidden.mean(1))


class Recurrent(Carrier):
    size = (SELF,)

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.read = nn.GRUCell(WIDTH, SELF), nn.Linear(SELF, WIDTH)

    def added(self, x: Tensor, carried: Tensor) -> Tensor:
        return x + self.read(carried)[:, None]

    def after(self, carried: Tensor, hidden: Tensor) -> Tensor:
        return self.cell(hidden.mean(1), carried)


class Memory(Carrier):
    """Slots that are addressed by content: each token reads, each window erases and adds."""

    size = (4, SELF)

    def __init__(self) -> None:
        super().__init__()
        self.ask, self.read = nn.Linear(WIDTH, SELF), nn.Linear(SELF, WIDTH)
        self.head = nn.Linear(WIDTH, 3 * SELF)
        # Slots that start alike would be written alike for ever.
        self.first = nn.Parameter(torch.randn(self.size) * 0.3)

    def start(self, rows: int) -> Tensor:
        return self.first.expand(rows, -1, -1)

    def added(self, x: Tensor, carried: Tensor) -> Tensor:
        weights = (self.ask(x) @ carried.mT).softmax(-1)
        return x + self.read(weights @ carried)

    def after(self, carried: Tensor, hidden: Tensor) -> Tensor:
        key, erase, add = self.head(hidden.mean(1)).chunk(3, -1)
        w = torch.einsum("bmd,bd->bm", carried, key).softmax(-1)[..., None]
        return carried * (1 - w * erase.sigmoid()[:, None]) + w * add[:, None]


class FastWeights(Carrier):
    """A matrix that every token adds an outer product to, and that every token of the next window is multiplied by."""

    size = (SELF, SELF)

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, SELF) for _ in range(3))
        self.read = nn.Linear(SELF, WIDTH)
        self.decay = nn.Parameter(torch.tensor(2.0))

    def added(self, x: Tensor, carried: Tensor) -> Tensor:
        return x + self.read(self.q(x) @ carried)

    def after(self, carried: Tensor, hidden: Tensor) -> Tensor:
        write = self.k(hidden).mT @ self.v(hidden) / hidden.shape[1]
        return self.decay.sigmoid() * carried + ETA * write


def carrier(way: str) -> Carrier:
    others = {"none": Carrier, "rnn": Recurrent, "memory": Memory, "fast": FastWeights, "output": OwnOutput}
    return others[way]() if way in others else OwnSelf(way)


class Reader(nn.Module):
    """A block that reads window after window, and carries something from one to the next."""

    def __init__(self, way: str, vocabulary: int) -> None:
        super().__init__()
        self.carrier = carrier(way)
        self.embed, self.readout = nn.Embedding(vocabulary, WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(3))
        self.attention = Attention(WIDTH, HEADS, f"{self.carrier.spec} | rope", self_width=SELF)
        with torch.no_grad():
            # Scores that differ from the start: a temperature of equal scores says nothing, and learns nothing.
            for part in (self.attention.q, self.attention.k):
                part.weight.mul_(2)
        so_far = sum(p.numel() for p in self.parameters())
        hidden = round((PARAMETERS - so_far - WIDTH) / (2 * WIDTH + 1))
        self.ffn = nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH))

    def window(self, tokens: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of a window, and its hidden states."""
        x = self.carrier.added(self.embed(tokens), carried)
        x = x + self.attention(self.norms[0](x), allow=Causal(), state=self.carrier.state(carried))
        x = self.norms[2](x + self.ffn(self.norms[1](x)))
        return self.readout(x), x

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.stack([logits for logits, _ in self.walked(tokens)], 1)

    def walked(self, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Of each window its logits, and what was carried into it."""
        carried, out = self.carrier.start(len(tokens)), list[tuple[Tensor, Tensor]]()
        for w in range(tokens.shape[1]):
            logits, hidden = self.window(tokens[:, w], carried)
            out.append((logits, carried))
            carried = self.carrier.after(carried, hidden)
        return out
