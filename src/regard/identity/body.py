"""The body of a model: ours, or one of transformers, made once for as long as its weights stay as they are."""

from __future__ import annotations

from torch import nn

from ..errors import CombinationError
from ..models.base import Model
from ..models.decode.marks import weights_mark
from .hf.body import HubBody
from .read.body import SAMPLES, Body, OwnBody, frozen
from .state import Base, names_bases


def body_of(model: nn.Module) -> Body:
    """The body of a model, made once for as long as its weights stay where they are."""
    if not isinstance(model, nn.Module):
        raise CombinationError(f"{model!r:.60} is no model: give one of regard.models, or of transformers")
    # As many numbers of each weight as its fingerprint has: what changes that is seen.
    mark = weights_mark(model, SAMPLES)
    # Kept with the model itself, so that both go together; a module's own __setattr__ is for its parts.
    cached: tuple[int, Body] | None = model.__dict__.get(_BODY)
    if cached is not None and cached[0] == mark:
        return cached[1]
    if isinstance(model, Model):
        body: Body = OwnBody(model)
    else:
        body = HubBody(model)
    object.__setattr__(model, _BODY, (mark, body))
    return body


_BODY = "_regard_body"


@names_bases
def base_of(model: nn.Module) -> Base:
    """Who a model is, as an identity remembers it."""
    return body_of(model).base


__all__ = ["Body", "base_of", "body_of", "frozen"]
