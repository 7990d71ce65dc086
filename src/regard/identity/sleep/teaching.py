"""What a night learns: the base's own answers with one statement in its context, to questions that the statement answers.

    teacher   the base, reading "statement + question", its answer begun where the template begins it
    student   the identity, reading the question alone
    item      KL(teacher ‖ student) at every token of the teacher's answer, up to the last word that the person said

Only words that the person said, that the question does not contain and that the statement made likelier count as an answer. A question
belongs to one statement: the youngest that answers it with confidence, so that an update wins over what it corrects.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .answering import Answer, continued, logs_along
from .items import Item
from .questions import COMMON, Question, Questions, second_person, stated, words
from .texts import SAID_BACK

LONGEST, LONGEST_FREE = 8, 12
"""Tokens of an answer at most, where its beginning is given and where the model begins it."""
DIRECT = 2
"""Tokens that may stand before the first word of the person's, where the beginning is given."""
FACT = 2.0
"""Nats by which a statement makes a word likelier, at least, for the word to be an answer of the statement's."""
SURE = -3.0
"""The same of a sentence that is said back, whose other words are given: greetings and thanks, which nobody would say back, stay below it."""
CONFIDENT = -2.0
"""Mean log-probability of the answer's words by the teacher, at least."""


@dataclass(frozen=True, eq=False)
class Taught:
    """A question, and what the teacher says to it."""

    question: Question
    item: Item
    """Scored along the whole answer, its beginning included."""
    answer: tuple[str, ...]
    """The person's words in it."""
    confidence: float
    statement: int
    """Which one answers it."""


@torch.no_grad()
def taught(
    questions: Questions,
    said: Sequence[str],
    each: int,
    tell: Callable[[float], object] = lambda share: None,
    without: Container[int] = (),
) -> list[Taught]:
    """At most `each` questions for every statement, the surest first; `without` the model's own about these statements."""
    best: dict[str, Taught] = {}
    for n, statement in enumerate(said):
        tell(n / len(said))
        # The model's own questions are the dearest and the weakest: they are asked where nothing else teaches a statement.
        asked = _answered(questions, n, statement, questions.about(statement))
        if not asked and n not in without:
            asked = _answered(questions, n, statement, questions.by_model(statement))
        for one in asked:
            # Statements come oldest first, so that the youngest answer replaces what was said before it.
            best[one.question.text] = one
    surest = sorted(best.values(), key=lambda x: (-x.confidence, x.statement, x.question))
    return [x for i, x in enumerate(surest) if sum(y.statement == x.statement for y in surest[:i]) < each]


def _answered(questions: Questions, n: int, statement: str, asked: Sequence[Question]) -> list[Taught]:
    body, tokenizer = questions.body, questions.tokenizer
    if not asked:
        return []
    prompts = [questions.prompt(q, statement) for q in asked]
    known = words(statement)

    def enough(row: int, tokens: list[int]) -> bool:
        """At the end of a sentence; or where an answer that was begun goes elsewhere."""
        text = tokenizer.decode(tokens)
        if asked[row].beginning and len(tokens) > DIRECT + 2 and not words(text) & known:
            return True
        return len(tokens) >= (LONGEST if asked[row].beginning else LONGEST_FREE) or bool(re.search(r"[.!?。！？\n]\s*$", text))

    answers = continued(body, [], prompts, LONGEST_FREE, tokenizer.eos_ids, enough)
    # Most answers end here, before the base is asked what it would have said.
    named = [(q, a, of) for q, a in zip(asked, answers, strict=True) if (of := _named(questions, q, known, a)) is not None]
    texts = [_text(questions, questions.prompt(q), a.tokens) for q, a, _ in named]
    lessons = [_lesson(questions, q, n, of, a, base) for (q, a, of), base in zip(named, logs_along(body, texts), strict=True)]
    return [x for x in lessons if x is not None and x.confidence >= CONFIDENT]


def _text(questions: Questions, prompt: list[int], said: list[int]) -> tuple[Tensor, Tensor]:
    """A prompt and what is said to it, and the places of the latter."""
    ids = torch.tensor([*prompt, *said], device=questions.body.device)
    return ids, torch.arange(len(prompt), len(ids), device=ids.device)


def _named(questions: Questions, question: Question, known: set[str], answer: Answer) -> list[str] | None:
    """The person's words in an answer, token by token; None where none of them is what was asked for."""
    new = known - words(question.text) - words(question.beginning) - COMMON
    of = [w if w in new else "" for w in _word_of_each(questions, answer.tokens)]
    first = next((i for i, w in enumerate(of) if w), None)
    late = first is None or (question.beginning and first > DIRECT)
    return None if first is None or late or not questions.fits(question, of[first]) else of


