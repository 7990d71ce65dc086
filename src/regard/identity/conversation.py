"""A conversation: messages, and the identity that it began with.

While it goes on, the identity that is read stays that one: what was said since stands in the context already, and would count
twice. Where the model's context is too short for all of it, the oldest turns leave it, and the identity that is read from then on is
the one that had lived through those turns, and through no turn that is still there.

    talk = Conversation(model, tokenizer, mara)
    talk.ask("What is my cat called?").text
    for piece in talk.stream("And where do I live?"): print(piece, end="")
    print(talk.last.why(model, tokenizer))
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from ..errors import RegardWarning, ShapeError, StateError
from ..models.base import Model
from ..models.decode.prepare import Weights
from ..models.decode.sampling import Sampling
from ..models.decode.speculate import Speculate
from ..models.decode.stream import Ending, Token
from ..models.tokenizer import Tokenizer
from .body import body_of
from .documents import Messages
from .read.recall import recall
from .speaking import generate, stream
from .state import Identity, Recollection
from .why import Tell, Why, why_answer
from .wording import several

MOST = 24
"""Imprints that `why` leaves out in turn: each costs a forward over the whole conversation."""
FREED = 0.25
"""Share of the context that is free after turns have left it, so that the next message does not drive out another one."""


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

    @property
    def finished(self) -> Messages:
        """The messages of this turn that were said to their end: both; of an answer that `max_tokens` cut off, the question
        alone; of one that was interrupted, none."""
        return {"stop": self.turn, "length": self.turn[:1], "interrupted": Messages()}[self.ending]

    def why(self, model: Model, tokenizer: Tokenizer, at: int | None = None, tell: Tell = lambda what, share: None) -> Why:
        """What of the identity moved token `at`, counted from 1; without it, the one that was moved most."""
        if isinstance(self.identity, Recollection) and self.identity.silent:
            raise StateError("nothing of what was told came to mind at this question: the answer is the model's own")
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
    at_commit: Callable[[str], Identity] | None = None
    """Who one was at a commit; without it, turns that leave the context are not known any more."""
    commits: list[str | None] = field(default_factory=list[str | None])
    """What wrote each of the last turns; None where nothing did."""

    def ask(
        self,
        question: str,
        sampling: Sampling | None = None,
        *,
        weights: Weights = "float32",
        speculate: Speculate = None,
        on_token: Callable[[Token], object] | None = None,
    ) -> Answer:
        """The answer to one more message; Ctrl-C ends it early, and its ending says so."""
        prompt = self._room(question, sampling)
        who, sampling = self._mind(question, prompt, sampling), self._sparing(sampling)
        out = generate(
            self.model, prompt, sampling, identity=who, tokenizer=self.tokenizer, on_token=on_token, weights=weights,
            speculate=speculate,
        )  # fmt: skip
        return self._said(Answer(question, cast(list[str], out.text)[0].strip(), prompt, out.tokens[0], out.finish[0], who))

    def stream(
        self,
        question: str,
        sampling: Sampling | None = None,
        *,
        weights: Weights = "float32",
        speculate: Speculate = None,
        then: Callable[[Answer], object] = lambda answer: None,
    ) -> Iterator[str]:
        """The same as pieces of text; what is wrong is said before the first of them. `then` sees the answer when it has ended."""
        prompt = self._room(question, sampling)
        who, sampling = self._mind(question, prompt, sampling), self._sparing(sampling)
        tokens = stream(
            self.model, prompt, sampling, identity=who, tokenizer=self.tokenizer, weights=weights, speculate=speculate
        )
        return self._pieces(Answer(question, "", prompt, [], "interrupted", who), tokens, then)

    def prompt(self, question: str) -> list[int]:
        """The tokens of the conversation with one more message, open for the answer."""
        if not isinstance(question, str) or not question.strip():
            raise StateError(f"{question!r:.60} is no question: say something")
        first = [{"role": "system", "content": self.system}] if self.system else []
        return self.tokenizer.encode(self.tokenizer.chat([*first, *self.messages, {"role": "user", "content": question}]))

    def written(self, commit: str) -> None:
        """The last turn was written by this commit: once it leaves the context, it is read from there."""
        self.commits[-1] = commit

    def clear(self) -> None:
        """Say nothing of what was said so far; who reads stays."""
        self.messages, self.commits, self.last = [], [], None

    def _room(self, question: str, sampling: Sampling | None) -> list[int]:
        """The prompt; where it leaves no room for the answer, after the oldest turns have left the context."""
        prompt, context = self.prompt(question), body_of(self.model).context
        answer = (sampling or Sampling()).max_tokens
        # The last token of an answer does not go through the model again.
        if context is None or len(prompt) + answer - 1 <= context:
            return prompt
        alone = replace(self, messages=[]).prompt(question)
        if (room := context + 1 - len(alone)) < answer:
            raise ShapeError(
                f"this message has {len(alone):,} tokens and its answer up to {answer:,}, and the model's context has {context:,}: "
                + (f"ask for at most {room:,} (max_tokens={room})" if room > 0 else "give it in pieces, or imprint it")
            )
        start = 0
        while len(prompt) + answer - 1 > (1 - FREED) * context and start < len(self.messages):
            later = (i for i, m in enumerate(self.messages) if i > start and m["role"] == "user")
            start = next(later, len(self.messages))
            prompt = replace(self, messages=self.messages[start:]).prompt(question)
        self._leave(start, context)
        return prompt

    def _leave(self, count: int, context: int) -> None:
        """The oldest `count` messages leave the context; whoever has lived through them reads on."""
        turns = max(0, count - (len(self.messages) - 2 * len(self.commits))) // 2
        gone, self.commits = self.commits[:turns], self.commits[turns:]
        self.messages = self.messages[count:]
        commit = next((c for c in reversed(gone) if c is not None), None)
        if commit is not None and self.at_commit is not None:
            self.identity = self.at_commit(commit)
        known = (
            "what was imprinted of them is read instead"
            if commit is not None
            else "they were not imprinted, and are not known any more"
        )
        warnings.warn(
            f"the context of {context:,} tokens is full: the oldest {several(count, 'message')} left it; {known}",
            RegardWarning,
            stacklevel=4,
        )

    def _sparing(self, sampling: Sampling | None) -> Sampling | None:
        """Only what was answered counts as repetition: an answer may take up the words of whoever asked."""
        if sampling is None or sampling.repetition_penalty == 1 or sampling.penalised is not None:
            return sampling
        answers = (self.tokenizer.encode(m["content"], bos=False) for m in self.messages if m["role"] == "assistant")
        return replace(sampling, penalised=tuple(sorted({t for ids in answers for t in ids})))

    def _mind(self, question: str, prompt: Sequence[int], sampling: Sampling | None) -> Identity | None:
        """Who answers: what the question brings to mind stands among their imprints."""
        if self.identity is None:
            return None
        return recall(self.model, self.identity, prompt, self.tokenizer, about=question, sampling=sampling)

    def _pieces(self, asked: Answer, tokens: Iterator[Token], then: Callable[[Answer], object]) -> Generator[str]:
        said: list[int] = []
        text, ending = "", asked.ending
        try:
            for token in tokens:
                # The token that ends a turn is none of the answer's.
                said += [token.token] if token.ending != "stop" else []
                text, ending = text + token.text, token.ending or ending
                if token.text:
                    yield token.text
        finally:
            # Also of a stream that nobody reads to its end: what was said was said.
            answer = self._said(replace(asked, text=text.strip(), tokens=said, ending=ending))
        then(answer)

    def _said(self, answer: Answer) -> Answer:
        self.last = answer
        self.messages += answer.turn
        self.commits.append(None)
        return answer


__all__ = ["Answer", "Conversation"]
