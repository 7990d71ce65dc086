"""Seeds and threads for every test: small tensors are faster on one thread, and a run repeats exactly."""

import hypothesis
import pytest
import torch
from helpers import iris_rows

torch.set_num_threads(1)
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=40, database=None)
hypothesis.settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> int:
    """Tiles and chunks of 16 rows, so that small inputs cross their borders; the number of rows."""
    monkeypatch.setattr("regard.attention.tiled.TILE", 1)
    monkeypatch.setattr("regard.attention.fused.CHUNK", 1)
    return 16


@pytest.fixture(scope="session")
def iris() -> tuple[torch.Tensor, torch.Tensor]:
    return iris_rows()
