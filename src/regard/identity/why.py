"""Why this token: what of an identity moved the model's next word, found by leaving things out.

    KL(p ‖ p₋ₓ) = Σ p log(p / p₋ₓ)        p with all of the identity, p₋ₓ without x, in nats

x is everything (the base model), a part (self, trace, imprints), one layer's reading, or one imprint. A slot that is left out keeps
its place, so that the others are turned as before. The numbers are not shares of a whole: two imprints that say the same thing
cover for each other, and each alone then seems to matter little.

    answer = why(model, mara, tokenizer.encode(prompt), tokenizer=tokenizer)
    answer.base, answer.parts["imprints"], answer.layers[12], answer.imprints[3], answer.moments[3].source
    print(answer)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..errors import ShapeError, SpecError
from ..models.tokenizer import Tokenizer
from .body import Body, body_of
from .read.layer import ABSENT, LayerRead, layer_reads
from .state import Identity
from .wording import clean, spark, word

Reads = Sequence[LayerRead | None]
Tell = Callable[[str, float | None], object]
SHOWN_TOKENS, SHOWN_IMPRINTS = 5, 8


@dataclass(frozen=True)
class Moment:
    """What an imprint is of."""

    word: str
    shock: float
    source: str


@dataclass(frozen=True)
class Why:
    """Nats that the next token's distribution moves when something is left out of the identity."""

    base: float
    """Without all of it."""
    parts: dict[str, float]
    """Without the self, the trace, the imprints; only those that are there."""
    layers: tuple[float, ...]
    """Without what this layer reads."""
    imprints: dict[int, float]
    """Without this one imprint, by its index; those with the most influence first."""
    likely: tuple[tuple[int, float, float], ...]
    """The most likely tokens, and the probability of each with the identity and without."""
    words: tuple[str, ...] = ()
    """Those tokens to be read."""
    moments: Mapping[int, Moment] = field(default_factory=dict[int, Moment])
    """What the imprints of `imprints` are of, by their index."""
    token: str = "the next token"
    """Which token this is about."""

    def __str__(self) -> str:
        likely = zip(self.words[:SHOWN_TOKENS], self.likely, strict=False)
        top = max(range(len(self.layers)), key=lambda i: self.layers[i])
        return "\n".join([
            f"{self.token}: {self.base:.4f} nats from the model itself",
            "likely   " + "  ".join(f"{text} {p:.0%} ({q:.0%})" for text, (_, p, q) in likely),
            "without  " + "  ".join(f"{part} {x:.4f}" for part, x in self.parts.items()),
            f"layers   {spark(self.layers, len(self.layers))}  most in layer {top + 1} of {len(self.layers)}, {self.layers[top]:.4f}",
            *(f"  {x:.4f}  {(m := self.moments[i]).word:<16} shock {m.shock:5.2f}  {clean(m.source)}"
              for i, x in list(self.imprints.items())[:SHOWN_IMPRINTS]),
        ])  # fmt: skip


@torch.no_grad()
def why(
    model: nn.Module,
    identity: Identity,
    tokens: Sequence[int],
    *,
    most: int | None = None,
    tokenizer: Tokenizer | None = None,
    tell: Tell = lambda what, share: None,
) -> Why:
    """What moved the token after `tokens`. With `most`, only as many imprints are left out in turn, those with the steepest
    gradient of KL(p ‖ base): on a small machine each one costs a forward. Without a tokenizer, words are token numbers."""
    body = body_of(model)
    identity.base.refuse(body.base)
    if not len(tokens):
        raise ShapeError("there are no tokens, and so none is next; give those of a prompt")
    body.expect_room(len(tokens))
    ids = torch.tensor([list(tokens)], device=body.device)
    was_training = model.training
    model.eval()
    try:
        answer = _why(body, identity, ids, most, tell)
    finally:
        model.train(was_training)
    imprints = identity.imprints
    moments = {
        i: Moment(
            word(tokenizer, [int(imprints.token[i])]), float(imprints.shock[i]), identity.sources[int(imprints.source[i])]
        )
        for i in answer.imprints
    }
    return replace(answer, words=tuple(word(tokenizer, [t]) for t, _, _ in answer.likely), moments=moments)


def why_answer(
    model: nn.Module,
    identity: Identity,
    prompt: Sequence[int],
    answer: Sequence[int],
    at: int | None = None,
    *,
    most: int | None = None,
    tokenizer: Tokenizer | None = None,
    tell: Tell = lambda what, share: None,
) -> Why:
    """What moved token `at` of an answer, counted from 1; without `at`, the token that the identity moved most."""
    if at is None:
        distances = moved(model, identity, prompt, answer) if answer else [0.0]
        at = 1 + distances.index(max(distances))
    if not 1 <= at <= max(len(answer), 1):
        raise SpecError(f"token {at}: the last answer has tokens 1 to {len(answer)}; leave it out for the one that moved most")
    reason = why(model, identity, [*prompt, *answer[: at - 1]], most=most, tokenizer=tokenizer, tell=tell)
    return replace(reason, token=f"token {at}, {word(tokenizer, answer[at - 1 : at])!r}") if answer else reason


