"""Who is it? Twenty people, one state without a name on it: can the person be named from its answers, and from its numbers?

The people are natural ones (`people.natural`): what they tell is told in passing. Their state is what `regard imprint` writes, conversation by conversation with
the default `Rule`: imprints, and episodes that come to mind at a prompt. Whoever names the person has never seen that history: they
know each of the twenty by a *later* conversation, which says the same facts in other sentences and was read by
nobody else. So nothing links a state to a name but what the person told.

- **From its answers.** Twenty plain questions, the same for all and each in a chat of its own, are answered greedily by the state ("Where do I live?", "Who
  is in my life?"); nobody was told all that they ask for. The judge reads text alone: it adds the z-scores, over the twenty, of two likenesses between the
  answers and what the assistant says in each later conversation. One counts common words, the rarer the more (idf); the other is MiniLM's, the nearest
  sentence for each of the answer's. "By facts alone" is the same after the words of all twenty names are struck out of the answers.
- **From its tensors.** For each layer and key head, M = Σ_slots k̃ ṽᵀ on unit vectors less the mean of the twenty: what a linear memory of the
  imprints would hold. M of the state is compared with M of twenty identities that were written from what the assistant says in the later
  conversations, as if the person told it; the largest cosine names the person. Tokens, positions and sources, which an identity stores beside its numbers, are
  not looked at, nor are episodes, which hold the words themselves.

Controls: the names of the twenty shuffled; a random state of the same spectrum (every head turned by an orthogonal matrix); values
shuffled among keys, which leaves every vector and takes away what belongs together; the model without a state. Answers of a broken state are
those of its broken slots: what comes to mind is turned or shuffled as the imprints are, or its words would speak for it.

Names that are shuffled leave one person in place on the average. One seed is four of the twenty people.

Chosen on the pools train and choose, twenty people of each, and the first set of questions and judges that was tried: by answers 20 and 20, by facts alone 20
and 20, by tensors 20 and 20, with values shuffled 0 of 10 and 1 of 4 by answers, 1 of 20 and 1 of 20 by tensors. The whole later conversation, written as it stands,
holds the user's questions instead of the facts: it named 7 of the twenty of choose by its imprints. Episodes' own numbers name everybody too (the nearest
key or meaning of each known one, 20 of 20), and shuffled values would not break them, so they are left out. Of the made-up people that stood here before, imprints
alone named as many.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..identity.state import Identity
from ..identity.write.rule import Rule
from ..models.decode.sampling import Sampling
from .frame.figure import COLOURS
from .frame.study import Plant, Record, Size, Study
from .frame.verdict import Check, Verdict, interval, judged
from .people.asking import Ask, Examiner, write_history
from .people.generator import Conversation, Message
from .people.lab import rotated, shuffled
from .people.natural import natural
from .people.natural_data import NaturalPool
from .tasks.packaged import MINILM, SMOLLM2, sentence_vectors
from .tasks.pretrained import smollm2

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEEDS = 5
CROWD: dict[Size, int] = {"mini": 4, "quick": 8, "full": 20}
EACH: dict[Size, int] = {"mini": 2, "quick": 2, "full": 4}
"""People of one seed."""
DEPTH: dict[Size, int | None] = {"mini": 2, "quick": None, "full": None}
LONGEST: dict[Size, int] = {"mini": 4, "quick": 16, "full": 24}
"""Tokens of an answer."""
QUESTIONS = (
    "What is my name?", "Where do I live?", "What do I do for a living?", "Who is in my life?", "What did I tell you about my family and friends?",
    "What pet do I have?", "What do I like to drink?", "What do I never eat?", "Which instrument do I play?", "Where do I want to go on holiday?",
    "What did I buy?", "What time does it leave?", "Which appointment do I have?", "What number should I remember?", "Where did I put it?",
    "What did I give up?", "What did I tell you about my work?", "What do you remember about me?", "What is new in my life?", "Who did I tell you about?",
)  # fmt: skip
ASKED: dict[Size, int] = {"mini": 2, "quick": 8, "full": len(QUESTIONS)}
STATES = ("own", "values shuffled", "random state", "nobody")
NAMED = 0.95


def words_of(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[^\W\d_]+", text.casefold()))


def sentences_of(text: str) -> list[str]:
    return [s.strip() for s in re.split(r"(?<=[.!?])\s+|\n+", text) if s.strip()]


def without(text: str, words: frozenset[str]) -> str:
    return re.sub(r"[^\W\d_]+", lambda m: "" if m[0].casefold() in words else m[0], text)


def z_scores(x: Tensor) -> Tensor:
    return (x - x.mean()) / x.std().clamp_min(1e-9)


class AnswerJudge:
    """Names a person by what is said, knowing one text of each."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.words = [words_of(text) for text in texts]
        self.vectors = [sentence_vectors(sentences_of(text)) for text in texts]

    def rarity(self, words: frozenset[str]) -> float:
        """Words weigh the more, the fewer of the known texts have them."""
        return sum(math.log(len(self.words) / sum(w in text for text in self.words)) ** 2 for w in sorted(words))

    def scores(self, said: Sequence[str]) -> list[float]:
        """One for each person."""
        words = frozenset[str]().union(*map(words_of, said))
        common = torch.tensor([self.rarity(words & text) / math.sqrt(self.rarity(text) or 1.0) for text in self.words])
        spoken = [sentence for answer in said for sentence in sentences_of(answer)]
        if not spoken:
            return z_scores(common).tolist()
        asked = sentence_vectors(spoken)
        near = torch.stack([(asked @ vectors.mT).amax(1).mean() for vectors in self.vectors])
        return (z_scores(common) + z_scores(near)).tolist()


