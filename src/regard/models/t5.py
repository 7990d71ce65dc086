"""T5: an encoder reads, a decoder writes; text to text (Raffel et al. 2020).

Scores are not scaled (`dot(scale=1)`), norms are RMS before each sublayer, and position is one relative bias per stack: the
table of the first layer serves the others. Version 1.0 has ReLU and a tied head, 1.1 GEGLU and a head of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from ..attention.allow import All, Allow, Causal
from ..attention.inspect import Attended, inspect
from ..attention.operator import attend
from ..attention.spec import Spec
from ..errors import CombinationError, ShapeError
from ..nn import Attention, Cache
from ..position import NoPosition, Relative
from ..values import tree
from .base import Look, Model, Output, States, narrowed, walk
from .blocks import Activation, Block, BlockContext, FeedForward, attended, layer_specs
from .infill import joined_around
from .objectives import MASK, SENTINEL, Objective, Spans, TextToText
from .tokens import TokenTable

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


@dataclass(frozen=True)
class T5Config:
    vocabulary: int = 32128
    width: int = 512
    depth: int = 6
    decoder_depth: int | None = None
    """As many blocks as the encoder has, unless given."""
    heads: int = 8
    head_width: int = 64
    hidden: int = 2048
    activation: Activation = "relu"
    buckets: int = 32
    max_distance: int = 128
    eps: float = 1e-6
    tied: bool = True
    scaled: bool = True
    """Logits from vectors divided by √width, as models with a tied head were trained."""
    start: int = 0
    """The token that the decoder starts from."""
    dropout: float = 0.0
    attention: str | tuple[str, ...] = "dot(scale=1) | softmax"
    """One for all, or one for each layer of either stack."""

    @property
    def parts(self) -> int:
        """Blocks of both stacks, which a file must hold tensors for."""
        return self.depth + (self.decoder_depth or self.depth)

    def build(self) -> T5:
        """A model of this shape, its weights drawn anew."""
        return T5(self)


@tree
@dataclass(frozen=True)
class T5Output(Output):
    source: Tensor | None = None
    """What the encoder made of the source; None when a cache carried it."""
    crossed: tuple[Attended, ...] | None = None
    """What each decoder layer looked at in the source; None unless asked."""


@dataclass(frozen=True)
class SourceText:
    """The read text as a decoder layer sees it: encoded, or as keys and values already."""

    x: Tensor | None
    cache: Cache | None
    allow: Allow
    seen: list[Attended] | None = None


class T5(Model):
    family = "t5"
    instead = "reads one text and writes another: model.respond(source) or model.answer(text, tokenizer) writes it"
    objectives: ClassVar[Mapping[str, type[Objective]]] = {"spans": Spans, "pairs": TextToText}

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.config = c = config
        self.embed = TokenTable(c.vocabulary, c.width)
        both = Relative(c.buckets, c.max_distance)
        self.encoder = Stack(c, [_block(c, spec) for spec in layer_specs(c.attention, c.depth, both)])
        past = replace(both, direction="past")
        depth = c.decoder_depth or c.depth
        self.decoder = Stack(c, [DecoderBlock(c, spec) for spec in layer_specs(c.attention, depth, past)])
        self.head = nn.Linear(c.width, c.vocabulary, bias=False)
        self._start_weights()
        if c.tied:
            self.head.weight = self.embed.weight

    @property
    def cache_count(self) -> int:
        return 2 * len(self.decoder.blocks)

    def forward(
        self,
        tokens: Tensor,
        *,
        allow: Allow | None = None,
        caches: Sequence[Cache] | None = None,
        states: States = None,
        look: Look | None = None,
        source: Tensor | None = None,
        source_allow: Allow | None = None,
    ) -> T5Output:
        """Logits for the written `tokens` after reading `source`, or after `caches` that `begin` made of it."""
        depth = len(self.decoder.blocks)
        if (source is None) == (caches is None):
            raise ShapeError("t5 writes after a source: give source=, or caches=model.begin(source)")
        if caches is not None and len(caches) != self.cache_count:
            raise ShapeError(f"{len(caches)} caches for {depth} layers; t5 has two for each, as model.begin(source) makes them")
        own, crossed = (None, [None] * depth) if caches is None else (caches[:depth], caches[depth:])
        seen: list[Attended] = []
        looks = look is not None and look.attention
        x = None if source is None else self.encode(source, source_allow)
        steps = [
            partial(block, source=SourceText(x, cache, source_allow or All(), seen if looks else None))
            for block, cache in zip(self.decoder.blocks, crossed, strict=True)
        ]
        way = walk(steps, self.embed(tokens), narrowed(Causal(), allow), own, states, look)
        last = self.decoder.norm(way.x)
        logits = self.head(last * self.config.width**-0.5 if self.config.scaled else last)
        out = way.output(logits, last)
        grown = None if out.caches is None or caches is None else (*out.caches, *caches[depth:])
        return T5Output(logits, grown, out.hidden, out.attended, x, tuple(seen) if looks else None)

    def encode(self, source: Tensor, allow: Allow | None = None) -> Tensor:
        """The source, read."""
        way = walk(self.encoder.blocks, self.embed(source), allow or All(), None, None, None)
        return self.encoder.norm(way.x)

    def begin(self, source: Tensor, allow: Allow | None = None) -> tuple[Cache, ...]:
        """Caches to write from: empty ones for what is written, then the source's keys and values for each layer."""
        x = self.encode(source, allow)
        # A ModuleList forgets what its modules are.
        crossed = [block.cross.read(x) for block in self.decoder.blocks]  # type: ignore[union-attr]
        return (*[Cache()] * len(crossed), *crossed)

    @torch.no_grad()
    def respond(self, source: Tensor, limit: int = 64, end: int = 1, allow: Allow | None = None) -> Tensor:
        """The most likely token at each step, until every row has written `end`; (B, ≤ limit), without the start token."""
        caches: Sequence[Cache] | None = self.begin(source, allow)
        token = torch.full((source.shape[0], 1), self.config.start, device=source.device)
        done = torch.zeros_like(token, dtype=torch.bool)
        written: list[Tensor] = []
        while len(written) < limit and not bool(done.all()):
            out = self(token, caches=caches, source_allow=allow)
            caches = out.caches
            token = out.logits[:, -1:].argmax(-1).masked_fill(done, end)
            done |= token == end
            written.append(token)
        return torch.cat(written, dim=1)

    def answer(self, text: str, tokenizer: Tokenizer, limit: int = 64) -> str:
        """What it writes after reading the text; a text with masks comes back with what it writes for each."""
        blanks = text.split(MASK)
        sentinels = [tokenizer.id_of(SENTINEL.format(i)) for i in range(len(blanks) - 1)]
        end = tokenizer.special.eos
        if end is None or None in sentinels:
            missing = "end" if end is None else SENTINEL.format(sentinels.index(None))
            raise CombinationError(f"this tokenizer has no token {missing}, which a T5 reads or writes")
        pieces = [tokenizer.encode(piece, bos=False) for piece in blanks]
        read = joined_around(pieces, [i for i in sentinels if i is not None])
        source = torch.tensor([[*read, end]], device=self.embed.weight.device)
        written = [i for i in self.respond(source, limit, end)[0].tolist() if i != end]
        if not sentinels:
            return tokenizer.decode(written)
        cut = {s: next((i for i, token in enumerate(written) if token == s), len(written)) for s in sentinels}
        spans = [written[a + 1 : b] for a, b in zip(cut.values(), [*list(cut.values())[1:], len(written)], strict=True)]
        return "".join(a + b for a, b in zip(blanks, [*(tokenizer.decode(s) for s in spans), ""], strict=True))

    def _start_weights(self) -> None:
        """Unscaled scores need small queries: a standard deviation of (width · head_width)^−½."""
        c = self.config
        nn.init.normal_(self.embed.weight)
        nn.init.normal_(self.head.weight, std=c.width**-0.5)
        for name, p in self.named_parameters():
            if name.endswith(".q.weight"):
                nn.init.normal_(p, std=(c.width * c.head_width) ** -0.5)
            elif p.ndim == 2 and ".blocks." in name:
                nn.init.normal_(p, std=p.shape[-1] ** -0.5)


