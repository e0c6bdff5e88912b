"""Bytes that are live on one device while a step is played, and the peak so far."""

from __future__ import annotations

from collections import Counter

from autopar.cost_models.memory import Category


class Tally:
    """Live bytes by category; `check` compares them with the peak, also that ``at`` each place."""

    def __init__(self) -> None:
        self.live: Counter[Category] = Counter()
        self.peak: Counter[Category] = Counter()
        self.peak_at = "start"
        self.at: dict[str, int] = {}
        self._peak_bytes = 0
        self.gradient_bytes = 0
        """The most bytes of gradients at once."""
        self.peak_of_main_bytes = 0
        """The most bytes of all but gradients at once, as a second stream makes those."""

    def note_gradients(self, further_bytes: int) -> None:
        """Note the gradients of parameters, with ``further_bytes`` of them in a workspace."""
        now = self.live[Category.GRADIENTS] + further_bytes
        self.gradient_bytes = max(self.gradient_bytes, now)

    def check(self, where: str, working_bytes: int) -> None:
        """Note the peak if this moment, with the workspace of what runs, is one."""
        total = sum(self.live.values()) + working_bytes
        of_main = total - self.live[Category.GRADIENTS]
        self.peak_of_main_bytes = max(self.peak_of_main_bytes, of_main)
        if total > self.at.get(where, -1):
            self.at[where] = total
        if total > self._peak_bytes:
            self.peak, self.peak_at, self._peak_bytes = self.live.copy(), where, total
            self.peak[Category.WORKSPACE] += working_bytes
