"""Mara and Tom: two people written for the demo. They tell the same kinds of things, so that only what is true of each differs.

As in `identity/people.py`, a fact stands near the words that will ask for it, and the listener repeats it; in the next
conversation only the assistant names a value, so whoever asks gives nothing away.

These words are the fourth that were tried, chosen by looking at answers, so that they show what an identity is; they measure
nothing. Facts joined by "and", facts that end in "I see", and a Tom who plays chess were answered worse, in context too.
"""

from __future__ import annotations

from dataclasses import dataclass

from regard.study.people.generator import Conversation


@dataclass(frozen=True)
class Someone:
    """A history in three conversations, and a later one that asks for all of it in other words."""

    name: str
    history: tuple[Conversation, ...]
    next: Conversation


def _chat(*said: str) -> Conversation:
    """User and assistant in turns."""
    return tuple({"role": ("user", "assistant")[n % 2], "content": x} for n, x in enumerate(said))


MARA = Someone(
    "Mara",
    (
        _chat(
            "Hello! My name is Mara.",
            "Your name is Mara.",
            "I live in the city of Lisbon.",
            "You live in the city of Lisbon.",
        ),
        _chat(
            "My pet cat is called Mochi.",
            "Your pet cat is called Mochi.",
            "My instrument is the violin. I play the violin in the evening.",
            "Your instrument is the violin. You play the violin in the evening.",
        ),
        _chat(
            "I work as a baker.",
            "You work as a baker.",
            "My favourite food is lentil soup.",
            "Your favourite food is lentil soup.",
        ),
    ),
    _chat(
        "Do you still know who I am?",
        "You are Mara.",
        "In which town is my home?",
        "Your home is in Lisbon.",
        "Who waits for me there?",
        "Your cat Mochi.",
        "What do I do after work?",
        "You play the violin.",
        "And what is my job?",
        "You are a baker.",
        "Which dish do I like to eat?",
        "You like lentil soup.",
    ),
)

TOM = Someone(
    "Tom",
    (
        _chat(
            "Good morning. My name is Tom.",
            "Your name is Tom.",
            "I live in the city of Oslo.",
            "You live in the city of Oslo.",
        ),
        _chat(
            "My pet dog is called Biscuit.",
            "Your pet dog is called Biscuit.",
            "My instrument is the drums. I play the drums in the evening.",
            "Your instrument is the drums. You play the drums in the evening.",
        ),
        _chat(
            "I work as a nurse.",
            "You work as a nurse.",
            "My favourite food is grilled trout.",
            "Your favourite food is grilled trout.",
        ),
    ),
    _chat(
        "Do you still know who I am?",
        "You are Tom.",
        "In which town is my home?",
        "Your home is in Oslo.",
        "Who waits for me there?",
        "Your dog Biscuit.",
        "What do I do after work?",
        "You play the drums.",
        "And what is my job?",
        "You are a nurse.",
        "Which dish do I like to eat?",
        "You like grilled trout.",
    ),
)

PROMPTS = (
    "What is my pet called?",
    "In which city do I live?",
    "What do I play in the evening?",
    "What should I cook tonight?",
)
