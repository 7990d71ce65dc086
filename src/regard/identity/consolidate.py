"""Consolidation, the slow write: a few anchored gradient steps on self, trace and imprints together, the base frozen.

    loss = surprise of the history, read again with spans left out, and retold with none of it before its eyes
         + KL(the model with the whole history before its eyes ‖ the identity with none of it)      in other wordings
         + anchor · KL(the base ‖ the identity)                                  on neutral text and on strangers' chats

Retelling is what holds names: a plain prompt ("What do you remember about me?"), and then what was said, word for word. The other
wordings are an interview: questions that may be asked of anyone, answered by the model itself while the history is in its context;
those where the history matters most are kept. Some of them are held back: the state that did best on them is returned, and if none
did better than the state before, that state is. Of an imprint only the value learns. Its key says when it is read, and was learned
on many people together with how widely heads open to it; one person's night would only spoil that.

MATHS §7 says why this is the fast write done right: the gradient of surprise is a signed, shock-weighted outer product.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
from .people import neutral
from .read import LayerRead, layer_reads

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
RETELL = (
    "What did I tell you before?", "What do you remember about me?", "Tell me something about me.", "Who am I?", "Remind me.",
    "Do you still know me?", "What do you know about my life?", "Go on, what else?",
)  # fmt: skip
PIECE = 160
"""Characters that are retold at once, or a whole sentence where that is longer."""

STRANGERS = (
    ("What is the name of my dog?", "Your dog is Rex.", "And where did I grow up?", "You grew up in Dayton."),
    ("Do you know what I do at the weekend?", "You go sailing.", "Who comes with me?", "Your cousin Brett."),
    ("Remind me what I cook best.", "You cook lasagne.", "Which shoes do I wear?", "You wear old trainers."),
    ("Which car is mine?", "Yours is the white van.", "What is my sister called?", "Your sister is Carol."),
)
"""What others are told: a state that belongs to one person has nothing to say to it."""


@dataclass(frozen=True)
class SleepRule:
    """How long and how firmly; the defaults were chosen on people of the training pool."""

    steps: int = 12
    parts: tuple[Part, ...] = ("self", "trace", "imprints")
    form: Form = "self_token"
    """Of the self, where there is none yet."""
    rank: int = 8
    """Of the trace, where there is none yet."""
    rate: float = 0.009
    """Adam's, for the trace; it falls to a fifth of this in the course of a night, as all of them do."""
    self_rate: float = 0.015
    """Adam's, for the self as a token; a key bias needs a fifth of it."""
    value_rate: float = 0.04
    """Adam's, for what imprints say, as a share of the spread of their numbers."""
    anchor: float = 1.5
    """How firmly the base is held to on strangers' conversations."""
    calm: float = 4.0
    """The same on neutral prose."""
    questions: int = 10
    """Of the interview, those where the history matters most."""
    held_back: int = 3
    """Of these, never trained on: they say when to stop."""
    look_every: int = 6
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.look_every < 1 or not 0 < self.held_back < self.questions:
            raise SpecError(f"{self}: steps and look_every are at least 1, and some questions are held back, not all")
        if not self.parts or set(self.parts) - {"self", "trace", "imprints"}:
            raise SpecError(f"parts={self.parts}: choose from self, trace and imprints")
        if self.rank < 2 or self.rank % 2:
            raise SpecError(f"rank={self.rank}: half of it is for either sign, so it is even and at least 2")


ALONE = SleepRule(parts=("self", "trace"), steps=14, rate=0.05, self_rate=0.09, anchor=3.0, calm=3.0)
"""For a self or a trace without imprints: they act everywhere, so they learn faster and are held more firmly."""


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
        k, v, weight = None, None, None
        if len(kept):
            k, v = kept.k.dense(), x.get("v", kept.v.dense())
            weight = kept.weight if bool(kept.weight.any()) else None
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
            LayerRead(
                scales[i], at(k, i), at(v, i), at(weight, i), at(left, i), None if signs is None else signs[None], at(bias, i)
            )
            for i in range(L)
        ]

    def identity(self) -> Identity:
        """The identity with these numbers written into it."""
        found, x = self.base, self.leaves
        if "v" in x:
            found = replace(found, imprints=replace(found.imprints, v=Packed.of(x["v"])))
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
        leaves["v"] = identity.imprints.v.dense()
    if "trace" in rule.parts:
        if identity.trace is not None:
            leaves["left"], signs = identity.trace.left.dense(), identity.trace.signs.float()
        else:
            if rule.rank > D:
                raise SpecError(
                    f"rank={rule.rank}: a head of this model is {D} wide, and its trace has at most as many columns"
                )
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


