"""Between a plan and the graph that it is for: a plan of a strategy, and the strategy of a plan.

In: a strategy and its numbers, or a plan and a captured model. Out: the plan, or the strategy on
that graph. A plan for another graph or mesh is refused: the first difference and its JSON path.
"""

from __future__ import annotations

import math

from autopar.base.documents import path_of, shown
from autopar.base.spelling import did_you_mean
from autopar.cost_models import Cluster
from autopar.frontend.capture import Captured
from autopar.ir.choice import parse_choice
from autopar.ir.graph import Graph, ValueKind
from autopar.ir.placement import Placements, format_placements, parse_placement
from autopar.ir.recomputation import NOTHING, Recomputation
from autopar.lowering.stages import stage_of_blocks
from autopar.passes.batch_norm import batch_norm_of
from autopar.passes.prepare import prepare
from autopar.plans.document import SCHEMA_VERSION, Plan
from autopar.plans.parts import (
    GraphPlan,
    MeshPlan,
    ModulePlan,
    OffloadPlan,
    ParameterUse,
    PrecisionPlan,
    RecomputationPlan,
    RunnerUp,
    SearchReport,
    UpdatePlan,
)
from autopar.plans.predicted import MemoryCurve, Prediction
from autopar.plans.refusals import at, refused
from autopar.plans.schedule_plan import SchedulePlan
from autopar.plans.stage_costs import StageCosts
from autopar.pricing.step_costs import StepCosts
from autopar.sharding.strategy import Analysis, Assignment, Strategy


def make_plan(
    strategy: Strategy,
    captured: Captured,
    block_cuts: tuple[str, ...],
    cluster: Cluster,
    prediction: Prediction,
    search: SearchReport,
    redundant_ops: dict[str, int],
    schedule: SchedulePlan,
    update: UpdatePlan,
    recomputation: Recomputation = NOTHING,
    offload: OffloadPlan | None = None,
    *,
    uses: dict[str, ParameterUse],
    modules: tuple[ModulePlan, ...],
    runner_ups: tuple[RunnerUp, ...] = (),
    curve: MemoryCurve | None = None,
    stage_costs: StageCosts | None = None,
    step_costs: StepCosts | None = None,
) -> Plan:
    """Assemble the plan of a strategy."""
    graph, assignment = strategy.graph, strategy.assignment
    return Plan(
        schema_version=SCHEMA_VERSION,
        graph=_describe(graph, captured, block_cuts),
        cluster=cluster,
        mesh=MeshPlan(axis_names=assignment.mesh.axis_names, axis_sizes=assignment.mesh.axis_sizes),
        schedule=schedule,
        update=update,
        prediction=prediction,
        search=search,
        redundant_ops=redundant_ops,
        inputs={
            name: format_placements(strategy.supply(graph.values[index]))
            for name, index in zip(captured.signature.input_names, graph.inputs)
        },
        parameters={
            v.target or v.name: format_placements(strategy.supply(v)) for v in graph.parameters
        },
        released=tuple(
            v.target or v.name
            for v in graph.parameters
            if v.index in assignment.released and strategy.is_gathered(v)
        ),
        scattered=tuple(
            v.target or v.name
            for v in graph.parameters
            if v.index in assignment.scattered and strategy.is_reduce_scattered(v)
        ),
        relays={
            graph.values[i].name: format_placements(assignment.relays[i])
            for i in sorted(assignment.relays)
        },
        ops={
            op.name: str(choice)
            for op, choice in zip(graph.ops, assignment.choices)
            if not choice.is_redundant
        },
        uses=uses,
        modules=modules,
        runner_ups=runner_ups,
        memory_curve=curve,
        stage_costs=stage_costs,
        step_costs=step_costs,
        recomputation=RecomputationPlan.of(recomputation),
        offload=offload,
    )


def _describe(graph: Graph, captured: Captured, block_cuts: tuple[str, ...]) -> GraphPlan:
    return GraphPlan(
        fingerprint=graph.fingerprint,
        num_ops=len(graph.ops),
        num_parameters=sum(math.prod(v.shape) for v in graph.parameters),
        parameter_bytes=sum(v.stored_bytes for v in graph.parameters),
        inputs={
            name: f"{str(dtype).removeprefix('torch.')}{list(shape)}"
            for name, shape, dtype in zip(
                captured.signature.input_names,
                captured.signature.input_shapes,
                captured.signature.input_dtypes,
            )
        },
        batch_norm=batch_norm_of(graph).value,
        shared=graph.shared,
        block_cuts=block_cuts,
        unused=tuple(v.target or v.name for v in graph.unused),
        precision=None if captured.precision is None else PrecisionPlan.of(captured.precision),
        full_masks=captured.signature.full_masks,
    )


