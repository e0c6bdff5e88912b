"""Stages that begin inside a layer: whether a pipeline whose blocks are divided may be faster.

In: an option whose stages hold whole blocks, and the blocks that can be divided. Out: an estimate
of its step with stages as even as these allow.
"""

from __future__ import annotations

from autopar.ir.graph import Graph
from autopar.lowering.stages import stage_of_blocks, staged_blocks
from autopar.planning.option import Option
from autopar.planning.stage_prices import times_by_stage

LEAST_GAIN = 0.02
"""Divided blocks are searched if they may save at least this share of a step."""


def even_step_s(option: Option, divided: Graph) -> float:
    """A pipeline's step if its slowest rank had the mean of all, or the heaviest whole block.

    That rank sets the pace of a step, and the others only its ends: under 1F1B no stages cut from
    the blocks of ``divided`` make a step shorter in greater proportion than that rank's work. Under
    other schedules, and on unequal islands, it is an estimate.
    """
    assert option.staged is not None
    shape, graph = option.staged.schedule.shape, option.best.priced.pricing.graph
    per_stage = times_by_stage(option.best, shape)
    stage_s, whole_s = [0.0] * shape.num_stages, 0.0
    parts = {block.name: (block.start, block.stop) for block in divided.blocks}
    stage_of = stage_of_blocks(option.staged.stages, graph)
    for block in staged_blocks(graph):
        stage = stage_of[block.name]
        time_s = per_stage[stage].blocks[block.name].total_s
        stage_s[stage] += time_s
        if parts[block.name] == (block.start, block.stop):
            whole_s = max(whole_s, time_s / shape.num_replicas)
    loads_s = [
        sum(stage_s[stage] for _, stage in shape.stages_on(rank)) / shape.num_replicas
        for rank in range(shape.num_devices)
    ]
    mean_s, slowest_s = sum(loads_s) / len(loads_s), max(loads_s)
    return option.time_s * max(mean_s, whole_s) / slowest_s if slowest_s else option.time_s
