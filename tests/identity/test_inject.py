"""Mechanisms inside Hugging Face models: every trap of the attention interface by name, and out again without a trace."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import transformers as hf
from hubs import DEAF, DECODERS, GROUPED, SIZES, VOCABULARY, apart, hub, loud, padded, tokens
from transformers.masking_utils import AttentionMaskInterface

from regard import Causal, CombinationError, ShapeError, StateError, attend
from regard.identity.hf.inject import inject
from regard.identity.hf.interface import KEY

CLOSE = 1e-5


@pytest.fixture(autouse=True)
def _no_gradients() -> object:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", DECODERS)
def test_dot_softmax_is_what_the_model_does_by_itself(name: str):
    model, x = hub(name), tokens(length=13)
    alone = model(x).logits
    with inject(model, "dot | softmax"):
        within = model(x).logits
    assert alone.abs().max() > 0.1
    assert apart(alone, within) <= CLOSE
    with (
        inject(model, "dot | topk(2)")
        if name not in ("gemma2, softcap and window", "gpt-oss, sinks and window")
        else inject(model, "dot(scale=0.01) | softmax")
    ):
        assert apart(alone, model(x).logits) > 1e-2, "a mechanism that changes nothing was not put in"


@pytest.mark.parametrize("name", DECODERS)
def test_left_padding_gives_what_each_text_gives_alone_and_no_nan(name: str):
    model = hub(name)
    x, real = padded([11, 4])
    alone = model(x, attention_mask=real).logits
    with inject(model, "dot | softmax"):
        within = model(x, attention_mask=real).logits
    assert bool(torch.isfinite(within).all())
    assert apart(alone[real.bool()], within[real.bool()]) <= CLOSE


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"use_cache": False}, {"cache_implementation": "static"}], ids=str)
def test_generate_says_the_same_through_dot_softmax(name: str, how: dict[str, Any]):
    model = hub(name)
    x, real = padded([7, 4])
    given: dict[str, Any] = {"attention_mask": real, "max_new_tokens": 6, "do_sample": False, **how}
    alone = model.generate(x, **given)
    with inject(model, "dot | softmax"):
        within = model.generate(x, **given)
    assert alone.shape[1] > x.shape[1]
    assert torch.equal(alone, within)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "mistral, windowed", "gpt2"])
def test_unwrap_gives_back_the_same_bits(name: str, attention: str):
    model, x = hub(name, attention), tokens()
    before = model(x).logits
    put = inject(model, "cosine | entmax(1.5)")
    assert apart(before, model(x).logits) > 1e-2
    assert put.unwrap() is model
    assert put.unwrap() is model
    assert model.config._attn_implementation == attention
    assert torch.equal(before, model(x).logits)


def test_an_error_inside_the_block_takes_it_out_too():
    model, x = hub("llama"), tokens()
    before = model(x).logits
    with pytest.raises(KeyError), inject(model, "dot | topk(2)"):
        raise KeyError
    assert torch.equal(before, model(x).logits)


# The traps of the interface, one by one.


def test_trap_1_the_mask_is_registered_so_no_token_sees_the_future():
    model, x = hub("llama"), tokens()
    changed = x.clone()
    changed[:, 6:] = 5
    with inject(model, "dot | entmax(1.5)"):
        a, b = model(x).logits, model(changed).logits
        assert KEY in AttentionMaskInterface._global_mapping
    assert apart(a[:, :6], b[:, :6]) <= CLOSE
    assert apart(a[:, 6:], b[:, 6:]) > 1e-2


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_trap_2_no_mask_at_all_never_means_that_everything_is_allowed(attention: str):
    """torch's own convention says None for causal; a function that takes it literally is off by far."""
    model, x = hub("llama", attention), tokens()
    alone = model(x).logits
    with inject(model, "dot | softmax"):
        assert apart(alone, model(x).logits) <= CLOSE
        layer = model.model.layers[0].self_attn
        q = torch.randn(1, 6, 5, 8)
        k, v = torch.randn(2, 1, 2, 5, 8).unbind(0)
        out, _ = hf.AttentionInterface()[KEY](layer, q, k, v, None, scaling=8**-0.5)
    torch.testing.assert_close(out.transpose(1, 2), attend(q, k, v, "dot", allow=Causal()))


