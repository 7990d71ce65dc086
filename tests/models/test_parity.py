"""Ours and transformers' with the same numbers give the same logits: padded and not, cached and not, there and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf
from tiny import BERTS, DECODERS, T5S, both, near, tokens

from regard import Padding
from regard.models import Bert, Llama, Model, mean_pooled
from regard.models.convert import load
from regard.nn import Cache

LENGTHS = torch.tensor([11, 7])


@pytest.fixture(autouse=True)
def _no_gradients() -> object:
    with torch.no_grad():
        yield


def real(lengths: torch.Tensor, side: str, length: int = 11) -> torch.Tensor:
    at = torch.arange(length)
    return at < lengths[:, None] if side == "right" else at >= length - lengths[:, None]


@pytest.mark.parametrize("name", DECODERS)
def test_logits_agree(name: str, tmp_path: Path) -> None:
    ours, theirs = both(DECODERS[name], tmp_path)
    for length in (1, 11, 40):
        x = tokens(2, length)
        near(ours(x).logits, theirs(input_ids=x).logits)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_padded_logits_agree_where_tokens_are_real(name: str, side: str, tmp_path: Path) -> None:
    ours, theirs = both(DECODERS[name], tmp_path)
    x, keep = tokens(2, 11), real(LENGTHS, side)
    places = (keep.cumsum(-1) - 1).clamp_min(0)
    given = {} if isinstance(ours, Llama) else {"positions": places}
    mine = ours(x, allow=Padding(LENGTHS, side=side), **given).logits
    near(mine[keep], theirs(input_ids=x, attention_mask=keep.long(), position_ids=places).logits[keep])
    # And a row's padding tells it nothing.
    changed = ours(torch.where(keep, x, 5), allow=Padding(LENGTHS, side=side), **given).logits
    near(changed[keep], mine[keep], 1e-5)


def stepped(model: Model, x: torch.Tensor, cuts: tuple[int, ...]) -> torch.Tensor:
    caches: tuple[Cache, ...] | None = tuple(Cache() for _ in range(model.config.depth))
    parts = []
    for part in x.split(cuts, dim=1):
        out = model(part, caches=caches)
        caches = out.caches
        parts.append(out.logits)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("name", DECODERS)
def test_cached_logits_agree(name: str, tmp_path: Path) -> None:
    ours, theirs = both(DECODERS[name], tmp_path)
    x = tokens(2, 11)
    mine = stepped(ours, x, (5, 1, 1, 3, 1))
    near(mine, theirs(input_ids=x).logits)
    first = theirs(input_ids=x[:, :5], use_cache=True)
    then = theirs(input_ids=x[:, 5:6], past_key_values=first.past_key_values, use_cache=True)
    near(mine[:, 5:6], then.logits)


@pytest.mark.parametrize("name", DECODERS)
def test_way_back_transformers_loads_what_we_save(name: str, tmp_path: Path) -> None:
    ours, theirs = both(DECODERS[name], tmp_path / "in")
    ours.save_pretrained(tmp_path / "out")
    again, info = type(theirs).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    x = tokens(2, 11)
    assert torch.equal(again.eval()(input_ids=x).logits, theirs(input_ids=x).logits)
    assert load(tmp_path / "out").config == ours.config


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn"])
def test_scaling_of_rope_matters_in_these_models(kind: str, tmp_path: Path) -> None:
    ours, _ = both(DECODERS[f"llama, {kind}"], tmp_path)
    plain, x = load(tmp_path, rope=type(ours.config.rope)(base=500.0)), tokens(2, 40)
    assert (ours(x).logits - plain.eval()(x).logits).abs().max() > 1e-2


def test_old_and_new_names_of_rope_fields_read_the_same(tmp_path: Path) -> None:
    import json

    ours, _ = both(DECODERS["llama, llama3"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    new = config.pop("rope_parameters")
    config["rope_theta"] = new.pop("rope_theta")
    config["rope_scaling"] = {"type": new.pop("rope_type"), **new}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(tmp_path).config == ours.config


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", BERTS)
def test_bert_agrees(name: str, side: str | None, tmp_path: Path) -> None:
    ours, theirs = both(BERTS[name], tmp_path)
    assert isinstance(ours, Bert)
    x, kinds = tokens(2, 11), tokens(2, 11) % 2
    keep = torch.ones(2, 11, dtype=torch.bool) if side is None else real(LENGTHS, side)
    mine = ours(x, types=kinds, allow=None if side is None else Padding(LENGTHS, side=side))
    out = theirs(input_ids=x, token_type_ids=kinds, attention_mask=keep.long())
    if ours.config.guesses:
        near(mine.logits[keep], (out.prediction_logits if name == "both" else out.logits)[keep])
    if ours.config.pools and name == "pools":
        near(mine.last[keep], out.last_hidden_state[keep])
        if side != "left":
            near(mine.pooled, out.pooler_output)
    ours.save_pretrained(tmp_path / "out")
    again = type(theirs).from_pretrained(tmp_path / "out").eval()
    back = again(input_ids=x, token_type_ids=kinds, attention_mask=keep.long())
    assert torch.equal(back[0], out[0])
    assert load(tmp_path / "out").config == ours.config


def test_a_sentence_vector_is_the_unit_mean_of_real_tokens() -> None:
    last, keep = torch.randn(2, 11, 5), real(LENGTHS, "right")
    vectors = mean_pooled(last, keep)
    torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(2))
    torch.testing.assert_close(mean_pooled(last, keep, unit=False)[1], last[1, :7].mean(0))


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", T5S)
def test_t5_agrees(name: str, side: str | None, tmp_path: Path) -> None:
    ours, theirs = both(T5S[name], tmp_path)
    x, y = tokens(2, 11), tokens(2, 9, seed=4)
    keep = torch.ones(2, 11, dtype=torch.bool) if side is None else real(LENGTHS, side)
    rule = None if side is None else Padding(LENGTHS, side=side)
    out = theirs(input_ids=x, attention_mask=keep.long(), decoder_input_ids=y).logits
    near(ours(y, source=x, source_allow=rule).logits, out)
    caches, parts = ours.begin(x, rule), []
    for part in y.split((4, 1, 1, 3), dim=1):
        step = ours(part, caches=caches, source_allow=rule)
        caches = step.caches
        parts.append(step.logits)
    near(torch.cat(parts, dim=1), out)
    # transformers sizes its cache by the encoder's depth, so with a deeper decoder it can only do without.
    written = theirs.generate(input_ids=x, attention_mask=keep.long(), max_new_tokens=6, do_sample=False, use_cache=False)[
        :, 1:
    ]
    assert torch.equal(ours.respond(x, limit=6, allow=rule)[:, : written.shape[1]], written.masked_fill(written == 0, 1))


@pytest.mark.parametrize("name", T5S)
def test_t5_goes_back(name: str, tmp_path: Path) -> None:
    ours, theirs = both(T5S[name], tmp_path)
    ours.save_pretrained(tmp_path / "out")
    again = hf.T5ForConditionalGeneration.from_pretrained(tmp_path / "out").eval()
    x, y = tokens(2, 11), tokens(2, 9, seed=4)
    same = {"input_ids": x, "decoder_input_ids": y}
    assert torch.equal(again(**same).logits, theirs(**same).logits)
    assert load(tmp_path / "out").config == ours.config
