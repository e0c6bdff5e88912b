"""The wall times of the last training steps, which reports compare with the prediction.

In: each step, with its loss and time. Out: the times of those that the plan predicts, and the lines
of a log. Steps that are measured are in neither: measuring takes time.
"""

from __future__ import annotations

import collections
import contextlib
import statistics
from collections.abc import Iterator

from torch import Tensor

from autopar.runtime.step_log import StepLog

NUM_KEPT = 100


class StepTimes:
    """The seconds of the last `NUM_KEPT` steps; each step also goes to the ``log``, if any."""

    def __init__(self) -> None:
        self.seconds: collections.deque[float] = collections.deque(maxlen=NUM_KEPT)
        self.log: StepLog | None = None
        self._is_paused = False

    @property
    def median_s(self) -> float | None:
        """The (lower) median; None before the first step."""
        return statistics.median_low(self.seconds) if self.seconds else None

    def note(self, loss: Tensor, time_s: float, *, is_planned: bool) -> None:
        """Note a step of a batch that the plan is for, or of other sizes."""
        if self._is_paused:
            return
        if is_planned:
            self.seconds.append(time_s)
        if self.log is not None:
            self.log.after_step(loss, time_s, is_planned=is_planned)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within: no step is noted."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False
