"""inject: any mechanism, or an identity, into a pretrained Hugging Face model, and out again.

    with regard.inject(model, "cosine | entmax(1.5)", layers=[0, 3]):
        model.generate(**inputs)
    put = regard.inject(model, {0: "dot | topk(8)", 5: "euclidean"}); ...; put.unwrap()
    put = regard.inject(model, mara)

It goes through transformers' attention interface, mask included, and a model whose code never calls that interface is refused.
After `unwrap()` the logits are what they were, bit for bit. What is injected holds for every thread; `living` holds for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TypeGuard

from torch import nn

from ...attention.spec import Spec, parse
from ...errors import CombinationError, ShapeError
from ..body import body_of
from ..read.layer import layer_reads
from ..state import Identity
from .body import HubBody
from .flight import LOCK
from .hooks import attach_for_all, follow
from .install import install
from .interface import SPECS
from .probe import layers_of, probe

What = str | Spec | Identity | Sequence[str | Spec | None] | Sequence[Identity | None] | Mapping[int, str | Spec]


class Injected:
    """Something that was put into a model; `unwrap()`, or the end of a `with` block, takes it out."""

    def __init__(self, model: nn.Module, undo: Callable[[], None] | None) -> None:
        self.model, self._undo = model, undo

    def unwrap(self) -> nn.Module:
        """The model as it was. A second call does nothing."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()
        return self.model

    def __enter__(self) -> nn.Module:
        return self.model

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.unwrap()


def inject(model: nn.Module, what: What, layers: Sequence[int] | None = None) -> Injected:
    """Put a mechanism or an identity into the layers of a model of transformers.

    `what` is a spec for all `layers`; a list with one for each of them; a mapping from layer to spec; an identity, or a list
    of identities with one for each row of a batch. Specs act on the heads as the model gives them, positions and all.
    """
    if _is_identity(what):
        return _inject_identity(model, what, layers)
    whole = layers is None and not isinstance(what, Mapping)
    modules = layers_of(model, probe(model)[0], whole=whole)
    specs = _by_layer(what, layers, modules)
    for spec in specs.values():
        _refuse(spec)
    with LOCK:
        uninstall = install(model, modules.values(), follow)
        for i, spec in specs.items():
            SPECS.setdefault(modules[i], []).append(spec)

    def undo() -> None:
        with LOCK:
            for i, spec in specs.items():
                here = SPECS[modules[i]]
                del here[max(n for n, x in enumerate(here) if x is spec)]
            uninstall()

    put = Injected(model, undo)
    try:
        # What a layer asks for and a mechanism cannot give is said now, and not in the middle of somebody's text.
        probe(model)
    except BaseException:
        put.unwrap()
        raise
    return put


def _is_identity(what: object) -> TypeGuard[Identity | Sequence[Identity | None]]:
    return isinstance(what, Identity) or (isinstance(what, Sequence) and any(isinstance(x, Identity) for x in what))


def _inject_identity(model: nn.Module, who: Identity | Sequence[Identity | None], layers: Sequence[int] | None) -> Injected:
    body = body_of(model)
    if not isinstance(body, HubBody):
        raise CombinationError("inject is for models of transformers; for a model of regard use `with living(model, identity)`")
    rows = [who] if isinstance(who, Identity) else list(who)
    for row in rows:
        if row is not None:
            row.base.refuse(body.base)
    chosen = _known(range(body.base.depth) if layers is None else layers, range(body.base.depth))
    reads = [r if i in chosen else None for i, r in enumerate(layer_reads(rows, body.scales, device=body.device))]
    return Injected(model, attach_for_all(body, reads) if any(reads) else None)


def _by_layer(what: object, layers: Sequence[int] | None, modules: Mapping[int, nn.Module]) -> dict[int, Spec]:
    if isinstance(what, Mapping):
        if layers is not None:
            raise ShapeError("a mapping from layer to spec says already which layers are meant; leave layers= out")
        return {i: parse(what[i]) for i in _known(what, modules)}
    chosen = _known(modules if layers is None else layers, modules)
    if isinstance(what, str | Spec):
        return dict.fromkeys(chosen, parse(what))
    if not isinstance(what, Sequence):
        raise ShapeError(
            f"a {type(what).__name__} is nothing to inject: give a spec, a list or mapping of specs, or an identity"
        )
    if len(what) != len(chosen):
        raise ShapeError(f"{len(what)} specs for {len(chosen)} layers {list(chosen)}; give one for each")
    return {i: parse(s) for i, s in zip(chosen, what, strict=True) if s is not None}


def _known(asked: Iterable[int], existing: Iterable[int]) -> list[int]:
    there = sorted(existing)
    wanted = list(asked)
    unknown = [i for i in wanted if i not in there]
    if unknown or len(set(wanted)) != len(wanted) or not wanted:
        raise ShapeError(f"layers={wanted}: this model's attention is reached in layers {there}; name each once")
    return wanted


def _refuse(spec: Spec) -> None:
    """Raise for what cannot stand in a layer that is not ours."""
    selection = spec.inner
    why = None
    if not spec.position.absent:
        why = f"the model has turned or moved its heads already, so {spec.position.name} would count positions twice; leave it out"
    elif spec.points:
        why = "a pointer gives the choice itself, and the layer's output projection needs values"
    elif selection.both_sides:
        why = f"{selection.name} moves the tokens themselves and has no way back through this layer's output projection"
    elif selection.carries:
        why = f"{selection.name} must know what earlier rows left behind, and a cache of transformers does not carry it"
    if why is not None:
        raise CombinationError(f"{spec}: {why}")


__all__ = ["HubBody", "Injected", "inject"]
