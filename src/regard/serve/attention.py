"""Attention of a real model, row by row: what any layer and head of it weighs in any text, by itself or with an identity.

    reader = AttentionReader(model, tokenizer)
    seen = reader.read(tokens, layer=3)                        its own attention
    seen = reader.read(tokens, layer=3, spec="entmax(1.5)")    this layer's queries and keys under another mechanism
    seen.rows([7, 8], heads=[0]).weights                       (1, heads, rows, keys); never all of them at once

A text reaches the layer through the layers below it as the model has them, unless `everywhere` puts the mechanism into these too. With
an identity, what it keeps stands before the text's own keys: its words are `slots`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attention.inspect import Attended, Rows
from ..attention.spec import parse
from ..errors import CombinationError, ShapeError, SpecError
from ..identity.body import body_of
from ..identity.read.layer import layer_reads
from ..identity.state import Identity
from ..identity.wording import clean, word
from ..models.base import CausalModel, Look, Model, walk
from ..models.tokenizer import Tokenizer
from ..nn import Attention

MOST_TOKENS = 4096
"""Of a text: its way to a layer costs a forward."""
MOST_WEIGHTS = 1 << 18
"""Numbers in one answer: rows × keys × heads."""
KEPT = 6
"""Layers whose queries and keys are held for the next rows that are asked for."""
KEPT_TOKENS = 8192
"""Tokens of all of these together."""


@dataclass(frozen=True, eq=False)
class LayerSeen:
    """One layer on one text."""

    tokens: tuple[int, ...]
    layer: int
    heads: int
    spec: str
    slots: tuple[str, ...]
    """Words of what an identity keeps; they are the first keys, and the tokens follow."""
    attended: Attended

    def rows(self, rows: Sequence[int], heads: Sequence[int]) -> Rows:
        """Weights and acceptance; more than one answer may hold is refused, with what would fit."""
        keys = len(self.slots) + len(self.tokens)
        if len(rows) * len(heads) * keys > MOST_WEIGHTS:
            fit = MOST_WEIGHTS // (keys * max(1, len(heads)))
            raise ShapeError(
                f"{len(rows)} rows of {keys} keys in {len(heads)} heads are {len(rows) * len(heads) * keys:,} weights, and one call gives "
                f"at most {MOST_WEIGHTS:,}: ask for {fit} rows at a time" + (", or for one head" if len(heads) > 1 else "")
            )
        return self.attended.rows(rows, heads)


class AttentionReader:
    """Reads layers of one model; the last few stay at hand, so that more of their rows cost no forward."""

    def __init__(self, model: Model, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.layers = [m for m in model.modules() if isinstance(m, Attention)]
        self._seen: OrderedDict[tuple[object, ...], LayerSeen] = OrderedDict()
        self._models: OrderedDict[tuple[str, ...], Model] = OrderedDict()
        self._scores: OrderedDict[tuple[object, ...], dict[str, Tensor]] = OrderedDict()

    @property
    def causal(self) -> bool:
        """True where a row meets no later key: those weights are zeros, and not sent."""
        return isinstance(self.model, CausalModel)

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a text, as this kind of model reads one."""
        return tuple(self.tokenizer.encode(text, framed=not isinstance(self.model, CausalModel)))

    def words(self, tokens: Sequence[int]) -> list[str]:
        """Each token to be read, with the space at its beginning; of a letter made of several tokens, the last one shows it."""
        words: list[str] = []
        open_: list[int] = []
        for i, t in enumerate(tokens):
            open_.append(t)
            start = i + 1 - len(open_)
            text = self.tokenizer.decode(open_, special=True, after=tokens[max(0, start - 1) : start])
            whole = not text.endswith("�") or len(open_) == LETTER
            words.append(clean(text) if whole else "")
            open_ = [] if whole else open_
        return words

    def check(self, tokens: Sequence[int], layer: int, heads: Sequence[int] | None, rows: Sequence[int] | None) -> None:
        """Whatever cannot be read is refused before anything is computed."""
        if not 1 <= len(tokens) <= MOST_TOKENS:
            raise ShapeError(f"a text of {len(tokens):,} tokens: give 1 to {MOST_TOKENS:,} of them")
        size = self.tokenizer.size or getattr(self.model.config, "vocabulary", 1 << 31)
        bad = [t for t in tokens if not 0 <= t < size]
        if bad:
            raise ShapeError(f"token {bad[0]}: this model has tokens 0 to {size - 1:,}")
        if not 0 <= layer < len(self.layers):
            raise ShapeError(f"layer={layer}: this model has layers 0 to {len(self.layers) - 1}")
        for name, asked, count in (("head", heads, self.layers[layer].heads), ("row", rows, len(tokens))):
            wrong = [i for i in asked or () if not 0 <= i < count]
            if wrong:
                raise ShapeError(f"{name} {wrong[0]}: there are {name}s 0 to {count - 1}")

    def read(
        self,
        tokens: Sequence[int],
        layer: int,
        *,
        spec: str | None = None,
        everywhere: bool = False,
        identity: Identity | None = None,
        version: str = "",
    ) -> LayerSeen:
        """One layer on a text. `version` names the identity where its commit is known; without it, its content does."""
        self.check(tokens, layer, None, None)
        named = version or (identity.digest() if identity is not None else "")
        key = (tuple(tokens), layer, spec, everywhere, named)
        if key not in self._seen:
            self._seen[key] = self._read(tuple(tokens), layer, spec, everywhere, identity)
            while len(self._seen) > 1 and (
                len(self._seen) > KEPT or sum(len(s.tokens) for s in self._seen.values()) > KEPT_TOKENS
            ):
                self._seen.popitem(last=False)
        self._seen.move_to_end(key)
        return self._seen[key]

    @torch.no_grad()
    def _read(
        self, tokens: tuple[int, ...], layer: int, spec: str | None, everywhere: bool, identity: Identity | None
    ) -> LayerSeen:
        model = self.under(spec, None if everywhere else layer)
        identity = None if identity is None or identity.silent else identity
        with nullcontext() if identity is None else reading(model, identity):
            attended = attended_layer(model, torch.tensor([tokens], device=next(model.parameters()).device), layer)
        attention = [m for m in model.modules() if isinstance(m, Attention)][layer]
        slots = () if identity is None else slot_words(identity, self.tokenizer)
        return LayerSeen(tokens, layer, attention.heads, str(attention.spec), slots, attended)

    @torch.no_grad()
    def read_layers(
        self,
        tokens: Sequence[int],
        layers: Sequence[int],
        *,
        spec: str | None = None,
        everywhere: bool = False,
        identity: Identity | None = None,
    ) -> Iterator[LayerSeen]:
        """What `read` gives of each of some layers, in order, from one way through the model; none of them is held."""
        model = self.model
        if not isinstance(model, CausalModel):
            yield from (self.read(tokens, i, spec=spec, everywhere=everywhere, identity=identity) for i in sorted(layers))
            return
        self.check(tokens, max(layers), None, None)
        identity = None if identity is None or identity.silent else identity
        other = self.under(spec, None)
        assert isinstance(other, CausalModel)
        slots = () if identity is None else slot_words(identity, self.tokenizer)
        ids = torch.tensor([list(tokens)], device=next(model.parameters()).device)
        way, x = (other if everywhere else model), model.start(ids)
        for i in range(max(layers) + 1):
            # Entered anew for each layer: whoever reads these lives his own life between two of them.
            with ExitStack() as living:
                if identity is not None:
                    for m in {id(way): way, id(other): other}.values():
                        living.enter_context(reading(m, identity))
                seen = None
                if i in layers:
                    (seen,) = walk(other.blocks[i : i + 1], x, model.rule(), None, None, Look(attention=True)).attended
                x = walk(way.blocks[i : i + 1], x, model.rule(), None, None, None).x
            if seen is not None:
                attention = next(m for m in other.blocks[i].modules() if isinstance(m, Attention))
                yield LayerSeen(tuple(tokens), i, attention.heads, str(attention.spec), slots, seen)

    def under(self, spec: str | None, layer: int | None) -> Model:
        """The model with another mechanism in one layer, or in all of them; its weights are shared."""
        if spec is None:
            return self.model
        parsed = parse(spec)
        if not hasattr(self.model.config, "attention"):
            raise CombinationError(f"a {type(self.model).__name__} has no attention that could be another: leave out the spec")
        if parsed.points or parsed.inner.both_sides:
            raise SpecError(f"{parsed} gives no values that a layer of a language model could go on with")
        own = [str(m.spec) for m in self.layers]
        chosen = tuple(spec if layer is None or i == layer else s for i, s in enumerate(own))
        if chosen not in self._models:
            self._models[chosen] = self.model.with_attention(chosen).eval()
            while len(self._models) > KEPT:
                self._models.popitem(last=False)
        return self._models[chosen]

    # -- which heads do what ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def head_scores(self, tokens: Sequence[int], spec: str | None = None) -> dict[str, Tensor]:
        """(layers, heads) each: mean weight on the token before, on what followed the same token, and on the first token.

        Induction is measured on random tokens said twice (Olsson et al. 2022), the others on the text, of which 256 tokens are read.
        """
        self.check(tokens, 0, None, None)
        tokens = tokens[:READ]
        if len(tokens) < 3:
            raise ShapeError(f"a text of {len(tokens)} tokens says nothing about heads: give at least 3")
        key = (tuple(tokens), spec)
        if key not in self._scores:
            model = self.under(spec, None)
            device = next(model.parameters()).device
            text, twice = torch.tensor([list(tokens)], device=device), self._said_twice().to(device)
            half = twice.shape[1] // 2
            seen: dict[str, list[Tensor]] = {"previous": [], "sink": [], "induction": []}
            for each in attended_layers(model, text):
                w = each.weights()[0]
                seen["previous"].append(w.diagonal(-1, dim1=-2, dim2=-1).mean(-1))
                seen["sink"].append(w[:, 1:, 0].mean(-1))
            for each in attended_layers(model, twice):
                seen["induction"].append(each.weights()[0].diagonal(1 - half, dim1=-2, dim2=-1)[..., 1:].mean(-1))
            self._scores[key] = {name: torch.stack(rows) for name, rows in seen.items()}
            while len(self._scores) > KEPT:
                self._scores.popitem(last=False)
        return self._scores[key]

    def _said_twice(self) -> Tensor:
        size = min(self.tokenizer.size or 1 << 31, getattr(self.model.config, "vocabulary", 1 << 31))
        low = min(1000, size // 4)
        half = torch.randint(low, size, (1, TWICE), generator=torch.Generator().manual_seed(0))
        return torch.cat([half, half], 1)


LETTER = 4
"""Bytes, and so tokens, of one letter at most."""
READ = 256
"""Tokens of a text by which heads are told apart, at most."""
TWICE = 32
"""Random tokens that are said twice."""


def reading(model: Model, identity: Identity) -> Any:
    """A block in which the model's layers read an identity."""
    body = body_of(model)
    identity.base.refuse(body.base)
    return body.read(layer_reads([identity], body.scales, device=body.device))


def attended_layers(model: Model, tokens: Tensor) -> Iterator[Attended]:
    """What each layer does with a text, one after the other; none is held once the next is asked for."""
    if not isinstance(model, CausalModel):
        yield from model(tokens, look=Look(attention=True)).attended or ()
        return
    x = model.start(tokens)
    for i in range(len(model.blocks)):
        way = walk(model.blocks[i : i + 1], x, model.rule(), None, None, Look(attention=True))
        x = way.x
        yield way.attended[0]


def attended_layer(model: Model, tokens: Tensor, layer: int) -> Attended:
    """What one layer does with a text; those above it are not asked."""
    if not isinstance(model, CausalModel):
        return (model(tokens, look=Look(attention=True)).attended or ())[layer]
    x = walk(model.blocks[:layer], model.start(tokens), model.rule(), None, None, None).x
    return walk(model.blocks[layer : layer + 1], x, model.rule(), None, None, Look(attention=True)).attended[0]


def slot_words(identity: Identity, tokenizer: Tokenizer) -> tuple[str, ...]:
    """The words of what an identity keeps, in the order in which its slots stand before a text."""
    me = identity.self
    standing = me is not None and me.form == "self_token" and bool(me.s.any())
    return (*(["self"] * standing), *(word(tokenizer, [int(t)]) for t in identity.imprints.token))


__all__ = ["AttentionReader", "LayerSeen", "attended_layer", "attended_layers", "reading", "slot_words"]
