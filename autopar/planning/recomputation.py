"""The choice of the values that each block keeps for its backward pass; it recomputes the others.

In: a strategy's program without recomputation, with its traced blocks and prices. Out: a
`Recomputation`. For each distinct block the exact choices between most and fewest bytes are listed
(`autopar.search.recompute.frontier`); over the blocks one is picked for each so that the step is
fastest, within a budget of activations or within the memory of the device.

A kept value takes its bytes, a recomputed one the time of its op in the plan's prices, divided over
the calls that the op was traced into by their roofline. A value that passes from block to block is
counted in the first one that reads it in its backward pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor, fx

from autopar.base.errors import InputError
from autopar.base.spelling import did_you_mean
from autopar.base.units import format_bytes
from autopar.comm.ops import ALL_TO_ALL
from autopar.cost_models.allocator import allocator_of
from autopar.cost_models.hardware import DeviceSpec
from autopar.cost_models.traced import roofline_s
from autopar.ir.recomputation import BlockRecomputation, Recomputation
from autopar.ir.shared_names import SharedNames
from autopar.lowering.joint import Joint
from autopar.lowering.op_marks import op_place
from autopar.lowering.program import Traces
from autopar.lowering.types import BlockProgram, RankProgram
from autopar.memory.kept import PHASES, StagedBlock, held_at
from autopar.memory.kernel import KernelMemory, kernel_memory
from autopar.memory.program import ProgramMemory
from autopar.planning.recompute_request import Recompute, Request
from autopar.planning.setting import MemoryLimit
from autopar.pricing.candidate import Candidate
from autopar.pricing.moves import Moves
from autopar.pricing.tables import OpTable
from autopar.schedules.action import Kind
from autopar.search.recompute import Kept, Moments, Option, Value, choose, frontier, kept_of

MAX_POINTS = 16
"""How many choices of a block are compared."""
MAX_TRIALS = 6
"""How often the picks are corrected by the count of their program."""
CAUTION = 1 - 2e-3
"""The share of the room that the first pick may fill; every correction leaves as much less."""

Counted = Callable[[Recomputation], tuple[ProgramMemory, ...] | None]
"""The memory of the strategy's program with a recomputation, on each pipeline device; None if the
program is too slow to be of use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A choice of a block: the names of what F saves (None: all that it needs), the bytes kept with
    operands, and the block's memory."""

    names: tuple[str, ...] | None
    choice: Kept
    memory: KernelMemory

    @property
    def option(self) -> Option:
        """Its numbers for the choice over all blocks."""
        memory = self.memory
        return Option(
            kept_bytes=self.choice.size_bytes,
            late_bytes=memory.late,
            own_bytes=tuple(memory.workspace.get(phase, 0) for phase in PHASES),
            time_s=self.choice.time_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPoints:
    """The points of a block, from the most bytes to the fewest; the first recomputes nothing."""

    name: str
    stage: int
    joint: Joint
    values: tuple[Value, ...]
    points: tuple[Point, ...]

    def of(self, saved: tuple[str, ...]) -> Point:
        """The point at which F saves these values and no others."""
        found = _choice_of(self.joint, self.values, saved)
        return replace(self.points[0], names=saved, choice=found)


def _choice_of(joint: Joint, values: Sequence[Value], saved: Collection[str]) -> Kept:
    """The choice that keeps saved values and operands."""
    names = set(saved)
    kept = (i for i, v in enumerate(joint.values) if v.operand is not None or v.name in names)
    return kept_of(values, frozenset(kept))


class Recomputer:
    """The points of every block of a strategy, and picks among them."""

    def __init__(
        self, candidate: Candidate, program: RankProgram, traces: Traces, device: DeviceSpec
    ) -> None:
        self.candidate = candidate
        self.program = program
        self.device = device
        self.blocks = tuple(self._all_points(traces))

    def _all_points(self, traces: Traces) -> list[BlockPoints]:
        program, prices = self.program, _op_seconds(self.candidate)
        moves = self.candidate.priced.pricing.moves
        starts = {b.name: b.start for b in self.candidate.priced.pricing.graph.blocks}
        charged, free = _charges(program)
        known: dict[Any, tuple[tuple[Value, ...], tuple[Point, ...]]] = {}
        found = []
        for position, block in enumerate(program.blocks):
            kernel = program.kernels[block.kernel]
            if not block.role.has_stage or not kernel.cotangents:
                continue
            joint = traces.of_block[block.name]
            key = (joint, charged[position], free[position])
            if key not in known:
                seconds = _node_seconds(joint, starts[block.name], prices, self.device, moves)
                values = self._values(joint, charged[position], free[position], seconds)
                known[key] = values, self._points(joint, values)
            values, points = known[key]
            found.append(
                BlockPoints(
                    name=block.name, stage=program.pipeline.stage_of_block[position], joint=joint,
                    values=values, points=points,
                )
            )  # fmt: skip
        return found

    def _values(
        self,
        joint: Joint,
        charged: frozenset[int],
        free: frozenset[int],
        seconds: Mapping[fx.Node, float],
    ) -> tuple[Value, ...]:
        """The numbers of a joint graph's values; those counted elsewhere take no bytes."""
        rounded = allocator_of(self.device).rounded
        outputs = {joint.outputs[i] for i in free}
        return tuple(
            Value(
                size_bytes=0
                if v.node in outputs or (v.operand is not None and v.operand not in charged)
                else rounded(v.size_bytes),
                time_s=0.0 if v.is_free else seconds.get(v.node, 0.0),
                inputs=v.inputs,
                is_needed=v.is_needed,
                can_keep=v.can_keep,
                can_repeat=v.can_repeat,
            )
            for v in joint.values
        )

    def _points(self, joint: Joint, values: tuple[Value, ...]) -> tuple[Point, ...]:
        plain = _choice_of(joint, values, joint.default_names)
        points = [self._point(joint, None, plain)]
        for choice in frontier(values, MAX_POINTS):
            if choice.size_bytes < points[-1].choice.size_bytes:
                kept = (joint.values[i] for i in sorted(choice.values))
                points.append(
                    self._point(joint, tuple(v.name for v in kept if v.operand is None), choice)
                )
        return tuple(points)

    def _point(self, joint: Joint, names: tuple[str, ...] | None, choice: Kept) -> Point:
        memory = kernel_memory(joint.kernel(names), self.device)
        return Point(names=names, choice=choice, memory=memory)

    def recomputation(self, points: Sequence[Point]) -> Recomputation:
        """The recomputation with one point of each block."""
        return Recomputation(
            blocks={
                block.name: BlockRecomputation(
                    kept=point.names,
                    kept_bytes=point.choice.size_bytes,
                    default_bytes=block.points[0].choice.size_bytes,
                    time_s=point.choice.time_s,
                )
                for block, point in zip(self.blocks, points)
                if point.names is not None
            }
        )

    # --- fixed requests -------------------------------------------------------------------------
    def fixed(self, request: Recompute) -> Recomputation:
        """The recomputation of a fixed request; raises InputError if it is impossible."""
        if request.request is Request.FULL:
            return self.recomputation([block.points[-1] for block in self.blocks])
        if request.request is Request.MODULES:
            return self.recomputation(self._of_modules(request.modules))
        default = sum(w * b.points[0].choice.size_bytes for w, b in self._weighted())
        least = sum(w * b.points[-1].choice.size_bytes for w, b in self._weighted())
        limit: float = request.size_bytes or 0
        if request.fraction is not None:
            limit = least + request.fraction * (default - least)
        points = self._within(limit)
        if points is None:
            raise InputError(
                f"recompute={request.size_bytes}: the activations kept for the backward pass take "
                f"at least {least:,.0f} bytes ({format_bytes(least)}) on a device even if "
                "everything else is recomputed; give more, or use more micro-batches or devices"
            )
        return self.recomputation(points)

    def _of_modules(self, names: Sequence[str]) -> list[Point]:
        graph = self.candidate.priced.pricing.graph
        shared = SharedNames(graph.shared)
        paths = [op.module_path for op in graph.ops]
        for name in names:
            if not any(shared.is_in(path, name) for path in paths):
                raise InputError(
                    f"recompute names {name!r}, which is no module that the model calls; names are "
                    f"those of model.named_modules(){did_you_mean(name, _with_parents(paths))}"
                )
        starts = {b.name: b.start for b in graph.blocks}
        points = []
        for block in self.blocks:
            start = starts[block.name]

            def listed(place: int, start: int = start) -> bool:
                return any(shared.is_in(paths[start + place], name) for name in names)

            saved = block.joint.names_without(listed)
            is_default = set(saved) == set(block.joint.default_names)
            points.append(block.points[0] if is_default else block.of(saved))
        return points

    # --- searched -------------------------------------------------------------------------------
    def _weighted(self) -> list[tuple[int, BlockPoints]]:
        """Each block with the most micro-batches for which a device keeps its values at once."""
        flights = in_flight(self.program)
        return [(flights[block.stage], block) for block in self.blocks]

    def _within(self, limit_bytes: float) -> list[Point] | None:
        """The fastest points that keep at most ``limit_bytes`` on each pipeline device."""
        flights, picks = in_flight(self.program), [0] * len(self.blocks)
        for device in range(self.program.pipeline.num_devices):
            mine = self.on(device)
            if not mine:
                continue
            once = np.array([[flights[self.blocks[i].stage] for i in mine]])
            none = np.zeros(1, dtype=int)
            moments = Moments(
                kept=once, late=0 * once, running=none - 1, phase=none, others_bytes=np.zeros(1)
            )
            if not self._pick(mine, moments, limit_bytes, picks):
                return None
        return [block.points[pick] for block, pick in zip(self.blocks, picks)]

    def within_memory(self, limit: MemoryLimit, counted: Counted) -> Recomputation | None:
        """The fastest recomputation that fits the memory; None if none was found.

        The picks are corrected by the count of their program until it fits, or until ``counted``
        finds them too slow, which more recomputation would not change.
        """
        picks = [0] * len(self.blocks)
        factors = [CAUTION] * self.program.pipeline.num_devices
        for _ in range(MAX_TRIALS):
            points = [block.points[pick] for block, pick in zip(self.blocks, picks)]
            recomputation = self.recomputation(points)
            memories = counted(recomputation)
            if memories is None or all(limit.fits(memory) for memory in memories):
                return recomputation
            before = list(picks)
            for device, memory in enumerate(memories):
                needed, available = limit.tightest(memory)
                if needed <= available:
                    continue
                if not self.on(device):
                    return None
                moments = self.others(device, memory, points)
                allowed = factors[device] * memory.peak_bytes * available / needed
                factors[device] *= CAUTION
                if not self._pick(self.on(device), moments, allowed, picks):
                    return None
            if picks == before:
                return None
        return None

    def on(self, device: int) -> list[int]:
        """The blocks of a pipeline device."""
        placement = self.program.pipeline.shape.placement
        stages = {s for row in placement for s, each in enumerate(row) if each == device}
        return [i for i, block in enumerate(self.blocks) if block.stage in stages]

    def others(self, device: int, memory: ProgramMemory, points: Sequence[Point]) -> Moments:
        """The moments of a device, with the counted bytes that do not depend on its points."""
        mine = self.on(device)
        staged = [StagedBlock(self.blocks[i].name, self.blocks[i].stage) for i in mine]
        recomputed = self.program.pipeline.shape.recomputed
        held = held_at(memory.actions, memory.moments, staged, recomputed)
        of_points = held.bytes_of([points[i].option for i in mine])
        return replace(held, others_bytes=held.others_bytes - of_points)

    def _pick(
        self, mine: Sequence[int], moments: Moments, limit_bytes: float, picks: list[int]
    ) -> bool:
        """Pick the fastest points of some blocks within a device's memory; whether there are any.

        A stage with replicas keeps the fewest bytes that one of its devices asks for.
        """
        options = [[point.option for point in self.blocks[i].points] for i in mine]
        found = choose(options, moments, limit_bytes)
        if found is None:
            return False
        is_shared = len(self.program.pipeline.shape.placement) > 1
        for i, pick in zip(mine, found):
            picks[i] = max(picks[i], pick) if is_shared else pick
        return True


def in_flight(program: RankProgram) -> dict[int, int]:
    """By stage, the most micro-batches for which one device keeps values at once."""
    most: dict[int, int] = defaultdict(int)
    for row in program.pipeline.schedule.devices:
        held: dict[int, int] = defaultdict(int)
        for item in row:
            action = item.action
            if action.kind is Kind.F:
                held[action.stage] += action.span
                most[action.stage] = max(most[action.stage], held[action.stage])
            elif action.kind in (Kind.B, Kind.I):
                held[action.stage] -= action.span
    return most


def _charges(program: RankProgram) -> tuple[list[frozenset[int]], list[frozenset[int]]]:
    """By block: the operands that it pays for, and the outputs that later blocks keep anyway.

    An activation is paid for by the first block that reads it in its backward pass; if none does
    before anything is recomputed, by the first one that could recompute from it.
    """
    made = {v for b in program.blocks if b.role.has_stage for v in b.interface.outputs}
    paid: set[int] = set()
    charged: list[set[int]] = []
    for block in program.blocks:
        read = [v for v in _read_late(program, block) if v in made and v not in paid]
        paid.update(read)
        charged.append({block.interface.inputs.index(v) for v in read})
    free = [
        frozenset(i for i, v in enumerate(block.interface.outputs) if v in paid)
        for block in program.blocks
    ]
    for block, operands in zip(program.blocks, charged):
        for i, value in enumerate(block.interface.inputs):
            if value in made and value not in paid:
                paid.add(value)
                operands.add(i)
    return [frozenset(operands) for operands in charged], free


def _read_late(program: RankProgram, block: BlockProgram) -> list[int]:
    """The inputs that a block's backward pass reads; parameters are held in any case."""
    kernel = program.kernels[block.kernel]
    sources = {*kernel.input_sources, *kernel.weight_sources}
    inputs = block.interface.inputs
    return [v for i, v in enumerate(inputs) if ("operand", i) in sources]


# --- prices -------------------------------------------------------------------------------------
def _op_seconds(candidate: Candidate) -> dict[int, float]:
    """Seconds of each op's forward pass for one micro-batch, by index."""
    priced, num = candidate.priced, candidate.num_microbatches
    return {
        node.index: table.estimates[pick].forward_s / num
        for node, table, pick in zip(priced.nodes, priced.tables, candidate.solution.assignment)
        if isinstance(table, OpTable)
    }


def _node_seconds(
    joint: Joint, start: int, prices: Mapping[int, float], device: DeviceSpec, moves: Moves
) -> dict[fx.Node, float]:
    """Seconds of each call of the forward pass; ``start`` is the index of the block's first op."""
    exchanged = {n: _exchange_s(n, moves) for n in joint.forward_nodes if n.target is ALL_TO_ALL}
    seconds = {
        v.node: roofline_s(v.node, device)
        for v in joint.values
        if v.operand is None and not v.is_free
    }
    of_op: dict[int, list[fx.Node]] = defaultdict(list)
    for node in joint.forward_nodes:
        place = op_place(node)
        if place is not None and node.op == "call_function" and node not in exchanged:
            of_op[place].append(node)
            seconds.setdefault(node, roofline_s(node, device))
    for place, nodes in of_op.items():
        total = sum(seconds[node] for node in nodes)
        whole = prices.get(start + place)
        if whole is not None and total > 0:
            seconds |= {node: seconds[node] * whole / total for node in nodes}
    return seconds | exchanged


def _exchange_s(node: fx.Node, moves: Moves) -> float:
    """Seconds of an all-to-all of a traced graph."""
    sent: Tensor = node.args[0].meta["val"]  # type: ignore[union-attr]
    axes = moves.mesh.axes_of(str(node.args[1]))
    price = moves.collective("all_to_all", sent.numel() * sent.element_size(), axes)
    return 0.0 if price is None else price.time_s


def _with_parents(paths: Sequence[str]) -> set[str]:
    """Module paths and those of the modules around them."""
    found: set[str] = set()
    for path in set(paths):
        parts = path.split(".")
        found.update(".".join(parts[: i + 1]) for i in range(len(parts)))
    return found
