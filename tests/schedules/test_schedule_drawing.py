"""Charts hold the timeline's numbers, figures draw them, and traces have no overlaps."""

import io
import itertools
import json

import pytest
from hypothesis import given, settings
from schedule_cases import schedules

from autopar.plans.figures import held_data, plot_held, plot_timeline, timeline_data
from autopar.schedules import (
    Durations,
    Links,
    Memory,
    Resource,
    Schedule,
    Timeline,
    build,
    simulate,
    trace_events,
    trace_json,
    with_reductions,
)

COSTS = Durations(F=1, I=1, W=1, G=0.7)
LINKS = Links(latency_s=0.1, bandwidth_bytes_per_s=3.0, message_bytes=1.0)


@pytest.fixture
def timeline() -> Timeline:
    schedule = with_reductions(build("chimera", num_stages=4, num_microbatches=8), COSTS, LINKS)
    return simulate(schedule, COSTS, LINKS, memory=Memory(activation_bytes=2.0, weight_bytes=5.0))


def test_a_chart_has_a_bar_for_every_action(timeline: Timeline) -> None:
    chart = timeline_data(timeline)
    assert len(chart.bars) == timeline.schedule.num_actions
    assert chart.rows[:2] == ("pipeline rank 0", "pipeline rank 0 collective")
    by_label = {bar.label: bar for bar in chart.bars}
    for item in timeline.intervals:
        if item.peer < 0:
            bar = by_label[str(item.action)]
            assert (bar.start_s, bar.duration_s) == (item.start_s, item.end_s - item.start_s)
            track = "" if item.resource is Resource.MAIN else f" {item.resource.value}"
            assert chart.rows[bar.row] == f"pipeline rank {item.device}{track}"
    assert len(timeline_data(timeline, links=True).bars) == len(timeline.intervals)


def test_figures_draw_what_the_charts_hold(timeline: Timeline) -> None:
    chart = timeline_data(timeline)
    figure, axes = plot_timeline(chart)
    drawn = list(axes.patches)
    assert len(drawn) == len(chart.bars)
    assert sorted(patch.get_x() for patch in drawn) == sorted(bar.start_s for bar in chart.bars)
    curves = held_data(timeline)
    lines = plot_held(curves)[1].lines
    assert [list(line.get_ydata()) for line in lines] == [list(h) for h in curves.held]
    assert max(map(max, curves.held)) == max(timeline.peak_memory_bytes)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=40)
    assert picture.getvalue().startswith(b"\x89PNG")


@settings(deadline=None, max_examples=40)
@given(schedules())
def test_no_slices_overlap_on_a_track(schedule: Schedule) -> None:
    costs = Durations(F=0.1, I=1 / 3, W=0.7, G=0.3)
    full = schedule if schedule.shape.reduces else with_reductions(schedule, costs, LINKS)
    events = trace_events(simulate(full, costs, LINKS, num_iterations=2))
    slices: dict[tuple[int, int], list[dict]] = {}
    for event in events:
        if event["ph"] == "X":
            slices.setdefault((event["pid"], event["tid"]), []).append(event)
    for items in slices.values():
        items.sort(key=lambda event: event["args"]["start_ns"])
        for before, after in itertools.pairwise(items):
            assert before["args"]["end_ns"] <= after["args"]["start_ns"]
            assert round((before["ts"] + before["dur"]) * 1000) <= round(after["ts"] * 1000)


def test_a_trace_names_its_tracks_and_counts_memory(timeline: Timeline) -> None:
    trace = json.loads(trace_json(timeline))
    events = trace["traceEvents"]
    tracks = {
        (event["pid"], event["args"]["name"])
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    assert {(d, "main") for d in range(4)} | {(d, "collective") for d in range(4)} <= tracks
    assert (0, "send to device 1") in tracks
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(timeline.intervals)
    last = max(event["ts"] + event["dur"] for event in slices)
    assert last == pytest.approx(timeline.makespan_s * 1e6)
    counters = [event["args"]["bytes"] for event in events if event["ph"] == "C"]
    assert max(counters) == max(timeline.peak_memory_bytes)
    assert not [e for e in trace_events(timeline, memory=False) if e["ph"] == "C"]
