"""The search space of a plan: which options are fixed, and which are open.

In: the arguments of `autopar.plan`. Out: a `Space`. With a given pipeline, or none, only mesh and
sharding are searched, and recomputation where memory is short. In an open space schedule, stages
and micro-batches are searched too, unless they are fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.base.errors import AutoparError, InputError
from autopar.cost_models import Cluster
from autopar.cost_models.hardware import is_count
from autopar.ir.mesh import Mesh
from autopar.planning.meshes import (
    MeshSizes,
    candidate_meshes,
    is_open,
    known_size,
    pipeline_device_counts,
)
from autopar.planning.recompute_request import Recompute
from autopar.schedules import Schedule, build, verify
from autopar.schedules.generators.build import ANY_STAGES, PIPELINES, generator_of
from autopar.schedules.runnable import check_runs

AUTO = "auto"
SEARCHED = Recompute()
DEFAULT_SCHEDULE = "1f1b"
WITH_FORMS = ("chimera", "fast_forward")
"""Schedules that have several forms for the same stages and micro-batches, which are searched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineChoice:
    """A schedule, and the blocks at which stages begin if the user fixed them.

    With ``searches_k`` the schedule is reverse-first-k, whose k is chosen by its prices. ``gap``:
    how far its order is from a lower bound, see `autopar.planning.refinement`. ``places_sums``: the
    gradients of its replicas are reduced where that takes least time at the prices; a schedule that
    the user made reduces them as early as it can.
    """

    schedule: Schedule
    cuts: tuple[str, ...] | None = None
    searches_k: bool = False
    gap: float | None = None
    places_sums: bool = False

    @property
    def num_devices(self) -> int:
        return self.schedule.shape.num_devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The fixed options of a plan; in an open space those that are None are searched.

    ``pipeline`` is the given pipeline of a space that is not open; ``schedule`` names the only
    schedule of an open space. The default has neither a pipeline nor micro-batches.
    ``reshard_after_forward``: whether gathered parameters are released after each pass; None if the
    memory decides. ``reduce_every_microbatch``: likewise, whether gradients that are stored as
    shards are reduced in every micro-batch. ``offload``: tensors may move to the host where the
    memory needs it; None if they may where nothing else fits an accelerator. ``kept_axes``: the
    axes that are not merged with others where the mesh has many. ``forced_axes``: those that a
    strategy is forced on, or that a pin splits, None for the mesh as a whole.
    """

    mesh: MeshSizes | None = None
    num_microbatches: int | None = None
    pipeline: PipelineChoice | None = None
    is_open: bool = False
    schedule: str | None = None
    num_stages: int | None = None
    recompute: Recompute = SEARCHED
    reshard_after_forward: bool | None = None
    reduce_every_microbatch: bool | None = None
    offload: bool | None = None
    kept_axes: frozenset[str] = frozenset()
    forced_axes: frozenset[str | None] = frozenset()

    @property
    def is_pipeline(self) -> bool:
        """Whether an open space consists of pipelines only."""
        return self.schedule is not None or self.num_stages not in (None, 1)

    @property
    def is_free(self) -> bool:
        """Whether the whole batch at once without a pipeline is a plan of an open space."""
        return self.is_open and not self.is_pipeline and self.num_microbatches is None

    @property
    def has_pipelines(self) -> bool:
        """Whether some plan of the space is a pipeline."""
        return (self.is_open and self.num_stages != 1) or self.pipeline is not None

    @property
    def leaves_microbatches(self) -> bool:
        """Whether a plan has one micro-batch only because no number was given."""
        is_plain = not self.is_open and self.pipeline is None
        return is_plain and self.num_microbatches is None

    def at_first(self, cluster: Cluster) -> Space:
        """The space that is searched first: where it is a plan, the whole batch at once."""
        if self.is_free and 1 in pipeline_device_counts(cluster, self.mesh):
            return replace(self, is_open=False)
        return self

    def point(self) -> tuple[int, int]:
        """The numbers of pipeline ranks and micro-batches of a space that is not open."""
        if self.pipeline is not None:
            return self.pipeline.num_devices, self.pipeline.schedule.shape.num_microbatches
        return 1, 1 if self.num_microbatches is None else self.num_microbatches

    def meshes(self, cluster: Cluster) -> tuple[Mesh, ...]:
        """Every mesh that a plan may be searched on."""
        counts = [self.point()[0]]
        if self.is_open and self.num_stages != 1:
            counts = pipeline_device_counts(cluster, self.mesh) or [1]
        return tuple(mesh for count in counts for mesh in self.candidates(cluster, count))

    def candidates(self, cluster: Cluster, num_pipeline_devices: int) -> tuple[Mesh, ...]:
        """The meshes of each of so many pipeline ranks (see `candidate_meshes`).

        As many as can be of the axes with a forced strategy have several devices: one alone would
        fulfil any strategy.
        """

        def all_of(count: int) -> tuple[Mesh, ...]:
            return candidate_meshes(
                cluster, self.mesh, num_pipeline_devices=count, kept_axes=self.kept_axes
            )

        found = all_of(num_pipeline_devices)
        if not self.forced_axes:
            return found
        counts = [num_pipeline_devices]
        if self.is_open:
            counts = [n for n in pipeline_device_counts(cluster, self.mesh) if self._may_have(n)]
        split = (self._num_forced_split(mesh) for count in counts for mesh in all_of(count))
        most = max(split, default=0)
        return tuple(mesh for mesh in found if self._num_forced_split(mesh) == most)

    def _may_have(self, num_pipeline_devices: int) -> bool:
        if num_pipeline_devices == 1:
            return not self.is_pipeline
        return self.num_stages is None or num_pipeline_devices <= self.num_stages

    def _num_forced_split(self, mesh: Mesh) -> int:
        sizes = dict(zip(mesh.axis_names, mesh.axis_sizes))
        return sum(
            (mesh.num_devices if axis is None else sizes.get(axis, 1)) > 1
            for axis in self.forced_axes
        )

    def microbatch_counts(self, batch: int) -> list[int]:
        """Every number of micro-batches that a plan may be searched for."""
        if not self.is_open:
            return [self.point()[1]]
        if self.num_microbatches is not None:
            return [self.num_microbatches]
        return [num for num in range(1, batch + 1) if batch % num == 0] or [1]


def space_of(
    num_devices: int,
    *,
    mesh: MeshSizes | None = None,
    num_microbatches: int | None = None,
    num_stages: int | None = None,
    schedule: str | Schedule | None = None,
    cuts: Sequence[str] | None = None,
    recompute: Recompute = SEARCHED,
) -> Space:
    """The search space for the arguments of `autopar.plan` on ``num_devices``.

    Raises InputError if they contradict each other or the number of devices.
    """
    if _is_searched(num_stages, schedule, num_microbatches, cuts, mesh):
        _check_open(num_stages, cuts)
        return Space(
            is_open=True,
            schedule=None if schedule == AUTO else str(schedule),
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            mesh=mesh,
            recompute=recompute,
        )
    if num_stages is None and schedule is None and cuts is None:
        return Space(mesh=mesh, num_microbatches=num_microbatches, recompute=recompute)
    num_ranks = num_devices // (known_size(mesh) if mesh else 1)
    made = _given(schedule, num_stages, num_microbatches, cuts, num_ranks)
    choice = PipelineChoice(
        schedule=_checked(made, num_devices),
        cuts=None if cuts is None else tuple(cuts),
        searches_k=schedule == "reverse_first_k",
        places_sums=not isinstance(schedule, Schedule),
    )
    return Space(mesh=mesh, pipeline=choice, recompute=recompute)


def _check_open(num_stages: int | None, cuts: Sequence[str] | None) -> None:
    """Raise InputError for arguments that an open space cannot have."""
    if cuts is not None:
        raise InputError(
            f"cuts={cuts!r} with schedule='auto': the search cuts the stages itself; remove "
            "cuts, or name the schedule"
        )
    if num_stages is not None and not is_count(num_stages):
        raise InputError(f"num_stages is {num_stages!r}; stages are a whole number, at least 1")


def _given(
    schedule: str | Schedule | None,
    num_stages: int | None,
    num_microbatches: int | None,
    cuts: Sequence[str] | None,
    num_ranks: int,
) -> Schedule:
    """The schedule of a fully specified pipeline: the one given, or built by its name."""
    if isinstance(schedule, Schedule):
        _number_of_stages(num_stages, schedule, cuts)
        if num_microbatches not in (None, schedule.shape.num_microbatches):
            raise InputError(
                f"num_microbatches={num_microbatches}, but the schedule {schedule.name!r} is for "
                f"{schedule.shape.num_microbatches}; remove num_microbatches"
            )
        return schedule
    name = DEFAULT_SCHEDULE if schedule is None else schedule
    _check_name(name)
    return _built(
        name, _number_of_stages(num_stages, schedule, cuts), num_microbatches or 1, num_ranks
    )


def _is_searched(
    num_stages: int | None,
    schedule: str | Schedule | None,
    num_microbatches: int | None,
    cuts: Sequence[str] | None,
    mesh: MeshSizes | None,
) -> bool:
    """Whether the arguments of `autopar.plan` leave part of a pipeline to the search."""
    if schedule == AUTO:
        return True
    is_named = isinstance(schedule, str) and schedule in PIPELINES
    is_left = (
        schedule in WITH_FORMS
        or num_stages is None
        or num_microbatches is None
        or (mesh is not None and is_open(mesh))
    )
    return is_named and is_left and cuts is None and num_stages != 1


def _checked(schedule: Schedule, num_devices: int) -> Schedule:
    """The schedule; raises InputError if it cannot be run."""
    try:
        verify(schedule)
        check_runs(schedule)
    except AutoparError as error:
        raise InputError(f"schedule={schedule.name!r}: {error}") from error
    if num_devices % schedule.shape.num_devices:
        raise InputError(
            f"schedule {schedule.name!r} with {schedule.shape.num_stages} stages takes "
            f"{schedule.shape.num_devices} pipeline ranks, which does not divide {num_devices} "
            "devices; choose num_stages so that it does"
        )
    return schedule


def _check_name(name: object) -> None:
    try:
        generator_of(name, beside=(AUTO,))
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
            f"cuts is {cuts!r}; give a list of block or module names, one for each stage but the "
            "first"
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
    """Build a schedule by name; `ANY_STAGES` schedules take as many ranks as there are devices."""
    options: dict[str, int] = {}
    if name in ANY_STAGES:
        options["num_devices"] = num_devices
    elif name == "conventional":
        options["reduces"] = True
    elif name == "reverse_first_k":
        options["k"] = 0  # chosen once there are prices
    try:
        return build(name, num_stages=num_stages, num_microbatches=num_microbatches, **options)
    except AutoparError as error:
        raise InputError(
            f"schedule={name!r}: {error}. For other options pass a schedule made by "
            "autopar.schedules.build(...)"
        ) from error
