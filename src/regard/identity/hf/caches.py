"""A cache of transformers may be read only under the identity and the mechanisms that it was filled under.

`update` of such a cache is ours, an object and not a function, so that a copied cache has one that writes into the copy. It
appends an identity's columns to each key, refuses keys of another identity or mechanism, and tracks which row is which identity's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ...errors import StateError

if TYPE_CHECKING:
    from .hooks import Frame

MOVES: dict[str, Callable[[list[int], Any], list[int]]] = {
    "reorder_cache": lambda rows, index: [rows[i] for i in _listed(index)],
    "batch_select_indices": lambda rows, index: [rows[i] for i in _listed(index)],
    "batch_repeat_interleave": lambda rows, times: [r for r in rows for _ in range(int(times))],
}
"""What transformers does to the rows of a cache."""


def _listed(index: Tensor | Iterable[int]) -> Iterable[int]:
    return index.tolist() if isinstance(index, Tensor) else index


class Filler(NamedTuple):
    """What a cache is filled under."""

    who: str | None = None
    """The digest of what an identity does to the model."""
    specs: str = ""
    """What was injected, layer by layer."""


NOBODY = Filler()


class Carried:
    """`update` of a cache that was filled with something in the model."""

    def __init__(self, cache: Any, now: Callable[[], tuple[Filler, Frame | None]]) -> None:
        self.cache, self.now = cache, now
        self.fillers: dict[int, Filler] = {}
        self.rows: list[int] | None = None
        """Which of several identities each row is; None where there is one for all."""

    def __call__(self, k: Tensor, v: Tensor, layer_idx: int, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        filler, frame = self.now()
        self.check(layer_idx, filler)
        if frame is not None:
            self._check_rows(frame.rows(k.shape[0]), layer_idx)
            k = frame.widen(k)
        layer = self.cache.layers[layer_idx] if layer_idx < len(self.cache.layers) else None
        cached_k = None if layer is None else layer.keys
        if layer is not None and cached_k is not None and cached_k.numel() and cached_k.shape[-1] != k.shape[-1]:
            if filled(self.cache, layer_idx):
                raise mixed(f"it keeps keys of width {cached_k.shape[-1]}, and here they are {k.shape[-1]} wide")
            # What a static cache took for keys of another width is empty since `reset`: it takes as much anew.
            layer.is_initialized = False
        self.fillers[layer_idx] = filler
        return type(self.cache).update(self.cache, k, v, layer_idx, *args, **kwargs)

    def check(self, layer_idx: int, filler: Filler) -> None:
        """Raise unless this layer is empty, or was filled by the same."""
        if not filled(self.cache, layer_idx):
            return
        refuse(self.fillers.get(layer_idx, NOBODY), filler)

    def _check_rows(self, rows: tuple[int, ...] | None, layer_idx: int) -> None:
        now = None if rows is None else list(rows)
        if not filled(self.cache, layer_idx):
            self.rows = now
        elif self.rows != now:
            raise mixed(f"its rows are those of identities {self.rows}, and now they are {now}")


class Moved:
    """A method of a cache that moves its rows, and with them the count of whose they are."""

    def __init__(self, carried: Carried, name: str) -> None:
        self.carried, self.name = carried, name

    def __call__(self, given: object) -> object:
        out = getattr(type(self.carried.cache), self.name)(self.carried.cache, given)
        if self.carried.rows is not None:
            self.carried.rows = MOVES[self.name](self.carried.rows, given)
        return out


def guard(cache: Any, layer_idx: int, filler: Filler, now: Callable[[], tuple[Filler, Frame | None]]) -> None:
    """Raise if a layer is given a cache that was filled under something else, and watch it from now on."""
    if hasattr(cache, "self_attention_cache"):
        for one in (cache.self_attention_cache, cache.cross_attention_cache):
            guard(one, layer_idx, filler, now)
        return
    carried = vars(cache).get("update")
    if isinstance(carried, Carried):
        carried.check(layer_idx, filler)
    elif filler != NOBODY:
        if filled(cache, layer_idx):
            refuse(NOBODY, filler)
        cache.update = carried = Carried(cache, now)
        for name in MOVES:
            if hasattr(cache, name):
                setattr(cache, name, Moved(carried, name))


def filled(cache: Any, layer_idx: int) -> bool:
    return bool(int(cache.get_seq_length(layer_idx)))


def refuse(was: Filler, now: Filler) -> None:
    if was == now:
        return
    if was.specs != now.specs:
        then, here = (x or "the model's own attention" for x in (was.specs, now.specs))
        raise StateError(f"this cache was filled under {then}, and here is {here}; begin with an empty cache")
    if was.who is None:
        raise StateError("this cache was filled without the identity that the model reads now; begin with an empty cache")
    raise mixed("the model reads none now" if now.who is None else "the model reads another one now")


def mixed(why: str) -> StateError:
    return StateError(f"this cache was filled while the model read an identity, and {why}; begin with an empty cache")


__all__ = ["NOBODY", "Carried", "Filler", "guard"]
