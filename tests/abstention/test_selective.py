"""SelectiveNet's head and loss: closed forms, gradients, and that it learns to refuse what cannot be known."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import regard
from regard.abstention import Selective, SelectiveHead, auroc, selective_loss

F64 = torch.float64


def test_loss_that_gives_everything_is_the_cross_entropy() -> None:
    logits, targets = torch.randn(7, 3, dtype=F64), torch.randint(3, (7,))
    out = Selective(logits, torch.ones(7, dtype=F64), torch.zeros(7, 3, dtype=F64))
    assert selective_loss(out, targets, weight=1).item() == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-12)
    half = selective_loss(out, targets, weight=0.5)
    assert half.item() == pytest.approx(
        0.5 * (F.cross_entropy(logits, targets).item() + torch.tensor(3.0).log().item()), rel=1e-6
    )


def test_loss_is_the_published_formula_by_hand() -> None:
    # Two rows, log 2 and log 4 of loss, g = (1, ½): (log 2 + ½ log 4)/2 / 0.75 + 32·(0.8 − 0.75)².
    logits = torch.tensor([[0.0, 0.0], [0.0, torch.tensor(3.0).log().item()]], dtype=F64)
    out = Selective(logits, torch.tensor([1.0, 0.5], dtype=F64), logits)
    ln2 = torch.tensor(2.0, dtype=F64).log()
    wanted = (ln2 + 0.5 * 2 * ln2) / 2 / 0.75 + 32 * 0.05**2
    assert torch.allclose(selective_loss(out, torch.tensor([0, 0]), coverage=0.8, weight=1), wanted, rtol=1e-6)


def test_coverage_above_the_asked_costs_nothing() -> None:
    out = Selective(torch.zeros(4, 2), torch.full((4,), 0.9), torch.zeros(4, 2))
    targets = torch.zeros(4, dtype=torch.long)
    assert torch.equal(selective_loss(out, targets, penalty=0), selective_loss(out, targets, penalty=1000))
    assert selective_loss(out, targets, coverage=1.0) > selective_loss(out, targets)


def test_gradients_agree_with_differences() -> None:
    torch.manual_seed(0)
    head, x, targets = SelectiveHead(4, classes=3, hidden=5).double(), torch.randn(6, 4, dtype=F64), torch.randint(3, (6,))
    assert float(head(x).selection.detach().mean()) < 0.9  # the penalty takes part
    names = dict(head.named_parameters())

    def loss(*weights: torch.Tensor) -> torch.Tensor:
        out = torch.func.functional_call(head, dict(zip(names, weights, strict=True)), (x,))
        return selective_loss(out, targets, coverage=0.9)

    assert torch.autograd.gradcheck(loss, tuple(names.values()))


def test_head_answers_one_row_as_in_company_and_any_leading_shape() -> None:
    head = SelectiveHead(8, classes=3)
    x = torch.randn(2, 5, 8)
    out = head(x)
    assert out.logits.shape == out.auxiliary.shape == (2, 5, 3)
    assert out.selection.shape == (2, 5)
    assert torch.allclose(head(x[1, 2]).selection, out.selection[1, 2], atol=1e-6)
    assert bool(((out.selection > 0) & (out.selection < 1)).all())
    selective_loss(out, torch.randint(3, (2, 5))).backward()


def test_head_learns_to_refuse_rows_whose_label_is_a_coin() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(600, 4, generator=g)
    coin = x[:, 3] > 0.4
    labels = torch.where(coin, torch.randint(2, (600,), generator=g), (x[:, 0] > 0).long())
    torch.manual_seed(0)
    body = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), SelectiveHead(32, classes=2))
    optimizer = torch.optim.Adam(body.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        selective_loss(body(x), labels, coverage=0.65).backward()
        optimizer.step()
    out = body(x)
    assert auroc(out.selection, ~coin) > 0.95
    promise = regard.calibrate(out.selection, out.logits.argmax(-1) == labels, risk=0.1, confidence=0.9)
    assert 0.5 < promise.coverage < 0.8


@pytest.mark.parametrize(
    "wrong", [{"coverage": 0}, {"coverage": 1.5}, {"penalty": -1}, {"weight": 2}, {"coverage": float("nan")}]
)
def test_numbers_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    out = SelectiveHead(4, classes=2)(torch.randn(3, 4))
    with pytest.raises(regard.SpecError, match=next(iter(wrong))):
        selective_loss(out, torch.zeros(3, dtype=torch.long), **wrong)


def test_shapes_that_do_not_fit_are_refused() -> None:
    head = SelectiveHead(4, classes=2)
    with pytest.raises(regard.ShapeError, match="M=4"):
        head(torch.randn(3, 5))
    with pytest.raises(regard.ShapeError, match="one class per row"):
        selective_loss(head(torch.randn(3, 4)), torch.zeros(2, dtype=torch.long))
    with pytest.raises(regard.ShapeError, match="one row or more"):
        selective_loss(head(torch.randn(0, 4)), torch.zeros(0, dtype=torch.long))
    with pytest.raises(regard.ShapeError, match="classes=0"):
        SelectiveHead(4, classes=0)