def moved(model: nn.Module, identity: Identity, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """KL(identity ‖ model) at every token of an answer, in nats."""
    mine, base = (along(model, who, prompt, answer) for who in (identity, None))
    return [kl(p, q) for p, q in zip(mine, base, strict=True)]


def _why(body: Body, identity: Identity, ids: Tensor, most: int | None, tell: Tell) -> Why:
    def reads_of(who: Identity) -> list[LayerRead | None]:
        return layer_reads([who], body.scales, device=body.device)

    whole = reads_of(identity)
    n = len(identity.imprints)
    parts = [p for p in ("self", "trace") if getattr(identity, p) is not None] + ["imprints"] * (n > 0)
    read_by = [i for i, r in enumerate(whole) if r is not None]
    chosen = list(range(n))
    if most is not None and most < n:
        steep = _steepness(body, whole, ids, n)
        chosen = steep.topk(most).indices.sort().values.tolist()
    with_it, base = _last(body, whole, ids), _last(body, [None] * len(whole), ids)
    done, total = 0, len(parts) + len(read_by) + len(chosen)

    def without(reads: Reads) -> float:
        nonlocal done
        done += 1
        tell("leaving things out", done / total)
        return kl(with_it, _last(body, reads, ids))

    by_part = {p: without(reads_of(identity.only(*(q for q in parts if q != p)))) for p in parts}  # pyright: ignore
    layers = [0.0] * len(whole)
    for i in read_by:
        layers[i] = without([*whole[:i], None, *whole[i + 1 :]])
    alone = {j: without([_lacking(r, j - n) for r in whole]) for j in chosen}
    top = with_it.topk(min(8, with_it.shape[0])).indices.tolist()
    return Why(
        kl(with_it, base),
        by_part,
        tuple(layers),
        dict(sorted(alone.items(), key=lambda x: -x[1])),
        tuple((t, float(with_it[t].exp()), float(base[t].exp())) for t in top),
    )


def kl(p: Float[Tensor, "... V"], q: Float[Tensor, "... V"]) -> float:
    """Mean KL(p ‖ q) in nats, from log-probabilities; what rounding takes below 0 is 0."""
    # Summed to 1 once more in double: what float32 leaves over would outweigh a small distance.
    p, q = (x.double().log_softmax(-1) for x in (p, q))
    # A token that p rules out adds nothing, whatever q thinks of it.
    return max(0.0, float(torch.where(p.exp() > 0, p.exp() * (p - q), 0.0).sum(-1).mean()))


@torch.no_grad()
def along(model: nn.Module, identity: Identity | None, prompt: Sequence[int], answer: Sequence[int]) -> Float[Tensor, "N V"]:
    """Log-probabilities of every token of an answer, by whoever is given; None is the model itself."""
    body = body_of(model)
    if identity is not None:
        identity.base.refuse(body.base)
    if not len(prompt) or not len(answer):
        raise ShapeError(f"a prompt of {len(prompt)} tokens and an answer of {len(answer)}: each needs at least one")
    body.expect_room(len(prompt) + len(answer))
    ids = torch.tensor([[*prompt, *answer]], device=body.device)
    with body.read(layer_reads([identity], body.scales, device=body.device)):
        hidden = body.hidden(ids)[0, len(prompt) - 1 : -1]
        return body.head(hidden).float().log_softmax(-1)


def _last(body: Body, reads: Reads, ids: Tensor) -> Tensor:
    with body.read(reads):
        return body.head(body.hidden(ids)[0, -1]).float().log_softmax(-1)


def _lacking(read: LayerRead | None, slot: int) -> LayerRead | None:
    """The same reading, with the weight of one slot gone."""
    if read is None or read.k is None:
        return read
    gone = read.k.new_zeros(read.slots)
    gone[slot] = ABSENT
    return _weighed(read, gone)


def _weighed(read: LayerRead, more: Float[Tensor, " m"]) -> LayerRead:
    """The same reading, with `more` added to the log weight of its slots."""
    assert read.k is not None
    weight = read.k.new_zeros(*read.k.shape[:3]) if read.weight is None else read.weight
    return replace(read, weight=weight + more)


@torch.enable_grad()
def _steepness(body: Body, whole: Reads, ids: Tensor, n: int) -> Tensor:
    """|∂ KL(p ‖ base) / ∂ log weight| of each imprint: how hard it holds p where it is, from one backward pass."""
    base = _last(body, [None] * len(whole), ids).detach()
    slots = max(r.slots for r in whole if r is not None)
    more = torch.zeros(slots, device=body.device, requires_grad=True)
    p = _last(body, [r if r is None or r.k is None else _weighed(r, more) for r in whole], ids)
    (grad,) = torch.autograd.grad((p.exp() * (p - base)).sum(), [more])
    return grad[-n:].abs()


__all__ = ["Moment", "Why", "along", "kl", "moved", "why", "why_answer"]
