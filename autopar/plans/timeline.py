"""The predicted timeline of a plan's step, at the plan's own prices.

In: a plan. Out: the seconds of each stage's actions, the timeline, and its trace. A pipeline is
simulated as the search did, messages included; one without these costs, or with other stages or
ranks, as in an edited plan, has no timeline. Without a pipeline the time of a step is a sum
(`autopar.pricing.step_time`), of which each block's part is a span of the timeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from autopar.base.errors import InputError
from autopar.ir.recomputation import Recomputation
from autopar.plans.parts import ModulePlan, PlanFields
from autopar.plans.stage_costs import StageCosts
from autopar.plans.step_trace import held_events, step_events
from autopar.pricing.step_timeline import Span, Track, step_spans
from autopar.schedules import (
    Action,
    Durations,
    Interval,
    Kind,
    Memory,
    Resource,
    Schedule,
    Timeline,
    build,
    trace_json,
)
from autopar.schedules.simulate.trace import device_names, trace_text

MOST_TURNS = 1 << 17
"""A step of more turns of blocks, in all micro-batches, has no timeline."""
_KINDS = {"F": Kind.F, "I": Kind.B, "W": Kind.B, "G": Kind.B, "H": Kind.B, "U": Kind.U}


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


def predicted_spans(plan: PlanFields) -> tuple[Span, ...] | None:
    """The spans of a step without a pipeline, block by block, on each of its devices.

    None for a pipeline, without prices, and for more than `MOST_TURNS` turns of blocks.
    """
    costs, num = plan.step_costs, plan.schedule.num_microbatches
    num_passes = plan.update.update.num_passes
    if plan.is_pipeline or costs is None or len(costs.blocks) * num * num_passes > MOST_TURNS:
        return None
    return step_spans(
        costs,
        num_microbatches=num,
        slowdown=plan.cluster.overlap_slowdown,
        num_passes=num_passes,
        stall_s=0.0 if plan.offload is None else plan.offload.stall_s,
    )


def predicted_timeline(plan: PlanFields) -> Timeline | None:
    """The actions of a step on each pipeline rank; None without prices of its stages.

    Without a pipeline they are the passes of all micro-batches, with the communication in them, and
    the update; `predicted_spans` has their parts.
    """
    schedule = schedule_of(plan)
    if plan.is_pipeline:
        costs = _costs(plan)
        return None if costs is None else costs.timeline(schedule)
    spans = predicted_spans(plan)
    if spans is None:
        return None
    return Timeline(schedule=schedule, intervals=tuple(_actions(spans)), memory=Memory())


def _actions(spans: Sequence[Span]) -> Iterator[Interval]:
    """The schedule's actions that the spans are the parts of."""
    for (kind, number), found in groupby(spans, lambda each: (_KINDS[each.graph], each.microbatch)):
        own = [span for span in found if span.graph not in ("G", "H")]
        ends_s = [span.end_s for span in own if span.track is not Track.COLLECTIVE]
        if ends_s:
            action = Action(0, kind, None if kind is Kind.U else number)
            start_s = min(span.start_s for span in own)
            yield Interval(0, Resource.MAIN, action, start_s, max(ends_s))


def predicted_trace(plan: PlanFields) -> str:
    """The predicted timeline as the text of a trace; raises InputError without prices."""
    timeline = predicted_timeline(plan)
    if timeline is None:
        raise InputError(
            "the plan has no prices for the blocks of its stages, so it has no timeline; make it "
            "again with autopar.plan(...)"
        )
    spans = predicted_spans(plan)
    if spans is None:
        return trace_json(timeline, memory=False, word="pipeline rank")
    events = step_events(timeline.intervals, spans)
    return trace_text([*device_names(1), *events, *held_events(plan.memory_curve)])
