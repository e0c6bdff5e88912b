"""Joint planning: pipeline devices x micro-batches x mesh x schedule x recomputation.

In: a captured model, a cluster, and what the user fixed (any of these). Out: the fastest plan that
fits, which may have no pipeline where no schedule was named; and what every other combination would
take, or why it is none.

- Combinations of devices, micro-batches and mesh (`autopar.planning.combinations`) are searched in
  the order of a guess; those whose lower bound is above the best step so far are left out.
- The sharding of each is searched exactly, then every schedule is simulated over the stages'
  prices. Where the search's own count of memory is above the limit, the stages are recomputed, and
  the sharding is searched again within the limit.
- The options are lowered from the fastest on, and the first whose counted memory fits wins. One
  that does not comes back with less memory to search in, or recomputed.

Nothing is searched after `joint_search.SEARCH_LIMIT_S`, and nothing lowered
`finalists.LOWER_LIMIT_S` later (but for the few most frugal ones, where none has fit); what was not
tried is said. The limits are of processor time, which other work on the machine does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.base.errors import InputError, PlanError
from autopar.base.gc_pause import collector_paused
from autopar.cost_models import (
    Cluster,
    CommunicationModel,
    ComputeModel,
    OpCall,
    RooflineModel,
)
from autopar.cost_models.cluster import is_count
from autopar.cost_models.update import OptimizerSpec, adamw
from autopar.frontend.capture import Captured
from autopar.ir.mesh import Mesh
from autopar.planning.combinations import Fixed
from autopar.planning.constraints import Constraint
from autopar.planning.finalists import Finalists
from autopar.planning.joint_search import Search, Setting
from autopar.planning.meshes import MeshSizes, candidate_meshes, is_open, pipeline_device_counts
from autopar.planning.pipelines import PIPELINES, PipelineChoice
from autopar.planning.planner import (
    Planned,
    Progress,
    check_trainable,
    listed,
    make_planned,
)
from autopar.pricing.local_calls import calls_of
from autopar.schedules import Schedule
from autopar.sharding.microbatches import analysed
from autopar.sharding.strategy import Analysis

AUTO = "auto"


def is_searched(
    num_stages: int | None,
    schedule: str | Schedule | None,
    num_microbatches: int | None,
    cuts: Sequence[str] | None,
    mesh: MeshSizes | None,
) -> bool:
    """Whether the arguments of `autopar.plan` leave something of a pipeline to the search."""
    if schedule == AUTO:
        return True
    is_named = isinstance(schedule, str) and schedule in PIPELINES
    is_left = num_stages is None or num_microbatches is None or (mesh is not None and is_open(mesh))
    return is_named and is_left and cuts is None and num_stages != 1


def fixed_parts(
    num_stages: int | None,
    schedule: str | None,
    num_microbatches: int | None,
    cuts: Sequence[str] | None,
    mesh: MeshSizes | None,
    recompute: bool | None,
) -> Fixed:
    """The arguments of `autopar.plan` where `is_searched`; raises InputError."""
    if cuts is not None:
        raise InputError(
            f"cuts={cuts!r} with schedule='auto': the search cuts the stages itself; leave "
            "cuts out, or name the schedule"
        )
    if num_stages is not None and not is_count(num_stages):
        raise InputError(f"num_stages is {num_stages!r}; stages are a whole number, at least 1")
    return Fixed(
        schedule=None if schedule == AUTO else schedule,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        mesh=mesh,
        recompute=recompute,
    )


def plan_with(
    captured: Captured,
    cluster: Cluster,
    pipeline: PipelineChoice | Fixed | None,
    *,
    mesh: MeshSizes | None,
    num_microbatches: int | None,
    **options: Any,
) -> Planned:
    """A plan with the pipeline that was asked for: a fixed one, a searched one, or none."""
    if isinstance(pipeline, Fixed):
        return plan_jointly(captured, cluster, pipeline, **options)
    return make_planned(
        captured,
        cluster,
        mesh=mesh,
        num_microbatches=num_microbatches or 1,
        pipeline=pipeline,
        **options,
    )


def searched_calls(
    captured: Captured,
    cluster: Cluster,
    mesh: MeshSizes | None,
    num_microbatches: int | None,
    pipeline: PipelineChoice | Fixed | None,
) -> tuple[OpCall, ...]:
    """Every distinct call of an op that a search with these arguments may price."""
    meshes = _meshes_of(cluster, mesh, pipeline)
    counts = [num_microbatches or 1]
    if isinstance(pipeline, PipelineChoice):
        counts = [pipeline.schedule.shape.num_microbatches]
    elif isinstance(pipeline, Fixed) and pipeline.num_microbatches is None:
        batch = Analysis(captured.graph).batch_size
        counts = [num for num in range(1, batch + 1) if batch % num == 0] or [1]
    found: dict[OpCall, None] = {}
    for num in counts:
        try:
            _, analysis, microbatches = analysed(captured, num)
        except PlanError:
            if len(counts) == 1:
                raise
            continue  # the search says why there are none
        found.update(dict.fromkeys(calls_of(analysis, meshes, microbatches)))
    return tuple(found)


def _meshes_of(
    cluster: Cluster, mesh: MeshSizes | None, pipeline: PipelineChoice | Fixed | None
) -> tuple[Mesh, ...]:
    """Every mesh that a plan may be searched on."""
    counts = [1]
    if isinstance(pipeline, PipelineChoice):
        counts = [pipeline.num_devices]
    elif pipeline is not None:
        counts = pipeline_device_counts(cluster, mesh) or [1]
    return tuple(
        found for n in counts for found in candidate_meshes(cluster, mesh, num_pipeline_devices=n)
    )


@collector_paused()
def plan_jointly(
    captured: Captured,
    cluster: Cluster,
    fixed: Fixed,
    *,
    constraints: Sequence[Constraint] | Constraint = (),
    compute: ComputeModel | None = None,
    communication: CommunicationModel | None = None,
    optimizer: OptimizerSpec | None = None,
    device_type: str = "cpu",
    progress: Progress = lambda _: None,
) -> Planned:
    """The fastest plan of all combinations; raises ConstraintError where none is one."""
    check_trainable(captured)
    setting = Setting(
        captured=captured,
        cluster=cluster,
        fixed=fixed,
        constraints=listed(constraints),
        compute=compute or RooflineModel(cluster.device),
        communication=communication or CommunicationModel(cluster),
        optimizer=optimizer or adamw(cluster.device),
        device_type=device_type,
        progress=progress,
    )
    return Finalists(Search(setting).run()).best()
