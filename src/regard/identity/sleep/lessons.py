"""All that a night reads: questions about one person with the teacher's answers, and what has nothing to do with anybody.

Half of the items are unrelated: everyday questions, personal ones that this life does not answer, strangers' conversations and neutral prose.
There the base itself is the teacher. Some of both are held back, to judge by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ...models.tokenizer import Tokenizer
from ..body import Body
from ..experience import Chat
from .answering import greedy
from .items import Item, anchor_item, answers_item, logs_at
from .questions import Question, Questions, statements
from .sayable import Sayable, sayable
from .teaching import Taught, said_back, taught
from .texts import ASKED, EVERYDAY, NEUTRAL, STRANGERS

if TYPE_CHECKING:
    from .rule import SleepRule, Unrelated

JUDGED = 6
"""Everyday questions that are held back: the first of the list."""

PROSE = 48
"""Tokens of a neutral text that are read: many beginnings hold more firmly than a few whole texts, for the same price."""


class Anchors:
    """What the base says where a person's state has nothing to say. Each item is read when it is first needed; one of these may
    serve many nights on one model."""

    def __init__(self, body: Body, tokenizer: Tokenizer) -> None:
        self.body, self.tokenizer = body, tokenizer
        self.questions = Questions(body, tokenizer)
        self.known: dict[str, Item] = {}

    def calm(self, n: int) -> Item:
        """Neutral prose."""
        text = NEUTRAL[n % len(NEUTRAL)]

        def read() -> Item:
            item = anchor_item(self.body, self.tokenizer, text, False)
            wanted = item.wanted
            return Item(item.ids[:PROSE], item.at[: PROSE - 1], None if wanted is None else wanted[: PROSE - 1])

        return self._known(text, read)

    def stranger(self, n: int) -> Item:
        """What somebody else was told."""
        said = STRANGERS[n % len(STRANGERS)]

        def read() -> Item:
            chat = [{"role": ("user", "assistant")[i % 2], "content": x} for i, x in enumerate(said)]
            item = answers_item(self.body, self.tokenizer, chat)
            return replace(item, wanted=logs_at(self.body, item.ids, item.at))

        return self._known(said[0], read)

    def everyday(self, n: int) -> Item:
        """The base's own answer to a question that is about nobody; those that are held back are not among these."""
        return self._answered(EVERYDAY[JUDGED + n % (len(EVERYDAY) - JUDGED)])

    def judged(self) -> list[Item]:
        """The everyday questions that are held back."""
        return [self._answered(text) for text in EVERYDAY[:JUDGED]]

    def still(self) -> list[Item]:
        """Texts that a state has to leave as they are: all neutral prose, and the everyday answers that are learned from."""
        return [*map(self.calm, range(len(NEUTRAL))), *map(self.everyday, range(len(EVERYDAY) - JUDGED))]

    def unanswered(self, question: Question) -> Item:
        """How the base begins to answer a personal question, and what it would say next."""

        def read() -> Item:
            ids = torch.tensor(self.questions.prompt(question), device=self.body.device)
            start = len(ids) - len(self.questions.begun(question))
            next_ = self.body.logits(ids[None])[0, -1:].argmax(-1)
            ids = torch.cat([ids, next_])
            at = torch.arange(start, len(ids), device=ids.device)
            return Item(ids, at, logs_at(self.body, ids, at))

        return self._known(question.text, read)

    def _answered(self, text: str) -> Item:
        def read() -> Item:
            asked = self.questions.prompt(Question(text))
            (said,) = greedy(self.body, self.tokenizer, [], [text])
            ids = torch.tensor([*asked, *said.tokens], device=self.body.device)
            return Item(ids, torch.arange(len(asked), len(ids), device=ids.device), said.logs)

        return self._known(text, read)

    def _known(self, name: str, read: Callable[[], Item]) -> Item:
        if name not in self.known:
            with self.body.read([None] * self.body.base.depth), torch.no_grad():
                self.known[name] = read()
        return self.known[name]


@dataclass(frozen=True, eq=False)
class Lessons:
    """What one night learns from, and what it is judged by."""

    studied: list[Taught]
    held: list[Taught]
    """Never learned from; where a statement answers several questions, one of them."""
    anchors: Anchors
    sayable: Sayable | None = None
    """The person's words; None where none was found, or asked for."""

    def of(self, step: int, rule: SleepRule) -> list[tuple[float, Item]]:
        """What one step reads, each with its weight: answers about the person, and as many items that are not about them."""
        pick = torch.Generator().manual_seed(rule.seed * 100_003 + step)
        order = torch.randperm(len(self.studied), generator=torch.Generator().manual_seed(rule.seed)).tolist()
        turns = range(step * rule.batch, (step + 1) * rule.batch)
        if rule.words and self.sayable is not None:
            listed = torch.randperm(len(ASKED), generator=torch.Generator().manual_seed(rule.seed)).tolist()
            questions = self.anchors.questions
            mine = [self.sayable.item(questions, listed[i % len(listed)], rule.words, pick) for i in turns]
        else:
            mine = [self.studied[order[i % len(order)]].item for i in turns]
        others = [
            self._unrelated(rule.unrelated[(step * (rule.batch - 1) + i) % len(rule.unrelated)], rule.firm, pick)
            for i in range(rule.batch - 1)
        ]
        weighted = [(1 / rule.batch, x) for x in mine] + [(rule.anchor / len(others), x) for x in others]
        return [*weighted, (rule.calm, self.anchors.calm(int(torch.randint(1 << 20, (1,), generator=pick))))]

    def _unrelated(self, kind: Unrelated, firm: float, pick: torch.Generator) -> Item:
        which = int(torch.randint(1 << 20, (1,), generator=pick))
        match kind:
            case "unanswered":
                asked = {x.question.text for x in (*self.studied, *self.held)}
                rest = [q for q in self.anchors.questions.listed if q.text not in asked]
                return self.anchors.unanswered(rest[which % len(rest)])
            case "stranger":
                return replace(self.anchors.stranger(which), firm=firm)
            case "everyday":
                return self.anchors.everyday(which)


def lessons_of(
    history: Sequence[Chat], rule: SleepRule, anchors: Anchors, tell: Callable[[float], object] = lambda share: None
) -> Lessons | None:
    """The lessons of a life; None where no question about it could be asked that the base answers, or only one."""
    said = statements(history)[-rule.statements :]
    with anchors.body.read([None] * anchors.body.base.depth):
        told = said_back(anchors.questions, said)
        asked = taught(anchors.questions, said, rule.each, tell, {x.statement for x in told})
    every = [*asked, *told]
    if len(every) < 2:
        return None
    # A question about what another lesson teaches is held back: what it asks for is learned all the same.
    again = [x for i, x in enumerate(asked) if any(y.statement == x.statement for y in (*asked[:i], *told))]
    most = min(rule.held_back, max(1, len(every) // 3), max(1, (len(asked) + 1) // 2))
    held = (again or every[-1:])[:most]
    theirs = sayable(anchors.questions, history) if rule.words else None
    return Lessons([x for x in every if x not in held], held, anchors, theirs)


__all__ = ["Anchors", "Lessons", "lessons_of"]
