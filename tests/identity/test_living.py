"""Living: off is the model bit for bit, and on it is the same whether a text comes whole, in pieces, in a batch or in a thread."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from lives import HISTORY, MODELS, TEXT, apart, gpt2, heard, llama, logits, nobody, someone
from torch import Tensor

from regard.errors import RegardError, ShapeError, StateError
from regard.identity.body import base_of, body_of
from regard.identity.experience import observe
from regard.identity.speaking import MOST_READS, living, read_by
from regard.identity.state import Identity
from regard.identity.write.rule import Rule, imprint
from regard.identity.write.self_state import SelfRule
from regard.identity.write.trace import TraceRule
from regard.models.base import Model
from regard.models.decode.cache import static_caches
from regard.models.decode.generate import Sampling, generate, logits_of
from regard.models.decode.prepare import prepare
from regard.nn import Attention, Cache

WHOLE = Rule(keep="shock", share=1.0, trace=TraceRule(rate=0.5), self=SelfRule("key_bias"))
FORMS = {
    "imprints": {"form": None, "rank": 0},
    "imprints, unweighed": {"form": None, "rank": 0, "weighed": False},
    "trace": {"form": None, "slots": 0},
    "self": {"rank": 0, "slots": 0},
    "self token": {"rank": 0, "slots": 0, "form": "self_token"},
    "everything": {},
    "everything with a token": {"form": "self_token"},
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]()


def bends(model: Model) -> list[object]:
    return [m.override for m in model.modules() if isinstance(m, Attention)]


def under(model: Model, who: object, tokens: list[list[int]] | list[int] = TEXT) -> Tensor:
    with living(model, who):  # type: ignore[arg-type]
        return logits(model, tokens)


def test_an_empty_identity_is_the_model_itself_bit_for_bit(model: Model):
    plain, decoded = logits(model, TEXT), logits_of(model, TEXT)
    for off in (None, nobody(model), [None], [nobody(model)]):
        with living(model, off):
            assert not any(bends(model)), "an identity that holds nothing must leave the model's own path"
            assert torch.equal(logits(model, TEXT), plain)
            assert torch.equal(logits_of(model, TEXT), decoded)
    assert torch.equal(logits(model, TEXT), plain)


def test_a_trace_and_a_self_of_zeros_are_empty():
    model = llama()
    calm = imprint(nobody(model), heard(model, affect=0.0), WHOLE)
    assert calm.trace is not None
    assert calm.self is not None
    assert calm.empty
    assert torch.equal(under(model, calm), logits(model, TEXT))


@pytest.mark.parametrize("form", FORMS)
def test_every_part_moves_the_logits_and_leaves_the_model_as_it_was(model: Model, form: str):
    plain = logits(model, TEXT)
    assert apart(under(model, someone(base_of(model), **FORMS[form])), plain) > 1e-3
    assert torch.equal(logits(model, TEXT), plain)
    assert not any(bends(model))


def test_saved_and_loaded_an_identity_says_exactly_the_same(model: Model, tmp_path):
    mara = imprint(nobody(model), heard(model), WHOLE)
    mara.save(tmp_path / "mara")
    again = Identity.load(tmp_path / "mara")
    assert again.digest() == mara.digest()
    assert torch.equal(under(model, again), under(model, mara))


def test_a_fork_does_not_touch_what_it_came_from():
    model = llama()
    mara = imprint(nobody(model), heard(model), WHOLE)
    digest, said = mara.digest(), under(model, mara)
    fork = imprint(mara, heard(model, TEXT, source="later"), WHOLE)
    assert fork.digest() != digest
    assert apart(under(model, fork), said) > 1e-4
    assert mara.digest() == digest
    assert torch.equal(under(model, mara), said)


@pytest.mark.parametrize("form", FORMS)
def test_step_by_step_equals_the_whole(model: Model, form: str):
    who = someone(base_of(model), **FORMS[form])
    with living(model, who), torch.no_grad():
        whole = logits(model, TEXT)[0]
        decoder = prepare(model)
        for cut in (1, 3):
            caches: tuple[Cache, ...] = tuple(Cache() for _ in range(base_of(model).depth))
            static = static_caches(decoder.depth, 2)
            steps, fast = [], []
            for at in range(0, len(TEXT), cut):
                chunk = torch.tensor([TEXT[at : at + cut]])
                out = model(chunk, caches=caches)
                caches = out.caches
                steps.append(out.logits[0])
                found, static = decoder(chunk, static, every=True)
                fast.append(found[0])
            assert apart(torch.cat(steps), whole) < 1e-4
            assert apart(torch.cat(fast), whole) < 1e-4
        assert apart(logits_of(model, TEXT), whole) < 1e-4


@pytest.mark.parametrize("prefill", [1, 2, 512])
def test_generation_says_what_forwards_would_say(model: Model, prefill: int):
    who = someone(base_of(model))
    with living(model, who):
        found = generate(model, TEXT, Sampling(max_tokens=5, temperature=0), prefill=prefill).tokens[0]
        ids = list(TEXT)
        for _ in range(5):
            ids.append(int(logits(model, ids)[0, -1].argmax()))
    assert found == ids[len(TEXT) :]
    # Otherwise the identity might as well not have been there.
    assert found != generate(model, TEXT, Sampling(max_tokens=5, temperature=0)).tokens[0]


def test_weights_of_a_byte_run_under_an_identity():
    model = llama()
    with living(model, someone(base_of(model))):
        rough, fine = logits_of(model, TEXT, weights="int8"), logits_of(model, TEXT)
        out = generate(model, [TEXT, TEXT[:3]], Sampling(max_tokens=3), weights="int8")
    assert apart(rough, fine) < 0.2 * float(fine.abs().max())
    assert [len(x) for x in out.tokens] == [3, 3]
    assert apart(rough, logits_of(model, TEXT, weights="int8")) > 1e-2


def test_half_precision_runs_and_stays_near():
    model = llama()
    who = someone(base_of(model))
    fine = under(model, who)
    rough = llama().bfloat16()
    found = under(rough, replace(who, base=base_of(rough)))
    assert found.dtype == torch.bfloat16
    assert apart(found, fine) < 0.1 * float(fine.abs().max())


def test_slots_take_no_place_of_gpt2():
    model = gpt2(context=len(TEXT))
    with living(model, someone(base_of(model), slots=20)), torch.no_grad():
        # With slots counted as places, the table of positions would be too short.
        whole = logits(model, TEXT)
        out = model(torch.tensor([TEXT[:4]]), caches=tuple(Cache() for _ in range(2)))
        assert len(out.caches[0]) == 4
        assert out.caches[0].lead == 20
        rest = model(torch.tensor([TEXT[4:]]), caches=out.caches).logits
    assert apart(torch.cat([out.logits, rest], 1), whole) < 1e-4


def test_rows_of_a_batch_are_each_their_own(model: Model):
    base = base_of(model)
    a, b = someone(base, 1, slots=3, form="self_token"), someone(base, 2, slots=6, rank=2)
    rows = [TEXT, HISTORY[: len(TEXT)], TEXT]
    for who in ([a, None, b], [None, a, nobody(model)], [b, a, b]):
        found = under(model, who, rows)
        for i, one in enumerate(who):
            assert apart(found[i], under(model, one, rows[i])[0]) < 1e-5


@pytest.mark.parametrize("form", ["imprints", "trace", "everything"])
def test_prompts_of_different_lengths_are_each_their_own(model: Model, form: str):
    base = base_of(model)
    a, b = (someone(base, seed, **FORMS[form]) for seed in (1, 2))
    prompts = [TEXT, TEXT[:3], HISTORY, TEXT[1:4]]
    who = [a, b, None, a]
    sampling = Sampling(max_tokens=4, temperature=0, logprobs=0)
    with living(model, who):
        found = generate(model, prompts, sampling)
    assert found.logprobs is not None
    for i, one in enumerate(who):
        with living(model, one):
            single = generate(model, prompts[i], sampling)
        assert single.logprobs is not None
        assert found.tokens[i] == single.tokens[0]
        assert found.logprobs[i] == pytest.approx(single.logprobs[0], abs=1e-4)


@pytest.mark.parametrize("form", ["imprints", "trace", "self"])
def test_a_wrong_number_of_rows_is_refused(form: str):
    model = llama()
    a = someone(base_of(model), **FORMS[form])
    with living(model, [a, None]):
        with pytest.raises(ShapeError, match="2 identities"):
            logits(model, [TEXT] * 3)
        with pytest.raises(ShapeError, match="2 identities"):
            generate(model, [TEXT, TEXT, TEXT], Sampling(max_tokens=2))
        with pytest.raises(ShapeError, match="2 identities"):
            generate(model, [TEXT, TEXT[:2], TEXT[:3]], Sampling(max_tokens=2))
    with living(model, [a, None, a, a]), pytest.raises(ShapeError, match="4 identities"):
        generate(model, [TEXT, TEXT[:2], TEXT[:3]], Sampling(max_tokens=2))


def test_one_identity_alone_is_for_every_row():
    model = llama()
    a = someone(base_of(model))
    found = under(model, a, [TEXT, TEXT])
    assert apart(found[0], found[1]) < 1e-6
    assert apart(found[0], under(model, a)[0]) < 1e-5


def test_two_threads_on_one_model_are_two_people():
    model = llama()
    base = base_of(model)
    people = [someone(base, 1), someone(base, 2), None]
    expected = [under(model, who) for who in people]
    barrier, wrong = Barrier(len(people)), []

    def live(i: int) -> None:
        try:
            with living(model, people[i]):
                barrier.wait(30)
                for _ in range(20):
                    if not torch.equal(logits(model, TEXT), expected[i]):
                        wrong.append(i)
        except BaseException as error:
            wrong.append(error)

    threads = [Thread(target=live, args=(i,)) for i in range(len(people))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert wrong == []


def test_a_life_inside_another_ends_where_it_began():
    model = llama()
    base = base_of(model)
    a, b = someone(base, 1), someone(base, 2, slots=0)
    mine, theirs, plain = under(model, a), under(model, b), logits(model, TEXT)
    with living(model, a):
        with living(model, b):
            assert torch.equal(logits(model, TEXT), theirs)
            with living(model, None):
                assert torch.equal(logits(model, TEXT), plain)
            assert torch.equal(logits(model, TEXT), theirs)
        assert torch.equal(logits(model, TEXT), mine)
    assert torch.equal(logits(model, TEXT), plain)


def test_a_life_on_one_model_does_not_reach_another():
    one, other = llama(), llama(1)
    plain = logits(other, TEXT)
    with living(one, someone(base_of(one))):
        assert torch.equal(logits(other, TEXT), plain)


def test_an_error_inside_gives_the_model_back():
    model = llama()
    plain = logits(model, TEXT)
    with pytest.raises(KeyError), living(model, someone(base_of(model))):
        raise KeyError("inside")
    assert torch.equal(logits(model, TEXT), plain)
    with living(model, someone(base_of(model))), pytest.raises(ShapeError):
        logits(model, [10**6, 1])
    assert torch.equal(logits(model, TEXT), plain)


def test_a_forward_that_learns_runs_after_a_generation():
    # Decoding keeps slots made without a history of gradients; a later forward may want one.
    model = llama()
    with living(model, someone(base_of(model))):
        generate(model, TEXT, Sampling(max_tokens=2))
        loss = model(torch.tensor([TEXT])).logits.square().mean()
        loss.backward()
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in model.parameters())


@pytest.mark.parametrize("beta", [0.5, 1.0, 1.5, 50.0])
def test_refusing_steps_equal_the_whole(beta: float):
    model = llama()
    with living(model, someone(base_of(model)), beta=beta), torch.no_grad():
        assert apart(logits_of(model, TEXT), logits(model, TEXT)[0]) < 1e-4


def test_who_refuses_every_slot_is_the_base():
    model = llama()
    slots = someone(base_of(model), form=None, rank=0)
    with living(model, slots, beta=1e9):
        found = logits(model, TEXT)
    assert apart(found, logits(model, TEXT)) < 1e-4


@pytest.mark.parametrize("beta", [0.0, -1.0, float("nan"), "much"])
def test_a_beta_that_is_not_above_zero_is_refused(beta: Any):
    model = llama()
    with pytest.raises(StateError, match="beta"), living(model, nobody(model), beta=beta):
        pass


def test_no_rows_and_another_base_are_refused():
    model, other = llama(), llama(1)
    with pytest.raises(ShapeError, match="no identities"), living(model, []):
        pass
    with pytest.raises(StateError, match="weights differ"), living(other, nobody(model)):
        pass
    with pytest.raises(StateError, match="weights differ"), living(other, [None, nobody(model)]):
        pass
    with pytest.raises(StateError, match="layers"), living(llama(depth=2), nobody(model)):
        pass


def test_a_file_that_lies_about_its_shape_is_refused():
    model = llama()
    liar = someone(replace(base_of(model), depth=5))
    with pytest.raises(StateError, match="layers"), living(model, liar):
        pass


def test_weights_that_changed_are_another_base():
    model = llama()
    mara = imprint(nobody(model), heard(model), WHOLE)
    with torch.no_grad():
        model.blocks[0].attention.v.weight[0, 0] += 1.0
    with pytest.raises(RegardError, match="weights differ"), living(model, mara):
        pass


def test_what_is_observed_depends_on_who_lives():
    model = llama()
    plain = observe(model, TEXT)
    with living(model, someone(base_of(model))):
        mine = observe(model, TEXT)
    assert apart(plain.shock, mine.shock) > 1e-3
    assert body_of(model) is plain.body


def test_reads_are_made_once_while_the_identity_is_the_same() -> None:
    model = llama()
    mara, tom = (someone(base_of(model), seed, slots=3, rank=2) for seed in (1, 2))
    first = read_by(model, mara)[1]
    assert read_by(model, tom)[1] is not first
    assert read_by(model, mara)[1] is first
    assert read_by(model, [mara])[1] is first
    assert read_by(model, mara, 2.0)[1] is not first
    # A write into an identity's tensors is seen, though nobody should.
    again = read_by(model, mara)[1]
    assert mara.self is not None
    with torch.no_grad():
        mara.self.s.add_(1.0)
    changed = read_by(model, mara)[1]
    assert changed is not again
    assert changed[0] is not None
    assert again[0] is not None
    assert changed[0].digest != again[0].digest


def test_reads_go_with_their_identity_and_are_few() -> None:
    model = llama()
    base = base_of(model)
    everybody = [someone(base, seed) for seed in range(MOST_READS + 3)]
    for i in range(len(everybody)):
        read_by(model, everybody[i])
    kept = body_of(model).made["reads"]._kept
    assert len(kept) == MOST_READS
    assert everybody[-1] in kept
    assert everybody[0] not in kept
    del everybody
    gc.collect()
    assert len(kept) == 0


def test_reads_of_what_is_learned_are_made_for_every_forward() -> None:
    model = llama()
    mara = someone(base_of(model), 1)
    assert mara.self is not None
    mara.self.s.requires_grad_(True)
    assert read_by(model, mara)[1] is not read_by(model, mara)[1]


def test_a_model_whose_reads_are_kept_can_be_copied_and_the_copy_has_reads_of_its_own() -> None:
    model = llama()
    me, tokens = someone(base_of(model)), torch.tensor([TEXT])
    with living(model, me):
        own = model(tokens).logits
    assert "reads" in body_of(model).made
    other = copy.deepcopy(model)
    with living(other, me):
        assert torch.equal(other(tokens).logits, own)
    assert copy.copy(body_of(model).made["reads"]) is not body_of(model).made["reads"]
