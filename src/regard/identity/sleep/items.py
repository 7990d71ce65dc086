"""Items: texts that are read under an identity, and what is to be said at some of their places. Losses are means over these places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ...models.tokenizer import Tokenizer
from ..body import Body
from ..experience import Chat, chat_tokens

ALIKE = 1.5
"""How much longer a text may be than another that it is read together with: the rest would be padding."""


@dataclass(frozen=True, eq=False)
class Item:
    """A text to read with the identity and without the history, and what to say at some of its places."""

    ids: Int[Tensor, " N"]
    at: Int[Tensor, " n"]
    """Places that are scored; the token before each says it."""
    wanted: Float[Tensor, "n V"] | None = None
    """Log-probabilities to come near to; None for the tokens themselves."""
    firm: float = 0.0
    """How firmly the mean surprise at the text's own tokens is held where `wanted` has it: KL grows with the square of what is moved, and what
    is gained on these tokens grows with the move itself, so that a small KL leaves room for a manner."""


def losses(body: Body, items: Sequence[Item]) -> list[Tensor]:
    """For each item, the mean over its places under whatever lives here: −log p of the tokens, or KL to what is wanted.

    Items of about one length are one batch, filled up on the right, where a causal model does not look.
    """
    said: dict[int, Tensor] = {}
    for group in _alike(items):
        longest = max(len(items[n].ids) for n in group)
        tokens = torch.stack([F.pad(items[n].ids, (0, longest - len(items[n].ids))) for n in group])
        hidden = body.hidden(tokens)
        rows = torch.cat([hidden[row, items[n].at - 1] for row, n in enumerate(group)])
        logs = body.head(rows).float().log_softmax(-1).split([len(items[n].at) for n in group])
        said |= {n: item_said(items[n], x) for n, x in zip(group, logs, strict=True)}
    return [said[n] for n in range(len(items))]


def _alike(items: Sequence[Item]) -> list[list[int]]:
    """Which items are read together: in each group the longest has at most half as many tokens more than the shortest."""
    groups: list[list[int]] = []
    for n in sorted(range(len(items)), key=lambda n: len(items[n].ids)):
        if not groups or len(items[n].ids) > ALIKE * len(items[groups[-1][0]].ids):
            groups.append([])
        groups[-1].append(n)
    return groups


def item_said(item: Item, logs: Tensor) -> Tensor:
    """The loss of an item under these log-probabilities at its places."""
    if item.wanted is None:
        return -logs.gather(-1, item.ids[item.at, None]).mean()
    apart = item.wanted - logs
    loss = (item.wanted.exp() * apart).sum(-1).mean()
    return loss + item.firm * apart.gather(-1, item.ids[item.at, None]).mean().square() if item.firm else loss


def item_loss(body: Body, item: Item) -> Tensor:
    return losses(body, [item])[0]


@torch.no_grad()
def logs_at(body: Body, ids: Tensor, at: Tensor) -> Tensor:
    return body.head(body.hidden(ids[None])[0][at - 1]).float().log_softmax(-1)


def any_of(items: Sequence[Item], pick: torch.Generator) -> Item:
    return items[int(torch.randint(len(items), (1,), generator=pick))]


def answers_item(body: Body, tokenizer: Tokenizer, chat: Chat) -> Item:
    """What the assistant says in a chat, to be scored as it was said."""
    ids, at = _places(tokenizer, [dict(m) for m in chat], ("assistant",))
    return Item(torch.tensor(ids, device=body.device), torch.tensor(at, device=body.device))


def anchor_item(body: Body, tokenizer: Tokenizer, text: str, as_chat: bool) -> Item:
    """A text with all that the model by itself would say along it, as an answer in a chat or bare."""
    if as_chat:
        chat = [{"role": "user", "content": "Tell me something."}, {"role": "assistant", "content": text}]
        tokens, places = _places(tokenizer, chat, ("assistant",))
        ids, at = torch.tensor(tokens, device=body.device), torch.tensor(places, device=body.device)
    else:
        ids = torch.tensor(tokenizer.encode(text), device=body.device)
        at = torch.arange(1, len(ids), device=body.device)
    return Item(ids, at, logs_at(body, ids, at))


def _places(tokenizer: Tokenizer, chat: list[dict[str, str]], roles: tuple[str, ...]) -> tuple[list[int], list[int]]:
    """A chat's tokens, and where these roles speak; the first token has nothing before it to say it."""
    ids, said = chat_tokens(chat, tokenizer, roles)
    return ids, [i for i, x in enumerate(said) if x and i > 0]
