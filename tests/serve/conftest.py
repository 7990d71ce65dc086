from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import make_service

from regard.serve.service import Service


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """A server of a tiny model on this machine, without keys."""
    made = make_service(tmp_path)
    yield made
    made.close()
    made.store.close()