@pytest.mark.parametrize("spec", ["dot | softmax", "dot | entmax(1.5)", "cosine | topk(3)", "euclidean | hard"])
def test_trap_3_rows_with_nothing_allowed_give_zeros(spec: str):
    model = hub("llama")
    x, real = padded([9, 2])
    with inject(model, spec):
        logits = model(x, attention_mask=real).logits
        alone = model(x[1:, -2:]).logits
    assert bool(torch.isfinite(logits).all())
    assert apart(logits[1, -2:], alone[0]) <= CLOSE


def test_trap_4_the_key_holds_no_word_that_transformers_looks_for():
    assert not any(word in KEY for word in ("sdpa", "flash", "flex", "paged", "eager"))


@pytest.mark.parametrize("name", DEAF)
def test_trap_5_a_model_that_never_calls_the_interface_is_refused_and_left_alone(name: str):
    model, x = DEAF[name]().eval(), tokens(length=5)
    before, attention = model(x).logits, model.config._attn_implementation
    with pytest.raises(CombinationError, match=r"never calls|does not run"):
        inject(model, "dot | softmax")
    assert model.config._attn_implementation == attention
    assert torch.equal(before, model(x).logits)


def test_trap_5_what_is_no_model_of_transformers_is_refused():
    with pytest.raises(CombinationError, match="no model of transformers"):
        inject(torch.nn.Linear(2, 2), "dot | softmax")


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2, softcap and window"])
def test_trap_6_weights_are_given_where_they_are_asked_for(name: str):
    model, x = hub(name), tokens(length=7)
    alone = model(x, output_attentions=True).attentions
    with inject(model, "dot | softmax"):
        within = model(x, output_attentions=True).attentions
        assert model(x).attentions is None
    assert len(within) == len(alone) == 3
    assert max(apart(a, b) for a, b in zip(alone, within, strict=True)) <= CLOSE


def test_trap_6_weights_of_another_mechanism_are_its_own():
    model, x = hub("llama"), tokens(length=9)
    with inject(model, "dot | topk(2)"):
        weights = model(x, output_attentions=True).attentions[1]
        said = model.generate(x, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)
    assert int((weights > 0).sum(-1).max()) == 2
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 6, 9))
    assert int((said.attentions[1][0] > 0).sum(-1).max()) == 2


def test_trap_6_a_config_that_always_asks_for_weights_gets_them():
    model, x = hub("llama"), tokens(length=7)
    model.config.output_attentions = True
    with inject(model, "dot | sparsemax"):
        assert bool((model(x).attentions[0] == 0)[..., -1, :].any())


def test_trap_7_generate_needs_no_further_arguments():
    model, x = hub("llama"), tokens(length=6)
    with inject(model, "cosine(temperature=0.3) | entmax(1.5)"):
        cached = model.generate(x, max_new_tokens=7, do_sample=False)
        whole = model.generate(x, max_new_tokens=7, do_sample=False, use_cache=False)
    assert torch.equal(cached, whole)
    assert not torch.equal(cached, model.generate(x, max_new_tokens=7, do_sample=False))


def test_trap_8_each_layer_has_a_mechanism_of_its_own():
    model, x = hub("llama", "sdpa"), tokens()
    states = model(x, output_hidden_states=True).hidden_states
    with inject(model, {1: "dot | topk(2)"}):
        within = model(x, output_hidden_states=True).hidden_states
        (weights,) = model(x, output_attentions=True).attentions
    assert torch.equal(states[1], within[1]), "the layer before is not touched, bit for bit"
    assert apart(states[2], within[2]) > 1e-2
    assert int((weights > 0).sum(-1).max()) == 2, "the others are torch's own call, which has no weights to give"


def test_lists_mappings_and_chosen_layers_say_the_same():
    model, x = hub("llama"), tokens()
    said: list[torch.Tensor] = []
    for what, layers in [
        ({0: "dot | topk(2)", 2: "dot | topk(2)"}, None),
        ("dot | topk(2)", [0, 2]),
        (["dot | topk(2)"] * 2, [2, 0]),
        (["dot | topk(2)", None, "dot | topk(2)"], None),
    ]:
        with inject(model, what, layers):
            said.append(model(x).logits)
    assert all(torch.equal(said[0], other) for other in said[1:])


