"""Forwards that are under way while something is put in or taken out, copies, and other implementations: nothing mixes or drops."""

from __future__ import annotations

import contextvars
import copy
import gc
import io
import json
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from hubs import GROUPED, apart, hub, loud, someone, tokens

from regard import StateError
from regard.identity.body import body_of
from regard.identity.hf.inject import inject
from regard.identity.hf.interface import KEY
from regard.identity.speaking import living

SPEC = "dot | topk(2)"


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(params=["eager", "sdpa"])
def model(request: pytest.FixtureRequest) -> Any:
    return hub("llama", request.param)


@contextmanager
def halted(model: Any, run: Callable[[], torch.Tensor], layer: int = 1) -> Iterator[list[torch.Tensor]]:
    """A forward in another thread that waits inside a layer until the block has ended; what it gave is there after."""
    inside, go, found = threading.Event(), threading.Event(), list[torch.Tensor]()
    runner: list[int] = []

    def wait(module: Any, args: Any) -> None:
        if threading.get_ident() in runner and not inside.is_set():
            inside.set()
            assert go.wait(30)

    def work() -> None:
        runner.append(threading.get_ident())
        with torch.no_grad():
            found.append(run())

    # Before the layer's norm: its mask is made, its first layer has run, and its attention has not.
    handle = model.model.layers[layer].input_layernorm.register_forward_pre_hook(wait)
    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert inside.wait(30)
        yield found
    finally:
        go.set()
        thread.join(30)
        handle.remove()
    assert len(found) == 1


def test_a_forward_that_began_before_an_injection_ends_without_it(model: Any):
    x = tokens()
    alone = model(x).logits
    with halted(model, lambda: model(x).logits) as found:
        put = inject(model, SPEC)
        inside = model(x).logits
    assert torch.equal(found[0], alone)
    assert apart(inside, alone) > 1e-2
    assert torch.equal(model(x).logits, inside)
    put.unwrap()
    assert torch.equal(model(x).logits, alone)


def test_a_forward_that_began_under_an_injection_ends_under_it(model: Any):
    x, kind = tokens(), model.config._attn_implementation
    alone = model(x).logits
    put = inject(model, SPEC)
    inside = model(x).logits
    with halted(model, lambda: model(x).logits) as found:
        put.unwrap()
        assert torch.equal(model(x).logits, alone)
    assert torch.equal(found[0], inside)
    assert model.config._attn_implementation == kind
    assert torch.equal(model(x).logits, alone)


def test_another_injection_does_not_reach_a_forward_that_is_under_way(model: Any):
    x = tokens()
    with inject(model, SPEC):
        inside = model(x).logits
        with halted(model, lambda: model(x).logits) as found, inject(model, "cosine | softmax"):
            assert apart(model(x).logits, inside) > 1e-2
        assert torch.equal(found[0], inside)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_who_leaves_does_not_let_another_thread_see_the_future(model: Any, layer: int):
    """The mask of truth values was once added as numbers, and the first token saw all of them."""
    x, kind = tokens(), model.config._attn_implementation
    alone = model(x).logits
    block = living(model, someone(body_of(model).base))
    block.__enter__()
    with halted(model, lambda: model(x).logits, layer) as found:
        block.__exit__(None, None, None)
    assert torch.equal(found[0], alone)
    assert model.config._attn_implementation == kind
    assert not model.model.layers[0].self_attn._forward_pre_hooks


def test_who_comes_does_not_reach_a_forward_of_another_thread(model: Any):
    x = tokens()
    alone = model(x).logits
    with halted(model, lambda: model(x).logits) as found, living(model, someone(body_of(model).base)):
        assert apart(model(x).logits, alone) > 1e-2
    assert torch.equal(found[0], alone)


