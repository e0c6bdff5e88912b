"""When a training step has hung: it takes far longer than every one before it."""

from __future__ import annotations

STALL_S, STALL_FACTOR = 20.0, 5.0
"""After the first step, one that takes longer than both (seconds; the longest step so far times the
factor) is taken to hang. Where steps take up to 4 s, every process is ended within 30 s."""


class StepLimit:
    """The limit of the next step, from the times of those before; ``ceiling_s`` for the first."""

    def __init__(self, ceiling_s: float) -> None:
        self.ceiling_s = ceiling_s
        self.longest_s: float | None = None

    def note(self, time_s: float) -> None:
        """A step has ended well."""
        self.longest_s = max(self.longest_s or 0.0, time_s)

    @property
    def limit_s(self) -> float:
        if self.longest_s is None:
            return self.ceiling_s
        return min(max(STALL_S, STALL_FACTOR * self.longest_s), self.ceiling_s)
