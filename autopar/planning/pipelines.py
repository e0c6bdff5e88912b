"""Pipelines in a plan: what the user fixed, where the stages begin, and what a step then takes.

In: the schedule that was asked for, and a priced strategy for the mesh of one pipeline device. Out:
stages (by dynamic programming over the blocks' priced times and the traffic between them), and the
schedule simulated over these times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.base.errors import AutoparError, InputError
from autopar.cost_models import CommunicationModel
from autopar.ir.blocks import MIN_OPS, MIN_PART_OPS
from autopar.ir.placement import local_shape
from autopar.lowering.pipeline import check_runs, with_replica_sums
from autopar.lowering.stages import Stages, staged_blocks, stages_from_cuts
from autopar.planning.meshes import MeshSizes, known_size
from autopar.pricing.block_times import BlockTimes, StrategyTimes, block_of_ops
from autopar.pricing.candidate import Candidate
from autopar.pricing.node_memory import late_share
from autopar.pricing.problem import Residence
from autopar.schedules import (
    Durations,
    Kind,
    Links,
    Schedule,
    Timeline,
    build,
    simulate,
    verify,
    with_recomputation,
)
from autopar.schedules.generators.build import generator_of
from autopar.schedules.generators.out_of_order import STEADY_ITERATIONS
from autopar.schedules.simulate.timeline import covered_by_device
from autopar.search.stages import cut_chain
from autopar.sharding.strategy import Analysis

DEFAULT_SCHEDULE = "1f1b"
ONCE = ("gpipe", "1f1b", "zb_h1", "zb_h2", "chimera", "dualpipe")
"""Schedules of as many stages as devices."""
TWICE = ("zb_v", "v_half", "v_min")
"""Schedules of two stages a device."""
DEALT = ("interleaved", "fast_forward")
"""Schedules of any whole number of stages a device."""
PIPELINES = (*ONCE, *TWICE, *DEALT)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineChoice:
    """What the user fixed: the schedule, and where stages begin if that too.

    With ``searches_k`` the schedule is reverse-first-k, whose k is chosen by its prices.
    """

    schedule: Schedule
    cuts: tuple[str, ...] | None = None
    searches_k: bool = False

    @property
    def num_devices(self) -> int:
        return self.schedule.shape.num_devices


def pipeline_choice(
    *,
    num_stages: int | None,
    schedule: str | Schedule | None,
    num_microbatches: int | None,
    cuts: Sequence[str] | None,
    num_devices: int,
    mesh: MeshSizes | None,
    recompute: bool | None = None,
) -> PipelineChoice | None:
    """The arguments of `autopar.plan` as one value; None for a plan without a pipeline.

    Raises InputError where they contradict each other or the number of devices.
    """
    if num_stages is None and schedule is None and cuts is None:
        if recompute:
            raise InputError(
                "recompute=True without a pipeline: what is computed again is a stage, so give "
                "num_stages=..., or schedule='auto'"
            )
        return None
    made = DEFAULT_SCHEDULE if schedule is None else schedule
    if not isinstance(made, Schedule):
        _check_name(made)
    num_stages = _number_of_stages(num_stages, schedule, cuts)
    per_device = known_size(mesh) if mesh else 1
    if not isinstance(made, Schedule):
        made = _built(made, num_stages, num_microbatches or 1, num_devices // per_device)
    elif num_microbatches not in (None, made.shape.num_microbatches):
        raise InputError(
            f"num_microbatches={num_microbatches}, but the schedule {made.name!r} is for "
            f"{made.shape.num_microbatches}; leave num_microbatches out"
        )
    if recompute:
        if made.shape.num_devices == 1:
            raise InputError(
                f"recompute=True with schedule={made.name!r}: only pipelines of several devices "
                "are recomputed; leave recompute out"
            )
        made = recomputed(made)
    try:
        verify(made)
        check_runs(made)
    except AutoparError as error:
        raise InputError(f"schedule={made.name!r}: {error}") from error
    if num_devices % made.shape.num_devices:
        raise InputError(
            f"schedule {made.name!r} with {num_stages} stages takes {made.shape.num_devices} "
            f"pipeline devices, which do not divide {num_devices} devices; use a number of stages "
            "whose pipeline does"
        )
    return PipelineChoice(
        schedule=made,
        cuts=None if cuts is None else tuple(cuts),
        searches_k=schedule == "reverse_first_k",
    )


def recomputed(schedule: Schedule) -> Schedule:
    """The schedule with every stage's forward pass made again in front of its backward pass."""
    shape = schedule.shape
    return with_recomputation(schedule, set(range(shape.num_stages)).difference(shape.recomputed))


