"""Moments on a device's stream, by which the work between them is timed.

In: a device. Out: moments that a stream passes, CUDA events on a GPU, which cost nothing until they
are read. They are read once their stream has passed them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from autopar.base.accelerators import is_accelerator, module_of


class Moment(Protocol):
    """A moment on a device's stream, as a CUDA event is one."""

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds until a later moment."""
        ...


class HostMoment:
    """A moment on the host, where ops have ended when their call returns: the present one, or
    ``at_s`` on its monotonic clock."""

    def __init__(self, at_s: float | None = None) -> None:
        self.at_s = time.perf_counter() if at_s is None else at_s

    def elapsed_time(self, later: HostMoment) -> float:
        return 1e3 * (later.at_s - self.at_s)


def total_s(spans: Iterable[tuple[Moment, Moment]]) -> float:
    """The seconds of spans between two moments each, which their stream has passed."""
    return sum(1e-3 * start.elapsed_time(end) for start, end in spans)


def moments_of(device: torch.device) -> Callable[[], Moment]:
    """A function that notes the present moment of a device's current stream: on a GPU an event.

    While the stream is recorded as a CUDA graph, there is no moment that could be read.
    """
    if not is_accelerator(device):
        return HostMoment
    module = module_of(device.type)
    is_recorded = getattr(module, "is_current_stream_capturing", bool)  # not all kinds have graphs

    def record() -> Moment:
        event: Moment = module.Event(enable_timing=True)
        if not is_recorded():
            event.record()  # type: ignore[attr-defined]
        return event

    return record


def on_host(moment: Moment, now: Moment, now_s: float) -> float:
    """The time of a moment on the host's clock; ``now`` is a later one, at ``now_s`` there."""
    return now_s - 1e-3 * moment.elapsed_time(now)


def present_of(device: torch.device) -> tuple[Moment, float]:
    """The present moment of a device, for which it waits, and its time on the host's clock."""
    if not is_accelerator(device):
        now = HostMoment()
        return now, now.at_s
    event = moments_of(device)()
    module_of(device.type).synchronize()
    return event, time.perf_counter()
