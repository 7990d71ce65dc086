"""The trained fast write: what an untrained rule cannot know, learned once on people who were made up, the base frozen.

    python -m regard.identity.learn            # writes fast_write.safetensors beside this file, with its seed and its data's name

An episode is one person: the history is observed in one pass, written without a gradient, and the next conversation is read. The
gradient of its surprise goes into a few thousand numbers that all people share, never into a person:

    scorer   features of a token → its worth. Slots are weighted by σ((worth − threshold)/τ), the threshold where the budget ends
    gate     how widely each head opens to slots, learned together with the scorer, against harm on neutral text
    trace    a signed gain per layer and key head on the centred write, and the base's mean queries and keys
    self     a gain per layer and key head on what was pooled, for each form

On another base only the scorer is used: its features are relative to the text, the gains belong to layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ..errors import CheckpointError
from .identity import Base, Form
from .imprint import later_attention, snapkv, value_norm
from .observe import Experience
from .read import LayerRead
from .self_state import pooled
from .trace import TraceRule, compressed, written

if TYPE_CHECKING:
    from ..models.tokenizer import Tokenizer
    from .body import Body
    from .consolidate import Item
    from .people import Person

FILE = Path(__file__).with_name("fast_write.safetensors")
FEATURES = ("shock", "shock_before", "shock_after", "shock_after_two", "attention", "last_attention", "value_norm", "recency")
HIDDEN = 16
BUDGETS = (0.125, 0.25, 0.5)
SOFT = 0.5
"""τ of the gate; worths have a spread of about one."""


def features(e: Experience) -> Float[Tensor, "N F"]:
    """What is known of each token, in spreads from the mean of what was said."""
    shock = e.shock.cpu()
    rows = [
        shock,
        F.pad(shock[:-1], (1, 0)),
        F.pad(shock[1:], (0, 1)),
        F.pad(shock[2:], (0, 2)),
        later_attention(e).cpu().clamp_min(1e-6).log(),
        snapkv(e).cpu().clamp_min(1e-6).log(),
        value_norm(e).cpu(),
        torch.arange(len(e), dtype=torch.float32),
    ]
    x = torch.stack(rows, -1).float()
    said = x[e.content.cpu()]
    if len(said) < 2:
        # One token alone is as usual as can be: it has no spread to be measured in.
        return torch.zeros_like(x)
    return (x - said.mean(0)) / said.std(0).clamp_min(1e-6)


@dataclass(frozen=True, eq=False)
class FastWrite:
    """The learned numbers, by name."""

    numbers: dict[str, Tensor]
    fingerprint: str = ""

    def worth(self, e: Experience) -> Float[Tensor, " N"]:
        n = self.numbers
        x = features(e)
        return x @ n["scorer.direct"] + torch.tanh(x @ n["scorer.into"] + n["scorer.bias"]) @ n["scorer.out"]

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """q̄ and k̄ of the base on ordinary text, (L, G, D)."""
        return self.numbers["mean.q"], self.numbers["mean.k"]

    @property
    def gate(self) -> Float[Tensor, "L G"]:
        """How widely each head opens to imprints."""
        return self.numbers["gate"]

    @property
    def trace_gain(self) -> Float[Tensor, "L G"]:
        return self.numbers["trace.gain"]

    def self_gain(self, form: Form) -> Float[Tensor, "L S"]:
        """What z is multiplied by before the self takes it in."""
        L, G, D = self.numbers["mean.k"].shape
        if form == "key_bias":
            return self.numbers["self.bias"][..., None].expand(L, G, D).flatten(1)
        both = torch.stack([self.numbers["self.key"], self.numbers["self.value"]], 1)
        return both[..., None].expand(L, 2, G, D).flatten(1)

    @cached_property
    def count(self) -> int:
        return sum(t.numel() for t in self.numbers.values())


@lru_cache(maxsize=1)
def _read() -> FastWrite:
    from safetensors import safe_open

    if not FILE.is_file():
        raise CheckpointError(f"{FILE.name} is not beside the code; train it with: python -m regard.identity.learn")
    with safe_open(FILE, "pt") as f:
        about = json.loads((f.metadata() or {}).get("about", "{}"))
        return FastWrite({name: f.get_tensor(name) for name in f.keys()}, about.get("fingerprint", ""))  # noqa: SIM118


def shipped() -> FastWrite:
    """What came with the package."""
    return _read()


def shipped_for(base: Base) -> FastWrite | None:
    """The same, if its gains were learned on this base; None if they were not."""
    return _read() if FILE.is_file() and _read().fingerprint == base.fingerprint else None


# ---- training -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Study:
    """How the numbers are learned; what is shipped was learned with these."""

    people: int = 48
    seed: int = 7
    rate: float = 0.03
    anchor: float = 1.0
    """Of harm: KL to the base on neutral text and on other people's conversations."""


