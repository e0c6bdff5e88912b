"""Joint planning: pipeline devices x micro-batches x mesh x schedule x recomputation.

In: a captured model, a cluster, and what the user fixed. Out: the fastest plan that fits, which
may have no pipeline, and what every other combination would take or why it is none.

- Combinations of devices, micro-batches and mesh (`autopar.combinations`) are searched in the order
  of a guess; those whose lower bound is above the best step so far are left out.
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

import math
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.capture import Captured
from autopar.collector import collector_paused
from autopar.combinations import Fixed
from autopar.constraints import Constraint
from autopar.cost_models import (
    Cluster,
    CommunicationModel,
    ComputeModel,
    OpCall,
    RooflineModel,
)
from autopar.cost_models.update import OptimizerSpec, adamw
from autopar.errors import InputError, PlanError
from autopar.finalists import Finalists
from autopar.joint_search import Search, Setting
from autopar.local_calls import calls_of
from autopar.mesh import Mesh
from autopar.microbatches import analysed
from autopar.pipelines import PipelineChoice
from autopar.planner import (
    Planned,
    Progress,
    candidate_meshes,
    check_trainable,
    listed,
    make_planned,
)
from autopar.strategy import Analysis

AUTO = "auto"


def fixed_parts(
    num_stages: int | None,
    num_microbatches: int,
    cuts: Sequence[str] | None,
    mesh: Mapping[str, int] | None,
    recompute: bool | None,
) -> Fixed:
    """The arguments of `autopar.plan` beside ``schedule="auto"``; raises InputError."""
    if cuts is not None:
        raise InputError(
            f"cuts={list(cuts)!r} with schedule='auto': the search cuts the stages itself; leave "
            "cuts out, or name the schedule"
        )
    is_whole = isinstance(num_stages, int) and not isinstance(num_stages, bool)
    if num_stages is not None and (not is_whole or num_stages < 1):
        raise InputError(f"num_stages is {num_stages!r}; stages are a whole number, at least 1")
    return Fixed(
        num_stages=num_stages,
        num_microbatches=None if num_microbatches == 1 else num_microbatches,
        mesh=mesh,
        recompute=recompute,
    )


def plan_with(
    captured: Captured,
    cluster: Cluster,
    pipeline: PipelineChoice | Fixed | None,
    *,
    mesh: Mapping[str, int] | None,
    num_microbatches: int,
    **options: Any,
) -> Planned:
    """A plan with the pipeline that was asked for: a fixed one, a searched one, or none."""
    if isinstance(pipeline, Fixed):
        return plan_jointly(captured, cluster, pipeline, **options)
    return make_planned(
        captured,
        cluster,
        mesh=mesh,
        num_microbatches=num_microbatches,
        pipeline=pipeline,
        **options,
    )


def searched_calls(
    captured: Captured,
    cluster: Cluster,
    mesh: Mapping[str, int] | None,
    num_microbatches: int,
    pipeline: PipelineChoice | Fixed | None,
) -> tuple[OpCall, ...]:
    """Every distinct call of an op that a search with these arguments may price."""
    meshes = _meshes_of(cluster, mesh, pipeline)
    counts = [num_microbatches]
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
    cluster: Cluster, mesh: Mapping[str, int] | None, pipeline: PipelineChoice | Fixed | None
) -> tuple[Mesh, ...]:
    """Every mesh that a plan may be searched on."""
    if isinstance(pipeline, PipelineChoice):
        return candidate_meshes(cluster, mesh, num_pipeline_devices=pipeline.num_devices)
    if pipeline is None:
        return candidate_meshes(cluster, mesh)
    if mesh is not None:
        size = math.prod(mesh.values())
        return candidate_meshes(
            cluster, mesh, num_pipeline_devices=max(cluster.num_devices // size, 1)
        )
    total = cluster.num_devices
    counts = [n for n in range(1, total + 1) if total % n == 0]
    return tuple(
        mesh for n in counts for mesh in candidate_meshes(cluster, None, num_pipeline_devices=n)
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
