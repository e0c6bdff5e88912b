"""The limits beyond which a training step counts as hung: of its time, and without progress."""

from __future__ import annotations

import math

STALL_S, STALL_FACTOR = 20.0, 5.0
"""After the first step, one that takes longer than both (seconds; the longest step so far times the
factor) counts as hung; so does any step without progress for ``STALL_S``. Where steps take up to
4 s, and in those that use no processor, every process is ended within 30 s."""


class StepLimit:
    """The time limit of the next step, from those before; ``ceiling_s`` for the first.

    ``on_cpu``: whether ranks compute on processors, so that idle processors mean idle ranks.
    """

    def __init__(self, ceiling_s: float, *, on_cpu: bool) -> None:
        self.ceiling_s = ceiling_s
        self.on_cpu = on_cpu
        self.longest_s: float | None = None

    def note(self, time_s: float) -> None:
        """Record a step that succeeded."""
        self.longest_s = max(self.longest_s or 0.0, time_s)

    @property
    def limit_s(self) -> float:
        if self.longest_s is None:
            return self.ceiling_s
        return min(max(STALL_S, STALL_FACTOR * self.longest_s), self.ceiling_s)

    @property
    def idle_limit_s(self) -> float:
        """For how long all ranks may be idle, also in the first step."""
        return STALL_S if self.on_cpu else math.inf
