"""Timelines of schedules and of steps without a pipeline, and what ranks hold over time.

In: a ``Timeline``, or the spans of a step. Out: charts (plain numbers), and from them figures. The
devices of a schedule are pipeline ranks: each may be many devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.plans.bars import Unit
from autopar.plans.figures.drawing import (
    COLORS,
    WIDTH_INCHES,
    FigureAndAxes,
    add_legend,
    name_axis,
    name_rows,
    new_figure,
    write,
)
from autopar.pricing.step_costs import Part
from autopar.pricing.step_timeline import Span, Track
from autopar.schedules.action import Kind
from autopar.schedules.schedule import Resource
from autopar.schedules.simulate.timeline import Timeline
from autopar.schedules.simulate.trace import track_name

KINDS: dict[Kind | Part, tuple[str, str]] = {
    Kind.F: ("forward", COLORS[0]),
    Kind.B: ("backward", COLORS[1]),
    Kind.I: ("input gradients", COLORS[1]),
    Kind.W: ("weight gradients", COLORS[2]),
    Kind.R: ("recomputation", COLORS[6]),
    Kind.G: ("gradient reduction", COLORS[4]),
    Kind.U: ("update", COLORS[7]),
    Kind.O: ("to the host", COLORS[5]),
    Kind.L: ("from the host", COLORS[3]),
    Kind.SEND_F: ("messages", COLORS[4]),
    Kind.SEND_B: ("messages", COLORS[4]),
    Kind.RECV_F: ("messages", COLORS[4]),
    Kind.RECV_B: ("messages", COLORS[4]),
    Part.FORWARD: ("forward", COLORS[0]),
    Part.RECOMPUTATION: ("recomputation", COLORS[6]),
    Part.INPUT_GRADIENTS: ("input gradients", COLORS[1]),
    Part.WEIGHT_GRADIENTS: ("weight gradients", COLORS[2]),
    Part.UPDATE: ("update", COLORS[7]),
    Part.REDISTRIBUTION: ("redistribution, cast or copy", COLORS[3]),
    Part.GATHER: ("parameter gather or cast", COLORS[5]),
    Part.REDUCTION: ("gradient reduction or cast", COLORS[4]),
    Part.STALL: ("waiting for copies to the host", COLORS[8]),
}
"""The name and the color of each kind of action, and of each part of a step."""
ROWS = {
    Track.MAIN: "computation",
    Track.REDISTRIBUTION: "redistributions",
    Track.COLLECTIVE: "gathers, reductions",
    Track.HOST: "copies to the host",
}
"""The rows of a step without a pipeline."""
LABEL_POINTS, CHARACTER_POINTS = 6.5, 4.2
MOST_LABELS = 800
CURVES = ("solid", "dashed", "dotted", "dashdot")


@dataclass(frozen=True, slots=True)
class Bar:
    """An action on a row of the chart; ``shorter`` labels are for one that is too narrow."""

    row: int
    start_s: float
    duration_s: float
    kind: Kind | Part
    label: str
    shorter: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineChart:
    """Rows from top to bottom, with the resources of a pipeline rank next to each other."""

    title: str
    rows: tuple[str, ...]
    bars: tuple[Bar, ...]
    makespan_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldChart:
    """Memory held by each pipeline rank over time, in bytes or as a number of activations."""

    title: str
    names: tuple[str, ...]
    times_s: tuple[tuple[float, ...], ...]
    held: tuple[tuple[float, ...], ...]
    is_bytes: bool


def timeline_data(timeline: Timeline, *, links: bool = False) -> TimelineChart:
    """The bars of a timeline; point-to-point links, which are many, only on request."""
    shown = [item for item in timeline.intervals if links or item.peer < 0]
    order = sorted({(item.device, track_name(item)) for item in shown}, key=_row_key)
    rows = {key: number for number, key in enumerate(order)}
    return TimelineChart(
        title=f"{timeline.schedule.name}: {Unit.SECONDS.text(timeline.makespan_s)}, "
        f"bubble {timeline.bubble_ratio:.1%}",
        rows=tuple(_row_name(timeline, *key) for key in order),
        bars=tuple(
            Bar(
                rows[item.device, track_name(item)],
                item.start_s,
                item.duration_s,
                item.action.kind,
                str(item.action),
            )
            for item in shown
        ),
        makespan_s=timeline.makespan_s,
    )


def step_chart(spans: Sequence[Span], title: str) -> TimelineChart:
    """The bars of a step without a pipeline: each block's parts, on the rows that there are."""
    tracks = [track for track in Track if any(span.track is track for span in spans)]
    return TimelineChart(
        title=title,
        rows=tuple(ROWS[track] for track in tracks),
        bars=tuple(
            Bar(
                tracks.index(span.track), span.start_s, span.duration_s, span.part, span.block,
                _ends_of(span.block),
            )
            for span in spans
        ),
        makespan_s=max((span.end_s for span in spans), default=0.0),
    )  # fmt: skip


