"""What all language models here share: one output, one way to save and load, one contract to decode by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..attention.allow import Allow, Causal
from ..attention.inspect import Attended
from ..errors import CheckpointError, CombinationError, ShapeError, StateError
from ..nn import Attention, Cache
from ..scope import Scope
from ..state import State
from ..values import tree
from .blocks import Block, BlockContext
from .generation_info import GenerationInfo
from .objectives import NextToken, Objective
from .parameters import assign, owners_of

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


@tree
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


@dataclass(frozen=True)
class Files:
    """How models come from files and go to them."""

    load: Callable[..., Model]
    save: Callable[[Model, str | Path], None]


class Model(nn.Module, ABC):
    """A language model that takes any attention spec per layer, and says how it is to be used."""

    family: ClassVar[str]
    """The name of its row in `models.families`."""
    files: ClassVar[Files]
    """Set by `models.convert`, so that no model knows a file format."""
    instead: ClassVar[str | None] = None
    """What it does instead of continuing a text, and what to call for it; None where it predicts the next token."""
    objectives: ClassVar[Mapping[str, type[Objective]]] = {"next_token": NextToken}
    """What it can learn from, by the name that `objective.name` has; the first is the usual one."""
    pad_side: ClassVar[Literal["left", "right"]] = "right"
    """Where rows of a batch may be filled up; on the left only where no layer but attention meets other tokens."""
    has_place_table: ClassVar[bool] = False
    """True where places are looked up in a table of `context` rows: no text is longer, and padded rows give `positions`."""
    config: Any
    context: int | None = None
    """Tokens that it was trained on at most; None where nothing says so."""
    generation_info: GenerationInfo = GenerationInfo()
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

    def answer(self, text: str, tokenizer: Tokenizer, limit: int = 64) -> str:
        """What a model that continues no text makes of one: its blanks filled, or a reply of at most `limit` tokens."""
        raise CombinationError(f"a {type(self).__name__} continues a text: generate(model, text, tokenizer=tokenizer)")

    @property
    def trains_every_parameter(self) -> bool:
        """False where a step of training may leave some without a gradient, which replicas on several ranks have to be told."""
        return True

    @property
    def cache_count(self) -> int:
        """How many caches a step takes and gives back; an empty `Cache()` each is how a text begins."""
        return sum(isinstance(m, Attention) for m in self.modules())

    @classmethod
    def from_pretrained(cls, source: str | Path, **changes: Any) -> Self:
        """A checkpoint: a Hugging Face folder or name, a `.gguf` file, a llama2.c `.bin`. `changes` go into the config."""
        model = cls.files.load(source, **changes)
        if not isinstance(model, cls):
            raise TypeError(f"{source} holds a {type(model).__name__}, not a {cls.__name__}")
        return model

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `config.json`, `model.safetensors` and, where it came with one, `generation_config.json`, as Hugging Face does."""
        self.files.save(self, folder)

    def with_attention(self, attention: str | tuple[str, ...]) -> Self:
        """The same weights, shared and not copied, under other attention; tensors that it trains start at their defaults."""
        return self.with_config(replace(self.config, attention=attention))

    def with_config(self, config: Any) -> Self:
        """A model of another config over this one's parameters; those that it has alone start as they are built."""
        own = dict(self.named_parameters())
        with torch.device("meta"):
            made: Self = config.build()
        if not all(n in own for n, _ in made.named_parameters()):
            made = config.build()
        made.generation_info = self.generation_info
        owners = owners_of(made)
        for name, parameter in list(made.named_parameters()):
            if name in own:
                if own[name].shape != parameter.shape:
                    wants = tuple(parameter.shape)
                    raise CheckpointError(f"{name} is {tuple(own[name].shape)}; the other config asks for {wants}")
                assign(owners, parameter, own[name])
        return made.train(self.training)


HEARS: Scope[Callable[[Tensor, Sequence[Cache] | None], AbstractContextManager[object]]] = Scope("hears")
"""What a forward of a model runs in: whoever lives there hears the tokens before they are read."""


