"""Calls that were meant otherwise: each is answered with what was given and what to do, before any work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hubs
import lives
import pytest
import torch
import transformers as hf
from lives import HISTORY, TEXT

from regard import CombinationError, RegardError, ShapeError, StateError
from regard.identity.body import base_of, body_of
from regard.identity.experience import observe
from regard.identity.speaking import living
from regard.identity.state import Identity
from regard.identity.why import along, why
from regard.identity.write.rule import Rule, imprint

SMALL: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3}
STATES: dict[str, Callable[[], Any]] = {
    "mamba": lambda: hf.MambaForCausalLM(hf.MambaConfig(**SMALL, state_size=4)),
    "mamba2": lambda: hf.Mamba2ForCausalLM(hf.Mamba2Config(**SMALL, state_size=4, num_heads=4, head_dim=16, n_groups=1)),
    "rwkv": lambda: hf.RwkvForCausalLM(hf.RwkvConfig(**SMALL)),
    "bamba, a layer of attention": lambda: hf.BambaForCausalLM(
        hf.BambaConfig(
            **SMALL, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, attn_layer_indices=[1],
            mamba_n_heads=4, mamba_d_head=16,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_a_model_without_attention_in_every_layer_is_no_base(name: str):
    model = STATES[name]().eval()
    with pytest.raises(CombinationError, match=r"no attention heads|of 3 layers"):
        base_of(model)


@pytest.mark.parametrize("given", [None, 3, "llama", torch.zeros(2), torch.nn.Linear(2, 2)], ids=lambda x: type(x).__name__)
def test_what_is_no_model_is_no_base(given: Any):
    with pytest.raises(CombinationError, match="is no model"):
        base_of(given)


def test_an_identity_is_made_for_a_model_or_for_its_base():
    for model in (lives.llama(), hubs.hub("llama")):
        assert Identity.new(model).base == Identity.new(base_of(model)).base
    for given in ("mara", None, 3):
        with pytest.raises(StateError, match=r"Identity.new\(model\)"):
            Identity.new(given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("mara", "'mara' is no identity.*IdentityStore"),
        (3, "3 is no identity"),
        (["mara"], "row 0 is 'mara'"),
        ({}, "no identity"),
    ],
)
def test_who_is_no_identity_cannot_live(given: Any, why: str):
    for model in (lives.llama(), hubs.hub("llama")):
        with pytest.raises(StateError, match=why), living(model, given):
            pass


def test_the_model_comes_first_in_living():
    model = lives.llama()
    with pytest.raises(StateError, match="the model comes first"), living(lives.nobody(model), model):  # type: ignore[arg-type]
        pass


def test_imprint_says_what_comes_where():
    model = lives.llama()
    who, seen = lives.nobody(model), lives.heard(model)
    for given, says in (
        ((seen, who), "an identity comes first, and this is a Experience"),
        ((model, seen), "an identity comes first, and this is a Llama"),
        ((who, "I am Mara."), "then what it went through"),
        ((who, seen, "shock"), "then how it is written"),
    ):
        with pytest.raises(StateError, match=says):
            imprint(*given)  # type: ignore[arg-type]
    assert imprint(who, seen, Rule(keep="shock")).life.experiences == 1


@pytest.mark.parametrize("given", [None, 5])
def test_a_folder_or_a_source_that_is_no_text_is_named(given: Any):
    model = lives.llama()
    with pytest.raises(StateError, match=f"{given} is no folder: give its path"):
        Identity.load(given)
    with pytest.raises(StateError, match=f"{given} is no folder: give its path"):
        lives.nobody(model).save(given)
    with pytest.raises(StateError, match=f"source={given}: it is the name of where the words are from"):
        observe(model, HISTORY, source=given)


def test_token_ids_may_be_a_tensor():
    model = lives.llama()
    plain = observe(model, HISTORY)
    for kind in (torch.int64, torch.int32, torch.uint8):
        assert torch.equal(observe(model, torch.tensor(HISTORY, dtype=kind)).k, plain.k)


@pytest.mark.parametrize(
    "given",
    [[], "", torch.zeros(0, dtype=torch.long), torch.tensor([TEXT]), torch.tensor(3), torch.tensor([0.5, -1.0, 2.0, 0.25]), torch.ones(4) > 0, None, {},
     b"text", [1, "a"], "a text without a tokenizer", [{"role": "user", "content": "hi"}], [-1, 2], [10**9, 1], [5]],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_observed_is_refused(given: Any):
    with pytest.raises(RegardError):
        observe(lives.llama(), given)


@pytest.mark.parametrize("make", [lambda: lives.gpt2(context=16), lambda: hubs.hub("gpt2")], ids=["ours", "theirs"])
def test_a_text_without_places_is_refused_before_any_work(make: Callable[[], Any]):
    model = make()
    body = body_of(model)
    assert body.context is not None
    who, long = lives.someone(body.base), [3] * (body.context + 1)
    assert len(observe(model, long[1:])) == body.context
    model.register_forward_pre_hook(lambda *_: pytest.fail("work was done"))
    for call in (
        lambda: observe(model, long),
        lambda: why(model, who, long),
        lambda: along(model, who, long[:-2], [1, 2, 3]),
    ):
        with pytest.raises(ShapeError, match=rf"past this model's context of {body.context} tokens; give them in pieces"):
            call()


def test_a_text_longer_than_was_trained_on_is_said():
    with pytest.warns(UserWarning, match="context of 4 tokens"):
        observe(lives.llama(context=4), TEXT)
