"""What moving a value between placements costs, and what its collectives were priced by.

In: a mesh of a cluster, and how a step is cut into micro-batches. Out: a `MovePrice` for each
redistribution, and matrices of seconds over the choices of its two ends. Equal moves share one
price, and moves of equal tables one matrix.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.comm.coalesced import travels_alone
from autopar.cost_models import Cluster, CommunicationModel
from autopar.cost_models.estimate import Estimate
from autopar.ir.graph import Graph, Value, ValueKind
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements, State, Step, StepKind, redistribute
from autopar.sharding.microbatches import Microbatches

Array = np.ndarray[Any, np.dtype[np.float64]]
Routes = Callable[[Placements, Placements, tuple[int, ...], Mesh], tuple[Step, ...]]
"""As `redistribute`."""

_COMPARED_BYTES = 1 << 20
"""Message size by which groups are compared."""


@dataclass(frozen=True, eq=False, slots=True)
class PlacementTable:
    """The distinct placements of one operand over a node's choices, and which choice has which."""

    distinct: tuple[Placements, ...]
    index: np.ndarray[Any, np.dtype[np.intp]]

    @staticmethod
    def of(placements: Sequence[Placements]) -> PlacementTable:
        distinct = tuple(dict.fromkeys(placements))
        number = {p: i for i, p in enumerate(distinct)}
        return PlacementTable(distinct, np.array([number[p] for p in placements], dtype=np.intp))

    def at(self, pick: int) -> Placements:
        """The placement that a choice has."""
        return self.distinct[self.index[pick]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePrice:
    """Seconds of one redistribution of one micro-batch's part, each way.

    ``collectives`` is the part of both that is communication, with its source; None where nothing
    is communicated.
    """

    forward_s: float
    backward_s: float
    collectives: Estimate | None


def added(first: Estimate | None, second: Estimate | None) -> Estimate | None:
    """The sum of two prices of communication, either of which may be none."""
    if first is None or second is None:
        return first or second
    return first + second


class Moves:
    """Prices of redistributions on one mesh."""

    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        cluster: Cluster,
        communication: CommunicationModel,
        microbatches: Microbatches | None,
        *,
        routes: Routes = redistribute,
    ) -> None:
        self.mesh = mesh
        self.device = cluster.device
        self.communication = communication
        self.microbatches = microbatches
        self.routes = routes
        self.num_microbatches = 1 if microbatches is None else microbatches.num
        self.num_joined = _num_joined(graph)
        self._group = slowest_groups(communication, mesh)
        self._prices: dict[Any, MovePrice] = {}
        self._matrices: dict[Any, Array] = {}

    def num_parts(self, value: Value) -> int:
        """Into how many micro-batches a value is cut; 1 where each has all of it."""
        cut = self.microbatches
        is_cut = cut is not None and cut.states[value.index].state is State.SHARD
        return self.num_microbatches if is_cut else 1

    def matrix(
        self,
        value: Value,
        source: PlacementTable,
        target: PlacementTable,
        *,
        stored: bool = False,
        num_joined: int = 1,
    ) -> Array:
        """Seconds of redistributing ``value``, [choices of source, choices of target]."""
        what = (value.shape, value.dtype, value.differentiable, self.num_parts(value))
        key = (what, stored, num_joined, source, target)
        if key not in self._matrices:
            small = np.array(
                [
                    [
                        self.seconds(value, s, t, stored=stored, num_joined=num_joined)
                        for t in target.distinct
                    ]
                    for s in source.distinct
                ]
            )
            self._matrices[key] = small[np.ix_(source.index, target.index)]
        return self._matrices[key]

    def seconds(
        self,
        value: Value,
        source: Placements,
        target: Placements,
        *,
        stored: bool = False,
        num_joined: int = 1,
    ) -> float:
        """Seconds of one redistribution in a step, forward and (where a gradient flows) backward.

        ``stored``: of a parameter from its store, whose gradient comes back once a step.
        """
        price = self.price(value, source, target, stored=stored, num_joined=num_joined)
        num = self.num_microbatches
        return num * price.forward_s + (1 if stored else num) * price.backward_s

    def price(
        self,
        value: Value,
        source: Placements,
        target: Placements,
        *,
        stored: bool = False,
        num_joined: int = 1,
    ) -> MovePrice:
        """The price of one redistribution of one micro-batch's part.

        It travels with ``num_joined`` such values; ``stored`` parameters with those of their block.
        """
        parts = self.num_parts(value)
        num_joined = self.num_joined if stored else num_joined
        key = (value.shape, value.dtype, value.differentiable, parts, source, target, num_joined)
        if key not in self._prices:
            forward_s = backward_s = 0.0
            collectives: Estimate | None = None
            for step in self.routes(source, target, value.shape, self.mesh):
                found = self._step(value, step, parts, num_joined)
                forward_s += found.forward_s
                backward_s += found.backward_s
                collectives = added(collectives, found.collectives)
            self._prices[key] = MovePrice(
                forward_s=forward_s, backward_s=backward_s, collectives=collectives
            )
        return self._prices[key]

    def _step(self, value: Value, step: Step, parts: int, num_joined: int) -> MovePrice:
        local = math.ceil(math.prod(step.shape) * value.dtype.itemsize / parts)
        num = self.mesh.size(step.axes)
        grown = local * num if step.kind in (StepKind.ALL_GATHER, StepKind.PAD) else local
        forward_s, backward_s = self._copy_s(step, grown), 0.0
        copies = _rearranged(step) if num > 1 else 0
        there = back = None
        if step.forward is not None:
            there = self.collective(step.forward, grown, step.axes, num_joined)
            forward_s += 0.0 if there is None else there.time_s
            forward_s += copies * self._pass_s(grown)
        if value.differentiable and step.backward is not None:
            back = self.collective(step.backward, grown, step.axes, num_joined)
            backward_s = 0.0 if back is None else back.time_s
            backward_s += copies * self._pass_s(grown)
        return MovePrice(forward_s=forward_s, backward_s=backward_s, collectives=added(there, back))

    def collective(
        self, kind: str, size_bytes: int, axes: tuple[int, ...], num_joined: int = 1
    ) -> Estimate | None:
        """A collective over axes of the mesh; None where they have one device."""
        if self.mesh.size(axes) == 1:
            return None
        return self.joined(kind, size_bytes, self._group[axes], num_joined)

    def joined(
        self, kind: str, size_bytes: int, group: tuple[int, ...], num_joined: int
    ) -> Estimate:
        """One value's part of a collective that several values travel in together.

        See `autopar.comm.coalesced`: what is sent is copied into one buffer, what is gathered out
        of one. A large value that is not summed travels alone.
        """
        found = self.communication.joined(kind, size_bytes, group, num_joined)
        if num_joined == 1 or travels_alone(size_bytes, is_sum=kind == "all_reduce"):
            return found
        copied = size_bytes
        if kind == "all_gather":
            copied += size_bytes // len(group)
        copy_s = 2 * copied / self.device.memory_bandwidth_bytes_per_s
        return Estimate(found.time_s + copy_s, found.source, found.is_noisy)

    def _copy_s(self, step: Step, size_bytes: int) -> float:
        """Slices, masks and pads read and write memory."""
        if step.kind in (StepKind.SLICE, StepKind.MASK, StepKind.PAD):
            return self._pass_s(size_bytes)
        return 0.0

    def _pass_s(self, size_bytes: int) -> float:
        """Seconds of a kernel that reads and writes as much."""
        device = self.device
        return device.kernel_launch_s + 2 * size_bytes / device.memory_bandwidth_bytes_per_s


