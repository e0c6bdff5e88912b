"""The pipeline of a program: the stage of each block, and the tensors sent between stages.

In: a lowered program (all blocks, on the mesh that every stage has), the stage of each block, and a
schedule. Out: the same program with a `Pipeline`, and with the devices that hold each parameter. A
value that a later stage reads is passed from stage to stage, and its gradient is passed back, so
each boundary has one message per direction and micro-batch, of shapes known before anything runs.
``device`` here means a position in the pipeline: the ranks of one mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.base.errors import PlanError
from autopar.lowering.types import (
    NO_STAGE,
    Boundary,
    BufferProgram,
    OutputProgram,
    ParameterProgram,
    Pipeline,
    RankProgram,
    TensorMeta,
)
from autopar.schedules import (
    Action,
    Durations,
    Kind,
    PipelineShape,
    Schedule,
    Step,
    build,
    step,
    verify,
    with_communication,
)
from autopar.schedules.runnable import check_runs, uses_side_stream
from autopar.schedules.transforms.communication import message_of
from autopar.schedules.transforms.reductions import with_replica_sums


def serial_schedule(num_microbatches: int) -> Schedule:
    """One stage: the forward and backward pass of one micro-batch after the other."""
    return build("1f1b", num_stages=1, num_microbatches=num_microbatches)


def serial_pipeline(has_stage: Sequence[bool], schedule: Schedule) -> Pipeline:
    """All blocks (except those without a stage) in one stage on one device."""
    stages = tuple(0 if staged else NO_STAGE for staged in has_stage)
    return Pipeline(schedule=schedule, stage_of_block=stages, boundaries=())


def forward_schedule(placement: tuple[int, ...], num_devices: int = 1) -> Schedule:
    """One micro-batch forward through the stages, without a backward pass.

    Each device without a stage gets an empty one after the last.
    """
    idle = sorted(set(range(num_devices)).difference(placement))
    shape = PipelineShape(num_microbatches=1, placement=((*placement, *idle),))
    devices: list[list[Step]] = [[] for _ in range(num_devices)]
    for stage, device in enumerate(shape.placement[0]):
        action = Action(stage, Kind.F, 0)
        devices[device].append(step(action))
        message = message_of(action, shape)
        if message is not None:
            send, receive, receiver = message
            devices[device].append(step(send))
            devices[receiver].append(step(receive))
    return Schedule(name="forward", shape=shape, devices=tuple(map(tuple, devices)))


def with_pipeline(
    program: RankProgram, stage_of: Mapping[str, int], schedule: Schedule
) -> RankProgram:
    """``program`` cut into stages that ``schedule`` runs; ``stage_of`` is by block name.

    Raises PlanError if the schedule does not fit the program, or several replicas of a stage would
    update its buffers; ScheduleError if the schedule breaks a rule.
    """
    _check_schedule(program, schedule)
    schedule = with_replica_sums(schedule)
    if not schedule.explicit_communication:
        schedule = with_communication(schedule, Durations(F=1.0, I=1.0, W=1.0))
    stages = tuple(
        stage_of[block.name] if block.role.has_stage else NO_STAGE for block in program.blocks
    )
    cut = _Cut(program, stages, schedule)
    return replace(
        program,
        pipeline=Pipeline(schedule=schedule, stage_of_block=stages, boundaries=cut.boundaries()),
        parameters=cut.parameters(),
        buffers=cut.buffers(),
        loss=None if program.loss is None else cut.output(program.loss),
        outputs=tuple(cut.output(output) for output in program.outputs),
    )


def _check_schedule(program: RankProgram, schedule: Schedule) -> None:
    if any(item.action.kind in (Kind.I, Kind.B) for row in schedule.devices for item in row):
        verify(schedule)
    if schedule.shape.num_microbatches != program.num_microbatches:
        raise PlanError(
            f"schedule {schedule.name!r} is for {schedule.shape.num_microbatches} micro-batches, "
            f"the program has {program.num_microbatches}; pass "
            f"num_microbatches={schedule.shape.num_microbatches}"
        )
    check_runs(schedule)


def has_side_stream(program: RankProgram) -> bool:
    """Whether the schedule runs weight gradients on a second compute stream."""
    return uses_side_stream(program.pipeline.schedule)


def has_late_updates(program: RankProgram) -> bool:
    """Whether the schedule updates weights with the previous training step's gradients."""
    return any(item.lag for row in program.pipeline.schedule.devices for item in row)