def _check_name(name: object) -> None:
    try:
        generator_of(name)
    except AutoparError as error:
        raise InputError(f"schedule={name!r}: {error}") from error


def _number_of_stages(
    num_stages: int | None, schedule: str | Schedule | None, cuts: Sequence[str] | None
) -> int:
    if isinstance(cuts, str):
        raise InputError(f"cuts is {cuts!r}; give a list of block names: cuts=[{cuts!r}]")
    if cuts is not None and not (
        isinstance(cuts, Sequence) and all(isinstance(name, str) for name in cuts)
    ):
        raise InputError(
            f"cuts is {cuts!r}; give a list of the names of blocks or modules, one for each stage "
            "but the first"
        )
    found = {
        "num_stages": num_stages,
        "cuts (one less)": None if cuts is None else len(cuts) + 1,
        "schedule": schedule.shape.num_stages if isinstance(schedule, Schedule) else None,
    }
    given = {name: number for name, number in found.items() if number is not None}
    if not given:
        raise InputError(f"schedule={schedule!r} needs num_stages=..., or cuts=[...]")
    for name, number in given.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise InputError(f"{name} is {number!r}; stages are a whole number, at least 1")
    if len(set(given.values())) > 1:
        text = ", ".join(f"{name} {number}" for name, number in given.items())
        raise InputError(f"the number of stages is given twice and differs: {text}")
    return next(iter(given.values()))


def _built(name: str, num_stages: int, num_microbatches: int, num_devices: int) -> Schedule:
    """A schedule by name; those that deal stages to devices take the devices there are."""
    options: dict[str, int] = {}
    if name in DEALT:
        options["num_devices"] = num_devices
    elif name == "conventional":
        options["reduces"] = True
    elif name == "reverse_first_k":
        options["k"] = 0  # until there are prices
    try:
        return build(name, num_stages=num_stages, num_microbatches=num_microbatches, **options)
    except AutoparError as error:
        raise InputError(
            f"schedule={name!r}: {error}. For other options pass a schedule made by "
            "autopar.schedules.build(...)"
        ) from error


def residence_of(schedule: Schedule, analysis: Analysis) -> Residence:
    """What the pipeline device that holds most holds under a schedule, by stages of equal size.

    A recomputed stage keeps its activations from R on; what enters it is left out. Between I and W
    a stage holds what W reads.
    """
    late = late_share(analysis)
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


def choose_stages(
    candidate: Candidate, choice: PipelineChoice, communication: CommunicationModel
) -> Stages:
    """Where the user cuts, or where the slowest stage is fastest; raises InputError."""
    graph = candidate.priced.pricing.graph
    if choice.cuts is not None:
        return stages_from_cuts(graph, choice.cuts)
    names = [block.name for block in staged_blocks(graph)]
    num_stages = choice.schedule.shape.num_stages
    if num_stages > len(names):
        raise InputError(
            f"num_stages={num_stages}, but a stage can begin at {len(names)} places of this model: "
            f"{', '.join(names)}; use num_stages={len(names)} or fewer. They are the elements of "
            f"an nn.ModuleList or nn.Sequential that have at least {MIN_OPS} operators each, and "
            "what lies between them: where that is more than a quarter of the model, its modules "
            f"with parameters, put together where they have fewer than {MIN_PART_OPS} operators"
        )
    times = candidate.times.blocks
    ranks = (0, candidate.mesh.num_devices)
    if choice.num_devices == 1:
        starts = cut_chain([times[n].total_s for n in names], [0.0] * (len(names) - 1), num_stages)
        return Stages(first_blocks=tuple(names[start] for start in starts))
    traffic_s = [
        2 * communication.estimate("send_recv", size_bytes, ranks).time_s if size_bytes else 0.0
        for size_bytes in _crossing_bytes(candidate)
    ]
    starts = cut_chain([times[name].total_s for name in names], traffic_s, num_stages)
    return Stages(first_blocks=tuple(names[start] for start in starts))


