"""Interleaved 1F1B (Narayanan et al., 2021): several stages per device, micro-batches in rounds.

Stage s is on device s mod D. A round takes about D micro-batches through all stages of the device
in turn, which divides the bubble by the number of stages per device.
"""

from autopar.schedules.action import Action, Kind
from autopar.schedules.generators.shapes import looped_shape, require
from autopar.schedules.schedule import Schedule, schedule_of


def interleaved(
    *, num_stages: int, num_microbatches: int, num_devices: int | None = None
) -> Schedule:
    """``num_devices`` defaults to half the stages. N must fill whole rounds of N // (N // D)."""
    devices = num_devices if num_devices is not None else max(1, num_stages // 2)
    require(
        devices > 0 and num_stages % devices == 0,
        f"interleaved needs num_stages to be a multiple of num_devices, got {num_stages} and "
        f"{devices}",
        f"pass num_devices={_largest_divisor(num_stages, devices)}",
    )
    rounds = max(1, num_microbatches // devices)
    require(
        num_microbatches % rounds == 0,
        f"interleaved needs num_microbatches to be a multiple of its {rounds} rounds, got "
        f"{num_microbatches} on {devices} devices",
        f"use num_microbatches={devices * rounds}",
    )
    shape = looped_shape(num_stages, num_microbatches, devices)
    per_round = num_microbatches // rounds
    orders = [
        _device_order(shape.num_stages // devices, device, devices, per_round, num_microbatches)
        for device in range(devices)
    ]
    return schedule_of("interleaved", shape, orders)


def _largest_divisor(number: int, limit: int) -> int:
    return next(d for d in range(min(max(limit, 1), number), 0, -1) if number % d == 0)


def _device_order(
    chunks: int, device: int, devices: int, per_round: int, num_microbatches: int
) -> list[Action]:
    total = chunks * num_microbatches

    def unit(count: int, backward: bool) -> Action:
        """The count-th forward or backward of the device."""
        block, place = divmod(count, per_round)
        round_number, chunk = divmod(block, chunks)
        chunk = chunks - 1 - chunk if backward else chunk
        kind = Kind.B if backward else Kind.F
        return Action(chunk * devices + device, kind, round_number * per_round + place)

    ahead = min((chunks - 1) * per_round + 2 * (devices - 1 - device), total)
    order = [unit(count, False) for count in range(ahead)]
    for count in range(total):
        if count + ahead < total:
            order.append(unit(count + ahead, False))
        order.append(unit(count, True))
    return order