def _rearranged(step: Step) -> int:
    """How often a step that communicates, forward or backward, copies the value besides.

    What is split along any but the outermost dimension is put in order before it is sent, or after
    it has arrived (`autopar.comm.ops.disassemble`, `assemble`).
    """
    digits = (step.source, step.local_outer), (step.target, step.target_local_outer)
    return sum(
        place.state is State.SHARD and outer * math.prod(step.shape[: place.dim]) > 1
        for place, outer in digits
    )


def slowest_groups(
    communication: CommunicationModel, mesh: Mesh
) -> dict[tuple[int, ...], tuple[int, ...]]:
    """For every set of axes the group that a step waits for: where an axis does not fit into a
    node, some of its groups lie across two."""
    return {
        axes: _slowest(communication, mesh.groups(axes))
        for size in range(1, mesh.num_axes + 1)
        for axes in itertools.combinations(range(mesh.num_axes), size)
    }


def _slowest(
    communication: CommunicationModel, groups: Sequence[tuple[int, ...]]
) -> tuple[int, ...]:
    of_shape: dict[Any, tuple[int, ...]] = {}
    for group in groups:
        of_shape.setdefault(communication.group_shape(group), group)
    return max(
        of_shape.values(),
        key=lambda group: communication.estimate("all_reduce", _COMPARED_BYTES, group).time_s,
    )


def _num_joined(graph: Graph) -> int:
    """How many parameters a block has on average, of those that have any."""
    of_block = [
        {i for op in graph.ops[block.start : block.stop] for i in op.inputs}
        for block in graph.blocks
    ]
    counts = [
        sum(graph.values[i].kind is ValueKind.PARAMETER for i in inputs) for inputs in of_block
    ]
    return max(1, round(sum(counts) / max(1, sum(count > 0 for count in counts))))
