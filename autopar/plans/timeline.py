"""The predicted timeline of a plan's step: its schedule, simulated at the plan's own prices.

In: a plan. Out: the seconds of each stage's actions, the timeline, and its trace. A pipeline is
simulated as the search did, messages included; one without these costs, or with other stages or
ranks, as in an edited plan, has no timeline. Without a pipeline it is the computation of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.base.errors import InputError
from autopar.ir.recomputation import Recomputation
from autopar.plans.parts import ModulePlan, PlanFields
from autopar.plans.stage_costs import StageCosts
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
    """Predicted seconds of each stage's actions for one micro-batch; None without prices.

    Without a pipeline there is one stage, without its communication.
    """
    if plan.is_pipeline:
        costs = _costs(plan)
        return None if costs is None else costs.durations
    if not plan.modules:
        return None
    blocks = block_seconds(plan.modules, plan.recomputed, plan.schedule.num_microbatches)
    times = {graph: sum(each[graph] for each in blocks.values()) for graph in "FIW"}
    return Durations(F=times["F"], I=times["I"], W=times["W"])


def _costs(plan: PlanFields) -> StageCosts | None:
    costs = plan.stage_costs
    return costs if costs is not None and costs.fit(schedule_of(plan)) else None


def schedule_of(plan: PlanFields) -> Schedule:
    """The pipeline's schedule; without one, that of a single stage: one micro-batch at a time."""
    found = plan.schedule.pipeline()
    if found is not None:
        return found[1]
    return build("1f1b", num_stages=1, num_microbatches=plan.schedule.num_microbatches)


def predicted_timeline(plan: PlanFields) -> Timeline | None:
    """The timeline of a step on each pipeline rank; None without prices of its stages."""
    schedule = schedule_of(plan)
    if plan.is_pipeline:
        costs = _costs(plan)
        return None if costs is None else costs.timeline(schedule)
    durations = stage_durations(plan)
    return None if durations is None else simulate(schedule, durations)


def predicted_trace(plan: PlanFields) -> str:
    """The predicted timeline as the text of a trace; raises InputError without prices."""
    timeline = predicted_timeline(plan)
    if timeline is None:
        raise InputError(
            "the plan has no prices for the blocks of its stages, so it has no timeline; make it "
            "again with autopar.plan(...)"
        )
    word = "pipeline rank" if plan.is_pipeline else "device"
    return trace_json(timeline, memory=False, word=word)
