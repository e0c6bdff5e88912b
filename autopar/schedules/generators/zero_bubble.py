"""The common part of ZB-H1 and ZB-H2: 1F1B with a split backward and W delayed by a fixed distance.

Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024). Stage s runs some forwards ahead, sends
each input gradient at once, and runs W of micro-batch m after I of micro-batch m + delay, so that
W's fill the bubbles at the start and end of 1F1B.
"""

from collections.abc import Callable

from autopar.schedules.action import Action, Kind
from autopar.schedules.generators.shapes import chain_shape
from autopar.schedules.schedule import Schedule, schedule_of


def delayed_weights(
    name: str,
    *,
    num_stages: int,
    num_microbatches: int,
    forwards_ahead: Callable[[int], int],
    weight_delay: Callable[[int], int],
) -> Schedule:
    """One stage per device; ``forwards_ahead`` and ``weight_delay`` are functions of the stage."""
    shape = chain_shape(num_stages, num_microbatches)
    orders: list[list[Action]] = []
    for stage in range(num_stages):
        ahead = min(forwards_ahead(stage), num_microbatches)
        delay = min(weight_delay(stage), num_microbatches)
        order = [shape.action(stage, Kind.F, m) for m in range(ahead)]
        for m in range(num_microbatches):
            if m + ahead < num_microbatches:
                order.append(shape.action(stage, Kind.F, m + ahead))
            order.append(shape.action(stage, Kind.I, m))
            if m >= delay:
                order.append(shape.action(stage, Kind.W, m - delay))
        first_left = num_microbatches - delay
        order += [shape.action(stage, Kind.W, m) for m in range(first_left, num_microbatches)]
        orders.append(order)
    return schedule_of(name, shape, orders)
