"""Joint planning: pipeline devices x micro-batches x schedule, each with its best sharding.

In: a captured model, a cluster, and what the user fixed. Out: the fastest plan that fits, which
may have no pipeline, and what every other combination would take or why it is none. For each number
of pipeline devices and of micro-batches the sharding is searched on the mesh that one device has;
every schedule is then simulated over the stages' prices; they are lowered from the fastest on, and
the first that fits the memory wins. Nothing is searched, or lowered, after `TIME_LIMIT_S`. A
micro-batch is priced as its share of the whole batch, so what small operators lose is not in the
prices.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from autopar.capture import Captured
from autopar.constraints import Constraint
from autopar.cost_models import Cluster, CommunicationModel, ComputeModel, OpCall
from autopar.errors import AutoparError, ConstraintError, InputError, PlanError
from autopar.mesh import Mesh
from autopar.microbatches import analysed
from autopar.pipelines import PipelineChoice, choose_stages, pipeline_times
from autopar.planner import (
    Planned,
    Progress,
    candidate_meshes,
    cheapest,
    listed,
    make_planned,
    search_meshes,
)
from autopar.pricing import calls_of
from autopar.problem import Candidate
from autopar.schedules import build
from autopar.stages import staged_blocks
from autopar.strategy import Analysis

AUTO = "auto"
TIME_LIMIT_S = 60.0
MAX_MICROBATCHES_PER_DEVICE = 8
CHAINS = ("gpipe", "1f1b", "zb_h1", "chimera")
"""Schedules of one stage a device."""
TWICE = ("interleaved", "zb_v", "v_half", "v_min")
"""Schedules of two stages a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """What the user fixed of a pipeline; None is searched."""

    num_stages: int | None = None
    num_microbatches: int | None = None
    mesh: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """One combination, priced."""

    name: str
    time_s: float
    choice: PipelineChoice
    candidate: Candidate