def _crossing_bytes(candidate: Candidate) -> list[int]:
    """Bytes of one rank's part of what crosses each possible cut, for one micro-batch."""
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


# --- the step -----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """A simulated step: of the device that computes most, and of the step as a whole."""

    step_s: float
    forward_s: float
    backward_s: float
    communication_s: float
    update_s: float
    bubble_share: float


def chosen_schedule(
    candidate: Candidate,
    stages: Stages,
    choice: PipelineChoice,
    communication: CommunicationModel,
) -> Schedule:
    """The schedule that was asked for; of reverse-first-k the one whose steps follow fastest."""
    if not choice.searches_k:
        return choice.schedule
    num_stages, num = stages.num_stages, choice.schedule.shape.num_microbatches
    made = [
        build("reverse_first_k", num_stages=num_stages, num_microbatches=num, k=k)
        for k in range(num_stages + 1)
    ]
    return min(made, key=lambda s: pipeline_times(candidate, stages, s, communication).step_s)


def pipeline_times(
    candidate: Candidate, stages: Stages, schedule: Schedule, communication: CommunicationModel
) -> PipelineTimes:
    """Simulate the schedule over the priced stages.

    What of the parameters' own costs the schedule does not have as actions comes after it. Where
    updates belong to the step before, steps follow each other.
    """
    schedule = with_replica_sums(schedule)
    times = candidate.times
    stage_of = stages.of(candidate.priced.pricing.graph)
    per_stage = [
        [times.blocks[name] for name, stage in stage_of.items() if stage == s]
        for s in range(stages.num_stages)
    ]
    own = _own_costs(candidate, stage_of, schedule, times, communication)
    durations = Durations(
        F=tuple(sum(b.forward_s for b in blocks) for blocks in per_stage),
        I=tuple(sum(b.input_grad_s for b in blocks) for blocks in per_stage),
        W=tuple(sum(b.weight_grad_s for b in blocks) for blocks in per_stage),
        G=tuple(own.reduce_s),
        U=tuple(own.update_s),
    )
    is_late = any(item.lag for row in schedule.devices for item in row)
    num_iterations = STEADY_ITERATIONS if is_late else 1
    links = _links(candidate, stages, communication)
    timeline = simulate(schedule, durations, links, num_iterations=num_iterations)
    num_devices = schedule.shape.num_devices
    last = max(range(num_devices), key=lambda d: own.move_after_s[d] + own.update_after_s[d])
    busy_s = covered_by_device(timeline.intervals, num_devices)
    busiest = max(range(num_devices), key=busy_s.__getitem__)
    spent = _spent(timeline, busiest, per_stage)
    return PipelineTimes(
        step_s=timeline.period_s + own.move_after_s[last] + own.update_after_s[last],
        forward_s=spent["forward"] / num_iterations,
        backward_s=spent["backward"] / num_iterations,
        communication_s=spent["communication"] / num_iterations + own.move_after_s[last],
        update_s=spent["update"] / num_iterations + own.update_after_s[last],
        bubble_share=timeline.bubble_ratio,
    )


