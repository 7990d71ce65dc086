"""Why: what is left out of an identity moves the next token by as much as is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from regard.errors import RegardError
from regard.identity import Identity, Rule, SelfRule, TraceRule, base_of
from regard.identity.experience import observe
from regard.identity.speaking import living
from regard.identity.why import along, kl, why
from regard.identity.write.rule import imprint
from regard.models import LlamaConfig
from regard.models.base import Model

PROMPT = [5, 9, 11, 3, 8]


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(1)
    return LlamaConfig(vocabulary=40, width=32, depth=3, heads=4, key_heads=2, hidden=48).build().eval()


@pytest.fixture(scope="module")
def mara(model: Model) -> Identity:
    rule = Rule(keep="shock", budget=6, share=1.0, trace=TraceRule(rate=0.5), self=SelfRule("key_bias"))
    return imprint(Identity.new(base_of(model)), observe(model, [7, 3, 30, 21, 9, 14, 2, 33], source="diary"), rule)


def logs(model: Model, who: Identity | None) -> torch.Tensor:
    with torch.no_grad(), living(model, who) as body:
        return body.logits(torch.tensor([PROMPT]))[0, -1].log_softmax(-1)


def test_kl_is_zero_for_itself_and_known_for_a_coin():
    p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    assert kl(p, p) == 0
    assert kl(p, q) == pytest.approx(0.5 * torch.log(torch.tensor(4 / 3)).item(), rel=1e-6)
    assert kl(torch.tensor([1.0, 0.0]).log(), q) == pytest.approx(1.386294, rel=1e-5)


def test_distances_are_those_of_identities_without_the_part(model: Model, mara: Identity):
    found = why(model, mara, PROMPT)
    mine = logs(model, mara)
    assert found.base == pytest.approx(kl(mine, logs(model, None)), rel=1e-2)
    assert set(found.parts) == {"self", "trace", "imprints"}
    for part in found.parts:
        rest = mara.only(*({"self", "trace", "imprints"} - {part}))  # pyright: ignore
        assert found.parts[part] == pytest.approx(kl(mine, logs(model, rest)), rel=1e-2)
        assert found.parts[part] > 0
    assert len(found.layers) == 3
    assert all(x > 0 for x in found.layers)


def test_the_oldest_imprint_left_out_is_the_identity_without_it(model: Model, mara: Identity):
    # Only for the first slot: without another one, those before it would be turned differently.
    found = why(model, mara, PROMPT)
    rest = replace(mara, imprints=mara.imprints.pick(torch.arange(1, len(mara.imprints))))
    assert found.imprints[0] == pytest.approx(kl(logs(model, mara), logs(model, rest)), rel=1e-2)
    assert list(found.imprints.values()) == sorted(found.imprints.values(), reverse=True)
    assert set(found.imprints) == set(range(len(mara.imprints)))


def test_a_slot_that_shouts_is_named_first_even_when_few_are_asked_for(model: Model, mara: Identity):
    weight = torch.zeros_like(mara.imprints.weight)
    weight[..., 2] = 6.0
    loud = replace(mara.only("imprints"), imprints=replace(mara.imprints, weight=weight))
    assert next(iter(why(model, loud, PROMPT).imprints)) == 2
    few = why(model, loud, PROMPT, most=2)
    assert len(few.imprints) == 2
    assert next(iter(few.imprints)) == 2


def test_an_empty_identity_moves_nothing(model: Model):
    found = why(model, Identity.new(base_of(model)), PROMPT)
    assert found.base == 0
    assert found.parts == {}
    assert found.imprints == {}
    assert not any(found.layers)
    assert all(p == q for _, p, q in found.likely)


def test_likely_tokens_are_the_most_likely_with_their_probabilities(model: Model, mara: Identity):
    found = why(model, mara, PROMPT)
    mine, base = logs(model, mara).exp(), logs(model, None).exp()
    assert found.likely[0][0] == int(mine.argmax())
    for token, p, q in found.likely:
        assert p == pytest.approx(float(mine[token]), rel=1e-2)
        assert q == pytest.approx(float(base[token]), rel=1e-2)


def test_along_an_answer_every_row_is_the_forward_at_that_place(model: Model, mara: Identity):
    answer = [4, 17, 22]
    found = along(model, mara, PROMPT, answer)
    with torch.no_grad(), living(model, mara) as body:
        whole = body.logits(torch.tensor([[*PROMPT, *answer]]))[0].log_softmax(-1)
    assert torch.allclose(found, whole[len(PROMPT) - 1 : -1], atol=1e-5)
    assert torch.allclose(found[0], logs(model, mara), atol=1e-5)


def test_progress_is_told_and_the_model_is_left_as_it_was(model: Model, mara: Identity):
    heard: list[float | None] = []
    before = logs(model, None)
    why(model, mara, PROMPT, tell=lambda what, share: heard.append(share))
    assert heard[-1] == 1.0
    assert torch.equal(before, logs(model, None))
    assert not any(p.grad is not None for p in model.parameters())


def test_no_tokens_and_another_model_are_refused(model: Model, mara: Identity):
    with pytest.raises(RegardError, match="no tokens"):
        why(model, mara, [])
    with pytest.raises(RegardError, match="at least one"):
        along(model, mara, PROMPT, [])
    torch.manual_seed(2)
    other = LlamaConfig(vocabulary=40, width=32, depth=3, heads=4, key_heads=2, hidden=48).build()
    with pytest.raises(RegardError, match="its weights differ"):
        why(other, mara, PROMPT)
