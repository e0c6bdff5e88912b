"""GEMS (Jain et al., SC 2020): two pipelines in opposite directions, one micro-batch in each.

Stage s of the first pipeline is on device s, of the second on device D-1-s. The forward of a
micro-batch follows the backward of the one before through the devices, so every device alternates
between forwards and backwards. A micro-batch takes D + 1 slots where a forward and a backward take
one each, 2D + 1 where a backward takes two: bubbles of (D-1)/(D+1) and (D-1)/(D+1/2), the most of
all schedules, at one activation per pipeline, the least.
"""

from autopar.schedules.action import Kind
from autopar.schedules.generators.chimera import chimera_shape
from autopar.schedules.schedule import Schedule, schedule_of


def gems(*, num_stages: int, num_microbatches: int) -> Schedule:
    """The micro-batches in turn down one pipeline and up the other."""
    shape = chimera_shape(num_stages, num_microbatches, 2, name="gems")
    orders = [
        [
            shape.action(shape.placement[shape.replica(m)].index(device), kind, m)
            for m in range(num_microbatches)
            for kind in (Kind.F, Kind.B)
        ]
        for device in range(num_stages)
    ]
    return schedule_of("gems", shape, orders)