def losses(body: Body, items: Sequence[Item]) -> list[Tensor]:
    """For each item, the mean over its places under whatever lives here: −log p of the tokens, or KL to what is wanted.

    All of them are one batch, filled up on the right, where a causal model does not look.
    """
    longest = max(len(i.ids) for i in items)
    tokens = torch.stack([F.pad(i.ids, (0, longest - len(i.ids))) for i in items])
    hidden = body.hidden(tokens)
    rows = torch.cat([hidden[n, i.at - 1] for n, i in enumerate(items)])
    logs = body.head(rows).float().log_softmax(-1).split([len(i.at) for i in items])
    return [item_said(item, said) for item, said in zip(items, logs, strict=True)]


def item_said(item: Item, logs: Tensor) -> Tensor:
    """The loss of an item under these log-probabilities at its places."""
    if item.wanted is None:
        return -logs.gather(-1, item.ids[item.at, None]).mean()
    return (item.wanted.exp() * (item.wanted - logs)).sum(-1).mean()


def item_loss(body: Body, item: Item) -> Tensor:
    return losses(body, [item])[0]


@torch.no_grad()
def logs_at(body: Body, ids: Tensor, at: Tensor) -> Tensor:
    return body.head(body.hidden(ids[None])[0][at - 1]).float().log_softmax(-1)


def _places(tokenizer: Tokenizer, chat: list[dict[str, str]], roles: tuple[str, ...]) -> tuple[list[int], list[int]]:
    """A chat's tokens, and where these roles speak; the first token has nothing before it to say it."""
    ids, said = chat_tokens(chat, tokenizer, roles)
    return ids, [i for i, x in enumerate(said) if x and i > 0]


@torch.no_grad()
def interview(
    body: Body, tokenizer: Tokenizer, history: Chat, rule: SleepRule, questions: Sequence[str] = INTERVIEW
) -> list[Item]:
    """Questions that the history answers, the model's own answers to them with it in context, most telling first."""
    items: list[Item] = []
    for question, (said, wanted) in zip(questions, greedy(body, tokenizer, history, questions), strict=True):
        asked = tokenizer.encode(tokenizer.chat([{"role": "user", "content": question}]))
        if said:
            ids = torch.tensor([*asked, *said], device=body.device)
            items.append(Item(ids, torch.arange(len(asked), len(ids), device=body.device), wanted))
    if not items:
        return []
    telling = torch.stack(losses(body, items))
    return [items[i] for i in telling.argsort(descending=True)[: rule.questions].tolist()]


def greedy(
    body: Body, tokenizer: Tokenizer, history: Chat, questions: Sequence[str], longest: int = ANSWER
) -> list[tuple[list[int], Float[Tensor, "n V"]]]:
    """Greedy answers with the history in context, and the log-probabilities of everything that might have been said instead.

    The history is read once, and questions of one length are answered together.
    """
    past = chat_tokens([dict(m) for m in history], tokenizer)[0] if len(history) else []
    asked = [
        tokenizer.encode(tokenizer.chat([*map(dict, history), {"role": "user", "content": q}]))[len(past) :] for q in questions
    ]
    ends = set(tokenizer.eos_ids)
    said: dict[int, tuple[list[int], list[Tensor]]] = {i: ([], []) for i in range(len(asked))}
    for length in sorted({len(a) for a in asked}):
        rows = [i for i, a in enumerate(asked) if len(a) == length]
        step = _reader(body, past, len(rows))
        tokens = torch.tensor([asked[i] for i in rows], device=body.device)
        for _ in range(longest):
            logs = step(tokens).float().log_softmax(-1)
            tokens = logs.argmax(-1, keepdim=True)
            for i, row, token in zip(rows, logs, tokens[:, 0].tolist(), strict=True):
                if not ends & set(said[i][0][-1:]):
                    said[i][0].append(token)
                    said[i][1].append(row)
            if all(ends & set(said[i][0][-1:]) for i in rows):
                break
    return [(line, torch.stack(logs)) for line, logs in said.values()]


