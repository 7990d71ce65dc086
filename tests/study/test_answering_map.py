"""The fit of the map by which a model says whether what came to mind answers: it finds what was planted, and is read as it was written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lives import letters, speaking

from regard.identity.read import answering as read
from regard.study.people import answering
from regard.study.people.answering import ASKED, Examples, examples, fitted, joined, save, shown
from regard.study.people.asking import Examiner
from regard.study.people.natural import natural

WIDTH = 6


def planted(seed: int, questions: int = 60) -> Examples:
    """Of what was told one unit says it, and its first number is larger; what was never told no unit says, and the second in rank is as good."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(questions, ASKED, WIDTH, generator=g)
    told = torch.arange(questions) % 2 == 0
    right = torch.zeros(questions, ASKED, dtype=torch.bool)
    right[told, torch.randint(0, 3, (int(told.sum()),), generator=g)] = True
    x[..., 0] += 5 * right
    others = torch.stack([-torch.arange(ASKED).float().expand(questions, -1), torch.zeros(questions, ASKED)], -1)
    there = torch.ones(questions, ASKED, dtype=torch.bool)
    there[1::2, 5:] = False
    return Examples(x, others, right, there, told)


def test_the_fit_finds_what_says_it_and_refuses_the_rest() -> None:
    fit = fitted([planted(0), planted(1)])
    unseen = planted(2)
    odds = fit.odds(unseen)
    best, unit = odds.max(1)
    first = unseen.right.gather(1, unit[:, None])[:, 0]
    assert float(first[unseen.told].float().mean()) > 0.9
    assert float(best[first].median()) > 0 > float(best[~unseen.told].median())
    assert fit.weight[0] == fit.weight.abs().max()
    assert float(odds[~unseen.there].max()) < -1e3, "what is not there is never first"
    assert "AUROC against what was never told 0.9" in shown(unseen, fit) or "1.00" in shown(unseen, fit)


def test_pools_count_alike_whatever_their_size() -> None:
    small, large = planted(3, 20), planted(4, 60)
    once, thrice = fitted([small, large]), fitted([small, joined([large, large])])
    torch.testing.assert_close(once.weight, thrice.weight, atol=0.05, rtol=0.1)


def test_a_map_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit = fitted([planted(0)])
    save(fit, "a base", tmp_path / "answering.safetensors")
    monkeypatch.setattr(read, "FILE", tmp_path / "answering.safetensors")
    read.shipped.cache_clear()
    try:
        known = read.shipped()
    finally:
        read.shipped.cache_clear()
    assert torch.equal(known.weight, fit.weight)
    assert (known.behind, known.coherence, known.bias) == tuple(fit.others.tolist())
    assert (known.depth, known.fingerprint) == (answering.DEPTH, "a base")


def test_examples_are_units_in_rank_with_the_one_that_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "DEPTH", 1)
    model = speaking()
    (person,) = natural(1, 1, "train", short=True)
    e = examples(Examiner(model, letters()), [person])
    count = len(person.questions) + len(person.unanswerable)
    assert e.x.shape == (count, ASKED, model.config.width)
    assert e.told.tolist() == [True] * len(person.questions) + [False] * len(person.unanswerable)
    assert not e.right[~e.told].any()
    assert not (e.right & ~e.there).any()
    assert int(e.there[~e.told].sum(1).max()) == answering.UNTOLD
    assert not e.x[~e.there].any()
    behind = e.others[..., 0]
    assert bool((behind <= 0).all())
    assert not behind[:, 0].any(), "the first in rank stands behind nobody"
    rows = e.x[e.there]
    assert bool((rows.pow(2).mean(-1) <= 1.001).all()), "means of rows of one length"
