"""Chat templates: messages to the one text that a model was trained to continue.

A template comes with a checkpoint, so it is a stranger's program: it runs in Jinja's immutable sandbox, never in plain Jinja.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from ..errors import CheckpointError


def render(template: str, messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
    """The text of a conversation; `values` are what templates ask for beside it, such as bos_token."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    helpers: dict[str, Any] = {"raise_exception": _refuse, "strftime_now": _now}
    environment.globals.update(helpers)
    try:
        return environment.from_string(template).render(messages=[dict(m) for m in messages], **values)
    except CheckpointError:
        raise
    except (TemplateError, TypeError, ValueError, KeyError, OverflowError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"the chat template cannot write these messages: {error}") from error


def _refuse(message: object) -> None:
    raise CheckpointError(f"the chat template refuses these messages: {message}")


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent)
