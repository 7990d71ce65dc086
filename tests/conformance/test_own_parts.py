"""Parts defined here, outside the package and in no table, do all that a row of the tables does."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from helpers import F64, SITUATIONS, D, Situation, assert_agree, assert_fast_is_plain, inputs, random
from torch import Tensor

from regard import (
    Causal,
    CombinationError,
    ShapeError,
    Spec,
    SpecError,
    State,
    StateError,
    Window,
    attend,
    explain,
    inspect,
    parse,
)
from regard.geometry import GEOMETRIES, Geometry, Lowered, Turn
from regard.nn import Attention
from regard.part import PerHead, Sizes
from regard.position import NoPosition, Position
from regard.selection import Given, Selection, Softmax


@dataclass(frozen=True)
class Weighted(Geometry):
    """Σ_d w_d q_d k_d / √D − |k|²/2, with trained weights (H, D): a dot product and a bias per key."""

    name = "weighted"
    needs = ("weights",)

    def initial(self, sizes: Sizes) -> dict[str, Tensor]:
        return {"weights": torch.ones(sizes.H, sizes.D)}

    def scores(self, q: Tensor, k: Tensor, state: State, turn: Turn = lambda q, k: (q, k)) -> Tensor:
        q, k = turn(q, k)
        return (q * self._weights(state, q)) @ k.mT * q.shape[-1] ** -0.5 - k.square().sum(-1).unsqueeze(-2) / 2

    def lower(self, q: Tensor, k: Tensor, state: State, turn: Turn = lambda q, k: (q, k)) -> Lowered:
        q, k = turn(q, k)
        return Lowered(q * self._weights(state, q), k, q.shape[-1] ** -0.5, -k.square().sum(-1) / 2)

    def _weights(self, state: State, q: Tensor) -> Tensor:
        return state.tensor("weights", str(self)).to(q.dtype).unsqueeze(-2)


@dataclass(frozen=True)
class Tiring(Selection):
    """softmax(s · a − b): b_j is the weight that key j got from all rows before, times a gain per head; the sum is carried."""

    name = "tiring"
    carries = True
    cost = 4

    @property
    def per_head(self) -> tuple[PerHead, ...]:
        return PerHead("sharpness", start=2.0, above=1.0), PerHead("gain", start=0.5)

    def refuses(self, geometry: Geometry, slotted: bool) -> str | None:
        return "tiring counts keys, and a slot is none" if slotted else None

    def plain(self, scores: Tensor, given: Given) -> Tensor:
        return self.rows(scores, given)[0]

    def rows(self, scores: Tensor, given: Given) -> tuple[Tensor, Tensor | None]:
        sharpness, gain = (given.params[n].view(-1, 1) for n in ("sharpness", "gain"))
        hidden = scores == float("-inf")
        scores = scores.masked_fill(hidden, 0)
        tired = torch.zeros_like(scores[..., 0, :]) if given.carry is None else given.carry
        rows: list[Tensor] = []
        for i in range(scores.shape[-2]):
            row = (scores[..., i, :] * sharpness - tired).masked_fill(hidden[..., i, :], float("-inf")).softmax(-1)
            rows.append(row)
            spent = row if given.empty is None else row.masked_fill(given.empty[..., i].unsqueeze(-1), 0)
            tired = tired + gain * spent
        return torch.stack(rows, -2), tired


@dataclass(frozen=True)
class Fading(Position):
    """−e^{x_h} log(1 + |i − j|), with a trained rate per head: a bias whose table is trained."""

    name = "fading"
    biases = True
    shift_invariant = True
    needs = ("fading",)

    def initial(self, sizes: Sizes) -> dict[str, Tensor]:
        return {"fading": torch.zeros(sizes.H)}

    def table(self, state: State) -> Tensor:
        return state.tensor("fading", str(self))

    def bias(self, q_at: Tensor, k_at: Tensor, like: Tensor, table: Tensor | None) -> Tensor:
        assert table is not None
        far = (q_at.unsqueeze(-1) - k_at).abs().to(like.dtype).log1p()
        return -far * table.to(like.dtype).exp().view(-1, 1, 1)


@dataclass(frozen=True)
class Swapped(Position):
    """x ± its halves swapped, the sign by the parity of the place: turned early, since no longer text changes it."""

    name = "swapped"
    turns = True

    @property
    def early(self) -> bool:
        return True

    def apply(self, x: Tensor, start: int, state: State) -> Tensor:
        sign = 1 - 2 * (torch.arange(start, start + x.shape[-2], device=x.device) % 2).to(x.dtype).unsqueeze(-1)
        return x + sign * x.roll(x.shape[-1] // 2, -1)


@dataclass(frozen=True)
class Unlike(Geometry):
    """−Σ_d |q_d − k_d|, which no dot product gives."""

    name = "unlike"
    lowers = False

    def scores(self, q: Tensor, k: Tensor, state: State, turn: Turn = lambda q, k: (q, k)) -> Tensor:
        return unlike(*turn(q, k))

    def lower(self, q: Tensor, k: Tensor, state: State, turn: Turn = lambda q, k: (q, k)) -> Lowered:
        return Lowered(*turn(q, k), pair=unlike)


def unlike(q: Tensor, k: Tensor) -> Tensor:
    return -(q.unsqueeze(-2) - k.unsqueeze(-3)).abs().sum(-1)


SPECS = [
    Spec(Weighted(), Softmax(), NoPosition()),
    Spec(Weighted(), Softmax("learned"), Fading()),
    Spec(Weighted(), Tiring(), Fading()),
    Spec(parse("euclidean").geometry, Tiring(), parse("rope").position),
    Spec(parse("trace(gamma=0.3)").geometry, Softmax(), Swapped()),
    Spec(Weighted(), parse("hopfield(steps=2)").selection, Swapped()),
    Spec(Unlike(), parse("abstain(entmax(1.5), null_logit=-3)").selection, Swapped()),
]


def state_of(s: Situation) -> State:
    own: Mapping[str, Tensor] = {
        "weights": random(s.heads, D), "sharpness": torch.linspace(1.2, 2.0, s.heads, dtype=F64),
        "gain": torch.linspace(0.3, 2.0, s.heads, dtype=F64), "fading": random(s.heads),
    }  # fmt: skip
    return State(
        others={n: x.requires_grad_() for n, x in own.items()},
        trace=random(s.key_heads, D, D, scale=0.2).requires_grad_(),
        temperature=torch.linspace(0.5, 2.0, s.heads, dtype=F64).requires_grad_(),
    )


def leaves_of(state: State) -> list[Tensor]:
    return [x for _, x in state.tensors() if isinstance(x, Tensor)]


@pytest.mark.parametrize("situation", [s for s in SITUATIONS if s != "more queries"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_backend_gives_the_plain_definition_and_its_gradients(spec, situation):
    s = SITUATIONS[situation]
    state = state_of(s)
    assert_fast_is_plain(spec, s, state, leaves_of(state))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_tiles_hand_over_what_is_carried(spec):
    s = Situation(queries=37, keys=37, allow=lambda Q, K: Causal())
    state = state_of(s)
    assert_fast_is_plain(spec, s, state, leaves_of(state))


@pytest.mark.parametrize("allow", [Causal(), Causal() & Window(3)], ids=["causal", "window"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_module_trains_them_and_decodes_the_whole(spec, allow):
    attention = Attention(24, 4, spec, key_heads=2).to(F64)
    read = {name for part in spec.parts for name in part.reads} - {"trace"}
    assert set(attention.trained) == read
    with torch.no_grad():
        for p in attention.trained.values():
            p.add_(torch.randn_like(p) * 0.3)
    x, state = random(2, 9, 24), State(trace=random(2, 6, 6, scale=0.2))
    whole = attention(x, allow=allow, state=state)
    whole.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in attention.trained.values())
    cache = None
    for start, stop in [(0, 1), (1, 2), (2, 5), (5, 9)]:
        out, cache = attention.step(x[:, start:stop], cache, allow=allow, state=state)
        assert_agree(out, whole[:, start:stop])


def test_numbers_per_head_start_where_they_say_and_stay_above_their_bound():
    attention = Attention(24, 4, SPECS[2])
    state = attention.state()
    assert state.others["sharpness"].allclose(torch.full((4,), 2.0))
    assert state.others["gain"].allclose(torch.full((4,), 0.5))
    with torch.no_grad():
        attention.trained["sharpness"].fill_(-5)
    assert (attention.state().others["sharpness"] > 1).all()
    brought = State(others={"gain": torch.ones(4)})
    assert attention.state(brought).others["gain"] is brought.others["gain"]


def test_forgetting_the_carry_gives_another_result():
    """The comparison above would be empty if it did not."""
    s = Situation(queries=9, keys=9)
    q, k, v = inputs(s)
    state = state_of(s)
    whole = attend(q, k, v, SPECS[2], allow=Causal(), state=state)
    forgetful = attend(q[:, :, 5:], k, v, SPECS[2], allow=Causal(), state=state)
    assert (whole[:, :, 5:] - forgetful).abs().max() > 1e-2
    seen = inspect(q[:, :, :5], k[:, :, :5], v[:, :, :5], SPECS[2], allow=Causal(), state=state)
    assert_agree(attend(q[:, :, 5:], k, v, SPECS[2], allow=Causal(), state=seen.state), whole[:, :, 5:])


@pytest.mark.parametrize(
    ("spec", "backend", "because"),
    [
        (SPECS[0], "flash", "weighted lowers to a dot product, a bias per key"),
        (SPECS[1], "tiled", "fading's table is being trained"),
        (SPECS[2], "tiled", "tiring is no softmax"),
        (SPECS[6], "tiled", "entmax is no softmax"),
        (Spec(Unlike(), Softmax(), NoPosition()), "tiled", "unlike is no dot product"),
    ],
    ids=str,
)
def test_the_plan_says_why(spec, backend, because):
    s = SITUATIONS["causal"]
    plan = explain(*inputs(s), spec, allow=Causal(), state=state_of(s))
    assert plan.backend == backend
    assert because in str(plan)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_weights_are_a_choice(spec):
    s = SITUATIONS["causal"]
    seen = inspect(*inputs(s), spec, allow=Causal(), state=state_of(s))
    total = seen.weights().sum(-1)
    assert seen.accepted.any()
    assert (total <= 1 + 1e-9).all()
    if spec.refusal is None:
        assert_agree(total, torch.ones_like(total))


def test_what_is_missing_wrong_or_without_meaning_is_said():
    q, k, v = inputs(SITUATIONS["causal"])
    with pytest.raises(StateError, match=r"weighted needs state.weights.*carries nothing.*State\(others=\{'weights': ...\}\)"):
        attend(q, k, v, SPECS[0])
    state = state_of(SITUATIONS["causal"])
    low = replace(state, others={**state.others, "sharpness": torch.ones(3, dtype=F64)})
    with pytest.raises(StateError, match=r"state.sharpness is \[1.0, 1.0, 1.0\]; every value must be above 1"):
        attend(q, k, v, SPECS[2], state=low)
    with pytest.raises(ShapeError, match=r"state.gain is \(2,\); tiring needs one number per query head, \(3,\)"):
        attend(q, k, v, SPECS[2], state=replace(state, others={**state.others, "gain": torch.ones(2)}))
    with pytest.raises(CombinationError, match="tiring counts keys, and a slot is none"):
        Spec(parse("self_conditioned(form=null_slot)").geometry, Tiring(), NoPosition())
    with pytest.raises(CombinationError, match="unlike has no such space"):
        Spec(Unlike(), parse("hopfield(steps=2)").selection, NoPosition())


def test_a_geometry_that_gives_a_pair_must_say_so():
    @dataclass(frozen=True)
    class Forgetful(Unlike):
        name = "forgetful"
        lowers = True

    with pytest.raises(SpecError, match="must say lowers = False"):
        attend(*inputs(SITUATIONS["causal"]), geometry=Forgetful())


def test_a_row_in_the_table_is_a_word_in_a_spec(monkeypatch):
    monkeypatch.setitem(GEOMETRIES, "unlike", Unlike)
    assert parse("unlike | topk(2)").geometry == Unlike()