def test_what_is_put_in_last_counts_and_may_be_taken_out_in_any_order():
    model, x = hub("llama"), tokens()
    alone = model(x).logits
    first = inject(model, "dot | topk(2)")
    a = model(x).logits
    second = inject(model, "cosine | softmax")
    b = model(x).logits
    first.unwrap()
    assert torch.equal(b, model(x).logits)
    assert apart(a, b) > 1e-2
    second.unwrap()
    assert torch.equal(alone, model(x).logits)


@pytest.mark.parametrize("layers", [[3], [0, 0], [-1], []])
def test_layers_that_are_not_there_are_refused(layers: list[int]):
    with pytest.raises(ShapeError, match=r"layers \[0, 1, 2\]"):
        inject(hub("llama"), "dot | softmax", layers)


def test_one_spec_for_each_layer_is_counted():
    with pytest.raises(ShapeError, match="2 specs for 3 layers"):
        inject(hub("llama"), ["dot | softmax", "cosine"])


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("dot | rope", "turned"),
        ("dot | softmax | alibi", "count positions twice"),
        ("pointer", "needs values"),
        ("energy", "moves the tokens"),
        ("monotonic", "left behind"),
        ("selective", "left behind"),
    ],
)
def test_what_cannot_stand_in_a_foreign_layer_is_refused_with_its_reason(spec: str, why: str):
    model = hub("llama")
    with pytest.raises(CombinationError, match=why):
        inject(model, spec)
    assert model.config._attn_implementation == "eager"


def test_a_mechanism_that_needs_trained_tensors_is_refused_before_any_text():
    model = hub("llama")
    with pytest.raises(StateError, match="temperature"):
        inject(model, "cosine(temperature=learned)")
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(("name", "what"), [("gemma2, softcap and window", "softcap"), ("gpt-oss, sinks and window", "sinks")])
@pytest.mark.parametrize("spec", ["cosine", "dot | entmax(1.5)"])
def test_what_a_mechanism_has_no_place_for_is_refused_and_never_ignored(name: str, what: str, spec: str):
    model, x = hub(name), tokens()
    alone = model(x).logits
    with pytest.raises(CombinationError, match=f"{what}|scales its scores"):
        inject(model, spec)
    assert torch.equal(alone, model(x).logits)


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("gemma2, softcap and window", "softcap"),
        ("gpt-oss, sinks and window", "s_aux"),
        ("mistral, windowed", "window"),
    ],
)
def test_the_case_is_not_trivial_without_its_keyword_logits_are_others(name: str, without: str):
    """Guards the tests above: softcap, sinks and the window do something in these models."""
    model, x = hub(name), tokens(length=13)
    alone = model(x).logits
    if without == "softcap":
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = None
    elif without == "s_aux":
        for layer in model.model.layers:
            layer.self_attn.sinks.data.fill_(-50.0)
    else:
        model.config.sliding_window = None
    assert apart(alone, model(x).logits) > 1e-3


def test_dropout_on_weights_is_done_by_softmax_and_refused_by_others():
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED, attention_dropout=0.5))
    model, x = loud(model), tokens()
    with inject(model, "dot | softmax"):
        model.train()
        assert apart(model(x).logits, model(x).logits) > 1e-2
        model.eval()
        assert torch.equal(model(x).logits, model(x).logits)
    with inject(model, "dot | sparsemax"):
        model.train()
        with pytest.raises(CombinationError, match="dropout"):
            model(x)


def test_gradients_flow_through_what_was_put_in():
    model, x = hub("llama"), tokens()
    with torch.enable_grad(), inject(model, "cosine | entmax(1.5)"):
        model(x).logits.square().mean().backward()
    grad = model.model.layers[0].self_attn.q_proj.weight.grad
    assert bool(torch.isfinite(grad).all())
    assert grad.abs().max() > 0


