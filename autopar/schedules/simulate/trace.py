"""Chrome/Perfetto traces of a timeline: one process per device, one track per resource.

In: a ``Timeline``. Out: the trace as a JSON-ready value or text, to be opened in ui.perfetto.dev. A
resource does one thing at a time, so slices on a track never overlap; times are whole nanoseconds,
so that rounding cannot make them overlap.
"""

import json
from collections.abc import Iterable
from typing import Any

from autopar.schedules.schedule import Resource
from autopar.schedules.simulate.timeline import Interval, Timeline

_ORDER = list(Resource)
_CATEGORY = {
    Resource.MAIN: "compute",
    Resource.SIDE: "compute",
    Resource.COLLECTIVE: "communication",
    Resource.SEND: "communication",
    Resource.RECV: "communication",
    Resource.TO_HOST: "host",
    Resource.FROM_HOST: "host",
}


def track_name(item: Interval, word: str = "device") -> str:
    """The name of an interval's track: its resource, with the peer, a ``word``, for a link."""
    if item.peer < 0:
        return item.resource.value
    way = "to" if item.resource is Resource.SEND else "from"
    return f"{item.resource.value} {way} {word} {item.peer}"


def trace_events(
    timeline: Timeline, *, memory: bool = True, word: str = "device"
) -> list[dict[str, Any]]:
    """Events in the Trace Event Format; ``memory`` adds a counter track per device.

    A second of the simulation is a second of the trace. ``word`` is what devices are called.
    """
    num_devices = timeline.shape.num_devices
    events = [
        *device_names(num_devices, word), *interval_events(timeline.intervals, word=word),
    ]  # fmt: skip
    if memory:
        for device in range(num_devices):
            events += [
                {
                    "name": "held bytes",
                    "ph": "C",
                    "pid": device,
                    "ts": _nanoseconds(point.time_s) / 1000,
                    "args": {"bytes": point.held_bytes},
                }
                for point in timeline.memory_curve(device)
            ]
    return events


def device_names(num_devices: int, word: str = "device") -> list[dict[str, Any]]:
    """The events that name the processes of a trace: "device 0"."""
    return [_name("process_name", each, 0, f"{word} {each}") for each in range(num_devices)]


def interval_events(
    intervals: Iterable[Interval], prefix: str = "", first_track: int = 0, *, word: str = "device"
) -> list[dict[str, Any]]:
    """The slices of intervals, and the names of their tracks, which begin with ``prefix``.

    Tracks are numbered from ``first_track`` on, so that those of several calls can be told apart.
    """
    intervals = list(intervals)
    keys = sorted({(item.device, _ORDER.index(item.resource), item.peer) for item in intervals})
    numbers = {track: number for number, track in enumerate(keys, start=first_track)}
    events: list[dict[str, Any]] = []
    named: set[int] = set()
    for item in intervals:
        number = numbers[item.device, _ORDER.index(item.resource), item.peer]
        if number not in named:
            named.add(number)
            name = f"{prefix}{track_name(item, word)}"
            events.append(track_event(item.device, number, name))
        start, end = _nanoseconds(item.start_s), _nanoseconds(item.end_s)
        events.append(
            {
                "name": str(item.action),
                "cat": _CATEGORY[item.resource],
                "ph": "X",
                "pid": item.device,
                "tid": number,
                "ts": start / 1000,
                "dur": (end - start) / 1000,
                "args": {"iteration": item.iteration, "start_ns": start, "end_ns": end},
            }
        )
    return events


def trace_json(timeline: Timeline, *, memory: bool = True, word: str = "device") -> str:
    """The trace as the text of a ``.json`` file."""
    return trace_text(trace_events(timeline, memory=memory, word=word))


def trace_text(events: list[dict[str, Any]]) -> str:
    """Events as the text of a ``.json`` file."""
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def track_event(device: int, track: int, name: str) -> dict[str, Any]:
    """The event that names a track of a device."""
    return _name("thread_name", device, track, name)


def _nanoseconds(time_s: float) -> int:
    return round(time_s * 1e9)


def _name(kind: str, device: int, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": device, "tid": track, "args": {"name": name}}
