"""A core-only install: every package that is missing names the extra that brings it, in one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from regard.cli.main import NEEDS

ROOT = Path(__file__).parents[2]
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
MODULES = {"pyyaml": "yaml", "huggingface-hub": "huggingface_hub"}
BLOCK = """
import sys
class Without:
    def __init__(self, inner):
        self.inner = inner
    def __getattr__(self, name):
        return getattr(self.inner, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {blocked!r} else self.inner.find_spec(name, path, target)
sys.meta_path[:] = map(Without, sys.meta_path)
"""
CALLS = [
    (["generate", "hi", "-m", "MODEL", "-n", "1"], "models"),
    (["models", "show", "MODEL/model.gguf"], "models"),
    (["chat", "-m", "MODEL"], "models"),
    (["chat", "-m", "MODEL", "-i", "mara"], "identity"),
    (["imprint", "diary.txt", "-m", "MODEL", "-i", "mara"], "identity"),
    (["sleep", "-m", "MODEL", "-i", "mara"], "identity"),
    (["identity", "list"], "identity"),
    (["identity", "list", "--store", "postgresql://host/people"], "postgres"),
    (["train", "--show"], "train"),
]


def packages(*extras: str) -> set[str]:
    names = (re.split(r"[\[>=]", line)[0] for extra in extras for line in EXTRAS[extra] if not line.startswith("regard"))
    return {MODULES.get(name, name) for name in names}


def without(blocked: set[str], code: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    program = BLOCK.format(blocked=blocked) + f"sys.argv = {['regard', *arguments]!r}\n" + code
    env = {**os.environ, "REGARD_HOME": str(cwd / "home")}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)


OPTIONAL = packages(*(extra for extra in EXTRAS if extra not in ("dev", "docs")))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from tokenizers import Tokenizer, models

    from regard.models import LlamaConfig
    from regard.models.convert import save

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    save(LlamaConfig(vocabulary=16, width=8, depth=1, heads=2, key_heads=1, hidden=8).build(), folder)
    Tokenizer(models.BPE(vocab={"h": 0, "i": 1}, merges=[])).save(str(folder / "tokenizer.json"))
    (folder / "model.gguf").touch()
    return folder


def test_every_verb_is_listed_with_the_extras_that_it_needs():
    from regard.cli.app import app

    verbs = {c.name or c.callback.__name__ for c in app.registered_commands if c.callback} | {
        g.name for g in app.registered_groups
    }
    assert verbs == set(NEEDS)
    assert {extra for line in NEEDS.values() for extra in line.split(",")} <= set(EXTRAS)


@pytest.mark.parametrize("arguments", [[], ["--help"], *([verb] for verb in NEEDS)], ids=str)
def test_a_core_only_command_is_one_line_that_names_all_extras_of_the_verb(arguments: list[str], tmp_path: Path):
    done = without(OPTIONAL, "from regard.cli.main import main; main()", *arguments, cwd=tmp_path)
    wanted = NEEDS.get(arguments[0], "cli") if arguments else "cli"
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert f"pip install 'regard[{wanted}]'" in done.stderr


@pytest.mark.parametrize(("arguments", "extra"), CALLS, ids=lambda x: x if isinstance(x, str) else " ".join(x[:2]))
def test_a_verb_without_one_of_its_extras_names_it(arguments: list[str], extra: str, model: Path, tmp_path: Path):
    (tmp_path / "diary.txt").write_text("I live in Porto.")
    others = packages(*(e for e in NEEDS[arguments[0]].split(",") if e != extra))
    given = [a.replace("MODEL", str(model)) for a in arguments]
    done = without(packages(extra) - others, "from regard.cli.main import main; main()", *given, cwd=tmp_path)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (done.returncode, len(errors), "Traceback" in done.stderr) == (2, 1, False), done.stderr
    assert re.search(rf"pip install 'regard\[[a-z,]*\b{extra}\b", errors[0]), errors


IMPORT_ALL = """
import importlib, pkgutil, regard
regard.attend, regard.inspect, regard.nn, regard.models, regard.train, dir(regard)
for module in pkgutil.walk_packages(regard.__path__, "regard.", onerror=lambda name: None):
    if not module.name.startswith("regard.cli."):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            assert "pip install 'regard[" in str(error), f"{module.name}: {error!r}"
            print(module.name)
"""


def test_without_any_extra_regard_imports_and_each_module_that_cannot_names_its_extra(tmp_path: Path):
    done = without(OPTIONAL, IMPORT_ALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lost = set(done.stdout.split())
    assert {"regard.identity", "regard.models.convert.hf"} <= lost
    core = {name for name in lost if name.split(".")[1] in ("attention", "geometry", "selection", "position", "nn", "train")}
    assert all(name.startswith("regard.attention.triton.") for name in core), core


def test_calls_that_need_a_package_name_its_extra(tmp_path: Path, model: Path):
    for call, extra in (
        (f"from regard.models.convert import load; load({str(model)!r})", "models"),
        ("from regard.models.chat import render; render('{{ messages }}', [])", "models"),
        ("from regard.models import downloads; downloads.get('owner/name')", "models"),
        ("import regard; regard.Identity", "identity"),
        ("from regard.train import config; config({}, ['train.steps=1'])", "train"),
    ):
        done = without(OPTIONAL, call, cwd=tmp_path)
        assert f"pip install 'regard[{extra}]'" in done.stderr.splitlines()[-1], done.stderr
