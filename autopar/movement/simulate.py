"""The timeline of a movement plan: one compute stream and a copy stream each way.

In: a verified plan, the lifetimes of its step, seconds of each operation, and the link to the host.
Out: a `MovementTimeline` with the intervals of each stream, the bytes that the device holds over
time, and the time that computation waits. The rules are those of `autopar.movement.plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from autopar.base.errors import MovementError
from autopar.movement.lifetimes import StepLifetimes
from autopar.movement.plan import START, MovementPlan, Transfer, Way

COMPUTE = "compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """The link between a device and its host; both ways run at once, each at this bandwidth."""

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_per_s > 0 or not 0 <= self.latency_s < inf:
            raise MovementError(
                f"HostLink(bandwidth_bytes_per_s={self.bandwidth_bytes_per_s!r}, "
                f"latency_s={self.latency_s!r}): a bandwidth > 0 and a finite latency >= 0"
            )

    def time_s(self, size_bytes: int) -> float:
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s


class Span(NamedTuple):
    """One operation (``stream`` is `COMPUTE`) or one transfer in time."""

    stream: str
    name: str
    start_s: float
    end_s: float


class Held(NamedTuple):
    """Bytes on the device from this time on."""

    time_s: float
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MovementTimeline:
    """A simulated step."""

    spans: tuple[Span, ...]
    curve: tuple[Held, ...]

    @property
    def makespan_s(self) -> float:
        """The end of the last operation or transfer."""
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def peak_bytes(self) -> int:
        return max((point.size_bytes for point in self.curve), default=0)

    def busy_s(self, stream: str) -> float:
        """Seconds that a stream is in use; the streams are `COMPUTE` and the ways of transfers."""
        return sum(span.end_s - span.start_s for span in self.spans if span.stream == stream)

    @property
    def stall_s(self) -> float:
        """Seconds of the step in which nothing is computed."""
        return self.makespan_s - self.busy_s(COMPUTE)


def simulate(
    plan: MovementPlan, step: StepLifetimes, op_times_s: Sequence[float], link: HostLink
) -> MovementTimeline:
    """Play one step of a plan that `verify` accepts."""
    if len(op_times_s) != step.num_ops or plan.num_ops != step.num_ops:
        raise MovementError(
            f"{len(op_times_s)} times and a plan for {plan.num_ops} operations; the step has "
            f"{step.num_ops}: give one time for each operation"
        )
    play = _Play(plan, step, link)
    for op, time_s in enumerate(op_times_s):
        play.run(op, time_s)
    play.issue(step.num_ops - 1)
    return MovementTimeline(spans=tuple(play.spans), curve=play.curve())


class _Play:
    def __init__(self, plan: MovementPlan, step: StepLifetimes, link: HostLink) -> None:
        self.plan, self.step, self.link = plan, step, link
        self.spans: list[Span] = []
        self.now_s = 0.0  # the end of the last operation
        self.free_s = dict.fromkeys((Way.TO_HOST, Way.FROM_HOST), 0.0)
        self.needed_s = [0.0] * step.num_ops
        self.num_issued = 0
        self.changes: list[tuple[float, int]] = []
        on_device = (
            t.size_bytes for t in step.tensors if t.persistent and t.name not in plan.starts_on_host
        )
        self.changes.append((0.0, sum(on_device)))
        self.born: list[int] = [0] * step.num_ops
        self.dead: list[int] = [0] * step.num_ops
        for tensor in step.tensors:
            if not tensor.persistent:
                self.born[tensor.first] += tensor.size_bytes
                self.dead[tensor.last] += tensor.size_bytes

    def run(self, op: int, time_s: float) -> None:
        """Issue the transfers that precede an operation, wait for those it needs, and run it."""
        self.issue(op - 1)
        start_s = max(self.now_s, self.needed_s[op])
        self.now_s = start_s + time_s
        self.spans.append(Span(COMPUTE, self.step.ops[op], start_s, self.now_s))
        workspace = self.step.workspace_bytes[op]
        self.changes.append((start_s, self.born[op] + workspace))
        self.changes.append((self.now_s, -self.dead[op] - workspace))

    def issue(self, last: int) -> None:
        """Start the transfers that wait for operations up to ``last``, which ended just now."""
        transfers = self.plan.transfers
        while self.num_issued < len(transfers) and transfers[self.num_issued].after <= last:
            self._move(transfers[self.num_issued])
            self.num_issued += 1

    def _move(self, transfer: Transfer) -> None:
        size = self.step.tensors[self.step.index_of[transfer.tensor]].size_bytes
        issued_s = 0.0 if transfer.after == START else self.now_s
        if transfer.way is Way.DROP:
            self.changes.append((issued_s, -size))
            return
        start_s = max(issued_s, self.free_s[transfer.way])
        if transfer.way is Way.FROM_HOST:
            start_s = max(start_s, self.free_s[Way.TO_HOST])
        end_s = self.free_s[transfer.way] = start_s + self.link.time_s(size)
        self.spans.append(Span(transfer.way, transfer.tensor, start_s, end_s))
        if transfer.way is Way.FROM_HOST:
            self.changes.append((start_s, size))
        else:
            self.changes.append((end_s, -size))
        if transfer.before is not None:
            self.needed_s[transfer.before] = max(self.needed_s[transfer.before], end_s)

    def curve(self) -> tuple[Held, ...]:
        """Bytes over time; at one time, what is released precedes what is allocated."""
        points: list[Held] = []
        held = 0
        for time_s, change in sorted(self.changes):
            held += change
            if points and points[-1].time_s == time_s:
                points.pop()
            points.append(Held(time_s, held))
        return tuple(points)
