"""The progress of a search: the best step so far over time, and its lower bound.

In: a plan that was searched in this process. Out: its moments as a chart of steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.base.units import format_seconds
from autopar.plans.bars import FAR, Unit
from autopar.plans.figures.drawing import (
    COLORS,
    INK,
    FigureAndAxes,
    add_legend,
    name_axis,
    new_figure,
)
from autopar.plans.parts import PlanFields


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchChart:
    """Step times over the progress of a search, each valid from its ``elapsed_s`` on.

    ``best_s``: the best step that is estimated to fit the memory; ``fits_s``: the best that is
    counted to fit; ``bound_s``: the lower bound; None where there is none yet. All in seconds.
    """

    title: str
    elapsed_s: tuple[float, ...]
    doing: tuple[str, ...]
    best_s: tuple[float | None, ...]
    fits_s: tuple[float | None, ...]
    bound_s: tuple[float | None, ...]

    @property
    def step_s(self) -> float:
        """The step of the plan that was found."""
        return self.fits_s[-1] or math.nan

    @property
    def is_bound_shown(self) -> bool:
        """Whether the bound is on the chart; one far below would leave nothing of the rest."""
        bound_s = self.bound_s[-1]
        return bound_s is not None and self.step_s <= FAR * bound_s


def search_data(plan: PlanFields) -> SearchChart | None:
    """The moments of a plan's search; None for a plan that was not searched in this process."""
    moments = plan.search_trace
    if not moments:
        return None
    last, step_s = moments[-1], plan.prediction.step_time_s
    title = f"The search: {format_seconds(step_s)} a step after {format_seconds(last.elapsed_s)}"
    if last.bound_s:
        title += f"; no searched step is below {format_seconds(last.bound_s)}"
    return SearchChart(
        title=title,
        elapsed_s=tuple(each.elapsed_s for each in moments),
        doing=tuple(each.doing for each in moments),
        best_s=tuple(each.best_s for each in moments),
        fits_s=tuple(each.fits_s for each in moments),
        bound_s=tuple(each.bound_s for each in moments),
    )


def plot_search(chart: SearchChart) -> FigureAndAxes:
    """Draw the best steps so far and the bound as lines, and the plan as a point at their end."""
    figure, axes = new_figure(chart.title, 8)
    known = [each for row in (chart.best_s, chart.fits_s) for each in row if each is not None]
    (unit, scale), (step_unit, step) = (
        Unit.SECONDS.scale(chart.elapsed_s[-1]), Unit.SECONDS.scale(max(known)),
    )  # fmt: skip
    times = [each / scale for each in chart.elapsed_s]
    rows = [
        ("best, estimated to fit", chart.best_s, COLORS[0]),
        ("best, counted to fit", chart.fits_s, COLORS[1]),
    ]
    for name, row, color in rows:
        heights = [math.nan if each is None else each / step for each in row]
        axes.plot(times, heights, drawstyle="steps-post", color=color, linewidth=1.5, label=name)
    axes.plot(times[-1:], [chart.step_s / step], "o", color=COLORS[1], clip_on=False)
    dashed = []
    if chart.bound_s[-1] is not None:
        beyond = "" if chart.is_bound_shown else ": below the chart"
        dashed = [f"lower bound, {format_seconds(chart.bound_s[-1])}{beyond}"]
    if chart.is_bound_shown:
        bounds = [math.nan if each is None else each / step for each in chart.bound_s]
        axes.plot(times, bounds, "--", drawstyle="steps-post", color=INK, linewidth=1.2)
    axes.set_xlim(0, times[-1])
    axes.margins(y=0.1)
    name_axis(axes, f"{unit} since the search began")
    axes.set_ylabel(f"{step_unit} a step", fontsize=9, color=INK)
    add_legend(figure, [(name, color) for name, _, color in rows], dashed)
    return figure, axes