class CausalModel(Model):
    """A model that reads from left to right: `start`, blocks under a `rule`, a last norm, `readout`.

    A family of this kind makes the four modules and overrides what differs; whole texts, cached steps, laid out products
    and identities all go through these methods.
    """

    embed: nn.Embedding
    blocks: nn.ModuleList
    norm: nn.Module
    head: nn.Module
    pad_side = "left"
    start_dropout: float = 0.0
    """Of what `start` gives, in training."""

    def start(self, tokens: Int[Tensor, "B N"], at: int = 0, positions: Tensor | None = None) -> Float[Tensor, "B N M"]:
        """What goes into the first block, of tokens that stand at `at`, `at + 1`, … or at `positions`."""
        if positions is not None:
            raise CombinationError(f"a {type(self).__name__} has no table of places, so positions= says nothing to it")
        return self.embed(tokens)

    def rule(self) -> Allow:
        """Who may meet, before a call adds its own."""
        return Causal()

    def readout(self, last: Float[Tensor, "... M"], head: Callable[[Tensor], Tensor] | None = None) -> Float[Tensor, "... V"]:
        """Logits from what the last norm left; `head` multiplies in place of the model's own."""
        return (head or self.head)(last)

    def forward(
        self,
        tokens: Int[Tensor, "B N"],
        *,
        allow: Allow | None = None,
        caches: Sequence[Cache] | None = None,
        states: States = None,
        look: Look | None = None,
        positions: Tensor | None = None,
    ) -> Output:
        """`positions` (B, N) or (N) places the tokens where places are absolute; left-padded batches need it there."""
        hears = HEARS.get(self)
        with nullcontext() if hears is None else hears(tokens, caches):
            x = self.start(tokens, cached_length(caches, len(self.blocks)), positions)
            x = F.dropout(x, self.start_dropout, self.training)
            way = walk(self.blocks, x, narrowed(self.rule(), allow), caches, states, look)
            last = self.norm(way.x)
            return way.output(self.readout(last), last)

    def plain_blocks(self) -> list[Block] | None:
        """Its blocks where all of them are plain, else None: products of plain ones may be laid out anew, and an identity may
        read what their q, k and v project."""
        plain = [b for b in self.blocks if isinstance(b, Block) and b.is_plain]
        return plain if len(plain) == len(self.blocks) else None


def narrowed(rule: Allow, allow: Allow | None) -> Allow:
    """A model's rule and what a call adds to it."""
    return rule if allow is None else rule & allow


def per_layer(states: States, depth: int) -> list[State | None]:
    if states is None or isinstance(states, State):
        return [states] * depth
    if not isinstance(states, Sequence) or not all(x is None or isinstance(x, State) for x in states):
        raise StateError(f"states={states!r:.60}: give a regard.State(...), or a list with one or None for each layer")
    if len(states) != depth:
        raise ShapeError(f"{len(states)} states for {depth} layers; give one, or one for each layer")
    return list(states)


def cached_length(caches: Sequence[Cache] | None, count: int) -> int:
    """Tokens that the caches of a model hold; whatever is not one cache for each of its layers is refused."""
    if caches is None:
        return 0
    if not isinstance(caches, Sequence) or not all(isinstance(c, Cache) for c in caches):
        raise StateError(f"caches={caches!r:.60}: give what the last call returned, or [Cache() for _ in range({count})]")
    if len(caches) != count:
        raise ShapeError(f"{len(caches)} caches; this model keeps {count}, one for each layer: begin with [Cache()] * {count}")
    return caches[0].tokens if count else 0


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
    cached_length(caches, len(blocks))
    look = look or Look()
    hidden: list[Tensor] = [x]
    seen: list[Attended] = []
    grown: list[Cache] = []
    for i, (block, state) in enumerate(zip(blocks, per_layer(states, len(blocks)), strict=True)):
        x, cache, attended = block(x, BlockContext(rule, state, None if caches is None else caches[i], look.attention))
        if look.hidden:
            hidden.append(x)
        if cache is not None:
            grown.append(cache)
        if attended is not None:
            seen.append(attended)
    return Walk(x, None if caches is None else tuple(grown), tuple(hidden), tuple(seen), look)
