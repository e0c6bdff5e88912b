"""The ops of measured steps, pass by pass, beside their predicted times.

In: the times of each step by rank, and the prices of the plan's ops. Out: one value for each op's
forward pass, its gradient, and where it is recomputed; one for what a block runs between its ops;
and the passes that all of them are part of. `autopar.runtime.op_tables` shows them.

All values are means over the same steps on the same ranks, so that those of a pass add up to no
more than the pass takes: medians, or blocks each on the rank where it takes longest, do not.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from torch import fx

from autopar.cost_models import DeviceSpec, OpCall
from autopar.cost_models.estimate import Source
from autopar.cost_models.store import OpTime
from autopar.cost_models.traced import roofline_s
from autopar.lowering.op_marks import Gradient, gradient_of, op_place
from autopar.lowering.types import Kernel, RankProgram
from autopar.runtime.machine.op_clock import OpSeconds, timed_graphs
from autopar.runtime.machine.protocols import Phase
from autopar.runtime.measure.op_prices import OpPrice
from autopar.runtime.step.timing import RankTimes
from autopar.schedules.action import Kind

BETWEEN = "between ops"
"""The operator of what a block runs that belongs to no op."""


class Pass(StrEnum):
    """The part of a step in which an op runs; UPDATE is all that follows the ops. A stage that is
    recomputed as a whole runs its forward pass twice, and FORWARD counts both."""

    FORWARD = "forward"
    RECOMPUTED = "recomputed"
    BACKWARD = "backward"
    UPDATE = "update"


PASSES: Mapping[Pass, tuple[Kind, ...]] = {
    Pass.FORWARD: (Kind.F, Kind.R), Pass.BACKWARD: (Kind.B, Kind.I, Kind.W),
}  # fmt: skip
"""The kinds of action that are part of the forward and of the backward passes of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpProfile:
    """An op in one pass of a step, or all that a block runs between its ops (`BETWEEN`).

    ``name``: the op's, or the block's with ``operator`` `BETWEEN`, which has no prediction and no
    ``source``. ``measured_s``: of all micro-batches, the mean of the steps, on the rank of the
    block's stage that takes longest for its ops; ``predicted_s`` is of all micro-batches too.
    ``call``: what a device computes for one micro-batch, None where that is no single call;
    ``times``, with the forward pass, its seconds in both directions.
    """

    name: str
    operator: str
    block: str
    direction: Pass
    measured_s: float
    predicted_s: float
    source: Source | None
    call: OpCall | None = None
    times: OpTime | None = None

    @property
    def measured_call(self) -> tuple[OpCall, OpTime] | None:
        """The call with its times, for a calibration; None but for a forward pass."""
        return None if self.call is None or self.times is None else (self.call, self.times)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """Mean seconds of the forward or backward passes of a step in which ops are timed, on one rank.

    ``measured_s``: of the whole passes, communication included; ``ops_s`` and ``between_s`` are
    parts of it, in ops and between the ops of a block, without the blocks that run before all
    passes.
    """

    rank: int
    direction: Pass
    measured_s: float
    ops_s: float
    between_s: float

    @property
    def outside_s(self) -> float:
        """Outside of the ops of blocks: moves between blocks, and calls from Python."""
        return max(self.measured_s - self.ops_s - self.between_s, 0.0)


class _Part(NamedTuple):
    """The part of a block's work that some of its nodes share: one pass of the op at a place, in
    the backward pass one of its gradients; without a place, work that belongs to no op."""

    direction: Pass
    place: int | None
    gradient: Gradient | None


