"""The ops of measured steps beside their predicted times, and those furthest from them.

In: the seconds of each node by step and rank, and the prices of the plan's ops. Out: one value for
each op's forward and each block's backward pass, a table, the numbers of a figure, and measured
calls to calibrate prices with. A node of a backward graph does not know which op's gradient it is
part of, so backward passes are compared block by block.
"""

from __future__ import annotations

import functools
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from autopar.base.units import format_seconds
from autopar.cost_models import Calibration, DeviceSpec, OpCall, calibrate
from autopar.cost_models.estimate import Source, weakest
from autopar.cost_models.store import OpTime
from autopar.lowering.joint import op_place
from autopar.lowering.types import Kernel, RankProgram
from autopar.plans.bars import Bars, Series, Unit
from autopar.plans.blocks import folded, pattern_of
from autopar.plans.layout import Section
from autopar.runtime.machine.op_clock import OpSeconds
from autopar.runtime.machine.protocols import Phase
from autopar.runtime.measure.op_prices import OpPrice

_COUNT = re.compile(r"_\d+$")  # of an op among those of its operator
MOST_OPS = 10
"""How many rows a report has of the ops that are furthest from their predictions."""
BACKWARD = "backward pass"
NOTE = (
    "Forward op by op, backward block by block, each op with its call from Python. Graphs that "
    "Inductor compiled are not timed; communication between blocks is left out."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpProfile:
    """An op's forward pass in a step, or the backward pass of a block (``operator`` `BACKWARD`).

    ``measured_s``: of all micro-batches, on the slowest rank, the median of the steps; as is
    ``predicted_s``. ``measured_call``: what a device computed for one micro-batch, with its time;
    None where there is no single call.
    """

    name: str
    operator: str
    block: str
    measured_s: float
    predicted_s: float
    source: Source
    measured_call: tuple[OpCall, OpTime] | None = None


def op_profiles(
    prices: Sequence[OpPrice],
    program: RankProgram,
    steps: Sequence[Sequence[Sequence[OpSeconds]]],
) -> tuple[OpProfile, ...]:
    """Every op and every backward pass of a block that ran in the ``steps``, each a list of the
    nodes' seconds by rank.

    ``program``: as it was lowered in this process, whose nodes know their ops.
    """
    measured, made = _measured(program, steps), list[OpProfile]()
    by_block: defaultdict[str, list[OpPrice]] = defaultdict(list)
    for price in prices:
        by_block[price.block].append(price)
        time_s = measured.get((price.block, price.place))
        if time_s:
            made.append(
                OpProfile(
                    name=price.name, operator=price.operator, block=price.block,
                    measured_s=time_s, predicted_s=price.estimate.forward_s,
                    source=price.estimate.source,
                    measured_call=_call(price, time_s / program.num_microbatches, len(steps)),
                )
            )  # fmt: skip
    for block, inside in by_block.items():
        time_s = measured.get((block, None))
        if time_s:
            made.append(
                OpProfile(
                    name=block, operator=BACKWARD, block=block, measured_s=time_s,
                    predicted_s=sum(price.estimate.backward_s for price in inside),
                    source=weakest(price.estimate.source for price in inside),
                )
            )  # fmt: skip
    return tuple(made)


def _call(price: OpPrice, time_s: float, num_samples: int) -> tuple[OpCall, OpTime] | None:
    if price.call is None:
        return None
    return price.call, OpTime(
        forward_s=time_s, input_grad_s=0.0, weight_grad_s=0.0, spread=0.0, num_samples=num_samples
    )


def _measured(
    program: RankProgram, steps: Sequence[Sequence[Sequence[OpSeconds]]]
) -> dict[tuple[str, int | None], float]:
    """Seconds by block and place of an op in it, or None for the block's backward pass."""
    samples: defaultdict[tuple[str, int | None, int], list[float]] = defaultdict(list)
    places_of = functools.cache(_places)
    for step in steps:
        for rank, found in enumerate(step):
            for (block, place), time_s in _by_op(program, found, places_of).items():
                samples[block, place, rank].append(time_s)
    slowest: dict[tuple[str, int | None], float] = {}
    for (block, place, _), times in samples.items():
        key = block, place
        slowest[key] = max(slowest.get(key, 0.0), statistics.median(times))
    return slowest


def _by_op(
    program: RankProgram,
    found: Sequence[OpSeconds],
    places_of: Callable[[Kernel], tuple[int | None, ...]],
) -> Mapping[tuple[str, int | None], float]:
    """The nodes of each op together, and all nodes of a block's backward graphs; redistributions
    in forward graphs belong to no op."""
    totals: defaultdict[tuple[str, int | None], float] = defaultdict(float)
    for each in found:
        block = program.blocks[each.block]
        if each.phase is not Phase.FORWARD:
            totals[block.name, None] += each.time_s
        elif (place := places_of(program.kernels[block.kernel])[each.node]) is not None:
            totals[block.name, place] += each.time_s
    return totals


def _places(kernel: Kernel) -> tuple[int | None, ...]:
    """The place in its block of the op of each node of a forward graph."""
    return tuple(op_place(node) for node in kernel.forward.graph.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpGroup:
    """Equal ops of repeated layers, with the sums of their seconds in a step."""

    ops: tuple[OpProfile, ...]

    @property
    def label(self) -> str:
        return folded([op.name for op in self.ops])

    @property
    def measured_s(self) -> float:
        return sum(op.measured_s for op in self.ops)

    @property
    def predicted_s(self) -> float:
        return sum(op.predicted_s for op in self.ops)

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None without a price."""
        return self.measured_s / self.predicted_s if self.predicted_s else None


def worst_groups(ops: Sequence[OpProfile], most: int = MOST_OPS) -> tuple[OpGroup, ...]:
    """The ops furthest from their predictions in seconds of a step, equal ones as one."""
    groups: defaultdict[Hashable, list[OpProfile]] = defaultdict(list)
    for op in ops:
        call = None if op.measured_call is None else op.measured_call[0]
        groups[pattern_of(_COUNT.sub("", op.name)), op.operator, call].append(op)
    made = [OpGroup(ops=tuple(found)) for found in groups.values()]
    return tuple(sorted(made, key=lambda g: -abs(g.measured_s - g.predicted_s))[:most])


def op_section(ops: Sequence[OpProfile]) -> Section:
    """The table of the worst predictions, under the sums of all ops."""
    total = OpGroup(ops=tuple(ops))
    title = f"op by op: {format_seconds(total.measured_s)} a step"
    if total.ratio is not None:
        title += f", {total.ratio:.2f} of the predicted {format_seconds(total.predicted_s)}"
    return Section(
        title=f"{title}; furthest from their predictions:",
        columns=("op", "operator", "measured", "predicted", "ratio", "price"),
        rows=tuple(
            (
                group.label,
                group.ops[0].operator,
                format_seconds(group.measured_s),
                format_seconds(group.predicted_s),
                "" if group.ratio is None else f"{group.ratio:.2f}",
                str(weakest(op.source for op in group.ops)),
            )
            for group in worst_groups(ops)
        ),
        notes=(NOTE,),
        wraps=True,
    ).used_columns()


def ops_data(ops: Sequence[OpProfile]) -> Bars:
    """Predicted and measured seconds of the ops furthest from their predictions."""
    groups = worst_groups(ops)
    predicted = tuple(group.predicted_s for group in groups)
    measured = tuple(group.measured_s for group in groups)
    return Bars(
        title="Ops furthest from their predictions: seconds of a step on one device",
        unit=Unit.SECONDS,
        rows=tuple(
            f"{group.label}, backward" if group.ops[0].operator == BACKWARD else group.label
            for group in groups
        ),
        series=(
            Series(name="predicted", values=predicted, texts=tuple(map(format_seconds, predicted))),
            Series(name="measured", values=measured, texts=tuple(map(format_seconds, measured))),
        ),
    )


def calibration_of(device: DeviceSpec, ops: Sequence[OpProfile]) -> Calibration:
    """The efficiencies of a device fitted to the ops of measured steps."""
    return calibrate(device, [op.measured_call for op in ops if op.measured_call is not None])
