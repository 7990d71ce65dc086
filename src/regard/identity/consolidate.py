"""Consolidation, the slow write: a few anchored gradient steps on self, trace and imprints together, the base frozen.

    loss = surprise of the history, read again with spans left out
         + KL(the model with the whole history before its eyes ‖ the identity with none of it)      in other wordings
         + anchor · KL(the base ‖ the identity)                                                     on neutral text

The other wordings are an interview: plain questions that may be asked of anyone, answered by the model itself while the history is
in its context; those where the history matters most are kept. Some of them are held back: the state that did best on them is
returned, and if none did better than the state before, that state is. MATHS §7 says why this is the fast write done right: the
gradient of surprise is a signed, shock-weighted outer product.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..errors import SpecError, StateError
from ..models.base import Model
from ..models.cache import StaticCache, static_caches
from ..models.decode import prepare
from ..models.tokenizer import Tokenizer
from .body import Body, body_of
from .identity import Form, Identity, SelfState, TraceState
from .observe import Chat, chat_tokens
from .packed import Packed
from .read import LayerRead

Part = Literal["self", "trace", "imprints"]

ANSWER = 16
"""Tokens of an answer to an interview's question at most."""
INTERVIEW = (
    "What is my name?", "Where do I live?", "What do I do for a living?", "Do I have any pets?",
    "Tell me about my family.", "What do I like to eat?", "What should I not eat?", "What do I do in my free time?",
    "Which instrument do I play?", "What is my favourite colour?", "When is my birthday?", "What do I like to read?",
    "Which language do I study?", "What do I drink?", "Which sport do I like?", "What is my address?",
    "What am I afraid of?", "Where do I want to travel?", "Who is my friend?", "Who is my boss?",
    "What did I study?", "What do I drive?", "What do you remember about me?", "What did I tell you before?",
)  # fmt: skip
NEUTRAL = (
    "The river rises in the hills to the north, runs through three small towns and reaches the sea after ninety miles. In "
    "spring it floods the meadows, and in a dry summer one can walk across it.",
    "To make a simple soup, fry an onion in a little oil, add chopped carrots and potatoes, cover with water and cook until "
    "everything is soft. Season with salt and pepper before serving.",
    "The committee met on Tuesday to discuss the budget for the coming year. Members agreed that repairs to the roof could "
    "wait, but asked for a second estimate before the autumn.",
    "Water boils at a lower temperature on a mountain than at the coast, because the pressure of the air is lower there. That "
    "is why pasta takes longer to cook at great heights.",
)


@dataclass(frozen=True)
class SleepRule:
    """How long and how firmly; the defaults were chosen on people of the training pool."""

    steps: int = 16
    parts: tuple[Part, ...] = ("self", "trace", "imprints")
    form: Form = "key_bias"
    """Of the self, where there is none yet."""
    rank: int = 8
    """Of the trace, where there is none yet."""
    rate: float = 0.02
    """Adam's, for self and trace."""
    slot_rate: float = 0.05
    """Adam's, for imprints, as a share of the spread of their numbers."""
    anchor: float = 2.0
    questions: int = 10
    """Of the interview, those where the history matters most."""
    held_back: int = 3
    """Of these, never trained on: they say when to stop."""
    look_every: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.look_every < 1 or not 0 < self.held_back < self.questions:
            raise SpecError(f"{self}: steps and look_every are at least 1, and some questions are held back, not all")
        if not self.parts or set(self.parts) - {"self", "trace", "imprints"}:
            raise SpecError(f"parts={self.parts}: choose from self, trace and imprints")


@dataclass(frozen=True, eq=False)
class Item:
    """A text to read with the identity and without the history, and what to say at some of its places."""

    ids: Int[Tensor, " N"]
    at: Int[Tensor, " n"]
    """Places that are scored; the token before each says it."""
    wanted: Float[Tensor, "n V"] | None = None
    """Log-probabilities to come near to; None for the tokens themselves."""


