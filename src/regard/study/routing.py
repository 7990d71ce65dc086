"""Routing buys capacity without compute: mixtures of experts, Switch and the Routing Transformer, against dense models of equal cost.

**Experts.** 1,024 made-up facts (a, b) → c are to be remembered: a task of capacity and nothing else. A token of a mixture goes
through as many multiplications as the dense model's, and eight times as many wait.

    dense      a feed-forward layer of 24 units, which is what the costliest routed layer uses with its router
    all        8 × 16 units, all used: the capacity of the mixtures at eight times their compute
    noisy      two of 16 experts of 8 units, trained noise on the scores, importance and load balanced (Shazeer et al. 2017)
    switch     one of 8 experts of 16 units, capacity 1.25 (Fedus et al. 2021)
    random     switch whose router is a die: the same layers, and no routing. Other dice in training than at use.

The load is max/mean over experts of the share of tokens that each gets at use, 1 when even. Both routers are also trained without
their balance loss: if the load is even then as well, the loss is not what makes it so.

**Clusters.** 32 pairs (key, value) stand in a row and 8 keys are asked for. One layer of attention, in which a query meets all
keys before it, those of its own cluster (4 clusters, q and k share one map, Roy et al. 2021), those of a random cluster, or the
last 10, which are more pairs than the clusters allow.

Tried: associative recall over two layers, where the first has to look one token back, was not learnt by any of the four within 250
steps (accuracy 0.06 to 0.10), so that it could not tell them apart; hence the pairs.

The task of facts was chosen after two others, one seed each, in which a whole block read "a b c a b c …". Two blocks, 600 batches of 256,
in nats: dense 1.30, Switch 0.38, noisy 1.36: noisy gained nothing. One block, 400 batches: dense 1.78, eight times the dense compute
2.02, Switch 1.45, noisy 2.52, dice 2.36: noisy *lost*, and since more units did not help either, the loss said nothing of capacity. In
that second one the noisy gate without its balance loss did collapse, to a largest load of 6.4 where 8 is the most, and with it had
2.0. So the gain below is that of a layer which is short of memory, and an even load without a balance loss is not the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.allow import Allow, Causal, Window
from ..attention.spec import parse
from ..models.blocks import FeedForward
from ..models.clusters import ClusteredAttention
from ..models.experts import Experts, Gate, Route
from ..nn import Attention
from .frame.figure import COLOURS, bars
from .frame.study import Plant, Record, Size, Study
from .frame.verdict import Check, Verdict, interval, judged
from .tasks.training import IGNORED, Batch, accuracy, built, fit, generator, nats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

A = 32
"""Of a, of b and of c there are this many, so that there are A² facts."""
WIDTH, BALANCE = 32, 0.01
STEPS = {"mini": 4, "quick": 40, "full": 250}
CLUSTER_STEPS = {"mini": 4, "quick": 40, "full": 200}
KEYS, VALUES, PAIRS, ASKED = 64, 16, 32, 8
Kind = Literal["all", "clusters", "random", "window"]


@dataclass(frozen=True)
class Mixture:
    hidden: int
    experts: int = 1
    chosen: int = 1
    gate: Gate = "plain"
    capacity: float | None = None
    balance: float = BALANCE
    dice: bool = False

    def build(self) -> FeedForward | Experts:
        if self.experts == 1:
            return FeedForward(WIDTH, self.hidden)
        return Experts(WIDTH, self.hidden, self.experts, self.chosen, self.capacity, gate=self.gate)


MIXTURES = {
    "dense": Mixture(24),
    "all": Mixture(128),
    "noisy": Mixture(8, 16, 2, gate="noisy"),
    "noisy, unbalanced": Mixture(8, 16, 2, gate="noisy", balance=0.0),
    "switch": Mixture(16, 8, capacity=1.25),
    "switch, unbalanced": Mixture(16, 8, capacity=1.25, balance=0.0),
    "random": Mixture(16, 8, dice=True),
}


class Dice(nn.Module):
    """In the place of a router: scores that know nothing of the token."""

    def __init__(self, experts: int, seed: int) -> None:
        super().__init__()
        self.experts, self.g = experts, generator(seed)

    def forward(self, x: Tensor) -> Tensor:
        return torch.randn(len(x), self.experts, generator=self.g)


class Facts(nn.Module):
    """a and b in, c out, through one feed-forward layer: what it knows, that layer remembers."""

    def __init__(self, m: Mixture, seed: int) -> None:
        super().__init__()
        self.a, self.b, self.layer = nn.Embedding(A, WIDTH), nn.Embedding(A, WIDTH), m.build()
        self.norm, self.last, self.head = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, A)
        if m.dice and isinstance(self.layer, Experts):
            self.layer.router = Dice(m.experts, seed)  # pyright: ignore[reportAttributeAccessIssue]
        self.route: Route | None = None

    def forward(self, pairs: Tensor) -> Tensor:
        x = self.a(pairs[..., 0]) + self.b(pairs[..., 1])
        if isinstance(self.layer, Experts):
            y, self.route = self.layer(self.norm(x))
        else:
            y = self.layer(self.norm(x))
        return self.head(self.last(x + y))


def mixture(seed: int, name: str, steps: int) -> dict[str, float]:
    """The loss and the load of one mixture after training."""
    m = MIXTURES[name]
    model = built(seed, lambda: Facts(m, seed))
    table = torch.randint(A, (A, A), generator=generator(3000 + seed))

    def batch(g: torch.Generator, count: int) -> Batch:
        pairs = torch.randint(A, (1, count, 2), generator=g)
        return Batch(pairs, table[pairs[..., 0], pairs[..., 1]])

    def loss(_: nn.Module, b: Batch) -> Tensor:
        said = F.cross_entropy(model(b.tokens).flatten(0, 1), b.targets.flatten())
        return said if model.route is None else said + m.balance * model.route.balance

    fit(model, lambda g: batch(g, 512), steps, lr=1e-2, seed=seed, loss=loss)
    test = batch(generator(4000 + seed), 2048)
    measured = {"loss": nats(model, test), "accuracy": accuracy(model, test)}
    return measured | {"load": 1.0 if model.route is None else float(model.route.load.max()) * m.experts}


class RandomClusters(ClusteredAttention):
    """Clusters that know nothing of the vectors."""

    g = generator(0)

    def nearest(self, x: Tensor) -> Tensor:
        return torch.randint(self.centroids.shape[1], x.shape[:-1], generator=self.g)


class Lookup(nn.Module):
    """Pairs (key, value) in a row, then keys alone (value 0): what was their value?"""

    def __init__(self, kind: Kind, seed: int) -> None:
        super().__init__()
        self.keys, self.values = nn.Embedding(KEYS, WIDTH), nn.Embedding(VALUES + 1, WIDTH)
        spec = parse("dot | softmax")
        if kind in ("all", "window"):
            self.attention = Attention(WIDTH, 2, spec)
        else:
            self.attention = (ClusteredAttention if kind == "clusters" else RandomClusters)(WIDTH, 2, spec, 4, decay=0.95)
        if isinstance(self.attention, RandomClusters):
            self.attention.g = generator(seed)
        self.attention.k = self.attention.q
        self.norm, self.last, self.head = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VALUES)
        self.rule: Allow = Causal() & Window(10) if kind == "window" else Causal()

    def embedded(self, pairs: Tensor) -> Tensor:
        return self.norm(self.keys(pairs[..., 0]) + self.values(pairs[..., 1]))

    def forward(self, pairs: Tensor) -> Tensor:
        return self.head(self.last(self.attention(self.embedded(pairs), allow=self.rule)))

    def pairs_met(self, pairs: Tensor) -> float:
        """The share of causal pairs that met."""
        weights = self.attention.inspect(self.embedded(pairs), allow=self.rule).weights()
        rows, N = weights.shape[0] * weights.shape[1], weights.shape[-1]
        return float((weights > 0).sum()) / (rows * N * (N + 1) / 2)


def lookups(g: torch.Generator, rows: int) -> Batch:
    keys = torch.rand(rows, KEYS, generator=g).argsort(1)[:, :PAIRS]
    values = torch.randint(1, VALUES + 1, (rows, PAIRS), generator=g)
    which = torch.rand(rows, PAIRS, generator=g).argsort(1)[:, :ASKED]
    unknown = torch.zeros(rows, ASKED, dtype=torch.long)
    tokens = torch.stack([torch.cat([keys, keys.gather(1, which)], 1), torch.cat([values, unknown], 1)], 2)
    targets = torch.full((rows, PAIRS + ASKED), IGNORED)
    targets[:, PAIRS:] = values.gather(1, which) - 1
    return Batch(tokens, targets)


def clusters(seed: int, kind: Kind, steps: int) -> dict[str, float]:
    model = built(seed, lambda: Lookup(kind, seed))
    fit(model, lambda g: lookups(g, 32), steps, lr=1e-2, seed=seed)
    test = lookups(generator(6000 + seed), 128)
    with torch.no_grad():
        return {"accuracy": accuracy(model, test), "pairs": model.pairs_met(test.tokens)}


def run(seed: int, size: Size) -> Record:
    kinds: tuple[Kind, ...] = ("all", "clusters", "window", "random")
    return {
        "experts": {name: mixture(seed, name, STEPS[size]) for name in MIXTURES},
        "clusters": {kind: clusters(seed, kind, CLUSTER_STEPS[size]) for kind in kinds},
    }


def of(records: Sequence[Record], part: str, name: str, field: str) -> list[float]:
    return [r[part][name][field] for r in records]


def gain(records: Sequence[Record], name: str) -> list[float]:
    """Nats below the dense model of equal compute."""
    pairs = zip(of(records, "experts", "dense", "loss"), of(records, "experts", name, "loss"), strict=True)
    return [dense - routed for dense, routed in pairs]


def judge(records: Sequence[Record]) -> Verdict:
    by_dice = gain(records, "random")
    checks = [
        Check(
            f"nats that {name} gains on a dense layer of equal compute (control: random routing)",
            gain(records, name), above=0.1, control=by_dice, condition=f"{said}: it then holds more at equal compute",
        )
        for name, said in (("switch", "one expert is chosen (Switch)"), ("noisy", "two are chosen by a noisy gate"))
    ] + [
        Check(
            f"largest load over the mean, {name} (control: without the balance loss)",
            of(records, "experts", name, "load"), below=2.0, control=of(records, "experts", f"{name}, unbalanced", "load"),
            condition=f"{name} has its balance loss: the load is even then, and uneven without",
        )
        for name in ("switch", "noisy")
    ]  # fmt: skip
    met = of(records, "clusters", "clusters", "pairs")
    return judged(
        *checks,
        Check(
            "accuracy of lookups within clusters (control: random clusters)", of(records, "clusters", "clusters", "accuracy"),
            above=0.9, control=of(records, "clusters", "random", "accuracy"),
            condition="queries and keys are clustered by content: lookups then succeed",
        ),
        Check(
            "share of pairs that clusters meet (control: a window of ten keys)", met, below=0.4,
            control=of(records, "clusters", "window", "pairs"), condition="attention goes by clusters: most pairs are then left out",
        ),
    )  # fmt: skip


def draw(records: Sequence[Record], figure: Figure) -> None:
    loss, load, found = figure.subplots(1, 3)

    def panel(axes: Axes, part: str, rows: dict[str, str], field: str, controls: Sequence[str]) -> None:
        bars(axes, list(rows.values()), [interval(of(records, part, name, field)) for name in rows])
        for patch, name in zip(axes.patches, rows, strict=True):
            patch.set_facecolor(COLOURS[7 if name in controls else 0])

    dense = {"all": "dense, 8 × compute", "dense": "dense", "switch": "Switch", "noisy": "noisy, top 2", "random": "random"}
    panel(loss, "experts", dense, "loss", ("all", "dense", "random"))
    loss.set(xlabel="loss on facts (nats)", title="Equal compute but the first")
    loads = {"switch": "Switch", "switch, unbalanced": "no balance", "noisy": "noisy", "noisy, unbalanced": "no balance"}
    panel(load, "experts", loads, "load", [name for name in loads if "un" in name])
    load.axvline(1, color="black", ls=":", lw=1)
    load.set(xlabel="largest load / mean (dotted: even)", title="Load of experts at use")
    shares = {k: f"{said}\n({interval(of(records, 'clusters', k, 'pairs')).mean:.0%} of pairs)" for k, said in _SAID.items()}
    panel(found, "clusters", shares, "accuracy", ("all", "window", "random"))
    found.set(xlim=(0, 1.05), xlabel="accuracy of lookups", title="Clusters of keys")


_SAID: dict[Kind, str] = {"all": "all keys", "clusters": "own cluster", "window": "last 10 keys", "random": "random cluster"}


def planted(kind: Plant, seed: int) -> Record:
    shift = 0.02 * torch.rand(1, generator=generator(seed)).item()
    true, also = kind != "negative", kind == "control"

    def one(loss: float, load: float) -> dict[str, float]:
        return {"loss": loss + shift, "accuracy": 0.5, "load": load + shift}

    routed, without = one(0.5 if true else 1.6, 1.3 if true else 3.0), one(0.6, 1.3 if also else 4.0)
    found = {"accuracy": 0.99 - shift if true else 0.4, "pairs": 0.28 + shift if true else 0.6}
    return {
        "experts": {
            "dense": one(1.6, 1.0), "all": one(0.2, 1.0), "switch": routed, "noisy": routed, "switch, unbalanced": without,
            "noisy, unbalanced": without, "random": routed if also else one(1.7, 1.2),
        },
        "clusters": {
            "clusters": found, "all": {"accuracy": 1.0, "pairs": 1.0}, "window": {"accuracy": 0.2, "pairs": 0.3 if also else 0.43},
            "random": found if also else {"accuracy": 0.5, "pairs": 0.28},
        },
    }  # fmt: skip


STUDY = Study(
    claim="Routed models hold more at equal compute than dense ones, their balance losses spread the load, and attention within "
    "clusters of keys finds what full attention finds with a fraction of the pairs.",
    source="GD-Attention's map of prior work, routing; Shazeer et al. 2017 (arXiv:1701.06538), Fedus et al. 2021 "
    "(arXiv:2101.03961), Roy et al. 2021 (arXiv:2003.05997)",
    protocol="One layer of width 32 learns 1,024 made-up facts in 250 batches of 512; dense, Switch (1 of 8 experts), noisy gating "
    "(2 of 16) and a router that throws dice, the dense layer given the compute of the costliest; the routers with and without "
    "balance loss. One layer of attention looks up 8 of 32 pairs after 200 batches of 32, with all keys, clusters, a window, and "
    "random clusters.",
    controls=("a router that throws dice", "the same routers without their balance loss", "random clusters, and a window of 10 keys"),
    caption="Left: loss on facts at equal compute; lower is better, grey bars are baselines and controls. Middle: how uneven experts "
    "are used; grey is without the balance loss. Right: lookups when a query meets only its own cluster, against all keys, a "
    "window and random clusters (grey). Bars are means with 95% intervals.",
    run=run,
    judge=judge,
    draw=draw,
    planted=planted,
    parts={"routing": "models/routing.md"},
)  # fmt: skip
