from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from regard.train import Config, config

TEXT = (
    "The quality of mercy is not strained. It droppeth as the gentle rain from heaven\nUpon the place beneath: it is twice blest;\n"
    * 12
)
SMALL = [
    "train.batch=4",
    "train.steps=6",
    "train.log_every=1",
    "train.validate_every=3",
    "train.save_every=2",
    "data.context=8",
    "optim.warmup=2",
    "model.width=16",
    "model.depth=1",
    "model.heads=2",
    "model.key_heads=1",
    "model.hidden=24",
    "train.dtype=float32",
]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def small(text: Path, tmp_path: Path) -> Callable[..., Config]:
    """A config that trains in a moment, with overrides."""

    def make(*overrides: str) -> Config:
        family = [o for o in overrides if o.startswith("model.family")]
        own = ("model.key_heads", "model.hidden")
        base = [o for o in SMALL if not (family and o.startswith(own))]
        return config({}, [*base, f"data.source={text}", f"data.cache={tmp_path / 'cache'}", *overrides])

    return make