@dataclass(eq=False)
class Draft:
    """The numbers of an identity as leaves of a gradient."""

    base: Identity
    leaves: dict[str, Tensor]
    signs: Tensor | None = None
    form: Form = "key_bias"

    def reads(self, scales: Sequence[float]) -> list[LayerRead | None]:
        L, G, D = self.base.base.depth, self.base.base.key_heads, self.base.base.head_width
        kept, x = self.base.imprints, self.leaves
        k, v = x.get("k"), x.get("v")
        if k is None and len(kept):
            k, v = kept.k.dense(), kept.v.dense()
        weight = kept.weight[None] if len(kept) and bool(kept.weight.any()) else None
        bias: Tensor | None = None
        s = x.get("s", None if self.base.self is None else self.base.self.s)
        form = self.form if self.base.self is None else self.base.self.form
        if s is not None and form == "key_bias":
            bias = s.view(L, G, D)
        elif s is not None:
            sk, sv = (y[:, :, None] for y in s.view(L, 2, G, D).unbind(1))
            k, v = (sk, sv) if k is None or v is None else (torch.cat([sk, k], 2), torch.cat([sv, v], 2))
            weight = None if weight is None else F.pad(weight, (1, 0))
        left = x.get("left")
        signs = self.signs
        if left is None and self.base.trace is not None:
            left, signs = self.base.trace.left.dense(), self.base.trace.signs.float()

        def at(y: Tensor | None, i: int) -> Tensor | None:
            return None if y is None else y[None, i]

        return [
            LayerRead(scales[i], at(k, i), at(v, i), weight, at(left, i), None if signs is None else signs[None], at(bias, i))
            for i in range(L)
        ]

    def identity(self) -> Identity:
        """The identity with these numbers written into it."""
        found, x = self.base, self.leaves
        if "k" in x:
            found = replace(found, imprints=replace(found.imprints, k=Packed.of(x["k"]), v=Packed.of(x["v"])))
        if "left" in x:
            assert self.signs is not None
            found = replace(found, trace=TraceState(Packed.of(x["left"]), self.signs.to(torch.int8)))
        if "s" in x:
            found = replace(found, self=SelfState(x["s"].detach().float().clone(), self.form))
        return found


def draft(identity: Identity, rule: SleepRule) -> Draft:
    """Leaves for the parts that the rule names; a trace that is not there yet starts as exactly none."""
    L, G, D = identity.base.depth, identity.base.key_heads, identity.base.head_width
    leaves: dict[str, Tensor] = {}
    signs: Tensor | None = None
    form = rule.form if identity.self is None else identity.self.form
    if "imprints" in rule.parts and len(identity.imprints):
        leaves |= {"k": identity.imprints.k.dense(), "v": identity.imprints.v.dense()}
    if "trace" in rule.parts:
        if identity.trace is not None:
            leaves["left"], signs = identity.trace.left.dense(), identity.trace.signs.float()
        else:
            half = rule.rank // 2
            # L₊ = L₋ makes T = L₊L₊ᵀ − L₋L₋ᵀ zero, and yet its gradient is not.
            one = torch.randn(L, G, half, D, generator=torch.Generator().manual_seed(rule.seed)) * (0.1 / D**0.5)
            leaves["left"] = torch.cat([one, one.clone()], 2)
            signs = torch.cat([torch.ones(half), -torch.ones(half)])
    if "self" in rule.parts:
        width = G * D * (1 if form == "key_bias" else 2)
        leaves["s"] = torch.zeros(L, width) if identity.self is None else identity.self.s.clone()
    if not leaves:
        raise StateError(f"there is nothing to consolidate: parts={rule.parts}, and no imprints are kept yet")
    return Draft(identity, {n: x.requires_grad_() for n, x in leaves.items()}, signs, form)


@dataclass(frozen=True)
class Slept:
    """What a night did: nats per token on what was held back, before, at each look, and at the end."""

    before: float
    looks: tuple[tuple[int, float], ...]
    best: float
    best_step: int
    interrupted: bool = False

    @property
    def helped(self) -> bool:
        return self.best < self.before


