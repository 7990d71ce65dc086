"""Questions about what a person said: from templates over their own words, from a list by the words that answer them, and by the model.

A question of the list is matched to a statement without reading either again: z(word | question) = log p(word | how the answer
begins) − log mean over the list, by the base. "You play the" expects "cello" as no other beginning does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ...models.tokenizer import Tokenizer
from ..body import Body
from ..experience import Chat
from ..speech import SENTENCE, is_question
from .answering import continued
from .texts import ASKED, EVERYDAY, NEUTRAL, SECOND_PERSON, STRANGERS

PIECE = 320
"""Characters of a statement at most, or a whole sentence where that is longer."""
MATCHED = 3
"""Questions of the list that are tried on a statement."""
EXPECTED = 1.0
"""Nats by which a question's beginning expects a word more than the list does on average, at least."""
WORD = re.compile(r"[^\W_]+")
OWNED = re.compile(r"\bmy ([^\W\d_]{3,}(?:-[^\W\d_]+)*)", re.IGNORECASE)
TEMPLATES = (("What is my {}'s name?", "Your {}'s name is"), ("Who or what is my {}?", "Your {} is"))
"""Questions about whatever a person calls theirs."""
ASK = "{}\n\nAsk me one short question about this."
"""After it the model asks by itself."""


FIRST_PERSON = re.compile(
    rf"(?<!\w)(?:{'|'.join(sorted(map(re.escape, SECOND_PERSON), key=len, reverse=True))})(?!\w)", re.IGNORECASE
)
OWN = 12
"""Tokens of such a question at most."""


class Question(NamedTuple):
    text: str
    beginning: str = ""
    """How its answer begins; empty where the model begins it."""


def words(text: str) -> set[str]:
    return {w.lower() for w in WORD.findall(text)}


def statements(history: Sequence[Chat]) -> list[str]:
    """What the user said, message by message and oldest first; a long message in pieces. What only asks states nothing."""
    return [
        piece for chat in history for m in chat if m["role"] not in ("system", "assistant") for piece in _pieces(m["content"])
    ]


def stated(text: str) -> list[str]:
    """The sentences of a text that do not ask."""
    return [s for s in (x.strip() for x in SENTENCE.findall(text)) if WORD.search(s) and not is_question(s)]


def second_person(sentence: str) -> str:
    """What somebody says of themselves, said to them; other languages stay as they are."""

    def turned(m: re.Match[str]) -> str:
        word = SECOND_PERSON[m[0].lower()]
        return word.capitalize() if not m.start() else word

    return FIRST_PERSON.sub(turned, sentence)


def _pieces(text: str) -> list[str]:
    pieces: list[list[str]] = []
    for sentence in (s.strip() for s in SENTENCE.findall(text)):
        if pieces and sum(map(len, pieces[-1])) + len(sentence) < PIECE:
            pieces[-1].append(sentence)
        elif sentence:
            pieces.append([sentence])
    return [" ".join(p) for p in pieces if any(WORD.search(s) and not is_question(s) for s in p)]


def _common() -> frozenset[str]:
    """Words that stand in several of the texts that are about nobody: they are no answer to anything."""
    texts = [*NEUTRAL, *EVERYDAY, *(" ".join(t) for t in STRANGERS), *(" ".join(pair) for pair in ASKED)]
    counts = Counter(w for text in texts for w in words(text))
    return frozenset(w for w, n in counts.items() if n > 1)


COMMON = _common()


class Questions:
    """What may be asked of a base; the list is read once for many nights."""

    def __init__(self, body: Body, tokenizer: Tokenizer) -> None:
        self.body, self.tokenizer = body, tokenizer
        self.listed = [Question(*pair) for pair in ASKED]

    @cached_property
    def logs(self) -> Float[Tensor, "n V"]:
        """log p of every token after the beginning of each listed answer."""
        with self.body.read([None] * self.body.base.depth), torch.no_grad():
            rows = [torch.tensor(self.prompt(q), device=self.body.device) for q in self.listed]
            longest = max(map(len, rows))
            logs: list[Tensor] = []
            for some in (rows[i : i + 16] for i in range(0, len(rows), 16)):
                hidden = self.body.hidden(torch.stack([F.pad(r, (0, longest - len(r))) for r in some]))
                last = torch.stack([hidden[i, len(r) - 1] for i, r in enumerate(some)])
                logs.append(self.body.head(last).float().log_softmax(-1))
        return torch.cat(logs)

    @cached_property
    def usual(self) -> Float[Tensor, " V"]:
        """log of the mean of p over the list: how likely a token is as an answer to something personal."""
        return self.logs.logsumexp(0) - torch.tensor(float(len(self.logs))).log()

    @cached_property
    def expects(self) -> Float[Tensor, "n V"]:
        """z of every token after the beginning of each listed answer."""
        return self.logs - self.usual

    def prompt(self, question: Question, statement: str = "") -> list[int]:
        """A chat that asks, after the statement in the same message, up to where the answer goes on."""
        said = f"{statement}\n\n{question.text}" if statement else question.text
        ids = self.tokenizer.encode(self.tokenizer.chat([{"role": "user", "content": said}]))
        return ids + self.begun(question)

    def begun(self, question: Question) -> list[int]:
        return self.tokenizer.encode(question.beginning, bos=False) if question.beginning else []

    def about(self, statement: str) -> list[Question]:
        """Questions that this statement may answer; whether it does, the teacher shows."""
        owned = [
            Question(*(x.format(noun) for x in pair)) for noun in dict.fromkeys(OWNED.findall(statement)) for pair in TEMPLATES
        ]
        return list(dict.fromkeys([*owned, *self.matched(statement)]))

    def matched(self, statement: str, most: int = MATCHED) -> list[Question]:
        """The listed questions whose beginning expects a word of the statement most, and more than others do."""
        best = self.expected(WORD.findall(statement))
        order = best.argsort(descending=True, stable=True)[:most].tolist()
        return [self.listed[i] for i in order if float(best[i]) >= EXPECTED]

    def expected(self, of: Sequence[str]) -> Float[Tensor, " n"]:
        """z of the one of these words that each listed question expects most; −∞ where they are all common."""
        firsts = [self.tokenizer.encode(f" {w}", bos=False)[:1] for w in of if w.lower() not in COMMON]
        tokens = torch.tensor([t for first in firsts for t in first], dtype=torch.long, device=self.expects.device)
        none = self.expects.new_full((len(self.listed), 1), float("-inf"))
        return torch.cat([none, self.expects[:, tokens]], 1).max(1).values

    def fits(self, question: Question, word: str) -> bool:
        """Whether a word of an answer is one that a listed question expects; any other question may be answered with any."""
        if question not in self.listed:
            return True
        at = self.listed.index(question)
        # A word is looked up as it may be written.
        return max(float(self.expected([w])[at]) for w in (word, word.capitalize())) >= EXPECTED

    def by_model(self, statement: str) -> list[Question]:
        """One that the model asks by itself, if what it says is a question."""
        prompt = self.prompt(Question(ASK.format(statement)))
        (said,) = continued(
            self.body, [], [prompt], OWN, self.tokenizer.eos_ids, lambda _, t: is_question(self.tokenizer.decode(t))
        )
        text = self.tokenizer.decode([t for t in said.tokens if t not in self.tokenizer.eos_ids]).strip().strip('"')
        return [Question(text)] if is_question(text) and "\n" not in text else []


__all__ = ["COMMON", "Question", "Questions", "statements", "words"]
