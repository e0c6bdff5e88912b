"""What moves to the host: when each tensor is not on the device.

In: a plan. Out: a chart of tensors over the operations of a step, on the pipeline rank that moves
most tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.base.units import format_bytes, format_seconds
from autopar.movement.plan import START, MovementPlan, Transfer, Way
from autopar.plans.figures.drawing import (
    COLORS,
    FigureAndAxes,
    name_axis,
    name_rows,
    new_figure,
)
from autopar.plans.parts import PlanFields

MOST_TENSORS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """A tensor leaves the device after operation ``after`` and is back before ``before``."""

    tensor: str
    after: int
    before: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadChart:
    """The absences of each tensor in a step of ``num_ops`` operations, which starts at -1."""

    title: str
    num_ops: int
    tensors: tuple[str, ...]
    absences: tuple[Absence, ...]


def offload_data(plan: PlanFields) -> OffloadChart | None:
    """The tensors that are away longest; None if nothing moves."""
    if plan.offload is None:
        return None
    ranks = plan.offload.plans()
    rank = max(range(len(ranks)), key=lambda each: len(ranks[each].transfers))
    found = absences(ranks[rank])
    names = list(dict.fromkeys(each.tensor for each in found))
    total = {n: sum(e.before - e.after for e in found if e.tensor == n) for n in names}
    kept = sorted(names, key=lambda name: -total[name])[:MOST_TENSORS]
    shown = [name for name in names if name in kept]
    where = f" on pipeline rank {rank}" if len(ranks) > 1 else ""
    some = f", {len(shown)} of {len(names)}" if len(shown) < len(names) else ""
    moved, stall = format_bytes(plan.offload.moved_bytes), format_seconds(plan.offload.stall_s)
    return OffloadChart(
        title=f"Tensors on the host{where}{some}: {moved} moved a step, computation waits {stall}",
        num_ops=ranks[rank].num_ops,
        tensors=tuple(shown),
        absences=tuple(each for each in found if each.tensor in kept),
    )


def absences(plan: MovementPlan) -> list[Absence]:
    """When each tensor is away, in the order in which tensors leave; the step's end is num_ops."""
    by_tensor: dict[str, list[Transfer]] = {name: [] for name in plan.starts_on_host}
    for transfer in plan.transfers:
        by_tensor.setdefault(transfer.tensor, []).append(transfer)
    found = [
        each
        for name, transfers in by_tensor.items()
        for each in _of_tensor(name, transfers, name in plan.starts_on_host, plan.num_ops)
    ]
    return sorted(found, key=lambda each: (each.after, each.before))


def _of_tensor(
    name: str, transfers: Sequence[Transfer], is_away: bool, num_ops: int
) -> list[Absence]:
    found, left = [], START if is_away else None
    for transfer in sorted(transfers, key=lambda each: each.after):
        if transfer.way is not Way.FROM_HOST:
            left = transfer.after if left is None else left
        elif left is not None and transfer.before is not None:
            found.append(Absence(tensor=name, after=left, before=transfer.before))
            left = None
    if left is not None:
        found.append(Absence(tensor=name, after=left, before=num_ops))
    return found


def plot_offload(chart: OffloadChart) -> FigureAndAxes:
    """Draw a bar for each absence."""
    figure, axes = new_figure(chart.title, 0.8 * len(chart.tensors))
    row = {name: number for number, name in enumerate(chart.tensors)}
    axes.barh(
        [row[each.tensor] for each in chart.absences],
        [each.before - each.after for each in chart.absences],
        left=[each.after for each in chart.absences],
        height=0.7,
        color=COLORS[5],
    )
    name_rows(axes, chart.tensors)
    axes.set_xlim(START, chart.num_ops)
    name_axis(axes, "operations of a step")
    return figure, axes
