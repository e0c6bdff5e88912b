"""Deadlines on the clock of the process, which other load on the machine does not move."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment after which nothing more is begun, ``limit_s`` seconds after its share began."""

    at_s: float
    limit_s: float

    @property
    def is_over(self) -> bool:
        return time.process_time() > self.at_s

    @property
    def left_s(self) -> float:
        """Seconds of processor time until then, negative afterwards."""
        return self.at_s - time.process_time()

    def after(self, share: float) -> Deadline:
        """The deadline after a share of its time."""
        if self.at_s == math.inf:
            return self
        limit_s = share * self.limit_s
        return Deadline(self.at_s - self.limit_s + limit_s, limit_s)


NEVER = Deadline(math.inf, math.inf)


def deadline_in(limit_s: float) -> Deadline:
    """The deadline in so many seconds of processor time from now."""
    return Deadline(time.process_time() + limit_s, limit_s)
