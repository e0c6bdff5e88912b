"""The planner: every mesh that fits the devices, the best strategy on each, the best of all.

For each factorisation of the devices into mesh axes the graph is priced and searched exactly; the
cheapest strategy wins. Its program is lowered once, over fake tensors, to count its memory; where
that exceeds the devices' memory the search is repeated under a budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from autopar.base.errors import ConstraintError, InputError
from autopar.base.gc_pause import collector_paused
from autopar.cost_models import Cluster, CommunicationModel, ComputeModel, RooflineModel
from autopar.cost_models.update import OptimizerSpec
from autopar.frontend.capture import Captured
from autopar.ir.graph import ValueKind
from autopar.ir.mesh import Mesh
from autopar.ir.placement import local_shape
from autopar.lowering import RankProgram
from autopar.lowering.pipeline import with_pipeline
from autopar.lowering.stages import Stages
from autopar.lowering.training import lower_training
from autopar.memory.program import ProgramMemory, program_memory
from autopar.plan.document import Plan, SchedulePlan, SearchReport, make_plan
from autopar.planning.baselines import Baselines, price_baselines
from autopar.planning.constraints import Constraint, MemoryBudget, narrow
from autopar.planning.meshes import MeshSizes, candidate_meshes
from autopar.planning.pipelines import (
    PipelineChoice,
    PipelineTimes,
    choose_stages,
    chosen_schedule,
    pipeline_times,
    residence_of,
)
from autopar.planning.prediction import predict, redundant_ops, search_report
from autopar.pricing.candidate import Candidate
from autopar.pricing.problem import WHOLE, NodeKind, PricedGraph, Residence, price_graph
from autopar.pricing.step_time import time_parts
from autopar.pricing.tables import Pricing
from autopar.schedules import Schedule
from autopar.search import Status, solve
from autopar.sharding.microbatches import Microbatches, analysed
from autopar.sharding.strategy import Analysis, Strategy

MAX_BUDGET_TRIALS = 6
SEARCH_LIMIT_S = 60.0
BUDGET_LIMIT_S, BUDGET_GAP = 10.0, 5e-3
MIN_EXPOSED = 1e-3
"""Of what computation hides for nothing, so that the search does not choose at random."""
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan with the strategy and the program behind it."""

    plan: Plan
    strategy: Strategy
    program: RankProgram
    best: Candidate


@collector_paused()
def make_planned(
    captured: Captured,
    cluster: Cluster,
    *,
    mesh: MeshSizes | None = None,
    constraints: Sequence[Constraint] | Constraint = (),
    compute: ComputeModel | None = None,
    communication: CommunicationModel | None = None,
    num_microbatches: int = 1,
    pipeline: PipelineChoice | None = None,
    optimizer: OptimizerSpec | None = None,
    device_type: str = "cpu",
    progress: Progress = lambda _: None,
) -> Planned:
    """Search every candidate mesh and lower the best strategy.

    In a ``pipeline`` (which says how many micro-batches there are) the strategy is searched on the
    mesh of one of its devices, then cut into stages. The ``optimizer`` is by default AdamW. Raises
    ConstraintError where the constraints, or the memory, leave no strategy.
    """
    constraints = listed(constraints)
    check_trainable(captured)
    if pipeline is not None:
        num_microbatches = pipeline.schedule.shape.num_microbatches
    captured, analysis, microbatches = analysed(captured, num_microbatches)
    num_devices = 1 if pipeline is None else pipeline.num_devices
    candidates = search_meshes(
        analysis,
        cluster,
        candidate_meshes(cluster, mesh, num_pipeline_devices=num_devices),
        microbatches=microbatches,
        residence=WHOLE if pipeline is None else residence_of(pipeline.schedule, analysis),
        constraints=constraints,
        compute=compute,
        communication=communication,
        optimizer=optimizer,
        progress=progress,
    )
    baselines = Baselines(found={}, missing={})  # of a pipeline: they would have its stages too
    if pipeline is None:
        progress("price the known strategies")
        baselines = price_baselines([c.priced for c in candidates], cheapest(candidates))
    lowering = Lowering(
        device_type=device_type,
        pipeline=pipeline,
        communication=communication or CommunicationModel(cluster),
    )
    return finish(captured, cluster, candidates, constraints, lowering, progress, baselines)


