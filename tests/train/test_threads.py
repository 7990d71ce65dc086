"""Threads that follow the free cores: what others use is what the machine worked less what this process did."""

import time

import pytest
import torch

from regard.train import threads
from regard.train.settings import TrainConfig
from regard.train.threads import EVERY, FreeCores


@pytest.fixture(autouse=True)
def as_it_was():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Machine:
    """Two cores, a process of ours and others, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cores: int = 2) -> None:
        self.now = self.worked = self.own = 0.0
        monkeypatch.setattr(threads, "cores", lambda: frozenset(range(cores)))
        self.free = FreeCores(lambda: self.worked, lambda: self.own, lambda: self.now)
        self.free.look()

    def go(self, others: float, seconds: float = EVERY) -> int:
        self.now += seconds
        self.own += seconds * torch.get_num_threads()
        self.worked += seconds * (torch.get_num_threads() + others)
        return self.free.look()


def test_a_busy_neighbour_takes_one_thread_and_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    assert [machine.go(others) for others in (0, 0.1, 1, 0.9, 0, 0)] == [2, 2, 1, 1, 2, 2]


def test_one_thread_is_left_however_busy_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Machine(monkeypatch).go(7) == 1


def test_no_more_threads_than_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Machine(monkeypatch, cores=64).go(0) == 2


def test_nothing_changes_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    assert machine.go(1, seconds=EVERY / 2) == 2
    assert machine.go(1, seconds=EVERY / 2) == 1


def test_a_system_that_does_not_say_leaves_the_threads(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(threads, "_STAT", tmp_path / "none")
    assert threads.seconds_worked() is None
    free = FreeCores(clock=lambda: time.monotonic() * 1e6)
    assert [free.look(), free.look()] == [2, 2]
    (tmp_path / "none").write_text("cpu x y")
    assert threads.seconds_worked() is None


def test_this_machine_says_what_its_cores_worked() -> None:
    if not threads._STAT.exists():
        pytest.skip("there is no /proc/stat here")
    first = threads.seconds_worked()
    assert first is not None
    assert first > 0
    assert threads.cores()


def test_cores_that_this_process_may_not_use_are_not_counted(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu 9 9 9 9 9 9 9 0\ncpu0 100 0 20 7 7 3 0 0\ncpu1 900 0 0 0 0 0 0 0\ncpu2 5 1 1 0 0 0 0 0\nintr 1 2\n")
    monkeypatch.setattr(threads, "_STAT", stat)
    monkeypatch.setattr(threads.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(threads, "cores", lambda: frozenset({0, 2}))
    assert threads.seconds_worked() == pytest.approx(1.30)
    monkeypatch.setattr(threads, "cores", lambda: frozenset({0, 7}))
    assert threads.seconds_worked() is None


def test_a_run_follows_free_cores_unless_told_otherwise() -> None:
    assert TrainConfig().threads == threads.FREE
