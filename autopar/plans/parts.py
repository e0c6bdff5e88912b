"""The fields of a plan, as msgspec structs."""

from __future__ import annotations

import copy
from dataclasses import asdict
from functools import cached_property
from typing import Literal, Self

import msgspec

from autopar.base.documents import path_of
from autopar.base.errors import InputError, MovementError
from autopar.cost_models import Cluster
from autopar.ir.choice import EXPERTS, ROWS_AND_EXPERTS
from autopar.ir.mesh import Mesh
from autopar.ir.precision import Precision
from autopar.ir.recomputation import BlockRecomputation, Recomputation
from autopar.ir.update import Update
from autopar.movement.plan import MovementFields, MovementPlan
from autopar.plans.predicted import MemoryCurve, Prediction
from autopar.plans.refusals import refused
from autopar.plans.schedule_plan import SchedulePlan
from autopar.plans.search_trace import SearchTrace
from autopar.plans.stage_costs import StageCosts
from autopar.pricing.step_costs import StepCosts


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all structs of a plan."""


class MeshPlan(_Struct, frozen=True):
    """Axis names and sizes, outermost first."""

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]


class PrecisionPlan(_Struct, frozen=True):
    """The dtypes of a plan's mixed precision; see `autopar.ir.precision`."""

    compute: Literal["bf16", "fp16"]
    reduce: Literal["fp32", "bf16"]

    @staticmethod
    def of(precision: Precision) -> PrecisionPlan:
        return PrecisionPlan(compute=precision.compute, reduce=precision.reduce)  # type: ignore[arg-type]

    @property
    def precision(self) -> Precision:
        """The precision with these dtypes; raises InputError where they contradict each other."""
        return Precision(compute=self.compute, reduce=self.reduce)

    def __str__(self) -> str:
        return str(self.precision)


class UpdatePlan(_Struct, frozen=True):
    """When parameters are updated, and the predicted peak bytes of gradients on a device.

    ``when``, ``keep_gradients`` and ``clipping`` as in `autopar.ir.update.Update`; with a second
    pass, the predicted time of a step is that of both. Gradients larger than ``tile_bytes`` are
    computed and used by rows where that is possible. ``gradient_bytes_at_end`` is the peak if
    parameters were updated after the backward pass.
    """

    when: Literal["early", "at_end"] = "at_end"
    keep_gradients: bool = False
    clipping: Literal["second_pass", "last_norm"] | None = None
    tile_bytes: int = 1 << 20
    gradient_bytes: int = 0
    gradient_bytes_at_end: int = 0

    @property
    def update(self) -> Update:
        """The update as it was asked for; raises InputError where its parts contradict."""
        return Update(when=self.when, keep_gradients=self.keep_gradients, clipping=self.clipping)


def agreed_precision(given: Precision | None, planned: PrecisionPlan | None) -> Precision | None:
    """A plan's precision, which is the one given if any; raises InputError where they differ."""
    if given is None and planned is not None:
        given = planned.precision
    if (None if given is None else PrecisionPlan.of(given)) != planned:
        raise InputError(
            f"precision is {given}, and the plan was made with "
            f"{'none' if planned is None else planned}; leave precision= out, or leave out plan= "
            "for a new search"
        )
    return given


class GraphPlan(_Struct, frozen=True):
    """The graph that a plan was made for, identified by ``fingerprint``.

    ``batch_norm``: which statistics it trains with, see `autopar.passes.batch_norm`. ``precision``:
    its mixed precision, None if it computes in the model's own dtypes. ``shared``: the names of
    each module and parameter that has several, the one that the plan uses first. ``block_cuts``:
    the modules inside blocks in front of which these are divided, so that a stage can begin there.
    ``unused``: the parameters that nothing reads. ``full_masks``: the inputs that must be all ones,
    see `autopar.frontend.full_masks`.
    """

    fingerprint: str
    num_ops: int
    num_parameters: int
    parameter_bytes: int
    inputs: dict[str, str]
    batch_norm: Literal["global", "local"]
    precision: PrecisionPlan | None = None
    shared: tuple[tuple[str, ...], ...] = ()
    block_cuts: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    full_masks: tuple[str, ...] = ()


class KnownStrategy(_Struct, frozen=True):
    """A known strategy at the plan's prices, on its best mesh.

    ``memory_bytes`` is estimated node by node, without a limit. See `autopar.planning.known`.
    """

    time_s: float
    memory_bytes: int
    mesh: str
    note: str = ""


