"""The inputs of a search for a plan, and the state that lives as long as it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache

from autopar.base.accelerators import is_accelerator
from autopar.base.errors import ConstraintError
from autopar.cost_models import Cluster, CommunicationModel, ComputeModel
from autopar.cost_models.allocator import allocator_of
from autopar.cost_models.update import OptimizerSpec, UpdateScope
from autopar.ir.graph import Graph, Value, ValueKind
from autopar.ir.mesh import Mesh
from autopar.ir.placement import redistribute
from autopar.ir.update import Update
from autopar.lowering.types import RankProgram
from autopar.memory.program import ProgramMemory, device_memories
from autopar.passes.prepare import Cut, Prepared
from autopar.planning.constraints import Constraint, MemoryBudget
from autopar.planning.deadline import Deadline
from autopar.planning.search_log import SearchLog
from autopar.planning.space import Space
from autopar.pricing.moves import Routes
from autopar.pricing.tables import Pricing

POINT_BUDGET_LIMIT_S, OPEN_BUDGET_LIMIT_S = 10.0, 3.0
"""Time limits of a search within a budget on one mesh; shorter in an open space, which has many."""

TIME_LIMIT_S, NUM_DEVICES_IN_LIMIT = 60.0, 4096
"""The default time limit of a search in an open space, for up to so many devices."""
SEARCH_SHARE, REFINE_SHARE, LEAST_LOWER_SHARE = 1 / 3, 1 / 12, 1 / 4
"""The share of the time limit for finding options, and that for better orders of the fastest
pipelines; the rest is for lowering them, at least the last share."""
LEAST_OPENED_SHARE, LEAST_WITHOUT_PLAN = 1 / 4, 2 / 3
"""The least share of the time limit for a search of micro-batches and pipelines, with a plan to
beat and without one."""
COMBINATION_SHARE = 1 / 12
"""The share of the time limit after which a combination's other schedules are not simulated."""

