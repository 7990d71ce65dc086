"""Small tables of real data: Iris, wine and 8×8 handwritten digits, carried by scikit-learn (extra `study`), never downloaded.

    features, labels = digits()          # (1797, 64) float64 and (1797,) long
    features, labels = iris()
    train, test = split(len(labels), seed=0, share=0.5)

Features are as published (digits: 0 … 16; iris: centimetres; wine: thirteen measurements of very different scale: see `standardised`).
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import CheckpointError, ShapeError
from .training import generator


class Table(NamedTuple):
    """One row per thing measured, and its class."""

    features: Tensor
    labels: Tensor


@cache
def _load(name: str) -> Table:
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ImportError:
        raise CheckpointError(
            f"the table {name} is in scikit-learn, which is not installed: pip install 'regard[study]'"
        ) from None
    features, labels = getattr(datasets, f"load_{name}")(return_X_y=True)
    return Table(torch.tensor(features.tolist(), dtype=torch.float64), torch.tensor(labels.tolist()))


def _copy(name: str) -> Table:
    # A caller may scale in place what it is given; the cached table stays as published.
    return Table(*(x.clone() for x in _load(name)))


def iris() -> Table:
    """150 flowers of three species, four lengths in centimetres (Fisher 1936, as scikit-learn carries it)."""
    return _copy("iris")


def wine() -> Table:
    """178 wines of three growers, thirteen chemical measurements."""
    return _copy("wine")


def digits() -> Table:
    """1,797 handwritten digits of 8×8 grey values from 0 to 16, row by row."""
    return _copy("digits")


def standardised(features: Tensor, among: Tensor | None = None) -> Tensor:
    """Each column with mean 0 and standard deviation 1, measured on the rows `among` (all of them unless given); constant columns give 0."""
    measured = features if among is None else features[among]
    spread = measured.std(0, unbiased=False)
    return (features - measured.mean(0)) / torch.where(spread > 0, spread, 1)


def split(rows: int, seed: int, share: float) -> tuple[Tensor, Tensor]:
    """A random `share` of the row numbers, and the others."""
    if not 0 < share < 1 or rows < 2:
        raise ShapeError(
            f"a share of {share} of {rows} rows leaves nothing on one side; give 0 < share < 1 and two rows or more"
        )
    order = torch.randperm(rows, generator=generator(seed))
    cut = min(max(1, round(share * rows)), rows - 1)
    return order[:cut], order[cut:]
