"""Memory over time: what a device holds at each place of a step, by category.

In: a plan. Out: a chart of stacked steps against what a plan may use, whose fullest place is that
of the report.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.base.units import format_bytes
from autopar.cost_models.allocator import device_bytes
from autopar.plans.bars import FAR, Line, Unit
from autopar.plans.figures.drawing import (
    COLORS,
    INK,
    FigureAndAxes,
    add_legend,
    name_axis,
    new_figure,
    write,
)
from autopar.plans.parts import PlanFields
from autopar.plans.summary import beyond_tensors
from autopar.plans.text import place_text


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChart:
    """Bytes of each category from each of the ``starts_s`` to the next one or ``end_s``.

    ``peak`` is the number of the fullest place; ``usable``: what a plan may use; ``of``: what the
    time is of, if not of the whole step.
    """

    title: str
    starts_s: tuple[float, ...]
    end_s: float
    places: tuple[str, ...]
    categories: tuple[str, ...]
    sizes: tuple[tuple[float, ...], ...]
    peak: int
    usable: Line
    of: str = ""

    def total(self, number: int) -> float:
        """All bytes at a place."""
        return sum(row[number] for row in self.sizes)

    @property
    def is_usable_shown(self) -> bool:
        """Whether the line is on the chart; far above it would leave nothing of the curve."""
        return self.usable.value <= FAR * self.total(self.peak)


def memory_over_time_data(plan: PlanFields) -> MemoryChart | None:
    """The curve of a plan, the categories that are held throughout first; None without one.

    The last category is what the allocator loses or, on CPUs, the process takes beyond its tensors.
    """
    curve, device = plan.memory_curve, plan.cluster.device
    if curve is None or not curve.points:
        return None
    points, usable = curve.read(), plan.cluster.usable_memory_bytes
    rows = {name: [p.size_bytes[i] for p in points] for i, name in enumerate(curve.categories)}
    held = [dict(zip(curve.categories, point.size_bytes)) for point in points]
    totals = [sum(each.values()) for each in held]
    peak = max(range(len(points)), key=totals.__getitem__)
    order = sorted(rows, key=lambda name: (-min(rows[name]), -rows[name][peak]))
    rest = [device_bytes(each, device) - total for each, total in zip(held, totals)]
    sizes = [rows[name] for name in order]
    if any(rest):
        order, sizes = [*order, beyond_tensors(plan)], [*sizes, rest]
    is_whole = plan.step_costs is not None
    words = ", {} equal micro-batches as one" if is_whole else ", without {} equal micro-batches"
    left_out = words.format(curve.num_left_out)
    return MemoryChart(
        title=f"Memory over a step: at most {format_bytes(sum(row[peak] for row in sizes))}, "
        f"{place_text(points[peak].place)}{left_out if curve.num_left_out else ''}",
        starts_s=tuple(point.start_s for point in points),
        end_s=curve.end_s,
        places=tuple(point.place for point in points),
        categories=tuple(name.replace("_", " ") for name in order),
        sizes=tuple(tuple(map(float, row)) for row in sizes),
        peak=peak,
        usable=Line(name=f"usable, {format_bytes(usable)}", value=float(usable)),
        of="" if is_whole else "computation",
    )


def plot_memory_over_time(chart: MemoryChart) -> FigureAndAxes:
    """Draw the categories above each other, the peak, and the line of what may be used."""
    figure, axes = new_figure(chart.title, 10)
    top = chart.total(chart.peak)
    highest = max(top, chart.usable.value) if chart.is_usable_shown else top
    (unit, scale), (size_name, size) = Unit.SECONDS.scale(chart.end_s), Unit.BYTES.scale(highest)
    times = [time_s / scale for time_s in (*chart.starts_s, chart.end_s)]
    lower = [0.0] * len(times)
    for number, row in enumerate(chart.sizes):
        upper = [low + value / size for low, value in zip(lower, (*row, row[-1]))]
        color = COLORS[number % len(COLORS)]
        axes.fill_between(times, lower, upper, step="post", color=color, linewidth=0)
        lower = upper
    line = chart.usable
    if chart.is_usable_shown:
        axes.axhline(line.value / size, color=INK, linewidth=1.2, linestyle="--")
    at, place = times[chart.peak], chart.places[chart.peak]
    axes.plot([at], [top / size], "v", color=INK, markersize=5, clip_on=False)
    side = "right" if at > times[-1] / 2 else "left"
    write(axes, at, 1.05 * top / size, f"  {place}  ", ha=side)
    axes.set_xlim(0, times[-1])
    axes.set_ylim(0, 1.1 * highest / size)
    name_axis(axes, f"{unit} of {chart.of}" if chart.of else unit)
    axes.set_ylabel(size_name, fontsize=9, color=INK)
    items = [(name, COLORS[i % len(COLORS)]) for i, name in enumerate(chart.categories)]
    beyond = "" if chart.is_usable_shown else ": beyond the chart"
    add_legend(figure, items, [f"{line.name}{beyond}"])
    return figure, axes
