"""Fits the map by which a model says whether what came to mind answers (`identity/read/answering.py`), and shows what it is worth on pools left out.

    python -m regard.study.people.answering            # writes answering.safetensors of the package; an hour of one core

One example is a question to a life and the first few units in rank, each read with the question behind it. The map is a choice among these *and none of
them*: the unit that says it where the person told it, none where they never did. Its weights minimise the mean of −log p(what is right), each
pool of equal weight, + DECAY |w|² over numbers in their spreads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...files import replacing
from ...identity.read.answering import FILE, hidden_behind
from ...identity.read.finding import finder_of
from ...identity.read.scores import scored
from ..tasks.packaged import sentence_vectors
from ..tasks.pretrained import smollm2
from .asking import Examiner, Written, write_episodes
from .natural import NaturalPerson, Turn, natural
from .natural_data import NaturalPool
from .written import written

DEPTH = 18
PEOPLE, AUTHOR = 8, 10
"""People of each made-up pool, and those that one author of the pool "many" wrote."""
ASKED, UNTOLD = 8, 5
"""Units that are read, where the person told it and where they did not."""
HELD: tuple[NaturalPool, ...] = ("test",)
"""Pools that studies of it are judged by; "third" of those written by hand is another."""
DECAY = 0.03


class Examples(NamedTuple):
    """Questions of a pool; what a question has fewer units than others for is masked."""

    x: Float[Tensor, "q u M"]
    others: Float[Tensor, "q u 2"]
    """How far each stands behind the first in rank, and its coherence."""
    right: Bool[Tensor, "q u"]
    there: Bool[Tensor, "q u"]
    told: Bool[Tensor, " q"]


def examples(examiner: Examiner, crowd: Sequence[NaturalPerson]) -> Examples:
    every = list[Examples]()
    for person in crowd:
        life = write_episodes(examiner, person.history)
        asked: list[tuple[str, Turn | None]] = [(q.text, q.turn) for q in person.questions]
        every += [_example(examiner, life, text, turn) for text, turn in [*asked, *((u, None) for u in person.unanswerable)]]
    return joined(every)


def joined(some: Sequence[Examples]) -> Examples:
    return Examples(*map(torch.cat, zip(*some, strict=True)))  # pyright: ignore


def _example(examiner: Examiner, life: Written, text: str, turn: Turn | None) -> Examples:
    finder, episodes = finder_of(examiner.body, examiner.tokenizer), life.identity.episodes
    asked = examiner.tokenizer.encode(text, bos=False)
    prompt = examiner.prompt([{"role": "user", "content": text}])
    scores = scored(finder, episodes, asked, text)
    units = scores.rank.argsort(descending=True)[: UNTOLD if turn is None else ASKED]
    x, others = torch.zeros(1, ASKED, examiner.model.config.width), torch.zeros(1, ASKED, 2)
    right, there = (torch.zeros(1, ASKED, dtype=torch.bool) for _ in range(2))
    for n, u in enumerate(units.tolist()):
        said = [episodes[i].tokens.tolist() for i in scores.units[u]]
        rows = hidden_behind(finder, said, asked, prompt, DEPTH).float()
        x[0, n] = (rows * rows.pow(2).mean(-1, keepdim=True).rsqrt()).mean(0)
        others[0, n] = torch.stack([scores.rank[u] - scores.rank.max(), scores.coherence[u]])
        right[0, n] = turn is not None and any(life.places[i] == turn for i in scores.units[u])
        there[0, n] = True
    return Examples(x, others, right, there, torch.tensor([turn is not None]))


class Map(NamedTuple):
    weight: Float[Tensor, " M"]
    others: Float[Tensor, " 3"]
    """What standing behind and coherence count, and b."""

    def odds(self, e: Examples) -> Float[Tensor, "q u"]:
        odds = e.x.float() @ self.weight + e.others @ self.others[:2] + self.others[2]
        return odds.masked_fill(~e.there, -1e4)


def fitted(pools: Sequence[Examples]) -> Map:
    """The choice over these pools, for numbers as they are."""
    e = joined(pools)
    each = torch.cat([torch.full((len(p.told),), 1 / (len(p.told) * len(pools))) for p in pools])
    rows = e.x.float()[e.there]
    mean, spread = rows.mean(0), rows.std(0).clamp_min(1e-3)
    z = ((e.x.float() - mean) / spread) * e.there[..., None]
    w, others = torch.zeros(z.shape[-1], requires_grad=True), torch.tensor([1.0, 0.3, 0.0], requires_grad=True)
    optimiser = torch.optim.LBFGS([w, others], max_iter=60, line_search_fn="strong_wolfe")
    answered = e.right.any(1)

    def loss() -> Tensor:
        optimiser.zero_grad()
        odds = (z @ w + e.others @ others[:2] + others[2]).masked_fill(~e.there, -1e4)
        every = torch.cat([odds, odds.new_zeros(len(odds), 1)], 1).logsumexp(1)
        wanted = torch.where(answered, odds.masked_fill(~e.right, -1e4).logsumexp(1), 0.0)
        total = (each * (every - wanted)).sum() + DECAY * w.square().sum()
        total.backward()
        return total

    optimiser.step(loss)  # pyright: ignore
    weight = w.detach() / spread
    return Map(weight, others.detach() - torch.tensor([0.0, 0.0, float(weight @ mean)]))


def shown(e: Examples, fit: Map) -> str:
    """What a map is worth on examples that it has not seen."""
    odds = fit.odds(e)
    best, unit = odds.max(1)
    first = e.right.gather(1, unit[:, None])[:, 0]
    asks, untold = best[first], best[~e.told]
    auroc = float((asks[:, None] > untold).float().mean()) if len(asks) and len(untold) else float("nan")
    line = float(asks.quantile(0.05)) if len(asks) else 0.0
    return (
        f"right unit first {int(e.right[:, 0].sum())} -> {int(first.sum())} of {int(e.told.sum())}, AUROC against what was never told {auroc:.2f}, "
        f"refused of it where 5% of the right are {float((untold < line).float().mean()):.0%} (log-odds {line:.1f})"
    )


def save(fit: Map, fingerprint: str, out: Path = FILE) -> None:
    from safetensors.torch import save_file

    about = json.dumps({"fingerprint": fingerprint, "depth": DEPTH})
    with replacing(out) as draft:
        save_file({"weight": fit.weight.contiguous(), "others": fit.others.contiguous()}, draft, metadata={"about": about})


def crowds() -> dict[str, Sequence[NaturalPerson]]:
    """Everybody whom it is fitted on, by pool; of those who were written by hand each author is one."""
    made: dict[str, Sequence[NaturalPerson]] = {p: natural(PEOPLE, 1, p) for p in get_args(NaturalPool) if p not in HELD}
    many = written("many")
    authors = {f"author {n // AUTHOR + 1}": many[n : n + AUTHOR] for n in range(0, len(many), AUTHOR)}
    return {**made, "written, first": written("first"), "written, second": written("second"), **authors}


def main() -> None:
    sentence_vectors(["."])  # an episode has a meaning only where the encoder is at hand
    examiner = Examiner(*smollm2())
    pools = {name: examples(examiner, crowd) for name, crowd in crowds().items()}
    for name, e in pools.items():
        print(f"{name}: {shown(e, fitted([x for other, x in pools.items() if other != name]))}", flush=True)
    save(fitted(list(pools.values())), examiner.body.base.fingerprint)


if __name__ == "__main__":
    main()


__all__ = ["Examples", "Map", "crowds", "examples", "fitted", "joined", "save", "shown"]