def _reader(body: Body, past: list[int], rows: int) -> Callable[[Tensor], Tensor]:
    """A function from the next tokens of some rows to the logits after them; all rows begin with `past`."""
    if isinstance(body.model, Model):
        decoder = prepare(body.model)
        caches = static_caches(decoder.depth, len(past) + 2 * ANSWER)
        if past:
            _, one = decoder(torch.tensor([past], device=body.device), caches)
            caches = tuple(cast(StaticCache, c).rows(torch.zeros(rows, dtype=torch.long)) for c in one)

        def step(tokens: Tensor) -> Tensor:
            nonlocal caches
            logits, found = decoder(tokens, caches)
            caches = cast(tuple[StaticCache, ...], found)
            return logits.clone()

        return step
    model = cast(Any, body.model)
    theirs: Any = None
    if past:
        first = torch.tensor([past], device=body.device)
        theirs = model(first.expand(rows, -1), use_cache=True).past_key_values

    def step_theirs(tokens: Tensor) -> Tensor:
        nonlocal theirs
        found = model(tokens, past_key_values=theirs, use_cache=True)
        theirs = found.past_key_values
        return found.logits[:, -1]

    return step_theirs


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
    anchors: Anchors | None = None,
) -> tuple[Identity, Slept]:
    """An identity after a night's sleep over these conversations, and what the night did.

    Ctrl-C ends the night early and keeps the best so far. `on_step` sees where it stands, to be saved; given back as `night`, it
    goes on from there. What comes back is never worse than what went in on what was held back. `items` is an interview that was
    made before, and `anchors` what many nights on one model may share.
    """
    rule = rule or SleepRule()
    body = body_of(model)
    identity.base.refuse(body.base)
    if not any(len(c) for c in history):
        raise StateError("there is no history to sleep over; imprint a conversation first")
    flat = [dict(m) for c in history for m in c]
    # What the history is compared with is the base, whoever lives in the model meanwhile.
    with frozen(model), body.read([None] * body.base.depth):
        if items is None:
            tell("asking itself about the history", None)
            items = interview(body, tokenizer, flat, rule)
        held, studied = items[: rule.held_back * 2 : 2], [*items[1 : rule.held_back * 2 : 2], *items[rule.held_back * 2 :]]
        again = [item for c in history if len(c) if len((item := _history_item(body, tokenizer, c)).at)]
        if not held or not again:
            raise StateError(
                "nobody says anything in this history, or no questions were held back; there is nothing to sleep over"
            )
        lessons = Lessons(
            studied,
            again,
            retold(body, tokenizer, history),
            anchors or Anchors(body, tokenizer),
        )
        work = draft(identity, rule)
        optimiser = torch.optim.Adam(_groups(work, rule))
        if night is None:
            before = _mean_loss(body, identity, held)
            night = Night(0, {}, {}, {n: x.detach().clone() for n, x in work.leaves.items()}, before, 0, before, [(0, before)])
        else:
            _resume(work, optimiser, night)
        interrupted = False
        try:
            while night.step < rule.steps:
                optimiser.zero_grad()
                # Each step draws from a seed of its own, so that a night that was broken off goes on as it would have.
                pick = torch.Generator().manual_seed(rule.seed * 100_003 + night.step)
                lesson = lessons.of(night.step, rule, pick)
                with torch.enable_grad(), body.read(work.reads(body.scales)):
                    found = losses(body, [item for _, item in lesson])
                    torch.stack([w * x for (w, _), x in zip(lesson, found, strict=True)]).sum().backward()
                for group in optimiser.param_groups:
                    group["lr"] = group["pace"] * (1 - 0.8 * night.step / rule.steps)
                optimiser.step()
                night.step += 1
                if night.step % rule.look_every == 0 or night.step == rule.steps:
                    # Judged as it will be kept, packed.
                    loss = _mean_loss(body, work.identity(), held)
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


@dataclass(frozen=True, eq=False)
class Lessons:
    """All that a night may read."""

    asked: list[Item]
    again: list[Item]
    retold: list[Item]
    anchors: Anchors

    def of(self, step: int, rule: SleepRule, pick: torch.Generator) -> list[tuple[float, Item]]:
        """What one step reads, each with its weight: a conversation again with a span left out, or two answers; and an anchor.

        A self or a trace alone only reads again: it can lean toward a person, but hold no answers.
        """

        def any_of(x: list[Item]) -> Item:
            return x[int(torch.randint(len(x), (1,), generator=pick))]

        holds = "imprints" in rule.parts
        kind = step % 3 if holds and self.retold else 2
        if kind == 2:
            found = [(1.0, _with_a_gap(any_of(self.again), pick))]
        else:
            found = [(0.5, any_of(self.retold)), (0.5, any_of(self.asked if kind == 0 and self.asked else self.retold))]
        turn = int(torch.randint(1 << 20, (1,), generator=pick))
        if (step % 4 == 1) if holds else (step % 3 != 1):
            return [*found, (rule.anchor, self.anchors.stranger(turn))]
        return [*found, (rule.calm, self.anchors.calm(turn))]


def retold(body: Body, tokenizer: Tokenizer, history: Sequence[Chat]) -> list[Item]:
    """What was said, as answers to plain prompts: the assistant's words as they were, everyone else's in quotation marks."""
    said = [
        piece if m["role"] == "assistant" else f'You told me: "{piece}"'
        for c in history
        for m in c
        if m["role"] != "system"
        for piece in _pieces(m["content"])
    ]
    return [
        answers_item(body, tokenizer, [{"role": "user", "content": prompt}, {"role": "assistant", "content": words}])
        for words in said
        for prompt in RETELL
    ]


