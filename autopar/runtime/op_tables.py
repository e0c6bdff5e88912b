"""The ops of a profile as a table, a figure, a calibration, and prices.

In: ops of measured steps. Out: the groups that are furthest from their predictions, as text and as
numbers to draw, the device's efficiencies fitted to the calls among them, and the calls in the
store of measured prices.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from autopar.base.units import format_seconds
from autopar.cost_models import Calibration, DeviceSpec, calibrate
from autopar.cost_models.call_text import call_to_text
from autopar.cost_models.calls import OpCall
from autopar.cost_models.estimate import weakest
from autopar.cost_models.store import OpTime, ProfileStore, default_store_path
from autopar.plans.bars import Bars, Series, Unit
from autopar.plans.blocks import folded, pattern_of
from autopar.plans.layout import Section
from autopar.runtime.op_profile import BETWEEN, OpProfile, Pass, PassTimes

_COUNT = re.compile(r"_\d+$")  # of an op among those of its operator
REST = "updates and the rest"
"""What follows the ops of a step: reductions of gradients, updates, and the call itself."""
MOST_OPS = 10
"""How many rows a report has of the ops that are furthest from their predictions."""
NOTE = (
    "Each op with its call from Python: forward, backward, and recomputed in the backward pass, as "
    f"what costs little always is. {BETWEEN!r}: redistributions inside a block, and sums of the "
    "gradients of a value with several readers; no prediction of an op includes them. Graphs that "
    f"Inductor compiled are not timed; communication between blocks is left out. {REST!r}: as in "
    "the step by phase, beside the predicted update."
)


PASS_NOTE = (
    "Means of the steps whose ops are listed below, with the communication in them, on the rank of "
    "each stage whose ops take longest. Timing ops takes time too: a step without it is above."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpGroup:
    """Equal ops of repeated layers, with the sums of their seconds in a step."""

    ops: tuple[OpProfile, ...]

    @property
    def label(self) -> str:
        return folded([op.name for op in self.ops])

    @property
    def direction(self) -> Pass:
        return self.ops[0].direction

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
        name = pattern_of(_COUNT.sub("", op.name))
        groups[name, op.operator, op.direction, op.call].append(op)
    made = [OpGroup(ops=tuple(found)) for found in groups.values()]
    return tuple(sorted(made, key=lambda g: -abs(g.measured_s - g.predicted_s))[:most])


def op_section(ops: Sequence[OpProfile]) -> Section:
    """The table of the worst predictions, under the sums of all ops without `REST`."""
    timed = [op for op in ops if op.direction is not Pass.UPDATE]
    priced = OpGroup(ops=tuple(op for op in timed if op.operator != BETWEEN))
    between_s = sum(op.measured_s for op in timed) - priced.measured_s
    title = f"op by op: {format_seconds(priced.measured_s + between_s)} a step"
    if priced.ratio is not None:
        own = f", {format_seconds(priced.measured_s)} of it in ops" if between_s else ""
        title += f"{own}, {priced.ratio:.2f}x the predicted {format_seconds(priced.predicted_s)}"
    return Section(
        title=f"{title}; furthest from their predictions:",
        columns=("op", "operator", "pass", "measured", "predicted", "ratio", "price"),
        rows=tuple(map(_cells, worst_groups(ops))),
        notes=(NOTE,),
        wraps=True,
    ).used_columns()


def pass_section(passes: Sequence[PassTimes]) -> Section:
    """The table of the passes whose ops were timed."""
    has_ranks = len({each.rank for each in passes}) > 1
    return Section(
        title="passes of a step with each op timed by itself",
        columns=("", "in all", "in ops", "between ops", "outside of blocks"),
        rows=tuple(
            (
                f"{each.direction}{f' on rank {each.rank}' * has_ranks}",
                *map(
                    format_seconds,
                    (each.measured_s, each.ops_s, each.between_s, each.outside_s),
                ),
            )
            for each in passes
        ),
        notes=(PASS_NOTE,),
    )


def _cells(group: OpGroup) -> tuple[str, ...]:
    sources = [op.source for op in group.ops if op.source is not None]
    return (
        group.label,
        group.ops[0].operator,
        str(group.direction),
        format_seconds(group.measured_s),
        format_seconds(group.predicted_s) if sources else "",
        "" if group.ratio is None else f"{group.ratio:.2f}",
        str(weakest(sources)) if sources else "",
    )


def ops_data(ops: Sequence[OpProfile]) -> Bars:
    """Predicted and measured seconds of the ops furthest from their predictions."""
    groups = worst_groups(ops)
    predicted = tuple(group.predicted_s for group in groups)
    measured = tuple(group.measured_s for group in groups)
    return Bars(
        title="Furthest from their predictions: seconds of a step on one device",
        unit=Unit.SECONDS,
        rows=tuple(map(_row_name, groups)),
        series=(
            Series(name="predicted", values=predicted, texts=tuple(map(format_seconds, predicted))),
            Series(name="measured", values=measured, texts=tuple(map(format_seconds, measured))),
        ),
    )


def _row_name(group: OpGroup) -> str:
    kind = f" {BETWEEN}" if group.ops[0].operator == BETWEEN else ""
    is_forward = group.direction is Pass.FORWARD
    is_named = is_forward or group.direction is Pass.UPDATE
    return f"{group.label}{kind}" + ("" if is_named else f", {group.direction}")


def calibration_of(device: DeviceSpec, ops: Sequence[OpProfile]) -> Calibration:
    """The efficiencies of a device fitted to the ops of measured steps."""
    return calibrate(device, [op.measured_call for op in ops if op.measured_call is not None])


def _spread(times_s: Sequence[float]) -> float:
    """The interquartile range over the median; 0 of a single time."""
    if len(times_s) < 2:
        return 0.0
    low, median_s, high = statistics.quantiles(times_s, n=4, method="inclusive")
    return (high - low) / median_s


def keep_prices(device: DeviceSpec, ops: Sequence[OpProfile]) -> int:
    """Store the times of measured ops, of equal calls the one of median time; their number."""
    found: dict[str, list[tuple[OpCall, OpTime]]] = {}
    for call, times in (op.measured_call for op in ops if op.measured_call is not None):
        found.setdefault(call_to_text(call), []).append((call, times))
    with ProfileStore(default_store_path(), device) as store:
        for each in found.values():
            each.sort(key=lambda pair: pair[1].total_s)
            call, times = each[(len(each) - 1) // 2]
            store.put(call, replace(times, spread=_spread([other.total_s for _, other in each])))
    return len(found)
