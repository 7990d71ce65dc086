"""What moved each token of an answer: how far an identity is from the model itself at every token, and which imprints did it.

    KL_t = KL(p_t ‖ base_t)                     without all of the identity, at token t, in nats
    without x: KL(p_t ‖ p_t₋ₓ)                  x the imprints of one word, the words that introduce what came to mind, the trace, or the self

`why` says this of one token and every imprint; here the words with the steepest gradient of Σ KL_t are left out in turn, a batch of
rows at a time, so that an answer costs a few forwards whatever the identity holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..errors import ShapeError
from ..models.tokenizer import Tokenizer
from .body import Body, body_of
from .read.finding import finder_of
from .read.layer import ABSENT, LayerRead, layer_reads
from .state import Identity, Recollection
from .wording import word

RUNS = 12
"""Words that are left out in turn, at most."""
ROWS = 4
"""Of these together in one forward."""


@dataclass(frozen=True)
class Mover:
    """Something of an identity, and how far each token moves without it."""

    words: str
    source: str
    """Empty for the frame, which nobody said, and for the trace and the self, which many sources wrote."""
    kind: str
    """imprints, frame (the words that introduce what came to mind), trace, self."""
    imprints: tuple[int, ...]
    nats: tuple[float, ...]


@dataclass(frozen=True)
class Moved:
    """An answer's tokens, how far each is from the model itself, and what moved it."""

    tokens: tuple[int, ...]
    nats: tuple[float, ...]
    movers: tuple[Mover, ...]

    def most(self, at: int) -> Mover | None:
        """What moved token `at` (from 0) most; None where nothing moved it."""
        best = max(self.movers, key=lambda m: m.nats[at], default=None)
        return best if best is not None and best.nats[at] > 0 else None


@torch.no_grad()
def moved_by(
    model: nn.Module, identity: Identity, prompt: Sequence[int], answer: Sequence[int], *, tokenizer: Tokenizer | None = None
) -> Moved:
    """Of every token of an answer. The identity is read as it is: `recall` brings to mind what a prompt asks for."""
    body = body_of(model)
    identity.base.refuse(body.base)
    if not len(prompt) or not len(answer):
        raise ShapeError(f"a prompt of {len(prompt)} tokens and an answer of {len(answer)}: each needs at least one")
    body.expect_room(len(prompt) + len(answer))
    ids = torch.tensor([[*prompt, *answer]], device=body.device)
    first = len(prompt)
    was_training = model.training
    model.eval()
    try:
        whole = layer_reads([identity], body.scales, device=body.device)
        mine = _along(body, whole, ids, first)
        nats = _kl(mine, _along(body, [None] * len(whole), ids, first))[0]
        around = introducing(body, identity, tokenizer)
        runs = [run for run in words_of(identity, tokenizer) if run[0] not in around]
        if len(runs) > RUNS:
            steep = _steepness(body, whole, ids, first, len(identity.imprints))
            runs = sorted(sorted(runs, key=lambda run: -float(steep[list(run)].sum()))[:RUNS])
        runs += [around] if around else []
        left_out = [*_without_runs(body, whole, ids, first, runs, len(identity.imprints), mine)]
        movers = [
            Mover(
                word(tokenizer, [int(identity.imprints.token[i]) for i in run]),
                "" if run == around else identity.sources[int(identity.imprints.source[run[0]])],
                "frame" if run == around else "imprints",
                run,
                tuple(x),
            )
            for run, x in zip(runs, left_out, strict=True)
        ]
        parts = [p for p in ("self", "trace") if getattr(identity, p) is not None]
        for part in parts if len(parts) + bool(runs) > 1 else []:
            rest = identity.only(*(p for p in ("self", "trace", "imprints") if p != part))  # pyright: ignore[reportArgumentType]
            lacking = layer_reads([rest], body.scales, device=body.device)
            movers.append(Mover(part, "", part, (), tuple(_kl(mine, _along(body, lacking, ids, first))[0].tolist())))
    finally:
        model.train(was_training)
    return Moved(tuple(answer), tuple(nats.tolist()), tuple(movers))


