"""The plan: everything the search decided, as one JSON document that people can read.

A plan belongs to one graph (by fingerprint) and one mesh. It is byte-identical for the same
inputs: it holds no time stamps, and its keys are in graph order. Loading refuses an unknown
version, an unknown field, and a plan for another graph or mesh, naming the first difference,
before anything is allocated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from autopar.base.errors import PlanError, ScheduleError
from autopar.cost_models import Cluster
from autopar.frontend.capture import Captured
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements, format_placements, parse_placement
from autopar.lowering.stages import Stages
from autopar.passes.batch_norm import batch_norm_of, with_batch_norm
from autopar.rules import parse_choice
from autopar.schedules import Schedule, format_schedule, parse_schedule
from autopar.sharding.microbatches import analysed
from autopar.sharding.strategy import Assignment, Strategy

SCHEMA_VERSION = 5


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of everything on the wire."""


class MeshPlan(_Struct, frozen=True):
    """Axis names and sizes, outermost first."""

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]


class GraphPlan(_Struct, frozen=True):
    """The graph a plan was made for; ``fingerprint`` is what must match.

    ``batch_norm``: whose statistics it trains with, see `autopar.passes.batch_norm`.
    """

    fingerprint: str
    num_ops: int
    num_parameters: int
    parameter_bytes: int
    inputs: dict[str, str]
    batch_norm: Literal["global", "local"]


class SchedulePlan(_Struct, frozen=True):
    """The backward schedule and its size.

    Of a pipeline ``first_blocks`` names the block that each stage begins with, and ``actions`` is
    the schedule's text, line by line (`autopar.schedules.format_schedule`); the mesh is that of
    each of its ``num_devices``.
    """

    name: str = "conventional"
    num_stages: int = 1
    num_devices: int = 1
    num_microbatches: int = 1
    first_blocks: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()

    @staticmethod
    def of(stages: Stages, schedule: Schedule) -> SchedulePlan:
        return SchedulePlan(
            name=schedule.name,
            num_stages=stages.num_stages,
            num_devices=schedule.shape.num_devices,
            num_microbatches=schedule.shape.num_microbatches,
            first_blocks=stages.first_blocks,
            actions=tuple(format_schedule(schedule).splitlines()),
        )

    def pipeline(self) -> tuple[Stages, Schedule] | None:
        """The stages and the schedule that runs them; None without a pipeline. Raises PlanError."""
        if not self.first_blocks and not self.actions and self.num_stages == 1:
            return None
        if len(self.first_blocks) != self.num_stages:
            raise PlanError(
                f"the plan's first_blocks names {len(self.first_blocks)} blocks, but its schedule "
                f"has {self.num_stages} stages; name the block that each of them begins with"
            )
        try:
            schedule = parse_schedule("\n".join(self.actions) + "\n")
        except ScheduleError as error:
            raise PlanError(f"the plan's schedule cannot be read: {error}") from error
        shape = schedule.shape
        found = (shape.num_stages, shape.num_devices, shape.num_microbatches)
        if found != (self.num_stages, self.num_devices, self.num_microbatches):
            raise PlanError(
                f"the plan's schedule has {found[0]} stages, {found[1]} devices and {found[2]} "
                f"micro-batches; the plan says {self.num_stages}, {self.num_devices} and "
                f"{self.num_microbatches}"
            )
        return Stages(first_blocks=self.first_blocks), schedule


