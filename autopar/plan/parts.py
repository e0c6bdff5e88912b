"""The fields of a plan, part by part."""

from __future__ import annotations

from typing import Literal

import msgspec

from autopar.cost_models import Cluster
from autopar.ir.mesh import Mesh
from autopar.plan.schedule_plan import SchedulePlan


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


class Prediction(_Struct, frozen=True):
    """What the cost model expects of one training step on one device.

    ``sources`` counts the ops by where their price comes from, ``num_noisy`` those with a
    measurement of too large a spread in it; ``unpriced`` lists the operators that no cost model
    knows, priced by their memory traffic, and why. ``analytical_factor`` is by what factor the
    analytical prices may be off, up or down: the median of the stated errors of their families by
    time (None where every op is measured). Communication has the weakest source among the plan's
    collectives and the messages between its stages (none where nothing is communicated),
    ``update_source`` is that of the updates (none where nothing is trained),
    ``communication_is_noisy`` says that measurements of collectives which were priced spread too
    far, input copies are analytical, and memory is counted over the lowered graphs, with
    ``num_optimizer_states`` tensors of state for each parameter. ``communication_s`` is what the
    step takes longer for it, ``hidden_s`` what runs beside the computation besides (see
    `autopar.pricing.step_time`; 0 of pipelines). Of a pipeline the step is simulated, the other
    times are those of the device that computes most, and ``bubble_share`` is the idle share of all
    devices. ``resident_bytes``, on CPUs, is by how much the process itself grows: those tensors,
    what the allocator keeps of freed ones, and libraries. ``model_flops`` are those of
    `autopar.pricing.utilisation`, and ``model_flops_utilisation`` is the share of the step that all
    devices need for them at their peak; ``tokens_per_s`` is None without token ids.
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


class PlanFields(_Struct, frozen=True):
    """What a plan holds (`autopar.plan.document.Plan`).

    ``ops`` holds only ops that are split along some axis; see `autopar.rules`.
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
    relays: dict[str, str]
    ops: dict[str, str]

    @property
    def is_pipeline(self) -> bool:
        return bool(self.schedule.first_blocks)

    @property
    def device_mesh(self) -> Mesh:
        """The mesh of one pipeline device: of all devices where there is no pipeline."""
        return Mesh(self.mesh.axis_names, self.mesh.axis_sizes)
