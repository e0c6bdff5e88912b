"""What a second compute stream holds: at most until the main stream joins it, behind all actions.

In: the W's that run on it, as a step is played in the order of issue. Out: the bytes that live
longer than in that order. The host may issue a whole step before the side stream has begun, so what
a W reads is counted until the join, and so is the largest workspace, beside whatever the main
stream runs. An allocator keeps the memory of two streams apart: what one has freed is not used by
the other. On a CPU there is one stream, and nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.cost_models.allocator import Category
from autopar.lowering.route import Route
from autopar.lowering.types import RankProgram
from autopar.memory.tally import Tally
from autopar.schedules.action import Action
from autopar.schedules.schedule import Resource


class SideStream:
    """The side stream of one device, counted in the tally of its step."""

    def __init__(self, program: RankProgram, route: Route, tally: Tally, device_kind: str) -> None:
        steps = program.pipeline.schedule.devices[route.device] if device_kind != "cpu" else ()
        self._actions = {item.action for item in steps if item.resource is Resource.SIDE}
        self._tally = tally
        self._is_running = False
        self._largest_bytes = 0
        self._kept_bytes = 0
        self._releases: list[Callable[[], None]] = []

    def begin(self, action: Action) -> None:
        """An action is issued."""
        self._is_running = action in self._actions

    def workspace(self, size_bytes: int) -> int:
        """The bytes that a W takes beside what is live; on this stream its workspace stays live."""
        if not self._is_running:
            return size_bytes
        growth = max(size_bytes - self._largest_bytes, 0)
        self._largest_bytes += growth
        self._keep(growth)
        return 0

    def keep(self, size_bytes: int) -> None:
        """Keep further bytes that the main stream made and a W of this stream reads."""
        if self._is_running:
            self._keep(size_bytes)

    def keep_reduced(self, size_bytes: int) -> None:
        """Keep gradients that the main stream made, and this stream reduces."""
        if self._actions and not self._is_running:
            self._keep(size_bytes)

    def release(self, release: Callable[[], None]) -> None:
        """Release what a W read, now or when the streams are joined."""
        if self._is_running:
            self._releases.append(release)
        else:
            release()

    def join(self) -> None:
        """The main stream has waited for this one."""
        self._tally.live[Category.WORKSPACE] -= self._kept_bytes
        self._kept_bytes = 0
        for release in self._releases:
            release()
        self._releases.clear()

    @property
    def apart_bytes(self) -> int:
        """The bytes that two separate pools take beyond the peak of a shared one."""
        if not self._actions:
            return 0
        side_bytes = self._tally.gradient_bytes + self._largest_bytes
        peak_bytes = self._tally.peak_bytes
        return max(0, self._tally.peak_of_main_bytes + side_bytes - peak_bytes)

    def _keep(self, size_bytes: int) -> None:
        self._kept_bytes += size_bytes
        self._tally.live[Category.WORKSPACE] += size_bytes
