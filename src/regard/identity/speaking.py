"""Who speaks: `living`, a block in which every forward is an identity's, and `generate` and `stream`, which are told.

    with regard.living(model, mara):
        out = generate(model, prompt)
    with regard.living(model, [mara, None, tom]):        # one for each row of a batch; None is the model itself
        logits = model(tokens)
    out = generate(model, prompt, identity=mara)         # bound to the call: nothing to enter, nothing to leave

The model is not changed, and an identity that holds nothing leaves the model's own path: its logits are the base model's, bit
for bit. Inside means the code of the block, and tasks, threads and copied contexts that were started in it with their context
(`scope.py`); a thread that starts without one, as `threading.Thread` and an executor's do, finds the model by itself. A block
in a generator holds while that generator runs, and not for whoever calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from threading import Lock
from typing import Literal, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import ShapeError, StateError
from ..models import downloads
from ..models.base import HEARS, CausalModel, Model, States
from ..models.decode import generate as decoding
from ..models.decode.generate import Generated, Overrides, Prompt, expect_decoder
from ..models.decode.marks import content_mark
from ..models.decode.prepare import Weights
from ..models.decode.rooms import PREFILL, CacheKind
from ..models.decode.sampling import Sampling
from ..models.decode.speculate import Speculate, Speculation, speculation
from ..models.decode.stream import Speaks, Token
from ..models.tokenizer import Tokenizer
from ..nn import Cache
from ..scope import Scope
from .body import Body, body_of
from .read.body import OwnBody
from .read.layer import LayerRead, layer_reads
from .read.recall import recall
from .state import Identity

MOST_WORDS = 1 << 14
"""Tokens of episodes that are looked through for guesses."""
MOST_READS = 8
"""Identities whose reads are kept with a model; those of 64 imprints take 8 MB on SmolLM2."""
Hears = Callable[[Tensor, Sequence[Cache] | None], AbstractContextManager[object]]
Who = Identity | Sequence[Identity | None] | None
"""One identity for all rows, or one for each; None is the model itself."""


@contextmanager
def living(
    model: nn.Module, identity: Who, *, beta: float | None = None, tokenizer: Tokenizer | None = None
) -> Generator[Body]:
    """`beta` lets a query refuse imprints that do not cohere with it; without it they stand among the context's keys.

    A text that begins in the block brings episodes to mind, by `tokenizer` or by the one that our model was opened with. Rows that
    are padded, and models of transformers, are not asked: `recall` does it by hand.
    """
    body, reads = read_by(model, identity, beta)
    block = _Block(identities(identity), beta)
    with _LIVING.held({model: block}), HEARS.held({model: _hearing(model, block, tokenizer)}), body.read(reads):
        yield body


def _hearing(model: nn.Module, block: _Block, tokenizer: Tokenizer | None) -> Hears | None:
    """What a forward runs in, where there are episodes that its tokens may bring to mind."""
    tokenizer = tokenizer or (downloads.TOKENIZERS.get(model) if isinstance(model, Model) else None)
    if tokenizer is None or not isinstance(model, CausalModel) or not block.has_episodes:
        return None
    body, words = body_of(model), tokenizer
    by_owner: dict[str | None, list[LayerRead | None]] = {}

    def hears(tokens: Tensor, caches: Sequence[Cache] | None) -> AbstractContextManager[object]:
        begun = next((c.owner for c in caches or () if c.owner is not None), None)
        if begun is not None:
            # What a text brought to mind when it began is read to its end.
            reads = by_owner.get(begun.who)
            return nullcontext() if reads is None else body.read(reads)
        _, reads = read_by(model, brought_to_mind(model, block.rows, tokens.tolist(), words), block.beta)
        by_owner.update({r.digest: reads for r in reads if r is not None})
        return body.read(reads)

    return hears


@dataclass(frozen=True)
class _Block:
    """Who lives in a model in a block, to be asked again at every prompt."""

    rows: list[Identity | None]
    beta: float | None

    @property
    def has_episodes(self) -> bool:
        return any(i is not None and i.episodes for i in self.rows)


_LIVING: Scope[_Block] = Scope("living")


def read_by(model: nn.Module, identity: Who, beta: float | None = None) -> tuple[Body, list[LayerRead | None]]:
    """What the layers of a model read while somebody lives in it; whoever cannot is refused."""
    rows = identities(identity)
    body = body_of(model)
    if beta is not None and not (isinstance(beta, int | float) and beta > 0):
        raise StateError(f"beta={beta!r:.60}: it must be above 0; imprints with cos(q, k) < 1 − 1/β are refused")
    for row in rows:
        if row is not None:
            row.base.refuse(body.base)
    who = rows[0]
    if len(rows) > 1 or who is None:
        return body, layer_reads(rows, body.scales, beta=beta, device=body.device)
    kept: KeptReads = body.made.setdefault("reads", KeptReads())
    return body, kept.of(who, beta, body)


class KeptReads:
    """What a body's layers read of whoever lived in it last: turned and laid out once, for as long as the identity lives and is the same."""

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[Identity, tuple[object, list[LayerRead | None]]] = WeakKeyDictionary()
        self._lock = Lock()

    def __reduce__(self) -> tuple[type[KeptReads], tuple[()]]:
        """A copy of a model has layers of its own, for which nothing was laid out."""
        return KeptReads, ()

    def of(self, who: Identity, beta: float | None, body: Body) -> list[LayerRead | None]:
        parts = list(_read_tensors(who))
        if any(x.requires_grad for x in parts):
            # Each forward of what is learned has a graph of its own.
            return layer_reads([who], body.scales, beta=beta, device=body.device)
        # An identity is a value, but nobody stops a write into its tensors: all bytes are looked at, which takes a fraction of a millisecond.
        mark = beta, tuple(content_mark(x) for x in parts)
        with self._lock:
            known = self._kept.get(who)
        if known is not None and known[0] == mark:
            return known[1]
        with torch.inference_mode(False):
            # Whoever comes next may want gradients.
            reads = layer_reads([who], body.scales, beta=beta, device=body.device)
        with self._lock:
            self._kept[who] = mark, reads
            while len(self._kept) > MOST_READS:
                del self._kept[next(iter(self._kept.keys()))]
        return reads