def train(
    model_name: str = "smollm2",
    study: Study | None = None,
    out: Path = FILE,
    tell: Callable[[str, float | None], object] = print,
) -> dict[str, float]:
    """Learn everything anew and write it; gives back the mean losses of the last quarter of the episodes."""
    from safetensors.torch import save_file

    from ..models import hub
    from .body import body_of
    from .consolidate import frozen
    from .people import neutral, people

    study = study or Study()
    model, tokenizer = hub.open_model(model_name)
    body = body_of(model)
    L, G = body.base.depth, body.base.key_heads
    crowd = people(study.people, study.seed, "train")
    with frozen(model):
        school = School(body, tokenizer, crowd, neutral("train"), study, tell)
        numbers = school.means()
        found: dict[str, float] = {}
        for name, shapes in (
            ("imprints", {"scorer.direct": (len(FEATURES),), "scorer.into": (len(FEATURES), HIDDEN), "scorer.bias": (HIDDEN,),
                          "scorer.out": (HIDDEN,), "gate": (L, G)}),
            ("token", {"self.key": (L, G), "self.value": (L, G)}),
            ("bias", {"self.bias": (L, G)}),
            ("trace", {"trace.gain": (L, G)}),
        ):  # fmt: skip
            leaves = {n: _start(n, s, study.seed).requires_grad_() for n, s in shapes.items()}
            found[name] = school.run(name, leaves, numbers)
            numbers |= {n: x.detach().clone() for n, x in leaves.items()}
    about = {
        "fingerprint": body.base.fingerprint,
        "base": model_name,
        "people": study.people,
        "seed": study.seed,
        "pool": "train",
    }
    save_file(numbers, out, metadata={"format": "pt", "about": json.dumps(about)})
    _read.cache_clear()
    return found


