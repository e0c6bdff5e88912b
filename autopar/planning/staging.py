"""Pipelines over a strategy: where the stages begin, and the simulated time of a step.

In: a priced strategy for the mesh of one pipeline rank, and a schedule. Out: `Staged`: the stages
(by dynamic programming over the blocks' prices and the messages between them), and the schedule
simulated over their times.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.base.errors import InputError
from autopar.cost_models import CommunicationModel
from autopar.cost_models.estimate import Estimate
from autopar.ir.blocks import MIN_OPS, MIN_PART_OPS
from autopar.ir.graph import Graph
from autopar.ir.placement import local_shape
from autopar.ir.stages import Stages
from autopar.lowering.stages import stage_of_blocks, staged_blocks, stages_from_cuts
from autopar.planning.combinations import KEPT_SHARE
from autopar.planning.space import PipelineChoice
from autopar.planning.stage_prices import links_of, message_s_by_border, times_by_stage
from autopar.pricing.block_times import BlockTimes
from autopar.pricing.candidate import Candidate
from autopar.pricing.moves import added
from autopar.pricing.node_memory import late_share
from autopar.pricing.problem import Residence
from autopar.pricing.readers import reading_blocks
from autopar.schedules import (
    Durations,
    Kind,
    Links,
    PipelineShape,
    Schedule,
    Timeline,
    build,
    simulate,
    with_reductions,
)
from autopar.schedules.generators.out_of_order import STEADY_ITERATIONS
from autopar.schedules.simulate.timeline import covered_by_device, covered_s
from autopar.schedules.transforms.reductions import with_replica_sums
from autopar.search.stages import cut_chain
from autopar.sharding.strategy import Analysis


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """A simulated step: its time, and the times of the pipeline rank that computes most.

    ``rank`` is that one; what follows the schedule on it is included, and the step ends where that
    takes longest. ``communication_s`` is its exposed communication, ``hidden_s`` what
    overlaps with its computation; waiting for messages is neither, but part of the bubbles.
    ``durations`` and ``links`` were simulated, ``after_s`` are the reductions and updates by rank
    that follow the schedule. ``collectives``: the price of messages between stages and sums over
    replicas, None if there are none.
    """

    step_s: float
    forward_s: float
    backward_s: float
    communication_s: float
    hidden_s: float
    update_s: float
    bubble_share: float
    rank: int
    durations: Durations
    links: Links
    after_s: tuple[Sequence[float], Sequence[float]]
    collectives: Estimate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A schedule, its stages, and its simulated step."""

    stages: Stages
    schedule: Schedule
    times: PipelineTimes

    def blocks_on(self, rank: int, graph: Graph) -> dict[str, float]:
        """The blocks on a pipeline rank, and the fraction of the micro-batches it runs them for."""
        shape = self.schedule.shape
        held = Counter(stage for _, stage in shape.stages_on(rank))
        return {
            name: held[stage] / shape.num_replicas
            for name, stage in stage_of_blocks(self.stages, graph).items()
            if stage in held
        }


def stage(
    candidate: Candidate,
    choice: PipelineChoice,
    communication: CommunicationModel,
    crossing: Sequence[int],
) -> Staged:
    """Cut a strategy into stages and simulate the schedule; raises InputError.

    ``crossing``: the candidate's `crossing_bytes`. Reverse-first-k is simulated for every k, and
    the fastest is taken.
    """
    stages = choose_stages(candidate, choice.schedule.shape, crossing, cuts=choice.cuts)
    schedules = [choice.schedule]
    if choice.searches_k:
        num_stages, num = stages.num_stages, choice.schedule.shape.num_microbatches
        schedules = [
            build("reverse_first_k", num_stages=num_stages, num_microbatches=num, k=k)
            for k in range(num_stages + 1)
        ]
    if choice.places_sums:
        schedules = [
            with_placed_sums(candidate, stages, each, communication, crossing) for each in schedules
        ]
    found = [
        Staged(
            stages=stages,
            schedule=schedule,
            times=pipeline_times(candidate, stages, schedule, communication, crossing),
        )
        for schedule in schedules
    ]
    return min(found, key=lambda each: each.times.step_s)


