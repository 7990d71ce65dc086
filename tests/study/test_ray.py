"""A real Ray on this machine with two workers measures what this process measures."""

from __future__ import annotations

from pathlib import Path

import pytest
from timed import close, untimed

from regard.study.frame.results import Results
from regard.study.frame.run import Failure, run
from regard.study.frame.study import studies

ray = pytest.importorskip("ray", reason="Ray is in the extra `ray`; .ci/run installs it and runs this file")


@pytest.mark.filterwarnings("ignore")
def test_two_ray_workers_measure_what_this_process_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    chosen = [s for s in studies().values() if not s.needs][:2]
    alone, cluster = Results(tmp_path / "alone"), Results(tmp_path / "ray")
    assert not [x for x in run(chosen, "mini", alone) if isinstance(x, Failure)]
    assert not [x for x in run(chosen, "mini", cluster, workers=2, engine="ray") if isinstance(x, Failure)]
    for study in chosen:
        records = [[line["record"] for line in r.lines(study, "mini")] for r in (alone, cluster)]
        assert len(records[0]) == len(study.seeds_of("mini"))
        assert close(untimed(records[0]), untimed(records[1]))
    assert not ray.is_initialized()
