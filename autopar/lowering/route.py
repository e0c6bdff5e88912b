"""The work of one pipeline device in a step: its actions in order, and tables by block.

In: a program and a device's position in the pipeline. Out: frozen tables, built once, that the
executor reads in every step. Nothing here depends on tensors or processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.lowering.types import (
    NO_STAGE,
    BufferProgram,
    Kernel,
    ParameterProgram,
    RankProgram,
    read_back,
)
from autopar.schedules.action import RECV_KINDS, SEND_KINDS, Action, Kind
from autopar.schedules.schedule import PipelineShape, Schedule

_WEIGHT_KINDS = (Kind.W, Kind.B)
_FORWARD_KINDS, _BACKWARD_KINDS = (Kind.F, Kind.R), (Kind.I, Kind.B)

NUM_AHEAD = 1
"""How many receives of a link are posted before their turn in the schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The tables of one device.

    * ``actions``: in order of issue, one micro-batch each;
    * ``blocks``: per stage the positions of its blocks;
    * ``dropped``, ``released``: per block the values, and the parameters, that no later block of
      its stage and no later stage reads;
    * ``read_back``: per block the parameters that its backward pass reads; ``released_back``: those
      that no earlier block of its stage does;
    * ``readings``: how often blocks read each parameter in a step, forward and backward;
    * ``crossing``: per stage the values that it sends to the next; ``finished``: those that leave
      the program from it; ``handed_out``: those that leave a forward program, at its end;
    * ``updated``: per stage the buffers whose next value it computes; ``copied``: those whose next
      value no stage computes; ``loss_stage``: the stage that computes the loss; ``num_losses``: the
      number of micro-batches whose loss this device computes;
    * ``parameters``: per stage the trainable parameters that it uses;
    * ``late_updates``: the updates with the previous step's gradients;
    * ``contributions``: the number of additions to each parameter's gradient in a step;
    * ``reads``: the number of backward graphs (I and W) of a step whose blocks have the parameter;
    * ``replicated``: per stage of this device that has replicas on others, the devices of all
      replicas, and the parameters that only this stage uses, whose gradients are summed over them;
    * ``summed``: by set of devices, the other parameters that these devices hold and whose
      gradients are summed over them; the same on every device;
    * ``incoming``: per other device the receives from it, in the order of its sends;
    * ``arrived``: per receive, the sends of this device that have certainly arrived before it.
    """

    device: int
    actions: tuple[Action, ...]
    blocks: dict[int, tuple[int, ...]]
    dropped: dict[int, tuple[int, ...]]
    released: dict[int, tuple[int, ...]]
    read_back: dict[int, tuple[int, ...]]
    released_back: dict[int, tuple[int, ...]]
    readings: Counter[int]
    crossing: dict[int, frozenset[int]]
    finished: dict[int, tuple[int, ...]]
    handed_out: frozenset[int]
    updated: dict[int, tuple[BufferProgram, ...]]
    copied: tuple[BufferProgram, ...]
    loss_stage: int
    num_losses: int
    parameters: dict[int, tuple[int, ...]]
    late_updates: frozenset[Action]
    contributions: Counter[int]
    reads: Counter[int]
    replicated: dict[int, tuple[tuple[int, ...], tuple[ParameterProgram, ...]]]
    summed: dict[tuple[int, ...], tuple[ParameterProgram, ...]]
    incoming: dict[int, tuple[Action, ...]]
    arrived: dict[Action, tuple[Action, ...]]

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches of which the device computes something."""
        return len({action.microbatch for action in self.actions} - {None})


def route_of(program: RankProgram, device: int) -> Route:
    """The tables of one device, by its position in the pipeline."""
    return _Routes(program).of(device)


def routes_of(program: RankProgram) -> Iterator[Route]:
    """The tables of every device of the pipeline, in order."""
    routes = _Routes(program)
    return (routes.of(device) for device in range(program.pipeline.num_devices))