def _lesson(questions: Questions, question: Question, n: int, of: list[str], answer: Answer, base: Tensor) -> Taught | None:
    """The item of an answer; None where the statement is not what made its first word likely."""
    body = questions.body
    prompt, begun = questions.prompt(question), questions.begun(question)
    first = next(i for i, w in enumerate(of) if w)
    ids, at = _text(questions, prompt, answer.tokens)
    chosen = ids[at, None]
    sure = answer.logs.gather(-1, chosen)[:, 0]
    gain = sure - base.gather(-1, chosen)[:, 0]
    facts = {w for w in of if w and sum(float(g) for g, x in zip(gain, of, strict=True) if x == w) >= FACT}
    places = [i for i, w in enumerate(of) if w in facts]
    if of[first] not in facts:
        return None
    end = min(places[-1] + 2, len(at))
    start = torch.arange(len(prompt) - len(begun), len(prompt), device=body.device)
    wanted = torch.cat([_surely(ids[start], answer.logs.shape[-1]), answer.logs[:end]])
    item = Item(ids[: len(prompt) + end], torch.cat([start, at[:end]]), wanted)
    confidence = float(sure[places].mean())
    return Taught(question, item, tuple(dict.fromkeys(of[i] for i in places)), confidence, n)


@torch.no_grad()
def said_back(questions: Questions, said: Sequence[str]) -> list[Taught]:
    """Every sentence of the person's in the second person, as an answer to what is known about them: one lesson for each that has a
    word of theirs which the statement makes likelier.

    What is between these words is given, as it is in any answer that has begun, and nothing is learned there.
    """
    lessons, asked = list[Taught](), 0
    for n, statement in enumerate(said):
        sentences = [questions.tokenizer.encode(second_person(x), bos=False) for x in stated(statement)]
        asks = [Question(SAID_BACK[(asked + i) % len(SAID_BACK)]) for i in range(len(sentences))]
        asked += len(sentences)
        pairs = list(zip(asks, sentences, strict=True))
        before = [_text(questions, questions.prompt(q, statement), x) for q, x in pairs]
        without = [_text(questions, questions.prompt(q), x) for q, x in pairs]
        both = zip(logs_along(questions.body, before), logs_along(questions.body, without), strict=True)
        for (question, tokens), (ids, at), logs in zip(pairs, without, both, strict=True):
            new = words(statement) - words(question.text) - COMMON
            places, confidence = _facts_along(questions, tokens, new, *logs)
            if places and confidence >= SURE:
                of = _word_of_each(questions, tokens)
                item = Item(ids[: int(at[places[-1]]) + 1], at[places], logs[0][places])
                answer = tuple(dict.fromkeys(of[i] for i in places))
                lessons.append(Taught(question, item, answer, confidence, n))
    return lessons


def _facts_along(
    questions: Questions, tokens: list[int], new: set[str], teacher: Tensor, base: Tensor
) -> tuple[list[int], float]:
    """The tokens of words that a statement makes likelier, and how sure the teacher is of them."""
    of = [w if w in new else "" for w in _word_of_each(questions, tokens)]
    chosen = torch.tensor(tokens, device=teacher.device)[:, None]
    sure = teacher.gather(-1, chosen)[:, 0]
    gain = sure - base.gather(-1, chosen)[:, 0]
    facts = {w for w in of if w and sum(float(g) for g, x in zip(gain, of, strict=True) if x == w) >= FACT}
    places = [i for i, w in enumerate(of) if w in facts]
    return places, float(sure[places].mean()) if places else 0.0


def _surely(tokens: Tensor, vocabulary: int) -> Tensor:
    """Log-probabilities of what is certain."""
    logs = torch.full((len(tokens), vocabulary), -30.0, device=tokens.device)
    return logs.scatter(-1, tokens[:, None], 0.0)


def _word_of_each(questions: Questions, tokens: list[int]) -> list[str]:
    """The word that each token ends in."""
    text = questions.tokenizer.decode(tokens)
    found: list[str] = []
    for i in range(len(tokens)):
        before = questions.tokenizer.decode(tokens[: i + 1])
        begun = re.search(r"[^\W_]+$", before)
        rest = re.match(r"[^\W_]*", text[len(before) :])
        found.append((begun.group() + (rest.group() if rest else "")).lower() if begun else "")
    return found


def says(said: str, lesson: Taught) -> bool:
    """Whether an answer contains a word of the person's that the teacher answered with."""
    return bool(words(said) & set(lesson.answer))


__all__ = ["Taught", "said_back", "says", "taught"]