def check_trainable(captured: Captured) -> None:
    """Raise InputError for a graph without a loss."""
    if captured.graph.loss is None:
        raise InputError(
            "the model returns no scalar loss, so there is nothing to train on. Pass "
            "loss_fn=..., for example loss_fn=torch.nn.functional.cross_entropy with "
            "example_inputs=(inputs, targets), or labels that make the model return .loss"
        )
    if all(captured.graph.loss not in op.outputs for op in captured.graph.ops):
        raise InputError(
            "the loss is an input, a parameter or a constant as it is: the model computes nothing, "
            "so there is nothing to plan. Return a loss that is computed from the inputs"
        )


def listed(constraints: object) -> list[Constraint]:
    """One constraint or several as a list; raises ConstraintError for anything else."""
    given = list(constraints) if isinstance(constraints, Iterable) else [constraints]
    found: list[Constraint] = []
    for constraint in given:
        if not isinstance(constraint, Constraint):
            raise ConstraintError(
                f"constraints holds {constraint!r}, which is none of Force, Forbid, Pin and "
                "MemoryBudget; write constraints=[autopar.Force('zero3')]"
            )
        found.append(constraint)
    return found


def search_meshes(
    analysis: Analysis,
    cluster: Cluster,
    meshes: Sequence[Mesh],
    *,
    constraints: Sequence[Constraint] = (),
    compute: ComputeModel | None = None,
    communication: CommunicationModel | None = None,
    microbatches: Microbatches | None = None,
    residence: Residence = WHOLE,
    optimizer: OptimizerSpec | None = None,
    progress: Progress = lambda _: None,
) -> list[Candidate]:
    """The best strategies on each mesh, memory left out; raises ConstraintError for none.

    How much of the parameters' communication the computation hides depends on the strategy, so
    there are two searches: one counts all of it, one only what it costs where all is hidden.
    """
    compute = compute or RooflineModel(cluster.device)
    communication = communication or CommunicationModel(cluster)
    found = []
    for mesh in meshes:
        progress(f"search on mesh {mesh}")
        pricing = Pricing(
            analysis, mesh, cluster, compute, communication, microbatches, optimizer=optimizer
        )
        priced = replace(price_graph(pricing), residence=residence)
        found += [
            search_priced(priced, constraints, None, exposed=exposed)
            for exposed in _shares(cluster)
        ]
    return found


def _shares(cluster: Cluster) -> list[float]:
    """Of the communication of parameters: all, and what it costs beside enough computation."""
    hidden = max(1 - 1 / cluster.overlap_slowdown, MIN_EXPOSED)
    return [1.0] if cluster.num_devices == 1 else [1.0, hidden]


