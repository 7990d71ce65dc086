"""Random calls with fixed seeds: output and gradients of the definition, or one of our own errors.

`REGARD_FUZZ=10000` draws that many. A failure prints its seed; `verdict(draw(seed))` of `random_calls` repeats it.
"""

import os
from collections import Counter

import pytest
from broken_calls import broken, refusal_of
from random_calls import draw, verdict

CALLS = int(os.environ.get("REGARD_FUZZ", "480"))
PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
def test_any_call_gives_what_its_definition_gives_or_our_own_error(part):
    seen = Counter(verdict(draw(seed)) for seed in range(part, CALLS, PARTS))
    assert seen["agrees"] > 0.5 * seen.total(), f"too few calls could be compared: {dict(seen)}"
    assert seen["refused"] < 0.3 * seen.total(), f"too many calls were refused: {dict(seen)}"


@pytest.mark.parametrize("part", range(PARTS))
def test_any_call_with_one_thing_wrong_runs_or_gives_our_own_error(part):
    refused = [refusal_of(broken(seed)) for seed in range(part, CALLS, PARTS)]
    assert sum(r is not None for r in refused) > 0.4 * len(refused), "most of what is broken has to be refused"