def _spent(
    timeline: Timeline, device: int, per_stage: Sequence[Sequence[BlockTimes]]
) -> dict[str, float]:
    """Seconds of a device's forwards, backwards and updates, and of the communication inside."""
    spent = dict.fromkeys(("forward", "backward", "communication", "update"), 0.0)
    there = [sum(b.forward_communication_s for b in blocks) for blocks in per_stage]
    back = [sum(b.backward_communication_s for b in blocks) for blocks in per_stage]
    for item in timeline.of_device(device):
        kind, stage = item.action.kind.value, item.action.stage
        if kind in ("F", "R"):
            spent["forward"] += item.duration_s - there[stage] * item.action.span
            spent["communication"] += there[stage] * item.action.span
        elif kind in ("I", "B", "W"):
            inside = back[stage] * item.action.span if kind != "W" else 0.0
            spent["backward"] += item.duration_s - inside
            spent["communication"] += inside
        elif kind in ("G", "U"):
            spent["communication" if kind == "G" else "update"] += item.duration_s
    return spent


def _links(candidate: Candidate, stages: Stages, communication: CommunicationModel) -> Links:
    """The link between neighbours in the pipeline, and the messages between these stages."""
    names = [block.name for block in staged_blocks(candidate.priced.pricing.graph)]
    crossing = _crossing_bytes(candidate)
    sizes = [float(crossing[names.index(first) - 1]) for first in stages.first_blocks[1:]]
    largest = int(max(sizes, default=0.0))
    ranks = (0, candidate.mesh.num_devices)
    if not largest or ranks[1] >= communication.cluster.num_devices:
        return Links(message_bytes=(*sizes, 0.0))
    latency_s = communication.estimate("send_recv", 0, ranks).time_s
    whole_s = communication.estimate("send_recv", largest, ranks).time_s
    return Links(
        latency_s=latency_s,
        bandwidth_bytes_per_s=largest / max(whole_s - latency_s, 1e-12),
        message_bytes=(*sizes, 0.0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnCosts:
    """Seconds once a step for parameters: moved between placements, summed over the devices that
    hold them, updated. By stage what the schedule has as G and U, by device what comes after it."""

    reduce_s: list[float]
    update_s: list[float]
    move_after_s: list[float]
    update_after_s: list[float]


def _own_costs(
    candidate: Candidate,
    stage_of: Mapping[str, int],
    schedule: Schedule,
    times: StrategyTimes,
    communication: CommunicationModel,
) -> _OwnCosts:
    """A parameter that several stages use is reduced with the first of them, on one device; on
    several devices at the end."""
    size, strategy, shape = candidate.mesh.num_devices, candidate.strategy(), schedule.shape
    costs = _OwnCosts(
        reduce_s=[0.0] * shape.num_stages,
        update_s=[0.0] * shape.num_stages,
        move_after_s=[0.0] * shape.num_devices,
        update_after_s=[0.0] * shape.num_devices,
    )
    users = _users(candidate, stage_of)
    for value, stages in users.items():
        devices = tuple(sorted({row[s] for row in shape.placement for s in stages})) or (0,)
        parameter, move_s = strategy.graph.values[value], times.move_s.get(value, 0.0)
        if len(devices) > 1 and parameter.differentiable:
            local = local_shape(parameter.shape, strategy.supply(parameter), strategy.mesh)
            size_bytes = math.prod(local) * parameter.dtype.itemsize
            ranks = tuple(device * size for device in devices)
            move_s += communication.estimate("all_reduce", size_bytes, ranks).time_s
        in_stage = len(stages) == 1 or (bool(stages) and len(devices) == 1)
        if in_stage and shape.reduces:
            costs.reduce_s[min(stages)] += move_s
        if in_stage and shape.updates:
            costs.update_s[min(stages)] += times.update_s.get(value, 0.0)
        for device in devices:
            if not (in_stage and shape.reduces):
                costs.move_after_s[device] += move_s
            if not (in_stage and shape.updates):
                costs.update_after_s[device] += times.update_s.get(value, 0.0)
    return costs


def _users(candidate: Candidate, stage_of: Mapping[str, int]) -> dict[int, set[int]]:
    """The stages that use each parameter."""
    analysis = candidate.priced.pricing.analysis
    block_of = block_of_ops(analysis.graph)
    return {
        parameter.index: {
            stage_of[block_of[op]]
            for op, _ in analysis.consumers.get(parameter.index, ())
            if block_of[op] in stage_of
        }
        for parameter in analysis.graph.parameters
    }