def test_a_mask_that_was_made_while_somebody_lived_is_read_as_truth_when_nobody_does(model: Any):
    """A forward that began before anybody came makes its mask while one is there, who is gone before it is read."""
    x = tokens()
    alone = model(x).logits
    before, made = threading.Event(), threading.Event()
    come, gone = threading.Event(), threading.Event()
    found: list[torch.Tensor] = []

    def embedding(module: Any, args: Any) -> None:
        if threading.current_thread() is thread:
            before.set()
            assert come.wait(30)

    def first_layer(module: Any, args: Any) -> None:
        if threading.current_thread() is thread:
            made.set()
            assert gone.wait(30)

    def work() -> None:
        with torch.no_grad():
            found.append(model(x).logits)

    hooks = [model.model.embed_tokens.register_forward_pre_hook(embedding)]
    hooks.append(model.model.layers[0].input_layernorm.register_forward_pre_hook(first_layer))
    thread = threading.Thread(target=work)
    who = someone(body_of(model).base)
    thread.start()
    assert before.wait(30)
    with living(model, who):
        come.set()
        assert made.wait(30)
    gone.set()
    thread.join(30)
    for hook in hooks:
        hook.remove()
    assert torch.equal(found[0], alone)
    with living(model, who):
        pass
    assert model.config._attn_implementation in ("eager", "sdpa")


def test_an_identity_injected_or_taken_out_midway_does_not_mix(model: Any):
    x, who = tokens(), someone(body_of(model).base)
    alone = model(x).logits
    with living(model, who):
        whole = model(x).logits
    with halted(model, lambda: model(x).logits) as found:
        put = inject(model, who)
    assert torch.equal(found[0], alone)
    with halted(model, lambda: model(x).logits) as found:
        put.unwrap()
    assert torch.equal(found[0], whole)
    assert torch.equal(model(x).logits, alone)


def test_a_forward_that_was_interrupted_leaves_nothing_behind(model: Any):
    x, kind = tokens(), model.config._attn_implementation
    alone = model(x).logits

    def stop(module: Any, args: Any) -> None:
        raise KeyboardInterrupt

    put = inject(model, SPEC)
    inside = model(x).logits
    handle = model.model.layers[1].input_layernorm.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    handle.remove()
    assert torch.equal(model(x).logits, inside)
    put.unwrap()
    assert model.config._attn_implementation == kind
    assert torch.equal(model(x).logits, alone)


def test_a_life_that_was_interrupted_is_taken_up_again(model: Any):
    x, who = tokens(), someone(body_of(model).base)
    alone = model(x).logits
    with living(model, who):
        wanted = model(x).logits

    def stop(module: Any, args: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].input_layernorm.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt), living(model, who):
        model(x)
    handle.remove()
    # What ended without a word was cleared away when the block was left, and the next forward of the thread looks for it too.
    with living(model, who):
        assert torch.equal(model(x).logits, wanted)
    assert torch.equal(model(x).logits, alone)


def test_an_interrupted_life_does_not_keep_a_model_from_going():
    model = hub("llama", "eager")
    gone, who = weakref.ref(model), someone(body_of(model).base)

    def stop(module: Any, args: Any) -> None:
        raise KeyboardInterrupt

    model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt), living(model, who):
        model(tokens())
    del model
    gc.collect()
    assert gone() is None


def test_an_interrupted_forward_does_not_speak_for_a_later_one(model: Any):
    x = tokens()
    alone = model(x).logits

    def stop(module: Any, args: Any) -> None:
        raise KeyboardInterrupt

    before = inject(model, SPEC)
    handle = model.model.layers[0].input_layernorm.register_forward_pre_hook(stop)

    def interrupted_then_alone() -> torch.Tensor:
        with pytest.raises(KeyboardInterrupt):
            model(x)
        handle.remove()
        before.unwrap()
        return model(x).logits

    with halted(model, interrupted_then_alone) as found:
        put = inject(model, SPEC)
    put.unwrap()
    assert torch.equal(found[0], alone)


def test_threads_that_come_and_go_while_memory_is_collected_find_their_own_frames():
    model, x = hub("llama", "eager"), tokens(1, 5)
    people = [None, *(someone(body_of(model).base, seed) for seed in (1, 2, 3))]

    def says(who: Any) -> torch.Tensor:
        with torch.no_grad(), living(model, who):
            return model.generate(x, max_new_tokens=4, do_sample=False)

    wanted, found, failed = [says(who) for who in people], list[bool](), list[BaseException]()

    def work(i: int) -> None:
        try:
            found.extend(torch.equal(says(people[i]), wanted[i]) for _ in range(12))
        except BaseException as error:
            failed.append(error)

    often = gc.get_threshold()
    gc.set_threshold(50, 3, 3)
    try:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(people))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    finally:
        gc.set_threshold(*often)
    assert failed == []
    assert found == [True] * 12 * len(people)