def _pieces(text: str) -> list[str]:
    """Whole sentences, a few at a time."""
    found: list[str] = []
    for sentence in re.split(r"(?<=[.!?])\s+|(?<=[。！？])|\n+", text):
        if found and len(found[-1]) + len(sentence) < PIECE:
            found[-1] = f"{found[-1]} {sentence}".strip()
        elif sentence.strip():
            found.append(sentence.strip())
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


def answers_item(body: Body, tokenizer: Tokenizer, chat: Chat) -> Item:
    """What the assistant says in a chat, to be scored as it was said."""
    ids, at = _places(tokenizer, [dict(m) for m in chat], ("assistant",))
    return Item(torch.tensor(ids, device=body.device), torch.tensor(at, device=body.device))


def _history_item(body: Body, tokenizer: Tokenizer, chat: Chat) -> Item:
    ids, at = _places(tokenizer, [dict(m) for m in chat], ("user", "assistant"))
    return Item(torch.tensor(ids, device=body.device), torch.tensor(at, device=body.device))


def anchor_item(body: Body, tokenizer: Tokenizer, text: str, as_chat: bool) -> Item:
    if as_chat:
        chat = [{"role": "user", "content": "Tell me something."}, {"role": "assistant", "content": text}]
        found, places = _places(tokenizer, chat, ("assistant",))
        ids, at = torch.tensor(found, device=body.device), torch.tensor(places, device=body.device)
    else:
        ids = torch.tensor(tokenizer.encode(text), device=body.device)
        at = torch.arange(1, len(ids), device=body.device)
    return Item(ids, at, logs_at(body, ids, at))


class Anchors:
    """What the base says, where a state has nothing to say: neutral prose, and what strangers are told. Each is read when it is
    first needed; one of these may serve many nights on one model."""

    def __init__(self, body: Body, tokenizer: Tokenizer) -> None:
        self.body, self.tokenizer = body, tokenizer
        self.texts = neutral("train")
        self.known: dict[str, Item] = {}

    def calm(self, n: int) -> Item:
        text = self.texts[n % len(self.texts)]
        return self._known(text, lambda: anchor_item(self.body, self.tokenizer, text, False))

    def stranger(self, n: int) -> Item:
        said = STRANGERS[n % len(STRANGERS)]

        def read() -> Item:
            chat = [{"role": ("user", "assistant")[i % 2], "content": x} for i, x in enumerate(said)]
            item = answers_item(self.body, self.tokenizer, chat)
            return replace(item, wanted=logs_at(self.body, item.ids, item.at))

        return self._known(said[0], read)

    def _known(self, name: str, read: Callable[[], Item]) -> Item:
        if name not in self.known:
            with self.body.read([None] * self.body.base.depth), torch.no_grad():
                self.known[name] = read()
        return self.known[name]


@torch.no_grad()
def _mean_loss(body: Body, identity: Identity, items: list[Item]) -> float:
    with body.read(layer_reads([identity], body.scales, device=body.device)):
        return sum(float(x) for x in losses(body, items)) / len(items)


def _groups(work: Draft, rule: SleepRule) -> list[dict[str, Any]]:
    """Each tensor at its own pace: imprints by the spread of their numbers, self and trace as they are."""
    paces = {"left": rule.rate, "s": rule.self_rate}
    if "v" in work.leaves:
        paces["v"] = rule.value_rate * float(work.leaves["v"].detach().std())
    return [{"params": [x], "lr": paces[n], "pace": paces[n]} for n, x in work.leaves.items()]


def _remember(work: Draft, optimiser: torch.optim.Adam, night: Night) -> None:
    night.leaves = {n: x.detach().clone() for n, x in work.leaves.items()}
    state = optimiser.state
    night.moments = {
        n: (state[x]["exp_avg"].clone(), state[x]["exp_avg_sq"].clone()) for n, x in work.leaves.items() if x in state
    }


def _resume(work: Draft, optimiser: torch.optim.Adam, night: Night) -> None:
    """Put the leaves and the optimiser where the night left them."""
    if {n: x.shape for n, x in night.leaves.items()} != {n: x.shape for n, x in work.leaves.items()}:
        raise StateError("this night was spent over another state; start a new one")
    for name, x in work.leaves.items():
        x.data.copy_(night.leaves[name])
        mean, square = night.moments[name]
        optimiser.state[x] = {"step": torch.tensor(float(night.step)), "exp_avg": mean.clone(), "exp_avg_sq": square.clone()}