def words_of(identity: Identity, tokenizer: Tokenizer | None) -> list[tuple[int, ...]]:
    """Imprints that were said one after the other and make one word, as runs of their indices."""
    imprints = identity.imprints
    token, position, source = (x.tolist() for x in (imprints.token, imprints.position, imprints.source))
    runs: list[list[int]] = []
    for i in range(len(imprints)):
        last = runs[-1][-1] if runs else None
        follows = last is not None and position[i] == position[last] + 1 and source[i] == source[last]
        if follows and last is not None and min(token[i], token[last]) >= 0 and _goes_on(tokenizer, token[last], token[i]):
            runs[-1].append(i)
        else:
            runs.append([i])
    return [tuple(run) for run in runs]


def _goes_on(tokenizer: Tokenizer | None, last: int, token: int) -> bool:
    """Whether a token goes on with the word before it: no space between them."""
    if tokenizer is None:
        return False
    text = tokenizer.decode([token], special=True, after=[last])
    return bool(text) and (text[0].isalnum() or text[0] == "�")


def introducing(body: Body, identity: Identity, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The slots that are no imprint: what stands before and after that which came to mind, as a text would have it."""
    if not isinstance(identity, Recollection) or not identity.chosen or tokenizer is None:
        return ()
    frame = finder_of(body, tokenizer).frame
    token = identity.imprints.token.tolist()
    n = len(token)
    starts = [i for i in range(n) if frame.before and tuple(token[i : i + len(frame.before)]) == frame.before]
    before = range(starts[-1], starts[-1] + len(frame.before)) if starts else range(0)
    after = next((a for a in (frame.after, frame.paragraph) if a and tuple(token[n - len(a) :]) == a), ())
    return (*before, *range(n - len(after), n))


def _without_runs(
    body: Body,
    whole: Sequence[LayerRead | None],
    ids: Tensor,
    first: int,
    runs: Sequence[tuple[int, ...]],
    n: int,
    mine: Tensor,
) -> Iterator[list[float]]:
    """How far every token moves without each run."""
    for at in range(0, len(runs), ROWS):
        some = runs[at : at + ROWS]
        reads = [None if r is None else _lacking(r, some, n) for r in whole]
        yield from _kl(mine, _along(body, reads, ids.expand(len(some), -1), first)).tolist()


def _lacking(read: LayerRead, runs: Sequence[tuple[int, ...]], n: int) -> LayerRead:
    """The same reading in a batch, each row without the slots of one word."""
    if read.k is None or read.v is None:
        return read
    B, (_, G, m, _) = len(runs), read.k.shape
    gone = read.k.new_zeros(B, 1, m)
    for b, run in enumerate(runs):
        gone[b, 0, [i - n for i in run]] = ABSENT
    weight = (read.k.new_zeros(1, G, m) if read.weight is None else read.weight) + gone
    k, v = (x.expand(B, -1, -1, -1) for x in (read.k, read.v))
    places = None if read.places is None else read.places * B
    return replace(read, k=k, v=v, weight=weight, places=places)


def _along(body: Body, reads: Sequence[LayerRead | None], ids: Tensor, first: int) -> Float[Tensor, "B N V"]:
    with body.read(reads):
        return body.head(body.hidden(ids)[:, first - 1 : -1]).double().log_softmax(-1)


def _kl(p: Float[Tensor, "1 N V"], q: Float[Tensor, "B N V"]) -> Float[Tensor, "B N"]:
    return torch.where(p.exp() > 0, p.exp() * (p - q), 0.0).sum(-1).clamp_min(0)


@torch.enable_grad()
def _steepness(body: Body, whole: Sequence[LayerRead | None], ids: Tensor, first: int, n: int) -> Float[Tensor, " m"]:
    """|∂ Σ KL_t / ∂ log weight| of each imprint, from one backward pass."""
    with torch.no_grad():
        base = _along(body, [None] * len(whole), ids, first)
    slots = max(r.slots for r in whole if r is not None)
    more = torch.zeros(slots, device=body.device, requires_grad=True)
    reads = [
        r
        if r is None or r.k is None
        else replace(r, weight=(r.k.new_zeros(*r.k.shape[:3]) if r.weight is None else r.weight) + more)
        for r in whole
    ]
    p = _along(body, reads, ids, first)
    (grad,) = torch.autograd.grad((p.exp() * (p - base)).sum(), [more])
    return grad[-n:].abs()


__all__ = ["Moved", "Mover", "introducing", "moved_by", "words_of"]