def op_profiles(
    prices: Sequence[OpPrice],
    program: RankProgram,
    steps: Sequence[Sequence[Sequence[OpSeconds]]],
    device: DeviceSpec,
) -> tuple[OpProfile, ...]:
    """Every op in every pass in which it ran in the ``steps``, each a list of the nodes' seconds by
    rank, and what blocks ran between them. The times of a block add up to all of its nodes' on the
    `slowest_ranks`.

    ``program``: as it was lowered in this process, whose nodes know their ops.
    """
    ranks, (in_passes, others) = slowest_ranks(program, steps), _by_stage(program)
    measured = _measured(program, steps, ranks, in_passes)
    measured |= _measured(program, steps, ranks[:1], others)
    made = list[OpProfile]()
    kernels = {block.name: program.kernels[block.kernel] for block in program.blocks}
    twice = _run_twice(program)
    for block, inside in itertools.groupby(prices, key=lambda price: price.block):
        times, runs = measured.get(block, {}), 2 if block in twice else 1
        for price in inside:
            found = _Op(price, times, runs, program.num_microbatches, len(steps))
            made += found.rows(kernels, device)
        for direction in Pass:
            time_s = times.get(_Part(direction, None, None), 0.0)
            if time_s:
                made.append(
                    OpProfile(
                        name=block, operator=BETWEEN, block=block, direction=direction,
                        measured_s=time_s, predicted_s=0.0, source=None,
                    )
                )  # fmt: skip
    return tuple(made)


@dataclass(frozen=True, slots=True)
class _Op:
    """An op's price beside the seconds of its block's parts; it ran forward ``runs`` times."""

    price: OpPrice
    times: Mapping[_Part, float]
    runs: int
    num_microbatches: int
    num_samples: int

    def rows(self, kernels: Mapping[str, Kernel], device: DeviceSpec) -> Iterator[OpProfile]:
        estimate = self.price.estimate
        forward_s = self._time(Pass.FORWARD)
        if forward_s:
            predicted_s = self.runs * estimate.forward_s
            yield self._row(Pass.FORWARD, forward_s, predicted_s, self._call_times())
        again_s = self._time(Pass.RECOMPUTED)
        if again_s:
            share = _recomputed_share(kernels[self.price.block], self.price.place, device)
            yield self._row(Pass.RECOMPUTED, again_s, share * estimate.forward_s)
        backward_s = sum(self._gradients())
        if backward_s:
            yield self._row(Pass.BACKWARD, backward_s, estimate.backward_s)

    def _time(self, direction: Pass, gradient: Gradient | None = None) -> float:
        return self.times.get(_Part(direction, self.price.place, gradient), 0.0)

    def _gradients(self) -> tuple[float, float]:
        """Seconds of the gradients of inputs and parameters.

        A call that computes both is divided in the proportion of their predictions.
        """
        input_s = self._time(Pass.BACKWARD, Gradient.INPUT)
        weight_s = self._time(Pass.BACKWARD, Gradient.WEIGHT)
        estimate = self.price.estimate
        if not weight_s and estimate.backward_s:
            weight_s = input_s * estimate.weight_grad_s / estimate.backward_s
            input_s -= weight_s
        return input_s, weight_s

    def _call_times(self) -> OpTime:
        num = self.num_microbatches
        input_s, weight_s = self._gradients() if self.price.is_derived else (0.0, 0.0)
        return OpTime(
            forward_s=self._time(Pass.FORWARD) / self.runs / num,
            input_grad_s=input_s / num, weight_grad_s=weight_s / num,
            spread=0.0, num_samples=self.num_samples,
        )  # fmt: skip

    def _row(
        self,
        direction: Pass,
        measured_s: float,
        predicted_s: float,
        times: OpTime | None = None,
    ) -> OpProfile:
        return OpProfile(
            name=self.price.name, operator=self.price.operator, block=self.price.block,
            direction=direction, measured_s=measured_s, predicted_s=predicted_s,
            source=self.price.estimate.source, call=self.price.call, times=times,
        )  # fmt: skip


def _recomputed_share(kernel: Kernel, place: int, device: DeviceSpec) -> float:
    """The part of an op's forward pass that a backward pass repeats, by the roofline."""
    _, *backward = timed_graphs(kernel)
    graphs = backward[:2]
    again_s = sum(
        roofline_s(node, device)
        for module in graphs
        if module is not None
        for node in module.graph.nodes
        if op_place(node) == place and gradient_of(node) is None
    )
    nodes = (node for node in kernel.forward.graph.nodes if op_place(node) == place)
    forward_s = sum(roofline_s(node, device) for node in nodes)
    return again_s / forward_s if forward_s else 0.0


