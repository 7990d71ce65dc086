"""int8 weights: close to the float ones, and a quarter of the bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from regard.errors import SpecError
from regard.models import GPT2Config, LlamaConfig, generate
from regard.models.decode import native
from regard.models.decode.generate import Sampling, logits_of
from regard.models.decode.matvec import FEW, Float, Int8
from regard.models.decode.prepare import Weights, prepare

LLAMA = LlamaConfig(vocabulary=97, width=64, depth=2, heads=4, key_heads=2, hidden=96)


@pytest.mark.parametrize("rows", [1, 2, 8, FEW, FEW + 1])
@pytest.mark.parametrize(("inside", "outside"), [(48, 32), (32, 96)])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_float_layouts_multiply_like_the_layers_they_join(rows: int, inside: int, outside: int, bias: bool):
    torch.manual_seed(0)
    linears = [nn.Linear(inside, outside, bias=bias), nn.Linear(inside, 16, bias=bias)]
    x = torch.randn(rows, inside)
    torch.testing.assert_close(Float(linears)(x), torch.cat([f(x) for f in linears], -1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(Float(linears[:1])(x), linears[0](x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 20, 70])
@torch.no_grad()
def test_int8_error_is_that_of_rounding_the_weights_alone(rows: int):
    torch.manual_seed(0)
    linear = nn.Linear(128, 64)
    x = torch.randn(rows, 128) * torch.linspace(0.01, 20, 128)  # a few large activations, as trained models have
    scale = linear.weight.abs().amax(1, keepdim=True) / 127
    wanted = nn.functional.linear(x, (linear.weight / scale).round() * scale, linear.bias)
    assert float((Int8([linear])(x) - wanted).abs().max() / wanted.abs().max()) < 1e-2


@torch.no_grad()
def test_int8_of_zeros_is_zero():
    assert torch.equal(Int8([nn.Linear(16, 8, bias=False)])(torch.zeros(2, 16)), torch.zeros(2, 8))


def test_int8_logits_stay_near_float_logits():
    torch.manual_seed(0)
    model = LLAMA.build().eval()
    tokens = list(range(20))
    exact, coarse = logits_of(model, tokens), logits_of(model, tokens, weights="int8")
    assert float((exact - coarse).abs().max()) < 0.05 * float(exact.abs().max())
    assert not torch.equal(exact, coarse)


@pytest.mark.parametrize("config", [LLAMA, GPT2Config(vocabulary=97, width=64, depth=2, heads=4, context=64)])
def test_int8_decoding_equals_int8_over_the_whole_text(config: LlamaConfig | GPT2Config):
    torch.manual_seed(0)
    model = config.build().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.15) if p.ndim > 1 else None
    out = generate(model, [1, 2, 3], Sampling(max_tokens=6, logprobs=0), weights="int8")
    text = [1, 2, 3, *out.tokens[0]]
    rates = torch.log_softmax(logits_of(model, text, weights="int8"), -1)
    whole = [float(rates[2 + i, t]) for i, t in enumerate(out.tokens[0])]
    assert out.logprobs is not None
    assert out.logprobs[0] == pytest.approx(whole, abs=2e-2)


def test_int8_reads_a_quarter_of_the_bytes():
    model = LLAMA.build()
    assert prepare(model, "int8").nbytes * 4 == prepare(model).nbytes


def test_unknown_weights_name_the_choices():
    with pytest.raises(SpecError, match=r"float32.*int8"):
        prepare(LLAMA.build(), "int4")  # type: ignore[arg-type]


@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize("batch", [1, 3, 9])
def test_products_in_c_and_in_torch_speak_alike(weights: Weights, batch: int, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    prompts = torch.randint(0, 97, (batch, 5))

    def spoken() -> tuple[list[list[int]], list[list[float]]]:
        torch.manual_seed(1)
        model = LLAMA.build().eval()
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.15) if p.ndim > 1 else None
        out = generate(model, prompts, Sampling(max_tokens=3, logprobs=0), weights=weights)
        assert out.logprobs is not None
        return out.tokens, out.logprobs

    tokens, rates = spoken()
    monkeypatch.setattr(native, "library", lambda: None)
    plain_tokens, plain_rates = spoken()
    if weights == "float32":
        assert tokens == plain_tokens
    tolerance = 1e-4 if weights == "float32" else 0.1
    torch.testing.assert_close(torch.tensor(rates)[:, 0], torch.tensor(plain_rates)[:, 0], rtol=tolerance, atol=tolerance)


@torch.no_grad()
def test_native_int8_hands_nan_on():
    x = torch.randn(1, 64)
    x[0, 3] = float("nan")
    assert bool(torch.isnan(Int8([nn.Linear(64, 8)])(x)).all())
