"""A cache belongs to who filled it: any other reader is refused, in our own models and in Hugging Face's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import hubs
import lives
import pytest
import torch
import transformers as hf
from lives import TEXT

from regard import ShapeError, StateError
from regard.identity.body import base_of, body_of
from regard.identity.hf.inject import inject
from regard.identity.speaking import living
from regard.models.base import Model
from regard.models.decode.cache import static_caches
from regard.models.decode.prepare import prepare
from regard.nn import Attention, Cache

X = torch.tensor([TEXT])
PARTS: dict[str, dict[str, Any]] = {
    "imprints": {"form": None, "rank": 0, "weighed": False},
    "trace": {"form": None, "slots": 0},
    "everything": {},
}


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> Model:
    return lives.MODELS[request.param]()


def forward(model: Model, tokens: torch.Tensor, caches: Any = None) -> Any:
    caches = [Cache()] * model.cache_count if caches is None else caches
    return model(tokens, caches=caches).caches


def decoded(model: Model, tokens: torch.Tensor, caches: Any = None) -> Any:
    decoder = prepare(model)
    return decoder(tokens, static_caches(decoder.depth, 8) if caches is None else caches)[1]


WAYS: dict[str, Callable[..., Any]] = {"forward": forward, "decoder": decoded}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_cache_is_refused_to_everyone_but_who_filled_it(model: Model, way: str, part: str):
    run, base = WAYS[way], base_of(model)
    a, b = (lives.someone(base, seed, **PARTS[part]) for seed in (1, 2))
    readers: dict[str, Any] = {
        "a": lambda: living(model, a),
        "b": lambda: living(model, b),
        "a, refusing": lambda: living(model, a, beta=1.0),
        "nobody": nullcontext,
        "two": lambda: living(model, [a, b]),
        "two, the other way": lambda: living(model, [b, a]),
    }
    for filler, fill in readers.items():
        rows = X.repeat(2, 1) if "two" in filler else X
        for length in (1, 5):
            with fill():
                caches = run(model, rows[:, :length])
            for reader, read in readers.items():
                if reader == filler:
                    continue
                many = rows if "two" not in reader else X.repeat(2, 1)
                with read(), pytest.raises((StateError, ShapeError), match=r"belongs to who filled it|rows"):
                    run(model, many[: 2 if "two" in filler else None, length : length + 1], caches)
            with fill():
                run(model, rows[:, length : length + 1], caches)


def test_the_same_identity_comes_back_in_another_block_and_says_what_it_would_have_said(model: Model):
    who = lives.someone(base_of(model))
    with living(model, who):
        whole = model(X).logits
        caches = forward(model, X[:, :4])
    again = type(who)(who.base, who.self, who.trace, who.imprints, who.sources)
    with living(model, again):
        assert lives.apart(model(X[:, 4:], caches=caches).logits, whole[:, 4:]) < 1e-4
    assert copy.deepcopy(caches)[0].owner == caches[0].owner


def test_another_spec_another_layer_and_another_model_are_refused():
    model = lives.llama()
    other = model.with_attention("dot | topk(2)")
    caches = forward(model, X[:, :4])
    with pytest.raises(StateError, match=r"filled under 'dot \| softmax.*this layer is 'dot \| topk"):
        forward(other, X[:, 4:], caches)
    with pytest.raises(StateError, match="another layer"):
        forward(model, X[:, 4:], caches[::-1])
    with pytest.raises(StateError, match="another layer or another model"):
        forward(lives.llama(1), X[:, 4:], caches)
    forward(copy.deepcopy(model), X[:, 4:], caches)


def test_rows_that_are_picked_take_their_owners_along():
    model = lives.llama()
    base = base_of(model)
    a, b = lives.someone(base, 1), lives.someone(base, 2)
    rows = X.repeat(2, 1)
    with living(model, [a, b]):
        caches = decoded(model, rows[:, :4])
        swapped = [c.rows(torch.tensor([1, 0])) for c in caches]
        with pytest.raises(StateError, match=r"identities \(1, 0\)"):
            decoded(model, rows[:, 4:], swapped)
        decoded(model, rows[:, 4:], [c.rows(torch.tensor([1, 0])) for c in swapped])
        with pytest.raises(ShapeError, match="2 identities"):
            decoded(model, rows[:1, 4:], [c.rows(torch.tensor([0])) for c in caches])
    with living(model, a):
        caches = decoded(model, rows[:, :4])
        decoded(model, rows[:1, 4:], [c.rows(torch.tensor([1])) for c in caches])
        with pytest.raises(ShapeError, match="holds 2 rows"):
            decoded(model, rows[:1, 4:], caches)


def test_a_cache_made_by_hand_is_read_by_the_model_alone():
    attention = Attention(16, 4, "dot | softmax", key_heads=2)
    k, v = torch.randn(2, 1, 2, 3, 4).unbind(0)
    out, cache = attention.step(torch.randn(1, 1, 16), Cache(k, v))
    assert len(cache) == 4
    assert cache.owner == attention.owner
    with pytest.raises(StateError, match="another layer"):
        Attention(16, 4, "dot | softmax", key_heads=2).step(torch.randn(1, 1, 16), cache)
    assert out.shape == (1, 1, 16)


# Hugging Face's.


def filled(model: Any, x: torch.Tensor, **given: Any) -> Any:
    return model(x, use_cache=True, **given).past_key_values


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral, windowed"])
def test_what_is_injected_owns_the_caches_that_it_fills(name: str):
    model, x = hubs.hub(name), hubs.tokens(1, 5)
    who = hubs.someone(body_of(model).base)
    ways: dict[str, Any] = {
        "nothing": nullcontext,
        "one spec": lambda: inject(model, "dot | topk(2)"),
        "another": lambda: inject(model, "cosine | softmax"),
        "in one layer": lambda: inject(model, {0: "dot | topk(2)"}),
        "somebody": lambda: living(model, who),
        "somebody in some layers": lambda: inject(model, who, layers=[1]),
    }
    for filler, fill in ways.items():
        for reader, read in ways.items():
            with fill():
                cache = filled(model, x)
            with read():
                if reader == filler:
                    assert model(x, past_key_values=cache).logits.shape[1] == 5
                else:
                    with pytest.raises(StateError, match="begin with an empty cache"):
                        model(x, past_key_values=cache)


def test_injected_and_living_are_the_same_reader():
    model, x = hubs.hub("llama"), hubs.tokens(1, 5)
    who = hubs.someone(body_of(model).base)
    with living(model, who):
        cache, whole = filled(model, x), model(torch.cat([x, x], 1)).logits
    with inject(model, who):
        assert hubs.apart(model(x, past_key_values=cache).logits, whole[:, 5:]) < 1e-4


def test_an_injection_elsewhere_does_not_matter():
    model, other, x = hubs.hub("llama"), hubs.hub("gpt2"), hubs.tokens(1, 5)
    with inject(model, "dot | topk(2)"):
        cache, whole = filled(model, x), model(torch.cat([x, x], 1)).logits
        with inject(other, "cosine | softmax"):
            assert hubs.apart(model(x, past_key_values=cache).logits, whole[:, 5:]) < 1e-4


def test_a_cache_that_nobody_refilled_is_not_read_by_who_filled_it_first():
    """Emptied, it is anyone's; but who filled it before the last time may not go on with it."""
    model, x = hubs.hub("llama"), hubs.tokens(1, 5)
    who = hubs.someone(body_of(model).base, slots=4, weighed=False).only("imprints")
    with living(model, who):
        cache = filled(model, x)
    cache.reset()
    model(x, past_key_values=cache)
    with living(model, who), pytest.raises(StateError, match="filled without the identity"):
        model(x, past_key_values=cache)


