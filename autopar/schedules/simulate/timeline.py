"""The result of a simulation: intervals per resource, and metrics derived from them.

In: intervals from the simulator. Out: ``Timeline`` with makespan, bubbles, exposed communication,
activation counts and memory curves per device. All metrics are computed from the intervals alone,
so they apply to a measured timeline too.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from autopar.schedules.action import COMPUTE_KINDS, Action, Kind
from autopar.schedules.schedule import PipelineShape, Resource, Schedule
from autopar.schedules.simulate.durations import Memory, per_stage

COMPUTE_RESOURCES = (Resource.MAIN, Resource.SIDE)


class Interval(NamedTuple):
    """The time of an action on a resource; ``peer`` is the other end of a link, else -1.

    An implied transfer appears as a SEND action on its sender's link.
    """

    device: int
    resource: Resource
    action: Action
    start_s: float
    end_s: float
    iteration: int = 0
    peer: int = -1

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


class MemoryPoint(NamedTuple):
    """Bytes held from this time on."""

    time_s: float
    held_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A simulated schedule."""

    schedule: Schedule
    intervals: tuple[Interval, ...]
    memory: Memory
    num_iterations: int = 1

    @property
    def shape(self) -> PipelineShape:
        return self.schedule.shape

    @property
    def makespan_s(self) -> float:
        """The end of the last action."""
        return max((item.end_s for item in self.intervals), default=0.0)

    def of_device(self, device: int) -> tuple[Interval, ...]:
        return tuple(item for item in self.intervals if item.device == device)

    def busy_s(self, device: int) -> float:
        """Seconds in which a compute stream of the device is busy."""
        return covered_s(self._compute(device))

    def _compute(self, device: int) -> list[tuple[float, float]]:
        return [
            (item.start_s, item.end_s)
            for item in self.intervals
            if item.device == device and item.resource in COMPUTE_RESOURCES
        ]

    @property
    def bubble_ratio(self) -> float:
        """The idle fraction of all devices' compute over the makespan."""
        total = self.makespan_s * self.shape.num_devices
        busy = covered_by_device(self.intervals, self.shape.num_devices)
        return 1.0 - sum(busy) / total if total else 0.0

    @property
    def device_bubble_s(self) -> tuple[float, ...]:
        """Idle seconds of each device between its own first and last compute action."""
        num_devices = self.shape.num_devices
        first = [float("inf")] * num_devices
        last = [0.0] * num_devices
        for item in self.intervals:
            if item.resource in COMPUTE_RESOURCES:
                first[item.device] = min(first[item.device], item.start_s)
                last[item.device] = max(last[item.device], item.end_s)
        busy = covered_by_device(self.intervals, num_devices)
        return tuple(
            max(0.0, end - start) - work if work else 0.0
            for start, end, work in zip(first, last, busy)
        )

    @property
    def bubble_s(self) -> float:
        """The longest idle time inside a device's own span, the measure of the zero-bubble papers.

        It is the time that an iteration loses if the next one follows without a barrier.
        """
        return max(self.device_bubble_s)

    @property
    def iteration_ends_s(self) -> tuple[float, ...]:
        """The end of the last forward or backward on a main stream, per iteration."""
        ends = [0.0] * self.num_iterations
        for item in self.intervals:
            if item.resource is Resource.MAIN and item.action.kind in (Kind.F, Kind.I, Kind.B):
                ends[item.iteration] = max(ends[item.iteration], item.end_s)
        return tuple(ends)

    @property
    def period_s(self) -> float:
        """Seconds per iteration when several follow each other (between the last two simulated)."""
        ends = self.iteration_ends_s
        return ends[-1] - ends[-2] if len(ends) > 1 else self.makespan_s

    def exposed_communication_s(self, device: int) -> float:
        """Seconds in which a transfer or reduction of the device runs while it does not compute."""
        compute = self._compute(device)
        channels = [
            (item.start_s, item.end_s)
            for item in self.intervals
            if item.resource not in COMPUTE_RESOURCES and device in (item.device, item.peer)
        ]
        return covered_s(compute + channels) - covered_s(compute)

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """Peak number of activations held per device.

        The unit is the activations of one micro-batch and 1/num_devices of the model, so that
        schedules with different numbers of stages per device are comparable. They are held from F
        (or R, or L) to the end of W or B; a recomputed stage holds nothing between F and R.
        """
        unit = Fraction(self.shape.num_devices, self.shape.num_stages)
        counts = [
            max((point.held_bytes for point in curve), default=0.0)
            for curve in _curves(self, Memory())
        ]
        return tuple(float(unit * Fraction(count)) for count in counts)

    def memory_curve(self, device: int) -> tuple[MemoryPoint, ...]:
        """Bytes held on the device over time, by the simulation's ``Memory``."""
        return tuple(_curves(self, self.memory)[device])

    @property
    def peak_memory_bytes(self) -> tuple[float, ...]:
        return tuple(
            max((point.held_bytes for point in curve), default=0.0)
            for curve in _curves(self, self.memory)
        )


def covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of the spans."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(spans):
        if end > reach:
            total += end - max(start, reach)
            reach = end
    return total


def covered_by_device(intervals: Sequence[Interval], num_devices: int) -> list[float]:
    """Seconds in which each device is computing."""
    spans: list[list[tuple[float, float]]] = [[] for _ in range(num_devices)]
    for item in intervals:
        if item.resource in COMPUTE_RESOURCES:
            spans[item.device].append((item.start_s, item.end_s))
    return [covered_s(items) for items in spans]


def _curves(timeline: Timeline, memory: Memory) -> list[list[MemoryPoint]]:
    """The memory curve of every device; at equal times, memory is freed before it is taken."""
    shape = timeline.shape
    accounts = _Accounts(shape, memory)
    changes: list[list[tuple[float, float]]] = [[] for _ in range(shape.num_devices)]
    for item in sorted(timeline.intervals, key=lambda item: item.end_s):
        if item.action.kind in COMPUTE_KINDS or item.resource not in (
            Resource.SEND,
            Resource.RECV,
        ):
            changes[item.device].extend(accounts.changes(item))
    curves = []
    for device, deltas in enumerate(changes):
        held = accounts.static_bytes(device)
        curve = [MemoryPoint(0.0, held)]
        for time, delta in sorted(deltas):
            held += delta
            if curve[-1].time_s == time:
                curve[-1] = MemoryPoint(time, held)
            else:
                curve.append(MemoryPoint(time, held))
        curves.append(curve)
    return curves


class _Accounts:
    """Converts intervals, in order of their ends, into changes of the bytes held."""

    def __init__(self, shape: PipelineShape, memory: Memory) -> None:
        stages = shape.num_stages
        self.shape = shape
        self.full = per_stage(memory.activation_bytes, stages, "Memory.activation_bytes")
        held = memory.after_input_gradient_bytes
        self.held = self.full if held is None else per_stage(held, stages, "Memory.held")
        self.checkpoint = per_stage(memory.checkpoint_bytes, stages, "Memory.checkpoint_bytes")
        self.gradient = per_stage(memory.gradient_bytes, stages, "Memory.gradient_bytes")
        self.weight = per_stage(memory.weight_bytes, stages, "Memory.weight_bytes")
        self.recomputed = frozenset(shape.recomputed)
        self.open_gradients: set[tuple[int, int, int]] = set()

    def static_bytes(self, device: int) -> float:
        return sum((self.weight[stage] for _, stage in self.shape.stages_on(device)), 0.0)

    def changes(self, item: Interval) -> list[tuple[float, float]]:
        action, stage = item.action, item.action.stage
        kind, span = action.kind, action.span
        kept = self.checkpoint[stage] if stage in self.recomputed else self.full[stage]
        if kind is Kind.F:
            return [(item.start_s, span * kept)]
        if kind is Kind.R:
            return [(item.start_s, span * (self.full[stage] - kept))]
        if kind is Kind.O:
            return [(item.end_s, -span * kept)]
        if kind is Kind.L:
            return [(item.start_s, span * kept)]
        if kind is Kind.I:
            return [(item.end_s, span * (self.held[stage] - self.full[stage]))]
        if kind is Kind.W:
            return [*self._gradient(item), (item.end_s, -span * self.held[stage])]
        if kind is Kind.B:
            return [*self._gradient(item), (item.end_s, -span * self.full[stage])]
        last = kind is Kind.U or not self.shape.updates
        key = (stage, action.replica, item.iteration)
        if last and key in self.open_gradients:
            self.open_gradients.discard(key)
            return [(item.end_s, -self.gradient[stage])]
        return []

    def _gradient(self, item: Interval) -> list[tuple[float, float]]:
        """The allocation of the gradient buffer, at a stage's first W or B in an iteration."""
        key = (item.action.stage, item.action.replica, item.iteration)
        if not self.gradient[item.action.stage] or key in self.open_gradients:
            return []
        self.open_gradients.add(key)
        return [(item.start_s, self.gradient[item.action.stage])]
