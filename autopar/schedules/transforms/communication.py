"""The implied transfers of a schedule as explicit SEND and RECV actions.

In: a compute-only schedule and the costs that determine the order of the messages. Out: the same
schedule with a send right after each action whose value leaves its device, and on each link the
receives in the order of the sends. The runtime of a pipeline rank needs them as actions.
"""

from autopar.base.errors import ScheduleError
from autopar.schedules.action import Action, Kind
from autopar.schedules.schedule import PipelineShape, Schedule, Step, step
from autopar.schedules.simulate.durations import Durations, Links
from autopar.schedules.simulate.simulator import simulate
from autopar.schedules.simulate.timeline import Interval


def with_communication(
    schedule: Schedule, durations: Durations, links: Links | None = None
) -> Schedule:
    """The schedule with every transfer as explicit actions.

    A receive is placed in its device's list where that device is when the message is sent, so
    always after its send and before its consumer, which keeps the lists free of deadlocks. Raises
    ScheduleError if sends are already explicit.
    """
    if schedule.explicit_communication:
        raise ScheduleError(f"schedule {schedule.name!r} already has explicit sends")
    timeline = simulate(schedule, durations, links)
    order = sorted(
        (item for item in timeline.intervals if item.action.kind in (Kind.F, Kind.I, Kind.B)),
        key=lambda item: (item.end_s, item.device),
    )
    return Schedule(
        name=schedule.name,
        shape=schedule.shape,
        devices=_with_receives(schedule, order),
    )


def message_of(action: Action, shape: PipelineShape) -> tuple[Action, Action, int] | None:
    """(send, receive, receiver) of a forward's or backward's result; None if it is not sent."""
    forward = action.kind is Kind.F
    other = action.stage + (1 if forward else -1)
    if action.kind not in (Kind.F, Kind.I, Kind.B) or not 0 <= other < shape.num_stages:
        return None
    row = shape.placement[action.replica]
    if row[other] == row[action.stage]:
        return None
    send = action._replace(kind=Kind.SEND_F if forward else Kind.SEND_B)
    receive = action._replace(kind=Kind.RECV_F if forward else Kind.RECV_B, stage=other)
    return send, receive, row[other]


def _with_receives(schedule: Schedule, made: list[Interval]) -> tuple[tuple[Step, ...], ...]:
    """Replay the actions in the order of their ends, so that every receive follows its send."""
    shape = schedule.shape
    lists: list[list[Step]] = [[] for _ in schedule.devices]
    waiting: list[list[Step]] = [list(reversed(steps)) for steps in schedule.devices]

    def issue_until(device: int, action: Action) -> None:
        while waiting[device]:
            item = waiting[device].pop()
            lists[device].append(item)
            if item.action == action:
                return

    for interval in made:
        issue_until(interval.device, interval.action)
        message = message_of(interval.action, shape)
        if message is not None:
            send, receive, receiver = message
            lists[interval.device].append(step(send))
            lists[receiver].append(step(receive))
    for device, rest in enumerate(waiting):
        lists[device].extend(reversed(rest))
    return tuple(tuple(items) for items in lists)
