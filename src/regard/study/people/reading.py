"""Learns how what came to mind is read (`identity/read/reader.py`), and shows what it is worth on people left out.

    python -m regard.study.people.reading              # writes reader.safetensors of the package; half an hour of one core

One example is a question, the unit that says the answer as it would come to mind, and the answer: for `BARE` of the examples the accepted one and
nothing else, for the others a sentence that somebody wrote around it. The model is frozen; what is learned is added to keys and values of the words
around (Adam, as prefixes are tuned: Li and Liang 2021), and what is shipped is `SHARE` of it.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from ...files import replacing
from ...identity.body import frozen
from ...identity.read.body import OwnBody
from ...identity.read.finding import Finder, finder_of
from ...identity.read.layer import LayerRead, layer_reads
from ...identity.read.reader import FILE
from ...identity.read.slots import slots_of
from ...identity.sleep.items import Item, item_loss
from ...identity.state import Recollection
from ..tasks.packaged import sentence_vectors
from ..tasks.pretrained import smollm2
from .asking import Examiner, Written, write_episodes
from .natural import NaturalPerson, NaturalQuestion
from .written import written, written_replies

AUTHORS = {"many": 40, "more": 96}
"""People of these pools it is learned from; the last twenty of "many" and all of "second" are left out, and choose."""
BARE = 0.3
SHARE = 0.5
"""Of what was learned, that is read. Right unit, 46 questions of the pool choose: right greedy answers 38 without, 42 by 0.5 and 0.7, 40 by 1; nats 2.54, 1.08,
0.91 and 0.92."""
EPOCHS, BATCH, RATE, DECAY = 1.5, 8, 0.02, 1e-3


@dataclass(frozen=True, eq=False)
class Example:
    """A question behind the unit that answers it."""

    reads: list[LayerRead | None]
    prompt: list[int]
    answer: str
    sentence: str


def examples(examiner: Examiner, crowd: Sequence[NaturalPerson], replies: Sequence[Sequence[str | None]]) -> list[Example]:
    some = list[Example]()
    for person, said in zip(crowd, replies, strict=True):
        life = write_episodes(examiner, person.history)
        some += [_example(examiner, life, q, x) for q, x in zip(person.questions, said, strict=True) if x is not None]
    return some


def _example(examiner: Examiner, life: Written, q: NaturalQuestion, sentence: str) -> Example:
    finder, identity = finder_of(examiner.body, examiner.tokenizer), life.identity
    prompt = examiner.prompt([{"role": "user", "content": q.text}])
    turns = [n for n, place in enumerate(life.places) if place == q.turn]
    # Of a message in pieces, the one that says it.
    words = {n: examiner.tokenizer.decode(identity.episodes[n].tokens.tolist()).casefold() for n in turns}
    came = [identity.episodes[next((n for n in turns if q.value.casefold() in words[n]), turns[0])]]
    slots = slots_of(examiner.body, finder, identity, came, prompt)
    mind = Recollection(identity.base, imprints=slots, sources=identity.sources, head=finder.frame.head_of(prompt))
    return Example(layer_reads([mind], examiner.body.scales), prompt, q.value, sentence)


class Moves(nn.Module):
    """What is added to keys and to values of the words before and behind, in the spread of these numbers."""

    def __init__(self, finder: Finder, like: Sequence[LayerRead | None]) -> None:
        super().__init__()
        before, _, after = finder.frame.around(finder.usual_head)
        self.spread = [[float(x.pow(2).mean().sqrt()) for x in (_k(read), _v(read))] for read in like]
        G, D = _k(like[0]).shape[1], _k(like[0]).shape[3]
        self.parts = nn.ParameterDict(
            {
                f"{side}_{x}": nn.Parameter(torch.zeros(len(like), G, len(words), D))
                for side, words in (("before", before), ("after", after))
                for x in "kv"
            }
        )

    def named(self) -> dict[str, Tensor]:
        """As they are added."""
        scale = torch.tensor(self.spread)[:, :, None, None, None]
        return {name.replace("_", "."): p * scale[:, "kv".index(name[-1])] for name, p in self.parts.items()}

    def moved(self, reads: Sequence[LayerRead | None]) -> list[LayerRead | None]:
        added = self.named()
        out: list[LayerRead | None] = []
        for i, read in enumerate(reads):
            assert read is not None
            k, v = (
                self._added(x, added[f"before.{n}"][i], added[f"after.{n}"][i]) for n, x in (("k", _k(read)), ("v", _v(read)))
            )
            out.append(replace(read, k=k, v=v, contrast=None, beside=None))
        return out

    @staticmethod
    def _added(x: Tensor, before: Tensor, after: Tensor) -> Tensor:
        middle = x.shape[2] - before.shape[1] - after.shape[1]
        return x + torch.cat([before, before.new_zeros(before.shape[0], middle, before.shape[2]), after], 1)


def _k(read: LayerRead | None) -> Tensor:
    assert read is not None
    assert read.k is not None
    return read.k


def _v(read: LayerRead | None) -> Tensor:
    assert read is not None
    assert read.v is not None
    return read.v


def loss_of(examiner: Examiner, moves: Moves | None, e: Example, said: str, *, ends: bool) -> Tensor:
    """Nats per token of what is said."""
    tokenizer, body = examiner.tokenizer, examiner.body
    words = tokenizer.encode(said, bos=False) + ([min(tokenizer.eos_ids)] if ends else [])
    ids = torch.tensor([*e.prompt, *words])
    with body.read(e.reads if moves is None else moves.moved(e.reads)):
        return item_loss(body, Item(ids, torch.arange(len(e.prompt), len(ids))))


def learned(examiner: Examiner, some: Sequence[Example], seed: int = 0) -> Moves:
    moves, pick = Moves(finder_of(examiner.body, examiner.tokenizer), some[0].reads), random.Random(seed)
    learner = torch.optim.Adam(moves.parameters(), lr=RATE, betas=(0.9, 0.98))
    steps, order = math.ceil(EPOCHS * len(some) / BATCH), list[int]()
    for step in range(steps):
        for group in learner.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 10) * (0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))
        for _ in range(BATCH):
            order = order or pick.sample(range(len(some)), len(some))
            e = some[order.pop()]
            # A bare answer does not end a message: who learned that it does stops after a wrong first word.
            bare = pick.random() < BARE
            (loss_of(examiner, moves, e, e.answer if bare else e.sentence, ends=not bare) / BATCH).backward()
        sum((DECAY * p.square().mean() for p in moves.parameters()), torch.zeros(())).backward()
        nn.utils.clip_grad_norm_(moves.parameters(), 1.0)
        learner.step()
        learner.zero_grad()
    return moves


def save(moves: Moves, fingerprint: str, out: Path = FILE) -> None:
    from safetensors.torch import save_file

    numbers = {name: (SHARE * x.detach()).half().contiguous() for name, x in moves.named().items()}
    with replacing(out) as draft:
        save_file(numbers, draft, metadata={"about": json.dumps({"fingerprint": fingerprint})})


@cache
def _examiner() -> Examiner:
    sentence_vectors(["."])  # an episode has a meaning only where the encoder is at hand
    return Examiner(*smollm2())


def main() -> None:
    examiner = _examiner()
    body: OwnBody = examiner.body
    some = [e for pool, n in AUTHORS.items() for e in examples(examiner, written(pool)[:n], written_replies(pool)[:n])]  # pyright: ignore
    left = written("second")
    others = examples(examiner, left, [[q.value for q in p.questions] for p in left])
    with frozen(examiner.model):
        moves = learned(examiner, some)
        for name, how in (("without", None), ("with", moves)):
            with torch.no_grad():
                nats = torch.stack([loss_of(examiner, how, e, e.answer, ends=False) for e in others])
            print(f"{name}: {float(nats.mean()):.2f} nats, median {float(nats.median()):.2f}", flush=True)
    save(moves, body.base.fingerprint)


if __name__ == "__main__":
    main()


__all__ = ["Example", "Moves", "examples", "learned", "loss_of", "save"]
