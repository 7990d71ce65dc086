"""What only the figures need, imported when a figure is drawn."""

from __future__ import annotations

import importlib
from typing import Any


def need(module: str) -> Any:
    """A module of the extra `figures`, or an error that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"figures need {package}, which is not installed: pip install 'regard[figures]'") from error


def have(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True