@dataclass
class Night:
    """Where a night stands; given back to `consolidate`, it goes on from there."""

    step: int
    leaves: dict[str, Tensor]
    moments: dict[str, tuple[Tensor, Tensor]]
    best: dict[str, Tensor]
    best_loss: float
    best_step: int
    before: float
    looks: list[tuple[int, float]] = field(default_factory=lambda: list[tuple[int, float]]())


@contextmanager
def frozen(model: nn.Module) -> Generator[None]:
    """No weight of the model learns inside; what learnt before learns again after."""
    learns = [p for p in model.parameters() if p.requires_grad]
    was_training = model.training
    model.eval()
    for p in learns:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in learns:
            p.requires_grad_(True)
        model.train(was_training)


def item_loss(body: Body, item: Item) -> Tensor:
    """Mean over the places of an item, under whatever lives here: −log p of the tokens, or KL to what is wanted."""
    hidden = body.hidden(item.ids[None])[0]
    logs = body.head(hidden[item.at - 1]).float().log_softmax(-1)
    if item.wanted is None:
        return -logs.gather(-1, item.ids[item.at, None]).mean()
    return (item.wanted.exp() * (item.wanted - logs)).sum(-1).mean()


@torch.no_grad()
def logs_at(body: Body, ids: Tensor, at: Tensor) -> Tensor:
    return body.head(body.hidden(ids[None])[0][at - 1]).float().log_softmax(-1)


def taught(body: Body, tokenizer: Tokenizer, history: Chat, chat: Chat, roles: tuple[str, ...] = ("assistant",)) -> Item:
    """A chat to be read without the history, and what the base says of it with the history in context."""
    ids, at = _places(tokenizer, list(chat), roles)
    whole, _ = chat_tokens([*map(dict, history), *map(dict, chat)], tokenizer)
    shift = len(whole) - len(ids)
    device = body.device
    places = torch.tensor(at, device=device)
    wanted = logs_at(body, torch.tensor(whole, device=device), places + shift)
    return Item(torch.tensor(ids, device=device), places, wanted)


def _places(tokenizer: Tokenizer, chat: list[dict[str, str]], roles: tuple[str, ...]) -> tuple[list[int], list[int]]:
    ids, said = chat_tokens(chat, tokenizer)
    if len(roles) == 1:
        other = [dict(m, role="system") if m["role"] not in roles else m for m in chat]
        # Only whose words are scored changes; the tokens are those of the real chat.
        said = _said(ids, other, tokenizer)
    return ids, [i for i, x in enumerate(said) if x and i > 0]


def _said(ids: list[int], chat: list[dict[str, str]], tokenizer: Tokenizer) -> list[bool]:
    said, at = [False] * len(ids), 0
    for message in chat:
        words = tokenizer.encode(message["content"].strip(), bos=False)
        while at + len(words) <= len(ids) and ids[at : at + len(words)] != words:
            at += 1
        if message["role"] != "system":
            said[at : at + len(words)] = [True] * min(len(words), len(ids) - at)
        at += len(words)
    return said


