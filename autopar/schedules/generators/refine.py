"""Better orders of a schedule's actions: list schedules on its placement, local search, CP-SAT.

In: a schedule of forwards and backwards, its costs, and a memory cap per device. Out: the shortest
order found, never longer than the given one, and a lower bound of every order on that placement. A
plan refines the schedules that its generators found (`autopar.planning.refinement`); the search
over placements (`autopar.schedules.generators.search`) uses the parts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.base.errors import ScheduleError
from autopar.schedules.action import Kind
from autopar.schedules.generators.fixed_order import FixedOrder, static_bytes
from autopar.schedules.generators.list_scheduler import Policy, kind_priority, list_schedule
from autopar.schedules.generators.local_search import improve
from autopar.schedules.generators.lower_bound import lower_bound_s
from autopar.schedules.schedule import PipelineShape, Resource, Schedule, Step
from autopar.schedules.simulate.durations import Durations, Links, Memory, per_stage
from autopar.schedules.simulate.simulator import simulate
from autopar.schedules.verify import verify

TOLERANCE = 1e-9
"""Relative difference up to which two times, or two amounts of memory, are equal."""
ROUNDING = 1e-4
"""Relative rounding of CP-SAT's bound: of each action by a 100,000th of the longest."""
_KINDS = (Kind.F, Kind.I, Kind.W, Kind.B)
_NUM_STARTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The seconds and bytes of a pipeline's stages, and the bytes that each device may hold."""

    durations: Durations
    links: Links | None
    memory: Memory
    max_bytes: Sequence[float]

    def seconds(self, schedule: Schedule) -> float:
        """The simulated makespan."""
        return simulate(schedule, self.durations, self.links).makespan_s

    def fits(self, schedule: Schedule) -> bool:
        """Whether every device stays under its cap."""
        peaks = simulate(schedule, self.durations, self.links, memory=self.memory).peak_memory_bytes
        return all(peak <= cap * (1 + TOLERANCE) for peak, cap in zip(peaks, self.max_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Refined:
    """A schedule with its simulated seconds, and a lower bound of any order on its placement.

    The bound holds for F, I and W alone, under the same memory cap.
    """

    schedule: Schedule
    makespan_s: float
    lower_bound_s: float

    @property
    def gap(self) -> float:
        """The relative distance from the bound; 0 if the order is proved optimal, up to the
        rounding of CP-SAT's times."""
        gap = self.makespan_s / self.lower_bound_s - 1.0 if self.lower_bound_s else 0.0
        return gap if gap > ROUNDING else 0.0


def refine(
    start: Schedule, costs: Costs, *, num_moves: int, exact_time_s: float = 0.0, seed: int = 0
) -> Refined:
    """The shortest order of the same work on the same placement; ``start`` if none is shorter.

    List schedules are tried, with ``exact_time_s`` CP-SAT gets so many seconds, and unless the best
    is proved optimal then, the best two are improved by ``num_moves`` moves each. Raises
    ScheduleError if ``start`` is not plain (`is_plain`) or does not fit.
    """
    if not is_plain(start) or not costs.fits(start):
        raise ScheduleError(
            f"schedule {start.name!r} cannot be refined: its actions must be F and B, or I and W, "
            f"on the main stream, within max_bytes={list(costs.max_bytes)}"
        )
    pool = [(costs.seconds(start), start)]
    least_s = lower_bound_s(start.shape, costs.durations)

    def is_proved() -> bool:
        return min(pool, key=_seconds)[0] <= least_s * (1 + ROUNDING)

    if not is_proved():
        listed = (each for _, each in list_orders(start.shape, costs))
        pool += [(costs.seconds(each), each) for each in listed if costs.fits(each)]
    if exact_time_s > 0 and not is_proved():
        found, bound_s = exact(min(pool, key=_seconds)[1], costs, exact_time_s)
        least_s = max(least_s, bound_s)
        if costs.fits(found):
            pool.append((costs.seconds(found), found))
    for _, each in sorted(pool, key=_seconds)[:_NUM_STARTS]:
        if num_moves and not is_proved():
            found = improved(each, costs, num_moves=num_moves, seed=seed)
            pool.append((costs.seconds(found), found))
    best_s, best = min(pool, key=_seconds)
    if best is not start:
        best = replace(_joined(best, best_s, costs), name=start.name)
        verify(best)
    return Refined(schedule=best, makespan_s=best_s, lower_bound_s=min(least_s, best_s))


def _seconds(timed: tuple[float, Schedule]) -> float:
    return timed[0]


def is_plain(schedule: Schedule) -> bool:
    """Whether all actions are F, I, W and B of one micro-batch each, on the main stream."""
    return all(
        item.action.kind in _KINDS
        and item.action.span == 1
        and item.resource is Resource.MAIN
        and not item.lag
        and item.after is None
        for steps in schedule.devices
        for item in steps
    )


def list_orders(shape: PipelineShape, costs: Costs) -> Iterator[tuple[dict[str, Any], Schedule]]:
    """List schedules under the memory cap with their options: priorities and patiences."""
    memory = costs.memory
    sizes = per_stage(memory.activation_bytes, shape.num_stages, "Memory.activation_bytes")
    room = [cap - held for cap, held in zip(costs.max_bytes, static_bytes(shape, memory))]
    for order in ((Kind.I, Kind.F, Kind.W), (Kind.F, Kind.I, Kind.W), (Kind.I, Kind.W, Kind.F)):
        for patience in (0.0, 0.5, 1.0):
            policy = Policy(
                priority=kind_priority(order),
                max_activations=room,
                activations=sizes,
                patience=patience,
            )
            options = {"order": "".join(kind.value for kind in order), "patience": patience}
            try:
                found = list_schedule("list", shape, costs.durations, policy, links=costs.links)
            except ScheduleError:  # the cap is below the need of one micro-batch on this shape
                continue
            yield options, found


def improved(schedule: Schedule, costs: Costs, *, num_moves: int, seed: int = 0) -> Schedule:
    """The schedule after local search, with its B's split."""
    split = split_backwards(schedule)
    orders = FixedOrder(split, costs.durations, costs.links, costs.memory)
    return orders.schedule(
        improve(
            orders,
            orders.initial,
            costs.max_bytes,
            num_moves=num_moves,
            seed=seed,
            lower_bound_s=lower_bound_s(split.shape, costs.durations),
        )
    )


def exact(start: Schedule, costs: Costs, time_limit_s: float) -> tuple[Schedule, float]:
    """CP-SAT's best schedule on the placement, hinted with ``start``, and its proved bound.

    ``start`` itself if there is none in time.
    """
    from autopar.schedules.generators.oracle import optimal_schedule  # OR-Tools is slow to import

    found = optimal_schedule(
        start.shape,
        costs.durations,
        links=costs.links,
        memory=costs.memory,
        max_bytes=costs.max_bytes,
        time_limit_s=time_limit_s,
        start_from=start,
    )
    return found.schedule or start, found.lower_bound_s


def split_backwards(schedule: Schedule) -> Schedule:
    """The schedule with every B replaced by I and W."""
    orders = []
    for steps in schedule.devices:
        order: list[Step] = []
        for item in steps:
            kinds = (Kind.I, Kind.W) if item.action.kind is Kind.B else (item.action.kind,)
            order += [item._replace(action=item.action._replace(kind=kind)) for kind in kinds]
        orders.append(tuple(order))
    return replace(schedule, devices=tuple(orders))


def _joined(schedule: Schedule, time_s: float, costs: Costs) -> Schedule:
    """The schedule with I and W joined to B in the stages where that takes no longer: such stages
    hold less, and their blocks are differentiated in one."""
    for stage in range(schedule.shape.num_stages):
        joined = _with_whole_backwards(schedule, stage)
        if costs.seconds(joined) <= time_s * (1 + TOLERANCE):
            schedule = joined
    return schedule


def _with_whole_backwards(schedule: Schedule, stage: int) -> Schedule:
    """The schedule with B in place of each I of the stage, and without its W's."""
    devices = []
    for steps in schedule.devices:
        listed: list[Step] = []
        for item in steps:
            kind = item.action.kind
            if item.action.stage == stage and kind is Kind.I:
                listed.append(item._replace(action=item.action._replace(kind=Kind.B)))
            elif item.action.stage != stage or kind is not Kind.W:
                listed.append(item)
        devices.append(tuple(listed))
    return replace(schedule, devices=tuple(devices))