class _Routes:
    """The tables that the routes of a program share."""

    def __init__(self, program: RankProgram) -> None:
        shape, schedule = program.pipeline.shape, program.pipeline.schedule
        self.program, self.shape = program, shape
        self.orders = [_singles(schedule, d) for d in range(shape.num_devices)]
        self.blocks = {
            stage: tuple(i for i, s in enumerate(program.pipeline.stage_of_block) if s == stage)
            for stage in range(shape.num_stages)
        }
        self.ends = ends = _Ends.of(program)
        self.dropped: dict[int, tuple[int, ...]] = {}
        self.released: dict[int, tuple[int, ...]] = {}
        for stage, positions in self.blocks.items():
            kept = ends.crossing[stage].union(ends.finished[stage], ends.handed_out)
            _note_last_uses(program, positions, kept, self.dropped, self.released)
        self.read_back = {i: read_back(program, block) for i, block in enumerate(program.blocks)}
        self.released_back: dict[int, tuple[int, ...]] = {}
        for positions in self.blocks.values():
            seen: set[int] = set()
            for position in positions:
                values = self.read_back[position]
                self.released_back[position] = tuple(v for v in values if v not in seen)
                seen.update(values)
        self.counts = [_contributions(program, order, self.blocks) for order in self.orders]
        self.parameters = _trained(program, self.blocks)
        self.replicated, self.summed = _summed(program, self.parameters, self.counts)

    def of(self, device: int) -> Route:
        incoming: dict[int, list[Action]] = {}
        for action in self.orders[device]:
            if action.kind in RECV_KINDS:
                incoming.setdefault(peer_of(action, self.shape), []).append(action)
        ends, order = self.ends, self.orders[device]
        steps = self.program.pipeline.schedule.devices[device]
        return Route(
            device=device,
            actions=tuple(self.orders[device]),
            blocks=self.blocks,
            dropped=self.dropped,
            released=self.released,
            read_back=self.read_back,
            released_back=self.released_back,
            readings=self._readings(self.orders[device]),
            crossing=ends.crossing,
            finished=ends.finished,
            handed_out=ends.handed_out,
            updated=ends.updated,
            copied=ends.copied,
            loss_stage=ends.loss_stage,
            num_losses=sum((a.kind, a.stage) == (Kind.F, ends.loss_stage) for a in order),
            parameters=self.parameters,
            late_updates=frozenset(item.action for item in steps if item.lag),
            contributions=self.counts[device],
            reads=_reads(self.program, order, self.blocks),
            replicated={s: found for s, found in self.replicated.items() if device in found[0]},
            summed=self.summed,
            incoming={peer: tuple(found) for peer, found in incoming.items()},
            arrived=_arrived(self.orders, device, self.shape),
        )

    def _readings(self, order: Sequence[Action]) -> Counter[int]:
        counts: Counter[int] = Counter()
        for action in order:
            for position in self.blocks.get(action.stage, ()):
                if action.kind in _FORWARD_KINDS:
                    counts.update(set(self.program.blocks[position].interface.parameters))
                elif action.kind in _BACKWARD_KINDS:
                    counts.update(self.read_back[position])
        return counts


def peer_of(action: Action, shape: PipelineShape) -> int:
    """The device at the other end of a send or a receive."""
    step = 1 if action.kind in (Kind.SEND_F, Kind.RECV_B) else -1
    return shape.placement[action.replica][action.stage + step]


