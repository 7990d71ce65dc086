"""A family that is one file and one row: decoded, lived with, saved and trained, and no other file knows of it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from regard import CombinationError, Identity, imprint, living, observe
from regard.identity.body import base_of
from regard.models import FAMILIES, CausalModel, Family, Sampling, generate, open_model
from regard.models.convert import load
from regard.models.decode.cache import static_caches
from regard.models.decode.prepare import prepare
from regard.train import config, train

SOURCE = '''
from dataclasses import dataclass

import torch
from torch import nn

from regard.models.base import CausalModel
from regard.models.blocks import Block, FeedForward, layer_specs
from regard.nn import Attention
from regard.position import Rope


@dataclass(frozen=True)
class LoudConfig:
    vocabulary: int = 64
    width: int = 32
    depth: int = 2
    heads: int = 4
    loudness: float = 2.0
    attention: str | tuple[str, ...] = "dot | softmax"

    def build(self):
        return Loud(self)


class Loud(CausalModel):
    """Embeddings times `loudness`, logits through a soft cap."""

    family = "loud"

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.embed = nn.Embedding(c.vocabulary, c.width)
        self.blocks = nn.ModuleList(
            Block(Attention(c.width, c.heads, spec), FeedForward(c.width, 2 * c.width), (nn.RMSNorm(c.width), nn.LayerNorm(c.width)))
            for spec in layer_specs(c.attention, c.depth, Rope())
        )
        self.norm = nn.LayerNorm(c.width)
        self.head = nn.Linear(c.width, c.vocabulary)

    def start(self, tokens, at=0, positions=None):
        return super().start(tokens, at, positions) * self.config.loudness

    def readout(self, last, head=None):
        return 3 * torch.tanh(super().readout(last, head) / 3)
'''


@pytest.fixture
def loud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The family's module, with its row in the table for one test."""
    path = tmp_path / "loud.py"
    path.write_text(SOURCE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("loud", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "loud", module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(FAMILIES, "loud", Family(module.Loud, module.LoudConfig, small={"width": 32, "depth": 2, "heads": 4}))
    return module


@pytest.fixture
def model(loud: ModuleType) -> CausalModel:
    torch.manual_seed(3)
    return loud.LoudConfig().build().eval()


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize(("weights", "near"), [("float32", 1e-5), ("int8", 0.1)])
def test_it_decodes_step_by_step_as_it_reads_the_whole(
    model: CausalModel, tokens: torch.Tensor, weights: str, near: float
) -> None:
    with torch.no_grad():
        whole = model(tokens).logits
    decoder = prepare(model, weights)  # pyright: ignore[reportArgumentType]
    assert decoder.stack is not None, "its blocks are plain, so its products are laid out"
    caches, parts = static_caches(decoder.depth, 9), []
    for part in tokens.split((4, 1, 2, 1, 1), dim=1):
        logits, caches = decoder(part, caches, every=True)
        parts.append(logits)
    assert (torch.cat(parts, dim=1) - whole).abs().max() < near
    assert 0.5 < whole.abs().max() <= 3, "the soft cap is obeyed, and matters"


def test_rows_of_different_lengths_write_as_they_do_alone(model: CausalModel) -> None:
    prompts = [[1, 2, 3, 4, 5, 6], [7], [8, 9, 10]]
    together = generate(model, prompts, Sampling(max_tokens=6)).tokens
    assert together == [generate(model, [p], Sampling(max_tokens=6)).tokens[0] for p in prompts]


def test_an_identity_lives_in_it(model: CausalModel, tokens: torch.Tensor) -> None:
    assert base_of(model).family == "loud"
    grown = imprint(Identity.new(base_of(model)), observe(model, tokens[0]))
    with torch.no_grad():
        plain = model(tokens).logits
        with living(model, grown):
            lived = model(tokens).logits
            caches, parts = static_caches(model.cache_count, 9), []
            for part in tokens.split((4, 1, 4), dim=1):
                logits, caches = prepare(model)(part, caches, every=True)
                parts.append(logits)
        assert torch.equal(model(tokens).logits, plain)
    assert (lived - plain).abs().max() > 1e-4
    torch.testing.assert_close(torch.cat(parts, dim=1), lived, rtol=1e-4, atol=1e-5)


def test_it_is_saved_and_loaded_under_its_own_name(model: CausalModel, tokens: torch.Tensor, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved").eval()
    assert again.config == model.config
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)
        other = type(model).from_pretrained(tmp_path / "saved", attention="cosine | entmax(1.5)").eval()
        assert (other(tokens).logits - model(tokens).logits).abs().max() > 1e-4


def test_it_trains(loud: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quality of mercy is not strained. " * 40, encoding="utf-8")
    chosen = config(
        {"model": {"family": "loud", "loudness": 1.5}, "data": {"source": str(tmp_path / "text.txt"), "context": 16}},
        ["train.steps=12", "train.batch=8", "train.device=cpu", "optim.warmup=2", f"data.cache={tmp_path / 'tokens'}"],
    )
    result = train(chosen, tmp_path / "run", quiet=True)
    assert result.validation is not None
    assert result.validation < 2.9, "less than the log of its 20 letters"
    learned, tokenizer = open_model(tmp_path / "run")
    assert isinstance(learned, loud.Loud)
    assert learned.config.loudness == 1.5
    assert len(generate(learned, tokenizer.encode("mercy"), Sampling(max_tokens=3)).tokens[0]) == 3


def test_a_block_that_does_more_is_left_alone(model: CausalModel, tokens: torch.Tensor) -> None:
    block = model.blocks[0]

    class Doubled(type(block)):
        def forward(self, x, context):  # pyright: ignore
            y, cache, seen = super().forward(x, context)
            return 2 * y, cache, seen

    block.__class__ = Doubled
    with torch.no_grad():
        whole = model(tokens).logits
    assert torch.equal(prepare(model)(tokens, static_caches(2, 9), every=True)[0], whole)
    with pytest.raises(CombinationError, match="its own forward, which has no int8 weights"):
        prepare(model, "int8")
    with pytest.raises(CombinationError, match="blocks have to be plain"):
        base_of(model)