class SearchReport(_Struct, frozen=True):
    """How close to optimal the plan is proved to be, and the alternatives considered.

    ``bound_s``: a lower bound on the time of a step at these prices, however much communication is
    overlapped. ``gap``: relative distance of the step from it; in a pipeline, and where memory
    limits the sharding, of the sum of prices that was searched from its own lower bound.
    ``estimated_bytes`` is the plan's memory estimated node by node, as for ``baselines``, to be
    compared with theirs. ``considered`` maps each mesh to the time of its best strategy in seconds,
    ``baselines`` the known strategies to theirs (for a pipeline, the schedules of other systems,
    `autopar.planning.peers`), and ``missing`` those that do not apply to this model, batch or
    number of devices to the reason. ``fitting_bytes`` is the estimated memory up to which a known
    strategy is expected to fit, by one that was lowered and did not; None if there is none. With
    ``schedule="auto"``, ``pipelines`` maps each combination of stages, micro-batches and schedule
    to the time of its step in seconds, and ``not_pipelines`` those that are impossible or do not
    fit to the reason.
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
    fitting_bytes: int | None = None


class RecomputationPlan(_Struct, frozen=True):
    """The values that some blocks keep for the backward pass; see `autopar.ir.recomputation`.

    Bytes and seconds are those of one of these blocks, for one micro-batch on one device.
    """

    blocks: tuple[str, ...]
    kept: tuple[str, ...]
    kept_bytes: int
    default_bytes: int
    time_s: float

    @staticmethod
    def of(recomputation: Recomputation) -> tuple[RecomputationPlan, ...]:
        """One for each group of blocks that keep the same."""
        groups: dict[BlockRecomputation, list[str]] = {}
        for name, block in recomputation.blocks.items():
            groups.setdefault(block, []).append(name)
        return tuple(
            RecomputationPlan(blocks=tuple(names), **asdict(block))
            for block, names in groups.items()
        )

    @property
    def block(self) -> BlockRecomputation:
        """The recomputation of each of the blocks."""
        return BlockRecomputation(
            kept=self.kept,
            kept_bytes=self.kept_bytes,
            default_bytes=self.default_bytes,
            time_s=self.time_s,
        )


class KernelPlan(_Struct, frozen=True):
    """Which graphs of these equal blocks are compiled: F, I, W; the others run op by op.

    ``eager_s`` and ``compiled_s``: measured seconds of the regions of each graph, for one of the
    blocks and one micro-batch on one device; empty if they were not measured. ``failures`` says why
    a graph was not priced.
    """

    blocks: tuple[str, ...]
    compiled: tuple[Literal["F", "I", "W"], ...]
    eager_s: dict[str, float] = {}
    compiled_s: dict[str, float] = {}
    failures: dict[str, str] = {}


class OffloadPlan(_Struct, frozen=True):
    """The movement of tensors to the host and back, by pipeline rank.

    ``moved_bytes``: bytes copied in a step, both ways, on the rank that copies most. ``stall_s``:
    how much longer the simulated step is for it.
    """

    ranks: tuple[MovementFields, ...]
    moved_bytes: int
    stall_s: float

    def plans(self) -> tuple[MovementPlan, ...]:
        """The plans of the ranks; raises PlanError with the JSON path of one that is none."""
        return tuple(_plan(rank, number) for number, rank in enumerate(self.ranks))


def _plan(rank: MovementFields, number: int) -> MovementPlan:
    try:
        return rank.plan()
    except MovementError as error:
        place = path_of(("offload", "ranks", number, "transfers"))
        raise refused(str(error), place) from error


class ParameterUse(_Struct, frozen=True):
    """How a parameter is used: the placement in which blocks need it, and its bytes.

    ``size_bytes`` is the size of the whole parameter, ``local_bytes`` that of the part that one
    device stores, both in the stored dtype.
    """

    needs: str
    size_bytes: int
    local_bytes: int


MODULE_TIMES = ("forward_s", "input_grad_s", "weight_grad_s", "communication_s", "update_s")
"""The predicted times of a `ModulePlan`."""


class ModulePlan(_Struct, frozen=True):
    """The ops of a module in one block, and their predicted seconds in a step on one device.

    ``splits`` says for each mesh axis how most of the time of the ops is split along it: ``batch``,
    ``sequence``, the name of another dimension, or ``-`` where every device computes the same.
    Times are those of all micro-batches, without recomputation. ``communication_s`` is that of all
    redistributions: collectives, overlapped ones too, casts and copies.
    """

    block: str
    name: str
    ops: tuple[str, ...]
    splits: str
    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    communication_s: float
    update_s: float

    @property
    def backward_s(self) -> float:
        return self.input_grad_s + self.weight_grad_s


def axes_of_experts(splits: str) -> frozenset[int]:
    """The mesh axes that split experts, in a text with a word for each axis."""
    names = [word.partition("/")[0] for word in splits.split()]
    return frozenset(a for a, name in enumerate(names) if name in (EXPERTS, ROWS_AND_EXPERTS))


class ModuleChoice(_Struct, frozen=True):
    """How a module may be parallelized: by its longest op and the largest parameter beside it.

    ``splits``: how the op is split along each mesh axis, as in `ModulePlan`. ``stored`` and
    ``needs``: the placements of the largest parameter of the op's own module, empty without one.
    """

    splits: str
    stored: str = ""
    needs: str = ""


class RunnerUp(_Struct, frozen=True):
    """The best other choice of these modules, each by itself; see `autopar.plans.runner_up`.

    ``op`` is the operator that splits otherwise. Differences are those of a step with the other
    choice, for one of the modules: ``compute_s`` of its ops and updates, ``communication_s`` of all
    redistributions of its values, and ``memory_bytes`` of a device, as estimated by the search.
    """

    modules: tuple[str, ...]
    op: str
    chosen: ModuleChoice
    other: ModuleChoice
    compute_s: float
    communication_s: float
    memory_bytes: int

    @property
    def difference_s(self) -> float:
        """By how much longer a step would be."""
        return self.compute_s + self.communication_s


class PlanFields(_Struct, frozen=True, dict=True):
    """The fields of `autopar.plans.document.Plan`.

    ``ops`` lists only the ops that are split along some axis; see `autopar.rules`. ``released``:
    the parameters that are gathered for the forward pass, released, and gathered again for the
    backward pass; other gathered ones are kept from their first use in a step to the last.
    ``scattered``: those whose gradients are reduce-scattered in every micro-batch; others are
    accumulated and reduced once. ``recomputation`` lists only the blocks that recompute,
    ``kernels`` only those of which graphs are compiled or were considered. ``offload`` is None if
    nothing moves to the host. ``uses`` has an entry for every parameter, ``modules`` one for every
    module of every block, ``runner_ups`` one for those with another choice. ``stage_costs`` is what
    a pipeline's step was simulated with, ``step_costs`` what another step is the sum of. Reports
    read them and ``memory_curve``; nothing is executed by them.
    """

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
    released: tuple[str, ...]
    relays: dict[str, str]
    ops: dict[str, str]
    uses: dict[str, ParameterUse]
    modules: tuple[ModulePlan, ...]
    scattered: tuple[str, ...] = ()
    update: UpdatePlan = UpdatePlan()
    recomputation: tuple[RecomputationPlan, ...] = ()
    kernels: tuple[KernelPlan, ...] = ()
    offload: OffloadPlan | None = None
    runner_ups: tuple[RunnerUp, ...] = ()
    memory_curve: MemoryCurve | None = None
    stage_costs: StageCosts | None = None
    step_costs: StepCosts | None = None

    @property
    def search_trace(self) -> SearchTrace:
        """The moments of the search that found the plan in this process; none for a plan that was
        read from JSON, which has no times of day, so that equal searches write equal files."""
        found: SearchTrace = self.__dict__.get("search_trace", ())
        return found

    def with_trace(self, trace: SearchTrace) -> Self:
        """The same plan with the moments of its search, which are no part of its JSON."""
        made = copy.copy(self)
        made.__dict__["search_trace"] = trace
        return made

    @property
    def compiled(self) -> dict[str, tuple[str, ...]]:
        """The graphs that are compiled, by block."""
        return {name: group.compiled for group in self.kernels for name in group.blocks}

    @property
    def recomputed(self) -> Recomputation:
        """The recomputation by block."""
        return Recomputation(
            blocks={name: group.block for group in self.recomputation for name in group.blocks}
        )

    @cached_property
    def expert_axes(self) -> dict[str, frozenset[int]]:
        """The mesh axes along which some op of a module splits experts, by the module's name."""
        found: dict[str, frozenset[int]] = {}
        for module in self.modules:
            for op in module.ops:
                axes = axes_of_experts(self.ops.get(op, ""))
                if axes:
                    found[module.name] = found.get(module.name, frozenset()) | axes
        return found

    @property
    def is_pipeline(self) -> bool:
        return bool(self.schedule.first_blocks)

    @property
    def busiest_rank(self) -> str:
        """Words for the pipeline rank whose times are predicted; none if all run all stages."""
        rank = self.prediction.pipeline_rank
        is_one_of = self.is_pipeline and self.schedule.num_devices > 1
        return f"pipeline rank {rank}, which computes most" * is_one_of

    @property
    def device_mesh(self) -> Mesh:
        """The mesh of a pipeline rank; without a pipeline, that of all devices."""
        return Mesh(self.mesh.axis_names, self.mesh.axis_sizes)

    @property
    def may_split(self) -> bool:
        """Whether ops may be split, as that mesh has several devices."""
        return self.device_mesh.num_devices > 1
