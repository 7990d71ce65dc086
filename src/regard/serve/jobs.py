"""Long work on identities: it is asked for, polled or watched, and can be cancelled.

    job = jobs.submit("sleep", "mara", work)              work(tell) runs in the thread of the jobs, and gives what is answered
    jobs.get(job.id).status                               queued, running, done, failed, cancelled
    jobs.cancel(job.id)                                   the next `tell` of its work raises

One job at a time, on a model of its own that shares every weight with the one that answers: decoding, recall and imprints go on beside it,
and nobody waits for a night to end. Who asks for too many is refused; a job that has ended can be asked for during an hour.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from torch import nn

from ..errors import RegardError
from .contract import DrainingError, QueueFullError
from .errors import ApiError, said

Status = Literal["queued", "running", "done", "failed", "cancelled"]
Kind = Literal["sleep", "forget"]
Tell = Callable[[str, float | None], None]
Work = Callable[[Tell], dict[str, Any]]
M = TypeVar("M", bound=nn.Module)
LOG = logging.getLogger("regard.serve")
WAITING = 32
"""Jobs that wait at most, a quarter of them of one key; one more is answered with 429."""
KEPT = 512
KEEP = 3600.0
"""How many ended jobs can be asked for, and for how many seconds."""
ENDING = 600.0
"""Seconds that a job which was told to end may take to do so: a step of a night, and its commit."""
RETRY = 15.0


def mark_of(identity: str) -> str:
    """Eight digits that stand for a name, and do not tell it."""
    return hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:8]


class CancelledJobError(Exception):
    """Out of work that was cancelled before it changed anything."""


@dataclass
class Job:
    """One piece of work; its fields change while it runs, each in one step."""

    kind: Kind
    identity: str
    work: Work | None
    id: str = ""
    status: Status = "queued"
    what: str = "waiting"
    share: float | None = None
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    created: float = field(default_factory=time.time)
    ended: float | None = None
    cancelled: bool = False
    interrupts: bool = False
    """Whether a cancel interrupts the work as Ctrl-C does, which keeps the best so far."""
    by: str = ""
    """Whose key asked for it."""

    def __post_init__(self) -> None:
        # Whoever hands requests on to several servers finds the one of its identity by it.
        self.id = self.id or f"job-{mark_of(self.identity)}{uuid.uuid4().hex}"

    @property
    def over(self) -> bool:
        return self.status in ("done", "failed", "cancelled")

    def body(self) -> dict[str, Any]:
        progress = {"what": self.what, "share": self.share}
        return {
            "id": self.id, "object": "job", "kind": self.kind, "identity": self.identity, "status": self.status, "progress": progress,
            "result": self.result, "error": self.error, "created": self.created, "ended": self.ended,
        }  # fmt: skip


class Jobs:
    def __init__(self, waiting: int = WAITING, kept: int = KEPT, keep: float = KEEP) -> None:
        self._most, self._kept, self._keep = waiting, kept, keep
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._queue: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._apart: dict[int, nn.Module] = {}

    def submit(self, kind: Kind, identity: str, work: Work, *, interrupts: bool = False, by: str = "") -> Job:
        """Raises QueueFullError and DrainingError; one job of a kind for each identity."""
        job = Job(kind, identity, work, interrupts=interrupts, by=by)
        with self._changed:
            self._let_go()
            if self._closing:
                raise DrainingError
            same = [j for j in self._jobs.values() if not j.over and (j.kind, j.identity) == (kind, identity)]
            if same:
                raise ApiError(
                    409, f"{identity!r} has a {kind} under way already: {same[0].id}", code="job_under_way", param="id"
                )
            if len(self._queue) >= self._most or sum(j.by == by for j in self._queue) >= max(1, self._most // 4):
                raise QueueFullError(len(self._queue), RETRY)
            self._jobs[job.id] = job
            self._queue.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="regard-jobs", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return job

    def get(self, id: str) -> Job | None:
        with self._changed:
            self._let_go()
            return self._jobs.get(id)

    def every(self) -> list[Job]:
        """The youngest first."""
        with self._changed:
            self._let_go()
            return list(reversed(self._jobs.values()))

    def cancel(self, job: Job) -> None:
        """A job that waits is cancelled now; one that runs at its next word; of one that is over nothing changes."""
        with self._changed:
            job.cancelled = job.cancelled or not job.over
            if job.status == "queued":
                self._queue.remove(job)
                job.result = {"kept": "nothing", "commit": None}
                self._end(job, "cancelled")

    def busy(self, identity: str, kind: Kind) -> bool:
        """Whether a job of a kind runs on an identity now."""
        with self._changed:
            return any(j.status == "running" and (j.kind, j.identity) == (kind, identity) for j in self._jobs.values())

    def model(self, model: M) -> M:
        """A model of the jobs' own: whatever is set on its modules is its own, and every weight is shared."""
        with self._changed:
            if id(model) not in self._apart:
                shared = {id(x): x for x in (*model.parameters(), *model.buffers())}
                self._apart[id(model)] = copy.deepcopy(model, dict(shared))
            return self._apart[id(model)]  # pyright: ignore[reportReturnType]

    def close(self) -> None:
        """Take nothing new, cancel what waits and what runs, and wait for its end: what was committed is kept."""
        with self._changed:
            self._closing = True
            waiting = list(self._queue)
            running = [j for j in self._jobs.values() if j.status == "running"]
            self._changed.notify_all()
        for job in (*waiting, *running):
            self.cancel(job)
        if self._thread is not None:
            self._thread.join(ENDING)

    # -- in the thread of the jobs -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                job = self._queue.popleft()
                job.status, job.what = "running", job.kind
            self._one(job)

    def _one(self, job: Job) -> None:
        raised = False

        def tell(what: str, share: float | None) -> None:
            nonlocal raised
            job.what, job.share = what, None if share is None else min(1.0, max(0.0, float(share)))
            if job.cancelled and not raised:
                raised = True
                raise KeyboardInterrupt if job.interrupts else CancelledJobError

        assert job.work is not None
        status: Status
        try:
            tell(job.what, None)
            job.result = job.work(tell)
            status = "cancelled" if raised else "done"
        except (CancelledJobError, KeyboardInterrupt):
            job.result, status = {"kept": "nothing", "commit": None}, "cancelled"
        except BaseException as error:
            if not isinstance(error, RegardError):
                LOG.exception("job %s (%s) failed", job.id, job.kind)
            job.error, status = said(error).body["error"], "failed"
        with self._changed:
            self._end(job, status)

    def _end(self, job: Job, status: Status) -> None:
        # What the work holds, a model and an identity, goes with it.
        job.work = None
        job.share = 1.0 if status == "done" else job.share
        job.ended, job.status = time.time(), status

    def _let_go(self) -> None:
        over = [j for j in self._jobs.values() if j.over]
        old = time.time() - self._keep
        spare = len(over) - self._kept
        for i, job in enumerate(over):
            if i < spare or (job.ended or 0.0) < old:
                del self._jobs[job.id]


__all__ = ["CancelledJobError", "Job", "Jobs", "Kind", "Tell", "mark_of"]
