"""Records without what was timed: names that begin with `timed` hold what differs from run to run."""

from __future__ import annotations

import math
from typing import Any


def untimed(record: Any) -> Any:
    if isinstance(record, dict):
        return {k: untimed(v) for k, v in record.items() if not k.startswith("timed")}
    return [untimed(v) for v in record] if isinstance(record, list) else record


def close(a: Any, b: Any) -> bool:
    """Whether two records are the same up to the last digits of a float.

    A machine's LAPACK rounds by where in memory its numbers happen to lie: the same least squares, twice in one process, differed by
    1e-15. Whatever a seed decides is a float32 at best, and is a million times as coarse.
    """
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(close(v, b[k]) for k, v in a.items())
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(close, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-10, abs_tol=1e-14) or a == b
    return type(a) is type(b) and a == b
