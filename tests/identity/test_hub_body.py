"""Living in Hugging Face models: what our own model says with the same weights and the same identity, in every way of running."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from hubs import DEAF, DECODERS, GROUPED, OURS, SIZES, apart, both, hub, loud, padded, someone, tokens
from torch import Tensor

from regard import CombinationError, ShapeError, StateError
from regard.identity.body import body_of
from regard.identity.experience import observe
from regard.identity.hf.inject import HubBody, inject
from regard.identity.read.layer import LayerRead, layer_reads
from regard.identity.speaking import living
from regard.identity.state import Identity
from regard.models.decode.generate import generate
from regard.models.decode.sampling import Sampling

CLOSE = 1e-4


@pytest.fixture(autouse=True)
def _no_gradients() -> object:
    with torch.no_grad():
        yield


def stepped(model: hf.PreTrainedModel, x: Tensor, **given: Any) -> Tensor:
    """Logits token by token over the model's own cache."""
    cache, found = None, []
    for t in range(x.shape[1]):
        more = {name: value[:, : t + 1] for name, value in given.items()}
        out = model(x[:, t : t + 1], past_key_values=cache, use_cache=True, **more)
        cache = out.past_key_values
        found.append(out.logits)
    return torch.cat(found, 1)


def drawn(base: Any) -> dict[str, Identity]:
    whole = someone(base)
    return {
        "whole": whole,
        "imprints": whole.only("imprints"),
        "imprints of equal weight": someone(base, weighed=False).only("imprints"),
        "trace": whole.only("trace"),
        "self": whole.only("self"),
        "self token": someone(base, form="self_token"),
    }


PARTS = ["whole", "imprints", "imprints of equal weight", "trace", "self", "self token"]


@pytest.mark.parametrize("name", OURS)
def test_ours_and_theirs_are_one_base(name: str, tmp_path: Path):
    ours, theirs = both(name, tmp_path)
    assert body_of(ours).base == body_of(theirs).base
    assert body_of(theirs).base.family == OURS[name]
    assert body_of(ours).scales == pytest.approx(body_of(theirs).scales)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", OURS)
def test_an_identity_says_the_same_in_theirs_as_in_ours(name: str, part: str, tmp_path: Path):
    ours, theirs = both(name, tmp_path)
    who, x = drawn(body_of(ours).base)[part], tokens(length=9)
    alone = theirs(x).logits
    with living(ours, who):
        expected = ours(x).logits
    with living(theirs, who):
        whole, uncached, steps = theirs(x).logits, theirs(x, use_cache=False).logits, stepped(theirs, x)
    assert apart(alone, expected) > 1e-2
    assert apart(expected, whole) <= CLOSE
    assert apart(expected, uncached) <= CLOSE
    assert apart(expected, steps) <= CLOSE
    assert torch.equal(alone, theirs(x).logits)


def test_an_identity_written_on_theirs_lives_in_ours(tmp_path: Path):
    ours, theirs = both("llama", tmp_path)
    who, x = someone(body_of(theirs).base), tokens()
    who.save(tmp_path / "who")
    with living(ours, Identity.load(tmp_path / "who")):
        a = ours(x).logits
    with living(theirs, who):
        assert apart(a, theirs(x).logits) <= CLOSE


@pytest.mark.parametrize("name", OURS)
def test_observe_sees_the_same_in_theirs_as_in_ours(name: str, tmp_path: Path):
    ours, theirs = both(name, tmp_path)
    ids = tokens(1, 9)[0].tolist()
    a, b = observe(ours, ids), observe(theirs, ids)
    for part in ("shock", "q", "k", "v"):
        assert apart(getattr(a, part), getattr(b, part)) <= CLOSE, part
    if "windowed" not in name:
        seen = torch.stack([w.mean(1)[0] for w in theirs(tokens(1, 9), output_attentions=True).attentions])
        assert apart(b.attention, seen) <= CLOSE
        assert apart(a.attention, b.attention) <= CLOSE


@pytest.mark.parametrize("name", OURS)
def test_generate_says_what_ours_says(name: str, tmp_path: Path):
    ours, theirs = both(name, tmp_path)
    who, x = someone(body_of(ours).base), tokens(1, 7)
    with living(ours, who):
        expected = generate(ours, [x[0].tolist()], Sampling(max_tokens=8)).tokens[0]
    with living(theirs, who):
        said = theirs.generate(x, max_new_tokens=8, do_sample=False)
    assert said[0, 7:].tolist() == expected
    assert not torch.equal(said, theirs.generate(x, max_new_tokens=8, do_sample=False))