class Prediction(_Struct, frozen=True):
    """What the cost model expects of one training step on one device.

    ``sources`` counts the ops by where their price comes from, ``num_noisy`` those with a
    measurement of too large a spread in it; ``unpriced`` lists the operators that no cost model
    knows, priced by their memory traffic, and why. ``analytical_factor`` is by what factor the
    analytical prices may be off, up or down: the median of the stated errors of their families by
    time (None where every op is measured). Communication has the weakest source among its
    collectives (none where nothing is communicated), ``update_source`` is that of the updates (none
    where nothing is trained), ``communication_is_noisy`` says that measurements of collectives
    which were priced spread too far, input copies are analytical, and memory is counted over the
    lowered graphs, with ``num_optimizer_states`` tensors of state for each parameter.
    ``communication_s`` is what the step takes longer for it, ``hidden_s`` what runs beside the
    computation besides (see `autopar.pricing.step_time`; 0 of pipelines). Of a pipeline the step is
    simulated, the other times are those of the device that computes most, and ``bubble_share`` is
    the idle share of all devices. ``resident_bytes``, on CPUs, is by how much the process itself
    grows: those tensors, what the allocator keeps of freed ones, and libraries. ``model_flops`` are
    those of `autopar.pricing.utilisation`, and ``model_flops_utilisation`` is the share of the step
    that all devices need for them at their peak; ``tokens_per_s`` is None without token ids.
    """

    step_time_s: float
    forward_s: float
    backward_s: float
    communication_s: float
    update_s: float
    sources: dict[str, int]
    communication_source: str
    unpriced: dict[str, str]
    memory_bytes: dict[str, int]
    memory_peak_at: str
    hidden_s: float = 0.0
    bubble_share: float = 0.0
    resident_bytes: int | None = None
    model_flops: int = 0
    model_flops_utilisation: float = 0.0
    samples_per_s: float = 0.0
    tokens_per_s: float | None = None
    analytical_factor: float | None = None
    num_noisy: int = 0
    communication_is_noisy: bool = False
    update_source: str = "analytical"
    num_optimizer_states: int = 2


class KnownStrategy(_Struct, frozen=True):
    """A well-known strategy by the plan's own prices, on the mesh that suits it best.

    ``memory_bytes`` is counted node by node, without any limit. ``executable`` says whether the
    runtime can run it on that mesh; where not, ``note`` says why. See `autopar.planning.baselines`.
    """

    time_s: float
    memory_bytes: int
    mesh: str
    executable: bool
    note: str = ""


class SearchReport(_Struct, frozen=True):
    """How good the plan is known to be, and what else was considered.

    ``gap``: by how much the sum of its prices may be above the least there is. ``bound_s``: no
    step is shorter, by these prices, however much of the communication is hidden.
    ``estimated_bytes`` is the plan's memory counted as that of ``baselines``, node by node, to be
    compared with theirs. ``considered`` maps each mesh to the seconds of its best strategy,
    ``baselines`` the well-known strategies to theirs, and ``missing`` those that this model, batch
    or number of devices does not have to the reason. With ``schedule="auto"`` ``pipelines`` maps
    each combination of stages, micro-batches and schedule to the seconds of its step, and
    ``not_pipelines`` those that cannot be, or do not fit, to the reason.
    """

    status: str
    bound_s: float
    gap: float
    estimated_bytes: int
    considered: dict[str, float]
    baselines: dict[str, KnownStrategy]
    missing: dict[str, str]
    pipelines: dict[str, float] = {}
    not_pipelines: dict[str, str] = {}


class Plan(_Struct, frozen=True):
    """One plan. ``ops`` holds only ops that are split along some axis; see `autopar.rules`."""

    schema_version: int
    graph: GraphPlan
    cluster: Cluster
    mesh: MeshPlan
    schedule: SchedulePlan
    prediction: Prediction
    search: SearchReport
    redundant_ops: dict[str, int]
    inputs: dict[str, str]
    parameters: dict[str, str]
    relays: dict[str, str]
    ops: dict[str, str]

    def to_json(self, path: str | Path | None = None) -> str:
        """The plan as JSON text, also written to ``path`` if given."""
        text = msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"
        if path is not None:
            Path(path).write_text(text)
        return text

    @staticmethod
    def from_json(source: str | Path) -> Plan:
        """Read a plan from JSON text or from a file; raises PlanError."""
        text = _read(source)
        _check_version(text)
        try:
            return msgspec.json.decode(text, type=Plan)
        except msgspec.DecodeError as error:
            raise PlanError(f"the plan cannot be read: {error}") from error

    @property
    def is_pipeline(self) -> bool:
        return bool(self.schedule.first_blocks)

    @property
    def device_mesh(self) -> Mesh:
        """The mesh of one pipeline device: of all devices where there is no pipeline."""
        return Mesh(self.mesh.axis_names, self.mesh.axis_sizes)

    def __str__(self) -> str:
        from autopar.plan.text import format_plan

        return format_plan(self)

    def _repr_html_(self) -> str:
        from autopar.plan.text import plan_html

        return plan_html(self)


def _read(source: str | Path) -> str:
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return source
    try:
        return Path(source).read_text()
    except OSError as error:
        raise PlanError(f"no plan can be read from {str(source)!r}: {error}") from error


