"""One file of attention: what is packed into it is what the model weighs, and nothing in it reaches out or runs by accident."""

from __future__ import annotations

import base64
import json
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.test_cli_identity import tiny
from typer.testing import CliRunner

import regard
from regard.cli.app import app
from regard.errors import ShapeError, StateError
from regard.identity import Identity, Rule, imprint, observe
from regard.identity.body import base_of
from regard.models import BertConfig, Model
from regard.models.downloads import open_model
from regard.models.tokenizer import Tokenizer
from regard.serve.attention import AttentionReader
from regard.serve.view import packed_head, view

TEXT = "My cat is called Mochi."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("tiny"), 0)


@pytest.fixture(scope="module")
def opened(folder: Path) -> tuple[Model, Tokenizer]:
    model, tokenizer = open_model(folder)
    return model.eval(), tokenizer


def data_of(page: str) -> Any:
    (found,) = re.findall(r'<script type="application/json" id="regard-data">(.*?)</script>', page, re.S)
    return json.loads(found)


def unpacked(head: dict[str, Any], keys: int) -> tuple[torch.Tensor, list[bool]]:
    """As the page's script does it."""
    raw, rows, accepted = zlib.decompress(base64.b64decode(head["data"])), list[torch.Tensor](), list[bool]()
    at = 0
    while at < len(raw):
        (count,) = struct.unpack_from("<H", raw, at)
        accepted.append(not count & 0x8000)
        count &= 0x7FFF
        columns = struct.unpack_from(f"<{count}H", raw, at + 2)
        codes = struct.unpack_from(f"<{count}{'b' if head['signed'] else 'B'}", raw, at + 2 + 2 * count)
        row = torch.zeros(keys)
        row[list(columns)] = torch.tensor(codes, dtype=torch.float32) / (127 if head["signed"] else 255) * head["scale"]
        rows.append(row)
        at += 2 + 3 * count
    return torch.stack(rows), accepted


def test_weights_in_the_file_are_the_models_own_to_a_255th(opened: tuple[Model, Tokenizer]):
    model, tokenizer = opened
    made = regard.view(model, TEXT, tokenizer, spec="abstain(softmax, null_logit=1)")
    data = data_of(made.html)
    reader = AttentionReader(model, tokenizer)
    tokens = reader.encode(TEXT)
    assert data["views"][0]["chosen"] == [0, 1]
    assert "".join(data["views"][0]["tokens"]) == TEXT
    for one, spec in zip(data["views"], (None, "abstain(softmax, null_logit=1)"), strict=True):
        for layer in (0, 1):
            seen = reader.read(tokens, layer, spec=spec)
            for head in range(4):
                weights, accepted = unpacked(one["packed"][str(layer)][head], len(tokens))
                real = seen.attended.weights()[0, head]
                assert float((weights - real).abs().max()) <= 0.51 / 255 + 1e-3
                assert accepted == seen.attended.accepted[0, head].tolist()


def test_negative_weights_keep_their_sign():
    weights = torch.tensor([[0.5, -0.25, 0.0], [0.0, 0.0, 2.0]])
    head = packed_head(weights, torch.tensor([True, False]))
    back, accepted = unpacked(head, 3)
    torch.testing.assert_close(back, weights, atol=2 / 127, rtol=0)
    assert head["signed"]
    assert accepted == [True, False]


def test_slots_of_an_identity_are_in_the_file(opened: tuple[Model, Tokenizer]):
    model, tokenizer = opened
    who = imprint(Identity.new(base_of(model)), observe(model, "I am Mara.", tokenizer), Rule(episodes=False))
    data = data_of(view(model, "Who?", tokenizer, identity=who, name="mara", layers=[-1]).html)
    (one,) = data["views"]
    assert len(one["slots"]) == len(who.imprints) > 0
    assert one["chosen"] == [1]
    weights, _ = unpacked(one["packed"]["1"][0], len(one["slots"]) + 4)
    assert weights[3, : len(one["slots"])].any()
    assert data["identity"] == "mara"


