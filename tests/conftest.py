"""Seeds, threads and a home for every test: small tensors are faster on one thread, and a run repeats exactly, alone or beside another."""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

# Before torch is imported, which reads them once. Test processes that run side by side share the cores; one that spins while it
# waits would take them from the other, and what a test starts inherits both.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Nobody's models, identities and compiled files are read or written, and two test processes never share theirs.
_HOME, _OWNER = tempfile.mkdtemp(prefix="regard-tests-"), os.getpid()
os.environ["REGARD_HOME"] = _HOME


@atexit.register
def _leave() -> None:
    # Processes that a test forked end too, and the home is not theirs.
    if os.getpid() == _OWNER:
        shutil.rmtree(_HOME, ignore_errors=True)


# Those of clients have an environment of their own: `.ci/clients`.
collect_ignore = ["clients"]
# Those of the Triton kernels need the interpreter, which is asked for before triton is imported: `attention/test_triton.py`.
if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore.append("interpreted")

# Modules beside a test (`tiny`, `stored`) are imported by their plain names.
sys.path[:0] = [str(p) for p in sorted(Path(__file__).parent.iterdir()) if p.is_dir() and p.name not in collect_ignore]

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from helpers import iris_rows  # noqa: E402

from regard.train.precision import bfloat16_faults, capabilities  # noqa: E402

if "ONEDNN_MAX_CPU_ISA" not in os.environ and capabilities().get("amx_bf16") and bfloat16_faults():
    # Read when the first product is made, and inherited by the processes beside this one.
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"
    bfloat16_faults.cache_clear()
torch.set_num_threads(1)
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=40, database=None)
hypothesis.settings.load_profile("fixed")


LONGEST = ("test_studies.py", "test_notebooks.py", "test_store_crash.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole files go to one process, and a long one that came last would be waited for: these come first."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    """Modules and thousands of tests stay to the end: whoever collects garbage has not to look through them every time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_is_heard() -> Generator[None]:
    """A shell's `&` starts its children deaf to SIGINT, and theirs; tests that press Ctrl-C need what a terminal gives."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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
