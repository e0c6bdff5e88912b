"""The predicted timeline of a plan's step: its schedule, simulated at the plan's own prices.

In: a plan. Out: the seconds of each stage's actions, the timeline, and its trace. Only computation
is simulated; messages between stages are part of the plan's step time, and stages that begin at no
block of the plan, as in an edited one, have no times.
"""

from __future__ import annotations

from autopar.base.errors import InputError
from autopar.plans.blocks import stages_of_blocks
from autopar.plans.parts import PlanFields
from autopar.schedules import Durations, Schedule, Timeline, build, simulate, trace_json


def stage_durations(plan: PlanFields) -> Durations | None:
    """Predicted seconds of each stage's computation for one micro-batch; None without prices."""
    if not plan.modules:
        return None
    num, again = plan.schedule.num_microbatches, plan.recomputed
    times = [[0.0] * plan.schedule.num_stages for _ in range(3)]
    stages = stages_of_blocks(plan)
    if not stages.keys() >= set(plan.schedule.first_blocks):
        return None
    for module in plan.modules:
        stage = stages[module.block]
        parts = (module.forward_s, module.input_grad_s, module.weight_grad_s)
        for each, seconds in zip(times, parts):
            each[stage] += seconds / num
    forward, inputs, weights = times
    for block, stage in stages.items():
        inputs[stage] += again.time_s(block)
    return Durations(F=forward, I=inputs, W=weights)


def schedule_of(plan: PlanFields) -> Schedule:
    """The pipeline's schedule; without one, that of a single stage: one micro-batch at a time."""
    found = plan.schedule.pipeline()
    if found is not None:
        return found[1]
    return build("1f1b", num_stages=1, num_microbatches=plan.schedule.num_microbatches)


def predicted_timeline(plan: PlanFields) -> Timeline | None:
    """The computation of a step on each pipeline rank; None without prices of its stages."""
    durations = stage_durations(plan)
    return None if durations is None else simulate(schedule_of(plan), durations)


def predicted_trace(plan: PlanFields) -> str:
    """The predicted timeline as the text of a trace; raises InputError without prices."""
    timeline = predicted_timeline(plan)
    if timeline is None:
        raise InputError(
            "the plan has no prices for the blocks of its stages, so it has no timeline; make it "
            "again with autopar.plan(...)"
        )
    return trace_json(timeline, memory=False)
