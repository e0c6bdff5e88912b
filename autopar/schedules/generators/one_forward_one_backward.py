"""1F1B (PipeDream-Flush, DAPPLE): a device alternates one forward and one backward.

Bubble (D-1)/(N+D-1) as in GPipe, but stage s holds at most D - s activations.
"""

from autopar.schedules.action import Action, Kind
from autopar.schedules.generators.shapes import chain_shape
from autopar.schedules.schedule import Schedule, schedule_of


def one_forward_one_backward(*, num_stages: int, num_microbatches: int) -> Schedule:
    """One stage per device; stage s runs D - 1 - s forwards before its first backward."""
    shape = chain_shape(num_stages, num_microbatches)
    orders: list[list[Action]] = []
    for stage in range(num_stages):
        ahead = min(num_stages - 1 - stage, num_microbatches)
        order = [shape.action(stage, Kind.F, m) for m in range(ahead)]
        for m in range(num_microbatches):
            if m + ahead < num_microbatches:
                order.append(shape.action(stage, Kind.F, m + ahead))
            order.append(shape.action(stage, Kind.B, m))
        orders.append(order)
    return schedule_of("1f1b", shape, orders)