@pytest.mark.parametrize("name", DECODERS)
def test_every_family_says_the_same_whole_step_by_step_and_padded(name: str):
    model = hub(name)
    who, x = someone(body_of(model).base), tokens(1, 12)
    alone = model(x).logits
    with living(model, who):
        whole, steps = model(x).logits, stepped(model, x)
        pad, real = F.pad(x, (4, 0)), F.pad(torch.ones_like(x), (4, 0))
        numbered = model(pad, attention_mask=real, position_ids=(real.cumsum(-1) - 1).clamp_min(0)).logits[:, 4:]
    assert apart(alone, whole) > 1e-2
    assert apart(whole, steps) <= CLOSE
    assert apart(whole, numbered) <= CLOSE


@pytest.mark.parametrize("name", [n for n in DECODERS if n != "gpt2"])
def test_padding_that_moves_a_text_moves_what_is_remembered_with_it(name: str):
    """Without position_ids transformers counts from the padding; slots stand right before the first real token all the same."""
    model = hub(name)
    who, x = someone(body_of(model).base), tokens(1, 9)
    pad, real = F.pad(x, (5, 0)), F.pad(torch.ones_like(x), (5, 0))
    with living(model, who):
        assert apart(model(x).logits, model(pad, attention_mask=real).logits[:, 5:]) <= CLOSE
        assert apart(model(x).logits, stepped(model, pad, attention_mask=real)[:, 5:]) <= CLOSE


