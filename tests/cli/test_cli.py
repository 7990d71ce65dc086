"""The command: help without torch, errors that say what to type, plain output in a pipe."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from regard.cli.app import app
from regard.models import LlamaConfig
from regard.models.convert import save
from regard.models.tokenizer import load_tokenizer

RUN = CliRunner()


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REGARD_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 256 tokens, one per byte, with a tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    save(LlamaConfig(vocabulary=256, width=32, depth=2, heads=4, key_heads=2, hidden=48).build(), folder)
    letters = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    t = Tokenizer(models.BPE(vocab=letters, merges=[]))
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.save(str(folder / "tokenizer.json"))
    return folder


def shell(*arguments: str, **given: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "regard.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **given}, timeout=120, check=False)


def test_help_is_printed_without_importing_torch():
    code = "import sys; sys.argv = ['regard', '--help']\nfrom regard.cli.main import main\ntry: main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "regard models get smollm2" in done.stdout


@pytest.mark.parametrize("verb", [["generate"], ["models", "get"], ["models", "list"], ["models", "show"],
                                  ["models", "convert"], ["explain"], ["bench"], ["train"]])  # fmt: skip
def test_help_of_every_verb_shows_an_example(verb: list[str]):
    done = RUN.invoke(app, [*verb, "--help"])
    assert done.exit_code == 0
    assert f"regard {' '.join(verb)}" in done.stdout


def test_generate_streams_text_in_a_pipe_and_repeats_it(model: Path):
    arguments = ["generate", "The sea", "--model", str(model), "-n", "8", "-t", "0.9", "--seed", "4"]
    first, second = RUN.invoke(app, arguments), RUN.invoke(app, arguments)
    assert first.exit_code == 0, first.output
    assert first.stdout.startswith("The sea")
    assert first.stdout == second.stdout
    assert "\x1b" not in first.stdout


def test_generate_gives_json_and_takes_another_attention(model: Path):
    done = RUN.invoke(app, ["generate", "ab", "-m", str(model), "-n", "5", "--json", "--attention", "cosine | entmax(1.5)"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert len(found["tokens"]) == found["count"] == 5
    assert found["text"] == load_tokenizer(model).decode(found["tokens"])


def test_generate_guesses_and_says_how_many_were_right(model: Path):
    asked = ["generate", "abcabcabcabc", "-m", str(model), "-n", "20", "--json"]
    plain, guessed = (RUN.invoke(app, [*asked, *more]) for more in ([], ["--speculate", "4"]))
    assert guessed.exit_code == 0, guessed.output
    first, second = json.loads(plain.stdout), json.loads(guessed.stdout)
    assert second["tokens"] == first["tokens"]
    assert 0 <= second["accepted"] <= second["drafted"]
    assert "drafted" not in first


def test_generate_reads_stdin_and_int8(model: Path):
    done = RUN.invoke(
        app, ["generate", "-", "-m", str(model), "-n", "3", "--weights", "int8", "--cache", "int8"], input="hello"
    )
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("hello")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "hi"], "regard models get smollm2"),
        (["generate", "hi", "-m", "nowhere/model"], "regard models get nowhere/model"),
        (["models", "show", "a b"], "is no model"),
        (["generate", "hi", "-m", "smolm2"], "did you mean smollm2?"),
        (["models", "get", "smolm2"], "did you mean smollm2?"),
        (["models", "get", "zebra"], "owner/model, or hub:model"),
        (["explain", "cosin | softmax"], "did you mean cosine"),
        (["explain", "--q", "1,2,3"], "four numbers"),
        (["explain", "--allow", "windy"], "window:512"),
        (["explain", "--dtype", "int8"], "choose one of float32"),
    ],
)
def test_errors_say_what_to_type_and_exit_with_2(arguments: list[str], says: str):
    done = RUN.invoke(app, arguments)
    assert done.exit_code == 2
    assert says in done.stderr
    assert "Traceback" not in done.output


def test_wrong_options_of_generate_teach(model: Path):
    for wrong, says in (
        (["--top-p", "0.9"], "greedy"),
        (["--weights", "int4"], "float32, int8 or q4"),
        (["--attention", "entmx"], "did you mean entmax"),
        (["--system", "a poet"], "--chat"),
        (["--chat"], "chat template"),
    ):
        done = RUN.invoke(app, ["generate", "hi", "-m", str(model), *wrong])
        assert (done.exit_code, says in done.stderr) == (2, True), done.output


def test_unknown_verb_exits_with_2():
    assert RUN.invoke(app, ["genrate"]).exit_code == 2


def test_explain_prints_the_plan():
    done = RUN.invoke(app, ["explain", "trace | entmax(1.5)", "--q", "1,8,64,32", "--k", "1,2,64,32"])
    assert done.exit_code == 0, done.output
    assert "backend  tiled" in done.stdout
    assert "because" in done.stdout


def test_models_list_names_what_can_be_had():
    done = RUN.invoke(app, ["models", "list"])
    assert done.exit_code == 0
    assert "regard models get smollm2" in done.stdout


def test_models_show_and_convert(model: Path, tmp_path: Path):
    shown = RUN.invoke(app, ["models", "show", str(model)])
    assert shown.exit_code == 0, shown.output
    assert "llama" in shown.stdout
    done = RUN.invoke(app, ["models", "convert", str(model), str(tmp_path / "new")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "new" / "model.safetensors").is_file()
    again = RUN.invoke(app, ["models", "convert", str(model), str(tmp_path / "new")])
    assert again.exit_code == 2


def test_another_tokenizer_is_used_and_one_that_is_too_large_is_refused(model: Path, tmp_path: Path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((model / name).read_bytes())
    alone = RUN.invoke(app, ["generate", "ab", "-m", str(bare), "-n", "2"])
    assert (alone.exit_code, "--tokenizer" in alone.stderr) == (2, True), alone.output
    done = RUN.invoke(app, ["generate", "ab", "-m", str(bare), "-n", "2", "--tokenizer", str(model / "tokenizer.json")])
    assert done.exit_code == 0, done.output
    done = RUN.invoke(app, ["models", "convert", str(bare), str(tmp_path / "new"), "--tokenizer", str(model)])
    assert done.exit_code == 0, done.output
    assert load_tokenizer(tmp_path / "new").encode("ab") == load_tokenizer(model).encode("ab")
    pieces = Path(__file__).parents[1] / "models" / "sentencepiece" / "bpe.model"
    wrong = RUN.invoke(app, ["generate", "ab", "-m", str(bare), "--tokenizer", str(pieces)])
    assert (wrong.exit_code, "700 tokens and the model 256" in wrong.stderr) == (2, True), wrong.output


def test_bench_outside_a_checkout_says_where_to_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    done = RUN.invoke(app, ["bench"])
    assert done.exit_code == 2
    assert "make bench" in done.stderr


def test_bench_runs_the_comparisons_of_the_checkout_around_it(tmp_path: Path):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "benchmarks" / "harness.py").write_text("")
    (tmp_path / "benchmarks" / "__main__.py").write_text("import sys; print('measured', sys.argv[1:])")
    # As the console script starts: the folder it is called in is not on the path.
    command = [sys.executable, "-P", "-m", "regard.cli.main", "bench", "trace", "--quick", "--device", "cuda"]
    done = subprocess.run(command, cwd=tmp_path / "deep" / "er", capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "measured ['trace', '--quick', '--device', 'cuda']"), done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="signals differ")
def test_interrupt_exits_with_130_and_no_traceback(model: Path):
    command = [sys.executable, "-m", "regard.cli.main", "generate", "x", "-m", str(model), "-n", "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(3)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in said


def test_version_is_printed():
    done = shell("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("regard ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["explain", "--q", "1,8,99999999999,64"], "larger than this machine can hold"),
        (["explain", "--q", "1,8," + "9" * 30 + ",64"], "larger than this machine can hold"),
        (["explain", "trace", "--q", "1,8,16,10000000"], "larger than this machine can hold"),
        (["explain", "--allow", "window:²"], "choose causal, all or window:N"),
        (["explain", "--allow", "window:" + "9" * 30], "choose causal, all or window:N"),
        (["study", "run", "identity", "--workers", "100000"], "1 to 256"),
        (["study", "run", "identity", "--engine", "threads"], "not one of processes, ray"),
        (["study", "run", "idntity"], "did you mean 'identity'"),
        (["study", "show", "nothing"], "no study is called"),
        (["study", "report", "--out", "nowhere"], "nothing is measured"),
                (["generate", "x", "-m", "MODEL", "-n", "2", "--seed", "9" * 30], "at most 63 bits"),
        (["generate", "\udcff", "-m", "MODEL", "-n", "2"], "not UTF-8 text"),
                (["models", "convert", "MODEL", "MODEL/config.json"], "config.json"),
    ],
)  # fmt: skip
def test_numbers_and_texts_that_make_no_sense_are_one_line(model: Path, arguments: list[str], says: str):
    done = RUN.invoke(app, [a.replace("MODEL", str(model)) for a in arguments])
    assert isinstance(done.exception, SystemExit), repr(done.exception)
    assert done.exit_code == 2
    assert says in done.output
    assert "Traceback" not in done.output


def test_a_warning_of_the_library_is_one_line_and_a_seed_may_be_negative(model: Path):
    done = RUN.invoke(app, ["generate", "x" * 9000, "-m", str(model), "-n", "2", "--seed", "-1"])
    assert done.exit_code == 0, done.output
    assert "note: 9,000 tokens are past this model's context" in done.output


def test_rubbish_on_stdin_is_one_line(model: Path):
    done = RUN.invoke(app, ["generate", "-", "-m", str(model), "-n", "2"], input=b"caf\xe9")
    assert done.exit_code == 2
    assert "not UTF-8 text" in done.output