class Stack(nn.Module):
    """Blocks that share the first one's relative bias, and the norm after them."""

    def __init__(self, c: T5Config, blocks: Sequence[Block | DecoderBlock]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(c.width, eps=c.eps)
        tables = [b.attention.trained for b in blocks if "relative" in b.attention.trained]
        for trained in tables[1:]:
            trained["relative"] = tables[0]["relative"]


class DecoderBlock(nn.Module):
    """A look at what is written, a look at the source, and a feed-forward layer, each around a residual."""

    def __init__(self, c: T5Config, spec: Spec) -> None:
        super().__init__()
        inner = _block(c, spec)
        self.attention, self.ffn, self.norm_1, self.norm_2 = inner.attention, inner.ffn, inner.norm_1, inner.norm_2
        # The source has no place on the line of what is written.
        away = Spec(spec.geometry, spec.selection, NoPosition())
        self.cross = Cross(c.width, c.heads, away, head_width=c.head_width)
        self.norm_cross = nn.RMSNorm(c.width, eps=c.eps)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor, context: BlockContext, source: SourceText) -> tuple[Tensor, Cache | None, Attended | None]:
        a, cache, seen = attended(self.attention, self.norm_1(x), context)
        x = x + self.dropout(a)
        x = x + self.dropout(self.cross.look(self.norm_cross(x), source))
        return x + self.dropout(self.ffn(self.norm_2(x))), cache, seen


class Cross(Attention):
    """Attention to the source, whose keys and values are made once and then only read."""

    def read(self, x: Tensor) -> Cache:
        _, k, v = self._project(x[:, :0], x)
        return Cache(k, k if v is None else v)

    def look(self, x: Tensor, source: SourceText) -> Tensor:
        made = self.read(source.x) if source.cache is None and source.x is not None else source.cache
        assert made is not None
        q = self._project(x, x[:, :0])[0]
        if source.seen is None:
            return self.joined(attend(q, made.keys(), made.values(), self.spec, allow=source.allow, state=self.state()))
        seen = inspect(q, made.keys(), made.values(), self.spec, allow=source.allow, state=self.state())
        source.seen.append(seen)
        return self.joined(seen.output)


def _block(c: T5Config, spec: Spec) -> Block:
    return Block(
        Attention(c.width, c.heads, spec, head_width=c.head_width),
        FeedForward(c.width, c.hidden, c.activation, bias=False),
        (nn.RMSNorm(c.width, eps=c.eps), nn.RMSNorm(c.width, eps=c.eps)),
        dropout=c.dropout,
    )