@pytest.mark.parametrize("name", DECODERS)
def test_one_identity_for_each_row_of_a_padded_batch(name: str):
    model = hub(name)
    base = body_of(model).base
    people = [someone(base, 1), None, someone(base, 2, slots=2, rank=2), someone(base, 3, form="self_token").only("self")]
    x, real = padded([9, 6, 4, 7])
    with living(model, people):
        # GPT-2 looks its positions up, so padding moves them unless they are given; the others count the distance only.
        places = {"position_ids": (real.cumsum(-1) - 1).clamp_min(0)} if name == "gpt2" else {}
        logits = model(x, attention_mask=real, **places).logits
        said = model.generate(x, attention_mask=real, max_new_tokens=5, do_sample=False)
    for row, who in enumerate(people):
        text = x[row : row + 1, real[row].bool()]
        with living(model, who):
            assert apart(logits[row, real[row].bool()], model(text).logits[0]) <= CLOSE
            assert torch.equal(said[row, -5:], model.generate(text, max_new_tokens=5, do_sample=False)[0, -5:])


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral, windowed"])
def test_beams_keep_their_identities_and_their_scores(name: str):
    model = hub(name)
    base = body_of(model).base
    people = [someone(base, 1), None, someone(base, 2, slots=2)]
    x, real = padded([6, 4, 5])
    with living(model, people):
        out = model.generate(
            x, attention_mask=real, max_new_tokens=5, num_beams=3, num_return_sequences=2, length_penalty=0.0, do_sample=False,
            output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
    for i, said in enumerate(out.sequences):
        who, text = people[i // 2], said[x.shape[1] - int(real[i // 2].sum()) :][None]
        with living(model, who):
            logs = model(text).logits.log_softmax(-1)
        score = logs[0, -6:-1].gather(-1, text[0, -5:, None]).sum()
        assert float(score) == pytest.approx(float(out.sequences_scores[i]), abs=CLOSE)


def test_a_static_cache_carries_an_identity():
    model = hub("llama")
    who, x = someone(body_of(model).base), tokens(2, 6)
    with living(model, who):
        dynamic = model.generate(x, max_new_tokens=6, do_sample=False)
        static = model.generate(x, max_new_tokens=6, do_sample=False, cache_implementation="static")
    assert torch.equal(dynamic, static)


def test_a_cache_that_is_cropped_copied_and_picked_from_goes_on_as_it_should():
    model = hub("llama")
    who, x = someone(body_of(model).base), tokens(2, 8)
    with living(model, who):
        whole = model(x).logits
        cache = model(x, use_cache=True).past_key_values
        cache.crop(-3)
        twin = copy.deepcopy(cache)
        twin.batch_select_indices(torch.tensor([1]))
        picked = model(x[1:, 5:], past_key_values=twin).logits
        again = model(x[:, 5:], past_key_values=cache).logits
    assert apart(whole[:, 5:], again) <= CLOSE
    assert apart(whole[1:, 5:], picked) <= CLOSE


@pytest.mark.parametrize("part", ["whole", "imprints of equal weight"])
def test_a_cache_of_one_identity_is_refused_under_another_and_under_none(part: str):
    model = hub("llama")
    base = body_of(model).base
    who, x = drawn(base)[part], tokens(1, 5)

    def filled() -> Any:
        with living(model, who):
            return model(x, use_cache=True).past_key_values

    with pytest.raises(StateError, match="reads none now"):
        model(x, past_key_values=filled())
    with living(model, None), pytest.raises(StateError, match="reads none now"):
        model(x, past_key_values=filled())
    with living(model, someone(base, 9)), pytest.raises(StateError, match="reads another one now"):
        model(x, past_key_values=filled())
    plain = model(x, use_cache=True).past_key_values
    with living(model, who), pytest.raises(StateError, match="filled without the identity"):
        model(x, past_key_values=plain)
    with living(model, who):
        whole = model(torch.cat([x, x], 1)).logits
        assert apart(whole[:, 5:], model(x, past_key_values=filled()).logits) <= CLOSE, "the same identity may come back"


def test_a_cache_that_was_emptied_is_anyones():
    model = hub("llama")
    who, x = someone(body_of(model).base), tokens(1, 5)
    alone = model(x).logits
    with living(model, who):
        cache = model(x, use_cache=True).past_key_values
    cache.reset()
    assert apart(alone, model(x, past_key_values=cache).logits) <= CLOSE


def test_an_identity_that_holds_nothing_registers_nothing_and_changes_no_bit():
    model, x = hub("llama", "sdpa"), tokens()
    base, alone = body_of(model).base, model(x).logits
    for nobody in (Identity.new(base), None, [None, Identity.new(base)]):
        with living(model, nobody):
            assert model.config._attn_implementation == "sdpa"
            assert not model.model.layers[0].self_attn._forward_pre_hooks
            assert torch.equal(alone, model(x).logits)
        put = inject(model, Identity.new(base))
        assert model.config._attn_implementation == "sdpa"
        put.unwrap()


def test_blocks_nest_and_each_gives_back_what_it_found():
    model, x = hub("llama", "sdpa"), tokens()
    base, alone = body_of(model).base, model(x).logits
    with living(model, someone(base, 1)):
        one = model(x).logits
        with living(model, someone(base, 2)):
            assert apart(one, model(x).logits) > 1e-2
        with living(model, None):
            assert torch.equal(alone, model(x).logits), "the model by itself, bit for bit, inside another's block"
        with pytest.raises(KeyError), living(model, someone(base, 3)):
            raise KeyError
        assert torch.equal(one, model(x).logits)
    assert model.config._attn_implementation == "sdpa"
    assert not model.model.layers[0].self_attn._forward_pre_hooks
    assert torch.equal(alone, model(x).logits)


def test_threads_live_their_own_lives_in_one_model():
    model, x = hub("llama", "sdpa"), tokens()
    base, alone = body_of(model).base, model(x).logits
    people = [someone(base, seed) for seed in range(3)]
    expected = []
    for who in people:
        with living(model, who):
            expected.append(model(x).logits)
    differences: list[float] = []
    start = threading.Barrier(4)

    def run(who: Identity | None, want: Tensor) -> None:
        start.wait()
        for _ in range(10):
            with torch.no_grad(), living(model, who):
                differences.append(apart(want, model(x).logits))

    threads = [threading.Thread(target=run, args=pair) for pair in zip([*people, None], [*expected, alone], strict=True)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(differences) == 40
    assert max(differences) == 0
    assert model.config._attn_implementation == "sdpa"


def test_a_second_model_of_the_same_config_is_not_lived_in():
    config = hf.LlamaConfig(**GROUPED)
    one, other = loud(hf.LlamaForCausalLM(config)), loud(hf.LlamaForCausalLM(config))
    x = tokens()
    alone = other(x).logits
    with living(one, someone(body_of(one).base)):
        assert torch.equal(alone, other(x).logits)
        assert apart(alone, one(x).logits) > 1e-2


def test_an_identity_is_injected_for_every_thread_and_into_chosen_layers():
    model, x = hub("llama", "sdpa"), tokens()
    who, alone = someone(body_of(model).base), model(x).logits
    with living(model, who):
        expected = model(x).logits
    put, found = inject(model, who), []
    # A thread begins with gradients on, and with them another kernel may compute.
    thread = threading.Thread(target=torch.no_grad()(lambda: found.append(model(x).logits)))
    thread.start()
    thread.join()
    assert torch.equal(expected, found[0])
    with living(model, None):
        assert torch.equal(alone, model(x).logits)
    put.unwrap()
    assert torch.equal(alone, model(x).logits)
    states = model(x, output_hidden_states=True).hidden_states
    with inject(model, who, layers=[1]):
        within = model(x, output_hidden_states=True).hidden_states
        steps = stepped(model, x)
        whole = model(x).logits
    assert torch.equal(states[1], within[1])
    assert apart(states[2], within[2]) > 1e-2
    assert apart(whole, steps) <= CLOSE


def test_an_identity_lives_among_the_keys_that_another_selection_chooses():
    model, x = hub("llama"), tokens()
    who = someone(body_of(model).base)
    with living(model, who):
        plain = model(x).logits
    with inject(model, "dot | topk(3)"), living(model, who):
        chosen, steps = model(x).logits, stepped(model, x)
    assert apart(plain, chosen) > 1e-2
    assert apart(chosen, steps) <= CLOSE
    with inject(model, "cosine | softmax"), living(model, who), pytest.raises(CombinationError, match="changes dot products"):
        model(x)


def plainly(read: LayerRead, q: Tensor, k: Tensor, v: Tensor, body: HubBody, layer: int) -> Tensor:
    """The formula of read.py, term by term, for one text: q (H,N,D), k and v (G,N,D) before RoPE."""
    H, N, D = q.shape
    m = read.slots
    out = torch.zeros(H, N, D, dtype=torch.float64)
    turn = body.turns[body.layers[layer]]
    places = torch.arange(-m, N)[None]
    for h in range(H):
        g = h * k.shape[0] // H
        keys = torch.cat([read.k[0, g], k[g]]).double()
        values = torch.cat([read.v[0, g], v[g]]).double()
        turned_q = turn(q[h][None, None], places[:, m:])[0, 0].double()
        turned_k = turn(keys.float()[None, None], places)[0, 0].double()
        S = read.left[0, g].double().T @ torch.diag(read.signs[0].double()) @ read.left[0, g].double()
        for i in range(N):
            scores = []
            seen = range(m if i == 0 else 0, m + i + 1)
            for j in seen:
                a, b = F.normalize(q[h, i].double(), dim=0), F.normalize(keys[j], dim=0)
                score = turned_q[i] @ turned_k[j] * read.scale + 2 * a @ S @ b - b @ S @ b + keys[j] @ read.bias[0, g].double()
                scores.append(score + (read.weight[0, g, j].double() if j < m else 0.0))
            out[h, i] = torch.stack(scores).softmax(0) @ values[seen.start : seen.stop]
    return out


def test_a_layer_reads_by_the_formula():
    model = hub("llama")
    body = body_of(model)
    assert isinstance(body, HubBody)
    who, x = someone(body.base), tokens(1, 6)
    reads = layer_reads([who], body.scales)
    attention = model.model.layers[0].self_attn
    seen: list[Tensor] = []
    hook = attention.o_proj.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    with living(model, who):
        _, heads = body.watched(x[0])
    hook.remove()
    expected = plainly(reads[0], heads[0].q, heads[0].k, heads[0].v, body, 0)
    assert apart(expected.transpose(0, 1).flatten(1), seen[0][0]) <= 1e-5


def test_a_mask_that_is_written_into_between_forwards_is_read_anew():
    model, x = hub("llama"), tokens(1, 6)
    allowed = torch.ones(6, 6, dtype=torch.bool).tril()[None, None].clone()
    with living(model, someone(body_of(model).base)):
        before = model(x, attention_mask=allowed).logits
        allowed[..., 3:, 1] = False
        after = model(x, attention_mask=allowed).logits
        again = model(x, attention_mask=allowed.clone()).logits
    assert apart(before, after) > 1e-3
    assert torch.equal(after, again)


def test_weights_leave_the_slots_out():
    model, x = hub("llama"), tokens(1, 6)
    with living(model, someone(body_of(model).base)):
        weights = model(x, output_attentions=True).attentions
    assert all(w.shape == (1, 6, 6, 6) for w in weights)
    assert bool((weights[0][..., 1:, :].sum(-1) < 1).all())
    torch.testing.assert_close(weights[0][..., 0, 0], torch.ones(1, 6), msg="the first token meets no slot")
    assert bool((weights[0].sum(-1) > 0).all())


def test_beta_lets_queries_refuse_as_in_ours(tmp_path: Path):
    ours, theirs = both("llama", tmp_path)
    who, x = someone(body_of(ours).base), tokens(2, 9)
    with living(ours, who, beta=1.0):
        expected = ours(x).logits
    with living(theirs, who):
        kept = theirs(x).logits
    with living(theirs, who, beta=1.0):
        assert apart(expected, theirs(x).logits) <= CLOSE
        assert apart(expected, stepped(theirs, x)) <= CLOSE
    assert apart(expected, kept) > 1e-3


def test_half_precision_follows_full_precision():
    model, x = hub("llama"), tokens()
    who = someone(body_of(model).base)
    with living(model, who):
        full = model(x).logits
    half = copy.deepcopy(model).to(torch.bfloat16)
    who = Identity(body_of(half).base, who.self, who.trace, who.imprints, who.sources)
    alone = half(x).logits
    with living(half, who):
        low, steps = half(x).logits, stepped(half, x)
    assert low.dtype == torch.bfloat16
    assert apart(full, low) <= 0.05 * float(full.abs().max())
    assert apart(full, steps) <= 0.05 * float(full.abs().max())
    assert apart(full, low) < 0.2 * apart(full, alone)


def test_gradients_reach_what_is_remembered():
    model, x = hub("llama"), tokens()
    body = body_of(model)
    reads = layer_reads([someone(body.base)], body.scales)
    remembered = [r.k.clone().requires_grad_() for r in reads]
    learning = [replace(r, k=k) for r, k in zip(reads, remembered, strict=True)]
    with torch.enable_grad(), body.read(learning):
        body.logits(x).square().mean().backward()
    assert all(k.grad is not None and bool(torch.isfinite(k.grad).all()) and k.grad.abs().max() > 0 for k in remembered)


@pytest.mark.parametrize("name", DECODERS)
def test_the_head_on_what_is_hidden_gives_the_logits(name: str):
    model, x = hub(name), tokens()
    body = body_of(model)
    with living(model, someone(body.base)):
        assert apart(body.logits(x), body.head(body.hidden(x))) <= CLOSE


@pytest.mark.parametrize("name", DEAF)
def test_a_model_that_would_ignore_an_identity_is_refused(name: str):
    with pytest.raises(CombinationError, match=r"never calls|does not run"):
        body_of(DEAF[name]().eval())


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: hf.BertLMHeadModel(hf.BertConfig(**SIZES, is_decoder=True)), "q_proj"),
        (lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZES)), "see the future"),
        (lambda: hf.LlamaModel(hf.LlamaConfig(**GROUPED)), "no logits"),
        (lambda: hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=97, d_model=16, num_layers=1, num_heads=2)), "two texts"),
        (
            lambda: hf.LlamaForCausalLM(
                hf.LlamaConfig(**GROUPED, rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0})
            ),
            "anew",
        ),
        (lambda: torch.nn.Linear(2, 2), "no model of transformers"),
    ],
)
def test_a_body_that_an_identity_cannot_live_in_is_refused_with_its_reason(make: Any, why: str):
    with pytest.raises(CombinationError, match=why):
        body_of(make())


def test_an_identity_of_other_weights_and_a_batch_of_another_size_are_refused():
    model, other = hub("llama"), hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED))
    who = someone(body_of(model).base)
    with pytest.raises(StateError, match="weights differ"), living(other, who):
        pass
    with pytest.raises(StateError, match="weights differ"):
        inject(other, who)
    for rows in (3, 4):
        with living(model, [who, None]), pytest.raises(ShapeError, match=f"the batch has {rows} rows"):
            model(tokens(rows))
