"""However weights are changed, decoding speaks with the new ones: float32 and int8, in C and in torch, GPT-2 and LLaMA."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from regard.errors import CombinationError
from regard.models import GPT2Config, LlamaConfig, Model
from regard.models.decode import native
from regard.models.decode.generate import logits_of
from regard.models.decode.marks import weights_mark
from regard.models.decode.prepare import Weights, prepare
from regard.train.optim import adamw
from regard.train.settings import OptimConfig

CONFIGS: dict[str, LlamaConfig | GPT2Config] = {
    "llama": LlamaConfig(vocabulary=53, width=32, depth=2, heads=4, key_heads=2, hidden=48, attention_bias=True),
    "llama, untied, odd": LlamaConfig(vocabulary=53, width=36, depth=1, heads=3, key_heads=3, hidden=21, tied=False),
    "gpt2": GPT2Config(vocabulary=53, width=32, depth=2, heads=4, context=32),
}
TEXT = [1, 2, 3, 5, 8]


@pytest.fixture(params=["C", "torch"], autouse=True)
def regime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip(f"nothing is compiled here: {native.reason()}")
    return request.param


def built(name: str) -> Model:
    torch.manual_seed(0)
    model = CONFIGS[name].build().eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.2) if p.ndim > 1 else None
    return model


def first_linear(model: Model) -> nn.Linear:
    return cast(nn.Linear, model.get_submodule("blocks.0.attention.v"))


def learn(model: Model, optimizer: torch.optim.Optimizer) -> None:
    model(torch.tensor([TEXT])).logits.square().sum().backward()
    optimizer.step()
    model.zero_grad()


def other(model: Model) -> dict[str, Tensor]:
    return {k: v * 1.5 + 0.01 for k, v in model.state_dict().items()}


@torch.no_grad()
def swap_two_rows(model: Model) -> None:
    w = first_linear(model).weight.data
    w.copy_(w[torch.tensor([1, 0, *range(2, len(w))])])


@torch.no_grad()
def write_in_place(model: Model) -> None:
    for p in model.parameters():
        p.mul_(1.3)


def write_data(model: Model) -> None:
    for p in model.parameters():
        p.data.copy_(p.data * 1.3 + 0.01)


def write_one_number(model: Model) -> None:
    first_linear(model).weight.data[3, 5] += 4


def write_one_bias_or_weight(model: Model) -> None:
    f = first_linear(model)
    (f.weight if f.bias is None else f.bias).data[0] += 4


def write_numpy(model: Model) -> None:
    model.get_parameter("head.weight").detach().numpy()[:] *= -1


def replace_data(model: Model) -> None:
    for p in model.parameters():
        p.data = p.data * 1.3


def replace_parameter(model: Model) -> None:
    for _ in range(3):
        # Again and again, so that memory that was freed is likely to be taken again.
        f = first_linear(model)
        f.weight = nn.Parameter(f.weight.detach() * 1.3 + 0.1)


def replace_layer(model: Model) -> None:
    old = first_linear(model)
    model.get_submodule("blocks.0.attention").v = nn.Linear(old.in_features, old.out_features, bias=old.bias is not None)  # pyright: ignore


def replace_norm(model: Model) -> None:
    norm = copy.deepcopy(model.get_submodule("blocks.0.norm_1"))
    nn.init.constant_(cast(Tensor, norm.weight), -1.7)
    model.get_submodule("blocks.0").norm_1 = norm


def parametrized(model: Model) -> None:
    class Doubled(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return 2 * w

    parametrize.register_parametrization(first_linear(model), "weight", Doubled())


def inference_tensors(model: Model) -> None:
    with torch.inference_mode():
        for p in list(model.parameters()):
            p.data = p.data * 1.3


def there_and_back(model: Model) -> None:
    model.to(torch.float64)
    write_in_place(model)
    model.to(torch.float32)


CHANGES: dict[str, Callable[[Model], object]] = {
    "our trainer's AdamW": lambda m: learn(m, adamw(m, OptimConfig(lr=0.05))),
    "fused AdamW": lambda m: learn(m, torch.optim.AdamW(m.parameters(), lr=0.05, fused=True)),
    "fused SGD": lambda m: learn(m, torch.optim.SGD(m.parameters(), lr=0.05, fused=True)),
    "foreach Adam": lambda m: learn(m, torch.optim.Adam(m.parameters(), lr=0.05, foreach=True)),
    "plain SGD": lambda m: learn(m, torch.optim.SGD(m.parameters(), lr=0.05, foreach=False)),
    "load_state_dict": lambda m: m.load_state_dict(other(m)),
    "load_state_dict, assigned": lambda m: m.load_state_dict(other(m), assign=True),
    "in place": write_in_place,
    "through .data": write_data,
    "one number through .data": write_one_number,
    "one bias through .data": write_one_bias_or_weight,
    "two rows swapped through .data": swap_two_rows,
    "through numpy": write_numpy,
    "other data": replace_data,
    "another parameter": replace_parameter,
    "another layer": replace_layer,
    "another norm": replace_norm,
    "parametrized": parametrized,
    "tensors of inference mode": inference_tensors,
    "float64 and back": there_and_back,
}
"""Ways to change weights; torch counts about half of them in `_version`."""


def spoken(model: Model, weights: Weights) -> list[Tensor]:
    """As one token at a time would read them, a batch of twelve (oneDNN's blocks), and a whole text."""
    decoder = prepare(model, weights)
    from regard.models.decode.cache import static_caches

    one = decoder(torch.tensor([TEXT[:1]]), static_caches(decoder.depth))[0]
    twelve = decoder(torch.tensor([[i] for i in range(12)]), static_caches(decoder.depth))[0]
    return [one, twelve, logits_of(model, TEXT, weights=weights)]


@pytest.mark.parametrize("way", CHANGES)
@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_changed_weights_are_the_ones_that_speak(name: str, weights: Weights, way: str):
    model = built(name)
    before = spoken(model, weights)
    CHANGES[way](model)
    model.eval()
    after = spoken(model, weights)
    anew = spoken(copy.deepcopy(model), weights)
    for old, new, wanted in zip(before, after, anew, strict=True):
        torch.testing.assert_close(new, wanted, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(old, new, rtol=1e-4, atol=1e-4)
    if weights == "float32":
        with torch.no_grad():
            torch.testing.assert_close(after[2], model(torch.tensor([TEXT])).logits[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_decoder_is_kept_while_nothing_changes(weights: Weights):
    model = built("llama")
    first = prepare(model, weights)
    spoken(model, weights)
    model.train().eval()
    assert prepare(model, weights) is first
    assert prepare(model, weights, fresh=True) is not first


def test_float_decoder_reads_the_models_own_memory(regime: str):
    model = built("llama")
    decoder = prepare(model)
    write_data(model)
    assert decoder.stale() == (regime == "torch")
    assert (prepare(model) is decoder) == (regime == "C")


def test_model_that_was_decoded_can_go():
    model = built("gpt2")
    spoken(model, "int8")
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_decoder_alone_keeps_its_model():
    decoder = prepare(built("gpt2"))
    gc.collect()
    assert decoder.model.training is False
    assert decoder(torch.tensor([TEXT]), spoken_caches(decoder.depth))[0].shape == (1, 53)


def spoken_caches(depth: int):
    from regard.models.decode.cache import static_caches

    return static_caches(depth)


def test_copies_and_files_of_a_decoded_model_carry_no_decoder():
    model = built("llama")
    wanted = spoken(model, "int8")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other_ in (
        copy.deepcopy(model),
        copy.copy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ):
        assert prepare(other_, "int8").model is other_
        for a, b in zip(spoken(other_, "int8"), wanted, strict=True):
            assert torch.equal(a, b)
    twin = copy.deepcopy(model)
    write_data(twin)
    assert not torch.allclose(spoken(twin, "int8")[0], wanted[0])
    assert torch.equal(spoken(model, "int8")[0], wanted[0])


class Adapted(nn.Linear):
    """A layer that adds to its product, as adapters do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_layer_that_is_more_than_a_product_is_called(name: str):
    model = built(name)
    spoken(model, "float32")
    old = first_linear(model)
    model.get_submodule("blocks.0.attention").v = Adapted(old.in_features, old.out_features)  # pyright: ignore
    with torch.no_grad():
        torch.testing.assert_close(logits_of(model, TEXT), model(torch.tensor([TEXT])).logits[0], rtol=1e-4, atol=1e-4)
    with pytest.raises(CombinationError, match="Adapted"):
        prepare(model, "int8")


UNSEEN = {"one number through .data", "one bias through .data"}


def on(place: str, change: Callable[[nn.Module], object]) -> Callable[[Model], object]:
    return lambda model: change(model.get_submodule(place))


def doubled(module: nn.Module) -> None:
    own = module.forward
    module.forward = lambda *a, **k: 2 * own(*a, **k)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def reclassed(module: nn.Module) -> None:
    module.__class__ = Doubled


def hooked(module: nn.Module) -> None:
    module.register_forward_hook(lambda m, given, out: (out[0].square(), *out[1:]) if isinstance(out, tuple) else out.square())


def pre_hooked(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda m, given: (2 * given[0], *given[1:]))


TOUCHES: dict[str, Callable[[Model], object]] = {
    "a hook on a product": on("blocks.0.ffn.down", hooked),
    "a hook before a product": on("blocks.0.ffn.down", pre_hooked),
    "a hook on the norm": on("norm", hooked),
    "a hook on the embedding": on("embed", hooked),
    "a hook on a block": on("blocks.0", hooked),
    "another forward": on("blocks.0.attention.v", doubled),
    "another class": on("blocks.0.attention.v", reclassed),
}


@pytest.mark.parametrize("touch", TOUCHES)
@pytest.mark.parametrize("name", CONFIGS)
def test_what_hangs_on_a_module_happens_in_decoding_too(name: str, touch: str):
    model = built(name)
    before = logits_of(model, TEXT)
    TOUCHES[touch](model)
    with torch.no_grad():
        wanted = model(torch.tensor([TEXT])).logits[0]
    assert (wanted - before).abs().max() > 1e-3
    torch.testing.assert_close(logits_of(model, TEXT), wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(CombinationError, match="own forward, which has no int8"):
        logits_of(model, TEXT, weights="int8")


@pytest.mark.parametrize("way", [w for w in CHANGES if w not in UNSEEN])
def test_mark_of_all_weights_changes_with_them(way: str):
    model = built("gpt2")
    before = weights_mark(model)
    assert weights_mark(model) == before
    CHANGES[way](model)
    assert weights_mark(model) != before


def test_mark_of_more_samples_than_numbers_sees_each():
    model = built("llama")
    before = weights_mark(model, samples=1 << 20)
    write_one_number(model)
    assert weights_mark(model, samples=1 << 20) != before
