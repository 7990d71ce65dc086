"""The trained fast write: what an untrained rule cannot know, learned once on generated people, the base frozen.

    python -m regard.study.people.fast_write            # writes fast_write.safetensors of the package, with its seed and its data's name
    python -m regard.study.people.fast_write trace      # one part of it anew

An episode is one person: the history is observed in one pass, written without a gradient, and the next conversation is read. The
gradient of its surprise goes into a few thousand numbers that all people share, never into a person:

    slots    to which queries each head opens, a shift of all their keys; learned
             against harm on neutral text and on other people's words. Those that the default keeper would keep are weighted by
             σ((worth − threshold)/τ), the threshold where the budget ends
    trace    a signed gain per layer and key head on the centred write, and the base's mean queries and keys
    self     a gain per layer and key head on what was pooled, for each form

Harm is KL to the base on neutral text and on another person's words. A self token can help one person alone: what it
changes in another's loss counts against it nat for nat. A trace and a key bias only shift scores; the same price leaves nothing of them.

What is shipped was learned beside a scorer of tokens and beside gates and loudness of every head. They lost to plain rules on people of
other grammars, and are gone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ...files import replacing
from ...identity.experience import Experience
from ...identity.read.layer import LayerRead
from ...identity.write.fast_write import FILE, FastWrite, digest, forget_shipped, read_file, shapes_of
from ...identity.write.imprints import DEFAULT, opening, worth_of
from ...identity.write.self_state import pooled
from ...identity.write.trace import TraceRule, compressed, written

if TYPE_CHECKING:
    from ...identity.body import Body
    from ...identity.sleep.items import Item
    from ...models.tokenizer import Tokenizer
    from .generator import Person

BUDGETS = (0.125, 0.25, 0.5)
SOFT = 0.1
"""τ of the gate; worths, logs of distances, have a spread of about a third."""


@dataclass(frozen=True)
class Schedule:
    """How the numbers are learned; what is shipped was learned with these."""

    people: int = 48
    seed: int = 7
    rate: float = 0.03
    rounds: int = 2
    """How often each person is met while learning to keep; once for a self and a trace."""
    anchor: float = 1.0
    """Of harm: KL to the base on neutral text and on other people's conversations."""


PARTS = ("imprints", "token", "bias", "trace")
PACES = {"self.key": 2.0, "self.value": 2.0, "self.bias": 2.0, "trace.gain": 2.0}
"""How fast each tensor learns beside the shift of keys, which is counted in their spreads."""


def train(
    model_name: str = "smollm2",
    schedule: Schedule | None = None,
    out: Path = FILE,
    parts: Sequence[str] = PARTS,
    tell: Callable[[str, float | None], object] = print,
) -> dict[str, float]:
    """Learn these parts anew, leave the others as they stand in `out`, and write it; gives back the mean losses of the last quarter
    of the episodes."""
    from safetensors.torch import save_file

    from ...identity.body import body_of, frozen
    from ...models import downloads as hub
    from .generator import neutral, people

    schedule = schedule or Schedule()
    model, tokenizer = hub.open_model(model_name)
    body = body_of(model)
    L, G, D = body.base.depth, body.base.key_heads, body.base.head_width
    crowd = people(schedule.people, schedule.seed, "train")
    with frozen(model):
        trainer = FastWriteTrainer(body, tokenizer, crowd, neutral("train"), schedule, tell)
        numbers = (read_file(out).numbers if out.is_file() and set(parts) != set(PARTS) else {}) | trainer.means()
        nats: dict[str, float] = {}
        shapes = shapes_of(L, G, D)
        for name in parts:
            leaves = {n: _start(n, s).requires_grad_() for n, s in shapes[name].items()}
            nats[name] = trainer.run(name, leaves, numbers)
            numbers |= {n: x.detach().clone() for n, x in leaves.items()}
            if name == "imprints":
                numbers["slots.shift"] *= trainer.spread
    about = {
        "fingerprint": body.base.fingerprint,
        "base": model_name,
        "people": schedule.people,
        "seed": schedule.seed,
        "pool": "train",
        "digest": digest(numbers),
    }
    with replacing(out) as draft:
        save_file(numbers, draft, metadata={"format": "pt", "about": json.dumps(about)})
    forget_shipped()
    return nats


def _start(name: str, shape: tuple[int, ...]) -> Tensor:
    """The self token starts as it was met, every other gain as none."""
    return torch.ones(shape) if name in ("self.key", "self.value") else torch.zeros(shape)


