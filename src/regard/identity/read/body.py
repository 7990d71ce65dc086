"""A model as an identity meets it: where its layers are, what they project, and who it is.

`OwnBody` is of our own decoders; `hf.body` has those of transformers. Whatever is done to a body ends with the `with` block.
"""

from __future__ import annotations

import hashlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from threading import get_ident
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ...errors import CombinationError, RegardWarning, ShapeError
from ...geometry import Dot
from ...models.base import CausalModel, Model, cached_length, walk
from ...nn import Cache, overridden
from ..state import Base
from .layer import LayerRead, _turns  # pyright: ignore[reportPrivateUsage]

PIECE = 1000
"""Tokens of one experience at most: what is longer is lived through piece by piece."""
SAMPLES = 1024
"""Numbers of each weight that go into a fingerprint."""


@dataclass(frozen=True, eq=False)
class Heads:
    """What one layer projected, before RoPE, of one text."""

    q: Float[Tensor, "H N D"]
    k: Float[Tensor, "G N D"]
    v: Float[Tensor, "G N D"]


class Body(ABC):
    model: nn.Module
    base: Base
    scales: list[float]
    """Of the scores, layer by layer."""
    context: int | None = None
    """Tokens that a text has at most: more were not trained on."""
    has_heads: bool = False
    """True where slots may stand behind the head of a text; elsewhere they stand before its first token."""
    has_places: bool = False
    """True where the model looks places up in a table, and has none for a longer text."""

    @cached_property
    def made(self) -> dict[str, Any]:
        """What others have worked out for this model, by name: it goes when the model does, or changes."""
        return {}

    def expect_room(self, count: int) -> None:
        """A word before minutes of work: an error for a text that has no place, a warning for one longer than was trained on."""
        if self.context is None or count <= self.context:
            return
        said = f"{count:,} tokens are past this model's context of {self.context:,} tokens"
        if self.has_places:
            raise ShapeError(f"{said}; give them in pieces of at most {self.context:,}")
        warnings.warn(f"{said}: it was not trained on texts as long; give them in pieces", RegardWarning, stacklevel=3)

    @property
    def piece(self) -> int:
        """Tokens that a text is cut into where it is long, so that a chat's markup has room beside them."""
        return PIECE if self.context is None else max(2, min(PIECE, 3 * self.context // 4))

    @abstractmethod
    def hidden(self, tokens: Int[Tensor, "B N"]) -> Float[Tensor, "B N M"]:
        """What the last norm leaves of every token, under whatever lives here now."""

    @abstractmethod
    def head(self, hidden: Float[Tensor, "... M"]) -> Float[Tensor, "... V"]:
        """Logits from what `hidden` gave; where few tokens are asked for, most of their cost is saved."""

    def logits(self, tokens: Int[Tensor, "B N"]) -> Float[Tensor, "B N V"]:
        """A plain forward, under whatever lives here now."""
        return self.head(self.hidden(tokens))

    @abstractmethod
    def watched(self, tokens: Int[Tensor, " N"]) -> tuple[Float[Tensor, "N V"], list[Heads]]:
        """Logits, and what every layer projected on the way."""

    def heads(self, tokens: Int[Tensor, " N"]) -> list[Heads]:
        """What every layer projected of a text, and no logits."""
        return self.watched(tokens)[1]

    def keys(self, tokens: Int[Tensor, " N"], layers: range) -> Float[Tensor, "l G N D"]:
        """The keys of some layers; those above them need not be asked."""
        return torch.stack([h.k for h in self.heads(tokens)[layers.start : layers.stop]])

    def keys_of_many(self, texts: Int[Tensor, "B N"], layers: range) -> Float[Tensor, "B l G N D"]:
        """The same of several texts of one length; where a model can, they are read at once."""
        return torch.stack([self.keys(tokens, layers) for tokens in texts])

    @abstractmethod
    def turned(self, layer: int, x: Float[Tensor, "... N D"]) -> Tensor:
        """Queries or keys at positions 0, 1, … as the layer's RoPE turns them."""

    @abstractmethod
    def out_weight(self, layer: int) -> Float[Tensor, "M HD"]:
        """W_o of a layer: what its heads, one after the other, add to the stream."""

    @abstractmethod
    def read(self, reads: Sequence[LayerRead | None]) -> Any:
        """A context manager in which the layers read these."""

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


class OwnBody(Body):
    has_heads = True

    def __init__(self, model: Model) -> None:
        blocks = model.plain_blocks() if isinstance(model, CausalModel) else None
        if not isinstance(model, CausalModel) or not blocks:
            raise CombinationError(
                f"a {type(model).__name__} is no decoder that an identity can live in: its blocks have to be plain ones, as "
                "LLaMA's and GPT-2's are"
            )
        self.model = self.causal = model
        self.layers = [block.attention for block in blocks]
        self.context, self.has_places = model.context, model.has_place_table
        for layer in self.layers:
            _turns(layer)
        first = self.layers[0]
        self.scales = [cast(Dot, x.spec.geometry).scale_for(x.head_width) for x in self.layers]
        values = [cast(nn.Linear, x.v).weight for x in self.layers]
        self.base = Base(
            fingerprint([model.embed.weight, *values]),
            len(self.layers),
            first.key_heads,
            first.head_width,
            family=model.family,
        )

    def hidden(self, tokens: Tensor) -> Tensor:
        model = self.causal
        self.expect_room(tokens.shape[1])
        return model.norm(walk(model.blocks, model.start(tokens), model.rule(), None, None, None).x)

    def head(self, hidden: Tensor) -> Tensor:
        return self.causal.readout(hidden)

    def watched(self, tokens: Tensor) -> tuple[Tensor, list[Heads]]:
        with self._watching(len(self.layers)) as seen:
            logits = self.logits(tokens[None])[0]
        return logits, self._heads(seen)

    def heads(self, tokens: Tensor) -> list[Heads]:
        self.expect_room(tokens.shape[0])
        model = self.causal
        with self._watching(len(self.layers)) as seen:
            walk(model.blocks, model.start(tokens[None]), model.rule(), None, None, None)
        return self._heads(seen)

    @staticmethod
    def _heads(seen: dict[str, list[Tensor]]) -> list[Heads]:
        return [Heads(q[0], k[0], v[0]) for q, k, v in zip(seen["q"], seen["k"], seen["v"], strict=True)]

    def keys(self, tokens: Tensor, layers: range) -> Tensor:
        return self.keys_of_many(tokens[None], layers)[0]

    def keys_of_many(self, texts: Tensor, layers: range) -> Tensor:
        self.expect_room(texts.shape[1])
        model = self.causal
        with self._watching(layers.stop) as seen:
            walk(model.blocks[: layers.stop], model.start(texts), model.rule(), None, None, None)
        return torch.stack(seen["k"][layers.start :], 1)

    def onward(self, tokens: Sequence[int], caches: tuple[Cache, ...]) -> tuple[Float[Tensor, "N M"], tuple[Cache, ...]]:
        """A text that goes on from these caches, through as many layers as there are: what the last leaves of each token, and the caches then."""
        model, at = self.causal, cached_length(caches, len(caches))
        self.expect_room(at + len(tokens))
        ids = torch.tensor([list(tokens)], device=self.device)
        way = walk(model.blocks[: len(caches)], model.start(ids, at), model.rule(), caches, None, None)
        assert way.caches is not None
        return way.x[0], way.caches

    @contextmanager
    def _watching(self, count: int) -> Generator[dict[str, list[Tensor]]]:
        """What the first layers project inside, for every text of a batch."""
        seen: dict[str, list[Tensor]] = {"q": [], "k": [], "v": []}
        with ExitStack() as hooks:
            for layer in self.layers[:count]:
                for name, heads in (("q", layer.heads), ("k", layer.key_heads), ("v", layer.key_heads)):
                    hook = _catch(seen[name], heads)
                    hooks.callback(getattr(layer, name).register_forward_hook(hook).remove)
            yield seen

    def turned(self, layer: int, x: Tensor) -> Tensor:
        turns = _turns(self.layers[layer])
        return x if turns is None else turns.rotate(x, 0)

    def out_weight(self, layer: int) -> Tensor:
        return cast(nn.Linear, self.layers[layer].out).weight

    @contextmanager
    def read(self, reads: Sequence[LayerRead | None]) -> Generator[None]:
        with overridden(dict(zip(self.layers, reads, strict=True))):
            yield


def _catch(into: list[Tensor], heads: int) -> Callable[[nn.Module, Any, Tensor], None]:
    watcher = get_ident()

    def hook(module: nn.Module, given: Any, out: Tensor) -> None:
        # Hooks are on the model for all threads, and another's text is not what is watched.
        if get_ident() == watcher:
            into.append(out.unflatten(-1, (heads, -1)).transpose(1, 2))

    return hook


def fingerprint(weights: Sequence[Tensor]) -> str:
    """A name for a model by its weights: their shapes, and a few thousand of their numbers spread evenly."""
    h = hashlib.sha256()
    for w in weights:
        flat = w.detach().reshape(-1)
        step = max(1, flat.numel() // SAMPLES)
        h.update(f"{tuple(w.shape)}".encode())
        h.update(flat[::step].float().cpu().numpy().tobytes())
    return h.hexdigest()


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


__all__ = ["PIECE", "SAMPLES", "Body", "Heads", "OwnBody", "fingerprint", "frozen"]
