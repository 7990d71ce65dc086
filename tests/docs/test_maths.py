"""Numbers that docs/maths.md prints, computed again: the page is read, so that neither it nor the code can drift alone."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

import regard
from regard.position.sinusoidal import sinusoids
from regard.selection import entmax_weights
from regard.selection.gd import coherent_length, energy_between

ROOT = Path(__file__).parents[2]
F64 = torch.float64
PAGE = " ".join((ROOT / "docs" / "maths.md").read_text(encoding="utf-8").split())
"""One line, so that a sentence is found wherever it is wrapped."""


def printed(before: str, count: int = 1) -> list[list[float]]:
    """The next `count` lists of numbers in code that follow a piece of text, which occurs once."""
    assert PAGE.count(before) == 1, f"docs/maths.md has {PAGE.count(before)} places that say {before!r}"
    found = re.findall(r"`([^`]+)`", PAGE[PAGE.index(before) + len(before) :])[:count]
    return [[float(x) for x in re.findall(r"-?\d+(?:\.\d+)?", text)] for text in found]


def number(before: str) -> float:
    ((value,),) = printed(before)
    return value


def digits(before: str) -> float:
    """Half of the last digit of the number that follows: as near as a printed number can be."""
    text = re.findall(r"`([^`]+)`", PAGE[PAGE.index(before) + len(before) :])[0]
    return 0.5001 * 10.0 ** -len(text.partition(".")[2])


def energy(L: float, alpha: float) -> float:
    return float(energy_between(torch.tensor(L, dtype=F64), alpha))


def rows(before: str, count: int = 1) -> torch.Tensor:
    return torch.tensor(printed(before, count), dtype=F64)


def valleys(L: float, alpha: float) -> int:
    x = torch.linspace(-1, L + 1, 20001, dtype=F64)
    phi = -torch.logaddexp(math.log(alpha) - x**2, math.log1p(-alpha) - (L - x) ** 2)
    falls = phi.diff() < 0
    return int((falls[:-1] & ~falls[1:]).sum())


def score(q: torch.Tensor, x: torch.Tensor, T: torch.Tensor) -> float:
    return float(-(q - x) @ T @ (q - x))


def pair(c: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit vectors q and k with cosine c."""
    return torch.tensor([1.0, 0], dtype=F64), torch.tensor([c, math.sqrt(1 - c * c)], dtype=F64)


def test_masked_softmax() -> None:
    row = torch.tensor([1, 2, -math.inf, 3], dtype=F64).softmax(0)
    torch.testing.assert_close(row[None], rows("softmax([1, 2, −∞, 3]) is"), rtol=0, atol=5.1e-5)


def test_three_words() -> None:
    x = torch.tensor([[1, 0.5, 0.2, 0.1], [0.3, 1, 0.4, 0.2], [0.2, 0.3, 1, 0.5]], dtype=F64).view(1, 1, 3, 4)
    weights = regard.inspect(x, x, x, "softmax").weights()[0, 0]
    torch.testing.assert_close(weights, rows("scores over √4: the weights are", 3), rtol=0, atol=5.1e-4)


def test_sinusoidal_row_and_slopes_of_alibi() -> None:
    torch.testing.assert_close(sinusoids(2, 8)[1:], rows("For p = 1 and D = 8 it is"), rtol=0, atol=5e-4)
    slopes = rows("ALiBi's slopes for 8 heads are 2⁻¹ to 2⁻⁸:")[0]
    bias = regard.position.Alibi().bias(torch.tensor([5]), torch.tensor([4]), torch.zeros(1, 8, 1, 1, dtype=F64), None)
    torch.testing.assert_close(-bias.flatten(), slopes, rtol=0, atol=0)


def test_number_of_weights_does_not_depend_on_the_heads() -> None:
    stated = number("has 4M² weights for any number of heads,")
    assert {sum(p.numel() for p in regard.nn.Attention(64, h).parameters()) for h in (1, 4, 8)} == {stated}


def test_sparsemax_and_its_threshold() -> None:
    z = torch.tensor([[1, 0.5, -1]], dtype=F64)
    row = rows("sparsemax([1, 0.5, −1]) =")
    torch.testing.assert_close(entmax_weights(z, 2.0), row, rtol=0, atol=1e-12)
    torch.testing.assert_close((z - number("`[0.75, 0.25, 0]`, with τ =")).clamp_min(0), row, rtol=0, atol=1e-12)


@pytest.mark.parametrize("alpha", [1.5, 2.0, 3.0])
def test_one_hot_from_a_lead_of_one_over_alpha_minus_one(alpha: float) -> None:
    assert "A row is one-hot iff the largest score leads by 1/(α−1)" in PAGE
    lead = 1 / (alpha - 1)
    assert entmax_weights(torch.tensor([lead + 1e-6, 0.0], dtype=F64), alpha)[1] == 0
    assert entmax_weights(torch.tensor([lead - 1e-2, 0.0], dtype=F64), alpha)[1] > 0