def chance_of(scores: Sequence[float], who: int) -> float:
    """1 if the largest score is theirs, 0 if it is not; those who share it are drawn for."""
    best = max(scores)
    return (scores[who] == best) / sum(x == best for x in scores)


def memory(identity: Identity, mean_k: Tensor, mean_v: Tensor) -> Tensor:
    """M of every layer and key head, (L, G, D²)."""
    k, v = identity.imprints.k.dense() - mean_k, identity.imprints.v.dense() - mean_v
    return (F.normalize(k, dim=-1).mT @ F.normalize(v, dim=-1)).flatten(2)


class TensorJudge:
    """Names a person by the memory matrices of their known identities."""

    def __init__(self, known: Sequence[Identity]) -> None:
        self.mean_k, self.mean_v = (
            torch.cat([getattr(x.imprints, name).dense() for x in known], 2).mean(2, keepdim=True) for name in "kv"
        )
        M = torch.stack([memory(x, self.mean_k, self.mean_v) for x in known])
        self.mean = M.mean(0)
        self.known = F.normalize(M - self.mean, dim=-1)

    def scores(self, identity: Identity) -> list[float]:
        """One for each person: the mean cosine over layers and heads."""
        M = F.normalize(memory(identity, self.mean_k, self.mean_v) - self.mean, dim=-1)
        return (self.known * M).sum(-1).mean((1, 2)).tolist()


def told_by_themselves(chat: Sequence[Message]) -> Message:
    """What the assistant says in a chat as one message of the user's: a keeper that prefers the user's words would keep their questions."""
    return {"role": "user", "content": " ".join(m["content"] for m in chat if m["role"] == "assistant")}


class Lab:
    def __init__(self, size: Size, pool: NaturalPool = "test") -> None:
        self.size: Size = size
        self.examiner = Examiner(*smollm2(DEPTH[size]), Sampling(LONGEST[size], repetition_penalty=1.1))
        sentence_vectors(["."])  # an episode has a meaning only where the encoder is at hand
        self.crowd = natural(CROWD[size], 0, pool)
        self.prompts = [self.examiner.prompt([{"role": "user", "content": q}]) for q in QUESTIONS[: ASKED[size]]]
        self.names = frozenset(word for p in self.crowd for word in words_of(p.name))
        self.by_answers = AnswerJudge([" ".join(m["content"] for m in p.next if m["role"] == "assistant") for p in self.crowd])
        self.by_tensors = TensorJudge([self.written([(told_by_themselves(p.next),)]) for p in self.crowd])
        self.labels = Random("labels").sample(range(len(self.crowd)), len(self.crowd))

    def written(self, history: Sequence[Conversation]) -> Identity:
        (written,) = write_history(self.examiner, history, Rule())
        return written.identity

    def minds(self, who: Identity) -> list[Identity]:
        """What each question brings to mind."""
        return [self.examiner.recalled(who, prompt) for prompt in self.prompts]

    def said(self, minds: Sequence[Identity | None]) -> list[str]:
        asks = [Ask(prompt, ".", mind) for prompt, mind in zip(self.prompts, minds, strict=True)]
        return [said.text for said in self.examiner.ask_all(asks)]


@cache
def _lab(size: Size) -> Lab:
    return Lab(size)


@cache
def _nobody(size: Size) -> list[str]:
    lab = _lab(size)
    return lab.said([None] * len(lab.prompts))


def named(lab: Lab, i: int) -> Record:
    """Whether person i is named from each state, in each of three ways; and what was said. Broken states of every other person are asked."""
    own = lab.written(lab.crowd[i].history)
    minds = lab.minds(own)
    made: dict[str, Callable[[Identity], Identity]] = {
        "own": lambda x: x, "values shuffled": lambda x: shuffled(x, i), "random state": lambda x: rotated(x, i),
    }  # fmt: skip
    record: Record = {"name": lab.crowd[i].name, "answers": {}, "facts": {}, "tensors": {}, "said": {}}
    for state in STATES:
        state_of, scores = made.get(state), dict[str, list[float]]()
        if state in ("own", "nobody") or i % 2 == 0:
            said = _nobody(lab.size) if state_of is None else lab.said([state_of(mind) for mind in minds])
            scores["answers"] = lab.by_answers.scores(said)
            scores["facts"] = lab.by_answers.scores([without(answer, lab.names) for answer in said])
            record["said"][state] = said
        if state_of is not None:
            scores["tensors"] = lab.by_tensors.scores(state_of(own))
        for way, each in scores.items():
            record[way][state] = chance_of(each, i)
            if state == "own":
                record[way]["names shuffled"] = chance_of(each, lab.labels[i])
                record[way]["lead"] = each[i] - max(x for j, x in enumerate(each) if j != i)
    return record


