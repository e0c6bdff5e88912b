"""Costs of actions: seconds per stage, links, memory, and the slowdown of co-running streams.

In: numbers from a profile, a cost model or a formula. Out: frozen values that the simulator, the
list scheduler and the search read. No unit is assumed beyond seconds and bytes, so closed formulas
can be tested with F = 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf
from numbers import Real
from typing import Any

from typing_extensions import TypeIs

from autopar.base.errors import ScheduleError
from autopar.schedules.action import Action, Kind

PerStage = float | Sequence[float]


def is_number(value: Any) -> TypeIs[float]:
    """Whether a value is an int or a float, NumPy's included, but not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def per_stage(value: PerStage, num_stages: int, name: str) -> list[float]:
    """One value per stage. Raises ScheduleError for a wrong length or anything but numbers >= 0."""
    if is_number(value):
        values = [value] * num_stages
    elif isinstance(value, str) or not hasattr(value, "__len__"):
        raise ScheduleError(f"{name}={value!r}: give one number for all stages, or one per stage")
    else:
        values = list(value)
    if len(values) != num_stages:
        raise ScheduleError(
            f"{name} has {len(values)} entries for {num_stages} stages: give one number for all "
            "stages, or one per stage"
        )
    if any(not is_number(entry) or not 0 <= entry < inf for entry in values):
        raise ScheduleError(f"{name}={value!r}: a cost is a finite number >= 0")
    return values


def _check_fields(costs: "Durations | Memory") -> None:
    """Raise ScheduleError unless all costs are finite numbers >= 0, for any number of stages."""
    for item in fields(costs):
        value = getattr(costs, item.name)
        if value is not None and not isinstance(value, Mapping):
            count = len(value) if hasattr(value, "__len__") else 1
            per_stage(value, count, f"{type(costs).__name__}.{item.name}")


