"""Fits the finder of a person's words (`identity/sleep/finder.py`), and shows what it finds of a pool that it was not fitted on.

    python -m regard.study.people.word_finder            # writes finder.safetensors of the package; five minutes

Every word that a person says is one example, and counts where it stands in an accepted answer to a question about them. What has been replaced since counts
neither way. The weights minimise the mean log loss, each pool of equal weight, + DECAY |w|² over queries in their spreads. What is shipped was fitted
in the same way, with a word's hyphens and apostrophes inside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ...files import replacing
from ...identity.body import body_of
from ...identity.experience import tokenised
from ...identity.sleep.finder import FILE
from ...identity.sleep.questions import COMMON, WORD
from ...identity.speech import USER, Speech
from ...models.tokenizer import Tokenizer
from ..tasks.pretrained import smollm2
from .natural import NaturalPerson, natural
from .natural_data import NaturalPool
from .written import written

LAYERS = (16, 22)
SHORT, LONG = 20, 6
"""People of each natural pool, in short and in long lives."""
HELD: tuple[NaturalPool, ...] = ("test",)
"""Pools that studies of it are judged by."""
DECAY = 3e-3


class Examples(NamedTuple):
    x: Float[Tensor, "n l HD"]
    y: Bool[Tensor, " n"]
    person: Int[Tensor, " n"]


@torch.no_grad()
def examples(model: nn.Module, tokenizer: Tokenizer, crowd: Iterable[NaturalPerson], first: int = 0) -> Examples:
    """Every word of these people; those of what was replaced are left out."""
    body = body_of(model)
    rows, labels, whose = list[Tensor](), list[bool](), list[int]()
    for n, person in enumerate(crowd, first):
        right = [a for fact in person.facts for a in fact.accepted]
        old = [fact.old for fact in person.facts if fact.old]
        for chat in person.history:
            ids, roles = tokenised([dict(m) for m in chat], tokenizer)
            heads = body.heads(torch.tensor(ids))
            queries = torch.stack([heads[layer].q.transpose(0, 1).flatten(1) for layer in LAYERS], 1)
            for at, word, told, replaced in _labelled(ids, roles, tokenizer, right, old):
                if told or not replaced:
                    rows.append(queries[at])
                    labels.append(told and word.lower() not in COMMON)
                    whose.append(n)
    return Examples(torch.stack(rows), torch.tensor(labels), torch.tensor(whose))


def _labelled(
    ids: list[int], roles: list[int], tokenizer: Tokenizer, right: Sequence[str], old: Sequence[str]
) -> Iterator[tuple[int, str, bool, bool]]:
    """The last token of each of the user's words, the word, and whether it is of an answer, or of one that was replaced."""
    speech = Speech.of(ids, roles, tokenizer)
    text, ends, places = "", dict[int, tuple[int, int]](), dict[int, int]()
    for i, (role, word, letters) in enumerate(zip(roles, speech.word.tolist(), speech.letters.tolist(), strict=True)):
        piece = tokenizer.decode([ids[i]]) if role == USER else "\n"
        if role == USER and letters:
            start = ends.get(word, (len(text) + len(piece) - len(piece.lstrip()), 0))[0]
            ends[word], places[word] = (start, len(text) + len(piece)), i
        text += piece
    spans = [
        [m.span() for a in answers for m in re.finditer(rf"(?<!\w){re.escape(a)}(?!\w)", text, re.I)]
        for answers in (right, old)
    ]
    for word, (start, end) in ends.items():
        if (found := WORD.search(text[start:end])) is not None:
            told, replaced = (any(a <= start and end <= b for a, b in s) for s in spans)
            yield places[word], found.group(), told, replaced


def fitted(pools: Sequence[Examples]) -> tuple[Float[Tensor, "l HD"], float]:
    """The regression over these pools, for queries as they are."""
    x = torch.cat([e.x for e in pools]).flatten(1).float()
    y = torch.cat([e.y for e in pools]).float()
    each = torch.cat([torch.full((len(e.y),), 1 / (len(e.y) * len(pools))) for e in pools])
    mean, spread = x.mean(0), x.std(0).clamp_min(1e-4)
    z = ((x - mean) / spread).clamp(-5, 5)
    w, b = torch.zeros(z.shape[1], requires_grad=True), torch.zeros(1, requires_grad=True)
    optimiser = torch.optim.LBFGS([w, b], max_iter=60, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        said = F.binary_cross_entropy_with_logits(z @ w + b, y, reduction="none")
        total = (each * said).sum() + DECAY * w.square().sum()
        total.backward()
        return total

    optimiser.step(loss)  # pyright: ignore
    weight = w.detach() / spread
    return weight.view(pools[0].x.shape[1:]), float(b.detach() - weight @ mean)


def recall(e: Examples, weight: Tensor, bias: float, most: int = 10) -> float:
    """Of the words that there were to find, the share among the `most` likeliest of each person, mean over people."""
    score = (e.x.float() * weight).sum((1, 2)) + bias
    shares = list[float]()
    for who in e.person.unique():
        mine = e.person == who
        order = e.y[mine][score[mine].argsort(descending=True)]
        if bool(order.any()):
            shares.append(float(order[:most].sum() / order.sum()))
    return sum(shares) / max(1, len(shares))


def save(weight: Tensor, bias: float, fingerprint: str, out: Path = FILE) -> None:
    from safetensors.torch import save_file

    about = json.dumps({"fingerprint": fingerprint, "layers": LAYERS})
    with replacing(out) as draft:
        save_file({"weight": weight.contiguous(), "bias": torch.tensor([bias])}, draft, metadata={"about": about})


def main() -> None:
    model, tokenizer = smollm2()
    pools = dict[str, Examples]()
    for name in get_args(NaturalPool):
        if name not in HELD:
            pools[name] = examples(model, tokenizer, [*natural(26, 0, name, short=True)[:SHORT], *natural(LONG, 1, name)])
    pools["written"] = examples(model, tokenizer, written("first"))
    for name, e in pools.items():
        print(f"{name}: {recall(e, *fitted([x for other, x in pools.items() if other != name])):.0%} with ten words")
    save(*fitted(list(pools.values())), body_of(model).base.fingerprint)


if __name__ == "__main__":
    main()