def test_text_cannot_leave_its_place_in_the_file(opened: tuple[Model, Tokenizer]):
    nasty = "</script><script>alert(1)</script><!-- & \u2028"
    made = view(*[opened[0], nasty, opened[1]])
    assert "<script>alert" not in made.html
    assert data_of(made.html)["title"] == nasty
    assert made.html.count("<script") == 2
    assert "</script" not in made._repr_html_().replace("&lt;/script", "")


def test_file_loads_nothing_and_runs_nothing_but_its_own_script(opened: tuple[Model, Tokenizer]):
    made = view(opened[0], TEXT, opened[1])
    (policy,) = re.findall(r'Content-Security-Policy" content="(.*?)"', made.html)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert not re.findall(r'(?:src|href)="(?!data:)', made.html.split("<body>")[0])


def test_too_large_a_file_is_refused_with_what_fits(opened: tuple[Model, Tokenizer]):
    with pytest.raises(ShapeError, match=r"name fewer layers"):
        view(opened[0], TEXT * 8, opened[1], limit=3000)


@pytest.mark.parametrize(
    ("given", "said"),
    [({"layers": [7]}, "layers 0 to 1"), ({"layers": []}, "at least one"), ({"spec": ["hard"] * 4}, "3 are compared")],
)
def test_what_cannot_be_shown_is_refused(opened: tuple[Model, Tokenizer], given: dict[str, Any], said: str):
    with pytest.raises(ShapeError, match=said):
        view(opened[0], TEXT, opened[1], **given)
    with pytest.raises(ShapeError, match="0 tokens"):
        view(opened[0], "", opened[1])
    with pytest.raises(StateError, match="tokenizer"):
        view(opened[0], TEXT)


def test_a_model_that_reads_both_ways_is_shown_too(opened: tuple[Model, Tokenizer]):
    torch.manual_seed(0)
    model = BertConfig(vocabulary=256, width=32, depth=1, heads=2, hidden=48, context=64).build().eval()
    (one,) = data_of(view(model, "both ways", opened[1]).html)["views"]
    weights, _ = unpacked(one["packed"]["0"][0], len(one["tokens"]))
    assert weights[0, -1] > 0


def test_notebooks_show_it_in_a_frame_of_its_own(opened: tuple[Model, Tokenizer], tmp_path: Path):
    made = view(opened[0], TEXT, opened[1])
    assert made._repr_html_().startswith("<iframe srcdoc=")
    assert 'sandbox="allow-scripts allow-downloads"' in made._repr_html_()
    assert made.save(tmp_path / "view.html").read_text(encoding="utf-8") == made.html
    assert repr(made).startswith("View('My cat is called Mochi.'")


# -- the command ---------------------------------------------------------------------------------------------------------


def test_command_writes_the_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("REGARD_HOME", str(tmp_path / "home"))
    out = tmp_path / "sea.html"
    run = CliRunner().invoke(app, ["view", TEXT, "-m", str(folder), "-o", str(out), "--layers", "1", "--spec", "hard"])
    assert run.exit_code == 0, run.output
    assert "open it in a browser" in run.output
    data = data_of(out.read_text(encoding="utf-8"))
    assert data["views"][1]["spec"].startswith("dot | hard")
    assert data["views"][0]["chosen"] == [1]
    assert data["model"] == folder.name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layers", "a"], "0,12,29 or 4-9"),
        (["--identity", "nobody"], "nobody"),
        (["--spec", "xyz"], "xyz"),
        (["--layers", "0-99"], "layers 0 to 1"),
    ],
)
def test_command_says_what_is_wrong(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
):
    monkeypatch.setenv("REGARD_HOME", str(tmp_path / "home"))
    run = CliRunner().invoke(app, ["view", TEXT, "-m", str(folder), "-o", str(tmp_path / "x.html"), *arguments])
    assert run.exit_code == 2
    assert said in run.output
    assert not (tmp_path / "x.html").exists()
