"""Parameters put in place of others, wherever a module holds them: a tied one has several places."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

Owners = Mapping[int, list[tuple[nn.Module, str]]]


def owners_of(model: nn.Module) -> Owners:
    """The modules that hold each parameter, by its identity, and the name it has there."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((module, key))
    return owners


def assign(owners: Owners, old: nn.Parameter, value: Tensor) -> None:
    """Put a tensor in place of a parameter, wherever that parameter is shared."""
    new = value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=old.requires_grad)
    for module, key in owners[id(old)]:
        setattr(module, key, new)
