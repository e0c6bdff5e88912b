"""V-shaped schedules from a repeated building block (Qi et al., NeurIPS 2024).

Stages d and 2D-1-d are on device d. The forwards and input gradients of a micro-batch run at fixed
offsets from device to device; the block repeats every 6 units (two F, two I, two W of one unit
each), and W's take the units left over. The offsets determine the lifetime of an activation, and
with it the peak memory.

A block fixes each device's order up to its last forward. After that no more memory is taken, so
input gradients go first and W's fill the gaps.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import NamedTuple

from autopar.base.errors import ScheduleError
from autopar.schedules.action import Action, Kind
from autopar.schedules.generators.list_scheduler import Policy, list_schedule
from autopar.schedules.generators.shapes import require_even_stages, v_shape
from autopar.schedules.schedule import Schedule
from autopar.schedules.simulate.durations import Durations

PERIOD = 6


class DeviceBlock(NamedTuple):
    """Start units of a device's six actions for micro-batch 0, in the order of the passes."""

    forward_down: int
    forward_up: int
    input_up: int
    input_down: int
    weight_up: int
    weight_down: int

    @property
    def peak(self) -> int:
        """Peak number of activations (of a stage and micro-batch) while the block repeats."""
        lives = ((self.forward_down, self.weight_down), (self.forward_up, self.weight_up))
        return max(
            sum((unit - first) // PERIOD - (unit - last - 1) // PERIOD for first, last in lives)
            for unit in range(PERIOD)
        )


def block_of(devices: int, steps: Sequence[int], turns: Sequence[int]) -> list[DeviceBlock] | None:
    """The block on each device, or None if two actions of a device would share a unit.

    ``steps`` are the offsets in units from device to device in the four passes (F down, F up, I
    down, I up), ``turns`` the offsets from the end of a pass to the start of the next, on the
    device where they meet.
    """
    first_up = (devices - 1) * steps[0] + turns[0]
    first_back = first_up + (devices - 1) * steps[1] + turns[1]
    last_back = first_back + (devices - 1) * steps[2] + turns[2]
    blocks = []
    for device in range(devices):
        above = devices - 1 - device
        passes = (
            device * steps[0],
            first_up + above * steps[1],
            first_back + device * steps[2],
            last_back + above * steps[3],
        )
        taken = {unit % PERIOD for unit in passes}
        if len(taken) < len(passes):
            return None
        weights = []
        for unit in passes[2:]:
            weights.append(
                next(u for u in range(unit + 1, unit + PERIOD + 1) if u % PERIOD not in taken)
            )
            taken.add(weights[-1] % PERIOD)
        blocks.append(DeviceBlock(*passes, *weights))
    return blocks


def smallest_block(devices: int, steps: Sequence[int]) -> list[DeviceBlock]:
    """The block with these steps that has the least peak, then the shortest turns.

    The turn at the loss is minimized first, which gives the shortest simulated bubble.
    """
    found = []
    for turns in product(range(1, PERIOD + 1), repeat=3):
        block = block_of(devices, steps, turns)
        if block is not None:
            peak = max(row.peak for row in block)
            found.append((peak, turns[1], sum(turns), turns, block))
    if not found:
        raise ScheduleError(f"no building block with steps {tuple(steps)} fits {devices} devices")
    return min(found)[-1]


def repeat_block(
    name: str, *, num_stages: int, num_microbatches: int, steps: Sequence[int]
) -> Schedule:
    """Repeat the block over all micro-batches, and order the W's after the last forward."""
    require_even_stages(name, num_stages)
    devices = num_stages // 2
    shape = v_shape(num_stages, num_microbatches)
    units: dict[tuple[int, Kind], int] = {}
    for device, row in enumerate(smallest_block(devices, steps)):
        down, up = device, num_stages - 1 - device
        units |= {
            (down, Kind.F): row.forward_down,
            (up, Kind.F): row.forward_up,
            (up, Kind.I): row.input_up,
            (down, Kind.I): row.input_down,
            (up, Kind.W): row.weight_up,
            (down, Kind.W): row.weight_down,
        }

    def unit(action: Action) -> int:
        return units[action.stage, action.kind] + PERIOD * (action.microbatch or 0)

    edges: list[tuple[Action, Action]] = []
    for device in range(devices):
        actions = [
            Action(stage, kind, m)
            for stage in (device, num_stages - 1 - device)
            for kind in (Kind.F, Kind.I, Kind.W)
            for m in range(num_microbatches)
        ]
        edges += _kept_order(sorted(actions, key=unit))
    policy = Policy(
        priority=lambda action: (float(action.kind is Kind.W), float(unit(action))),
        extra=tuple(edges),
        patience=1.0,
    )
    return list_schedule(name, shape, Durations(F=1.0, I=1.0, W=1.0), policy)


def _kept_order(order: Sequence[Action]) -> Iterator[tuple[Action, Action]]:
    """The full order up to the last forward, and the order of the input gradients after it."""
    last = max(place for place, action in enumerate(order) if action.kind is Kind.F)
    rest = order[last + 1 :]
    yield from pairwise(order[: last + 1])
    yield from pairwise([order[last], *(action for action in rest if action.kind is Kind.I)])
    yield from ((order[last], action) for action in rest if action.kind is Kind.W)
