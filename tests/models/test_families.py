"""One suite over every family: cached equals whole, attention is a spec, what is looked at is there, saved comes back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from regard import CombinationError, Padding, ShapeError, SpecError
from regard.models import FAMILIES, CausalModel, Look, Model, Sampling, generate
from regard.models.blocks import FEED_FORWARDS
from regard.models.convert import load
from regard.models.decode.cache import static_caches
from regard.models.decode.prepare import prepare
from regard.nn import Cache

SIZES: dict[str, Any] = {"vocabulary": 31, "width": 24, "depth": 2, "heads": 4}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"context": 32}),
    "llama": ("llama", {"key_heads": 2, "hidden": 37}),
    "gpt2, norms after sums": ("gpt2", {"context": 32, "norm": "post"}),
    "llama, norms after sums": ("llama", {"key_heads": 2, "hidden": 37, "norm": "post"}),
    **{f"gpt2, {kind}": ("gpt2", {"context": 32, "activation": kind}) for kind in FEED_FORWARDS if kind != "gelu_tanh"},
    **{f"llama, {kind}": ("llama", {"key_heads": 2, "hidden": 37, "activation": kind}) for kind in ("relu", "gelu", "geglu")},
    "energy": ("energy", {"steps": 3}),
    "lstm": ("recurrent", {}),
    "gru, attending": ("recurrent", {"kind": "gru", "attention": "additive | softmax"}),
    "cnn": ("recurrent", {"kind": "cnn"}),
    "mixture": ("routing", {"experts": 5}),
    "noisy": ("routing", {"experts": 5, "gate": "noisy"}),
    "switch": ("routing", {"experts": 5, "chosen": 1, "capacity": 1.25}),
    "clustered": ("routing", {"experts": 1, "clusters": 3}),
}
"""Families in more forms than one; the others come as their row has them."""
FORMS = {name: (name, {}) for name in FAMILIES if name not in {family for family, _ in VARIANTS.values()}} | VARIANTS
CONFIGS = {n: FAMILIES[name].config(**FAMILIES[name].settings({**SIZES, **more})) for n, (name, more) in FORMS.items()}
WRITERS = [n for n, (name, _) in FORMS.items() if FAMILIES[name].model.instead is None]
ATTENTION = [n for n in FORMS if n not in ("energy", "lstm", "cnn")]


def made(name: str, **changes: Any) -> Model:
    torch.manual_seed(1)
    return replace(CONFIGS[name], **changes).build().eval()


def logits(model: Model, x: torch.Tensor, **given: Any) -> torch.Tensor:
    extra = {"source": x.flip(1)} if model.family == "t5" else {}
    return model(x, **extra, **given).logits


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", WRITERS)
def test_cached_decoding_equals_the_whole(name: str, x: torch.Tensor) -> None:
    model = made(name)
    with torch.no_grad():
        whole = model(x).logits
        caches, parts = [Cache()] * model.cache_count, []
        for part in x.split((4, 1, 2, 1, 1), dim=1):
            out = model(part, caches=caches)
            caches = out.caches
            parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", WRITERS)
def test_a_prepared_decoder_says_what_the_model_says(name: str, x: torch.Tensor) -> None:
    model = made(name)
    decoder = prepare(model)
    if isinstance(model, CausalModel):
        assert (decoder.stack is not None) is (model.plain_blocks() is not None)
    with torch.no_grad():
        whole = model(x).logits
    caches, parts = static_caches(decoder.depth, x.shape[1]), []
    for part in x.split((4, 1, 2, 1, 1), dim=1):
        logits, caches = decoder(part, caches, every=True)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", WRITERS)
def test_no_token_sees_a_later_one(name: str, x: torch.Tensor) -> None:
    model, other = made(name), x.clone()
    other[:, 5] = (other[:, 5] + 1) % 31
    with torch.no_grad():
        a, b = model(x).logits, model(other).logits
    torch.testing.assert_close(a[:, :5], b[:, :5], rtol=1e-5, atol=1e-6)
    assert (a[:, 5:] - b[:, 5:]).abs().max() > 1e-4


@pytest.mark.parametrize("name", WRITERS)
def test_rows_of_different_lengths_write_as_they_do_alone(name: str) -> None:
    model, prompts, sampling = made(name), [[1, 2, 3, 4, 5, 6], [7], [8, 9, 10]], Sampling(max_tokens=5, logprobs=0)
    together = generate(model, prompts, sampling)
    alone = [generate(model, [p], sampling) for p in prompts]
    assert together.tokens == [one.tokens[0] for one in alone]
    assert together.logprobs is not None
    for row, one in zip(together.logprobs, alone, strict=True):
        assert one.logprobs is not None
        assert row == pytest.approx(one.logprobs[0], abs=1e-4)


@pytest.mark.parametrize("name", FORMS)
def test_a_family_answers_to_the_name_of_its_row(name: str) -> None:
    family = FAMILIES[FORMS[name][0]]
    assert family.model.family == FORMS[name][0]
    assert type(made(name)) is family.model


@pytest.mark.parametrize("name", FORMS)
def test_saved_comes_back(name: str, x: torch.Tensor, tmp_path: Path) -> None:
    model = made(name)
    model.save_pretrained(tmp_path)
    again = load(tmp_path).eval()
    assert type(again) is type(model)
    own = dict(again.named_parameters())
    assert all(torch.equal(p, own[n]) for n, p in model.named_parameters())
    with torch.no_grad():
        # The same numbers elsewhere in memory: products of small matrices may round otherwise there.
        torch.testing.assert_close(logits(again, x), logits(model, x), rtol=1e-5, atol=1e-6)
    if FAMILIES[model.family].converter is None:
        assert again.config == model.config


@pytest.mark.parametrize("spec", ["cosine | entmax(1.5)", "dot | topk(2)", "euclidean | softmax | alibi"])
@pytest.mark.parametrize("name", ATTENTION)
def test_every_family_takes_a_spec_and_it_matters(name: str, spec: str, x: torch.Tensor) -> None:
    with torch.no_grad():
        usual, other = logits(made(name), x), logits(made(name, attention=spec), x)
    assert torch.isfinite(other).all()
    assert usual.shape == other.shape == (2, 9, 31)
    assert (usual - other).abs().max() > 1e-5


@pytest.mark.parametrize("name", [n for n in ATTENTION if n != "gru, attending"])
def test_a_spec_for_each_layer_and_no_other_number(name: str) -> None:
    model = made(name, attention=("entmax(1.5)", "softmax"))
    names = [str(m.spec.selection) for m in model.modules() if hasattr(m, "spec")]
    assert "entmax" in names
    assert "softmax" in names
    with pytest.raises(SpecError, match="3 attention specs for 2 layers"):
        made(name, attention=("softmax",) * 3)


@pytest.mark.parametrize("name", FORMS)
def test_what_is_asked_for_is_seen(name: str, x: torch.Tensor) -> None:
    model = made(name)
    extra = {"source": x} if model.family == "t5" else {}
    with torch.no_grad():
        plain, seen = model(x, **extra), model(x, **extra, look=Look(hidden=True, attention=True))
    assert plain.hidden is None
    assert plain.attended is None
    torch.testing.assert_close(seen.logits, plain.logits, rtol=1e-4, atol=1e-5)
    assert len(seen.hidden) >= CONFIGS[name].depth + 1
    assert all(h.shape == (2, 9, 24) for h in seen.hidden)
    layers = {"lstm": 0, "cnn": 0, "gru, attending": 1}.get(name, 2)
    assert len(seen.attended) == layers
    for a in seen.attended:
        torch.testing.assert_close(a.weights().sum(-1), torch.ones(2, 4, 9))


@pytest.mark.parametrize("name", FORMS)
def test_every_weight_learns(name: str, x: torch.Tensor) -> None:
    model = made(name).train()
    out = logits(model, x)
    torch.nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), x[:, 1:].flatten()).backward()
    idle = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    # Experts that no token went to, and BERT's pooler, have no part in this loss.
    assert not [n for n in idle if ".experts." not in n and not n.startswith("pooler")], idle


@pytest.mark.parametrize("name", ["bert", "energy"])
def test_models_that_read_both_ways_refuse_caches(name: str, x: torch.Tensor) -> None:
    with pytest.raises(CombinationError, match=r"cache|decoded"):
        made(name)(x, caches=[Cache()] * 2)


def test_t5_says_what_it_writes_after(x: torch.Tensor) -> None:
    with pytest.raises(ShapeError, match="writes after a source"):
        made("t5")(x)
    with pytest.raises(ShapeError, match="two for each"):
        made("t5")(x, caches=[Cache()] * 2)


def test_padding_on_the_right_tells_ngpt_nothing(x: torch.Tensor) -> None:
    model, other = made("ngpt"), x.clone()
    other[1, 6:] = 0
    rule = Padding(torch.tensor([9, 6]))
    with torch.no_grad():
        torch.testing.assert_close(model(x, allow=rule).logits[1, :6], model(other, allow=rule).logits[1, :6])


@pytest.mark.parametrize("name", [n for n in ATTENTION if n != "gru, attending"])
def test_with_attention_shares_the_weights_and_leaves_the_model_alone(name: str, x: torch.Tensor) -> None:
    model = made(name)
    other = model.with_attention("dot | entmax(learned)")
    with torch.no_grad():
        before = logits(model, x)
        assert torch.equal(logits(other, x), logits(made(name, attention="dot | entmax(learned)"), x))
        assert torch.equal(logits(model, x), before)
    assert other.embed.weight is model.embed.weight
    assert not other.training
