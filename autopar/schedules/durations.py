"""What actions cost: seconds a stage, links, memory, and the slow-down of two streams that co-run.

Comes in: plain numbers from a profile, a cost model or a formula. Goes out: frozen values that the
simulator, the list scheduler and the search read. No unit is assumed beyond seconds and bytes, so
closed formulas are tested with F = 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from autopar.errors import ScheduleError
from autopar.schedules.action import Action, Kind

PerStage = float | Sequence[float]


def per_stage(value: PerStage, num_stages: int, name: str) -> list[float]:
    """One value a stage. Raises ScheduleError on a wrong length or a negative value."""
    values = [value] * num_stages if isinstance(value, (int, float)) else list(value)
    if len(values) != num_stages:
        raise ScheduleError(
            f"{name} has {len(values)} entries for {num_stages} stages: give one number for all "
            "stages, or one a stage"
        )
    if any(not 0 <= entry < inf for entry in values):
        raise ScheduleError(f"{name}={values}: a cost is a finite number >= 0")
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds of each kind of action for one micro-batch: one number, or one a stage.

    ``B`` defaults to I + W and ``R`` to F. ``G`` is the whole reduction of a stage's gradients.
    An action over several micro-batches takes the sum of their times.
    """

    F: PerStage
    I: PerStage = 0.0  # noqa: E741
    W: PerStage = 0.0
    B: PerStage | None = None
    R: PerStage | None = None
    G: PerStage = 0.0
    U: PerStage = 0.0
    O: PerStage = 0.0  # noqa: E741
    L: PerStage = 0.0

    def table(self, num_stages: int) -> dict[Kind, list[float]]:
        """Seconds by kind and stage. Raises ScheduleError on wrong lengths."""
        table = {
            kind: per_stage(getattr(self, kind.value), num_stages, f"Durations.{kind.value}")
            for kind in (Kind.F, Kind.I, Kind.W, Kind.G, Kind.U, Kind.O, Kind.L)
        }
        if self.B is None:
            table[Kind.B] = [i + w for i, w in zip(table[Kind.I], table[Kind.W])]
        else:
            table[Kind.B] = per_stage(self.B, num_stages, "Durations.B")
        table[Kind.R] = (
            table[Kind.F] if self.R is None else per_stage(self.R, num_stages, "Durations.R")
        )
        return table

    def grouped(self, sizes: Sequence[int]) -> "Durations":
        """The durations of stages made of ``sizes`` adjacent stages each: sums."""
        num_stages = sum(sizes)
        table = self.table(num_stages)
        return Durations(
            **{kind.value: _group_sums(values, sizes) for kind, values in table.items()}
        )


def _group_sums(values: Sequence[float], sizes: Sequence[int]) -> tuple[float, ...]:
    sums, start = [], 0
    for size in sizes:
        sums.append(sum(values[start : start + size]))
        start += size
    return tuple(sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction between two devices."""

    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = inf

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < inf:
            raise ScheduleError(f"latency_s={self.latency_s}: a latency is a finite number >= 0")
        if not self.bandwidth_bytes_per_s > 0:
            raise ScheduleError(
                f"bandwidth_bytes_per_s={self.bandwidth_bytes_per_s}: a bandwidth is a number > 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Point-to-point links and the message across each stage boundary.

    ``message_bytes[s]`` is what stage s sends to stage s + 1 for one micro-batch; the gradient that
    comes back has the same size. A link carries one message at a time, first come first served;
    the latency comes after the link is free again. ``between`` overrides single device pairs.
    """

    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = inf
    message_bytes: PerStage = 0.0
    between: Mapping[tuple[int, int], Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Link(latency_s=self.latency_s, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s)
        given = self.message_bytes
        count = 1 if isinstance(given, (int, float)) else len(given)
        per_stage(given, count, "Links.message_bytes")

    def link(self, source: int, target: int) -> Link:
        default = Link(latency_s=self.latency_s, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s)
        return self.between.get((source, target), default)

    def boundary_bytes(self, num_stages: int) -> list[float]:
        """Bytes across the boundary after each stage; the last stage's entry is unused."""
        if isinstance(self.message_bytes, (int, float)):
            return [self.message_bytes] * num_stages
        given = list(self.message_bytes)
        if len(given) == num_stages - 1:
            given.append(0.0)
        return per_stage(given, num_stages, "Links.message_bytes")

    def grouped(self, sizes: Sequence[int]) -> "Links":
        """The links of stages made of ``sizes`` adjacent stages each."""
        boundary = self.boundary_bytes(sum(sizes))
        kept, end = [], 0
        for size in sizes:
            end += size
            kept.append(boundary[end - 1])
        return Links(
            latency_s=self.latency_s,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
            message_bytes=tuple(kept),
            between=self.between,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes a stage holds, one number for all stages or one a stage.

    ``activation_bytes``: from F (or R, or L) to the end of B or W, for one micro-batch.
    ``after_input_gradient_bytes``: what of it is still held between I and W (default: all).
    ``checkpoint_bytes``: what a recomputed stage keeps from F to R. ``gradient_bytes``: from the
    first W or B to the end of U (or G, or the iteration). ``weight_bytes``: always, with the
    optimizer's state.
    """

    activation_bytes: PerStage = 1.0
    after_input_gradient_bytes: PerStage | None = None
    checkpoint_bytes: PerStage = 0.0
    gradient_bytes: PerStage = 0.0
    weight_bytes: PerStage = 0.0

    def grouped(self, sizes: Sequence[int]) -> "Memory":
        """The memory of stages made of ``sizes`` adjacent stages each: sums."""
        num_stages = sum(sizes)

        def sums(value: PerStage, name: str) -> tuple[float, ...]:
            return _group_sums(per_stage(value, num_stages, f"Memory.{name}"), sizes)

        held = self.after_input_gradient_bytes
        return Memory(
            activation_bytes=sums(self.activation_bytes, "activation_bytes"),
            after_input_gradient_bytes=(
                None if held is None else sums(held, "after_input_gradient_bytes")
            ),
            checkpoint_bytes=sums(self.checkpoint_bytes, "checkpoint_bytes"),
            gradient_bytes=sums(self.gradient_bytes, "gradient_bytes"),
            weight_bytes=sums(self.weight_bytes, "weight_bytes"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CoRun:
    """How two compute streams of one device slow each other down.

    An action that alone fills the share ``occupancy`` (0..1) of the device shares it with another:
    both then run ``max(1, sum of the two) * (1 + interference)`` times slower. Two actions of
    occupancy 1 gain nothing from co-running; two of at most 1/2 hide each other entirely.
    """

    occupancy: Mapping[Kind, PerStage] = field(default_factory=dict)
    default_occupancy: float = 1.0
    interference: float = 0.0

    def share(self, action: Action) -> float:
        """The share of the device that the action fills alone."""
        value = self.occupancy.get(action.kind, self.default_occupancy)
        return value if isinstance(value, (int, float)) else value[action.stage]

    def slowdown(self, first: Action, second: Action) -> float:
        """How many times slower each of the two runs while both run."""
        return max(1.0, self.share(first) + self.share(second)) * (1.0 + self.interference)
