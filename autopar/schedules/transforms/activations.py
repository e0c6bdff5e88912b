"""Recomputation and offloading of activations as transforms of a schedule.

In: any schedule and the stages that should not keep their activations. Out: the schedule with R
before each of their backwards, or with O after each forward and L in time for the backward.
"""

from collections.abc import Collection
from dataclasses import replace

from autopar.base.errors import ScheduleError
from autopar.schedules.action import Action, Kind
from autopar.schedules.schedule import Resource, Schedule, Step, step

_BACKWARD = (Kind.I, Kind.B)


def with_recomputation(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """Release the stages' activations after F and recompute them right before I or B.

    Raises ScheduleError for a stage that does not exist or is already recomputed.
    """
    chosen = _chosen(schedule, stages, schedule.shape.recomputed, "recomputed")
    devices = []
    for steps in schedule.devices:
        listed: list[Step] = []
        for item in steps:
            if item.action.kind in _BACKWARD and item.action.stage in chosen:
                again = item.action._replace(kind=Kind.R)
                listed.append(Step(again, item.resource, item.lag, item.after))
            listed.append(item)
        devices.append(tuple(listed))
    recomputed = tuple(sorted({*schedule.shape.recomputed, *chosen}))
    shape = replace(schedule.shape, recomputed=recomputed)
    return replace(schedule, shape=shape, devices=tuple(devices))


def with_offloading(
    schedule: Schedule, stages: Collection[int], *, actions_ahead: int = 2
) -> Schedule:
    """Offload the stages' activations to the host after F and load them for I or B.

    A load starts when the main stream is ``actions_ahead`` actions before its backward (but not
    before its own offload), so 0 overlaps nothing and a large number takes memory early. Raises
    ScheduleError for a stage that does not exist, is already offloaded, or whose forwards take
    several micro-batches.
    """
    chosen = _chosen(schedule, stages, schedule.shape.offloaded, "offloaded")
    if type(actions_ahead) is not int or actions_ahead < 0:
        raise ScheduleError(f"actions_ahead={actions_ahead!r}: a whole number, 0 or more")
    devices = [_offloaded(steps, chosen, actions_ahead) for steps in schedule.devices]
    offloaded = tuple(sorted({*schedule.shape.offloaded, *chosen}))
    shape = replace(schedule.shape, offloaded=offloaded)
    return replace(schedule, shape=shape, devices=tuple(devices))


def _chosen(
    schedule: Schedule, stages: Collection[int], already: tuple[int, ...], word: str
) -> frozenset[int]:
    if isinstance(stages, (str, int)) or any(type(stage) is not int for stage in stages):
        raise ScheduleError(f"stages={stages!r}: give whole numbers, for example (0, 1)")
    chosen = frozenset(stages)
    unknown = sorted(chosen - set(range(schedule.shape.num_stages)))
    again = sorted(chosen & set(already))
    if unknown or again:
        raise ScheduleError(
            f"stages {unknown or again} "
            + (f"are not among 0..{schedule.shape.num_stages - 1}" if unknown else f"are {word}")
        )
    return chosen


def _offloaded(
    steps: tuple[Step, ...], chosen: frozenset[int], actions_ahead: int
) -> tuple[Step, ...]:
    main = [
        item.action
        for item in steps
        if item.resource is Resource.MAIN
        or item.action.kind is Kind.F  # a pair's forward may run on the side stream
    ]
    place = {action: number for number, action in enumerate(main)}
    loads: dict[Action, list[Step]] = {}
    for action in main:
        if action.kind not in _BACKWARD or action.stage not in chosen:
            continue
        forward = action._replace(kind=Kind.F)
        if forward not in place:
            raise ScheduleError(f"{action}: its forward takes several micro-batches")
        trigger = max(place[action] - 1 - actions_ahead, place[forward])
        load = step(action._replace(kind=Kind.L), after=main[trigger])
        loads.setdefault(main[trigger], []).append(load)
    listed: list[Step] = []
    for item in steps:
        listed.append(item)
        if item.action.kind is Kind.F and item.action.stage in chosen:
            listed.append(step(item.action._replace(kind=Kind.O)))
        listed.extend(loads.get(item.action, ()))
    return tuple(listed)
