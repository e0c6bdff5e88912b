"""The plan: everything that the search decided, as one readable JSON document.

A plan belongs to one graph (by fingerprint) and one mesh. The same inputs give a byte-identical
plan: it has no time stamps, and its keys are in graph order. Loading refuses, before anything is
allocated, an unknown version or field, a contradiction, and a plan for another graph or mesh, and
names the first difference and its JSON path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from autopar.base.documents import DocumentError, convert, load, path_of, shown, text_of
from autopar.base.errors import InputError, PlanError
from autopar.base.spelling import did_you_mean
from autopar.cost_models import Cluster
from autopar.frontend.capture import Captured
from autopar.ir.graph import Graph, ValueKind
from autopar.ir.mesh import MICROBATCH, PIPELINE, Mesh
from autopar.ir.placement import Placements, format_placements, parse_placement
from autopar.ir.recomputation import NOTHING, Recomputation
from autopar.ir.update import Clipping
from autopar.passes.batch_norm import batch_norm_of
from autopar.passes.prepare import prepare
from autopar.plans.explanation import difference, explanation
from autopar.plans.page import Page
from autopar.plans.parts import (
    MODULE_TIMES,
    GraphPlan,
    MemoryCurve,
    MeshPlan,
    ModulePlan,
    OffloadPlan,
    ParameterUse,
    PlanFields,
    PrecisionPlan,
    Prediction,
    RecomputationPlan,
    RunnerUp,
    SearchReport,
    UpdatePlan,
)
from autopar.plans.refusals import at, refused
from autopar.plans.schedule_plan import MAX_DEVICES, SchedulePlan
from autopar.plans.summary import format_summary, headline, summary_page
from autopar.plans.text import format_plan
from autopar.plans.timeline import predicted_trace
from autopar.rules import parse_choice
from autopar.sharding.strategy import Analysis, Assignment, Strategy

SCHEMA_VERSION = 9
MAX_AXES = 16


class Plan(PlanFields, frozen=True):
    """A plan: its fields, read from JSON and written as JSON, as text and as a notebook page."""

    def to_json(self, path: str | Path | None = None) -> str:
        """The plan as JSON text, also written to ``path`` if given."""
        text = msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"
        if path is not None:
            Path(path).write_text(text)
        return text

    @staticmethod
    def from_json(source: str | bytes | Path) -> Plan:
        """Read a plan from JSON text, its UTF-8 bytes, or a file; raises PlanError.

        The source need not be trusted: its size is limited, nothing in it is executed, and whatever
        can be checked without a graph (mesh, schedule, placements, choices) is checked here.
        """
        try:
            document = load(text_of(source))
            _check_version(document)
            plan = convert(document, Plan)
        except DocumentError as error:
            raise refused(error.why, error.place) from error
        _check_plan(plan)
        return plan

    def report(self, detail: str = "screen") -> str:
        """The report as text: one ``"screen"`` of at most 100 columns and 40 lines, or ``"full"``.

        Raises InputError for another detail.
        """
        if detail == "screen":
            return format_summary(self)
        if detail == "full":
            return format_plan(self)
        raise InputError(
            f"detail is {detail!r}; write plan.report() for one screen, or plan.report('full')"
        )

    def __str__(self) -> str:
        return format_summary(self)

    def __repr__(self) -> str:
        return f"<Plan {headline(self)}>"

    def _repr_html_(self) -> str:
        from autopar.plans.figures.catalog import IN_NOTEBOOKS, page_figures  # imports matplotlib

        return summary_page(self, page_figures(self, IN_NOTEBOOKS))._repr_html_()

    def figure(self, name: str) -> tuple[Any, Any]:
        """A figure and its axes, of matplotlib, neither shown nor known to ``pyplot``.

        ``name``: strategy, step, memory, memory_over_time, search, alternatives, timeline,
        activations, recomputation, kernels or offload; `autopar.plans.figures` has their numbers.
        The search is that of this process, which a plan read from JSON does not have. Raises
        InputError for another, and where the plan has nothing of it.
        """
        from autopar.plans.figures.catalog import plan_figure  # imports matplotlib

        return plan_figure(self, name)

    def save_report(self, path: str | Path) -> None:
        """Write the report as one HTML file: the screen's numbers, figures, and all details.

        It needs no other file, no network and no JavaScript.
        """
        from autopar.plans.figures.catalog import page_figures  # imports matplotlib

        text = summary_page(self, page_figures(self)).to_html()
        Path(path).write_text(text, encoding="utf-8")

    def save_trace(self, path: str | Path) -> None:
        """Write the predicted timeline as JSON, to be opened in ui.perfetto.dev."""
        Path(path).write_text(predicted_trace(self), encoding="utf-8")

    def explain(self, name: str) -> Page:
        """Explain the strategy of a module, block, parameter or op, such as ``"layers.3.mlp"``.

        Returns a page with placements, split dimensions, predicted times by direction,
        communication and memory; ``str`` of it is its text. Raises InputError for a name that the
        plan does not have.
        """
        return explanation(self, name)

    def diff(self, other: Plan) -> Page:
        """Compare this plan with another: a page of tables of all differences."""
        return difference(self, other)


def _check_version(document: object) -> None:
    version = document.get("schema_version") if isinstance(document, dict) else None
    if type(version) is not int or version != SCHEMA_VERSION:
        raise DocumentError(
            f"the plan has schema_version {shown(version)}; this version of autopar reads "
            f"{SCHEMA_VERSION}",
            "$.schema_version",
        )


def _check_plan(plan: Plan) -> None:
    """Raise PlanError for the first error that can be found without a graph."""
    plan.schedule.pipeline()
    if plan.graph.precision is not None:
        with at("graph", "precision"):
            _ = plan.graph.precision.precision
    _check_mesh(plan)
    if not plan.prediction.step_time_s > 0:
        raise refused("the time of a step must be positive", "$.prediction.step_time_s")
    with at("update"):
        _ = plan.update.update
    if plan.update.tile_bytes < 1:
        raise refused("it must be at least 1", "$.update.tile_bytes")
    if plan.scattered and (plan.is_pipeline or plan.schedule.num_microbatches == 1):
        raise refused(
            "gradients are scattered in every micro-batch where there are several, and no pipeline",
            "$.scattered",
        )
    num_axes = len(plan.mesh.axis_names)
    for field in ("inputs", "parameters", "relays"):
        for name, text in getattr(plan, field).items():
            with at(field, name):
                _check_words(text, num_axes)
                for word in text.split():
                    parse_placement(word)
    for name, text in plan.ops.items():
        with at("ops", name):
            _check_words(text, num_axes)
            parse_choice(text)
    _check_uses(plan)
    _check_recomputation(plan)
    _check_kernels(plan)
    _check_reports(plan)
    if plan.offload is not None:
        _check_offload(plan, plan.offload)


def _check_offload(plan: Plan, offload: OffloadPlan) -> None:
    found, wanted = len(offload.plans()), plan.schedule.num_devices
    if found != wanted:
        raise refused(
            f"{found} movement plans for {wanted} pipeline ranks; give each its own",
            "$.offload.ranks",
        )
    if plan.update.clipping == Clipping.SECOND_PASS:
        raise refused("nothing moves where each step runs twice; plan again", "$.offload")
    if not 0 <= offload.stall_s < math.inf:
        raise refused("it cannot be negative", "$.offload.stall_s")


def _check_uses(plan: Plan) -> None:
    """Raise PlanError unless reports can be made: uses of all parameters, valid module times."""
    num_axes = len(plan.mesh.axis_names)
    if plan.uses.keys() != plan.parameters.keys():
        name = min(plan.uses.keys() ^ plan.parameters.keys())
        lacks = "uses" if name in plan.parameters else "parameters"
        raise refused(f"{shown(name)} is missing from the plan's {lacks}", path_of((lacks, name)))
    for name, use in plan.uses.items():
        with at("uses", name):
            _check_words(use.needs, num_axes)
            for word in use.needs.split():
                parse_placement(word)
        for field in ("size_bytes", "local_bytes"):
            if getattr(use, field) < 0:
                raise refused("it cannot be negative", path_of(("uses", name, field)))
    for position, module in enumerate(plan.modules):
        with at("modules", position, "splits"):
            _check_words(module.splits, num_axes)
        for field in MODULE_TIMES:
            if not 0 <= getattr(module, field) < math.inf:
                raise refused("it cannot be negative", path_of(("modules", position, field)))


def _check_reports(plan: Plan) -> None:
    """Raise PlanError unless runner-ups and the curve of memory can be shown."""
    num_axes = len(plan.mesh.axis_names)
    for position, each in enumerate(plan.runner_ups):
        for field, choice in (("chosen", each.chosen), ("other", each.other)):
            with at("runner_ups", position, field):
                _check_words(choice.splits, num_axes)
                for text in (choice.stored, choice.needs) if choice.stored else ():
                    _check_words(text, num_axes)
        for field in ("compute_s", "communication_s"):
            if not math.isfinite(getattr(each, field)):
                raise refused("it must be finite", path_of(("runner_ups", position, field)))
    if plan.memory_curve is not None:
        plan.memory_curve.read()


def _check_recomputation(plan: Plan) -> None:
    _check_groups("recomputation", [group.blocks for group in plan.recomputation])
    for position, group in enumerate(plan.recomputation):
        for field in ("kept_bytes", "default_bytes", "time_s"):
            if not 0 <= getattr(group, field) < math.inf:
                raise refused("it cannot be negative", path_of(("recomputation", position, field)))


def _check_kernels(plan: Plan) -> None:
    _check_groups("kernels", [group.blocks for group in plan.kernels])
    for position, group in enumerate(plan.kernels):
        if len(set(group.compiled)) < len(group.compiled):
            raise refused("a graph is listed twice", path_of(("kernels", position, "compiled")))
        for field in ("eager_s", "compiled_s"):
            for phase, time_s in getattr(group, field).items():
                if not 0 <= time_s < math.inf:
                    place = path_of(("kernels", position, field, phase))
                    raise refused("it cannot be negative", place)


def _check_groups(field: str, groups: Sequence[Sequence[str]]) -> None:
    """Each block is in one group at most, and no group is empty."""
    named: set[str] = set()
    for position, blocks in enumerate(groups):
        place = path_of((field, position, "blocks"))
        if not blocks:
            raise refused("a group has at least one block", place)
        for name in blocks:
            if name in named:
                raise refused(f"block {shown(name)} is listed twice; it must be listed once", place)
            named.add(name)


def _check_words(text: str, num_axes: int) -> None:
    found = text.count(" ") + 1 if text else 0
    if found != num_axes:
        raise PlanError(
            f"{text!r} has {found} words for a mesh of {num_axes} axes; give one for each axis"
        )


def _check_mesh(plan: Plan) -> None:
    names, sizes = plan.mesh.axis_names, plan.mesh.axis_sizes
    if len(names) > MAX_AXES:
        raise refused(f"{len(names)} axes; a mesh has at most {MAX_AXES}", "$.mesh.axis_names")
    for position, name in enumerate(names):
        if name in (MICROBATCH, PIPELINE):
            raise refused(
                f"{name!r} is reserved for an axis that autopar adds itself; choose another name",
                path_of(("mesh", "axis_names", position)),
            )
    for position, size in enumerate(sizes):
        if not 1 <= size <= MAX_DEVICES:
            raise refused(
                f"an axis has 1 to {MAX_DEVICES:,} devices, not {shown(size)}",
                path_of(("mesh", "axis_sizes", position)),
            )
    with at("mesh"):
        mesh = Mesh(names, sizes)
    planned, there = mesh.num_devices * plan.schedule.num_devices, plan.cluster.num_devices
    if planned != there:
        raise refused(
            f"{plan.schedule.num_devices} pipeline ranks with a mesh of {mesh.num_devices} "
            f"devices each are {planned} devices; the plan's cluster has {there}",
            "$.mesh.axis_sizes",
        )


def make_plan(
    strategy: Strategy,
    captured: Captured,
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
) -> Plan:
    """Assemble the plan of a strategy."""
    graph, assignment = strategy.graph, strategy.assignment
    return Plan(
        schema_version=SCHEMA_VERSION,
        graph=_describe(graph, captured),
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
        recomputation=RecomputationPlan.of(recomputation),
        offload=offload,
    )


def _describe(graph: Graph, captured: Captured) -> GraphPlan:
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
        precision=None if captured.precision is None else PrecisionPlan.of(captured.precision),
    )


def strategy_of(plan: Plan, captured: Captured, num_devices: int | None = None) -> Strategy:
    """The strategy that a plan describes, on the graph it was made for; raises PlanError.

    The batch norm of the captured graph is set to what the plan was made with.
    """
    prepared = prepare(captured, plan.graph.batch_norm)
    with at("schedule", "num_microbatches"):
        captured, analysis, microbatches = prepared.cut(plan.schedule.num_microbatches)
    graph, mesh = captured.graph, plan.device_mesh
    _check_graph(plan, _describe(graph, captured))
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
            staged[0].of(graph)
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
