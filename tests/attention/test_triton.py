"""The Triton kernels: run in Triton's interpreter and read by its compiler, each in a process of its own; and who gets them."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from regard import Causal, Document, State, Window, explain

TESTS = Path(__file__).parent.parent
here = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (pip install 'regard[triton]')"
)


def ran(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=TESTS.parent, env=os.environ | environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@here
def test_a_share_of_the_cases_gives_the_definition_in_the_interpreter():
    said = ran("-m", "pytest", "-p", "no:xdist", "tests/interpreted", TRITON_INTERPRET="1", REGARD_INTERPRETED_SHARE="41")
    assert "100%" in said


@here
def test_the_compiler_reads_every_kernel(tmp_path):
    assert "kernels" in ran(str(TESTS / "interpreted" / "compile_kernels.py"), "front", TRITON_CACHE_DIR=str(tmp_path))


def test_nobody_else_imports_the_kernels():
    code = "import sys, torch, regard; q = torch.ones(1, 1, 2, 2); regard.attend(q, q, q, 'sparsemax'); print('regard.attention.triton.kernels' in sys.modules)"
    assert ran("-c", code).strip() == "False"


@pytest.fixture
def on(request):
    """q, k and v on a device that need not be there: a plan reads shapes alone."""

    def made(device, dtype=torch.float32, H=4, G=2, Q=64, K=64, D=16):
        return tuple(torch.empty(shape, device=device, dtype=dtype) for shape in ((2, H, Q, D), (2, G, K, D), (2, G, K, D)))

    with FakeTensorMode(allow_non_fake_inputs=True):
        yield made


@here
@pytest.mark.parametrize(
    ("line", "backend", "because"),
    [
        ("sparsemax", "triton", "its speed was never measured by us"),
        ("entmax(1.3) | alibi", "triton", "a kernel of our own"),
        ("euclidean | topk(4)", "triton", "a kernel of our own"),
        ("hard", "triton", "a kernel of our own"),
        ("gd(coherence=1)", "triton", "a kernel of our own"),
        ("selective", "tiled", "selective has no kernel"),
        ("topk(65)", "tiled", "more than 64 keys"),
        ("abstain(sparsemax, null_logit=0)", "tiled", "a slot beside the keys is for tiles"),
        ("dot", "sdpa", "torch's fused call"),
        ("euclidean", "columns", "torch's public fused call on cuda"),
        ("alibi", "columns", "a line in j"),
        ("abstain(softmax, null_logit=0)", "columns", "a slot is one more key"),
    ],
)
def test_what_runs_on_cuda(on, line, backend, because):
    made = explain(*on("cuda"), line, allow=Causal())
    assert (made.backend, because in str(made)) == (backend, True), str(made)


@pytest.mark.parametrize(("device", "backend"), [("cuda", "triton"), ("xpu", "tiled"), ("mps", "tiled"), ("cpu", "tiled")])
@here
def test_kernels_are_chosen_on_cuda_alone(on, device, backend):
    assert explain(*on(device), "sparsemax").backend == backend
    assert explain(*on(device), "dot").backend == "sdpa"


@here
def test_float64_has_no_kernel_on_a_device(on):
    assert explain(*on("cuda", torch.float64), "sparsemax").backend == "tiled"
    assert explain(*on("cuda", torch.float64), "euclidean").backend == "tiled"
    assert explain(*on("cuda", torch.bfloat16), "sparsemax").backend == "triton"


@here
def test_a_rule_that_is_no_range_of_keys_has_no_kernel(on):
    q, k, v = on("cuda")
    ids = torch.zeros(64, dtype=torch.long, device="cuda")
    for allow in (Causal(), Causal() & Window(5), Causal() & Document(ids)):
        assert explain(q, k, v, "sparsemax", allow=allow).backend == "triton"
    made = explain(q, k, v, "sparsemax", allow=~Window(5))
    assert made.backend == "tiled"
    assert "no range of keys" in str(made)


def test_without_triton_tiles_say_what_is_missing(on, monkeypatch):
    monkeypatch.setattr("regard.attention.triton.choice.installed", lambda: False)
    made = explain(*on("cuda"), "sparsemax", state=State())
    assert made.backend == "tiled"
    assert "pip install 'regard[triton]'" in str(made)