def strategy_of(plan: Plan, captured: Captured, num_devices: int | None = None) -> Strategy:
    """The strategy that a plan describes, on the graph it was made for; raises PlanError.

    The batch norm and the blocks of the captured graph are set to what the plan was made with.
    """
    prepared, block_cuts = prepare(captured, plan.graph.batch_norm), plan.graph.block_cuts
    with at("schedule", "num_microbatches"):
        prepared.cut(plan.schedule.num_microbatches)
    with at("graph", "block_cuts"):
        captured, analysis, microbatches = prepared.cut(plan.schedule.num_microbatches, block_cuts)
    graph, mesh = captured.graph, plan.device_mesh
    _check_graph(plan, _describe(graph, captured, block_cuts))
    planned = mesh.repeated(plan.schedule.num_devices)
    if num_devices is not None and num_devices != planned.num_devices:
        raise refused(
            f"the plan is for {planned.num_devices} devices ({planned}), but there are "
            f"{num_devices}; pass that many devices, or make a new plan",
            "$.mesh",
        )
    strategy = Strategy(analysis, _assignment(plan, captured, analysis))
    _check_strategy(plan, strategy)
    staged = plan.schedule.pipeline()
    if staged is not None:
        with at("schedule", "first_blocks"):
            stage_of_blocks(staged[0], graph)
    if microbatches is not None:
        with at("schedule", "num_microbatches"):
            microbatches.cut(strategy)
    blocks = [block.name for block in graph.blocks]
    for field in ("recomputation", "kernels"):
        for position, group in enumerate(getattr(plan, field)):
            for name in group.blocks:
                if name not in blocks:
                    raise refused(
                        f"{shown(name)} is no block of the graph" + did_you_mean(name, blocks),
                        path_of((field, position, "blocks")),
                    )
    return strategy


def _assignment(plan: Plan, captured: Captured, analysis: Analysis) -> Assignment:
    graph, mesh = captured.graph, plan.device_mesh
    names = {op.name for op in graph.ops}
    for name in plan.ops:
        if name not in names:
            raise refused(
                f"the plan splits op {shown(name)}, which is not in the graph"
                + did_you_mean(name, names),
                "$.ops",
            )
    everywhere = " ".join("-" * mesh.num_axes)
    inputs = dict(zip(captured.signature.input_names, graph.inputs))
    relayed = {graph.values[i].name: i for i in sorted(analysis.relayed)}
    return Assignment(
        mesh=mesh,
        choices=tuple(parse_choice(plan.ops.get(op.name, everywhere)) for op in graph.ops),
        stored={
            **_placements("parameters", plan.parameters, _parameters(graph)),
            **_placements("inputs", plan.inputs, inputs),
        },
        relays=_placements("relays", plan.relays, relayed),
        released=_named(plan, "released", _parameters(graph)),
        scattered=_named(plan, "scattered", _parameters(graph)),
    )


def _named(plan: Plan, field: str, parameters: dict[str, int]) -> frozenset[int]:
    """The parameters that a field lists."""
    names: tuple[str, ...] = getattr(plan, field)
    for place, name in enumerate(names):
        if name not in parameters:
            raise refused(
                f"{shown(name)} is {field}, but it is no parameter of the graph"
                + did_you_mean(name, parameters),
                path_of((field, place)),
            )
    return frozenset(parameters[name] for name in names)


def _parameters(graph: Graph) -> dict[str, int]:
    return {v.target or v.name: v.index for v in graph.parameters}


def _check_strategy(plan: Plan, strategy: Strategy) -> None:
    """Like `Strategy.verify`, with the JSON path of the first invalid decision."""
    graph, assignment = strategy.graph, strategy.assignment
    for op in graph.ops:
        with at("ops", op.name):
            strategy.verify_choice(op)
    for value in graph.values:
        field = "inputs" if value.kind is ValueKind.INPUT else "parameters"
        if value.index in assignment.stored:
            with at(field, value.target or value.name):
                strategy.verify_stored(value)
        if value.index in assignment.relays:
            with at("relays", value.name):
                strategy.verify_relay(value)


def _check_graph(plan: Plan, found: GraphPlan) -> None:
    """Raise PlanError with the first property in which the model differs from the plan's."""
    for name in (
        "batch_norm",
        "precision",
        "inputs",
        "full_masks",
        "num_parameters",
        "num_ops",
        "parameter_bytes",
        "fingerprint",
    ):
        expected, actual = getattr(plan.graph, name), getattr(found, name)
        if expected != actual:
            raise refused(
                f"the plan was made for another graph: {name} is {actual!r} here and "
                f"{expected!r} in the plan. Make a new plan for this model and these inputs",
                f"$.graph.{name}",
            )


def _placements(field: str, texts: dict[str, str], index: dict[str, int]) -> dict[int, Placements]:
    for name in sorted(set(index) ^ set(texts)):
        lacks, other = ("plan", texts) if name in index else ("graph", index)
        raise refused(
            f"{shown(name)} is missing from the {lacks}" + did_you_mean(name, other),
            path_of((field, name)),
        )
    return {
        index[name]: tuple(parse_placement(word) for word in text.split())
        for name, text in texts.items()
    }