def test_hugging_faces_streamer_in_a_thread_that_brings_its_context_is_the_identity(model: Any):
    x, who = tokens(1, 5), someone(body_of(model).base)
    given = {"max_new_tokens": 4, "do_sample": False}
    with living(model, who):
        wanted = model.generate(x, **given)
    found: list[torch.Tensor] = []
    with living(model, who):
        run = contextvars.copy_context().run
        thread = threading.Thread(target=run, args=(lambda: found.append(model.generate(x, **given)),))
        thread.start()
    # The block has ended, and the thread that was started in it speaks on as who it was.
    thread.join(30)
    assert torch.equal(found[0], wanted)
    assert not torch.equal(model.generate(x, **given), wanted)
    del thread, run
    gc.collect()
    assert not model.model.layers[0].self_attn._forward_pre_hooks


# Copies, files, and other implementations.


def test_a_copy_of_a_model_that_something_is_injected_into_is_refused(model: Any):
    x = tokens()
    for what in (SPEC, someone(body_of(model).base)):
        with inject(model, what):
            inside = model(x).logits
            with pytest.raises(StateError, match="injected into this LlamaForCausalLM"):
                copy.deepcopy(model)
            with pytest.raises(StateError, match="injected"):
                copy.deepcopy(torch.nn.ModuleList([model]))
            assert torch.equal(model(x).logits, inside)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x).logits, model(x).logits)


def test_a_part_that_was_copied_is_refused_when_it_is_used(model: Any):
    other, x = hub("llama", model.config._attn_implementation), tokens()
    with inject(model, SPEC):
        other.model.layers = copy.deepcopy(model.model.layers)
        with pytest.raises(StateError, match="LlamaAttention is a copy"):
            other(x)


def test_a_copy_of_a_model_that_somebody_lives_in_is_the_model_by_itself(model: Any):
    x, kind = tokens(), model.config._attn_implementation
    alone = model(x).logits
    with living(model, someone(body_of(model).base)):
        inside = model(x).logits
        twin = copy.deepcopy(model)
        assert torch.equal(twin(x).logits, alone)
        assert twin.config._attn_implementation == kind
        assert not twin.model.layers[0].self_attn._forward_pre_hooks
        assert torch.equal(model(x).logits, inside)
        with living(twin, someone(body_of(twin).base)):
            assert torch.equal(twin(x).logits, inside)
    assert torch.equal(twin(x).logits, alone)


def test_what_is_injected_is_not_pickled_and_a_config_never_names_us(model: Any, tmp_path: Path):
    with inject(model, SPEC):
        for write in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
            with pytest.raises(StateError, match="before you save"):
                write(model)
        model.save_pretrained(tmp_path)
        assert KEY not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    pickle.dumps(model)
    again = hf.LlamaForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation != KEY


def test_another_implementation_is_for_when_nothing_is_injected_any_more():
    model, x = hub("llama", "eager"), tokens()
    put = inject(model, {1: SPEC})
    inside = model(x).logits
    model.set_attn_implementation("sdpa")
    assert apart(model(x).logits, inside) <= 1e-5, "what was injected is there still"
    (weights,) = model(x, output_attentions=True).attentions
    assert int((weights > 0).sum(-1).max()) == 2, "and the layers around it are torch's own call"
    put.unwrap()
    assert model.config._attn_implementation == "sdpa"
    with living(model, someone(body_of(model).base)):
        whole = model(x).logits
        model.set_attn_implementation("eager")
        assert torch.equal(model(x).logits, whole)
    assert model.config._attn_implementation == "eager"
    put = inject(model, SPEC)
    model.set_attn_implementation("sdpa")
    put.unwrap()
    assert model.config._attn_implementation == "sdpa"


def test_what_was_injected_does_not_keep_a_model_from_going():
    model = loud(hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)))
    inject(model, SPEC)
    model(tokens())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
