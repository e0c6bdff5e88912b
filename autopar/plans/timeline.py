"""The predicted timeline of a plan's step: its schedule, simulated at the plan's own prices.

In: a plan. Out: the seconds of each stage's actions, the timeline, and its trace. Only computation
is simulated; messages between stages are part of the plan's step time, and stages that begin at no
block of the plan, as in an edited one, have no times.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.base.errors import InputError
from autopar.ir.recomputation import Recomputation
from autopar.plans.blocks import stages_of_blocks
from autopar.plans.parts import ModulePlan, PlanFields
from autopar.schedules import Durations, Schedule, Timeline, build, simulate, trace_json


def block_seconds(
    modules: Sequence[ModulePlan], recomputation: Recomputation, num_microbatches: int
) -> dict[str, dict[str, float]]:
    """The predicted seconds of each block's computation for one micro-batch, by its graph F, I, W;
    what is recomputed is part of I."""
    found: dict[str, dict[str, float]] = {}
    for module in modules:
        times = found.setdefault(module.block, {"F": 0.0, "I": 0.0, "W": 0.0})
        times["F"] += module.forward_s / num_microbatches
        times["I"] += module.input_grad_s / num_microbatches
        times["W"] += module.weight_grad_s / num_microbatches
    for block, times in found.items():
        times["I"] += recomputation.time_s(block)
    return found


def stage_durations(plan: PlanFields) -> Durations | None:
    """Predicted seconds of each stage's computation for one micro-batch; None without prices."""
    if not plan.modules:
        return None
    stages = stages_of_blocks(plan)
    if not stages.keys() >= set(plan.schedule.first_blocks):
        return None
    times = {graph: [0.0] * plan.schedule.num_stages for graph in "FIW"}
    blocks = block_seconds(plan.modules, plan.recomputed, plan.schedule.num_microbatches)
    for block, seconds in blocks.items():
        for graph, time_s in seconds.items():
            times[graph][stages[block]] += time_s
    return Durations(F=times["F"], I=times["I"], W=times["W"])


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
