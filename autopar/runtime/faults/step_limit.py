"""When a training step has hung: it takes far longer than all before it, or nothing moves."""

from __future__ import annotations

import math

STALL_S, STALL_FACTOR = 20.0, 5.0
"""After the first step, one that takes longer than both (seconds; the longest step so far times the
factor) is taken to hang; so is any step in which nothing moves for ``STALL_S``. Where steps take up
to 4 s, and in those that use no processor, every process is ended within 30 s."""


class StepLimit:
    """The limit of the next step, from the times of those before; ``ceiling_s`` for the first.

    ``on_cpu``: the processors show whether ranks compute; beside a GPU they do not.
    """

    def __init__(self, ceiling_s: float, *, on_cpu: bool) -> None:
        self.ceiling_s = ceiling_s
        self.on_cpu = on_cpu
        self.longest_s: float | None = None

    def note(self, time_s: float) -> None:
        """A step has ended well."""
        self.longest_s = max(self.longest_s or 0.0, time_s)

    @property
    def limit_s(self) -> float:
        if self.longest_s is None:
            return self.ceiling_s
        return min(max(STALL_S, STALL_FACTOR * self.longest_s), self.ceiling_s)

    @property
    def idle_limit_s(self) -> float:
        """For how long all ranks may do nothing, in the first step too."""
        return STALL_S if self.on_cpu else math.inf