def _singles(schedule: Schedule, device: int) -> list[Action]:
    """The device's actions, those over several micro-batches written out one by one."""
    return [
        action if action.span == 1 else action._replace(microbatch=microbatch, span=1)
        for action, *_ in schedule.devices[device]
        for microbatch in (action.microbatches or (action.microbatch,))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    """The values that leave each stage; see `Route`."""

    crossing: dict[int, frozenset[int]]
    finished: dict[int, tuple[int, ...]]
    handed_out: frozenset[int]
    updated: dict[int, tuple[BufferProgram, ...]]
    copied: tuple[BufferProgram, ...]
    loss_stage: int

    @staticmethod
    def of(program: RankProgram) -> _Ends:
        pipeline = program.pipeline
        stages = range(pipeline.shape.num_stages)
        made_in = {
            value: stage
            for stage, block in zip(pipeline.stage_of_block, program.blocks)
            for value in block.interface.outputs
        }
        updates = [b for b in program.buffers if b.following is not None]
        stage_of = {b.value: made_in.get(b.following.value, NO_STAGE) for b in updates}  # type: ignore[union-attr]
        wanted = [b.following.value for b in updates]  # type: ignore[union-attr]
        wanted += [o.value for o in program.outputs]
        if program.loss is not None:
            wanted.append(program.loss.value)
        boundaries = [frozenset(b.values) for b in pipeline.boundaries]
        return _Ends(
            crossing=dict(zip(stages, (*boundaries, frozenset[int]()))),
            finished={
                s: tuple(v for v in dict.fromkeys(wanted) if made_in.get(v) == s) for s in stages
            },
            handed_out=_handed_out(program),
            updated={s: tuple(b for b in updates if stage_of[b.value] == s) for s in stages},
            copied=tuple(b for b in updates if stage_of[b.value] == NO_STAGE),
            loss_stage=NO_STAGE
            if program.loss is None
            else made_in.get(program.loss.value, NO_STAGE),
        )


def _handed_out(program: RankProgram) -> frozenset[int]:
    """The values that a forward program hands out at its end: its outputs and its loss."""
    actions = (entry.action for steps in program.pipeline.schedule.devices for entry in steps)
    if any(action.kind in _BACKWARD_KINDS for action in actions):
        return frozenset()
    losses = () if program.loss is None else (program.loss,)
    return frozenset(output.value for output in (*program.outputs, *losses))


def _note_last_uses(
    program: RankProgram,
    positions: Sequence[int],
    kept: frozenset[int],
    dropped: dict[int, tuple[int, ...]],
    released: dict[int, tuple[int, ...]],
) -> None:
    """Record, per block of a stage, the values that no later block of it reads."""
    seen: set[int] = set()
    for position in reversed(positions):
        interface = program.blocks[position].interface
        values = dict.fromkeys((*interface.outputs, *interface.inputs))
        dropped[position] = tuple(v for v in values if v not in seen and v not in kept)
        released[position] = tuple(v for v in interface.parameters if v not in seen)
        seen.update(values, interface.parameters)


def _contributions(
    program: RankProgram, order: Sequence[Action], blocks: dict[int, tuple[int, ...]]
) -> Counter[int]:
    runs = Counter(action.stage for action in order if action.kind in _WEIGHT_KINDS)
    counts: Counter[int] = Counter()
    for stage, num_runs in runs.items():
        for position in blocks[stage]:
            block = program.blocks[position]
            kernel = program.kernels[block.kernel]
            if has_weight_graph(kernel):
                for operand in kernel.weight_grads:
                    value = block.interface.parameters[operand - len(block.interface.inputs)]
                    counts[value] += num_runs
    return counts


def _reads(
    program: RankProgram, order: Sequence[Action], blocks: dict[int, tuple[int, ...]]
) -> Counter[int]:
    counts: Counter[int] = Counter()
    for action in order:
        for position in blocks[action.stage] if action.kind in (Kind.I, *_WEIGHT_KINDS) else ():
            block = program.blocks[position]
            has_weight = has_weight_graph(program.kernels[block.kernel])
            num = (action.kind is not Kind.W) + (action.kind is not Kind.I and has_weight)
            counts.update(dict.fromkeys(block.interface.parameters, num))
    return counts


def has_weight_graph(kernel: Kernel) -> bool:
    """Whether W of a block with this kernel runs."""
    return bool(kernel.cotangents) and kernel.backward_weight is not None


def _trained(
    program: RankProgram, blocks: dict[int, tuple[int, ...]]
) -> dict[int, tuple[int, ...]]:
    trainable = {p.value for p in program.parameters if p.trainable}
    used = {
        stage: {value for place in places for value in program.blocks[place].interface.parameters}
        for stage, places in blocks.items()
    }
    return {stage: tuple(sorted(trainable & values)) for stage, values in used.items()}


_Summed = tuple[tuple[int, ...], tuple[ParameterProgram, ...]]


def _summed(
    program: RankProgram,
    parameters: dict[int, tuple[int, ...]],
    counts: Sequence[Counter[int]],
) -> tuple[dict[int, _Summed], dict[tuple[int, ...], tuple[ParameterProgram, ...]]]:
    """Parameters held by several devices: by stage if one stage uses them, else by devices."""
    users = Counter(value for values in parameters.values() for value in values)
    stage_of = {value: stage for stage, values in parameters.items() for value in values}
    of_stages: dict[int, list[ParameterProgram]] = {}
    found: dict[tuple[int, ...], list[ParameterProgram]] = {}
    for parameter in program.parameters:
        value, devices = parameter.value, parameter.devices
        if len(devices) == 1 or not any(counts[d][value] for d in devices):
            continue
        if users[value] == 1:
            of_stages.setdefault(stage_of[value], []).append(parameter)
        else:
            found.setdefault(devices, []).append(parameter)
    return (
        {stage: (group[0].devices, tuple(group)) for stage, group in of_stages.items()},
        {devices: tuple(found[devices]) for devices in sorted(found)},
    )


def _arrived(
    orders: Sequence[Sequence[Action]], device: int, shape: PipelineShape
) -> dict[Action, tuple[Action, ...]]:
    """The sends that have certainly arrived when a receive has.

    The other device sent the received message after it had used theirs.
    """
    arrived: dict[Action, list[Action]] = {}
    answers: dict[int, dict[tuple[int, int | None, bool], Action]] = {}
    for action in orders[device]:
        if action.kind not in SEND_KINDS:
            continue
        peer = peer_of(action, shape)
        if peer not in answers:
            answers[peer] = _answers(orders[peer], device, shape)
        forward = action.kind is Kind.SEND_F
        used_by = (action.stage + (1 if forward else -1), action.microbatch, forward)
        answer = answers[peer].get(used_by)
        if answer is not None:
            step = 1 if answer.kind is Kind.SEND_F else -1
            kind = Kind.RECV_F if answer.kind is Kind.SEND_F else Kind.RECV_B
            receive = answer._replace(kind=kind, stage=answer.stage + step)
            arrived.setdefault(receive, []).append(action)
    return {receive: tuple(sends) for receive, sends in arrived.items()}


def _answers(
    order: Sequence[Action], device: int, shape: PipelineShape
) -> dict[tuple[int, int | None, bool], Action]:
    """The first send to ``device`` after the start of each computation.

    Keys: stage, micro-batch, and whether it is a forward pass.
    """
    found: dict[tuple[int, int | None, bool], Action] = {}
    answer: Action | None = None
    for action in reversed(order):
        if action.kind in SEND_KINDS and peer_of(action, shape) == device:
            answer = action
        if answer is not None and action.kind in (Kind.F, Kind.I, Kind.B):
            found[action.stage, action.microbatch, action.kind is Kind.F] = answer
    return found
