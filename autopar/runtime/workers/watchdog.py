"""The parent's watch over its local workers during one call.

In: the workers that have not answered yet. Out: the error to raise, where one is stopped or where
nothing moves any more. It exists because the time limit of a call cannot tell a worker that hangs
from one that is slow, as in the first step of all.
"""

import time
from collections.abc import Sequence

from autopar.base.errors import WorkerError
from autopar.runtime.faults import life
from autopar.runtime.workers.failures import hang_error
from autopar.runtime.workers.process import WorkerProcess


class Watchdog:
    """``idle_limit_s``: for how long all workers may do nothing."""

    def __init__(self, workers: Sequence[WorkerProcess], what: str, idle_limit_s: float) -> None:
        self.what = what
        self.num_workers = len(workers)
        self.idle_limit_s = idle_limit_s
        self._pulses = {worker.rank: life.Pulse(worker.pid) for worker in workers}
        self._next_s = time.monotonic() + life.LOOK_S

    def trouble(self, late: Sequence[WorkerProcess]) -> WorkerError | None:
        """What is wrong with the workers that have not answered; looks once in a while only."""
        if time.monotonic() < self._next_s or not late:
            return None
        self._next_s = time.monotonic() + life.LOOK_S
        pulses = [self._pulses[worker.rank] for worker in late]
        for worker, pulse in zip(late, pulses, strict=True):
            pulse.look(worker.doing())
        if any(pulse.stopped_s > life.SILENT_S for pulse in pulses):
            return hang_error(late, self.what, self.num_workers)
        if not all(pulse.idle_s > self.idle_limit_s for pulse in pulses):
            return None
        error = hang_error(late, self.what, self.num_workers, idle_s=self.idle_limit_s)
        if error is None:
            for pulse in pulses:
                pulse.restart()
        return error