def _start(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """The scorer starts as plain shock, the self token as what was pooled, every other gain as none."""
    if name == "scorer.direct":
        return F.one_hot(torch.tensor(FEATURES.index("shock")), len(FEATURES)).float()
    if name == "scorer.into":
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.3
    return torch.ones(shape) if name in ("self.key", "self.value") else torch.zeros(shape)


class School:
    """The episodes, and what a step on each part of the write looks like."""

    def __init__(
        self, body: Body, tokenizer: Tokenizer, crowd: Sequence[Person], prose: Sequence[str], study: Study,
        tell: Callable[[str, float | None], object],
    ) -> None:  # fmt: skip
        from .consolidate import anchor_item

        self.body, self.study, self.tell, self.crowd, self.tokenizer = body, study, tell, crowd, tokenizer
        self.anchors = [anchor_item(body, tokenizer, t, c) for t in prose for c in (False, True)]
        self.heard: dict[int, Experience] = {}

    def experience(self, i: int) -> Experience:
        from .observe import observe

        if i not in self.heard:
            chat = [m for c in self.crowd[i].history for m in c]
            self.heard[i] = observe(self.body.model, chat, self.tokenizer)
        return self.heard[i]

    def answers(self, i: int) -> Item:
        from .consolidate import answers_item

        return answers_item(self.body, self.tokenizer, self.crowd[i].next)

    def means(self, count: int = 12) -> dict[str, Tensor]:
        """q̄ and k̄ over what people said."""
        q, k, n = torch.tensor(0.0), torch.tensor(0.0), 0
        for i in range(count):
            e = self.experience(i)
            said = e.content.nonzero().flatten()
            q = q + e.q.unflatten(1, (e.k.shape[1], -1)).mean(2)[:, :, said].sum(2)
            k, n = k + e.k[:, :, said].sum(2), n + len(said)
        return {"mean.q": q / n, "mean.k": k / n}

    def run(self, part: str, leaves: dict[str, Tensor], numbers: dict[str, Tensor]) -> float:
        from .consolidate import logs_at, losses

        slow = [x for n, x in leaves.items() if n.startswith("scorer")]
        fast = [x for n, x in leaves.items() if not n.startswith("scorer")]
        groups = [{"params": slow, "lr": self.study.rate}, {"params": fast, "lr": 2 * self.study.rate}]
        optimiser = torch.optim.Adam([g for g in groups if g["params"]])
        history: list[float] = []
        total = len(self.crowd)
        for i in range(total):
            pick = torch.Generator().manual_seed(self.study.seed * 1000 + i)
            e = self.experience(i)
            own = self.answers(i)
            harm = self.anchors[int(torch.randint(len(self.anchors), (1,), generator=pick))]
            if part != "imprints":
                # Selves and traces must be somebody's: what they do to another person's words counts as harm.
                other = self.answers((i + 1) % total)
                harm = replace(other, wanted=logs_at(self.body, other.ids, other.at))
            reads = getattr(self, f"read_{part}")(e, leaves, numbers, pick)
            with torch.enable_grad(), self.body.read(reads):
                mine, theirs = losses(self.body, [own, harm])
                loss = mine + self.study.anchor * theirs
                grads = torch.autograd.grad(loss, list(leaves.values()))
            for x, g in zip(leaves.values(), grads, strict=True):
                x.grad = g
            optimiser.step()
            nats, hurt = float(mine.detach()), float(theirs.detach())
            history.append(nats)
            self.tell(f"learning {part}: {nats:.2f} nats, harm {hurt:.3f}", (i + 1) / total)
        last = history[-max(1, total // 4) :]
        return sum(last) / len(last)

    def read_imprints(
        self, e: Experience, x: dict[str, Tensor], n: dict[str, Tensor], pick: torch.Generator
    ) -> list[LayerRead]:
        said = e.content.nonzero().flatten()
        worth = FastWrite(x).worth(e)[said]
        share = BUDGETS[int(torch.randint(len(BUDGETS), (1,), generator=pick))]
        limit = worth.detach().topk(max(1, round(share * len(said)))).values[-1]
        weight = F.logsigmoid((worth - limit) / SOFT)
        return [
            LayerRead(self.body.scales[i], e.k[None, i, :, said], e.v[None, i, :, said], (x["gate"][i][:, None] + weight)[None])
            for i in range(e.base.depth)
        ]

    def read_token(self, e: Experience, x: dict[str, Tensor], n: dict[str, Tensor], pick: torch.Generator) -> list[LayerRead]:
        z = pooled(e, "self_token").view(e.base.depth, 2, e.base.key_heads, 1, e.base.head_width)
        k, v = x["self.key"][..., None, None] * z[:, 0], x["self.value"][..., None, None] * z[:, 1]
        return [LayerRead(self.body.scales[i], k[None, i], v[None, i]) for i in range(e.base.depth)]

    def read_bias(self, e: Experience, x: dict[str, Tensor], n: dict[str, Tensor], pick: torch.Generator) -> list[LayerRead]:
        z = pooled(e, "key_bias", mean_k=n["mean.k"]).view(e.base.depth, e.base.key_heads, e.base.head_width)
        bias = x["self.bias"][..., None] * z
        return [LayerRead(self.body.scales[i], bias=bias[None, i]) for i in range(e.base.depth)]

    def read_trace(self, e: Experience, x: dict[str, Tensor], n: dict[str, Tensor], pick: torch.Generator) -> list[LayerRead]:
        rule = TraceRule(write="centred")
        shape = (e.base.depth, e.base.key_heads, e.base.head_width, e.base.head_width)
        trace = compressed(written(torch.zeros(shape), e, rule, (n["mean.q"], n["mean.k"])), rule)
        left, signs = trace.left.dense(), trace.signs.float()
        gained = x["trace.gain"][..., None] * signs
        return [LayerRead(self.body.scales[i], left=left[None, i], signs=gained[None, i]) for i in range(e.base.depth)]


if __name__ == "__main__":
    import sys

    said = train(tell=lambda what, share: print(f"{share or 0:4.0%}  {what}", file=sys.stderr))
    print(json.dumps(said))
