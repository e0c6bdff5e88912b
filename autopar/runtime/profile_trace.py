"""The trace of a measured step beside the predicted one, for ui.perfetto.dev.

In: a plan, and the times of a step by rank. Out: events, with a process for each rank. What was
measured and what was predicted both begin at 0, in tracks of their own. Where ranks run on hosts
whose clocks differ, each rank begins at 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.plans.document import Plan
from autopar.plans.step_trace import step_events
from autopar.plans.timeline import predicted_spans, predicted_timeline
from autopar.runtime.op_tables import REST
from autopar.runtime.step.timing import RankTimes
from autopar.schedules import Interval
from autopar.schedules.simulate.trace import device_names, interval_events, track_event

EXPOSED = "exposed communication"
_Event = dict[str, Any]


def trace_events(
    plan: Plan, times: Sequence[RankTimes], rests_s: Sequence[float], step_time_s: float
) -> list[_Event]:
    """The events of all ranks. ``rests_s``: the seconds of each rank outside of its actions and of
    its waits in collectives, which have a track, also those within actions."""
    zeros = _zeros(times, step_time_s)
    measured = [
        Interval(
            rank, each.resource, each.action, each.start_s - zeros[rank], each.end_s - zeros[rank]
        )
        for rank, found in enumerate(times)
        for each in found.actions
    ]
    slices = interval_events(measured, "measured ", word="rank")
    slices += _wait_events(times, zeros, 1 + _last_track(slices))
    return [
        *device_names(len(times), "rank"),
        *slices,
        *_rest_events(slices, rests_s),
        *_predicted_events(plan, len(times), 1 + _last_track(slices)),
    ]


def _last_track(events: Sequence[_Event]) -> int:
    return max((event["tid"] for event in events), default=-1)


def _zeros(times: Sequence[RankTimes], step_time_s: float) -> list[float]:
    """The moment at which each rank's step begins: one for all, where they have one clock."""
    own = [
        min(
            (*(each.start_s for each in found.actions), *(start_s for start_s, _ in found.waits)),
            default=0.0,
        )
        for found in times
    ]
    is_one_clock = max(own) - min(own) <= step_time_s
    return [min(own)] * len(own) if is_one_clock else own


def _wait_events(
    times: Sequence[RankTimes], zeros: Sequence[float], first_track: int
) -> list[_Event]:
    """The waits of each rank in collectives, in tracks from ``first_track`` on."""
    found: list[_Event] = []
    for rank, each in enumerate(times):
        track = first_track + rank
        if each.waits:
            found.append(track_event(rank, track, f"measured {EXPOSED}"))
        for start_s, end_s in each.waits:
            start_us = round((start_s - zeros[rank]) * 1e9) / 1000
            found.append(
                {
                    "name": EXPOSED, "cat": "communication", "ph": "X", "pid": rank,
                    "tid": track, "ts": start_us, "dur": round((end_s - start_s) * 1e9) / 1000,
                }
            )  # fmt: skip
    return found


def _rest_events(slices: Sequence[_Event], rests_s: Sequence[float]) -> list[_Event]:
    """After the last action and the last wait of each rank: updates, and what else is outside of
    both."""
    found = []
    for rank, rest_s in enumerate(rests_s):
        own = [each for each in slices if each["pid"] == rank and each["ph"] == "X"]
        if own:
            found.append(
                {
                    "name": REST, "cat": "compute", "ph": "X", "pid": rank,
                    "tid": min(each["tid"] for each in own),
                    "ts": max(each["ts"] + each["dur"] for each in own),
                    "dur": round(rest_s * 1e9) / 1000,
                }
            )  # fmt: skip
    return found


def _predicted_events(plan: Plan, num_ranks: int, first_track: int) -> list[_Event]:
    """The predicted timeline on every rank, in tracks from ``first_track`` on."""
    timeline, spans = predicted_timeline(plan), predicted_spans(plan)
    if timeline is None:
        return []
    size, prefix = num_ranks // timeline.shape.num_devices, "predicted "
    if spans is not None:
        return [
            event
            for rank in range(size)
            for event in step_events(
                timeline.intervals, spans, device=rank, prefix=prefix, first_track=first_track
            )
        ]
    predicted = [
        each._replace(
            device=each.device * size + number,
            peer=each.peer * size + number if each.peer >= 0 else each.peer,
        )
        for number in range(size)
        for each in timeline.intervals
    ]
    return interval_events(predicted, prefix, first_track, word="rank")
