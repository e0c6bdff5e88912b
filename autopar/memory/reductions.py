"""Memory of gradient reductions: operands, buffers and results of the collectives in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from autopar.comm.coalesced import MAX_SCATTERS
from autopar.comm.footprint import Scatter, scatters
from autopar.comm.transports.base import Traits
from autopar.cost_models.memory import Category
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

    def start(self, sizes: Iterable[tuple[int, int]], where: str) -> None:
        """Reduce some gradients, given the bytes of each as blocks use it and as it is stored."""
        found = list(sizes)
        copied = sum(used for used, stored in found if used <= stored)
        groups = scatters([size for size in found if size[0] > size[1]], self._traits)
        play = self._overlapped if self._traits.overlaps else self._in_turn
        play(copied, groups, where)

    def _overlapped(self, copied: int, groups: Sequence[Scatter], where: str) -> None:
        live = self._tally.live
        for scatter in groups:
            self._in_flight.append(scatter)
            live[Category.COMMUNICATION] += scatter.in_flight_bytes
            live[Category.GRADIENTS] -= scatter.deferred_bytes
        self._tally.check(where, copied + sum(scatter.joined_bytes for scatter in groups))
        while len(self._in_flight) > MAX_SCATTERS:
            scatter = self._in_flight.popleft()
            live[Category.GRADIENTS] += scatter.deferred_bytes
            self._tally.check(where, copied)
            live[Category.COMMUNICATION] -= scatter.in_flight_bytes

    def _in_turn(self, copied: int, groups: Sequence[Scatter], where: str) -> None:
        """Each is over before the next begins; its operands are released then."""
        live = self._tally.live
        live[Category.COMMUNICATION] += sum(scatter.in_flight_bytes for scatter in groups)
        live[Category.GRADIENTS] -= sum(scatter.shard_bytes for scatter in groups)
        self._tally.check(where, copied)
        for scatter in groups:
            live[Category.GRADIENTS] += scatter.shard_bytes
            self._tally.check(where, scatter.joined_bytes)
            live[Category.COMMUNICATION] -= scatter.in_flight_bytes
