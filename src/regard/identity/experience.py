"""observe: one pass of the model over a text or a chat, and everything a write may want to know of it.

experience = observe(model, "I am Mara. My cat is called Mochi.", tokenizer, source="diary")
experience = observe(model, [{"role": "user", "content": "…"}, …], tokenizer, affect="estimated")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..errors import ShapeError, StateError
from ..models.tokenizer import Tokenizer
from ..models.tokens import has_ids
from .body import Body, body_of
from .shock import checked_affect, entropy, estimated_affect, rarity, surprisal
from .speech import ASSISTANT, MARKUP, USER, Speech
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
    speech: Speech = field(default=None)  # pyright: ignore
    """Who says each token, and in which sentence; by default all that was said is one sentence of the user's."""
    tokenizer: Tokenizer | None = None
    """What turns its tokens into words; None where token ids were all that was known."""
    rarity: Float[Tensor, " N"] = field(default=None)  # pyright: ignore
    """How surprising each token would be anywhere in this text; by default as surprising as where it stood."""

    def __post_init__(self) -> None:
        if self.rarity is None:
            object.__setattr__(self, "rarity", self.shock)
        if self.speech is None:
            object.__setattr__(self, "speech", Speech.plain(self.content.tolist()))
        if len(self.speech) != len(self):
            raise ShapeError(f"{len(self.speech)} tokens have a speaker and {len(self)} were read: every token has one")

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @cached_property
    def attention(self) -> Float[Tensor, "L N N"]:
        """Mean weights over the heads of each layer, (query, key)."""
        layers = range(self.base.depth)
        return torch.stack([attention_weights(self.body, i, self.q[i], self.k[i]).mean(0) for i in layers])


def attention_weights(body: Body, layer: int, q: Float[Tensor, "H N D"], k: Float[Tensor, "G N D"]) -> Float[Tensor, "H N N"]:
    """The causal weights of one layer, (head, query, key), from heads that are not turned."""
    q, k = body.turned(layer, q), body.turned(layer, k)
    scores = (q @ k.repeat_interleave(q.shape[0] // k.shape[0], 0).mT) * body.scales[layer]
    later = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1)


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
    ids, roles = tokenised(text, tokenizer)
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
    content = torch.tensor(roles, device=body.device) != MARKUP
    speech = Speech.plain(content.tolist()) if tokenizer is None else Speech.of(ids, roles, tokenizer)
    shock = surprisal(logits, tokens) * content
    gain = estimated_affect(shock, entropy(logits) * content) if affect == "estimated" else float(affect)
    rare = rarity(logits, tokens, content) * content
    q, k, v = (torch.stack([getattr(h, name).float() for h in heads]) for name in "qkv")
    return Experience(body.base, tokens, content, shock, q, k, v, body, gain, source, speech, tokenizer, rare)


def tokenised(text: str | Chat | Sequence[int] | Tensor, tokenizer: Tokenizer | None) -> tuple[list[int], list[int]]:
    """Token ids, and who says each of them; the first is the model's sink, and markup."""
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
        return ids, [MARKUP] + [USER] * (len(ids) - 1)
    if tokenizer is None:
        raise StateError("a text needs the model's tokenizer: observe(model, text, tokenizer); token ids do without")
    if isinstance(text, str):
        ids = tokenizer.encode(text)
        return ids, [MARKUP] * min(1, len(ids)) + [USER] * (len(ids) - 1)
    chat: list[dict[str, str]] = []
    for message in text:
        if not isinstance(message, Mapping):
            raise StateError(f"{message!r} is no message: a chat is a list of {{'role': …, 'content': …}}")
        chat.append(dict(message))
    ids, names = _named_tokens(chat, tokenizer)
    known = {None: MARKUP, "system": MARKUP, "assistant": ASSISTANT}
    return ids, [USER] * len(ids) if names is None else [known.get(name, USER) for name in names]


def chat_tokens(
    chat: list[dict[str, str]], tokenizer: Tokenizer, roles: tuple[str, ...] | None = None
) -> tuple[list[int], list[bool]]:
    """A chat as its template writes it; said is what stands in the messages of these roles, by default of all but the system."""
    ids, names = _named_tokens(chat, tokenizer)
    if names is None:
        return ids, [True] * len(ids)
    return ids, [name is not None and (name in roles if roles else name != "system") for name in names]


def _named_tokens(chat: list[dict[str, str]], tokenizer: Tokenizer) -> tuple[list[int], list[str | None] | None]:
    """A chat as its template writes it, and in whose message each token stands, None for markup. No names at all where the
    template changed the text, or a token reaches over its edge: all of it counts as said."""
    for message in chat:
        if not isinstance(message.get("content"), str) or not isinstance(message.get("role"), str):
            raise StateError(f"{message!r} is no message: it needs a role and a content")
    ids = tokenizer.encode(tokenizer.chat(chat, add_generation_prompt=False))
    names: list[str | None] = [None] * len(ids)
    at = 0
    for message in chat:
        words = tokenizer.encode(message["content"].strip(), bos=False)
        while at + len(words) <= len(ids) and ids[at : at + len(words)] != words:
            at += 1
        if at + len(words) > len(ids):
            return ids, None
        names[at : at + len(words)] = [message["role"]] * len(words)
        at += len(words)
    return ids, names


__all__ = ["Chat", "Experience", "observe", "tokenised"]
