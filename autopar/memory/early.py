"""Memory of early updates: gradients that are released within the backward pass.

It plays what `autopar.runtime.step.reductions.Reductions.arrived` hands to the updates: gradients
that are complete, reduced, and of parameters that `autopar.lowering.arrivals` sets free. An update
on a second stream holds its gradients until the next one begins, and has memory of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from autopar.cost_models.allocator import Category
from autopar.cost_models.update import OptimizerSpec
from autopar.ir.placement import local_shape
from autopar.lowering.arrivals import Arrivals
from autopar.lowering.route import Route
from autopar.lowering.types import EarlyUpdate, RankProgram
from autopar.memory.parameters import ParameterBytes
from autopar.memory.reductions import ReductionMemory
from autopar.memory.tally import Tally


def clipped_bytes(early: EarlyUpdate | None, sizes: Iterable[ParameterBytes]) -> int:
    """Bytes of copies while gradients are clipped for early updates, one after the other; those
    that were cast are clipped in place, as rows are."""
    if early is None or early.clipping is None:
        return 0
    return max((size.stored for size in sizes if not size.is_cast), default=0)


class EarlyUpdates:
    """The early updates of one device, counted in a tally that has the gradients as stored."""

    def __init__(
        self,
        program: RankProgram,
        route: Route,
        tally: Tally,
        reductions: ReductionMemory,
        optimizer: OptimizerSpec,
        sizes: Mapping[int, ParameterBytes],
        device_kind: str,
    ) -> None:
        assert program.early is not None
        self.program = program
        self.at_end = program.early.at_end
        self._arrivals = Arrivals(program, route, device_kind)
        self.reads = self._arrivals.reads
        self._keeps = program.early.keeps_gradients
        self._overlaps = program.early.overlaps and device_kind != "cpu"
        self._updating_bytes = 0
        self.apart_bytes = 0
        """Bytes of workspace that a second stream holds, at any time of a step."""
        self._tally = tally
        self._reductions = reductions
        self._optimizer = optimizer
        self._sizes = sizes
        self._scatters: deque[int] = deque()
        self._rows: deque[int] = deque()
        self._parameter_of = {p.value: p for p in program.parameters}

    def complete(self, values: Sequence[int], communicated: Sequence[int]) -> None:
        """These gradients are complete; some are reduced, as one round."""
        self._arrivals.complete(values, communicated)
        if communicated:
            self._scatters.append(self._reductions.num_started)

    def update_rows(self, value: int, rows: tuple[int, int], where: str) -> None:
        """Reduce rows of a gradient."""
        parameter, size = self._parameter_of[value], self._sizes[value]
        live = self._tally.live
        part = (rows[1] - rows[0]) / self._num_rows(value)
        live[Category.GRADIENTS] += round(size.used * part)
        self._tally.note_gradients(0)
        if parameter.kernel is not None:
            copied = size.summed * (2 if size.summed != size.used else 1) if size.is_moved else 0
            self._tally.check(where, round(copied * part))
            live[Category.GRADIENTS] += round(size.stored * part) - round(size.used * part)
        self._rows.append(round(size.stored * part))

    def clipped_bytes(self, values: Iterable[int]) -> int:
        """`clipped_bytes` of these parameters."""
        return clipped_bytes(self.program.early, (self._sizes[v] for v in values))

    def _copied_bytes(self, values: Iterable[int]) -> int:
        """Bytes of copies of these gradients, clipped together while all of them are held."""
        return sum(self.clipped_bytes([value]) for value in values)

    def is_last(self, value: int, rows: tuple[int, int]) -> bool:
        """Whether these are the last rows of a gradient."""
        return rows[1] == self._num_rows(value)

    def _num_rows(self, value: int) -> int:
        parameter = self._parameter_of[value]
        return local_shape(parameter.shape, parameter.stored, self.program.mesh)[0]

    def advance(self, where: str, *, is_last: bool = False) -> None:
        """Update what has arrived and is read no more."""
        num = 0 if is_last else self._arrivals.num_in_flight
        rows = []
        while len(self._rows) > num:
            rows.append(self._rows.popleft())
        for _ in range(self._arrivals.end_rounds(is_last=is_last)):
            self._reductions.finish(self._scatters.popleft(), where)
        free = self._arrivals.free()
        sizes = [self._sizes[v].stored for v in free]
        if self._overlaps:
            if free or rows:
                self._update_beside(sizes, self._copied_bytes(free), rows)
            if is_last:
                self._end_update()
            return
        live = self._tally.live
        if free:
            self._tally.check("update", self._optimizer.workspace_bytes(sizes))
            self._tally.check("update", self.clipped_bytes(free))
            live[Category.GRADIENTS] -= 0 if self._keeps else sum(sizes)
        for size in rows:
            self._tally.check("update", self._optimizer.workspace_bytes([size]))
            live[Category.GRADIENTS] -= size

    def _update_beside(self, sizes: Sequence[int], copied: int, rows: Sequence[int]) -> None:
        """Update on a second stream, with ``copied`` bytes of clipped gradients."""
        self._end_update()
        self._updating_bytes = sum(rows) + (0 if self._keeps else sum(sizes))
        workspace_bytes = [self._optimizer.workspace_bytes([size]) for size in rows]
        workspace_bytes.append(self._optimizer.workspace_bytes(sizes) + copied)
        self.apart_bytes = max(self.apart_bytes, *workspace_bytes)

    def _end_update(self) -> None:
        """The first stream has waited for the second."""
        self._tally.live[Category.GRADIENTS] -= self._updating_bytes
        self._updating_bytes = 0
