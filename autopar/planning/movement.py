"""Offloading: the tensors that move to the host so that a program fits the memory, and its cost.

In: a program whose memory does not fit, and its prices. Out: for each pipeline rank the movement
plan of least traffic within the memory (`autopar.movement.residency`), and by how much the
simulated step is longer than its operations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.base.documents import path_of
from autopar.base.errors import MovementError
from autopar.cost_models.allocator import Category, device_bytes
from autopar.cost_models.hardware import DeviceSpec
from autopar.cost_models.links import pcie_bytes_per_s
from autopar.cost_models.update import OptimizerSpec
from autopar.ir.update import Update as When
from autopar.lowering.types import RankProgram
from autopar.memory.program import ProgramMemory
from autopar.memory.tally import Moment
from autopar.movement.execution import Movement, OpPlace, ProgramStep, Run, Update
from autopar.movement.lifetimes import StepLifetimes
from autopar.movement.plan import MovementFields, MovementPlan
from autopar.movement.program import step_of_program
from autopar.movement.residency import least_traffic
from autopar.movement.simulate import HostLink, simulate
from autopar.movement.verify import stays, worst_case_bytes
from autopar.planning.setting import MemoryLimit
from autopar.plans.document import Plan
from autopar.plans.parts import OffloadPlan
from autopar.plans.refusals import refused
from autopar.pricing.candidate import Candidate

RELATIVE_GAP, TIME_LIMIT_S = 0.01, 5.0
"""How near to the least traffic a plan must be proved, and the time for that, per rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The movement of each pipeline rank, and the time that it adds to a step, which updates its
    parameters as ``update`` says."""

    plans: tuple[MovementPlan, ...]
    memories: tuple[ProgramMemory, ...]
    moved_bytes: int
    stall_s: float
    update: When

    def plan(self) -> OffloadPlan:
        """The movement as plans record it, with its traffic and stall."""
        return OffloadPlan(
            ranks=tuple(map(MovementFields.of, self.plans)),
            moved_bytes=self.moved_bytes,
            stall_s=self.stall_s,
        )


def host_link(device: DeviceSpec) -> HostLink:
    """The link between a device and its host, PCI Express 3.0 if it is not known; a CPU copies
    within its memory."""
    bandwidth = device.host_bandwidth_bytes_per_s or pcie_bytes_per_s(3)
    if device.kind == "cpu":
        bandwidth = device.memory_bandwidth_bytes_per_s / 2
    return HostLink(bandwidth_bytes_per_s=bandwidth)


def moved_to_fit(
    program: RankProgram,
    candidate: Candidate,
    device: DeviceSpec,
    optimizer: OptimizerSpec,
    limit: MemoryLimit,
    update: When,
) -> Moved:
    """The movement with which a program that updates so fits a limit.

    Raises MovementError if there is none.
    """
    steps = steps_of(program, device, optimizer)
    plans = []
    for step in steps:
        movable = step.movable()
        found = least_traffic(
            movable, _capacity(movable.peak_bytes, limit, device), relative_gap=RELATIVE_GAP,
            time_limit_s=TIME_LIMIT_S,
        )  # fmt: skip
        plans.append(found.plan(movable))
    return priced(steps, plans, program, candidate, device, update)


def movement_of(plan: Plan, program: RankProgram, optimizer: OptimizerSpec) -> tuple[Movement, ...]:
    """The movement of each pipeline rank, as its runtime executes a plan's offloading.

    Raises PlanError where it is not for this program, or takes more memory than the plan says.
    """
    if plan.offload is None:
        return ()
    capacity, found = sum(plan.prediction.memory_bytes.values()), []
    try:
        steps = steps_of(program, plan.cluster.device, optimizer)
    except MovementError as error:
        raise refused(str(error), "$.offload") from error
    for number, (step, moves) in enumerate(zip(steps, plan.offload.plans())):
        try:
            found.append(step.execution(moves, capacity))
        except MovementError as error:
            raise refused(str(error), path_of(("offload", "ranks", number))) from error
    return tuple(found)


def steps_of(
    program: RankProgram, device: DeviceSpec, optimizer: OptimizerSpec
) -> tuple[ProgramStep, ...]:
    """The steps of a program's pipeline ranks; raises MovementError as `step_of_program`."""
    ranks = range(program.pipeline.num_devices)
    return tuple(
        step_of_program(program, device, optimizer=optimizer, pipeline_rank=rank) for rank in ranks
    )


