"""Can a model answer a natural person's questions with their words in its context?

    python -m regard.study.people.recall choose 6

prints one line for each person, then means with 95% intervals over people. A share is of the greedy answers that contain an
accepted one. `chat` asks after the whole history, `document` shows the person's own words in one message, `turn` only the message that answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from ...identity.body import Body, body_of, frozen
from ...identity.sleep.answering import greedy
from ...identity.sleep.items import answers_item, losses
from ...models.tokenizer import Tokenizer
from .natural import NaturalPerson, about_document, natural
from .natural_data import NaturalPool

LONGEST = 16
"""Tokens of an answer at most: what a small model says later than that it has left the question for."""
Answers = Callable[[Body, Tokenizer, NaturalPerson, int], list[str]]


def _after_chat(body: Body, tokenizer: Tokenizer, person: NaturalPerson, longest: int) -> list[str]:
    chat = [message for conversation in person.history for message in conversation]
    return _said(body, tokenizer, chat, [q.text for q in person.questions], longest)


def _after_document(body: Body, tokenizer: Tokenizer, person: NaturalPerson, longest: int) -> list[str]:
    asked = [about_document(person.document, q.text) for q in person.questions]
    return _said(body, tokenizer, [], asked, longest)


def _after_turn(body: Body, tokenizer: Tokenizer, person: NaturalPerson, longest: int) -> list[str]:
    turns = [person.history[q.turn[0]][q.turn[1]]["content"] for q in person.questions]
    asked = [about_document(turn, q.text) for turn, q in zip(turns, person.questions, strict=True)]
    return _said(body, tokenizer, [], asked, longest)


def _alone(body: Body, tokenizer: Tokenizer, person: NaturalPerson, longest: int) -> list[str]:
    return _said(body, tokenizer, [], [q.text for q in person.questions], longest)


WAYS: dict[str, Answers] = {"nothing": _alone, "turn": _after_turn, "document": _after_document, "chat": _after_chat}


def _said(body: Body, tokenizer: Tokenizer, chat: Sequence[dict[str, str]], asked: Sequence[str], longest: int) -> list[str]:
    ends = set(tokenizer.eos_ids)
    lines = greedy(body, tokenizer, chat, asked, longest)
    return [tokenizer.decode([token for token in line if token not in ends]).strip() for line, _ in lines]


@torch.no_grad()
def in_context(
    model: nn.Module, tokenizer: Tokenizer, person: NaturalPerson, ways: Sequence[str] = tuple(WAYS), longest: int = LONGEST
) -> dict[str, float]:
    """Nats per token of the assistant's words in the next conversation, without and with the history; the share recalled in each way."""
    body = body_of(model)
    chat = [message for conversation in person.history for message in conversation]
    with frozen(model):
        last = answers_item(body, tokenizer, person.next)
        whole = answers_item(body, tokenizer, [*chat, *person.next])
        base, context = losses(body, [last, replace(whole, at=whole.at[-len(last.at) :])])
        measured = {"base": float(base), "context": float(context)}
        for way in ways:
            said = WAYS[way](body, tokenizer, person, longest)
            right = [question.right(answer) for question, answer in zip(person.questions, said, strict=True)]
            measured[way] = sum(right) / len(right)
    return measured


def main(pool: str = "choose", count: str = "6", *ways: str) -> None:
    from ..frame.verdict import interval
    from ..tasks.packaged import opened

    model, tokenizer = opened("smollm2")
    lines: list[dict[str, float]] = []
    for person in natural(int(count), 0, cast(NaturalPool, pool)):
        lines.append(in_context(model, tokenizer, person, ways or tuple(WAYS)))
        print(json.dumps({"name": person.name, "listener": person.listener, **lines[-1]}), flush=True)
    for key in lines[0]:
        print(f"{key:9} {interval([line[key] for line in lines])}")


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
