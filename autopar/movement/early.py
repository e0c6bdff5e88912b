"""When gradients arrive for early updates, as the runtime hands them over."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from autopar.cost_models.hardware import DeviceSpec
from autopar.lowering.arrivals import Reads, rounds_in_flight
from autopar.lowering.route import Route
from autopar.lowering.types import RankProgram


class EarlyArrivals:
    """The gradients of one device on their way to early updates.

    ``reads`` is told which backward graphs have run.
    """

    def __init__(self, program: RankProgram, route: Route, device: DeviceSpec) -> None:
        self.reads = Reads(program, route)
        self._communicated = {p.value for p in program.parameters if p.kernel is not None}
        self._num_in_flight = rounds_in_flight(device.kind, program.mesh.num_devices)
        self._rounds: deque[list[int]] = deque()
        self._arrived: list[int] = []

    def free(self, complete: Sequence[int], *, is_last: bool) -> list[int]:
        """The parameters to update now that these gradients are complete; the last rounds of
        reductions stay in flight, unless this ``is_last``."""
        reduced = [v for v in complete if v in self._communicated]
        self._arrived += [v for v in complete if v not in self._communicated]
        if reduced:
            self._rounds.append(reduced)
        while len(self._rounds) > (0 if is_last else self._num_in_flight):
            self._arrived += self._rounds.popleft()
        free = self.reads.free(self._arrived)
        self._arrived = [v for v in self._arrived if v not in free]
        return free