def _check_version(text: str) -> None:
    try:
        document = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise PlanError(f"the plan is not JSON: {error}") from error
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION:
        raise PlanError(
            f"the plan has schema_version {version!r}; this autopar reads {SCHEMA_VERSION}. "
            "Make it again with autopar.plan(...)"
        )


def make_plan(
    strategy: Strategy,
    captured: Captured,
    cluster: Cluster,
    prediction: Prediction,
    search: SearchReport,
    redundant_ops: dict[str, int],
    schedule: SchedulePlan,
) -> Plan:
    """A strategy as a plan."""
    graph, assignment = strategy.graph, strategy.assignment
    return Plan(
        schema_version=SCHEMA_VERSION,
        graph=_describe(graph, captured),
        cluster=cluster,
        mesh=MeshPlan(axis_names=assignment.mesh.axis_names, axis_sizes=assignment.mesh.axis_sizes),
        schedule=schedule,
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
        relays={
            graph.values[i].name: format_placements(assignment.relays[i])
            for i in sorted(assignment.relays)
        },
        ops={
            op.name: str(choice)
            for op, choice in zip(graph.ops, assignment.choices)
            if not choice.is_redundant
        },
    )


def _describe(graph: Graph, captured: Captured) -> GraphPlan:
    return GraphPlan(
        fingerprint=graph.fingerprint,
        num_ops=len(graph.ops),
        num_parameters=sum(_count(v.shape) for v in graph.parameters),
        parameter_bytes=sum(v.size_bytes for v in graph.parameters),
        inputs={
            name: f"{str(dtype).removeprefix('torch.')}{list(shape)}"
            for name, shape, dtype in zip(
                captured.signature.input_names,
                captured.signature.input_shapes,
                captured.signature.input_dtypes,
            )
        },
        batch_norm=batch_norm_of(graph).value,
    )


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def strategy_of(plan: Plan, captured: Captured, num_devices: int | None = None) -> Strategy:
    """The strategy a plan describes, for the graph it was made for; raises PlanError.

    A graph captured as it is gets the batch norm that the plan was made with.
    """
    captured = with_batch_norm(captured, plan.graph.batch_norm)
    captured, analysis, _ = analysed(captured, plan.schedule.num_microbatches)
    graph, mesh = captured.graph, plan.device_mesh
    _check_graph(plan, _describe(graph, captured))
    planned = mesh.repeated(plan.schedule.num_devices)
    if num_devices is not None and num_devices != planned.num_devices:
        raise PlanError(
            f"the plan is for {planned.num_devices} devices ({planned}), but there are "
            f"{num_devices}; "
            "make a new plan, or pass as many devices"
        )
    unknown = sorted(set(plan.ops) - {op.name for op in graph.ops})
    if unknown:
        raise PlanError(f"the plan splits op {unknown[0]!r}, which the graph does not have")
    everywhere = " ".join("-" * mesh.num_axes)
    assignment = Assignment(
        mesh=mesh,
        choices=tuple(parse_choice(plan.ops.get(op.name, everywhere)) for op in graph.ops),
        stored={
            **_placements(plan.parameters, {v.target or v.name: v.index for v in graph.parameters}),
            **_placements(plan.inputs, dict(zip(captured.signature.input_names, graph.inputs))),
        },
        relays=_placements(
            plan.relays, {graph.values[i].name: i for i in sorted(analysis.relayed)}
        ),
    )
    strategy = Strategy(analysis, assignment)
    strategy.verify()
    return strategy


def _check_graph(plan: Plan, found: GraphPlan) -> None:
    """Name the first thing in which the model differs from the plan's."""
    for name in (
        "batch_norm",
        "inputs",
        "num_parameters",
        "num_ops",
        "parameter_bytes",
        "fingerprint",
    ):
        expected, actual = getattr(plan.graph, name), getattr(found, name)
        if expected != actual:
            raise PlanError(
                f"the plan was made for another graph: {name} is {actual!r} here and "
                f"{expected!r} in the plan. Make a new plan for this model and these inputs"
            )


def _placements(texts: dict[str, str], index: dict[str, int]) -> dict[int, Placements]:
    missing = sorted(set(index) - set(texts)) or sorted(set(texts) - set(index))
    if missing:
        raise PlanError(f"plan and graph disagree on {missing[0]!r}")
    return {
        index[name]: tuple(parse_placement(word) for word in text.split())
        for name, text in texts.items()
    }
