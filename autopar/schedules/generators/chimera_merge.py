"""Chimera for more micro-batches than stages: one merged order instead of concatenated units.

Concatenated units drain and refill all pipelines between units, which at B = 2F costs more than
1F1B does. Here both directions run as one list schedule within the memory of a unit; several
priorities are tried, and the shortest simulated schedule is kept.
"""

from collections.abc import Iterator

from autopar.schedules.action import Action, Kind
from autopar.schedules.generators.list_scheduler import (
    Policy,
    Priority,
    kind_priority,
    timed_list_schedule,
)
from autopar.schedules.schedule import PipelineShape, Schedule
from autopar.schedules.simulate.durations import Durations, Links
from autopar.schedules.simulate.simulator import simulate

_SIMULATED = 3
"""How many of the shortest orders are simulated with links."""


def _priorities(shape: PipelineShape) -> Iterator[Priority]:
    yield kind_priority((Kind.B, Kind.F))
    yield kind_priority((Kind.F, Kind.B))
    depth, pipelines = shape.num_stages, shape.num_replicas

    def in_turn(weight: float, lead: float) -> Priority:
        def key(action: Action) -> tuple[float, ...]:
            place = (action.microbatch or 0) // pipelines
            step = action.stage if action.kind is Kind.F else lead + depth - 1 - action.stage
            return weight * place + step, float(action.kind is Kind.F), float(-action.stage)

        return key

    for weight in (1.0, 2.0, 3.0, 4.0):
        for lead in (0.0, depth / 2, depth, 2.0 * depth):
            yield in_turn(weight, lead)


def merged_orders(
    name: str,
    shape: PipelineShape,
    durations: Durations,
    max_activations: int,
    links: Links | None = None,
) -> Schedule:
    """The shortest list schedule with at most ``max_activations`` activations per device.

    With ``links``, on which messages queue, the shortest few are simulated.
    """
    caps = [float(max_activations)] * shape.num_devices
    found = [
        timed_list_schedule(
            name,
            shape,
            durations,
            Policy(priority=priority, split=False, max_activations=caps),
            links=links,
        )
        for priority in _priorities(shape)
    ]
    found.sort(key=lambda timed: timed[0])
    shortest = [schedule for _, schedule in found[:_SIMULATED]]
    if links is None:
        return shortest[0]
    return min(shortest, key=lambda each: simulate(each, durations, links).makespan_s)