def _ends_of(name: str) -> tuple[str, ...]:
    """The last parts of a module's name, such as ``h.0`` and ``0``."""
    words = name.split(".")
    return tuple(".".join(words[place:]) for place in range(1, len(words)))


def _row_key(row: tuple[int, str]) -> tuple[int, int, str]:
    """Sort key: ranks, then resources in their declared order."""
    device, track = row
    return device, list(Resource).index(Resource(track.split(" ")[0])), track


def _row_name(timeline: Timeline, device: int, track: str) -> str:
    track = track.replace("device", "rank")
    if timeline.shape.num_devices == 1:
        return track
    return rank_name(device) if track == Resource.MAIN else f"{rank_name(device)} {track}"


def rank_name(rank: int) -> str:
    return f"pipeline rank {rank}"


def held_data(timeline: Timeline, *, is_bytes: bool = True) -> HeldChart:
    """The memory curve of each rank; without sizes of activations it counts them."""
    curves = [timeline.memory_curve(device) for device in range(timeline.shape.num_devices)]
    what = "bytes held" if is_bytes else "activations held, of one stage and micro-batch each"
    return HeldChart(
        title=f"{timeline.schedule.name}: {what}",
        names=tuple(rank_name(rank) for rank in range(len(curves))),
        times_s=tuple(tuple(point.time_s for point in curve) for curve in curves),
        held=tuple(tuple(point.held_bytes for point in curve) for curve in curves),
        is_bytes=is_bytes,
    )


def plot_timeline(chart: TimelineChart) -> FigureAndAxes:
    """Draw the bars by row, with their actions where they are wide enough."""
    figure, axes = new_figure(chart.title, len(chart.rows))
    unit, scale = Unit.SECONDS.scale(chart.makespan_s)
    per_point_s = (chart.makespan_s or 1.0) / (0.75 * 72 * WIDTH_INCHES)
    kinds = [kind for kind in KINDS if any(bar.kind is kind for bar in chart.bars)]
    for kind in kinds:
        bars, color = [bar for bar in chart.bars if bar.kind is kind], KINDS[kind][1]
        axes.barh(
            [bar.row for bar in bars],
            [bar.duration_s / scale for bar in bars],
            left=[bar.start_s / scale for bar in bars],
            height=0.85,
            color=color,
            edgecolor=["white" if bar.duration_s > per_point_s else color for bar in bars],
            linewidth=[0.3 if bar.duration_s > per_point_s else 0.6 for bar in bars],
        )
    per_character_s = CHARACTER_POINTS * per_point_s
    labels = [(bar, _fitting(bar, bar.duration_s / per_character_s)) for bar in chart.bars]
    wide = [(bar, label) for bar, label in labels if label]
    for bar, label in wide if len(wide) <= MOST_LABELS else ():
        middle = (bar.start_s + bar.duration_s / 2) / scale
        look = {"fontsize": LABEL_POINTS, "ha": "center", "color": "white", "clip_on": True}
        write(axes, middle, bar.row, label, **look)
    name_rows(axes, chart.rows)
    axes.set_xlim(0, (chart.makespan_s or 1.0) / scale)
    name_axis(axes, unit)
    add_legend(figure, list(dict.fromkeys(KINDS[kind] for kind in kinds)))
    return figure, axes


def _fitting(bar: Bar, num_characters: float) -> str:
    """The longest label of a bar that is so many characters wide; none if all are longer."""
    return next((each for each in (bar.label, *bar.shorter) if len(each) < num_characters), "")


def plot_held(chart: HeldChart) -> FigureAndAxes:
    """Draw one step line for each rank."""
    figure, axes = new_figure(chart.title, 8)
    end_s = max((times[-1] for times in chart.times_s), default=0.0)
    unit, scale = Unit.SECONDS.scale(end_s)
    size_name, size = "", 1.0
    if chart.is_bytes:
        size_name, size = Unit.BYTES.scale(max(map(max, chart.held), default=0.0))
    items = []
    for rank, (name, times, held) in enumerate(zip(chart.names, chart.times_s, chart.held)):
        color, style = COLORS[rank % len(COLORS)], CURVES[rank // len(COLORS) % len(CURVES)]
        axes.step(
            [t / scale for t in times], [h / size for h in held], where="post", color=color,
            linestyle=style, linewidth=1.3,
        )  # fmt: skip
        items.append((name if style == "solid" else f"{name}, {style}", color))
    axes.set_ylim(bottom=0)
    name_axis(axes, unit)
    axes.set_ylabel(size_name, fontsize=9, color=axes.xaxis.label.get_color())
    add_legend(figure, items)
    return figure, axes