def fixed_parts(
    num_stages: int | None,
    num_microbatches: int,
    cuts: Sequence[str] | None,
    mesh: Mapping[str, int] | None,
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
        counts = [1, *(num for num in range(2, batch + 1) if batch % num == 0)]
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


def plan_jointly(
    captured: Captured,
    cluster: Cluster,
    fixed: Fixed,
    *,
    constraints: Sequence[Constraint] | Constraint = (),
    compute: ComputeModel | None = None,
    communication: CommunicationModel | None = None,
    device_type: str = "cpu",
    progress: Progress = lambda _: None,
) -> Planned:
    """The fastest plan of all combinations; raises ConstraintError where none is one."""
    options: dict[str, Any] = {
        "constraints": listed(constraints),
        "compute": compute,
        "communication": communication or CommunicationModel(cluster),
    }
    return _Search(captured, cluster, fixed, options, device_type, progress).run()


class _Search:
    def __init__(
        self,
        captured: Captured,
        cluster: Cluster,
        fixed: Fixed,
        options: dict[str, Any],
        device_type: str,
        progress: Progress,
    ) -> None:
        self.captured = captured
        self.cluster = cluster
        self.fixed = fixed
        self.search_options = options
        self.device_type = device_type
        self.progress = progress
        self.communication: CommunicationModel = options["communication"]
        self.num_blocks = len(staged_blocks(captured.graph))
        self.options: list[_Option] = []
        self.times_s: dict[str, float] = {}
        self.reasons: dict[str, str] = {}
        self.deadline_s = time.monotonic() + TIME_LIMIT_S

    def run(self) -> Planned:
        alone = self._alone()
        for num_devices in self._device_counts():
            for num in self._microbatch_counts(num_devices):
                self._price(num_devices, num)
        best = self._best(alone)
        if best is None:
            raise ConstraintError(
                "no combination of stages, micro-batches and schedule was found: "
                + "; ".join(f"{name}: {why}" for name, why in self.reasons.items())
            )
        report = structs.replace(
            best.plan.search, pipelines=self.times_s, not_pipelines=self.reasons
        )
        return replace(best, plan=structs.replace(best.plan, search=report))

    def _best(self, alone: Planned | None) -> Planned | None:
        """The fastest that fits; the options that are slower than one that does are not lowered."""
        deadline_s = time.monotonic() + TIME_LIMIT_S
        for option in sorted(self.options, key=lambda option: (option.time_s, option.name)):
            if alone is not None and option.time_s >= alone.plan.prediction.step_time_s:
                break
            if time.monotonic() > deadline_s:
                self.reasons[option.name] = f"not lowered: others took {TIME_LIMIT_S:.0f} s"
                continue
            found = self._lowered(option)
            if found is not None:
                return found
        return alone

    def _alone(self) -> Planned | None:
        """Without a pipeline, where the user has fixed nothing that needs one."""
        name, mesh = "no pipeline", self.fixed.mesh
        if self.fixed.num_stages not in (None, 1):
            return None
        if mesh is not None and math.prod(mesh.values()) != self.cluster.num_devices:
            return None
        try:
            found = make_planned(
                self.captured, self.cluster, mesh=mesh,
                num_microbatches=self.fixed.num_microbatches or 1,
                device_type=self.device_type, progress=self.progress, **self.search_options,
            )  # fmt: skip
        except AutoparError as error:
            self.reasons[name] = str(error)
            return None
        self.times_s[name] = found.plan.prediction.step_time_s
        return found

    def _device_counts(self) -> list[int]:
        total = self.cluster.num_devices
        if self.fixed.mesh is not None:
            size = math.prod(self.fixed.mesh.values())
            counts = [total // size] if total % size == 0 else []
        else:
            counts = [n for n in range(2, total + 1) if total % n == 0]
        return [n for n in counts if 1 < n <= self.num_blocks]

    def _microbatch_counts(self, num_devices: int) -> list[int]:
        """Divisors of the batch from the number of devices on, each at least twice the last."""
        if self.fixed.num_microbatches is not None:
            return [self.fixed.num_microbatches]
        batch = analysed(self.captured, 1)[1].batch_size
        counts: list[int] = []
        for num in range(num_devices, MAX_MICROBATCHES_PER_DEVICE * num_devices + 1):
            if batch and batch % num == 0 and (not counts or num >= 2 * counts[-1]):
                counts.append(num)
        return counts

    def _price(self, num_devices: int, num: int) -> None:
        """Search the sharding, then simulate every schedule that there is."""
        name = f"{num_devices} pipeline devices, {num} micro-batches"
        if time.monotonic() > self.deadline_s:
            self.reasons[name] = f"not tried: the search had taken {TIME_LIMIT_S:.0f} s"
            return
        self.progress(f"search {name}")
        try:
            _, analysis, microbatches = analysed(self.captured, num)
            meshes = candidate_meshes(
                self.cluster, self.fixed.mesh, num_pipeline_devices=num_devices
            )
            candidate = cheapest(
                search_meshes(
                    analysis, self.cluster, meshes, microbatches=microbatches,
                    **self.search_options,
                )
            )  # fmt: skip
        except AutoparError as error:
            self.reasons[name] = str(error)
            return
        for schedule, num_stages in self._schedules(num_devices):
            self._simulate(schedule, num_stages, num, num_devices, candidate)

    def _schedules(self, num_devices: int) -> list[tuple[str, int]]:
        found = [(name, num_devices) for name in CHAINS]
        found += [(name, 2 * num_devices) for name in TWICE]
        wanted = self.fixed.num_stages
        return [
            (name, stages)
            for name, stages in found
            if stages <= self.num_blocks and wanted in (None, stages)
        ]

    def _simulate(
        self, schedule: str, num_stages: int, num: int, num_devices: int, candidate: Candidate
    ) -> None:
        name = f"{schedule}, {num_stages} stages on {num_devices}, {num} micro-batches"
        options = {"num_devices": num_devices} if schedule == "interleaved" else {}
        try:
            made = build(schedule, num_stages=num_stages, num_microbatches=num, **options)
            choice = PipelineChoice(schedule=made)
            stages = choose_stages(candidate, choice, self.communication)
            times = pipeline_times(candidate, stages, made, self.communication)
        except AutoparError as error:
            self.reasons[name] = str(error)
            return
        self.times_s[name] = times.step_s
        self.options.append(
            _Option(name=name, time_s=times.step_s, choice=choice, candidate=candidate)
        )

    def _lowered(self, option: _Option) -> Planned | None:
        """The plan of a finalist, or None with the reason noted."""
        self.progress(f"lower {option.name}")
        mesh = option.candidate.mesh
        try:
            return make_planned(
                self.captured, self.cluster, mesh=dict(zip(mesh.axis_names, mesh.axis_sizes)),
                pipeline=option.choice, device_type=self.device_type, progress=self.progress,
                **self.search_options,
            )  # fmt: skip
        except AutoparError as error:
            self.reasons[option.name] = str(error)
            self.times_s.pop(option.name)
            return None
