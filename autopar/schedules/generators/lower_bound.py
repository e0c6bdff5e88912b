"""A lower bound on the time of every order of a pipeline's actions, without solving anything."""

from collections import Counter

from autopar.schedules.action import Kind
from autopar.schedules.schedule import PipelineShape
from autopar.schedules.simulate.durations import Durations


def lower_bound_s(shape: PipelineShape, durations: Durations) -> float:
    """A lower bound on the makespan of any order of F, I and W on this shape.

    For each device, the earliest arrival of its first forward plus all its work; for a micro-batch,
    its whole path. Messages are free.
    """
    table = durations.table(shape.num_stages)
    bound = sum(table[Kind.F]) + sum(table[Kind.I]) + table[Kind.W][0]
    work = [sum(parts) for parts in zip(table[Kind.F], table[Kind.I], table[Kind.W])]
    counts = Counter(map(shape.replica, range(shape.num_microbatches)))
    for device in range(shape.num_devices):
        there = shape.stages_on(device)
        total = sum(counts[replica] * work[stage] for replica, stage in there)
        head = min(sum(table[Kind.F][:stage]) for _, stage in there)
        bound = max(bound, head + total)
    return bound