class FastWriteTrainer:
    """The episodes, and what a step on each part of the write looks like."""

    def __init__(
        self, body: Body, tokenizer: Tokenizer, crowd: Sequence[Person], prose: Sequence[str], schedule: Schedule,
        tell: Callable[[str, float | None], object],
    ) -> None:  # fmt: skip
        from ...identity.sleep.items import anchor_item

        self.body, self.schedule, self.tell, self.crowd, self.tokenizer = body, schedule, tell, crowd, tokenizer
        self.anchors = [anchor_item(body, tokenizer, t, c) for t in prose for c in (False, True)]
        self.experiences: dict[int, Experience] = {}
        self.spread: Float[Tensor, "L G D"] = torch.ones(())
        """Of the numbers in a key, over what people said."""

    def experience(self, i: int) -> Experience:
        from ...identity.experience import observe

        if i not in self.experiences:
            chat = [m for c in self.crowd[i].history for m in c]
            self.experiences[i] = observe(self.body.model, chat, self.tokenizer)
        return self.experiences[i]

    def answers(self, i: int) -> Item:
        from ...identity.sleep.items import answers_item

        return answers_item(self.body, self.tokenizer, self.crowd[i].next)

    def means(self, count: int = 12) -> dict[str, Tensor]:
        """q̄ and k̄ over what people said."""
        said = [(e, e.content.nonzero().flatten()) for e in map(self.experience, range(count))]
        q = torch.cat([e.q.unflatten(1, (e.k.shape[1], -1)).mean(2)[:, :, at] for e, at in said], 2)
        k = torch.cat([e.k[:, :, at] for e, at in said], 2)
        self.spread = k.std(2)
        return {"mean.q": q.mean(2), "mean.k": k.mean(2)}

    def run(self, part: str, leaves: dict[str, Tensor], numbers: dict[str, Tensor]) -> float:
        from ...identity.sleep.items import any_of, item_said, logs_at, losses

        optimiser = torch.optim.Adam([{"params": [x], "lr": self.schedule.rate * PACES.get(n, 1.0)} for n, x in leaves.items()])
        history: list[float] = []
        total = len(self.crowd) * (self.schedule.rounds if part == "imprints" else 1)
        for n in range(total):
            pick = torch.Generator().manual_seed(self.schedule.seed * 1000 + n)
            i = n % len(self.crowd)
            e = self.experience(i)
            own, other = self.answers(i), self.answers((i + 1) % len(self.crowd))
            usual = logs_at(self.body, other.ids, other.at)
            anchors = [replace(other, wanted=usual)]
            if part == "imprints":
                prose, chats = self.anchors[0::2], self.anchors[1::2]
                anchors = [any_of(prose, pick), any_of(chats, pick) if n % 2 else anchors[0]]
            elif part == "token":
                anchors = [other]
            with torch.enable_grad():
                with self.body.read(getattr(self, f"read_{part}")(e, leaves, numbers, pick)):
                    mine, *harms = losses(self.body, [own, *anchors])
                theirs = torch.stack(harms).mean()
                if part == "token":
                    # A token that helps another as much is not specific: the penalty is as large as the gain.
                    theirs = (theirs - item_said(other, usual)).abs()
                grads = torch.autograd.grad(mine + self.schedule.anchor * theirs, list(leaves.values()))
            for x, g in zip(leaves.values(), grads, strict=True):
                x.grad = g
            optimiser.step()
            nats, hurt = float(mine.detach()), float(theirs.detach())
            history.append(nats)
            self.tell(f"learning {part}: {nats:.2f} nats, harm {hurt:.3f}", (n + 1) / total)
        last = history[-max(1, total // 4) :]
        return sum(last) / len(last)

    def read_imprints(
        self, e: Experience, x: dict[str, Tensor], n: dict[str, Tensor], pick: torch.Generator
    ) -> list[LayerRead]:
        said = e.content.nonzero().flatten()
        worth = worth_of(e, DEFAULT)[said]
        share = BUDGETS[int(torch.randint(len(BUDGETS), (1,), generator=pick))]
        limit = worth.topk(max(1, round(share * len(said)))).values[-1]
        weight = F.logsigmoid((worth - limit) / SOFT)
        opened = FastWrite({**x, "slots.shift": x["slots.shift"] * self.spread})
        k, v = opened.opened(e.k[:, :, said]), e.v[:, :, said]
        weight = (opening(e.base.depth) + weight).expand(*k.shape[:3])
        return [LayerRead(self.body.scales[i], k[None, i], v[None, i], weight[None, i]) for i in range(e.base.depth)]

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

    said = train(parts=sys.argv[1:] or PARTS, tell=lambda what, share: print(f"{share or 0:4.0%}  {what}", file=sys.stderr))
    print(json.dumps(said))
