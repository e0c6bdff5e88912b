"""ZB-V: zero bubble at 1F1B's memory, with a V of two stages per device (Qi et al., ICLR 2024).

Device d has stage d (down the devices) and stage 2D-1-d (back up), so device 0 sees both ends of
the model and no device waits long for its first gradient. With F = I = W and N >= 2D-1 no device
idles between its first and last action.
"""

from autopar.schedules.action import Action, Kind
from autopar.schedules.generators.shapes import require_even_stages, v_shape
from autopar.schedules.schedule import Schedule, schedule_of


class _Writer:
    """Appends the next action of a stage and kind; actions past N are omitted."""

    def __init__(self, stages: tuple[int, int], num_microbatches: int) -> None:
        self.stages = stages
        self.num_microbatches = num_microbatches
        self.order: list[Action] = []
        self.done = {(half, kind): 0 for half in (0, 1) for kind in (Kind.F, Kind.I, Kind.W)}

    def write(self, half: int, *kinds: Kind) -> None:
        for kind in kinds:
            m = self.done[half, kind]
            self.done[half, kind] = m + 1
            if m < self.num_microbatches:
                self.order.append(Action(self.stages[half], kind, m))


def zb_v(*, num_stages: int, num_microbatches: int) -> Schedule:
    """``num_stages`` is twice the number of devices. Raises ScheduleError if it is odd."""
    require_even_stages("zb_v", num_stages)
    devices = num_stages // 2
    shape = v_shape(num_stages, num_microbatches)
    orders = [_device_order(device, devices, num_microbatches) for device in range(devices)]
    return schedule_of("zb_v", shape, orders)


def _device_order(device: int, devices: int, num_microbatches: int) -> list[Action]:
    forward, inputs, weights = Kind.F, Kind.I, Kind.W
    below = devices - device  # devices from here to the turn of the V, this one included
    full = max(num_microbatches, 2 * devices - 1)
    writer = _Writer((device, 2 * devices - 1 - device), num_microbatches)
    for _ in range(2 * below - 1):
        writer.write(0, forward)
    for _ in range(device):
        writer.write(1, forward)
        writer.write(0, forward)
    for _ in range(below):
        writer.write(1, forward, inputs, weights)
    while writer.done[1, forward] < full:
        if writer.done[0, forward] < full:
            writer.write(0, forward)
        writer.write(0, inputs, weights)
        writer.write(1, forward, inputs, weights)
    for _ in range(device):
        writer.write(0, inputs)
        writer.write(1, inputs)
    for _ in range(below):
        writer.write(0, inputs, weights)
    for half in (1, 0):
        while writer.done[half, weights] < full:
            writer.write(half, weights)
    return writer.order
