"""Memory of gradient reductions: operands, buffers and results of the collectives in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from autopar.comm.coalesced import MAX_SCATTERS
from autopar.comm.footprint import Scatter, scatters, sum_bytes
from autopar.comm.transports.base import Traits
from autopar.cost_models.allocator import Category
from autopar.lowering.arrivals import rounds_in_flight, scattered
from autopar.lowering.types import RankProgram
from autopar.memory.parameters import ParameterBytes
from autopar.memory.tally import Tally


class ReductionMemory:
    """The reductions of one device, counted in a tally that has the gradients as stored already.

    A gradient that is stored whole is all-reduced in a copy; one that is stored as a shard is the
    operand of a reduce-scatter, of which at most `MAX_SCATTERS` are in flight.
    """

    def __init__(self, tally: Tally, traits: Traits) -> None:
        self._tally = tally
        self._traits = traits
        self._in_flight: deque[Scatter] = deque()
        self.num_started = 0
        """Reduce-scatters started so far."""

    def start(
        self, sizes: Sequence[ParameterBytes], fresh: Sequence[ParameterBytes], where: str
    ) -> None:
        """Reduce some gradients; ``fresh`` are those that are not in the dtype of sums yet."""
        if not sizes:
            self._tally.check(where, 0)
            return
        self._cast([size for size in fresh if size.is_cast and not size.is_moved], where)
        cast = max((size.used for size in fresh if size.summed > size.used), default=0)
        copied = self._copied([size for size in sizes if size.is_moved and size.is_whole])
        parts = [size for size in sizes if not size.is_whole]
        groups = scatters([(size.summed, size.received) for size in parts], self._traits)
        # Until they are cast behind the sums, which makes new memory, shards are in their dtype.
        late = [size for size in parts if size.received != size.stored]
        growth = sum(size.stored - size.received for size in late)
        self._tally.live[Category.GRADIENTS] -= growth
        play = self._overlapped if self._traits.overlaps else self._in_turn
        play(max(copied, cast), groups, where)
        self._tally.live[Category.GRADIENTS] += growth
        self._tally.check(where, sum(size.received for size in late))

    def _copied(self, sizes: Sequence[ParameterBytes]) -> int:
        """Bytes of gradients that are summed in copies, with the buffers of their all-reduces."""
        groups: dict[int, int] = {}
        for size in sizes:
            groups[size.num_summed] = groups.get(size.num_summed, 0) + size.summed
        buffers = (sum_bytes(each, num, self._traits) for num, each in groups.items())
        return sum(groups.values()) + max(buffers, default=0)

    def _cast(self, sizes: Sequence[ParameterBytes], where: str) -> None:
        """Gradients that are cast one by one while the others are not yet."""
        left = sum(size.used for size in sizes)
        to_come = sum(size.stored for size in sizes)
        for size in sizes:
            to_come -= size.stored
            self._tally.check(where, left - to_come)
            left -= size.used

    def _overlapped(self, copied: int, groups: Sequence[Scatter], where: str) -> None:
        live = self._tally.live
        self.num_started += len(groups)
        for scatter in groups:
            self._in_flight.append(scatter)
            live[Category.COMMUNICATION] += scatter.in_flight_bytes
            live[Category.GRADIENTS] -= scatter.deferred_bytes
        self._tally.check(where, copied + sum(scatter.joined_bytes for scatter in groups))
        self._finish(MAX_SCATTERS, copied, where)

    def finish(self, num_finished: int, where: str) -> None:
        """Wait for the first reduce-scatters, so many since the start."""
        self._finish(self.num_started - num_finished, 0, where)

    def _finish(self, num_left: int, working_bytes: int, where: str) -> None:
        live = self._tally.live
        while len(self._in_flight) > num_left:
            scatter = self._in_flight.popleft()
            live[Category.GRADIENTS] += scatter.deferred_bytes
            self._tally.check(where, working_bytes)
            live[Category.COMMUNICATION] -= scatter.in_flight_bytes

    def _in_turn(self, copied: int, groups: Sequence[Scatter], where: str) -> None:
        """Each is over before the next begins; its operands are released then."""
        live = self._tally.live
        live[Category.COMMUNICATION] += sum(scatter.in_flight_bytes for scatter in groups)
        live[Category.GRADIENTS] -= sum(scatter.shard_bytes for scatter in groups)
        self._tally.check(where, copied)
        for scatter in groups:
            live[Category.GRADIENTS] += scatter.shard_bytes
            self._tally.check(where, scatter.joined_bytes + scatter.chunk_bytes)
            live[Category.COMMUNICATION] -= scatter.in_flight_bytes


def alone_bytes(moves: Sequence[tuple[ParameterBytes, int, int]]) -> int:
    """The most bytes beyond the stored gradients while some are reduced one by one, each with the
    workspace of its own graph, beside the operands of those to come.

    ``moves``: each gradient, the bytes of its operand, and the workspace with the result. Those
    that may travel joined run behind the others.
    """
    to_come = sum(operand - size.stored for size, operand, _ in moves)
    most = 0
    for size, operand, workspace in moves:
        if "I" in size.alone:
            most = max(most, to_come + max(workspace, size.stored))
            to_come -= operand - size.stored
    return most


class ScatteredSums:
    """The sums of gradients that are scattered in every micro-batch, each of a shard's size."""

    def __init__(
        self,
        program: RankProgram,
        tally: Tally,
        reductions: ReductionMemory,
        sizes: Mapping[int, ParameterBytes],
        device_kind: str,
    ) -> None:
        self._left = dict.fromkeys(scattered(program), program.num_microbatches)
        self._num_microbatches = program.num_microbatches
        self._tally = tally
        self._reductions = reductions
        self._sizes = sizes
        self._num_in_flight = rounds_in_flight(device_kind, program.mesh.num_devices)
        self._rounds: deque[tuple[bool, int, int]] = deque()

    def is_last(self, value: int) -> bool:
        """Whether the round of a gradient that begins now is its last."""
        return self._left.get(value, 1) == 1

    def add(self, values: Sequence[int], where: str) -> None:
        """Add a round that has begun to the sums, or, where rounds overlap, those before it."""
        if not values:
            return
        summed = [v for v in values if v in self._left]
        added = [v for v in summed if self._left[v] < self._num_microbatches]
        for value in summed:
            self._left[value] -= 1
        released = sum(self._sizes[v].stored for v in added)
        self._rounds.append((bool(summed), released, self._reductions.num_started))
        while len(self._rounds) > self._num_in_flight:
            is_summed, released, num_started = self._rounds.popleft()
            if is_summed:
                self._reductions.finish(num_started, where)
                self._tally.live[Category.GRADIENTS] -= released
