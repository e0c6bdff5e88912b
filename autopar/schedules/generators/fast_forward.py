"""Gradient fast-forwarding with modulo allocation (Oh et al., EuroSys 2022).

Stages are layers. Groups of ``group_size`` adjacent layers are assigned to the devices round-robin,
so every device is busy early. A group sends its input gradients before it runs any W; all its W's
of micro-batch m precede its first backward of m + 1; at most ``in_flight`` micro-batches are
between their first forward and their last input gradient.

The rule on W's applies per group: applied to all groups of a device it would keep a micro-batch
from starting its backward before the previous one has finished.
"""

from autopar.schedules.action import Action, Kind
from autopar.schedules.generators.list_scheduler import Policy, kind_priority, list_schedule
from autopar.schedules.generators.shapes import looped_shape, require
from autopar.schedules.schedule import PipelineShape, Schedule
from autopar.schedules.simulate.durations import Durations, Links

Edges = list[tuple[Action, Action]]


def fast_forward(
    *,
    num_stages: int,
    num_microbatches: int,
    num_devices: int | None = None,
    group_size: int = 1,
    in_flight: int | None = None,
    durations: Durations | None = None,
    links: Links | None = None,
) -> Schedule:
    """``num_devices`` defaults to half the stages, ``in_flight`` to the number of devices.

    ``durations`` (default F = I = W = 1) and ``links`` determine the order of ready actions.
    """
    devices = num_devices if num_devices is not None else max(1, num_stages // 2)
    require(group_size >= 1, f"group_size={group_size} is less than one layer", "use group_size=1")
    groups = -(-num_stages // group_size)
    require(
        1 <= devices <= groups,
        f"fast_forward needs at least one group of layers per device, got {num_stages} layers in "
        f"{groups} groups on {devices} devices",
        f"use num_devices={min(max(devices, 1), groups)}",
    )
    limit = devices if in_flight is None else in_flight
    require(limit >= 1, f"in_flight={limit} lets nothing start", "use in_flight=num_devices")
    shape = looped_shape(num_stages, num_microbatches, devices, group_size)
    policy = Policy(
        priority=kind_priority((Kind.I, Kind.F, Kind.W)),
        extra=(*_weights_before_next(shape, group_size), *_admission(shape, limit)),
    )
    costs = durations or Durations(F=1.0, I=1.0, W=1.0)
    return list_schedule("fast_forward", shape, costs, policy, links=links)


def _weights_before_next(shape: PipelineShape, group_size: int) -> Edges:
    """In each group, all W's of a micro-batch precede the first backward of the next."""
    edges: Edges = []
    for start in range(0, shape.num_stages, group_size):
        stages = range(start, min(start + group_size, shape.num_stages))
        for m in range(shape.num_microbatches - 1):
            first = shape.action(stages[-1], Kind.I, m + 1)
            edges += [(shape.action(stage, Kind.W, m), first) for stage in stages]
    return edges


def _admission(shape: PipelineShape, in_flight: int) -> Edges:
    return [
        (shape.action(0, Kind.I, m), shape.action(0, Kind.F, m + in_flight))
        for m in range(shape.num_microbatches - in_flight)
    ]