def test_eigenvalues_of_a_pair() -> None:
    q, k = pair(0.2)
    T = torch.outer(k, q)
    high, low = (x for (x,) in printed("For c = 0.2 they are", 2))
    found = torch.linalg.eigvalsh((T + T.T) / 2)
    torch.testing.assert_close(found, torch.tensor([low, high], dtype=F64))


def test_scores_of_a_written_pair() -> None:
    q, k = pair(0.2)
    T = torch.outer(k, q)
    stretched, own = (x for (x,) in printed("can beat the pair: c = 0.2, t = 2.6 gives", 2))
    assert score(q, k, T) == pytest.approx(own) == pytest.approx((1 - 0.2) ** 2)
    assert score(q, 2.6 * k, T) == pytest.approx(stretched) == pytest.approx((2.6 - 0.2) * (1 - 2.6 * 0.2))
    assert score(q, 2 * q, torch.outer(2 * q, q)) == pytest.approx(number(r"k = 2q, \|q\| = 1:"))


def test_size_that_independent_pairs_reach() -> None:
    before = "for a = tanh 1, D = 64 and λ = 0.99 that is"
    assert math.tanh(1) * 64 / math.sqrt(1 - 0.99**2) == pytest.approx(number(before), abs=digits(before))


@pytest.mark.parametrize(("L", "before"), [(2.0, "There are two for α in"), (3.0, "`(0.256, 0.744)` at L = 2 and in")])
def test_two_valleys_exactly_inside_the_printed_interval(L: float, before: str) -> None:
    ((low, high),) = printed(before)
    border = 1 / (1 + math.exp(L * math.sqrt(L * L - 2) - 2 * math.atanh(math.sqrt(1 - 2 / L**2))))
    places = 10.0 ** -len(str(low).partition(".")[2])
    assert border == pytest.approx(low, abs=places / 2)
    assert low + high == pytest.approx(1)
    for inside in (low + 2 * places, 0.5, high - 2 * places):
        assert valleys(L, inside) == 2
    for outside in (low - 2 * places, high + 2 * places):
        assert valleys(L, outside) == 1
    assert coherent_length(border) == pytest.approx(L)


def test_coherent_length_and_energies() -> None:
    before = "√2 at α = ½,"
    assert coherent_length(0.9) == pytest.approx(number(before), abs=digits(before))
    assert energy(100, 0.99) == pytest.approx(number("E*(100, α = 0.99) ="), abs=6e-4)
    assert energy(0.5, 0.5) == pytest.approx(number("E*(0.5, α = 0.5) ="))
    assert energy(3, 0.5) == pytest.approx(number("rejects nothing at α = ½ (E*(3) ="), abs=6e-5)
    assert number("a local *maximum* of φ beyond √2, and reports L²/4:") == 3**2 / 4


def test_least_energy_is_the_minimum_over_shares() -> None:
    assert "E*(L) = min_p [ p(1−p) L² + KL(p ‖ 1−α) ]" in PAGE
    p = torch.linspace(-36, 36, 400_001, dtype=F64).sigmoid()
    for L, alpha in ((0.7, 0.5), (1.3, 0.8), (2.5, 0.3), (4.0, 0.9)):
        kl = p * (p / (1 - alpha)).log() + (1 - p) * ((1 - p) / alpha).log()
        assert energy(L, alpha) == pytest.approx(float((p * (1 - p) * L**2 + kl).min()), abs=1e-9)


def test_beta_for_strangers_and_the_length_of_the_gradient() -> None:
    before = "β ≥ 1/(1 − √(2 ln N/D)):"
    assert 1 / (1 - math.sqrt(2 * math.log(1024) / 64)) == pytest.approx(number(before), abs=digits(before))
    L = torch.tensor(math.sqrt(2) - 1e-4, dtype=F64)
    slope = (energy_between(L + 1e-5, 0.5) - energy_between(L - 1e-5, 0.5)) / 2e-5
    assert float(slope) == pytest.approx(number("At α = ½ its length is"), abs=6e-4)


def test_unknowns_of_a_symmetric_matrix() -> None:
    assert number("D(D+1)/2 unknowns per head,") == 64 * 65 / 2


def test_every_citation_of_the_page_names_a_section_of_it() -> None:
    sections = re.findall(r"^## (.+)$", (ROOT / "docs" / "maths.md").read_text(encoding="utf-8"), re.MULTILINE)
    cited = [
        (path.name, name)
        for folder in ("src", "demo", "tests", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"docs/maths\.md, “([^”]+)”", " ".join(path.read_text(encoding="utf-8").split()))
    ]
    assert len(cited) >= 3
    assert [c for c in cited if c[1] not in sections] == []
    assert not [p for p in (ROOT / "src").rglob("*.py") if "MATHS" in p.read_text(encoding="utf-8")]
