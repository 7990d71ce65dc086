"""The intervals of the study of wrong answers: pseudo-values whose mean is the AUROC."""

from __future__ import annotations

import pytest

from regard.abstention import auroc
from regard.study.hallucination import STUDY, by_question


def record(seed: int) -> dict[str, list[dict[str, object]]]:
    return STUDY.planted("positive", seed)


def test_pseudo_values_have_the_auroc_as_their_mean() -> None:
    answers = record(0)["answers"]
    wanted = auroc([a["coherence"] for a in answers], [a["right"] for a in answers])  # type: ignore[arg-type, misc]
    values = by_question([record(0)], "coherence").values()
    assert len(values) == len(answers)
    assert sum(values) / len(values) == pytest.approx(wanted, abs=2e-3)


def test_pairs_within_a_kind_do_not_reward_telling_kinds_apart() -> None:
    rows = [
        {
            "question": f"{sort}: {i}",
            "sort": sort,
            "right": i % 2 == (sort == "hard") or i % 5 == 0,
            "coherence": float(sort == "easy"),
        }
        for sort in ("easy", "hard")
        for i in range(20)
    ]
    rows = [{**r, "right": r["right"] if r["sort"] == "easy" else i % 10 == 0} for i, r in enumerate(rows)]
    mixed, within = (by_question([{"answers": rows}], "coherence", within=w) for w in (False, True))
    assert sum(mixed.values()) / len(mixed) > 0.6
    assert sum(within.values()) / len(within) == pytest.approx(0.5)
