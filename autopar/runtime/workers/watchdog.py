"""The parent's watch over its local workers during one call.

In: the workers that have not answered yet. Out: the error to raise if one is stopped or if all are
idle. It exists because the time limit of a call cannot tell a worker that hangs from one that is
slow, as in the first step.
"""

import time
from collections.abc import Sequence

from autopar.base.errors import WorkerError
from autopar.runtime.faults import liveness
from autopar.runtime.workers.failures import hang_error
from autopar.runtime.workers.process import WorkerProcess


class Watchdog:
    """Watches over one call; ``idle_limit_s`` is for how long all workers may be idle."""

    def __init__(self, workers: Sequence[WorkerProcess], what: str, idle_limit_s: float) -> None:
        self.what = what
        self.num_workers = len(workers)
        self.idle_limit_s = idle_limit_s
        self._activities = {worker.rank: liveness.Activity(worker.pid) for worker in workers}
        self._next_s = time.monotonic() + liveness.SAMPLE_S

    def trouble(self, late: Sequence[WorkerProcess]) -> WorkerError | None:
        """The error to raise for the workers that have not answered; they are sampled once in
        `liveness.SAMPLE_S` only."""
        if time.monotonic() < self._next_s or not late:
            return None
        self._next_s = time.monotonic() + liveness.SAMPLE_S
        activities = [self._activities[worker.rank] for worker in late]
        for worker, activity in zip(late, activities, strict=True):
            activity.sample(worker.doing())
        if any(activity.stopped_s > liveness.SILENT_S for activity in activities):
            return hang_error(late, self.what, self.num_workers)
        if not all(activity.idle_s > self.idle_limit_s for activity in activities):
            return None
        error = hang_error(late, self.what, self.num_workers, idle_s=self.idle_limit_s)
        if error is None:
            for activity in activities:
                activity.restart()
        return error
