"""The trace of a step without a pipeline: its actions, and inside them what each block does.

In: the actions and the spans of a step. Out: events for ui.perfetto.dev. The parts of an action are
slices inside its own; redistributions, and the communication that runs beside, have tracks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from autopar.plans.parts import MemoryCurve
from autopar.pricing.step_timeline import Span, Track
from autopar.schedules import Interval
from autopar.schedules.simulate.trace import interval_events, track_event

_CATEGORY = {Track.MAIN: "compute", Track.HOST: "host"}
_ORDER = "EXB"
"""At one time slices end before others begin, outer ones first."""


def step_events(
    actions: Iterable[Interval],
    spans: Sequence[Span],
    *,
    device: int = 0,
    prefix: str = "",
    first_track: int = 0,
) -> list[dict[str, Any]]:
    """The slices of a device, and the names of its tracks, which begin with ``prefix``.

    Tracks are numbered from ``first_track`` on.
    """
    numbers = {track: number for number, track in enumerate(Track, start=first_track)}
    found = interval_events([a._replace(device=device) for a in actions], prefix, first_track)
    names = [each for each in found if each["ph"] == "M"]
    for track in Track:
        if track is not Track.MAIN and any(span.track is track for span in spans):
            names.append(track_event(device, numbers[track], f"{prefix}{track}"))
    slices = [each for each in found if each["ph"] != "M"]
    for span in spans:
        slices += _ends(span, {"pid": device, "tid": numbers[span.track]})
    return [*names, *sorted(slices, key=lambda each: (each["ts"], _ORDER.index(each["ph"])))]


def _ends(span: Span, place: dict[str, int]) -> list[dict[str, Any]]:
    """The begin and the end of a slice; none for one that is shorter than traces can tell."""
    start, end = round(span.start_s * 1e9), round(span.end_s * 1e9)
    if start == end:
        return []
    args = {"part": str(span.part), "block": span.block, "alone_ns": round(span.alone_s * 1e9)}
    if span.microbatch >= 0:
        args["microbatch"] = span.microbatch
    name = {
        "name": f"{span.part} {span.block}".rstrip(),
        "cat": _CATEGORY.get(span.track, "communication"),
    }
    return [
        {**name, "ph": "B", **place, "ts": start / 1000, "args": args},
        {**name, "ph": "E", **place, "ts": end / 1000},
    ]


def held_events(curve: MemoryCurve | None) -> list[dict[str, Any]]:
    """A counter of the bytes that a device holds over the same step."""
    return [
        {
            "name": "held bytes", "ph": "C", "pid": 0, "ts": round(point.start_s * 1e9) / 1000,
            "args": {"bytes": sum(point.size_bytes)},
        }
        for point in (() if curve is None else curve.read())
    ]  # fmt: skip
