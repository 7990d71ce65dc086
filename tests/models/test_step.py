"""All layers in one call of C: the bits of one call after another, for any family, weights, company and number of threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from regard.errors import CombinationError, NumericsError, ShapeError, SpecError
from regard.models import Sampling, generate
from regard.models.base import CausalModel
from regard.models.decode import native
from regard.models.decode.cache import static_caches
from regard.models.decode.generate import logits_of, perplexity
from regard.models.decode.matvec import Quantised
from regard.models.decode.prepare import Weights, prepare
from regard.models.gpt2 import GPT2Config
from regard.models.llama import LlamaConfig
from regard.models.packed import Kind, PackedWeight, keep_packed
from regard.position import Rope

from .test_native import instrumented, noise


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    if instrumented() is None:
        pytest.skip(f"nothing is compiled here: {native.reason()}")
    monkeypatch.setattr(native, "library", instrumented)


def llama(**changes: Any) -> CausalModel:
    torch.manual_seed(0)
    fields: dict[str, Any] = {
        "vocabulary": 61,
        "width": 40,
        "depth": 3,
        "heads": 4,
        "key_heads": 2,
        "head_width": 12,
        "hidden": 70,
    }
    return LlamaConfig(**(fields | changes)).build().eval()


def gpt2() -> CausalModel:
    torch.manual_seed(0)
    model = GPT2Config(vocabulary=53, width=36, depth=2, heads=3, context=64).build().eval()
    for p in model.parameters():
        if p.ndim == 1:
            nn.init.normal_(p, 0.5)
    return model


MODELS: dict[str, Callable[[], CausalModel]] = {
    "llama": llama,
    "tied, half turned": lambda: llama(tied=True, rope=Rope(fraction=0.5)),
    "biased": lambda: llama(attention_bias="qkv"),
    "gpt2": gpt2,
}
every_model = pytest.mark.parametrize("name", MODELS)
every_weight = pytest.mark.parametrize("weights", ["float32", "int8", "q4"])


def layer_by_layer(model: CausalModel, weights: Weights, tokens: list[Tensor]) -> list[Tensor]:
    """Logits of some pieces of rows, as the layers give them when they are called one after the other."""
    stack = prepare(model, weights).stack
    assert stack is not None
    caches, logits = static_caches(len(stack.layers)), list[Tensor]()
    for piece in tokens:
        way = stack.walk(piece, caches)
        try:
            while True:
                next(way)
        except StopIteration as end:
            x, caches = end.value
        logits.append(stack.logits(x).view(*piece.shape, -1))
    return logits


@every_model
@every_weight
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@torch.inference_mode()
def test_one_call_gives_the_bits_of_one_call_for_each_part(name: str, weights: Weights, threads: int):
    model = MODELS[name]()
    before = torch.get_num_threads()
    pieces = [torch.randint(0, 50, (2, n), generator=torch.Generator().manual_seed(n)) for n in (5, 1, 1, 20, 1, 2)]
    decoder = prepare(model, weights)
    assert decoder.stack is not None
    assert decoder.stack.whole is not None
    wanted = layer_by_layer(model, weights, pieces)
    torch.set_num_threads(threads)
    try:
        caches = static_caches(decoder.depth)
        for piece, expected in zip(pieces, wanted, strict=True):
            every, _ = decoder(piece, caches, every=True)
            # Again from the same caches, which is another way on from them.
            last, caches = decoder(piece, caches)
            assert torch.equal(every, expected)
            assert torch.equal(last, expected[:, -1])
    finally:
        torch.set_num_threads(before)


@every_model
@torch.inference_mode()
def test_logits_are_those_of_the_model_itself(name: str):
    model = MODELS[name]()
    tokens = torch.randint(0, 50, (1, 12), generator=torch.Generator().manual_seed(1))
    plain = model(tokens).logits
    assert float(plain.std()) > 0.01
    torch.testing.assert_close(
        prepare(model)(tokens, static_caches(model.cache_count), every=True)[0], plain, rtol=1e-4, atol=1e-4
    )


@torch.inference_mode()
def test_two_texts_in_turns_and_a_fork_keep_their_own_rooms():
    model = llama()
    decoder = prepare(model)
    a, b = torch.tensor([[1, 2, 3]]), torch.tensor([[9, 8, 7, 6]])
    alone = [layer_by_layer(model, "float32", [x, torch.tensor([[4]]), torch.tensor([[5]])]) for x in (a, b)]
    at = {}
    for key, x in (("a", a), ("b", b)):
        _, at[key] = decoder(x, static_caches(decoder.depth, 4))
    for i, token in enumerate((4, 5), 1):
        for key, wanted in zip("ab", alone, strict=True):
            old = at[key]
            logits, at[key] = decoder(torch.tensor([[token]]), old)
            assert torch.equal(logits, wanted[i][:, -1])
            # The fork goes another way; the text itself does not notice.
            decoder(torch.tensor([[0]]), old)


@every_weight
def test_text_does_not_depend_on_whether_c_is_used(weights: Weights, monkeypatch: pytest.MonkeyPatch):
    model, prompts = llama(), [[1, 2, 3], [4, 5, 6]]
    ours = generate(model, prompts, Sampling(max_tokens=20), weights=weights).tokens
    with monkeypatch.context() as m:
        m.setattr(native, "library", lambda: None)
        twin = generate(llama(), prompts, Sampling(max_tokens=20), weights=weights).tokens
    # Without C torch rounds int8's activations to bfloat16.
    assert weights == "int8" or ours == twin


def test_replaced_norm_is_seen_and_one_written_in_place_is_read():
    model = llama()
    before = generate(model, [1, 2], Sampling(max_tokens=8)).tokens
    with torch.no_grad():
        model.norm.weight.mul_(torch.linspace(-2, 2, 40))  # pyright: ignore
    changed = generate(model, [1, 2], Sampling(max_tokens=8)).tokens
    assert changed != before
    other = llama()
    other.norm.weight = nn.Parameter(model.norm.weight.detach().clone())  # pyright: ignore
    generate(other, [1, 2], Sampling(max_tokens=1))
    assert generate(other, [1, 2], Sampling(max_tokens=8)).tokens == changed
    replaced = llama()
    generate(replaced, [1, 2], Sampling(max_tokens=1))
    replaced.norm.weight = nn.Parameter(model.norm.weight.detach().clone())  # pyright: ignore
    assert generate(replaced, [1, 2], Sampling(max_tokens=8)).tokens == changed


def test_weights_that_are_nan_are_an_error_in_every_layout():
    model = llama()
    with torch.no_grad():
        model.embed.weight.fill_(torch.nan)
    for weights in ("float32", "int8"):
        with pytest.raises(NumericsError):
            generate(model, [1, 2], Sampling(max_tokens=2), weights=weights)


# --- peaks


@given(st.integers(1, 5), st.integers(1, 70), st.integers(0, 99))
def test_peak_is_the_first_of_the_largest(rows: int, width: int, seed: int):
    x = torch.randint(-3, 4, (rows, width), generator=torch.Generator().manual_seed(seed)).float()
    assert native.peaks(x) == x.argmax(-1).tolist()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 7, 8, 12])
def test_peak_of_what_is_not_finite_is_none(bad: float, at: int):
    x = noise(2, 13)
    x[1, at] = bad
    assert native.peaks(x) == [int(x[0].argmax()), -1]


def test_peak_of_the_lowest_floats_is_found():
    assert native.peaks(torch.full((1, 9), torch.finfo().min)) == [0]


# --- layer norms


@given(st.integers(1, 4), st.integers(1, 70), st.booleans(), st.integers(0, 99))
def test_layer_norm_is_that_of_torch(rows: int, width: int, shifted: bool, seed: int):
    x, w = noise(rows, width, seed=seed) * 5 + 3, noise(width, seed=1)
    b = noise(width, seed=2) if shifted else None
    wanted = nn.functional.layer_norm(x.double(), (width,), w.double(), None if b is None else b.double(), 1e-5)
    torch.testing.assert_close(native.layer_norm(x, w, b, 1e-5), wanted.float(), rtol=1e-5, atol=1e-5)


# --- refusals


def test_step_refuses_what_does_not_fit_before_c_sees_it():
    model = llama()
    stack = prepare(model).stack
    assert stack is not None
    whole = stack.whole
    assert whole is not None
    k = torch.zeros(2, 4, 12)
    texts = native.Texts([[native.text(k, k, (2, 12))]] * 3, [0, 0, 0])
    turned = stack.layers[0].angles(0, 1, None)
    assert turned is not None
    with pytest.raises(ShapeError, match="room for 4"):
        texts.place([1], [4])
    with pytest.raises(ShapeError, match="each text has new ones"):
        texts.place([0], [0])
    texts.place([1], [0])
    x = torch.zeros(1, 40)
    for call in (
        lambda: native.step(whole, torch.zeros(1, 41), [turned], texts),
        lambda: native.step(whole, torch.zeros(65, 40), [turned], texts),
        lambda: native.step(whole, x, [], texts),
        lambda: native.step(whole, x, [None], texts),
        lambda: native.step(whole, x, [(turned[0][:, :2], turned[1])], texts),
        lambda: native.step(whole, x, [turned], texts, [1]),
        lambda: native.step(whole, x, [turned], native.Texts([[native.text(k, k, (2, 12))]] * 2, [0, 0])),
        lambda: native.Texts([[]], [0]),
        lambda: native.Texts([[native.text(k, k, (2, 12))]], [0, 0]),
        lambda: native.Whole(list(whole.layers), [stack.head.matrices] * 12, None, None),  # pyright: ignore
    ):
        with pytest.raises(ShapeError):
            call()


def test_step_refuses_more_rows_than_its_texts_have():
    model = llama()
    stack = prepare(model).stack
    assert stack is not None
    assert stack.whole is not None
    k = torch.zeros(2, 4, 12)
    texts = native.Texts([[native.text(k, k, (2, 12))]] * 3, [0, 0, 0])
    texts.place([2], [0])
    turned = stack.layers[0].angles(0, 1, None)
    assert turned is not None
    with pytest.raises(ShapeError, match="2 new tokens"):
        native.step(stack.whole, torch.zeros(1, 40), [turned], texts)


def test_text_is_eight_byte_fields_in_the_order_that_the_table_reads():
    names = [f[0] for f in native.Text._fields_]
    assert [names[i] for i in (5, 6, 7, 8, 9)] == ["first", "tokens", "length", "capacity", "lead"]
    assert ctypes.sizeof(native.Text) == 8 * len(names)


# --- q4


def test_q4_of_a_file_multiplies_its_own_blocks_and_forgets_them_when_trained(tmp_path: Path):
    gguf = pytest.importorskip("gguf")
    model = llama(width=64, hidden=96, tied=True)
    for block in model.blocks:
        for linear in block.modules():
            if not isinstance(linear, nn.Linear) or linear.in_features % 32:
                continue
            raw = torch.from_numpy(gguf.quantize(linear.weight.detach().numpy(), gguf.GGMLQuantizationType.Q5_0))
            packed = PackedWeight(Kind("Q5_0", 32, 22), tuple(linear.weight.shape), raw)
            with torch.no_grad():
                linear.weight.copy_(packed.unpacked())
            keep_packed(cast(nn.Parameter, linear.weight), packed)
    stack = prepare(model, "q4").stack
    assert stack is not None
    first = stack.layers[0]
    assert isinstance(first.qkv, Quantised)
    assert isinstance(first.out, Quantised)
    assert isinstance(stack.head, Quantised)
    # Heads of 12 are 48 wide together, which is no whole number of blocks.
    assert (first.qkv.kinds, first.out.kinds, stack.head.kinds) == (["Q5_0"] * 3, ["Q4_1"], ["Q8_0"])
    with torch.no_grad():
        model.blocks[0].attention.q.weight[0, 0] += 0.01  # pyright: ignore
    stack = prepare(model, "q4").stack
    assert stack is not None
    assert stack.layers[0].qkv.kinds == ["Q4_1", "Q5_0", "Q5_0"]  # pyright: ignore


def test_blocks_of_kinds_that_are_not_multiplied_are_kept_in_eight_bits():
    gguf = pytest.importorskip("gguf")
    model = llama(width=256, heads=2, key_heads=1, head_width=64, hidden=256, depth=1)
    linear = model.blocks[0].ffn.down  # pyright: ignore
    assert isinstance(linear, nn.Linear)
    raw = torch.randint(0, 256, (256, 84), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    raw[:, 81::84] = raw[:, 83::84] = 40
    packed = PackedWeight(Kind("Q2_K", 256, 84), (256, 256), raw)
    assert gguf.GGMLQuantizationType.Q2_K == 10
    with torch.no_grad():
        linear.weight.copy_(packed.unpacked())
    keep_packed(cast(nn.Parameter, linear.weight), packed)
    down = prepare(model, "q4").stack.layers[0].down  # pyright: ignore
    assert isinstance(down, Quantised)
    assert down.kinds == ["Q8_0"]


def test_smollm2_in_its_own_blocks_writes_what_its_weights_write(smollm2: Path):
    """The file's own blocks, and a paragraph: what 14 bits of activations cost is nothing that a text shows."""
    from regard.models.convert import load

    model = load(smollm2).eval()
    tokens = [1, 504, 6019, 314, 253, 1440, 282, 1530, 28, 284, 260, 3044, 506, 1528, 30]
    decoder = prepare(model, "q4")
    assert decoder.stack is not None
    assert {k for p in decoder.stack.products for k in p.kinds} == {"Q4_1", "Q8_0"}  # pyright: ignore
    assert decoder.nbytes < 97e6
    exact, blocks = (logits_of(model, tokens, weights=w) for w in ("float32", "q4"))
    assert float((exact - blocks).abs().max()) < 0.05
    assert perplexity(model, tokens, weights="q4") == pytest.approx(perplexity(model, tokens), rel=2e-3)
    texts = [generate(model, tokens, Sampling(max_tokens=24), weights=w).tokens for w in ("float32", "q4")]
    assert texts[0] == texts[1]


def test_unknown_weights_are_refused_by_name():
    for weights in ("q5", ["q4"], None):
        with pytest.raises(SpecError, match="'q4'"):
            prepare(llama(), weights)  # pyright: ignore


def test_q4_refuses_weights_that_float16_scales_cannot_hold():
    model = llama()
    with torch.no_grad():
        model.head.weight.fill_(1e6)  # pyright: ignore
    with pytest.raises(CombinationError, match="float16"):
        prepare(model, "q4")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
