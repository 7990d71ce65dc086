"""Which words of a history are the person's: the names, numbers and things that are told about a life, in any case and any grammar.

    p(word) = σ( Σ_ℓ w_ℓ · q_ℓ(t) + b )      q_ℓ(t) the queries that layer ℓ ∈ (16, 22) has at the word's last token, before RoPE

What a word is to whoever wrote it, the model knows by the middle of its layers, and queries are linear in that. Only the user's words are
asked, and of those that several unrelated texts have (`COMMON`) none. The 1,152 numbers are a logistic regression on 26,955 words of seven pools of
people whose facts are known (natural and written, of `regard.study.people`), each pool of equal weight. `finder.safetensors` has them, for one base; on another a word counts that
has a digit, or a capital inside a sentence.

Each pool left out of the fit in its turn: of a person's words, five of a hundred, the ten likeliest have 86 to 98% in the six natural pools, and 39%
in long chats written by hand, where most of what is told is in common words; of the six likeliest 68 to 78% and 33% are right. A capital inside a
sentence or a digit finds 46% (33 to 56) of them. No number of a word alone does it: the ten most shocking have 52%, the rarest 24%, those that a personal question
expects most 23%; a regression on 41 such numbers 72%; on what layers 9, 15, 21 and 27 leave of the word alone 87, 92, 92 and 88%.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import CheckpointError
from ...files import read_plain, reading
from ..body import Body
from ..experience import Chat, tokenised
from ..speech import USER, Speech
from .questions import COMMON, WORD, Questions

FILE = Path(__file__).with_name("finder.safetensors")
LARGEST = 1 << 20
LIKELY = 0.1
"""Probability from which on a word may be the person's."""
SHORTER = 2.5
"""Nats that a token less is worth, where it is asked whether a word is written with a capital: the tokenizer knows how it is met."""


class Found(NamedTuple):
    text: str
    """As somebody else would write it."""
    sure: float
    """The probability that it is the person's."""


class Probe(NamedTuple):
    """The regression: a weight for every query of each of these layers, and b."""

    layers: tuple[int, ...]
    weight: Float[Tensor, "l HD"]
    bias: float
    fingerprint: str

    def sure(self, queries: Float[Tensor, "l n HD"]) -> Float[Tensor, " n"]:
        return (torch.einsum("lnd,ld->n", queries.float().cpu(), self.weight) + self.bias).sigmoid()


def found_words(questions: Questions, history: Sequence[Chat]) -> list[Found]:
    """The words of a history that may be the person's, the surest first; each once, or in two spellings where it is not clear which."""
    best: dict[str, tuple[float, list[Found]]] = {}
    with torch.no_grad(), questions.body.read([None] * questions.body.base.depth):
        for chat in history:
            for word, sure, clear in _words_in(questions, chat):
                key = word.lower()
                if key not in COMMON and sure >= LIKELY and sure > best.get(key, (0.0,))[0]:
                    best[key] = sure, [Found(word, sure)] if clear else _spelt(questions, word, sure)
    every = [x for _, spellings in best.values() for x in spellings if x.sure >= LIKELY / 2]
    return sorted(every, key=lambda x: (-x.sure, x.text))


def _words_in(questions: Questions, chat: Chat) -> list[tuple[str, float, bool]]:
    """The user's words in a chat, how probably each is the person's, and whether it is clear how it is spelt."""
    tokenizer = questions.tokenizer
    ids, roles = tokenised(chat, tokenizer) if len(chat) else ([], [])
    speech = Speech.of(ids, roles, tokenizer)
    sentences = dict[int, int]()
    places = dict[int, list[int]]()
    for i, (role, word, letters) in enumerate(zip(roles, speech.word.tolist(), speech.letters.tolist(), strict=True)):
        if role == USER and letters:
            places.setdefault(word, []).append(i)
            sentences.setdefault(int(speech.sentence[i]), word)
    if not places:
        return []
    texts = {w: m.group() for w, at in places.items() if (m := WORD.search(tokenizer.decode([ids[i] for i in at])))}
    begins, writes = set(sentences.values()), any(t != t.lower() for w, t in texts.items() if w not in sentences.values())
    sure = _sure(questions.body, ids, [places[w][-1] for w in texts], [_plainly(t, w in begins) for w, t in texts.items()])
    # Who writes no capitals may mean one, and the first word of a sentence has one whatever it is.
    clear = [any(map(str.isdigit, t)) or (w not in begins and (writes or t != t.lower())) for w, t in texts.items()]
    return list(zip(texts.values(), sure, clear, strict=True))


def _sure(body: Body, ids: list[int], at: list[int], plainly: list[bool]) -> list[float]:
    probe = probe_for(body)
    if probe is None:
        return [float(x) for x in plainly]
    heads = body.heads(torch.tensor(ids, device=body.device))
    queries = torch.stack([heads[layer].q.transpose(0, 1).flatten(1)[at] for layer in probe.layers])
    return probe.sure(queries).tolist()


def _plainly(word: str, begins: bool) -> bool:
    return any(map(str.isdigit, word)) or (word[0].isupper() and len(word) > 1 and not begins)


def _spelt(questions: Questions, word: str, sure: float) -> list[Found]:
    """With a capital and without, each as probable as the base would write it."""
    both = (word[:1].upper() + word[1:], word.lower())
    capital, small = (questions.tokenizer.encode(f" {w}", bos=False) for w in both)
    if capital == small:
        return [Found(word, sure)]
    nats = float(questions.usual[capital[0]] - questions.usual[small[0]]) + SHORTER * (len(small) - len(capital))
    share = float(torch.tensor(nats).sigmoid())
    return [Found(both[0], sure * share), Found(both[1], sure * (1 - share))]


@lru_cache(maxsize=1)
def probe() -> Probe:
    """The regression that came with the package."""
    from safetensors.torch import load

    with reading(FILE):
        data = read_plain(FILE, LARGEST, follow=True)
        numbers = load(data)
        about = json.loads(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["about"])
        weight, layers = numbers["weight"], tuple(int(x) for x in about["layers"])
        if weight.ndim != 2 or weight.shape[0] != len(layers) or not bool(torch.isfinite(weight).all()):
            raise CheckpointError(f"{FILE.name}: weight is {tuple(weight.shape)}; it is finite, a row for each of {layers}")
        return Probe(layers, weight.float(), float(numbers["bias"]), str(about["fingerprint"]))


def probe_for(body: Body) -> Probe | None:
    """The same, if it was learned on this base; None if it was not."""
    return probe() if probe().fingerprint == body.base.fingerprint else None


__all__ = ["Found", "Probe", "found_words", "probe", "probe_for"]