def _run_twice(program: RankProgram) -> set[str]:
    """The blocks of stages that are recomputed as a whole."""
    pipeline = program.pipeline
    return {
        block.name
        for block, stage in zip(program.blocks, pipeline.stage_of_block, strict=True)
        if stage in pipeline.shape.recomputed
    }


def slowest_ranks(
    program: RankProgram, steps: Sequence[Sequence[Sequence[OpSeconds]]]
) -> tuple[int, ...]:
    """The rank of each pipeline device whose ops take longest together."""
    totals: defaultdict[int, float] = defaultdict(float)
    for step in steps:
        for rank, found in enumerate(step):
            totals[rank] += sum(each.time_s for each in found)
    by_device: defaultdict[int, list[int]] = defaultdict(list)
    for rank in totals:
        by_device[program.place(rank)[0]].append(rank)
    return tuple(max(ranks, key=totals.__getitem__) for _, ranks in sorted(by_device.items()))


def pass_times(program: RankProgram, steps: Sequence[Sequence[RankTimes]]) -> tuple[PassTimes, ...]:
    """The passes of the `slowest_ranks` in steps whose ops were timed."""
    ops, found = [[rank.ops for rank in step] for step in steps], []
    in_passes, _ = _by_stage(program)
    for rank in slowest_ranks(program, ops):
        spent = defaultdict[tuple[Pass, bool], float](float)
        for parts in _measured(program, ops, [rank], in_passes).values():
            for part, time_s in parts.items():
                is_forward = part.direction is Pass.FORWARD
                direction = Pass.FORWARD if is_forward else Pass.BACKWARD
                spent[direction, part.place is None] += time_s
        for direction, kinds in PASSES.items():
            actions = [a for step in steps for a in step[rank].actions if a.action.kind in kinds]
            found.append(
                PassTimes(
                    rank=rank, direction=direction,
                    measured_s=sum(a.time_s for a in actions) / len(steps),
                    ops_s=spent[direction, False], between_s=spent[direction, True],
                )
            )  # fmt: skip
    return tuple(found)


def _by_stage(program: RankProgram) -> tuple[set[int], set[int]]:
    """The blocks that belong to stages, and those that every device runs by itself."""
    every = set(range(len(program.blocks)))
    staged = {place for place in every if program.blocks[place].role.has_stage}
    return staged, every - staged


def _measured(
    program: RankProgram,
    steps: Sequence[Sequence[Sequence[OpSeconds]]],
    ranks: Collection[int],
    blocks: Collection[int],
) -> dict[str, Mapping[_Part, float]]:
    """Seconds of the parts of some blocks in a step on some ranks together, the mean of steps."""
    totals: defaultdict[str, defaultdict[_Part, float]] = defaultdict(lambda: defaultdict(float))
    parts_of = functools.cache(_parts)
    for step in steps:
        for each in itertools.chain.from_iterable(step[rank] for rank in ranks):
            if each.block in blocks:
                block = program.blocks[each.block]
                part = parts_of(program.kernels[block.kernel])[each.graph][each.node]
                totals[block.name][part] += each.time_s / len(steps)
    return dict(totals)


def _parts(kernel: Kernel) -> tuple[tuple[_Part, ...], ...]:
    """The part that each node belongs to, for each graph of a kernel."""
    return tuple(
        () if module is None else tuple(_part(node, graph) for node in module.graph.nodes)
        for graph, module in enumerate(timed_graphs(kernel))
    )


def _part(node: fx.Node, graph: int) -> _Part:
    place, gradient = op_place(node), gradient_of(node)
    if graph == Phase.FORWARD:
        return _Part(Pass.FORWARD, place, None)
    if place is None or gradient is not None:
        return _Part(Pass.BACKWARD, place, gradient)
    return _Part(Pass.RECOMPUTED, place, None)
