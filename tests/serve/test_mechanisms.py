"""Small scenes: what the page draws is what the operator says."""

from __future__ import annotations

import pytest
import torch

import regard
from regard.errors import RegardError
from regard.geometry import GEOMETRIES
from regard.selection import SELECTIONS
from regard.serve.mechanisms import parts, scene

KEYS = [[0.0, 1.0], [1.0, 0.0], [-0.7, -0.7]]


@pytest.mark.parametrize("spec", ["dot | softmax", "euclidean | entmax(1.5)", "cosine | topk(2)", "hopfield(steps=3)"])
def test_weights_are_those_of_inspect(spec: str):
    q, k = torch.tensor([[0.3, 0.4], [1.0, 1.0]], dtype=torch.float64), torch.tensor(KEYS, dtype=torch.float64)
    seen = regard.inspect(q[None, None], k[None, None], k[None, None], spec)
    played = scene(q.tolist(), KEYS, spec)
    assert torch.tensor(played["weights"]) == pytest.approx(seen.weights()[0, 0], abs=1e-6)
    assert torch.tensor(played["energy"]) == pytest.approx(seen.energy[0, 0], abs=1e-6)
    assert played["jump"] is None


def test_gd_tells_its_jump_and_refuses_what_is_far():
    near, far = scene([[0.1, 0.9], [9.0, 9.0]], KEYS, "gd(coherence=1)")["jump"]
    assert near["key"] == 0
    assert near["coherence"] > 1
    assert far["key"] == -1
    assert scene([[9.0, 9.0]], KEYS, "gd(coherence=1)")["accepted"] == [False]


def test_trace_bends_the_metric():
    flat, bent = (
        scene([[0.3, 0.9]], KEYS[:2], "trace(base=none)", trace=t)["weights"][0] for t in ([[1, 0], [0, 1]], [[9, 0], [0, 1]])
    )
    assert bent[0] > flat[0], "the first key is nearer along the axis that counts more now"


def test_field_of_many_queries_comes_without_rows():
    field = scene([[x / 10, 0.0] for x in range(1000)], KEYS, "softmax", rows=False)
    assert len(field["energy"]) == 1000
    assert "weights" not in field


@pytest.mark.parametrize(
    ("queries", "keys", "spec", "said"),
    [
        ([], KEYS, "softmax", "queries: give 1 to 1024"),
        ([[0.0, 1.0]] * 2000, KEYS, "softmax", "queries: give 1 to 1024"),
        ([[0.0]], KEYS, "softmax", "one width"),
        ([[0.0, 1e9]], KEYS, "softmax", "1e6"),
        ([[0.0, float("nan")]], KEYS, "softmax", "1e6"),
        ([[0.0, 1.0]], KEYS, "nonsense", "nonsense"),
        ([[0.0, 1.0]], KEYS, "trace", "state.trace"),
    ],
)
def test_what_is_no_scene_is_refused(queries: list[list[float]], keys: list[list[float]], spec: str, said: str):
    with pytest.raises(RegardError, match=said):
        scene(queries, keys, spec)


def test_knobs_are_the_tables_of_the_library():
    knobs = parts()
    assert [g["name"] for g in knobs["geometry"]] == list(GEOMETRIES)
    assert [s["name"] for s in knobs["selection"]] == list(SELECTIONS)
    gd = next(s for s in knobs["selection"] if s["name"] == "gd")
    assert {p["name"]: p["type"] for p in gd["parameters"]} == {
        "alpha": "number", "beta": "number", "coherence": "number", "keep": "choice", "tau": "number",
    }  # fmt: skip
    assert next(p for p in gd["parameters"] if p["name"] == "keep")["choices"] == ["nearest", "all"]
    assert all(x["about"] for kind in knobs.values() for x in kind)
