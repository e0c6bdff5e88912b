"""Prices of redistributions, and the sources of their collectives' prices.

In: a mesh of a cluster, and the micro-batches of a step. Out: a `MovePrice` for each
redistribution, and matrices of seconds over the choices of its two ends. Equal redistributions
share one price, and those between equal tables one matrix.
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
from autopar.ir.graph import Graph, Mixed, Value, ValueKind
from autopar.ir.mesh import Mesh
from autopar.ir.placement import (
    Move,
    MoveKind,
    Placements,
    State,
    is_reduce_scattered,
    local_shape,
    redistribute,
)
from autopar.sharding.microbatches import Microbatches

Array = np.ndarray[Any, np.dtype[np.float64]]
Routes = Callable[[Placements, Placements, tuple[int, ...], Mesh], tuple[Move, ...]]
"""A function like `redistribute`."""

_COMPARED_BYTES = 1 << 20
"""Message size at which groups are compared."""


@dataclass(frozen=True, eq=False, slots=True)
class PlacementTable:
    """The distinct placements of an operand over a node's choices, and the index of each choice."""

    distinct: tuple[Placements, ...]
    index: np.ndarray[Any, np.dtype[np.intp]]

    @staticmethod
    def of(placements: Sequence[Placements]) -> PlacementTable:
        distinct = tuple(dict.fromkeys(placements))
        number = {p: i for i, p in enumerate(distinct)}
        return PlacementTable(distinct, np.array([number[p] for p in placements], dtype=np.intp))

    def at(self, pick: int) -> Placements:
        """The placement under a choice."""
        return self.distinct[self.index[pick]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePrice:
    """Seconds of redistributing one micro-batch of a value, forward and backward.

    ``forward_copies_s`` and ``backward_copies_s`` are the part that a device spends on its own:
    casts, slices, masks, padding, and copies before and after collectives. ``collectives`` is the
    communication of both passes, with its source; None if there is none.
    """

    forward_s: float
    backward_s: float
    forward_copies_s: float
    backward_copies_s: float
    collectives: Estimate | None


def added(first: Estimate | None, second: Estimate | None) -> Estimate | None:
    """The sum of two prices of communication, either of which may be None."""
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
        self._prices: dict[Any, dict[tuple[Placements, Placements], MovePrice]] = {}
        self._moved: dict[Any, dict[Move, MovePrice]] = {}
        self._matrices: dict[Any, Array] = {}

    def num_parts(self, value: Value) -> int:
        """The number of micro-batches that a value is split into; 1 if each has all of it."""
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
        num_gathers: int = 1,
        num_scatters: int = 1,
        exposed: tuple[float, float] = (1.0, 1.0),
    ) -> Array:
        """Seconds of redistributing ``value``, ``[choices of source, choices of target]``."""
        dtypes = value.dtype, value.mixed
        what = (value.shape, dtypes, value.differentiable, self.num_parts(value))
        key = (what, stored, num_joined, num_gathers, num_scatters, exposed, source, target)
        if key not in self._matrices:
            small = np.array(
                [
                    [
                        self.seconds(
                            value,
                            s,
                            t,
                            stored=stored,
                            num_joined=num_joined,
                            num_gathers=num_gathers,
                            num_scatters=num_scatters,
                            exposed=exposed,
                        )
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
        num_gathers: int = 1,
        num_scatters: int = 1,
        exposed: tuple[float, float] = (1.0, 1.0),
    ) -> float:
        """Seconds per step of a redistribution, forward and (where a gradient flows) backward.

        ``stored``: from a parameter's stored placement, ``num_gathers`` times per step; its
        gradient is moved there once, or ``num_scatters`` times if it is reduce-scattered.
        ``exposed``: the fractions of both that count.
        """
        price = self.price(value, source, target, stored=stored, num_joined=num_joined)
        num = self.num_microbatches
        there, back = num, num
        if stored:
            there, back = num_gathers, num_scatters if is_reduce_scattered(source, target) else 1
        return exposed[0] * there * price.forward_s + exposed[1] * back * price.backward_s

    def price(
        self,
        value: Value,
        source: Placements,
        target: Placements,
        *,
        stored: bool = False,
        num_joined: int = 1,
    ) -> MovePrice:
        """The price of redistributing one micro-batch of a value.

        Its collectives are coalesced with ``num_joined`` such values; those of ``stored``
        parameters with the others of their block.
        """
        parts = self.num_parts(value)
        num_joined = self.num_joined if stored else num_joined
        mixed = value.mixed if stored else None
        what = (value.shape, value.dtype, mixed, value.differentiable, parts, num_joined)
        known = self._prices.setdefault(what, {})
        found = known.get((source, target))
        if found is None:
            found = self._price(value, mixed, source, target, parts, num_joined)
            known[source, target] = found
        return found

    def _price(
        self,
        value: Value,
        mixed: Mixed | None,
        source: Placements,
        target: Placements,
        parts: int,
        num_joined: int,
    ) -> MovePrice:
        """The sum over the moves; equal moves of values of one type are priced once."""
        forward_s, backward_s = self._casts_s(value, mixed, source, target)
        widened = 1.0 if mixed is None else mixed.reduced.itemsize / value.dtype.itemsize
        kind = (value.dtype, value.differentiable, parts, num_joined, widened)
        known = self._moved.setdefault(kind, {})
        forward_copies_s, backward_copies_s = forward_s, backward_s
        collectives: Estimate | None = None
        moves = self.routes(source, target, value.shape, self.mesh)
        for move in moves:
            found = known.get(move)
            if found is None:
                found = known[move] = self._move(value, move, parts, num_joined, widened)
            if mixed is None and len(moves) == 1:
                return found
            forward_s += found.forward_s
            backward_s += found.backward_s
            forward_copies_s += found.forward_copies_s
            backward_copies_s += found.backward_copies_s
            collectives = added(collectives, found.collectives)
        return MovePrice(
            forward_s=forward_s, backward_s=backward_s, forward_copies_s=forward_copies_s,
            backward_copies_s=backward_copies_s, collectives=collectives,
        )  # fmt: skip

    def _casts_s(
        self, value: Value, mixed: Mixed | None, source: Placements, target: Placements
    ) -> tuple[float, float]:
        """Seconds of the casts of a stored parameter, and of its gradient before or after the
        reduction."""
        if mixed is None:
            return 0.0, 0.0
        stored, used = (
            math.prod(local_shape(value.shape, placements, self.mesh))
            for placements in (source, target)
        )
        forward_s = self._pass_s(stored * (value.dtype.itemsize + mixed.stored.itemsize) / 2)
        is_first = mixed.reduced is not value.dtype
        cast = used if is_first else stored
        backward_s = self._pass_s(cast * (value.dtype.itemsize + mixed.stored.itemsize) / 2)
        return forward_s, backward_s if value.differentiable else 0.0

    def _move(
        self, value: Value, move: Move, parts: int, num_joined: int, widened: float
    ) -> MovePrice:
        """``widened``: by how much the gradient's elements are larger than the value's."""
        local = math.ceil(math.prod(move.shape) * value.dtype.itemsize / parts)
        num = self.mesh.size(move.axes)
        grown = local * num if move.kind in (MoveKind.ALL_GATHER, MoveKind.PAD) else local
        forward_s, backward_s = self._copy_s(move, grown), 0.0
        copies = _rearranged(move) if num > 1 else 0
        there = back = None
        if move.forward is not None:
            there = self.collective(move.forward, grown, move.axes, num_joined)
            forward_s += copies * self._pass_s(grown)
        if value.differentiable and move.backward is not None:
            wide = round(widened * grown)
            back = self.collective(move.backward, wide, move.axes, num_joined)
            backward_s += copies * self._pass_s(wide)
        return MovePrice(
            forward_s=forward_s + (0.0 if there is None else there.time_s),
            backward_s=backward_s + (0.0 if back is None else back.time_s),
            forward_copies_s=forward_s, backward_copies_s=backward_s,
            collectives=added(there, back),
        )  # fmt: skip

    def collective(
        self, kind: str, size_bytes: int, axes: tuple[int, ...], num_joined: int = 1
    ) -> Estimate | None:
        """A collective over axes of the mesh; None if they have one device."""
        if self.mesh.size(axes) == 1:
            return None
        return self.joined(kind, size_bytes, self._group[axes], num_joined)

    def joined(
        self, kind: str, size_bytes: int, group: tuple[int, ...], num_joined: int
    ) -> Estimate:
        """One value's share of a coalesced collective (`autopar.comm.coalesced`).

        Operands are copied into one buffer, and gathered results out of one. A large value is not
        coalesced, unless it is summed.
        """
        found = self.communication.joined(kind, size_bytes, group, num_joined)
        if num_joined == 1 or travels_alone(size_bytes, is_sum=kind == "all_reduce"):
            return found
        copied = size_bytes
        if kind == "all_gather":
            copied += size_bytes // len(group)
        copy_s = 2 * copied / self.device.memory_bandwidth_bytes_per_s
        return Estimate(found.time_s + copy_s, found.source, found.is_noisy)

    def _copy_s(self, move: Move, size_bytes: int) -> float:
        """Seconds of the memory traffic of slices, masks and pads."""
        if move.kind in (MoveKind.SLICE, MoveKind.MASK, MoveKind.PAD):
            return self._pass_s(size_bytes)
        return 0.0

    def _pass_s(self, size_bytes: float) -> float:
        """Seconds of a kernel that reads and writes ``size_bytes``."""
        device = self.device
        return device.kernel_launch_s + 2 * size_bytes / device.memory_bandwidth_bytes_per_s


def _rearranged(move: Move) -> int:
    """How many extra copies a move that communicates makes, in forward or backward.

    A split along any but the outermost dimension is made contiguous before it is sent or after it
    has arrived (`autopar.comm.ops.disassemble`, `assemble`).
    """
    digits = (move.source, move.local_outer), (move.target, move.target_local_outer)
    return sum(
        place.state is State.SHARD and outer * math.prod(move.shape[: place.dim]) > 1
        for place, outer in digits
    )


def slowest_groups(
    communication: CommunicationModel, mesh: Mesh
) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The slowest group of each set of axes, which a step waits for.

    Where an axis does not fit into a node, some of its groups span two.
    """
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
    if len(of_shape) == 1:
        return groups[0]
    return max(
        of_shape.values(),
        key=lambda group: communication.estimate("all_reduce", _COMPARED_BYTES, group).time_s,
    )


def _num_joined(graph: Graph) -> int:
    """The average number of parameters per block, over blocks that have any."""
    of_block = [
        {i for op in graph.ops[block.start : block.stop] for i in op.inputs}
        for block in graph.blocks
    ]
    counts = [
        sum(graph.values[i].kind is ValueKind.PARAMETER for i in inputs) for inputs in of_block
    ]
    return max(1, round(sum(counts) / max(1, sum(count > 0 for count in counts))))
