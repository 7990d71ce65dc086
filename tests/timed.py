"""Records without what was timed: names that begin with `timed` hold what differs from run to run."""

from __future__ import annotations

from typing import Any


def untimed(record: Any) -> Any:
    if isinstance(record, dict):
        return {k: untimed(v) for k, v in record.items() if not k.startswith("timed")}
    return [untimed(v) for v in record] if isinstance(record, list) else record
