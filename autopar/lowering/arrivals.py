"""When gradients are reduced, and when an early update may use one.

In: a program, a device's route through it, and the graphs of a step as they run. Out: how many
contributions complete a gradient for its reduction, and the parameters that may be updated early:
those that no graph of the step will read. The executor of a step and the count of its memory both
ask here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from autopar.comm.transports.registry import traits_of
from autopar.lowering.route import Route
from autopar.lowering.types import BlockInterface, RankProgram, WeightStep


def contributions_of_round(program: RankProgram, route: Route) -> Counter[int]:
    """How many contributions complete each gradient for its reduction: all of a step, or those of a
    micro-batch if it is scattered in each."""
    num = Counter(route.contributions)
    for value in scattered(program):
        num[value] //= program.num_microbatches
    return num


def scattered(program: RankProgram) -> frozenset[int]:
    """The parameters whose gradients are scattered in every micro-batch."""
    return frozenset(p.value for p in program.parameters if p.scattered)


def rounds_in_flight(device_kind: str, num_ranks: int) -> int:
    """How many rounds of reductions are left in flight, so that they overlap with computation,
    where what arrives is used or added up at once."""
    return int(num_ranks > 1 and traits_of(device_kind, num_ranks).overlaps)


class Reads:
    """The number of backward graphs that will still read each parameter in a step on one device."""

    def __init__(self, program: RankProgram, route: Route) -> None:
        self._program = program
        self._left = route.reads.copy()

    def end(self, position: int) -> None:
        """Note that I of a block, or its W as a whole, reads no more."""
        self._left.subtract(set(self._program.blocks[position].interface.parameters))

    def begin_steps(self, position: int) -> None:
        """Note that W of a block begins in steps, which read only the parameters they release."""
        block = self._program.blocks[position]
        steps = self._program.kernels[block.kernel].weight_steps
        read = {value for step in steps for value in _released(block.interface, step)}
        self._left.subtract(set(block.interface.parameters) - read)

    def end_step(self, position: int, step: WeightStep) -> None:
        """Note that a step of W of a block reads no more."""
        self._left.subtract(set(_released(self._program.blocks[position].interface, step)))

    def free(self, values: Iterable[int]) -> list[int]:
        """Those of these parameters that may be updated now."""
        early = self._program.early
        assert early is not None
        return [v for v in values if v not in early.at_end and not self._left[v]]


class Arrivals:
    """The gradients of one device on their way to early updates, as the runtime hands them over.

    ``reads`` is told which backward graphs have run.
    """

    def __init__(self, program: RankProgram, route: Route, device_kind: str) -> None:
        self.reads = Reads(program, route)
        self.num_in_flight = rounds_in_flight(device_kind, program.mesh.num_devices)
        self._rounds: deque[Sequence[int]] = deque()
        self._arrived: list[int] = []

    def complete(self, values: Iterable[int], communicated: Sequence[int]) -> None:
        """These gradients are complete; some are reduced, as one round."""
        self._arrived += [v for v in values if v not in communicated]
        if communicated:
            self._rounds.append(communicated)

    def end_rounds(self, *, is_last: bool = False) -> int:
        """End the rounds of reductions that do not stay in flight, all of them if this ``is_last``;
        returns how many."""
        num = max(0, len(self._rounds) - (0 if is_last else self.num_in_flight))
        for _ in range(num):
            self._arrived += self._rounds.popleft()
        return num

    def free(self) -> list[int]:
        """The parameters to update now: their gradients have arrived and no graph reads them."""
        free = self.reads.free(self._arrived)
        self._arrived = [v for v in self._arrived if v not in free]
        return free


def _released(interface: BlockInterface, step: WeightStep) -> list[int]:
    """The parameters that no later step of W reads."""
    num_inputs = len(interface.inputs)
    return [interface.parameters[o - num_inputs] for o in step.released if o >= num_inputs]