class _Cut:
    """The values that the stages of one program read and produce."""

    def __init__(self, program: RankProgram, stages: tuple[int, ...], schedule: Schedule) -> None:
        self.program = program
        self.shape = schedule.shape
        self.stages = stages
        self.made_in: dict[int, int] = {}
        self.read_until: dict[int, int] = {}
        self.graded_until: dict[int, int] = {}
        self.metas: dict[int, TensorMeta] = {}
        for stage, block in zip(stages, program.blocks):
            kernel = program.kernels[block.kernel]
            for value, meta in zip(block.interface.outputs, kernel.output_metas):
                self.metas[value] = TensorMeta.contiguous(meta.shape, meta.dtype)
                if stage != NO_STAGE:
                    self.made_in[value] = stage
            for value in block.interface.inputs:
                self.read_until[value] = max(self.read_until.get(value, stage), stage)
            graded = kernel.input_grads if kernel.cotangents else ()
            for operand in graded:
                value = block.interface.inputs[operand]
                self.graded_until[value] = max(self.graded_until.get(value, stage), stage)

    def boundaries(self) -> tuple[Boundary, ...]:
        result = []
        for stage in range(self.shape.num_stages - 1):
            crossing = [v for v, made in self.made_in.items() if made <= stage]
            values = tuple(v for v in crossing if self.read_until.get(v, NO_STAGE) > stage)
            gradients = tuple(v for v in values if self.graded_until.get(v, NO_STAGE) > stage)
            result.append(
                Boundary(
                    values=values,
                    metas=tuple(self.metas[v] for v in values),
                    gradients=gradients,
                    gradient_metas=tuple(self.metas[v] for v in gradients),
                )
            )
        return tuple(result)

    def _devices_of(self, stages: set[int]) -> tuple[int, ...]:
        return tuple(sorted({row[stage] for row in self.shape.placement for stage in stages}))

    def parameters(self) -> tuple[ParameterProgram, ...]:
        """Each parameter on the devices of the stages that use it; an unused one on the first.

        Their gradients accumulate whole, as micro-batches of several stages alternate.
        """
        users: dict[int, set[int]] = {}
        for stage, block in zip(self.stages, self.program.blocks):
            for value in block.interface.parameters:
                users.setdefault(value, set()).add(stage)
        return tuple(
            replace(
                p,
                devices=self._devices_of(users[p.value]) if p.value in users else (0,),
                scattered=False,
            )
            for p in self.program.parameters
        )

    def buffers(self) -> tuple[BufferProgram, ...]:
        """Each buffer, with the device that updates it if training does."""
        result = []
        for buffer in self.program.buffers:
            stage = NO_STAGE
            if buffer.following is not None:
                stage = self.made_in.get(buffer.following.value, NO_STAGE)
            if stage != NO_STAGE:
                self._check_buffer(buffer, stage)
                devices = self._devices_of({stage})
                shared = devices if self.shape.num_replicas > 1 else ()
                buffer = replace(buffer, device=self.shape.placement[0][stage], shared=shared)
            result.append(buffer)
        return tuple(result)

    def _check_buffer(self, buffer: BufferProgram, stage: int) -> None:
        name, value = buffer.name, buffer.value
        if self.shape.num_replicas > 1 and buffer.factor is None:
            raise PlanError(
                f"buffer {name!r} is updated in stage {stage}, of which this schedule has "
                f"{self.shape.num_replicas} replicas, each with other micro-batches; only the "
                "running statistics of a batch norm with a momentum, and counts, are put together "
                "from these. Use a schedule with one replica, such as schedule='1f1b'"
            )
        readers = {
            other
            for other, block in zip(self.stages, self.program.blocks)
            if value in block.interface.inputs
        }
        if readers - {stage}:
            raise PlanError(
                f"buffer {name!r} is updated in stage {stage} and read in stage "
                f"{min(readers - {stage})}; cut the stages so that both are in one"
            )

    def output(self, output: OutputProgram) -> OutputProgram:
        """An output with the devices that can compute it: those of its stage, or all."""
        stage = self.made_in.get(output.value, NO_STAGE)
        if stage != NO_STAGE:
            return replace(output, devices=self._devices_of({stage}))
        holders = {p.value: p.devices for p in self.parameters()}
        return replace(output, devices=holders.get(output.value))