def _read_tensors(who: Identity) -> Iterator[Tensor]:
    """Whatever of an identity `layer_reads` reads."""
    i = who.imprints
    yield from (i.k.codes, i.k.scale, i.v.codes, i.v.scale, i.weight)
    if who.self is not None:
        yield who.self.s
    if who.trace is not None:
        yield from (who.trace.left.codes, who.trace.left.scale, who.trace.signs)


def identities(given: object) -> list[Identity | None]:
    """One entry per row, or one for all of them."""
    if isinstance(given, Identity) or given is None:
        return [given]
    if isinstance(given, nn.Module):
        raise StateError(f"a {type(given).__name__} is no identity; the model comes first: living(model, identity)")
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise StateError(
            f"{given!r:.60} is no identity: give an Identity, a list with one for each row, or None for the model itself; "
            "by its name it is in a store, IdentityStore().load(name), or in a folder, Identity.load(folder)"
        )
    rows = list(cast(Sequence[object], given))
    if not rows:
        raise ShapeError("no identities were given; None is the model by itself")
    for i, row in enumerate(rows):
        if row is not None and not isinstance(row, Identity):
            raise StateError(f"row {i} is {row!r:.60}, which is no identity: give an Identity, or None for the model itself")
    return cast(list[Identity | None], rows)


Speaker = Who | Literal["here"]
"""One identity for all rows, a list with one for each, None for the model itself; "here" for whoever lives in the model."""


def generate(
    model: Model,
    prompt: Prompt,
    sampling: Sampling | None = None,
    *,
    identity: Speaker = "here",
    tokenizer: Speaks | None = None,
    on_token: Callable[[Token], object] | None = None,
    weights: Weights = "float32",
    states: States = None,
    prefill: int = PREFILL,
    speculate: Speculate = None,
    cache: CacheKind = "float32",
) -> Generated:
    """Continue one prompt or several, as `identity`: token ids, or texts where a tokenizer is given.

    `on_token` sees every token as it falls. A batch is one call: rows that end early wait for the others. `speculate="lookup"` guesses
    tokens from the prompt and from the identity's own words, and gives the same text in fewer steps; `cache="int8"` keeps keys and values
    in a byte a number.
    """
    overrides = _overrides(model, identity, prompt, tokenizer, sampling)
    return decoding.generate(
        model, prompt, sampling, overrides=overrides, tokenizer=tokenizer, on_token=on_token, weights=weights, states=states,
        prefill=prefill, speculate=_speculation(model, identity, speculate), cache=cache,
    )  # fmt: skip


