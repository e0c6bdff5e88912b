"""Bytes that are live on one device while a step is played, and the peak so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from autopar.cost_models.allocator import Category


class Moment(NamedTuple):
    """The fullest moment of an action at one place, such as ``F`` with the name of a block: the
    bytes of each category, with the workspace of what runs. Actions are numbered in their order."""

    action: int
    place: str
    by_category: Mapping[Category, int]

    @property
    def size_bytes(self) -> int:
        return sum(self.by_category.values())


class Tally:
    """Live bytes by category; `check` compares them with the peak.

    ``moments`` are the step in order.
    """

    def __init__(self) -> None:
        self.live: Counter[Category] = Counter()
        self.peak: dict[Category, int] = {}
        self.peak_at = "start"
        self.moments: list[Moment] = []
        self.peak_bytes = 0
        """Bytes of the peak, without what `add_to_peak` adds."""
        self._peak_moment = 0
        self._action = 0
        self._last_bytes = 0
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
        if of_main > self.peak_of_main_bytes:
            self.peak_of_main_bytes = of_main
        found = self._noted(where, total, working_bytes)
        if total > self.peak_bytes and found is not None:
            self.peak, self.peak_at, self.peak_bytes = found, where, total
            self._peak_moment = len(self.moments) - 1

    def begin_action(self) -> None:
        """The next action of the schedule begins."""
        self._action += 1

    def add_to_peak(self, workspace_bytes: int) -> None:
        """Count further workspace at the peak."""
        if workspace_bytes:
            self.peak[Category.WORKSPACE] = self.peak.get(Category.WORKSPACE, 0) + workspace_bytes
            last = self.moments[self._peak_moment]
            self.moments[self._peak_moment] = last._replace(by_category=self.peak)

    def _noted(self, where: str, total: int, working_bytes: int) -> dict[Category, int] | None:
        """The bytes of this moment, if it is the fullest so far of its action at its place."""
        last = self.moments[-1] if self.moments else None
        is_new = last is None or last.action != self._action or last.place != where
        if not is_new and total <= self._last_bytes:
            return None
        found = dict(self.live)
        found[Category.WORKSPACE] = found.get(Category.WORKSPACE, 0) + working_bytes
        if not is_new:
            self.moments.pop()
        self.moments.append(Moment(self._action, where, found))
        self._last_bytes = total
        return found
