"""The curve of reverse-first-k over k (Oh et al., EuroSys 2022).

In: a ``Gain`` of `autopar.schedules.reverse_first_k_gain`, or a plan whose layers are stages on
every device. Out: seconds per iteration at each k, beside those of the conventional order.
"""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.ticker import MaxNLocator

from autopar.base.units import format_seconds
from autopar.plans.bars import Unit
from autopar.plans.figures.drawing import (
    COLORS,
    INK,
    FigureAndAxes,
    add_legend,
    name_axis,
    new_figure,
)
from autopar.plans.parts import PlanFields
from autopar.schedules import Gain, reverse_first_k_gain

SCHEDULES = ("reverse_first_k", "conventional")


@dataclass(frozen=True, slots=True, kw_only=True)
class KCurve:
    """Seconds per iteration at each ``k`` that was tried, and the best one that fits."""

    title: str
    ks: tuple[int, ...]
    iteration_s: tuple[float, ...]
    conventional_s: float
    best_k: int
    best_s: float


def k_curve_data(gain: Gain) -> KCurve:
    """The curve of a gain by reverse-first-k."""
    best_k = 0 if gain.best_k is None else gain.best_k
    return KCurve(
        title=f"Reverse-first-k: k = {best_k} takes {format_seconds(gain.best_s)}, "
        f"{gain.speedup:.3f}x as fast as the conventional order",
        ks=tuple(point.k for point in gain.curve),
        iteration_s=tuple(point.iteration_s for point in gain.curve),
        conventional_s=gain.conventional_s,
        best_k=best_k,
        best_s=gain.best_s,
    )


def plan_k_curve(plan: PlanFields) -> KCurve | None:
    """The time of a plan's step at each k, simulated at the plan's prices as its search did.

    None for another schedule than reverse-first-k and the conventional order of layers.
    """
    found, costs = plan.schedule.pipeline(), plan.stage_costs
    if found is None or found[1].name not in SCHEDULES or costs is None:
        return None
    shape = found[1].shape
    if not (costs.fit(found[1]) and shape.reduces):
        return None
    gain = reverse_first_k_gain(
        costs.durations, num_layers=shape.num_stages, num_microbatches=shape.num_microbatches
    )
    return k_curve_data(gain)


def plot_k_curve(curve: KCurve) -> FigureAndAxes:
    """Draw the curve, the best k, and the conventional order as a line."""
    figure, axes = new_figure(curve.title, 8)
    unit, scale = Unit.SECONDS.scale(max((*curve.iteration_s, curve.conventional_s)))
    times = [each / scale for each in curve.iteration_s]
    axes.plot(curve.ks, times, ".-", color=COLORS[0], linewidth=1.3)
    axes.plot([curve.best_k], [curve.best_s / scale], "o", color=COLORS[1])
    axes.axhline(curve.conventional_s / scale, color=INK, linewidth=1.2, linestyle="--")
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    name_axis(axes, "k, the number of layers whose weight gradients are computed last")
    axes.set_ylabel(unit, fontsize=9, color=INK)
    items = [("reverse-first-k", COLORS[0]), ("best k that fits", COLORS[1])]
    add_legend(figure, items, [f"conventional, {format_seconds(curve.conventional_s)}"])
    return figure, axes
