"""Mara and Tom: two people written for the demo. They tell the same kinds of things, so that only what is true of each differs.

As in `identity/people.py`, a fact stands near the words that will ask for it, and the listener repeats it; in the next
conversation only the assistant names a value, so whoever asks gives nothing away.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..identity.people import Conversation


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
            "Hello! My name is Mara, and I live in Lisbon.",
            "Your name is Mara, and you live in Lisbon.",
            "My pet is a cat, and my cat is called Mochi.",
            "Your pet is a cat called Mochi, I see.",
        ),
        _chat(
            "In the evening I play the violin. I work as a baker.",
            "You play the violin in the evening, and you work as a baker.",
        ),
        _chat(
            "My favourite food is lentil soup. I am allergic to walnuts.",
            "Your favourite food is lentil soup, and you are allergic to walnuts.",
        ),
    ),
    _chat(
        "Do you still know who I am, and in which town my home is?",
        "You are Mara, and your home is in Lisbon.",
        "Who waits for me there? And what is my job?",
        "Your cat Mochi. You are a baker.",
        "What do I do after work, and what do I like to eat?",
        "You play the violin, and you like lentil soup.",
    ),
)

TOM = Someone(
    "Tom",
    (
        _chat(
            "Good morning. My name is Tom, and I live in Oslo.",
            "Your name is Tom, and you live in Oslo.",
            "My pet is a dog, and my dog is called Biscuit.",
            "Your pet is a dog called Biscuit, I see.",
        ),
        _chat(
            "In the evening I play chess. I work as a nurse.",
            "You play chess in the evening, and you work as a nurse.",
        ),
        _chat(
            "My favourite food is grilled trout. I am allergic to pollen.",
            "Your favourite food is grilled trout, and you are allergic to pollen.",
        ),
    ),
    _chat(
        "Do you still know who I am, and in which town my home is?",
        "You are Tom, and your home is in Oslo.",
        "Who waits for me there? And what is my job?",
        "Your dog Biscuit. You are a nurse.",
        "What do I do after work, and what do I like to eat?",
        "You play chess, and you like grilled trout.",
    ),
)

PROMPTS = (
    "What is my pet called?",
    "What do I play in the evening?",
    "What should I cook for myself tonight?",
)
