"""What all language models here share: one output, one way to save and load."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from jaxtyping import Float, Int
from torch import Tensor, nn

from ..attention.allow import Allow
from ..attention.inspect import Attended
from ..errors import ShapeError
from ..nn import Attention, Cache
from ..state import State
from .blocks import BlockContext
from .kept import Kept


@dataclass(frozen=True)
class Output:
    logits: Float[Tensor, "B N V"]
    caches: tuple[Cache, ...] | None = None
    """One per layer, to pass back with the next tokens; None when none were given."""
    hidden: tuple[Float[Tensor, "B N M"], ...] | None = None
    """The embeddings, then what each block left, then the last norm's; None unless asked."""
    attended: tuple[Attended, ...] | None = None
    """What each layer's attention did; None unless asked."""


@dataclass(frozen=True)
class Look:
    """What a call wants to see beside the logits."""

    hidden: bool = False
    attention: bool = False


States = State | Sequence[State | None] | None
"""One state for all layers, or one each."""


class Model(nn.Module, ABC):
    """A language model that takes any attention spec per layer."""

    family: ClassVar[str]
    config: Any
    kept: Kept = Kept()
    """What came with its checkpoint and goes out with it: eos, bos and pad ids, generation_config.json."""

    @abstractmethod
    def forward(
        self,
        tokens: Int[Tensor, "B N"],
        *,
        allow: Allow | None = None,
        caches: Sequence[Cache] | None = None,
        states: States = None,
        look: Look | None = None,
    ) -> Output:
        """Logits for every token. `allow` is joined to the model's own rule; padding goes there."""

    @property
    def cache_count(self) -> int:
        """How many caches a step takes and gives back; an empty `Cache()` each is how a text begins."""
        return sum(isinstance(m, Attention) for m in self.modules())

    @classmethod
    def from_pretrained(cls, source: str | Path, **changes: Any) -> Self:
        """A checkpoint: a Hugging Face folder or name, a `.gguf` file, a llama2.c `.bin`. `changes` go into the config."""
        from .convert import load

        model = load(source, **changes)
        if not isinstance(model, cls):
            raise TypeError(f"{source} holds a {type(model).__name__}, not a {cls.__name__}")
        return model

    def with_attention(self, attention: str | tuple[str, ...]) -> Self:
        """The same weights, shared and not copied, under other attention; tensors that it trains start at their defaults."""
        from .convert.layout import shared

        model = shared(self, replace(self.config, attention=attention))
        assert isinstance(model, type(self))
        return model

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `config.json`, `model.safetensors` and, where it came with one, `generation_config.json`, as Hugging Face does."""
        from .convert import save

        save(self, folder)


def per_layer(states: States, depth: int) -> list[State | None]:
    if states is None or isinstance(states, State):
        return [states] * depth
    if len(states) != depth:
        raise ShapeError(f"{len(states)} states for {depth} layers; give one, or one for each layer")
    return list(states)


@dataclass(frozen=True)
class Walk:
    """A way through the blocks: where it ended, and what was seen on it."""

    x: Tensor
    caches: tuple[Cache, ...] | None
    hidden: tuple[Tensor, ...]
    attended: tuple[Attended, ...]
    look: Look

    def output(self, logits: Tensor, last: Tensor) -> Output:
        return Output(
            logits,
            self.caches,
            (*self.hidden, last) if self.look.hidden else None,
            self.attended if self.look.attention else None,
        )


Step = Callable[[Tensor, BlockContext], tuple[Tensor, Cache | None, Attended | None]]
"""A block, or anything that is called as one."""


def walk(
    blocks: nn.ModuleList | Sequence[Step],
    x: Tensor,
    rule: Allow,
    caches: Sequence[Cache] | None,
    states: States,
    look: Look | None,
) -> Walk:
    """x through every block in turn."""
    look = look or Look()
    hidden, seen, grown = [x], list[Attended](), list[Cache]()
    for i, (block, state) in enumerate(zip(blocks, per_layer(states, len(blocks)), strict=True)):
        x, cache, attended = block(x, BlockContext(rule, state, None if caches is None else caches[i], look.attention))
        if look.hidden:
            hidden.append(x)
        if cache is not None:
            grown.append(cache)
        if attended is not None:
            seen.append(attended)
    return Walk(x, None if caches is None else tuple(grown), tuple(hidden), tuple(seen), look)