def interview(
    body: Body, tokenizer: Tokenizer, history: Chat, rule: SleepRule, questions: Sequence[str] = INTERVIEW
) -> list[Item]:
    """Questions that the history answers, the model's own answers to them with it in context, most telling first."""
    found: list[tuple[float, Item]] = []
    for question, answer in zip(questions, _answers(body, tokenizer, history, questions), strict=True):
        if not answer:
            continue
        item = taught(body, tokenizer, history, [{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
        with torch.no_grad():
            found.append((float(item_loss(body, item)), item))
    found.sort(key=lambda x: -x[0])
    return [item for _, item in found[: rule.questions]]


@torch.no_grad()
def _answers(body: Body, tokenizer: Tokenizer, history: Chat, questions: Sequence[str]) -> list[str]:
    """Greedy answers with the history in context; it is read once, and questions of one length are answered together."""
    past, _ = chat_tokens([dict(m) for m in history], tokenizer)
    asked = [tokenizer.encode(tokenizer.chat([*map(dict, history), {"role": "user", "content": q}]))[len(past) :] for q in questions]
    ends = set(tokenizer.eos_ids)
    said: dict[int, list[int]] = {}
    if isinstance(body.model, Model):
        decoder = prepare(body.model)
        _, caches = decoder(torch.tensor([past], device=body.device), static_caches(decoder.depth, len(past)))
        for length in sorted({len(a) for a in asked}):
            rows = [i for i, a in enumerate(asked) if len(a) == length]
            grown = tuple(cast(StaticCache, c).rows(torch.zeros(len(rows), dtype=torch.long)) for c in caches)
            tokens = torch.tensor([asked[i] for i in rows], device=body.device)
            lines: list[list[int]] = [[] for _ in rows]
            for _ in range(ANSWER):
                logits, grown = decoder(tokens, grown)
                tokens = logits.argmax(-1, keepdim=True)
                for line, token in zip(lines, tokens[:, 0].tolist(), strict=True):
                    line.append(token)
                if all(ends & set(line) for line in lines):
                    break
            said |= dict(zip(rows, lines, strict=True))
    else:
        for i, a in enumerate(asked):
            made = cast(Any, body.model).generate(
                torch.tensor([past + a], device=body.device), max_new_tokens=ANSWER, do_sample=False
            )
            said[i] = made[0, len(past) + len(a) :].tolist()
    return [tokenizer.decode(list(takewhile(lambda t: t not in ends, said[i]))).strip() for i in range(len(asked))]


def consolidate(
    model: nn.Module,
    identity: Identity,
    history: Sequence[Chat],
    tokenizer: Tokenizer,
    rule: SleepRule | None = None,
    *,
    tell: Callable[[str, float | None], object] = lambda what, share: None,
    night: Night | None = None,
    on_step: Callable[[Night], object] = lambda night: None,
    items: list[Item] | None = None,
) -> tuple[Identity, Slept]:
    """An identity after a night's sleep over these conversations, and what the night did.

    Ctrl-C ends the night early and keeps the best so far. `on_step` sees where it stands, to be saved; given back as `night`, it
    goes on from there. What comes back is never worse than what went in on what was held back.
    """
    rule = rule or SleepRule()
    body = body_of(model)
    identity.base.refuse(body.base)
    if not any(len(c) for c in history):
        raise StateError("there is no history to sleep over; imprint a conversation first")
    flat = [dict(m) for c in history for m in c]
    with frozen(model):
        if items is None:
            tell("asking itself about the history", None)
            items = interview(body, tokenizer, flat, rule)
        held, studied = items[: rule.held_back * 2 : 2], [*items[1 : rule.held_back * 2 : 2], *items[rule.held_back * 2 :]]
        again = [_history_item(body, tokenizer, c) for c in history if len(c)]
        anchors = [_anchor(body, tokenizer, t, as_chat) for t in NEUTRAL for as_chat in (False, True)]
        work = draft(identity, rule)
        optimiser = torch.optim.Adam(_groups(work, rule))
        pick = torch.Generator().manual_seed(rule.seed)
        if night is None:
            before = _mean_loss(body, work, held)
            night = Night(0, {}, {}, {n: x.detach().clone() for n, x in work.leaves.items()}, before, 0, before, [(0, before)])
        else:
            _resume(work, optimiser, night, pick)
        interrupted = False
        try:
            while night.step < rule.steps:
                optimiser.zero_grad()
                with torch.enable_grad(), body.read(work.reads(body.scales)):
                    for weight, item in _lesson(night.step, studied, again, anchors, rule, pick):
                        (weight * item_loss(body, item)).backward()
                optimiser.step()
                night.step += 1
                if night.step % rule.look_every == 0 or night.step == rule.steps:
                    loss = _mean_loss(body, work, held)
                    night.looks.append((night.step, loss))
                    if loss < night.best_loss:
                        night.best_loss, night.best_step = loss, night.step
                        night.best = {n: x.detach().clone() for n, x in work.leaves.items()}
                _remember(work, optimiser, night)
                on_step(night)
                tell("sleeping", night.step / rule.steps)
        except KeyboardInterrupt:
            interrupted = True
    slept = Slept(night.before, tuple(night.looks), night.best_loss, night.best_step, interrupted)
    if not slept.helped:
        return identity, slept
    work.leaves = night.best
    woken = work.identity()
    return replace(woken, life=replace(woken.life, sleeps=woken.life.sleeps + 1)), slept


def _lesson(
    step: int, studied: list[Item], again: list[Item], anchors: list[Item], rule: SleepRule, pick: torch.Generator
) -> list[tuple[float, Item]]:
    """What one step reads: a conversation again with a span left out, or two questions; and on every other step the anchor."""

    def any_of(x: list[Item]) -> Item:
        return x[int(torch.randint(len(x), (1,), generator=pick))]

    found: list[tuple[float, Item]] = []
    if step % 2 and again:
        found.append((0.5, _with_a_gap(any_of(again), pick)))
    elif studied:
        found += [(0.5, any_of(studied)), (0.5, any_of(studied))]
    if step % 2 == 0 or not studied:
        found.append((rule.anchor, any_of(anchors)))
    return found


def _with_a_gap(item: Item, pick: torch.Generator) -> Item:
    """The same text without a span of it, so that what is missing has to be remembered rather than copied."""
    n = item.ids.shape[0]
    first = int(item.at.min())
    width = max(1, (n - first) // 4)
    start = first + int(torch.randint(max(1, n - first - width), (1,), generator=pick))
    keep = torch.ones(n, dtype=torch.bool, device=item.ids.device)
    keep[start : start + width] = False
    place = keep.cumsum(0) - 1
    at = item.at[keep[item.at]]
    # The token right after the gap would be asked to follow what is not there.
    at = at[at != start + width]
    return Item(item.ids[keep], place[at], None) if len(at) else item


def _history_item(body: Body, tokenizer: Tokenizer, chat: Chat) -> Item:
    ids, at = _places(tokenizer, [dict(m) for m in chat], ("user", "assistant"))
    return Item(torch.tensor(ids, device=body.device), torch.tensor(at, device=body.device))


def _anchor(body: Body, tokenizer: Tokenizer, text: str, as_chat: bool) -> Item:
    if as_chat:
        chat = [{"role": "user", "content": "Tell me something."}, {"role": "assistant", "content": text}]
        found, places = _places(tokenizer, chat, ("assistant",))
        ids, at = torch.tensor(found, device=body.device), torch.tensor(places, device=body.device)
    else:
        ids = torch.tensor(tokenizer.encode(text), device=body.device)
        at = torch.arange(1, len(ids), device=body.device)
    return Item(ids, at, logs_at(body, ids, at))


@torch.no_grad()
def _mean_loss(body: Body, work: Draft, items: list[Item]) -> float:
    with body.read(work.reads(body.scales)):
        return sum(float(item_loss(body, i)) for i in items) / max(len(items), 1)


def _groups(work: Draft, rule: SleepRule) -> list[dict[str, Any]]:
    """Each tensor at its own pace: imprints by the spread of their numbers, self and trace as they are."""
    groups: list[dict[str, Any]] = []
    for name, x in work.leaves.items():
        pace = rule.slot_rate * float(x.detach().std()) if name in ("k", "v") else rule.rate
        groups.append({"params": [x], "lr": pace, "name": name})
    return groups


def _remember(work: Draft, optimiser: torch.optim.Adam, night: Night) -> None:
    night.leaves = {n: x.detach().clone() for n, x in work.leaves.items()}
    state = optimiser.state
    night.moments = {n: (state[x]["exp_avg"].clone(), state[x]["exp_avg_sq"].clone()) for n, x in work.leaves.items() if x in state}


def _resume(work: Draft, optimiser: torch.optim.Adam, night: Night, pick: torch.Generator) -> None:
    raise NotImplementedError