def residence_of(schedule: Schedule, analysis: Analysis) -> Residence:
    """The largest fraction of weights and activations that a pipeline rank holds under a schedule.

    Stages count as equal in size. A stage that the schedule recomputes (R) holds its activations
    from R on; its inputs are neglected. Between I and W a stage holds the values that W reads.
    """
    late = analysis.derived(late_share)
    shape = schedule.shape
    weights = max(len(shape.stages_on(device)) for device in range(shape.num_devices))
    most = 0.0
    for row in schedule.devices:
        held = 0.0
        for item in row:
            action = item.action
            recomputed = action.stage in shape.recomputed
            if action.kind is Kind.R or (action.kind is Kind.F and not recomputed):
                held += action.span
            elif action.kind is Kind.I:
                held -= (1 - late) * action.span
            elif action.kind is Kind.W:
                held -= late * action.span
            elif action.kind is Kind.B:
                held -= action.span
            most = max(most, held)
    return Residence(weights=weights / shape.num_stages, activations=most / shape.num_stages)


def recomputed_residence(residence: Residence, graph: Graph) -> Residence:
    """The residence if blocks recompute what they can: one block at a time holds its activations,
    all others about `KEPT_SHARE` of them."""
    held = residence.activations * KEPT_SHARE + 1 / max(1, len(graph.blocks))
    return replace(residence, activations=min(held, residence.activations))


def choose_stages(
    candidate: Candidate,
    shape: PipelineShape,
    crossing: Sequence[int],
    *,
    cuts: tuple[str, ...] | None = None,
) -> Stages:
    """The user's stages, or those whose slowest is fastest; raises InputError."""
    graph, num_stages = candidate.priced.pricing.graph, shape.num_stages
    if cuts is not None:
        return stages_from_cuts(graph, cuts)
    names = [block.name for block in staged_blocks(graph)]
    if num_stages > len(names):
        raise InputError(
            f"num_stages={num_stages}, but a stage can begin at {len(names)} places of this "
            f"model: {', '.join(names)}; use num_stages={len(names)} or fewer. They are the "
            f"elements of an nn.ModuleList or nn.Sequential with at least {MIN_OPS} operators "
            "each, and what is between them: if that is more than a quarter of the model, its "
            f"modules with parameters, merged if they have fewer than {MIN_PART_OPS} operators"
        )
    times = times_by_stage(candidate, shape)
    message_s = message_s_by_border(candidate, shape, crossing)
    block_s = [[each.blocks[name].total_s for name in names] for each in times]
    starts = cut_chain(block_s, message_s or [0.0] * len(crossing), num_stages)
    return Stages(first_blocks=tuple(names[start] for start in starts))


def crossing_bytes(candidate: Candidate) -> list[int]:
    """Bytes that one rank sends across each possible cut, per micro-batch."""
    strategy, analysis = candidate.strategy(), candidate.priced.pricing.analysis
    graph, num = analysis.graph, candidate.num_microbatches
    blocks = staged_blocks(graph)
    place = {op.index: b for b, block in enumerate(blocks) for op in graph.block_ops(block)}
    sizes = [0] * (len(blocks) - 1)
    for value, (producer, _) in analysis.producers.items():
        users = [place[op] for op, _ in analysis.consumers.get(value, ()) if op in place]
        if producer in place and users:
            held = graph.values[value]
            shape = local_shape(held.shape, strategy.interface(held), strategy.mesh)
            size_bytes = math.prod(shape) * held.dtype.itemsize
            for cut in range(place[producer], max(users)):
                sizes[cut] += math.ceil(size_bytes / num)
    return sizes


def stage_costs(
    candidate: Candidate, stages: Stages, shape: PipelineShape, crossing: Sequence[int]
) -> tuple[Durations, Links]:
    """Seconds of the stages, and their links: what determines the order of a list schedule."""
    durations = _durations(_blocks_by_stage(candidate, stages, shape))
    return durations, links_of(candidate, stages, shape, crossing)[0]


def asynchronous_costs(
    candidate: Candidate,
    stages: Stages,
    schedule: Schedule,
    communication: CommunicationModel,
    crossing: Sequence[int],
) -> tuple[Durations, Links]:
    """`stage_costs` with the reductions (G) and updates (U) of a schedule with one stage per rank
    that has neither, as a pipeline without a flush runs them."""
    shape = schedule.shape
    stage_of = stage_of_blocks(stages, candidate.priced.pricing.graph)
    own = _own_costs(candidate, stage_of, schedule, communication)
    per_stage = _blocks_by_stage(candidate, stages, shape)
    durations = _durations(per_stage, tuple(own.move_after_s), tuple(own.update_after_s))
    return durations, links_of(candidate, stages, shape, crossing)[0]