def test_a_mask_of_numbers_adds_to_softmax_and_is_refused_by_others():
    model, x = hub("llama"), tokens(1, 6)
    numbers = torch.full((1, 1, 6, 6), torch.finfo(torch.float32).min).triu(1) - 0.3 * torch.arange(6.0)
    alone = model(x, attention_mask=numbers).logits
    with inject(model, "dot | softmax"):
        assert apart(alone, model(x, attention_mask=numbers).logits) <= CLOSE
    with inject(model, "dot | sparsemax"), pytest.raises(CombinationError, match="bias"):
        model(x, attention_mask=numbers)


def test_a_user_mask_of_truth_values_is_kept():
    model, x = hub("llama", "sdpa"), tokens(1, 6)
    allowed = torch.ones(6, 6, dtype=torch.bool).tril()[None, None].clone()
    allowed[..., 0] = False
    allowed[..., 0, 0] = True
    alone = model(x, attention_mask=allowed).logits
    with inject(model, "dot | softmax"):
        assert apart(alone, model(x, attention_mask=allowed).logits) <= CLOSE


def test_half_precision_works():
    model, x = hub("llama").to(torch.bfloat16), tokens()
    alone = model(x).logits
    with inject(model, "dot | softmax"):
        within = model(x).logits
    assert within.dtype == torch.bfloat16
    assert apart(alone, within) <= 0.02 * float(alone.abs().max())


def test_bert_and_t5_keep_their_masks_and_their_biases():
    x, real = tokens(2, 9), torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
    bert = loud(hf.BertModel(hf.BertConfig(**SIZES)))
    bert.set_attn_implementation("eager")
    sizes = {"d_model": 48, "d_kv": 7, "d_ff": 33, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    t5 = loud(hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=VOCABULARY, **sizes)))
    t5.set_attn_implementation("eager")
    for model, given in ((bert, {}), (t5, {"decoder_input_ids": tokens(2, 5)})):
        whole, some = model(x, **given)[0], model(x, attention_mask=real, **given)[0]
        with inject(model, "dot | softmax"):
            assert apart(whole, model(x, **given)[0]) <= CLOSE
            assert apart(some[:, :5], model(x, attention_mask=real, **given)[0][:, :5]) <= CLOSE
    with inject(bert, "cosine | entmax(1.5)"):
        assert bool(torch.isfinite(bert(x, attention_mask=real)[0]).all())
    with pytest.raises(CombinationError, match=r"bias|scales"):
        inject(t5, "dot | entmax(1.5)")


def test_another_model_with_the_same_config_and_another_thread_are_as_before():
    config = hf.LlamaConfig(**GROUPED)
    one, other = loud(hf.LlamaForCausalLM(config)), loud(hf.LlamaForCausalLM(config))
    x = tokens()
    alone = other(x).logits
    with inject(one, "dot | topk(2)"):
        assert torch.equal(alone, other(x).logits)
        assert apart(alone, one(x).logits) > 1e-2
        with inject(other, "dot | topk(2)"):
            assert torch.equal(one(x).logits, other(x).logits)
        assert torch.equal(alone, other(x).logits)
    assert torch.equal(alone, one(x).logits)


def test_a_layer_that_nothing_was_put_into_gets_the_mask_of_the_implementation_before():
    """Some implementations read another kind of mask, or none: ours would not do for them."""
    given: list[Any] = []

    def theirs(module: Any, q: Any, k: Any, v: Any, attention_mask: Any, **kwargs: Any) -> Any:
        given.append(attention_mask)
        return hf.AttentionInterface()["sdpa"](module, q, k, v, None, is_causal=True, **kwargs)

    hf.AttentionInterface.register("for_a_test", theirs)
    AttentionMaskInterface.register("for_a_test", lambda **kwargs: "a mask of their own")
    model, x = hub("llama", "for_a_test"), tokens()
    alone = model(x).logits
    with inject(model, {1: "dot | softmax"}):
        assert apart(alone, model(x).logits) <= CLOSE
    assert len(given) > 3
    assert set(given) == {"a mask of their own"}


def test_what_is_injected_holds_in_every_thread():
    model, x = hub("llama"), tokens()
    found: list[torch.Tensor] = []
    with inject(model, "dot | topk(2)"):
        here = model(x).logits
        thread = threading.Thread(target=lambda: found.append(model(x).logits.detach()))
        thread.start()
        thread.join()
    assert torch.equal(here, found[0])
