"""Pairs of nouns that a pronoun tells apart: "The dog followed the man because it" is about the dog, with "he" about the man.

Every noun, verb and pronoun is one token of SmolLM2, so that all sentences have the same places. A control pair has two nouns that no
pronoun tells apart.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

ANIMALS = ["dog", "cat", "horse", "bear", "wolf", "fox", "bird", "lion", "cow", "mouse", "snake", "tiger", "rabbit", "goat", "pig", "sheep", "duck", "monkey", "deer", "rat", "elephant", "spider", "turtle", "whale", "frog", "shark", "owl", "eagle", "camel", "hen"]  # fmt: skip
MEN = [
    "man",
    "boy",
    "king",
    "father",
    "brother",
    "uncle",
    "prince",
    "priest",
    "son",
    "husband",
    "monk",
    "lord",
    "gentleman",
    "knight",
    "emperor",
    "nephew",
    "grandfather",
]
WOMEN = [
    "woman",
    "girl",
    "queen",
    "mother",
    "sister",
    "aunt",
    "princess",
    "actress",
    "daughter",
    "wife",
    "nun",
    "lady",
    "bride",
    "widow",
    "goddess",
    "grandmother",
]
VERBS = ["followed", "saw", "met", "helped", "watched", "heard", "liked", "admired", "called", "passed"]
FIRST, SECOND, PRONOUN = 1, 4, 6
"""Places of the nouns and of the pronoun in "The dog followed the man because it"."""


class Pair(NamedTuple):
    one: str
    its_pronoun: str
    other: str
    other_pronoun: str


def told_apart() -> list[Pair]:
    """30 pairs of an animal and a person, 16 of a man and a woman, and 14 more of them with other partners."""
    people = [(p, "he") for p in MEN] + [(p, "she") for p in WOMEN]
    mixed = [Pair(animal, "it", *people[i]) for i, animal in enumerate(ANIMALS)]
    couples = [Pair(m, "he", w, "she") for m, w in zip(MEN, WOMEN, strict=False)]
    return [*mixed, *couples, *(Pair(m, "he", w, "she") for m, w in zip(MEN[2:], WOMEN[:14], strict=False))]


def not_told_apart() -> list[Pair]:
    """Two animals: "it" may be either, and "he" is neither more than the other."""
    return [Pair(a, "it", b, "he") for a, b in itertools.pairwise(ANIMALS)]


def sentences(pair: Pair, verb: str) -> list[tuple[str, int]]:
    """Both orders with both pronouns; beside each the place of the noun that is meant."""
    one, its, other, others = pair
    made = list[tuple[str, int]]()
    for a, b in ((one, other), (other, one)):
        for pronoun, meant in ((its, one), (others, other)):
            made.append((f"The {a} {verb} the {b} because {pronoun}", FIRST if meant == a else SECOND))
    return made
