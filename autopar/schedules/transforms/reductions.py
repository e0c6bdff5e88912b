"""Gradient reductions added to a schedule, eagerly only where they overlap with bubbles.

In: a schedule without G, and the costs. Out: the schedule with one G per stage and replica. A
reduction that starts while the device still computes competes with it for memory bandwidth and
launches; it pays off only where the device would otherwise idle. For that reason Chimera (SC 2021,
section 3.3) reduces its edge stages eagerly and the middle ones at the end.
"""

from dataclasses import replace

from autopar.base.errors import ScheduleError
from autopar.schedules.action import Action, Kind
from autopar.schedules.schedule import Resource, Schedule, Step, step
from autopar.schedules.simulate.durations import Durations, Links, is_number
from autopar.schedules.simulate.simulator import simulate
from autopar.schedules.simulate.timeline import Interval, Timeline, covered_s

StageCopy = tuple[int, int]  # (replica, stage)


def with_reductions(
    schedule: Schedule,
    durations: Durations,
    links: Links | None = None,
    *,
    hidden_share: float = 0.5,
) -> Schedule:
    """The schedule with its reductions.

    A reduction is eager if, issued right after its stage's last W or B, at least ``hidden_share``
    of its time falls into idle time of its devices before their last compute action; all others are
    issued at the end of their device's list. Raises ScheduleError if the schedule already reduces,
    or for a share outside 0..1.
    """
    if not is_number(hidden_share) or not 0 <= hidden_share <= 1:
        raise ScheduleError(
            f"hidden_share={hidden_share!r}: a share of a reduction's time, in 0..1"
        )
    if schedule.shape.reduces:
        raise ScheduleError(f"schedule {schedule.name!r} already reduces its gradients")
    shape = schedule.shape
    copies = {
        (replica, stage)
        for replica in range(shape.num_replicas)
        for stage in range(shape.num_stages)
    }
    turn = _turns(simulate(schedule, durations, links))
    timeline = simulate(_placed(schedule, copies, turn), durations, links)
    compute = _compute(timeline)
    hidden: dict[StageCopy, float] = {}
    for item in timeline.intervals:
        if item.action.kind is Kind.G:
            hidden[item.action.replica, item.action.stage] = _hidden_share(
                item, compute[item.device]
            )
    eager = {
        (replica, stage)
        for replica, stage in copies
        if min(hidden[other, stage] for other in range(shape.num_replicas)) >= hidden_share
    }
    return _placed(schedule, eager, turn)


def with_replica_sums(schedule: Schedule) -> Schedule:
    """The schedule with a gradient reduction right after the last W of each replicated stage.

    Reductions overlap with computation; while a device waits for others, they cost nothing.
    """
    if schedule.shape.num_replicas == 1 or schedule.shape.reduces:
        return schedule
    return with_reductions(schedule, Durations(F=1.0, I=1.0, W=1.0, G=1.0), hidden_share=0.0)


def _compute(timeline: Timeline) -> list[list[tuple[float, float]]]:
    """The start and the end of each device's compute actions."""
    found: list[list[tuple[float, float]]] = [[] for _ in range(timeline.shape.num_devices)]
    for item in timeline.intervals:
        if item.resource is Resource.MAIN or item.resource is Resource.SIDE:
            found[item.device].append((item.start_s, item.end_s))
    return found


def _hidden_share(item: Interval, compute: list[tuple[float, float]]) -> float:
    """The fraction of the reduction inside bubbles before the device's last action."""
    if item.duration_s <= 0.0:
        return 1.0
    last = max(end for _, end in compute)
    inside = max(0.0, min(item.end_s, last) - item.start_s)
    clipped = [
        (max(start, item.start_s), min(end, item.end_s))
        for start, end in compute
        if end > item.start_s and start < item.end_s
    ]
    return (inside - covered_s(clipped)) / item.duration_s


def _placed(schedule: Schedule, eager: set[StageCopy], turn: dict[int, float]) -> Schedule:
    """The schedule with every device's reductions in a common order, so that no devices deadlock.

    An eager one directly follows its last W or B, unless an earlier one in the order is later.
    """
    shape = schedule.shape
    devices: list[tuple[Step, ...]] = []
    for device, steps in enumerate(schedule.devices):
        last: dict[StageCopy, int] = {}
        for place, item in enumerate(steps):
            if item.action.kind in (Kind.W, Kind.B):
                last[item.action.replica, item.action.stage] = place
        issued: dict[int, list[Step]] = {}
        earliest = 0
        for copy in sorted(shape.stages_on(device), key=lambda copy: (turn[copy[1]], copy[1])):
            place = last.get(copy, len(steps) - 1) if copy in eager else len(steps) - 1
            earliest = max(earliest, place)
            issued.setdefault(earliest, []).append(_reduction(copy))
        listed: list[Step] = []
        for place, item in enumerate(steps):
            listed += [item, *issued.get(place, ())]
        devices.append(tuple(listed))
    return replace(schedule, shape=replace(shape, reduces=True), devices=tuple(devices))


def _turns(timeline: Timeline) -> dict[int, float]:
    """The end of each stage's last W or B over all replicas."""
    turn = dict.fromkeys(range(timeline.shape.num_stages), 0.0)
    for item in timeline.intervals:
        if item.action.kind in (Kind.W, Kind.B):
            turn[item.action.stage] = max(turn[item.action.stage], item.end_s)
    return turn


def _reduction(copy: StageCopy) -> Step:
    replica, stage = copy
    return step(Action(stage, Kind.G, replica=replica))