def _blocks_by_stage(
    candidate: Candidate, stages: Stages, shape: PipelineShape
) -> list[list[BlockTimes]]:
    stage_of = stage_of_blocks(stages, candidate.priced.pricing.graph)
    times: list[list[BlockTimes]] = [[] for _ in range(stages.num_stages)]
    prices = times_by_stage(candidate, shape)
    for name, stage in stage_of.items():
        times[stage].append(prices[stage].blocks[name])
    return times


def _durations(
    per_stage: Sequence[Sequence[BlockTimes]],
    reduce_s: Sequence[float] | float = 0.0,
    update_s: Sequence[float] | float = 0.0,
) -> Durations:
    return Durations(
        F=tuple(sum(b.forward_s for b in blocks) for blocks in per_stage),
        I=tuple(sum(b.input_grad_s for b in blocks) for blocks in per_stage),
        W=tuple(sum(b.weight_grad_s for b in blocks) for blocks in per_stage),
        G=reduce_s,
        U=update_s,
    )


def with_placed_sums(
    candidate: Candidate,
    stages: Stages,
    schedule: Schedule,
    communication: CommunicationModel,
    crossing: Sequence[int],
) -> Schedule:
    """The schedule with the reductions of its replicas' gradients, placed by their prices.

    Either as soon as they are complete, or so only where bubbles hide half of them (Chimera's eager
    and eager-opt); of equally fast ones the latter, which competes less with computation.
    """
    shape = schedule.shape
    if shape.num_replicas == 1 or shape.reduces:
        return schedule
    reducing = replace(schedule, shape=replace(shape, reduces=True))
    stage_of = stage_of_blocks(stages, candidate.priced.pricing.graph)
    own = _own_costs(candidate, stage_of, reducing, communication)
    durations = _durations(_blocks_by_stage(candidate, stages, shape), tuple(own.reduce_s))
    links, _ = links_of(candidate, stages, shape, crossing)
    found = [
        with_reductions(schedule, durations, links, hidden_share=share) for share in (0.5, 0.0)
    ]
    return min(found, key=lambda each: simulate(each, durations, links).makespan_s)


# --- the step -----------------------------------------------------------------------------------
def pipeline_times(
    candidate: Candidate,
    stages: Stages,
    schedule: Schedule,
    communication: CommunicationModel,
    crossing: Sequence[int],
) -> PipelineTimes:
    """Simulate the schedule over the priced stages.

    Reductions and updates that are not actions of the schedule are added after it. If updates
    belong to the previous step, several steps are simulated in sequence.
    """
    schedule = schedule.derived(with_replica_sums)
    stage_of = stage_of_blocks(stages, candidate.priced.pricing.graph)
    per_stage = _blocks_by_stage(candidate, stages, schedule.shape)
    own = _own_costs(candidate, stage_of, schedule, communication)
    durations = _durations(per_stage, tuple(own.reduce_s), tuple(own.update_s))
    is_late = any(item.lag for row in schedule.devices for item in row)
    num_iterations = STEADY_ITERATIONS if is_late else 1
    links, messages = links_of(candidate, stages, schedule.shape, crossing)
    timeline = simulate(schedule, durations, links, num_iterations=num_iterations)
    num_devices = schedule.shape.num_devices
    last = max(range(num_devices), key=lambda d: own.move_after_s[d] + own.update_after_s[d])
    busy_s = covered_by_device(timeline.intervals, num_devices)
    busiest = max(range(num_devices), key=busy_s.__getitem__)
    spent = _spent(timeline, busiest, per_stage)
    passes = candidate.priced.pricing.num_passes
    return PipelineTimes(
        step_s=passes * (timeline.period_s + own.move_after_s[last] + own.update_after_s[last]),
        forward_s=passes * spent["forward"],
        backward_s=passes * spent["backward"],
        communication_s=passes * (spent["communication"] + own.move_after_s[busiest]),
        hidden_s=passes * spent["overlapped"],
        update_s=passes * (spent["update"] + own.update_after_s[busiest]),
        bubble_share=timeline.bubble_ratio,
        rank=busiest,
        durations=durations,
        links=links,
        after_s=(own.move_after_s, own.update_after_s),
        collectives=added(messages, own.sums),
    )


PARTS = {"backward": "BIW", "forward": "FR", "update": "U", "communication": "G"}
"""The kinds of action in each part of a step; what is done at once counts as the first of them."""