Progress = Callable[[str], None]
Measure = Callable[[Space], ComputeModel]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """Memory limits of a device: for tensors, and for all that a process takes."""

    tensor_bytes: int
    device_bytes: int

    def tightest(self, memory: ProgramMemory) -> tuple[int, int]:
        """(needed, available) bytes under the tighter of both limits."""
        return max(
            (memory.peak_bytes, self.tensor_bytes),
            (memory.device_bytes, self.device_bytes),
            key=lambda pair: pair[0] / pair[1],
        )

    def fits(self, memory: ProgramMemory) -> bool:
        needed, available = self.tightest(memory)
        return needed <= available

    def too_small(
        self, memory: ProgramMemory, least_moved_bytes: int | None = None
    ) -> ConstraintError:
        """The error if even the smallest program that was lowered does not fit, and needs
        ``least_moved_bytes`` if everything moves to the host that can."""
        needed, available = self.tightest(memory)
        moved = ""
        if least_moved_bytes is not None:
            moved = (
                f" Even if every tensor moves to the host whenever it can, {least_moved_bytes:,} "
                "bytes are needed."
            )
        return ConstraintError(
            f"no strategy found that fits {available:,} bytes per device; the smallest one tried "
            f"needs {needed:,} bytes, {memory.peak_bytes:,} of them for tensors (at "
            f"{memory.peak_at}).{moved} Use more devices, a smaller batch, or a larger MemoryBudget"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The inputs of a search; ``routes`` caches the redistributions on its meshes.

    Without an ``update`` parameters are updated early where the memory needs it, and the run
    ``may_update_early``. Likewise tensors move to the host unless the space says otherwise, where
    nothing else fits an accelerator and the run ``may_move`` them. ``measure`` gives the prices of
    ops in a space that the planner opens; without it they are those of ``compute``.
    ``time_limit_s``: seconds of processor time, from ``begun_s`` on, for a search in an open space,
    which other load on the machine does not affect; None for `TIME_LIMIT_S`, in proportion longer
    for more than `NUM_DEVICES_IN_LIMIT` devices.
    """

    prepared: Prepared
    cluster: Cluster
    space: Space
    constraints: list[Constraint]
    compute: ComputeModel
    communication: CommunicationModel
    optimizer: OptimizerSpec
    device_type: str
    progress: SearchLog
    update: Update | None = None
    may_update_early: bool = True
    may_move: bool = True
    measure: Measure | None = None
    time_limit_s: float | None = None
    routes: Routes = field(default_factory=lambda: cache(redistribute))
    begun_s: float = field(default_factory=time.process_time)

    def pricing(self, cut: Cut, mesh: Mesh) -> Pricing:
        """The prices of a cut of the model on one mesh."""
        return Pricing(
            cut.analysis, mesh, self.cluster, self.compute, self.communication,
            cut.microbatches, optimizer=self.optimizer, num_passes=self.num_passes,
            routes=self.routes,
        )  # fmt: skip

    def opened(self, space: Space, *, has_plan: bool, reserve_s: float = 0.0) -> Setting:
        """The setting with another space, its ops priced for it, and what is left of the time but
        for ``reserve_s``.

        Without a plan to beat, its searches have a larger share of the limit at least.
        """
        compute = self.compute if self.measure is None else self.measure(space)
        least_share = LEAST_OPENED_SHARE if has_plan else LEAST_WITHOUT_PLAN
        opened = replace(self, space=space, compute=compute)
        return opened.with_what_is_left(least_share, reserve_s)

    def with_what_is_left(self, least_share: float, reserve_s: float = 0.0) -> Setting:
        """The setting whose time limit is what is left of this one's but for ``reserve_s``, and at
        least a share."""
        return self.with_time(max(self.end.left_s - reserve_s, least_share * self._limit_s))

    def with_time(self, limit_s: float) -> Setting:
        """The setting whose time limit is so many seconds from now."""
        return replace(self, time_limit_s=limit_s, begun_s=time.process_time())

    @property
    def _limit_s(self) -> float:
        if self.time_limit_s is not None:
            return self.time_limit_s
        return TIME_LIMIT_S * max(1.0, self.cluster.num_devices / NUM_DEVICES_IN_LIMIT)

    @property
    def search_limit_s(self) -> float:
        return SEARCH_SHARE * self._limit_s

    @property
    def refine_limit_s(self) -> float:
        return REFINE_SHARE * self._limit_s

    @property
    def combination_limit_s(self) -> float:
        return COMBINATION_SHARE * self._limit_s

    @property
    def lower_limit_s(self) -> float:
        """Seconds for lowering options from now on: what is left of the limit, but no more than the
        searches leave of it, and at least `LEAST_LOWER_SHARE`."""
        most_s = (1 - SEARCH_SHARE - REFINE_SHARE) * self._limit_s
        return max(LEAST_LOWER_SHARE * self._limit_s, min(self.end.left_s, most_s))

    @property
    def end(self) -> Deadline:
        """When the time limit is reached."""
        return Deadline(self.begun_s + self._limit_s, self._limit_s)

    @property
    def has_time_left(self) -> bool:
        """Whether the time limit leaves `LEAST_OPENED_SHARE` of it for another search."""
        return self.end.left_s >= LEAST_OPENED_SHARE * self._limit_s

    @property
    def moves_at_last(self) -> bool:
        """Whether tensors move to the host where nothing else fits, unasked."""
        is_open = self.space.offload is None
        return is_open and self.may_move and is_accelerator(self.cluster.device.kind)

    @property
    def num_passes(self) -> int:
        """How often a step is computed."""
        return 1 if self.update is None else self.update.num_passes

    def counted(self, program: RankProgram) -> tuple[ProgramMemory, ...]:
        """The memory of a program on each pipeline device."""
        return device_memories(program, self.cluster.device, optimizer=self.optimizer)

    @property
    def limit(self) -> MemoryLimit:
        """The user's budgets limit the tensors, the device's memory limits everything."""
        usable = int(self.cluster.usable_memory_bytes)
        budgets = [c.size_bytes for c in self.constraints if isinstance(c, MemoryBudget)]
        return MemoryLimit(tensor_bytes=min([usable, *budgets]), device_bytes=usable)

    def check_capacity(self) -> None:
        """Raise ConstraintError where what a step keeps fits no device.

        Every device holds all buffers. Every element of parameters and optimizer state is on some
        device, so the fullest device holds at least its even share, or what must be whole there.
        """
        graph = self.prepared.captured.graph
        stored = [stored_bytes(value, value.shape, self.optimizer) for value in graph.values]
        total, whole = sum(stored), self._whole_bytes(graph)
        buffers, available = graph.buffer_bytes, self.limit.tensor_bytes
        if buffers > available:
            raise ConstraintError(
                f"no strategy fits {available:,} bytes a device: buffers take {buffers:,} bytes, "
                "and every device holds all of them. Use a larger MemoryBudget or smaller buffers"
            )
        share = max(-(-total // self.cluster.num_devices), whole)
        if share + buffers > available and not (self.space.offload or self.moves_at_last):
            beside = f", beside {buffers:,} of buffers" if buffers else ""
            reason = f", where the optimizer needs {whole:,} whole" if share == whole else ""
            raise ConstraintError(
                f"no strategy fits {available:,} bytes a device: parameters and optimizer state "
                f"alone take {total:,} bytes, at least {share:,} on each of "
                f"{self.cluster.num_devices}{reason}{beside}. Use more devices, a larger "
                "MemoryBudget, or offload=True"
            )

    def _whole_bytes(self, graph: Graph) -> int:
        """Bytes of trained parameters and their state that are whole on one device at least."""
        trained = [
            stored_bytes(value, value.shape, self.optimizer)
            for value in graph.parameters if value.differentiable
        ]  # fmt: skip
        if self.optimizer.scope is UpdateScope.MODEL:
            return sum(trained)
        return max(trained, default=0) if self.optimizer.scope is UpdateScope.PARAMETER else 0

    @property
    def budget_bytes(self) -> int:
        """The budget for the estimated memory of tensors.

        It allows for the allocator's fragmentation; memory that a CPU's allocator retains is only
        known once a program is counted.
        """
        limit, lost = self.limit, allocator_of(self.cluster.device).fragmentation
        return min(limit.tensor_bytes, int(limit.device_bytes / (1 + lost)))

    @property
    def budget_limit_s(self) -> float:
        return OPEN_BUDGET_LIMIT_S if self.space.is_open else POINT_BUDGET_LIMIT_S

    @property
    def is_free(self) -> bool:
        """Whether a known strategy may replace an option: there are no constraints but budgets."""
        return all(isinstance(constraint, MemoryBudget) for constraint in self.constraints)


def stored_bytes(value: Value, shape: tuple[int, ...], optimizer: OptimizerSpec) -> int:
    """Bytes of a parameter of this shape with its optimizer state; 0 for other values."""
    if value.kind is not ValueKind.PARAMETER:
        return 0
    copies = 1 + optimizer.num_states if value.differentiable else 1
    return copies * math.prod(shape) * value.stored_dtype.itemsize


def listed(constraints: object) -> list[Constraint]:
    """One constraint or several as a list; raises ConstraintError for anything else."""
    given: list[object] = [constraints]
    if isinstance(constraints, Iterable) and not isinstance(constraints, str):
        given = list(constraints)
    found: list[Constraint] = []
    for constraint in given:
        if not isinstance(constraint, Constraint):
            raise ConstraintError(
                f"constraints holds {constraint!r}, which is not a Force, Forbid, Pin or "
                "MemoryBudget; write constraints=[autopar.Force('zero3')]"
            )
        found.append(constraint)
    return found
