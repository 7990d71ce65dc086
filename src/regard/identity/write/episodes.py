"""Cut an experience into episodes: what one speaker says in one go, between sentences where it is long."""

from __future__ import annotations

from itertools import groupby

import torch

from ..episodes import Episode, Role
from ..experience import Experience
from ..packed import Packed
from ..read.finding import encoder_name, finder_of, meanings_within
from ..read.slots import read_alone
from ..speech import ASSISTANT, MARKUP

LONGEST = 84
"""Tokens of an episode at most: with its markup, and the question that it answers, it fits into the slots that are read."""


def episodes_of(e: Experience, born: int, *, kept: bool = False) -> list[Episode]:
    """What was said in an experience, turn by turn; `born` tokens were met before it. `kept` ones have keys and values of their own."""
    if e.tokenizer is None:
        # Token ids alone say nothing of turns, and cannot be asked for in words.
        return []
    finder = finder_of(e.body, e.tokenizer)
    spans = _spans(e)
    texts = [e.tokenizer.decode(e.tokens[i:j].tolist()) for i, j, _ in spans]
    vectors = meanings_within(texts)
    before = (e.content.long().cumsum(0) - e.content.long()).tolist()
    episodes: list[Episode] = []
    for n, (i, j, role) in enumerate(spans):
        keys = finder.unit(e.k[:, :, i:j])
        meaning = None if vectors is None else vectors[n]
        k, v = read_alone(finder, e.tokens[i:j].tolist()) if kept else (None, None)
        episodes.append(
            Episode(
                e.tokens[i:j].to(torch.int32).cpu(),
                Packed.of(keys),
                role,
                e.source,
                born + int(before[i]),
                finder.usual(keys, None if meaning is None else meaning[0]),
                None if meaning is None else Packed.of(meaning),
                "" if meaning is None else encoder_name(),
                bool(e.speech.asks[e.speech.sentence[j - 1]]),
                k,
                v,
            )
        )
    return episodes


def _spans(e: Experience) -> list[tuple[int, int, Role]]:
    """Start, end and speaker of every episode."""
    spans: list[tuple[int, int, Role]] = []
    role, sentence = e.speech.role.tolist(), e.speech.sentence.tolist()
    bos = None if e.tokenizer is None else e.tokenizer.special.bos
    for speaker, run in groupby(range(len(e)), lambda i: role[i]):
        if speaker == MARKUP:
            continue
        name: Role = "assistant" if speaker == ASSISTANT else "user"
        places = list(run)
        if places[0] == 1 and int(e.tokens[0]) != bos:
            # A plain text has no markup: the model's sink is its first word.
            places.insert(0, 0)
        start = places[0]
        for _, words in groupby(places, lambda i: sentence[i]):
            part = list(words)
            if part[-1] + 1 - start > LONGEST and part[0] > start:
                spans.append((start, part[0], name))
                start = part[0]
            while part[-1] + 1 - start > LONGEST:
                spans.append((start, start + LONGEST, name))
                start += LONGEST
        spans.append((start, places[-1] + 1, name))
    return [s for s in spans if s[1] > s[0]]


__all__ = ["LONGEST", "episodes_of"]