def _spent(
    timeline: Timeline, device: int, per_stage: Sequence[Sequence[BlockTimes]]
) -> dict[str, float]:
    """Seconds of a step that a pipeline rank spends on each part; overlapped reductions are their
    own.

    Where iterations overlap, those between the ends of the last two.
    """
    ends_s = timeline.iteration_ends_s
    since_s, until_s = ends_s[-2:] if len(ends_s) > 1 else (0.0, timeline.makespan_s)
    spans: dict[str, list[tuple[float, float]]] = {part: [] for part in PARTS}
    inside = dict.fromkeys(("forward", "backward"), 0.0)
    part_of = {kind: part for part, kinds in PARTS.items() for kind in kinds}
    for item in timeline.of_device(device):
        action = item.action
        if action.kind.value not in part_of:
            continue
        part, blocks = part_of[action.kind.value], per_stage[action.stage]
        span = max(item.start_s, since_s), min(item.end_s, until_s)
        if span[0] >= span[1]:
            continue
        spans[part].append(span)
        num = action.span * (span[1] - span[0]) / item.duration_s
        if part == "forward":
            inside[part] += num * sum(b.forward_communication_s for b in blocks)
        elif part == "backward" and action.kind is not Kind.W:
            inside[part] += num * sum(b.backward_communication_s for b in blocks)
    spent, before = dict[str, float](), list[tuple[float, float]]()
    for part, each in spans.items():
        spent[part] = covered_s([*before, *each]) - covered_s(before)
        before += each
    spent["overlapped"] = covered_s(spans["communication"]) - spent["communication"]
    for part, inside_s in inside.items():
        spent[part] -= inside_s
        spent["communication"] += inside_s
    return spent


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnCosts:
    """Seconds per step for moving parameters, summing them over pipeline ranks, and updating them.

    By stage for the schedule's actions G and U, by pipeline rank for what follows the schedule.
    ``sums`` is the price of the sums over pipeline ranks.
    """

    reduce_s: list[float]
    update_s: list[float]
    move_after_s: list[float]
    update_after_s: list[float]
    sums: Estimate | None


def _own_costs(
    candidate: Candidate,
    stage_of: Mapping[str, int],
    schedule: Schedule,
    communication: CommunicationModel,
) -> _OwnCosts:
    """Costs of the parameters; one used by several stages is reduced with the first of them.

    If these stages are on several pipeline ranks, it is reduced after the schedule.
    """
    size, strategy, shape = candidate.mesh.num_devices, candidate.strategy(), schedule.shape
    by_stage = times_by_stage(candidate, shape)
    on = [candidate.times_on(device) for device in range(shape.num_devices)]
    reduce_s, update_s = [0.0] * shape.num_stages, [0.0] * shape.num_stages
    move_after_s, update_after_s = [0.0] * shape.num_devices, [0.0] * shape.num_devices
    sums: Estimate | None = None
    users = _users(candidate, stage_of)
    for value, stages in users.items():
        devices = tuple(sorted({row[s] for row in shape.placement for s in stages})) or (0,)
        parameter, sum_s = strategy.graph.values[value], 0.0
        if len(devices) > 1 and parameter.differentiable:
            local = local_shape(parameter.shape, strategy.supply(parameter), strategy.mesh)
            size_bytes = math.prod(local) * parameter.stored_dtype.itemsize
            ranks = tuple(device * size for device in devices)
            total = communication.estimate("all_reduce", size_bytes, ranks)
            sum_s, sums = total.time_s, added(sums, total)
        in_stage = len(stages) == 1 or (bool(stages) and len(devices) == 1)
        if in_stage and shape.reduces:
            reduce_s[min(stages)] += by_stage[min(stages)].move_s.get(value, 0.0) + sum_s
        if in_stage and shape.updates:
            update_s[min(stages)] += by_stage[min(stages)].update_s.get(value, 0.0)
        for device in devices:
            if not (in_stage and shape.reduces):
                move_after_s[device] += on[device].move_s.get(value, 0.0) + sum_s
            if not (in_stage and shape.updates):
                update_after_s[device] += on[device].update_s.get(value, 0.0)
    return _OwnCosts(
        reduce_s=reduce_s,
        update_s=update_s,
        move_after_s=move_after_s,
        update_after_s=update_after_s,
        sums=sums,
    )


def _users(candidate: Candidate, stage_of: Mapping[str, int]) -> dict[int, set[int]]:
    """Stages that use each parameter."""
    reading = candidate.priced.pricing.analysis.derived(reading_blocks)
    return {
        parameter: {stage_of[block] for block in blocks if block in stage_of}
        for parameter, blocks in reading.items()
    }
