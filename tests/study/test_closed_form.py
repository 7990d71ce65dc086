"""The trace in closed form: its operator, its adjoint and its solution are those of attention itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from regard.errors import NumericsError
from regard.identity import observe
from regard.identity.body import body_of
from regard.identity.read.body import OwnBody
from regard.models import LlamaConfig
from regard.study.people.closed_form import (
    FirstOrder,
    Rows,
    fitted_slots,
    left_over,
    nearest_in_hull,
    nearest_trace,
    rows_of,
    trace_read,
)
from regard.study.tasks.training import built, generator

HISTORY, AFTER = 23, 17


def model():
    return built(0, lambda: LlamaConfig(vocabulary=61, width=40, depth=1, heads=4, key_heads=2, hidden=32).build().eval())


@pytest.fixture
def rows() -> Rows:
    tokens = torch.randint(61, (HISTORY + AFTER,), generator=generator(1))
    e = observe(model(), tokens)
    # A fresh model looks everywhere alike: wider queries make some weights large and others small.
    e = replace(e, q=12 * e.q)
    asks = torch.arange(len(e)) >= HISTORY
    return rows_of(e, 0, visible=asks | (torch.arange(len(e)) == 0), asks=asks)


def symmetric(seed: int) -> Tensor:
    S = torch.randn(2, 10, 10, generator=generator(seed), dtype=torch.float64)
    return S + S.mT


def test_rows_are_those_of_the_model_with_and_without_the_history(rows: Rows):
    assert rows.weights.max() > 0.5
    assert rows.out.shape == (2, 2 * AFTER, 10)
    assert float((rows.wanted - rows.out).norm()) > 0.1
    every = torch.cat([rows.score, rows.hidden_score], -1).softmax(-1) @ torch.cat([rows.v, rows.hidden_v], 1)
    torch.testing.assert_close(rows.wanted, every)
    assert torch.equal(torch.isfinite(rows.score).sum(-1)[0, :AFTER], torch.arange(2, AFTER + 2))


def test_the_first_order_is_the_derivative_of_the_outputs_by_the_trace(rows: Rows):
    S = symmetric(2)
    step = 1e-5
    difference = (rows.moved(step * S) - rows.moved(-step * S)) / (2 * step)
    assert difference.norm() > 0.1
    torch.testing.assert_close(FirstOrder.of(rows)(S), difference, rtol=1e-7, atol=1e-8)


def test_the_adjoint_is_the_adjoint(rows: Rows):
    J = FirstOrder.of(rows)
    S, R = symmetric(3), torch.randn(rows.out.shape, generator=generator(4), dtype=torch.float64)
    there, back = (J(S) * R).sum((1, 2)), (S * J.adjoint(R)).sum((1, 2))
    assert there.abs().min() > 1e-2
    assert float(((there - back) / there).abs().max()) < 1e-10
    torch.testing.assert_close(J.adjoint(R), J.adjoint(R).mT)


def test_conjugate_gradients_give_the_solution_of_the_dense_system(rows: Rows):
    solution = nearest_trace(rows, ridge=1e-3)
    assert solution.residual <= 1e-10
    J = FirstOrder.of(rows)
    units = torch.eye(100, dtype=torch.float64).view(100, 10, 10)
    units = (units + units.mT) / 2
    for g in range(2):
        columns = torch.stack([J(u.expand(2, -1, -1))[g].flatten() for u in units])
        b = J.adjoint(rows.wanted - rows.out)[g]
        Jb = J(J.adjoint(rows.wanted - rows.out))[g]
        strength = 1e-3 * Jb.square().sum() / b.square().sum()
        dense = torch.linalg.solve(columns @ columns.mT + strength * torch.eye(100), b.flatten())
        torch.testing.assert_close(solution.S[g].flatten(), dense, rtol=1e-7, atol=1e-9)


def test_a_solution_that_is_not_reached_is_refused(rows: Rows):
    with pytest.raises(NumericsError, match="after 2 steps a residual of"):
        nearest_trace(rows, ridge=1e-6, longest=2)


def test_the_nearest_trace_leaves_less_than_any_near_it_and_the_hull_less_than_every_trace(rows: Rows):
    J, best = FirstOrder.of(rows), nearest_trace(rows, ridge=1e-6)
    left = left_over(rows, rows.out + J(best.S))
    assert left < left_over(rows, rows.out) == pytest.approx(1)
    for seed in range(5):
        assert left < left_over(rows, rows.out + J(best.S + 0.01 * symmetric(seed)))
    hull = left_over(rows, nearest_in_hull(rows))
    for S in (best.S, 0.3 * best.S, *(symmetric(seed) for seed in range(5))):
        assert hull < left_over(rows, rows.moved(S))


def test_what_is_in_the_hull_is_reached_there(rows: Rows):
    inside = replace(rows, wanted=(rows.out + rows.v[:, :1]) / 2)
    assert left_over(inside, nearest_in_hull(inside, 3000)) < 1e-3


def test_slots_of_all_that_is_hidden_leave_nothing_and_fewer_leave_more(rows: Rows):
    left = [left_over(rows, fitted_slots(rows, count).read(rows)) for count in (2, 6, HISTORY - 1)]
    assert left[2] < 1e-10 < left[1] < left[0] < 1


def test_a_layer_reads_the_trace_as_the_closed_form_does():
    m = model()
    tokens = torch.randint(61, (AFTER,), generator=generator(5))
    e = observe(m, tokens)
    everything = torch.ones(AFTER, dtype=torch.bool)
    rows = rows_of(e, 0, visible=everything, asks=everything)
    S = symmetric(6) / 4
    body = body_of(m)
    assert isinstance(body, OwnBody)
    seen: list[Tensor] = []
    projection = body.layers[0].out
    assert projection is not None
    hook = projection.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad(), body.read([trace_read(S, body.scales[0])]):
        body.hidden(tokens[None])
    hook.remove()
    expected = rows.moved(S).view(4, AFTER, 10).transpose(0, 1).flatten(1)
    assert float((expected - rows.out.view(4, AFTER, 10).transpose(0, 1).flatten(1)).abs().max()) > 1e-3
    torch.testing.assert_close(seen[0][0].double(), expected, rtol=1e-4, atol=1e-5)