@pytest.mark.parametrize("injected", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_a_layer_that_was_interrupted_does_not_open_caches_to_the_bare_model(part: str, injected: bool):
    model, x = hubs.hub("llama"), hubs.tokens(1, 5)
    who = lives.someone(body_of(model).base, 1, **PARTS[part])
    with living(model, who):
        cache = filled(model, x)

    def stop(module: Any, args: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(stop)
    put = inject(model, who) if injected else None
    with pytest.raises(KeyboardInterrupt), nullcontext() if injected else living(model, who):
        model(x)
    handle.remove()
    if put is not None:
        put.unwrap()
    with pytest.raises(StateError, match="the model reads none now"):
        model(x[:, :1], past_key_values=cache)
    with living(model, who):
        assert len(model(x[:, :1], past_key_values=cache).past_key_values) == len(model.model.layers)


@pytest.mark.parametrize("reader", ["nobody", "another", "the same"])
@pytest.mark.parametrize("filler", ["nobody", "somebody"])
def test_a_static_cache_that_was_emptied_is_anyones_whatever_their_keys_are_wide(filler: str, reader: str):
    model, x = hubs.hub("llama"), hubs.tokens(1, 5)
    base = body_of(model).base
    somebody = hubs.someone(base, 1)
    readers = {"nobody": None, "another": hubs.someone(base, 2, slots=4, weighed=False).only("imprints"), "the same": somebody}
    cache = hf.StaticCache(model.config, max_cache_len=12)
    with living(model, None if filler == "nobody" else somebody):
        filled(model, x, past_key_values=cache)
    cache.reset()
    with living(model, readers[reader]):
        whole = model(torch.cat([x, x], 1)).logits
        assert hubs.apart(whole[:, :5], model(x, past_key_values=cache).logits) < 1e-4
        assert hubs.apart(whole[:, 5:], model(x, past_key_values=cache).logits) < 1e-4


@pytest.mark.parametrize("reader", ["nobody", "another", "a spec"])
@pytest.mark.parametrize("changed", ["as it is", "copied", "cropped", "reordered", "repeated", "static"])
def test_whatever_is_done_to_a_cache_it_stays_its_owners(changed: str, reader: str):
    model, x = hubs.hub("llama"), hubs.tokens(2, 5)
    base = body_of(model).base
    who = hubs.someone(base, 1)
    with living(model, who):
        room = {"past_key_values": hf.StaticCache(model.config, max_cache_len=12)} if changed == "static" else {}
        cache = filled(model, x, **room)
    if changed == "copied":
        cache = copy.deepcopy(cache)
    elif changed == "cropped":
        cache.crop(-2)
    elif changed == "reordered":
        cache.reorder_cache(torch.tensor([1, 0]))
    elif changed == "repeated":
        cache.batch_repeat_interleave(2)
    more = x.repeat_interleave(2, 0)[:, :1] if changed == "repeated" else x[:, :1]
    blocks: dict[str, Any] = {
        "nobody": nullcontext,
        "another": lambda: living(model, hubs.someone(base, 2)),
        "a spec": lambda: inject(model, "dot | topk(2)"),
    }
    with blocks[reader](), pytest.raises(StateError, match="begin with an empty cache"):
        model(more, past_key_values=cache)
    with living(model, who):
        assert bool(torch.isfinite(model(more, past_key_values=cache).logits).all())


@pytest.mark.parametrize("move", ["reorder_cache", "batch_select_indices"])
def test_rows_that_change_places_are_not_read_by_each_other(move: str):
    model, x = hubs.hub("llama"), hubs.tokens(2, 5)
    base = body_of(model).base
    people = [hubs.someone(base, 1), hubs.someone(base, 2)]
    with living(model, people):
        cache = filled(model, x)
        getattr(cache, move)(torch.tensor([1, 0]))
        twin = copy.deepcopy(cache)
        with pytest.raises(StateError, match=r"\[1, 0\]"):
            model(x[:, :1], past_key_values=cache)
        getattr(twin, move)(torch.tensor([1, 0]))
        model(x[:, :1], past_key_values=twin)
    with living(model, people[::-1]), pytest.raises(StateError, match="reads another one now"):
        model(x[:, :1], past_key_values=twin)


def test_the_caches_of_an_encoder_and_a_decoder_are_guarded_too():
    sizes = {"d_model": 48, "d_kv": 7, "d_ff": 33, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    t5 = hubs.loud(hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=hubs.VOCABULARY, **sizes)))
    t5.set_attn_implementation("eager")
    x, y = hubs.tokens(1, 6), hubs.tokens(1, 3)
    with inject(t5, "dot | softmax"):
        out = t5(x, decoder_input_ids=y, use_cache=True)
        again = t5(x, decoder_input_ids=y[:, :1], past_key_values=out.past_key_values, use_cache=True)
    with pytest.raises(StateError, match="begin with an empty cache"):
        t5(x, decoder_input_ids=y[:, :1], past_key_values=again.past_key_values)
    plain = t5(x, decoder_input_ids=y, use_cache=True).past_key_values
    with inject(t5, "dot | softmax"), pytest.raises(StateError, match="begin with an empty cache"):
        t5(x, decoder_input_ids=y[:, :1], past_key_values=plain)
