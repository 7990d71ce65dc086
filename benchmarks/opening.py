"""The first use of a model: SmolLM2 opened in fresh processes, its file evicted from the system's cache before each.

Ours is `open_model` (weights and tokenizer); the peer is transformers on the same weights in safetensors.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from statistics import median

from regard.models import downloads as hub

from .harness import THREADS, Bench, Case, Reach, Row, quartiles

TITLE = "opening a model"
CLOCK = "import sys, time, torch; {imports}; start = time.perf_counter(); {call}; print(time.perf_counter() - start)"
OURS = CLOCK.format(imports="from regard.models import open_model", call="open_model(sys.argv[1])")
THEIRS = CLOCK.format(
    imports="import transformers; transformers.logging.set_verbosity_error()",
    call="transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32); "
    "transformers.AutoTokenizer.from_pretrained(sys.argv[1])",
)


def cases(bench: Bench) -> list[Case]:
    return [
        Case("open GGUF", lambda: _opened(bench, _gguf(), "GGUF of 4 bits, 93 MB", Reach(2.0, "seconds"))),
        Case("open safetensors", lambda: _opened(bench, _folder(), "safetensors, 538 MB", Reach(2.0, "seconds"))),
        Case("first token", lambda: _first_token(bench)),
    ]


def _opened(bench: Bench, source: Path, run: str, reach: Reach) -> Row:
    ours: list[float] = []
    peer: list[float] = []
    for _ in range(max(3, bench.settings.fewest)):
        ours.append(float(_fresh(source, [sys.executable, "-c", OURS, str(source)])))
        peer.append(float(_fresh(_folder(), [sys.executable, "-c", THEIRS, str(_folder())])))
    return _row("open SmolLM2", run, "transformers, safetensors", ours, peer, reach, "imports are not counted")


def _first_token(bench: Bench) -> Row:
    """From the shell: the interpreter, torch, the model and one token."""
    command = [sys.executable, "-m", "regard.cli.main", "generate", "The sea is", "-n", "1", "--model", str(_gguf())]
    ours: list[float] = []
    peer: list[float] = []
    for _ in range(max(3, bench.settings.fewest)):
        ours.append(_seconds(_gguf(), command))
        peer.append(_seconds(_gguf(), [sys.executable, "-c", "import torch"]))
    return _row("`regard generate`", "one token, from the shell", "import torch", ours, peer, None, "all of the process")


def _row(what: str, run: str, peer: str, ours: list[float], theirs: list[float], reach: Reach | None, note: str) -> Row:
    low, high = quartiles(ours)
    return Row(what, run, peer, median(ours), median(theirs), median(ours), low, high, reach, "seconds", note=note)


def _seconds(source: Path, command: list[str]) -> float:
    started = time.perf_counter()
    _fresh(source, command)
    return time.perf_counter() - started


def _fresh(source: Path, command: list[str]) -> str:
    for path in [source] if source.is_file() else sorted(source.iterdir()):
        _evict(path)
    env = os.environ | {"OMP_NUM_THREADS": str(THREADS), "REGARD_HOME": str(_home())}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout


def _evict(path: Path) -> None:
    if hasattr(os, "posix_fadvise"):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


@cache
def _home() -> Path:
    """A home of its own, with the model as `regard models get` leaves it and nothing that a use of it would keep."""
    home = Path(_KEPT.name)
    command = [sys.executable, "-m", "regard.cli.main", "models", "get", "smollm2"]
    subprocess.run(command, capture_output=True, check=True, env=os.environ | {"REGARD_HOME": str(home)})
    return home


def _gguf() -> Path:
    return next((_home() / "models" / "smollm2").glob("*.gguf"))


@cache
def _folder() -> Path:
    return hub.convert(_gguf(), _home() / "safetensors")


_KEPT = tempfile.TemporaryDirectory(prefix="regard-opening-")
