"""Exact facts behind the studies of choosing: recognisers of hard attention, areas under curves, clusters and their agreement."""

from __future__ import annotations

import pytest
import torch

from regard.selection import SELECTIONS
from regard.study.gd_attention import CROWD, PAIRS, auroc, lookup
from regard.study.gd_selection import energy, slope
from regard.study.hard_attention import _searched
from regard.study.selection_map import clusters, entries, rand_index
from regard.study.tasks.languages import LANGUAGES, Look, every_string
from regard.study.tasks.training import IGNORED, generator

CONSTRUCTED = [name for name, language in LANGUAGES.items() if language.recognise is not None]


@pytest.mark.parametrize("name", CONSTRUCTED)
def test_recogniser_of_hard_attention_judges_every_short_string_rightly(name: str):
    language = LANGUAGES[name]
    assert language.recognise is not None
    for length in range(1, 9):
        x = every_string(length)
        members = language.prefixes(x)[:, -1]
        assert torch.equal(language.recognise(x, Look()), members)
        # Brackets of odd length have no member; at even lengths both kinds are there.
        assert length % 2 or length < 2 or (bool(members.any()) and not bool(members.all()))


def test_first_letter_is_lost_when_ties_go_to_the_other_side():
    language = LANGUAGES["first = last"]
    assert language.recognise is not None
    x = torch.tensor([[0, 1, 0]])
    assert language.recognise(x, Look()).tolist() == [True]
    assert language.recognise(x, Look(swapped=True)).tolist() == [False]


def test_brackets_deeper_than_the_bound_are_no_members():
    language = LANGUAGES["brackets, depth 3"]
    assert language.recognise is not None
    three, four = (torch.tensor([[0] * n + [1] * n]) for n in (3, 4))
    assert language.recognise(three, Look()).tolist() == [True]
    assert language.recognise(four, Look()).tolist() == [False]


@pytest.mark.parametrize("name", LANGUAGES)
def test_samples_hold_members_and_others(name: str):
    members = LANGUAGES[name].prefixes(LANGUAGES[name].sample(generator(0), 64, 40))
    assert 0.05 < float(members.double().mean()) < 0.95


def test_two_looks_compute_the_parity_of_three_letters_and_not_of_five():
    assert _searched(3)["parity of b"] == 1
    five = _searched(5)
    assert five["parity of b"] == 0.75
    assert five["first = last"] == five["a*b*"] == five["brackets, depth 1"] == 1


def test_area_under_the_curve_counts_ties_half():
    assert auroc(torch.tensor([2.0, 3.0]), torch.tensor([0.0, 1.0])) == 1
    assert auroc(torch.tensor([0.0, 1.0]), torch.tensor([2.0, 3.0])) == 0
    assert auroc(torch.tensor([1.0, 1.0]), torch.tensor([1.0])) == 0.5
    assert auroc(torch.tensor([1.0, 3.0]), torch.tensor([2.0, float("-inf")])) == 0.75


def test_lookup_asks_for_values_that_were_said_with_their_keys():
    batch = lookup(generator(0), 4, distractors=CROWD)
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        said = {key: value for key, value in tokens[:-PAIRS] if key}
        assert [said[key] for key, _ in tokens[-PAIRS:]] == targets[-PAIRS:]
        assert set(targets[:-PAIRS]) == {IGNORED}
    unsaid = lookup(generator(0), 4, unsaid=True).tokens
    for row in unsaid.tolist():
        assert not {key for key, _ in row[:-PAIRS]} & {key for key, _ in row[-PAIRS:]}


def test_slope_of_the_coherence_energy_is_half_its_derivative():
    x = torch.linspace(-0.5, 2.5, 31, dtype=torch.float64, requires_grad=True)
    (derivative,) = torch.autograd.grad(energy(x, 2.0, 0.3).sum(), x)
    torch.testing.assert_close(derivative / 2, slope(x.detach(), 2.0, 0.3))


def test_clusters_of_far_groups_are_the_groups():
    points = torch.tensor([[0.0, 0.0], [0.1, 0.0], [5.0, 5.0], [5.1, 5.0], [0.0, 9.0]])
    made = clusters(points, 3)
    assert rand_index(made, ["a", "a", "b", "b", "c"]) == 1
    assert rand_index(["a", "a", "b", "b"], ["a", "b", "a", "b"]) == pytest.approx(-0.5)
    assert rand_index(["a"] * 4, ["a", "b", "a", "b"]) == 0


def test_every_selection_of_the_table_is_placed_on_the_map():
    specs = " ".join(spec for _, spec in entries().values())
    assert [name for name in SELECTIONS if name not in specs] == []
