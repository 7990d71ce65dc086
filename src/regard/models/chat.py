"""Chat templates: messages to the one text that a model was trained to continue.

A template comes with a checkpoint, so it is a stranger's program: it runs in a sandbox with a budget, never in plain Jinja.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from ..errors import CheckpointError, needs_extra

LONGEST = 1 << 16
"""The most characters of a template; the longest that checkpoints come with have some twenty thousand."""


def render(template: str, messages: Sequence[Mapping[str, object]], **values: object) -> str:
    """The text of a conversation; `values` are what templates ask for beside it, such as bos_token."""
    with needs_extra("models"):
        from jinja2 import TemplateError

        from .sandbox import Sandbox

    if len(template) > LONGEST:
        raise CheckpointError(f"the chat template has {len(template):,} characters; {LONGEST:,} are read")
    given = {**values, "messages": [dict(m) for m in messages]}
    try:
        environment = Sandbox(given, {"raise_exception": _refuse, "strftime_now": _now})
        return "".join(environment.from_string(template).generate(given))
    except CheckpointError:
        raise
    except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"the chat template cannot write these messages: {error}") from error
    except (RecursionError, MemoryError, SyntaxError) as error:
        raise CheckpointError(f"the chat template nests too deep: {type(error).__name__}") from error


def _refuse(message: object) -> None:
    raise CheckpointError(f"the chat template refuses these messages: {message}")


def _now(form: str) -> str:
    return datetime.now().strftime(f"{form:.200}")
