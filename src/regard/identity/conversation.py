"""A conversation: messages, and the identity that it began with.

While it goes on, the identity that is read stays that one: what was said since stands in the context already, and would count
twice.

    talk = Conversation(model, tokenizer, mara)
    talk.ask("What is my cat called?").text
    for piece in talk.stream("And where do I live?"): print(piece, end="")
    print(talk.last.why(model, tokenizer))
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from ..errors import StateError
from ..models.base import Model
from ..models.decode.prepare import Weights
from ..models.decode.sampling import Sampling
from ..models.decode.stream import Ending, Token
from ..models.tokenizer import Tokenizer
from .documents import Messages
from .speaking import generate, stream
from .state import Identity
from .why import Tell, Why, why_answer

MOST = 24
"""Imprints that `why` leaves out in turn: each costs a forward over the whole conversation."""


@dataclass(frozen=True)
class Answer:
    """What was asked, and what was said to it."""

    question: str
    text: str
    prompt: list[int]
    """The tokens of all that was said before it."""
    tokens: list[int]
    ending: Ending
    identity: Identity | None
    """Who answered; None is the model itself."""

    @property
    def turn(self) -> Messages:
        return [{"role": "user", "content": self.question}, {"role": "assistant", "content": self.text}]

    def why(self, model: Model, tokenizer: Tokenizer, at: int | None = None, tell: Tell = lambda what, share: None) -> Why:
        """What of the identity moved token `at`, counted from 1; without it, the one that was moved most."""
        if self.identity is None or self.identity.empty:
            raise StateError("whoever answered was empty when this conversation began: the answer is the model's own")
        return why_answer(model, self.identity, self.prompt, self.tokens, at, most=MOST, tokenizer=tokenizer, tell=tell)


@dataclass
class Conversation:
    """Messages so far, and who reads them."""

    model: Model
    tokenizer: Tokenizer
    identity: Identity | None = None
    """None is the model itself."""
    messages: Messages = field(default_factory=Messages)
    system: str | None = None
    last: Answer | None = None

    def ask(
        self,
        question: str,
        sampling: Sampling | None = None,
        *,
        weights: Weights = "float32",
        on_token: Callable[[Token], object] | None = None,
    ) -> Answer:
        """The answer to one more message; Ctrl-C ends it early, and its ending says so."""
        prompt = self.prompt(question)
        out = generate(
            self.model, prompt, sampling, identity=self.identity, tokenizer=self.tokenizer, on_token=on_token, weights=weights
        )
        return self._said(question, prompt, out.tokens[0], cast(list[str], out.text)[0], out.finish[0])

    def stream(
        self,
        question: str,
        sampling: Sampling | None = None,
        *,
        weights: Weights = "float32",
        then: Callable[[Answer], object] = lambda answer: None,
    ) -> Iterator[str]:
        """The same as pieces of text; what is wrong is said before the first of them. `then` sees the answer when it has ended."""
        prompt = self.prompt(question)
        tokens = stream(self.model, prompt, sampling, identity=self.identity, tokenizer=self.tokenizer, weights=weights)
        return self._pieces(question, prompt, tokens, then)

    def prompt(self, question: str) -> list[int]:
        """The tokens of the conversation with one more message, open for the answer."""
        if not isinstance(question, str) or not question.strip():
            raise StateError(f"{question!r:.60} is no question: say something")
        first = [{"role": "system", "content": self.system}] if self.system else []
        return self.tokenizer.encode(self.tokenizer.chat([*first, *self.messages, {"role": "user", "content": question}]))

    def _pieces(
        self, question: str, prompt: Sequence[int], tokens: Iterator[Token], then: Callable[[Answer], object]
    ) -> Generator[str]:
        said: list[int] = []
        text, ending = "", cast(Ending, "interrupted")
        try:
            for token in tokens:
                # The token that ends a turn is none of the answer's.
                said += [token.token] if token.ending != "stop" else []
                text, ending = text + token.text, token.ending or ending
                if token.text:
                    yield token.text
        finally:
            # Also of a stream that nobody reads to its end: what was said was said.
            answer = self._said(question, prompt, said, text, ending)
        then(answer)

    def _said(self, question: str, prompt: Sequence[int], tokens: list[int], text: str, ending: Ending) -> Answer:
        self.last = Answer(question, text.strip(), list(prompt), tokens, ending, self.identity)
        self.messages += self.last.turn
        return self.last


__all__ = ["Answer", "Conversation"]
