"""GPipe: all forwards, then all backwards (Huang et al., 2019). Bubble (D-1)/(N+D-1)."""

from autopar.schedules.action import Kind
from autopar.schedules.generators.shapes import chain_shape
from autopar.schedules.schedule import Schedule, schedule_of


def gpipe(*, num_stages: int, num_microbatches: int) -> Schedule:
    """One stage per device; every device holds all N activations at its peak."""
    shape = chain_shape(num_stages, num_microbatches)
    orders = [
        [shape.action(stage, kind, m) for kind in (Kind.F, Kind.B) for m in range(num_microbatches)]
        for stage in range(num_stages)
    ]
    return schedule_of("gpipe", shape, orders)
