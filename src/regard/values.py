"""What torch may know of our values, and what we may know of torch's: records it can look into, and tensors that have numbers to read.

A tensor that is traced, fake, on `meta` or one of a batch that `vmap` hides has a shape and no numbers. What is checked by value
is then left to whoever computes: a registered operator looks when it runs (`attention.library`).
"""

from __future__ import annotations

from dataclasses import fields
from typing import TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils import _pytree

_functorch = torch._C._functorch  # pyright: ignore


def transformed() -> bool:
    """True inside `torch.func.grad`, `vmap`, `jvp` and their like, and among dual numbers."""
    return _functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0  # pyright: ignore


def keepable() -> bool:
    """True where a tensor that is made now is like any other, so that it may be kept for the next call: nobody traces or transforms."""
    return not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack() and not transformed()  # pyright: ignore


def hashable(*parts: object) -> bool:
    """True where what depends on these alone can be kept by their value; a part of somebody's own may hold a list."""
    try:
        hash(parts)
    except TypeError:
        return False
    return True


def readable(x: Tensor) -> bool:
    """True where `x.item()` would be an answer."""
    if torch.compiler.is_compiling() or x.is_meta or (type(x) is not Tensor and isinstance(x, FakeTensor)):
        return False
    return not transformed() or not _batched(x)


T = TypeVar("T")


def tree(cls: type[T]) -> type[T]:
    """A dataclass whose fields `torch.export` and `torch.func` may look into."""
    names = [f.name for f in fields(cls) if f.init]  # pyright: ignore
    _pytree.register_dataclass(cls, field_names=names, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}")
    return cls


def constant(cls: type[T]) -> type[T]:
    """A dataclass without tensors, which is the same thing wherever it is equal."""
    _pytree.register_constant(cls)
    return cls


def _batched(x: Tensor) -> bool:
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_batchedtensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return False


__all__ = ["constant", "hashable", "keepable", "readable", "transformed", "tree"]
