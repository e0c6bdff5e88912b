"""V-shaped schedules from a repeated building block (Qi et al., NeurIPS 2024).

Stages d and 2D-1-d are on device d. One micro-batch's forwards and input gradients run at fixed
distances from device to device; the block repeats every 6 units (two F, two I, two W of one unit),
W's take the units left over. The distances decide how long an activation lives, so they decide the
peak memory; once the order is fixed, actions run as early as they can.
"""

from collections.abc import Sequence

from autopar.errors import ScheduleError
from autopar.schedules.action import Action, Kind
from autopar.schedules.schedule import Schedule, schedule_of
from autopar.schedules.shapes import require_even_stages, v_shape

PERIOD = 6


def block_starts(devices: int, steps: Sequence[int], turns: Sequence[int]) -> list[list[int]]:
    """Start units of (F down, F up, I down, I up) a device, for micro-batch 0.

    ``steps`` are the distances from device to device in the four passes, ``turns`` the distances
    from the end of a pass to the start of the next, on the device where they meet.
    """
    first_up = (devices - 1) * steps[0] + turns[0]
    first_back = first_up + (devices - 1) * steps[1] + turns[1]
    last_back = first_back + (devices - 1) * steps[2] + turns[2]
    return [
        [
            device * steps[0],
            first_up + (devices - 1 - device) * steps[1],
            first_back + device * steps[2],
            last_back + (devices - 1 - device) * steps[3],
        ]
        for device in range(devices)
    ]


def fitting_block(devices: int, steps: Sequence[int]) -> list[list[int]]:
    """The block with the shortest turns in which no device has two actions in one unit."""
    choices = sorted(
        ((a, b, c) for a in range(1, 7) for b in range(1, 7) for c in range(1, 7)),
        key=lambda turns: (sum(turns), turns),
    )
    for turns in choices:
        starts = block_starts(devices, steps, turns)
        if all(len({unit % PERIOD for unit in row}) == 4 for row in starts):
            return starts
    raise ScheduleError(f"no building block with steps {tuple(steps)} fits {devices} devices")


def repeat_block(
    name: str, *, num_stages: int, num_microbatches: int, steps: Sequence[int]
) -> Schedule:
    """Repeat the block over all micro-batches and read off each device's order."""
    require_even_stages(name, num_stages)
    devices = num_stages // 2
    shape = v_shape(num_stages, num_microbatches)
    orders = [
        _device_order(row, (device, num_stages - 1 - device), num_microbatches)
        for device, row in enumerate(fitting_block(devices, steps))
    ]
    return schedule_of(name, shape, orders)


def _device_order(
    row: Sequence[int], stages: tuple[int, int], num_microbatches: int
) -> list[Action]:
    down, up = stages
    timed = [
        (row[0], Action(down, Kind.F, 0)),
        (row[1], Action(up, Kind.F, 0)),
        (row[2], Action(up, Kind.I, 0)),
        (row[3], Action(down, Kind.I, 0)),
    ]
    taken = {unit % PERIOD for unit in row}
    for stage, input_unit in ((up, row[2]), (down, row[3])):
        unit = input_unit + 1
        while unit % PERIOD in taken:
            unit += 1
        taken.add(unit % PERIOD)
        timed.append((unit, Action(stage, Kind.W, 0)))
    every = [
        (unit + PERIOD * m, action._replace(microbatch=m))
        for m in range(num_microbatches)
        for unit, action in timed
    ]
    return [action for _, action in sorted(every)]