def priced(
    steps: Sequence[ProgramStep],
    plans: Sequence[MovementPlan],
    program: RankProgram,
    candidate: Candidate,
    device: DeviceSpec,
    update: When,
) -> Moved:
    """Movement plans with their memory and their cost, in all passes of a step."""
    link, stalls, moved = host_link(device), [], []
    for step, plan in zip(steps, plans):
        times_s = op_times(step, program, candidate)
        movable = step.movable()
        stalls.append(simulate(plan, movable, times_s, link).makespan_s - sum(times_s))
        moved.append(plan.moved_bytes({t.name: t.size_bytes for t in movable.tensors}))
    return Moved(
        plans=tuple(plans),
        memories=tuple(memory_of(s, p, device) for s, p in zip(steps, plans)),
        moved_bytes=update.num_passes * max(moved),
        stall_s=update.num_passes * max(stalls),
        update=update,
    )


def memory_of(step: ProgramStep, plan: MovementPlan, device: DeviceSpec) -> ProgramMemory:
    """The memory of a step under a movement plan, at the worst moment of any transfer speeds."""
    movable = step.movable()
    worst = worst_case_bytes(plan, movable)
    moments = tuple(_moments(step, plan, movable, worst))
    op = max(range(len(worst)), key=worst.__getitem__)
    peak = moments[op].by_category
    by_category = {str(category): size for category, size in sorted(peak.items()) if size}
    return ProgramMemory(
        by_category=by_category,
        peak_at="the end of the step" if op == movable.num_ops else movable.ops[op],
        device_bytes=device_bytes(by_category, device),
        gradient_bytes=max(moment.by_category[Category.GRADIENTS] for moment in moments),
        moments=moments,
    )


def _moments(
    step: ProgramStep, plan: MovementPlan, movable: StepLifetimes, worst: Sequence[int]
) -> Iterator[Moment]:
    """The bytes on the device, at most, while each operation runs, and at the end of the step."""
    changes = [Counter[Category]() for _ in range(len(worst) + 1)]
    for stay in stays(plan, movable):
        tensor = movable.tensors[stay.tensor]
        changes[stay.start][Category(tensor.category)] += tensor.size_bytes
        changes[stay.stop][Category(tensor.category)] -= tensor.size_bytes
    held: Counter[Category] = Counter()
    for op, (change, most) in enumerate(zip(changes, worst)):
        held.update(change)
        found = held.copy()
        found[Category.WORKSPACE] += 0 if op == movable.num_ops else movable.workspace_bytes[op]
        found[Category.COMMUNICATION] += most - found.total()  # in flight
        yield Moment(op, _place_name(step, movable, op), found)


def _place_name(step: ProgramStep, movable: StepLifetimes, op: int) -> str:
    if op == movable.num_ops:
        return "the end of the step"
    place = step.places[op]
    if isinstance(place, Update):
        return "update"
    name = movable.ops[op]
    return name.removesuffix(f"/{place.microbatch}") if isinstance(place, Run) else name


def op_times(step: ProgramStep, program: RankProgram, candidate: Candidate) -> list[float]:
    """Seconds of each operation: graphs of blocks and updates at their prices, others free."""
    times = candidate.times

    def seconds(place: OpPlace) -> float:
        if isinstance(place, Update):
            return sum(times.update_s.get(value, 0.0) for value in place.values)
        if not isinstance(place, Run):
            return 0.0
        block = times.blocks.get(program.blocks[place.block].name)
        if block is None:
            return 0.0
        of_graph = {"F": block.forward_s, "I": block.input_grad_s, "W": block.weight_grad_s}
        return of_graph[place.graph]

    return [seconds(place) for place in step.places]


def _capacity(peak_bytes: int, limit: MemoryLimit, device: DeviceSpec) -> int:
    """The bytes of tensors with which a device's memory holds all that it must."""
    lost = device_bytes({"activations": peak_bytes}, device) / max(peak_bytes, 1)
    return min(limit.tensor_bytes, int(limit.device_bytes / max(lost, 1.0)))
