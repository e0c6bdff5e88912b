"""Timelines and memory curves as matplotlib figures.

In: a ``Timeline``. Out: a chart (plain numbers, so that they can be tested), and from
it a figure, which is returned and never shown. Its user is ``notebooks/first_plan.ipynb``.
"""

from typing import NamedTuple

from matplotlib.figure import Figure

from autopar.schedules.action import Kind
from autopar.schedules.schedule import Resource
from autopar.schedules.simulate.timeline import Timeline
from autopar.schedules.simulate.trace import track_name

COLOURS = {
    Kind.F: "#4c78a8",
    Kind.I: "#f58518",
    Kind.W: "#54a24b",
    Kind.B: "#e45756",
    Kind.R: "#72b7b2",
    Kind.G: "#b279a2",
    Kind.U: "#9d755d",
    Kind.O: "#bab0ac",
    Kind.L: "#bab0ac",
    Kind.SEND_F: "#9ecae9",
    Kind.SEND_B: "#ffbf79",
    Kind.RECV_F: "#9ecae9",
    Kind.RECV_B: "#ffbf79",
}
_MOST_LABELLED = 600


class Bar(NamedTuple):
    """An action on a row of the chart."""

    row: int
    start_s: float
    duration_s: float
    kind: Kind
    label: str


class TimelineChart(NamedTuple):
    """Rows from top to bottom, with the resources of a device next to each other."""

    title: str
    rows: tuple[str, ...]
    bars: tuple[Bar, ...]
    makespan_s: float


class MemoryChart(NamedTuple):
    """Bytes over time, as a step function per device."""

    title: str
    times_s: tuple[tuple[float, ...], ...]
    held_bytes: tuple[tuple[float, ...], ...]


def _row_key(row: tuple[int, str]) -> tuple[int, int, str]:
    """Sort key: devices, then resources in their declared order."""
    device, track = row
    return device, list(Resource).index(Resource(track.split(" ")[0])), track


def timeline_chart(timeline: Timeline, *, links: bool = False) -> TimelineChart:
    """The bars of a timeline; point-to-point links, which are many, only on request."""
    shown = [item for item in timeline.intervals if links or item.peer < 0]
    order = sorted({(item.device, track_name(item)) for item in shown}, key=_row_key)
    rows = {key: number for number, key in enumerate(order)}
    bars = tuple(
        Bar(
            rows[item.device, track_name(item)],
            item.start_s,
            item.duration_s,
            item.action.kind,
            str(item.action),
        )
        for item in shown
    )
    title = (
        f"{timeline.schedule.name}: {timeline.makespan_s:.4g} s, bubble {timeline.bubble_ratio:.1%}"
    )
    names = tuple(f"device {device} {track}" for device, track in order)
    return TimelineChart(title, names, bars, timeline.makespan_s)


def memory_chart(timeline: Timeline) -> MemoryChart:
    """Each device's memory curve."""
    curves = [timeline.memory_curve(device) for device in range(timeline.shape.num_devices)]
    return MemoryChart(
        f"{timeline.schedule.name}: memory",
        tuple(tuple(point.time_s for point in curve) for curve in curves),
        tuple(tuple(point.held_bytes for point in curve) for curve in curves),
    )


def draw_timeline(chart: TimelineChart) -> Figure:
    """Draw the bars by row, with labels if they are few enough to read."""
    height = 1.2 + 0.35 * len(chart.rows)
    figure = Figure(figsize=(12, height), layout="constrained")
    axes = figure.add_subplot()
    for kind in dict.fromkeys(bar.kind for bar in chart.bars):
        bars = [bar for bar in chart.bars if bar.kind is kind]
        axes.barh(
            [bar.row for bar in bars],
            [bar.duration_s for bar in bars],
            left=[bar.start_s for bar in bars],
            height=0.8,
            color=COLOURS[kind],
            edgecolor="white",
            linewidth=0.4,
            label=kind.value,
        )
    if len(chart.bars) <= _MOST_LABELLED:
        for bar in chart.bars:
            axes.text(
                bar.start_s + bar.duration_s / 2,
                bar.row,
                bar.label,
                ha="center",
                va="center",
                fontsize=5,
                clip_on=True,
            )
    axes.set_yticks(range(len(chart.rows)), chart.rows)
    axes.invert_yaxis()
    axes.set_xlim(0, chart.makespan_s or 1.0)
    axes.set_xlabel("seconds")
    axes.set_title(chart.title)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return figure


def draw_memory(chart: MemoryChart) -> Figure:
    """Draw one step line per device."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.add_subplot()
    for device, (times, held) in enumerate(zip(chart.times_s, chart.held_bytes)):
        axes.step(times, held, where="post", label=f"device {device}", linewidth=1)
    axes.set_xlabel("seconds")
    axes.set_ylabel("bytes held")
    axes.set_title(chart.title)
    axes.legend(frameon=False, ncols=4, fontsize="small")
    return figure
