"""lm-eval, with a task of a few lines and the server's own tokenizer: its log-likelihoods are those of the model in process."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import BIN, ROOT, Server, environment, regard

TASKS = Path(__file__).resolve().parent / "tasks"
# Nothing is fetched: the task is here, and so are its lines.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@pytest.fixture(scope="session", params=["tiny", "smollm2"])
def served(request: pytest.FixtureRequest, server: Server, folder: Path) -> Iterator[Server]:
    if request.param == "tiny":
        yield server
        return
    regard(folder, "models", "get", "smollm2")
    with Server(folder, model="smollm2") as real:
        yield real


def evaluate(server: Server, task: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setenv("HF_HOME", str(cache))
    monkeypatch.chdir(TASKS)
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": Path(server.model).name, "base_url": server.url + "/v1/completions", "tokenizer_backend": "remote",
            "num_concurrent": 4, "max_retries": 1, "max_length": 1024,
        },
        tasks=[task], task_manager=TaskManager(include_path=str(TASKS), include_defaults=False), log_samples=True,
        bootstrap_iters=0,
    )  # fmt: skip
    assert found is not None
    return found["samples"][task]


def test_log_likelihoods_are_those_of_the_model_in_process(
    served: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = evaluate(served, "regard_boats", tmp_path, monkeypatch)
    pairs, told = [], []
    for sample in samples:
        for asked, answered in zip(sample["arguments"], sample["resps"], strict=True):
            pairs.append(asked)
            told.append(float(answered[0][0]))
    done = subprocess.run(
        [str(BIN / "python"), str(TASKS.parent / "inside.py"), "scores", served.model], input=json.dumps(pairs), text=True,
        capture_output=True, cwd=ROOT, env=environment(served.folder), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(told) == 15
    assert len({round(x, 3) for x in told}) > 10
    assert told == pytest.approx(json.loads(done.stdout), abs=1e-4)


def test_texts_are_generated_until_they_are_to_end(served: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = evaluate(served, "regard_words", tmp_path, monkeypatch)
    assert len(samples) == 6
    assert all("\n" not in s["resps"][0][0] and "." not in s["resps"][0][0] for s in samples)