def run(seed: int, size: Size) -> Record:
    lab, each = _lab(size), EACH[size]
    return {"people": [named(lab, (each * seed + n) % len(lab.crowd)) for n in range(each)]}


def of(records: Sequence[Record], way: str, state: str) -> list[float]:
    return [person[way][state] for r in records for person in r["people"] if state in person[way]]


def judge(records: Sequence[Record]) -> Verdict:
    def null(way: str) -> list[float]:
        return of(records, way, "names shuffled") + of(records, way, "random state")

    return judged(
        Check("the person is named from the answers", of(records, "answers", "own"), above=NAMED, control=null("answers"),
              condition="answers may say the name"),
        Check("the same by facts alone, without the words of any name", of(records, "facts", "own"), above=NAMED, control=null("facts"),
              condition="answers are judged by facts alone"),
        Check("the person is named from the tensors", of(records, "tensors", "own"), above=NAMED, control=null("tensors"),
              condition="the tensors are looked at"),
    )  # fmt: skip


def draw(records: Sequence[Record], figure: Figure) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(1.6, 1))
    ways = {"answers": "answers", "facts": "answers,\nno names", "tensors": "tensors"}
    bars = ("own", "values shuffled", "random state", "nobody", "names shuffled")
    for k, state in enumerate(bars):
        for n, way in enumerate(ways):
            if of(records, way, state):
                x = interval([100 * hit for hit in of(records, way, state)])
                left.bar(n + 0.16 * (k - 2), x.mean, 0.14, yerr=[[x.mean - x.low], [x.high - x.mean]], color=COLOURS[k], capsize=2,
                         hatch=("", "//", "..", "xx", "--")[k], label=state if n == 0 else None)  # fmt: skip
    count = len(of(records, "answers", "own"))
    left.axhline(100 * NAMED, color="#666666", lw=1, ls="--")
    left.set_xticks(range(len(ways)), list(ways.values()))
    left.set(ylabel="named rightly (%)", ylim=(0, 135), yticks=range(0, 101, 20), title=f"{count} people, one state")
    left.legend(ncol=3, loc="upper center")
    for n, way in enumerate(ways):
        lead = sorted(of(records, way, "lead"))
        scale = max(abs(x) for x in lead) or 1.0
        right.plot([100 * (j + 0.5) / len(lead) for j in range(len(lead))], [x / scale for x in lead], color=COLOURS[n], marker="osv"[n], markersize=4, lw=1,
                   label=ways[way].replace("\n", " "))  # fmt: skip
    right.axhline(0, color="#666666", lw=1)
    right.set(xlabel="people, least sure first (%)", ylabel="lead over the next (largest = 1)", title="how surely")
    right.legend()


def planted(kind: Plant, seed: int) -> Record:
    """States that tell who they are, that do not, or that say so whatever was done to them."""
    own = 0.0 if kind == "negative" else 1.0
    null = own if kind == "control" else 0.0
    way = {"own": own, "values shuffled": null, "random state": null, "nobody": null, "names shuffled": null, "lead": own - 0.5}
    person = {"name": str(seed), "said": {"own": [""]}, **dict.fromkeys(("answers", "facts", "tensors"), way)}
    return {"people": [person] * 4}


STUDY = Study(
    claim="An identity says who it is: the person is named among twenty from its answers, and from its numbers.",
    source="what an identity promises here",
    protocol="Twenty natural people of the test pool; SmolLM2 lives through their conversations with the default rule, and what a question brings to mind answers it. A judge "
    "that knows each person by a later conversation alone, the same facts in other sentences, names the person of a state: by its greedy answers to twenty plain "
    "questions, the same for all (common words and MiniLM), or by the cosine of memory matrices Σ kvᵀ of its imprints with identities written from what the assistant says in the later conversations.",
    controls=(
        "the names of the twenty shuffled",
        "a random state of the same spectrum",
        "values shuffled among keys",
        "the model without a state",
    ),
    caption="Left: how often the person is named among twenty, and what the controls give (chance is 5%). Right: by how much the person leads over the next, "
    "from the least sure to the surest.",
    run=run,
    judge=judge,
    draw=draw,
    planted=planted,
    seeds=SEEDS,
    needs=(SMOLLM2, MINILM),
    parts={"Identity": "identity.md"},
)