def stream(
    model: Model,
    prompt: Prompt,
    sampling: Sampling | None = None,
    *,
    identity: Speaker = "here",
    tokenizer: Speaks | None = None,
    weights: Weights = "float32",
    states: States = None,
    prefill: int = PREFILL,
    speculate: Speculate = None,
    cache: CacheKind = "float32",
) -> Iterator[Token]:
    """`generate` as an iterator over its tokens, row by row as they fall.

    Everything is checked, and settled who speaks, before this returns: the tokens may then be taken inside any block, by any
    thread or task, one at a time, between those of other streams.
    """
    overrides = _overrides(model, identity, prompt, tokenizer, sampling)
    return decoding.stream(
        model, prompt, sampling, overrides=overrides, tokenizer=tokenizer, weights=weights, states=states, prefill=prefill,
        speculate=_speculation(model, identity, speculate), cache=cache,
    )  # fmt: skip


def _speculation(model: Model, identity: Speaker, speculate: Speculate) -> Speculation | None:
    """What was asked for, with the words of whoever speaks."""
    given = speculation(speculate)
    if given is None:
        return None
    block = _LIVING.get(model) if isinstance(identity, str) else None
    rows = identities(None if isinstance(identity, str) else identity) if block is None else block.rows
    return replace(given, texts=(*given.texts, *(text for who in rows if who is not None for text in own_words(who))))


def own_words(identity: Identity) -> list[tuple[int, ...]]:
    """Tokens of what an identity may quote: its imprints, run by run, and its last episodes, the oldest first."""
    texts: list[tuple[int, ...]] = []
    run: list[int] = []
    before = None
    for token, place in zip(identity.imprints.token.tolist(), identity.imprints.position.tolist(), strict=True):
        if before is None or place != before + 1 or token < 0:
            texts.append(tuple(run))
            run = []
        # One that was merged of several stands for none of them.
        run, before = ([*run, token], place) if token >= 0 else ([], None)
    texts.append(tuple(run))
    room, said = MOST_WORDS, list[tuple[int, ...]]()
    for episode in reversed(identity.episodes):
        room -= len(episode)
        if room < 0:
            break
        said.append(tuple(episode.tokens.tolist()))
    return [t for t in (*texts, *reversed(said)) if len(t) > 1]


def _overrides(
    model: Model, identity: Speaker, prompt: Prompt, tokenizer: object, sampling: Sampling | None
) -> Overrides | None:
    beta: float | None = None
    who = identity
    if isinstance(who, str) and who == "here":
        block = _LIVING.get(model)
        if block is None or not block.has_episodes:
            # Whatever overrides the layers here is what decoding takes by itself.
            return None
        who, beta = block.rows, block.beta
    expect_decoder(model)
    rows = identities(who)
    tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else downloads.TOKENIZERS.get(model)
    if tokenizer is not None and any(i is not None and i.episodes for i in rows):
        rows = brought_to_mind(model, rows, decoding.prompt_rows(prompt, tokenizer, model), tokenizer, sampling)
    return overrides_of(model, rows, beta)


def overrides_of(model: Model, who: Who, beta: float | None = None) -> Overrides:
    """What an identity does to the layers of one of our models, as it stands: nothing is brought to mind."""
    body, reads = read_by(model, who, beta)
    assert isinstance(body, OwnBody)
    return {layer: read for layer, read in zip(body.layers, reads, strict=True) if read is not None}


def brought_to_mind(
    model: nn.Module,
    rows: Sequence[Identity | None],
    prompts: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
    sampling: Sampling | None = None,
) -> list[Identity | None]:
    """Whoever reads each prompt, with what it brings to their mind."""
    if len(rows) not in (1, len(prompts)):
        raise ShapeError(f"{len(rows)} identities, one for each row, and there are {len(prompts)} prompts")
    each = rows if len(rows) > 1 else list(rows) * len(prompts)
    return [
        None if i is None else recall(model, i, p, tokenizer, sampling=sampling, row=row)
        for row, (i, p) in enumerate(zip(each, prompts, strict=True))
    ]


__all__ = ["Speaker", "Who", "generate", "living", "overrides_of", "own_words", "read_by", "stream"]
