"""Directions of a trace: the eigenvectors of T for each layer and key head, and the tokens that each of them attracts and repels.

    print(directions(mara, model, tokenizer))
    directions(mara, model, tokenizer).draw(figure)                      # with the extra `figures`

Along an eigenvector u with eigenvalue λ a trace adds −λ (u·q̂ − u·k̂)² to the score of a pair, on unit vectors before RoPE. A token's own
q̂ and k̂ in a layer are those that the base gives it alone, as the second token after the one that begins every text. So the token j as
a key gains, on the average over the tokens as queries (or over `queries`, where they are given),

    gain_j(u) = −λ mean_i (u·q̂_i − u·k̂_j)², less its mean over j            nats of score

λ > 0 attracts what lies on the queries' side and repels the far side, λ < 0 the reverse. The gains of all directions of a head add up to the
mean change of that key's score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ..errors import ShapeError
from ..models.tokenizer import Tokenizer
from .body import Body, body_of
from .state import Identity
from .wording import word
from .write.trace import dense

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_TOKENS = 256
"""Each costs a forward of two tokens."""
FAINT = 1e-6
"""Eigenvalues below this share of the largest are rounding."""
ATTRACTS, REPELS = "#0072B2", "#D55E00"


@dataclass(frozen=True, eq=False)
class Direction:
    """One eigenvector of one head, and what it does to the tokens."""

    layer: int
    head: int
    value: float
    """Its eigenvalue: above 0 the far side of the queries is repelled, below 0 it is attracted."""
    vector: Float[Tensor, " D"]
    gains: Float[Tensor, " n"]
    """Of each token, in nats of score, against the mean token."""


@dataclass(frozen=True, eq=False)
class Directions:
    """All directions of a trace, the strongest first."""

    all: tuple[Direction, ...]
    tokens: tuple[int, ...]
    words: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.all)

    def attracted(self, d: Direction, most: int = 5) -> list[tuple[str, float]]:
        """The tokens whose scores gain most, and how much."""
        return [(self.words[i], float(d.gains[i])) for i in d.gains.argsort(descending=True)[:most].tolist() if d.gains[i] > 0]

    def repelled(self, d: Direction, most: int = 5) -> list[tuple[str, float]]:
        return [(self.words[i], float(d.gains[i])) for i in d.gains.argsort()[:most].tolist() if d.gains[i] < 0]

    def total(self) -> Float[Tensor, " n"]:
        """What each token gains, summed over all directions of all heads and divided by the number of heads."""
        heads = {(d.layer, d.head) for d in self.all}
        return torch.stack([d.gains for d in self.all]).sum(0) / len(heads) if self.all else torch.zeros(len(self.tokens))

    def __str__(self) -> str:
        def said(pairs: list[tuple[str, float]]) -> str:
            return "  ".join(f"{w} {x:+.3f}" for w, x in pairs) or "–"

        if not self.all:
            return "this identity has no trace: there are no directions"
        return "\n".join(
            f"layer {d.layer + 1:>2} head {d.head + 1}  {d.value:+.3f}  attracts {said(self.attracted(d, 3))}  repels {said(self.repelled(d, 3))}"
            for d in self.all[:8]
        )

    def draw(self, figure: Figure) -> None:
        """Eigenvalues by layer and sign, and the tokens of the strongest direction of each sign."""
        spectrum, *bars = figure.subplots(1, 3, width_ratios=[1.1, 1, 1])
        for sign, colour, marker in ((1, ATTRACTS, "o"), (-1, REPELS, "v")):
            of = [d for d in self.all if d.value * sign > 0]
            spectrum.plot([d.layer + 1 for d in of], [d.value for d in of], marker, color=colour, markersize=4, alpha=0.7)
        spectrum.axhline(0, color="#8a929c", linewidth=0.8)
        spectrum.set(xlabel="layer", ylabel="eigenvalue of T")
        spectrum.locator_params(axis="x", integer=True, nbins=8)
        spectrum.set_title("Directions by layer and sign", fontsize=9)
        for ax, sign in zip(bars, (1, -1), strict=True):
            d = next((d for d in self.all if d.value * sign > 0), None)
            if d is None:
                ax.set_axis_off()
                continue
            shown = [*self.attracted(d, 5), *reversed(self.repelled(d, 5))]
            places = range(len(shown))
            ax.barh(places, [x for _, x in shown], color=[ATTRACTS if x > 0 else REPELS for _, x in shown])
            ax.set_yticks(list(places), [w for w, _ in shown], fontsize=8)
            ax.invert_yaxis()
            ax.axvline(0, color="#8a929c", linewidth=0.8)
            ax.set(xlabel="gain of the token's score, nats")
            ax.set_title(f"layer {d.layer + 1}, head {d.head + 1}, eigenvalue {d.value:+.2f}", fontsize=9)


@torch.no_grad()
def directions(
    identity: Identity,
    model: nn.Module,
    tokenizer: Tokenizer | None = None,
    *,
    tokens: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
) -> Directions:
    """The directions of an identity's trace. `tokens` are placed along them; by default those of its imprints.

    `queries` are the tokens that look at them; all of them, if none are given. Without a tokenizer, words are token numbers.
    """
    body = body_of(model)
    identity.base.refuse(body.base)
    chosen = list(dict.fromkeys(int(t) for t in (_imprinted(identity) if tokens is None else tokens)))
    if len(chosen) < 2:
        raise ShapeError(
            f"{len(chosen)} tokens: attracted and repelled are told by comparing tokens; this identity imprinted none, so give tokens=[…]"
            if tokens is None
            else f"{len(chosen)} different tokens: attracted and repelled are told by comparing, so give two or more"
        )
    words = tuple(word(tokenizer, [t]) for t in chosen)
    if identity.trace is None:
        return Directions((), tuple(chosen), words)
    first = tokenizer.special.bos if tokenizer is not None else None
    begin = 0 if first is None else first
    q, k = _alone(body, chosen, begin)
    if queries is not None:
        if not len(queries):
            raise ShapeError("queries=[] asks nothing of the tokens; leave it out, or give one or more")
        q, _ = _alone(body, list(queries), begin)
    values, vectors = torch.linalg.eigh(dense(identity.trace).double())
    least = max(float(values.abs().max()) * FAINT, torch.finfo(torch.float32).tiny)
    every: list[Direction] = []
    for layer, head, i in (values.abs() > least).nonzero().tolist():
        value, u = float(values[layer, head, i]), vectors[layer, head, :, i]
        asked, met = q[layer, head] @ u, k[layer, head] @ u
        gains = -value * (met - asked.mean()).square()
        every.append(Direction(layer, head, value, u.float(), (gains - gains.mean()).float()))
    return Directions(tuple(sorted(every, key=lambda d: -abs(d.value))), tuple(chosen), words)


def _imprinted(identity: Identity) -> list[int]:
    """The tokens of the imprints, those of the greatest shock first."""
    token, shock = identity.imprints.token, identity.imprints.shock
    return [int(token[i]) for i in shock.argsort(descending=True).tolist() if token[i] >= 0][:MOST_TOKENS]


def _alone(body: Body, tokens: Sequence[int], first: int) -> tuple[Float[Tensor, "L G m D"], Float[Tensor, "L G n D"]]:
    """Unit queries (of all heads that share a key head) and keys of each token alone after `first`, by the base itself."""
    if len(tokens) > MOST_TOKENS:
        raise ShapeError(f"{len(tokens):,} tokens cost a forward each; give at most {MOST_TOKENS}")
    q: list[Tensor] = []
    k: list[Tensor] = []
    was_training = body.model.training
    body.model.eval()
    try:
        with body.read([None] * body.base.depth):
            for t in tokens:
                heads = body.watched(torch.tensor([first, t], device=body.device))[1]
                q.append(torch.stack([h.q[:, 1].unflatten(0, (h.k.shape[0], -1)) for h in heads]))
                k.append(torch.stack([h.k[:, 1] for h in heads]))
    except IndexError as error:
        raise ShapeError(f"tokens from {min(tokens)} to {max(tokens)}: the model does not know all of them") from error
    finally:
        body.model.train(was_training)
    queries, keys = torch.stack(q, 3).flatten(2, 3), torch.stack(k, 2)
    return tuple(F.normalize(x.double().cpu(), dim=-1) for x in (queries, keys))  # pyright: ignore[reportReturnType]


__all__ = ["Direction", "Directions", "directions"]