def cheapest(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest; among equals (within rounding) fewer axes, then a fixed order."""
    return min(candidates, key=_rank)


def search_priced(
    priced: PricedGraph,
    constraints: Sequence[Constraint],
    budget_bytes: float | None,
    cutoff_s: float = math.inf,
    limit_s: float = BUDGET_LIMIT_S,
    exposed: float = 1.0,
) -> Candidate:
    """The best strategy on one mesh; under a budget, any search for more than ``cutoff_s`` ends,
    and all of it after ``limit_s``."""
    problem = priced.problem(narrow(priced, constraints), budget_bytes, exposed)
    if budget_bytes is None:
        solution = solve(problem, time_limit_s=SEARCH_LIMIT_S)
    else:
        solution = solve(problem, time_limit_s=limit_s, gap=BUDGET_GAP, cutoff=cutoff_s)
    if solution.status is Status.INFEASIBLE and budget_bytes is None:
        names = " and ".join(map(str, constraints)) or "the placements"
        raise ConstraintError(f"no strategy satisfies {names} together; drop one of them")
    return Candidate(priced=priced, solution=solution, exposed=exposed)


def _search_within(
    candidates: Sequence[Candidate], constraints: Sequence[Constraint], budget_bytes: float
) -> list[Candidate]:
    """Every mesh under a budget, the most promising first; the others end once they are beaten.

    A mesh is searched again in the way that was better without the budget.
    """
    found: list[Candidate] = []
    cutoffs_s = {candidate.exposed: math.inf for candidate in candidates}
    better: dict[PricedGraph, Candidate] = {}
    for candidate in sorted(candidates, key=_rank):
        better.setdefault(candidate.priced, candidate)
    for priced, candidate in better.items():
        exposed = candidate.exposed
        cutoff_s = cutoffs_s[exposed]
        made = search_priced(priced, constraints, budget_bytes, cutoff_s, exposed=exposed)
        cutoffs_s[exposed] = min(cutoff_s, made.solution.cost * (1 - BUDGET_GAP))
        found.append(made)
    return found


def finish(
    captured: Captured,
    cluster: Cluster,
    candidates: list[Candidate],
    constraints: Sequence[Constraint],
    lowering: Lowering,
    progress: Progress,
    baselines: Baselines,
) -> Planned:
    """Lower the cheapest; under a memory limit, search again with what the count has taught."""
    limit = memory_limit(cluster, constraints)
    # A known strategy stands in where it is faster: the search ran out of time, or under a budget
    # its estimate of memory was too cautious. It obeys no constraint but the budget.
    free = all(isinstance(constraint, MemoryBudget) for constraint in constraints)
    rivals = baselines.executable() if free else []
    searched: Sequence[Candidate] = candidates
    best = cheapest([*candidates, *rivals[:1]])
    progress(f"lower on mesh {best.mesh}")
    program, memory = lowering.lowered(best)
    if not limit.fits(memory):
        progress(f"search within {limit.tensor_bytes:,} bytes")
        fit = _fit(candidates, rivals, best, memory, limit, constraints, lowering)
        searched, best, program, memory = fit.searched, fit.best, fit.program, fit.memory
    report = search_report(best, candidates, searched, baselines)
    return planned(captured, best, program, memory, report, lowering)


def planned(
    captured: Captured,
    best: Candidate,
    program: RankProgram,
    memory: ProgramMemory,
    report: SearchReport,
    lowering: Lowering,
) -> Planned:
    """The plan of a strategy that has been lowered."""
    strategy = best.strategy()
    strategy.verify()
    plan = make_plan(
        strategy,
        captured,
        best.priced.pricing.cluster,
        predict(best, memory, lowering.times(best)),
        report,
        redundant_ops(best),
        lowering.schedule_plan(best),
    )
    return Planned(plan=plan, strategy=strategy, program=program, best=best)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowering:
    """How strategies become programs: as one stage, or as the pipeline that was asked for."""

    device_type: str
    pipeline: PipelineChoice | None
    communication: CommunicationModel

    def staged(self, best: Candidate) -> tuple[Stages, Schedule] | None:
        """Where the stages begin, and what runs them; None without stages."""
        if self.pipeline is None:
            return None
        stages = choose_stages(best, self.pipeline, self.communication)
        return stages, chosen_schedule(best, stages, self.pipeline, self.communication)

    def lowered(self, best: Candidate) -> tuple[RankProgram, ProgramMemory]:
        strategy, num = best.strategy(), best.num_microbatches
        program = lower_training(strategy, num, device_type=self.device_type)
        staged = self.staged(best)
        if staged is not None:
            stages, schedule = staged
            program = with_pipeline(program, stages.of(strategy.graph), schedule)
        device = self.communication.cluster.device
        return program, program_memory(program, device, optimizer=best.priced.pricing.optimizer)

    def times(self, best: Candidate) -> PipelineTimes | None:
        """The simulated step of a pipeline."""
        staged = self.staged(best)
        return None if staged is None else pipeline_times(best, *staged, self.communication)

    def schedule_plan(self, best: Candidate) -> SchedulePlan:
        staged = self.staged(best)
        if staged is None:
            return SchedulePlan(num_microbatches=best.num_microbatches)
        return SchedulePlan.of(*staged)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """A strategy whose counted memory fits, and the searches that bound how good it is."""

    searched: Sequence[Candidate]
    best: Candidate
    program: RankProgram
    memory: ProgramMemory


def _fit(
    candidates: Sequence[Candidate],
    rivals: Sequence[Candidate],
    best: Candidate,
    memory: ProgramMemory,
    limit: MemoryLimit,
    constraints: Sequence[Constraint],
    lowering: Lowering,
) -> _Fit:
    """The cheapest strategy whose counted memory fits: searched for, or the best rival that does.

    The search counts by node (an estimate), the program by liveness (the truth), so the estimated
    budget is corrected by their ratio until the truth fits.
    """
    searched: Sequence[Candidate] = candidates
    found: _Fit | None = None
    smallest = memory
    estimated = best.estimated_bytes
    least = 0.0
    for _ in range(MAX_BUDGET_TRIALS):
        needed, available = limit.tightest(memory)
        target = max(estimated * available / needed * 0.98, least)
        tried = _search_within(candidates, constraints, target)
        feasible = [c for c in tried if c.solution.assignment]
        if not feasible:
            if least:
                break
            least = _least_budget(tried)
            continue
        searched, best = tried, cheapest(feasible)
        program, memory = lowering.lowered(best)
        if limit.fits(memory):
            found = _Fit(searched=tried, best=best, program=program, memory=memory)
            break
        smallest = min(smallest, memory, key=lambda m: m.device_bytes)
        if target <= least:  # the most frugal of all
            break
        estimated = min(target, best.estimated_bytes)
    for rival in rivals:
        if found is not None and time_parts(rival).step_s >= time_parts(found.best).step_s:
            break
        if _resident_bytes(rival) > limit.tensor_bytes:
            continue
        program, memory = lowering.lowered(rival)
        if limit.fits(memory):
            return _Fit(searched=searched, best=rival, program=program, memory=memory)
        smallest = min(smallest, memory, key=lambda m: m.device_bytes)
    if found is None:
        raise _too_small(limit, smallest)
    return found


def _least_budget(tried: Sequence[Candidate]) -> float:
    """The least estimated budget that some mesh can keep (a little more, for rounding)."""
    known = [c.solution.least_feasible_budget for c in tried]
    return min((budget for budget in known if budget is not None), default=math.inf) * (1 + 1e-9)


def _resident_bytes(candidate: Candidate) -> float:
    """What a strategy holds all the time: parameters and optimizer state. No peak is below it."""
    priced = candidate.priced
    graph, total = priced.pricing.graph, 0.0
    assignment = priced.assignment(candidate.solution.assignment)
    for decision in priced.nodes:
        value = graph.values[decision.index]
        if decision.kind == NodeKind.STORED and value.kind is ValueKind.PARAMETER:
            shape = local_shape(value.shape, assignment.stored[value.index], candidate.mesh)
            copies = 1 + priced.pricing.optimizer.num_states if value.differentiable else 1
            total += copies * math.prod(shape) * value.dtype.itemsize
    return total


def _rank(candidate: Candidate) -> tuple[float, int, tuple[int, ...]]:
    return (
        float(f"{time_parts(candidate).step_s:.9g}"),
        candidate.mesh.num_axes,
        candidate.mesh.axis_sizes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """What a device may hold: so much of tensors, which may take so much of the device."""

    tensor_bytes: int
    device_bytes: int

    def tightest(self, memory: ProgramMemory) -> tuple[int, int]:
        """What is needed and what there is, by the one of both limits that leaves less."""
        return max(
            (memory.peak_bytes, self.tensor_bytes),
            (memory.device_bytes, self.device_bytes),
            key=lambda pair: pair[0] / pair[1],
        )

    def fits(self, memory: ProgramMemory) -> bool:
        needed, available = self.tightest(memory)
        return needed <= available


def memory_limit(cluster: Cluster, constraints: Sequence[Constraint]) -> MemoryLimit:
    """Budgets are the user's for tensors, the device's own memory is for all that a step takes."""
    usable = int(cluster.usable_memory_bytes)
    budgets = [c.size_bytes for c in constraints if isinstance(c, MemoryBudget)]
    return MemoryLimit(tensor_bytes=min([usable, *budgets]), device_bytes=usable)


def _too_small(limit: MemoryLimit, memory: ProgramMemory) -> ConstraintError:
    needed, available = limit.tightest(memory)
    return ConstraintError(
        f"no strategy was found that fits {available:,} bytes a device; the smallest one tried "
        f"needs {needed:,} bytes, {memory.peak_bytes:,} of them for tensors (at {memory.peak_at}). "
        "Use more devices, a smaller batch, or a larger MemoryBudget"
    )