def _check_sizes(sizes: Sequence[int]) -> None:
    if any(type(size) is not int or size < 1 for size in sizes):
        raise ScheduleError(
            f"sizes={list(sizes)!r}: each stage takes a whole number of stages >= 1"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds of each kind of action for one micro-batch: one number, or one per stage.

    ``B`` defaults to I + W and ``R`` to F; a schedule that splits backwards needs I and W. ``G`` is
    the whole reduction of a stage's gradients. An action over several micro-batches takes the sum
    of their times. ``single`` overrides the times of single actions, for example with measured
    ones.
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
    single: Mapping[Action, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_fields(self)
        for action, seconds in self.single.items():
            if not isinstance(action, Action):
                raise ScheduleError(
                    f"Durations.single[{action!r}]: the key is an Action, such as "
                    "Action(stage=0, kind=Kind.F, microbatch=3)"
                )
            per_stage(seconds, 1, f"Durations.single[{action}]")

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

    def split_table(self, num_stages: int) -> dict[Kind, list[float]]:
        """``table`` for schedules that split backwards; raises ScheduleError without I and W."""
        table = self.table(num_stages)
        for i, w, b in zip(table[Kind.I], table[Kind.W], table[Kind.B]):
            if b and not i and not w:
                raise ScheduleError(
                    f"Durations(B={self.B!r}) does not give I and W, into which backwards are "
                    "split here: give both, Durations(F=1.0, I=1.0, W=1.0)"
                )
        return table

    def grouped(self, sizes: Sequence[int]) -> "Durations":
        """The durations of stages merged from ``sizes`` adjacent stages each.

        Raises ScheduleError if there are durations of single actions, which cannot be merged.
        """
        _check_sizes(sizes)
        if self.single:
            raise ScheduleError(
                f"Durations.single has {len(self.single)} actions of stages that are to be "
                "merged: give durations by kind and stage only"
            )
        num_stages = sum(sizes)
        table = self.table(num_stages)
        sums: dict[str, Any] = {k.value: _group_sums(values, sizes) for k, values in table.items()}
        return Durations(**sums)


def _group_sums(values: Sequence[float], sizes: Sequence[int]) -> tuple[float, ...]:
    sums, start = [], 0
    for size in sizes:
        sums.append(sum(values[start : start + size]))
        start += size
    return tuple(sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of the link between two devices."""

    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = inf

    def __post_init__(self) -> None:
        latency_s, bandwidth = self.latency_s, self.bandwidth_bytes_per_s
        if not is_number(latency_s) or not 0 <= latency_s < inf:
            raise ScheduleError(f"latency_s={latency_s!r}: a latency is a finite number >= 0")
        if not is_number(bandwidth) or not bandwidth > 0:
            raise ScheduleError(
                f"bandwidth_bytes_per_s={bandwidth!r}: a bandwidth is a number > 0, inf if free"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Point-to-point links and the message across each stage boundary.

    ``message_bytes[s]`` is the size of what stage s sends to stage s + 1 per micro-batch, and of
    the gradient sent back. A link carries one message at a time, first come first served, and is
    free again before the latency has passed. ``between`` overrides single device pairs.
    """

    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = inf
    message_bytes: PerStage = 0.0
    between: Mapping[tuple[int, int], Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Link(latency_s=self.latency_s, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s)
        given = self.message_bytes
        per_stage(given, len(given) if hasattr(given, "__len__") else 1, "Links.message_bytes")
        for pair, link in self.between.items():
            whole = isinstance(pair, tuple) and all(type(device) is int for device in pair)
            if not whole or len(pair) != 2 or pair[0] == pair[1] or not isinstance(link, Link):
                raise ScheduleError(
                    f"Links.between[{pair!r}]={link!r}: the key is a pair of different devices, "
                    "the value a Link, for example {(0, 1): Link(latency_s=1e-5)}"
                )

    def check_devices(self, num_devices: int) -> None:
        """Raise ScheduleError if ``between`` names a device that does not exist."""
        for pair in self.between:
            if not all(0 <= device < num_devices for device in pair):
                raise ScheduleError(
                    f"Links.between[{pair}]: the devices of this schedule are 0..{num_devices - 1}"
                )

    def link(self, source: int, target: int) -> Link:
        found = self.between.get((source, target))
        if found is not None:
            return found
        return Link(latency_s=self.latency_s, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s)

    def boundary_bytes(self, num_stages: int) -> list[float]:
        """Bytes across the boundary after each stage; the entry of the last stage is unused."""
        given = self.message_bytes
        if not is_number(given) and len(given) == num_stages - 1:
            given = (*given, 0.0)
        return per_stage(given, num_stages, "Links.message_bytes")

    def grouped(self, sizes: Sequence[int]) -> "Links":
        """The links of stages merged from ``sizes`` adjacent stages each."""
        _check_sizes(sizes)
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
    """Bytes that a stage holds: one number for all stages, or one per stage.

    ``activation_bytes``: from F (or R, or L) to the end of B or W, per micro-batch.
    ``after_input_gradient_bytes``: the part still held between I and W (default: all).
    ``checkpoint_bytes``: held by a recomputed stage from F to R. ``gradient_bytes``: from the first
    W or B to the end of U (or G, or the iteration). ``weight_bytes``: always held, including the
    optimizer's state.
    """

    activation_bytes: PerStage = 1.0
    after_input_gradient_bytes: PerStage | None = None
    checkpoint_bytes: PerStage = 0.0
    gradient_bytes: PerStage = 0.0
    weight_bytes: PerStage = 0.0

    def __post_init__(self) -> None:
        _check_fields(self)

    def grouped(self, sizes: Sequence[int]) -> "Memory":
        """The memory of stages merged from ``sizes`` adjacent stages each."""
        _check_sizes(sizes)
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
    """How two compute streams of a device slow each other down.

    ``occupancy`` is the share of the device (0..1; by kind, one number or one per stage) that an
    action fills alone. Two co-running actions both run ``max(1, sum of the two) * (1 +
    interference)`` times slower: two of occupancy 1 gain nothing from co-running; two of at most
    1/2 overlap completely. With ``end_together`` the shorter action is stretched to end with the
    longer one: their kernels interleave, as in DualPipe's pair of a forward and a backward. Raises
    ScheduleError for shares outside 0..1 and for a negative or infinite interference.
    """

    occupancy: Mapping[Kind, PerStage] = field(default_factory=dict)
    default_occupancy: float = 1.0
    interference: float = 0.0
    end_together: bool = False

    def __post_init__(self) -> None:
        if not is_number(self.interference) or not 0 <= self.interference < inf:
            raise ScheduleError(
                f"CoRun.interference={self.interference!r}: a finite number >= 0, 0.05 for 5%"
            )
        shares: dict[str, PerStage] = {"default_occupancy": self.default_occupancy}
        for kind, value in self.occupancy.items():
            if not isinstance(kind, Kind):
                raise ScheduleError(f"CoRun.occupancy[{kind!r}]: the key is a Kind, Kind.W")
            shares[f"occupancy[{kind.value}]"] = value
        for name, value in shares.items():
            count = len(value) if hasattr(value, "__len__") else 1
            if any(share > 1 for share in per_stage(value, count, f"CoRun.{name}")):
                raise ScheduleError(f"CoRun.{name}={value!r}: a share of the device is in 0..1")

    def check_stages(self, num_stages: int) -> None:
        """Raise ScheduleError unless shares given per stage have the right length."""
        for kind, value in self.occupancy.items():
            per_stage(value, num_stages, f"CoRun.occupancy[{kind.value}]")

    def share(self, action: Action) -> float:
        """The share of the device that the action occupies alone."""
        value = self.occupancy.get(action.kind, self.default_occupancy)
        return value if is_number(value) else value[action.stage]

    def slowdown(self, first: Action, second: Action) -> float:
        """The factor by which each of the two is slower while both run."""
        return max(1.0, self.share(first) + self.share(second)) * (1.0 + self.interference)
