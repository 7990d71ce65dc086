"""observe: one pass of the model over a text or a chat, and everything a write may want to know of it.

experience = observe(model, "I am Mara. My cat is called Mochi.", tokenizer, source="diary")
experience = observe(model, [{"role": "user", "content": "…"}, …], tokenizer, affect="estimated")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..errors import ShapeError, StateError
from ..models.tokenizer import Tokenizer
from ..models.tokens import has_ids
from .body import Body, body_of
from .shock import checked_affect, entropy, estimated_affect, surprisal
from .state import Base

Chat = Sequence[Mapping[str, str]]
LONGEST = 4096


@dataclass(frozen=True, eq=False)
class Experience:
    """A text as the model went through it. Keys and queries are not turned by RoPE."""

    base: Base
    tokens: Int[Tensor, " N"]
    content: Bool[Tensor, " N"]
    """What was said; False for the markup of a chat, and for the sink at its start."""
    shock: Float[Tensor, " N"]
    q: Float[Tensor, "L H N D"]
    k: Float[Tensor, "L G N D"]
    v: Float[Tensor, "L G N D"]
    body: Body
    affect: float = 1.0
    source: str = "unknown"

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @cached_property
    def attention(self) -> Float[Tensor, "L N N"]:
        """Mean weights over the heads of each layer, (query, key)."""
        return torch.stack([self._weights(layer) for layer in range(self.base.depth)])

    def _weights(self, layer: int) -> Tensor:
        q, k = (self.body.turned(layer, x[layer]) for x in (self.q, self.k))
        k = k.repeat_interleave(q.shape[0] // k.shape[0], 0)
        scores = (q @ k.mT) * self.body.scales[layer]
        later = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        return scores.masked_fill(later, float("-inf")).softmax(-1).mean(0)


@torch.no_grad()
def observe(
    model: nn.Module,
    text: str | Chat | Sequence[int] | Int[Tensor, " N"],
    tokenizer: Tokenizer | None = None,
    *,
    affect: float | Literal["estimated"] = 1.0,
    source: str = "unknown",
) -> Experience:
    """One pass over a text, a chat or token ids, with whatever identity the model reads now."""
    body = body_of(model)
    ids, said = tokenised(text, tokenizer)
    if len(ids) < 2:
        raise ShapeError(f"{len(ids)} tokens: an experience has at least two, as the first surprises no one")
    body.expect_room(len(ids))
    if len(ids) > LONGEST:
        raise ShapeError(f"{len(ids):,} tokens are one experience too long; give it in pieces of at most {LONGEST:,}")
    if affect != "estimated":
        checked_affect(affect)
    if not isinstance(source, str):
        raise StateError(f"source={source!r:.60}: it is the name of where the words are from, such as 'diary'")
    tokens = torch.tensor(ids, device=body.device)
    was_training = model.training
    model.eval()
    try:
        logits, heads = body.watched(tokens)
    except IndexError as error:
        raise ShapeError(
            f"tokens from {min(ids)} to {max(ids)}: the model does not know all of them, or has no place for so many"
        ) from error
    finally:
        model.train(was_training)
    if not bool(torch.isfinite(logits.sum())):
        raise StateError("the model's logits are not finite here: the weights or the state hold NaN or infinity")
    content = torch.tensor(said, device=body.device)
    shock = surprisal(logits, tokens) * content
    gain = estimated_affect(shock, entropy(logits) * content) if affect == "estimated" else float(affect)
    q, k, v = (torch.stack([getattr(h, name).float() for h in heads]) for name in "qkv")
    return Experience(body.base, tokens, content, shock, q, k, v, body, gain, source)


def tokenised(text: str | Chat | Sequence[int] | Tensor, tokenizer: Tokenizer | None) -> tuple[list[int], list[bool]]:
    """Token ids, and which of them are what was said rather than markup; the first is the model's sink, and never said."""
    if isinstance(text, Tensor):
        if text.ndim != 1 or not has_ids(text):
            raise ShapeError(f"a tensor of {tuple(text.shape)} {text.dtype} is no text; token ids are integers (N), one text")
        numbers: list[int] = text.tolist()
        text = numbers
    elif isinstance(text, nn.Module) or not isinstance(text, Sequence):
        raise StateError(
            f"{text!r:.60} is nothing to observe: give a text, a chat or token ids; observe(model, text, tokenizer)"
        )
    if not len(text):
        raise ShapeError(
            "there is nothing to observe: an experience has at least two tokens, and this text, chat or list of token ids is empty"
        )
    if not isinstance(text, str) and isinstance(text[0], int):
        ids = [int(i) for i in text if isinstance(i, int)]
        if len(ids) < len(text):
            raise StateError(
                f"token ids are whole numbers, and {next(i for i in text if not isinstance(i, int))!r:.60} is none"
            )
        return ids, [False] + [True] * (len(ids) - 1)
    if tokenizer is None:
        raise StateError("a text needs the model's tokenizer: observe(model, text, tokenizer); token ids do without")
    if isinstance(text, str):
        ids = tokenizer.encode(text)
        return ids, [False] * min(1, len(ids)) + [True] * (len(ids) - 1)
    chat: list[dict[str, str]] = []
    for message in text:
        if not isinstance(message, Mapping):
            raise StateError(f"{message!r} is no message: a chat is a list of {{'role': …, 'content': …}}")
        chat.append(dict(message))
    return chat_tokens(chat, tokenizer)


def chat_tokens(
    chat: list[dict[str, str]], tokenizer: Tokenizer, roles: tuple[str, ...] | None = None
) -> tuple[list[int], list[bool]]:
    """A chat as its template writes it; said is what stands in the messages of these roles, by default of all but the system."""
    for message in chat:
        if not isinstance(message.get("content"), str) or not isinstance(message.get("role"), str):
            raise StateError(f"{message!r} is no message: it needs a role and a content")
    ids = tokenizer.encode(tokenizer.chat(chat, add_generation_prompt=False))
    said = [False] * len(ids)
    at = 0
    for message in chat:
        words = tokenizer.encode(message["content"].strip(), bos=False)
        while at + len(words) <= len(ids) and ids[at : at + len(words)] != words:
            at += 1
        if at + len(words) > len(ids):
            # The template changed the text, or a token reaches over its edge: all of it counts as said.
            return ids, [True] * len(ids)
        if message["role"] in roles if roles else message["role"] != "system":
            said[at : at + len(words)] = [True] * len(words)
        at += len(words)
    return ids, said


__all__ = ["Chat", "Experience", "observe", "tokenised"]
