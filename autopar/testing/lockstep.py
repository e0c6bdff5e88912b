"""All ranks of a program in lockstep in one process, for tests and dry runs.

A value is a list with one shard per rank, an ordinary op runs on each shard, and a collective is a
function of the whole list. There are no processes, no network and no timing; the arithmetic is that
of the real run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from autopar.base.accelerators import kept_generators
from autopar.comm.ops import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_REDUCE_MAX,
    ALL_TO_ALL,
    AXIS_INDEX,
    MASK,
    REDUCE_SCATTER,
    SHARD,
    UNSHARD,
    assemble,
    digit_slice,
)
from autopar.ir.graph import Graph
from autopar.ir.mesh import MICROBATCH, Mesh
from autopar.lowering.streams import Issue
from autopar.lowering.types import RankProgram, TensorMeta
from autopar.runtime.machine.apart import apart
from autopar.runtime.machine.moments import HostMoment, Moment
from autopar.runtime.machine.protocols import NoLinks, Phase
from autopar.runtime.machine.randomness import Draw, Seeds
from autopar.runtime.state.shards import gather, microbatch_of, reduced, scatter
from autopar.runtime.step.executor import Executor, StepResult
from autopar.runtime.step.reductions import Updater
from autopar.testing.lockstep_graphs import Call, calls_of
from autopar.testing.lockstep_links import LockstepLinks, Mail, Turns

__all__ = ["LockstepMachine", "LockstepRun", "gather", "scatter"]

R = TypeVar("R")
Shards = list[Tensor]
Collective = Callable[..., list[Tensor]]


def _all_reduce(parts: Shards, num: int) -> Shards:
    total = reduced(parts)
    return [total.clone() for _ in parts]


def _all_reduce_max(parts: Shards, num: int) -> Shards:
    return [torch.stack(parts).amax(0) for _ in parts]


def _all_gather(parts: Shards, num: int, dim: int, outer: int) -> Shards:
    whole = _joined(parts, dim, outer)
    return [whole, *(whole.clone() for _ in parts[1:])]


def _reduce_scatter(parts: Shards, num: int, dim: int, outer: int) -> Shards:
    total = reduced(parts)
    return [_shard(total, index, num, dim, outer) for index in range(num)]


def _all_to_all(
    parts: Shards, num: int, src_dim: int, src_outer: int, dst_dim: int, dst_outer: int
) -> Shards:
    return [
        _joined([digit_slice(x, num, i, dst_dim, dst_outer) for x in parts], src_dim, src_outer)
        for i in range(num)
    ]


def _joined(parts: Shards, dim: int, outer: int) -> Tensor:
    """The whole of shards that split ``dim`` inside ``outer``; contiguous."""
    if outer == 1:
        return torch.cat(parts, dim).contiguous()
    return assemble(torch.stack(parts), dim, outer)


_COLLECTIVES: dict[Any, Collective] = {
    ALL_REDUCE: _all_reduce,
    ALL_REDUCE_MAX: _all_reduce_max,
    ALL_GATHER: _all_gather,
    REDUCE_SCATTER: _reduce_scatter,
    ALL_TO_ALL: _all_to_all,
}


def _shard(x: Tensor, index: int, num: int, dim: int, outer: int) -> Tensor:
    part = digit_slice(x, num, index, dim, outer)
    return part.clone(memory_format=torch.contiguous_format)


def _unshard(x: Tensor, index: int, num: int, dim: int, outer: int) -> Tensor:
    return _joined([x if i == index else torch.zeros_like(x) for i in range(num)], dim, outer)


def _mask(x: Tensor, index: int, num: int) -> Tensor:
    return x.clone() if index == 0 else torch.zeros_like(x)


def _axis_index(x: Tensor, index: int, num: int) -> Tensor:
    return torch.tensor(index)


_LOCAL_OPS: dict[Any, Callable[..., Tensor]] = {
    SHARD: _shard,
    UNSHARD: _unshard,
    MASK: _mask,
    AXIS_INDEX: _axis_index,
}
"""Functions of one rank's shard and its position in its group."""


@functools.lru_cache(maxsize=1024)
def _groups(mesh: Mesh, label: str) -> tuple[tuple[int, ...], ...]:
    return mesh.groups(mesh.axes_of(label))


@functools.lru_cache(maxsize=1024)
def _inside(mesh: Mesh, label: str) -> tuple[int, tuple[int, ...], bool]:
    """The size of a label's groups without micro-batches, the position of each rank in its own,
    and whether the label names micro-batches."""
    names = label.split(",")
    axes = tuple(mesh.axis_names.index(name) for name in names if name != MICROBATCH)
    places = tuple(mesh.index(rank, axes) for rank in range(mesh.num_devices))
    return mesh.size(axes), places, MICROBATCH in names


class LockstepMachine:
    """Runs a graph on all ranks of a mesh at once."""

    def __init__(self, mesh: Mesh, seed: int = 0) -> None:
        self.mesh = mesh
        self.seeds = Seeds(mesh, seed)
        self.microbatch = 0

    def begin(self, microbatch: int, block: int, phase: Phase) -> None:
        self.microbatch = microbatch
        self.seeds.begin_call(microbatch, block, phase)

    def begin_gather(self, block: int, values: tuple[int, ...]) -> None:
        pass

    def begin_sum(self, value: int, gradient: Shards, contribution: Shards) -> None:
        pass

    def end_sum(self, gradient: Shards) -> None:
        pass

    def on(self, issue: Issue) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def updating(self, gradients: Sequence[Shards]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def end_updates(self) -> None:
        pass

    def moment(self) -> HostMoment:
        return HostMoment()

    @property
    def waits(self) -> Sequence[tuple[Moment, Moment]]:
        return ()

    def run(self, module: fx.GraphModule, arguments: Sequence[Shards]) -> list[Shards]:
        graph = calls_of(module)
        columns: list[Any] = graph.start(self.mesh.num_devices, arguments)
        with torch.no_grad():
            for call in graph.calls:
                operands = [columns[place] for place in call.operands]
                if call.label is not None:
                    columns[call.result] = self._collective(call, call.label, *operands)
                elif call.draw is not None:
                    columns[call.result] = self._drawn(call, call.draw, operands)
                else:
                    columns[call.result] = list(map(call.function, *operands))
        return [columns[place] for place in graph.outputs]

    def _drawn(self, call: Call, draw: Draw, operands: list[Any]) -> list[Any]:
        results = []
        for rank, args in enumerate(zip(*operands)):
            torch.default_generator.manual_seed(self.seeds.seed_of(draw, call.split, rank))
            results.append(call.function(*args))
        return results

    def _collective(self, call: Call, label: str, values: Shards) -> Shards:
        if call.function in _LOCAL_OPS:
            function = _LOCAL_OPS[call.function]
            places = self._places(label)
            return [function(x, place, *call.static) for x, place in zip(values, places)]
        result: list[Any] = [None] * self.mesh.num_devices
        for group in _groups(self.mesh, label):
            parts = [values[r] for r in group]
            for rank, part in zip(group, _COLLECTIVES[call.function](parts, *call.static)):
                result[rank] = part
        return result

    def _places(self, label: str) -> list[int]:
        """Position of each rank along the axes of a label, at the current micro-batch."""
        size, inside, is_timed = _inside(self.mesh, label)
        first = self.microbatch * size if is_timed else 0
        return [first + place for place in inside]

    def add(self, left: Shards, right: Shards) -> Shards:
        return [a + b for a, b in zip(left, right)]

    def add_to(self, left: Shards, right: Shards) -> None:
        for a, b in zip(left, right):
            a.add_(b)

    def add_in(self, dtype: torch.dtype, left: Shards, right: Shards) -> Shards:
        return [a.to(dtype) + b for a, b in zip(left, right)]

    def add_rows(self, rows: Shards, whole: Shards, first: int, end: int) -> None:
        for own, other in zip(rows, whole):
            own.add_(other[first:end])

    def weighted_sum(self, terms: Sequence[tuple[float, Shards]]) -> Shards:
        scaled = [[x * weight for x in value] for weight, value in terms]
        return functools.reduce(self.add, scaled)

    def apart(self, values: Sequence[Shards], others: Iterable[Shards]) -> list[Shards]:
        given = [x for other in others for x in other]
        return [apart(value, given) for value in values]

    def contiguous(self, value: Shards) -> Shards:
        return [x.contiguous() for x in value]

    def start_moves(
        self, moves: list[tuple[fx.GraphModule, Shards]]
    ) -> Callable[[], Sequence[Shards]]:
        results = [self.run(module, [operand])[0] for module, operand in moves]
        moves.clear()
        return lambda: results

    start_gradients = start_moves

    def filled(self, meta: TensorMeta, fill: float) -> Shards:
        return [
            torch.full(meta.shape, fill, dtype=meta.dtype) for _ in range(self.mesh.num_devices)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class LockstepRank:
    """A pipeline rank: parameters and buffers of its stages, on all ranks of its mesh."""

    executor: Executor[Shards]
    parameters: dict[int, Shards]
    buffers: dict[int, Shards]


class LockstepRun:
    """A program with real parameters on all ranks at once; the caller updates them.

    The ranks of a mesh are a list of shards; pipeline ranks take turns, each with its own copy of
    what it holds (`ranks`).
    """

    def __init__(
        self, program: RankProgram, graph: Graph, state: Mapping[str, Tensor], *, seed: int = 0
    ) -> None:
        self.program = program
        self.graph = graph
        self.num_steps = 0
        self.seed = seed
        self.ranks = tuple(
            self._rank(state, device) for device in range(program.pipeline.num_devices)
        )

    def _rank(self, state: Mapping[str, Tensor], device: int) -> LockstepRank:
        program, mesh = self.program, self.program.mesh
        constants = dict(program.constants)
        return LockstepRank(
            executor=Executor(program, LockstepMachine(mesh, self.seed), NoLinks(), device),
            parameters={
                p.value: scatter(state[p.name], p.stored, mesh)
                for p in program.parameters
                if device in p.devices
            },
            buffers={
                b.value: [
                    (constants[b.name] if b.name in constants else state[b.name]).clone()
                    for _ in range(mesh.num_devices)
                ]
                for b in program.buffers
            },
        )

    @property
    def machine(self) -> LockstepMachine:
        """The machine of the first pipeline rank."""
        machine = self.ranks[0].executor.machine
        assert isinstance(machine, LockstepMachine)
        return machine

    @property
    def parameters(self) -> dict[int, Shards]:
        """Parameters by value, each from the first pipeline rank that holds it."""
        return {
            p.value: self.ranks[p.devices[0]].parameters[p.value] for p in self.program.parameters
        }

    @property
    def buffers(self) -> dict[int, Shards]:
        """Buffers by value, each from the pipeline rank that updates it."""
        return {b.value: self.ranks[b.device].buffers[b.value] for b in self.program.buffers}

    def _inputs(self, tensors: Sequence[Tensor], index: int = 0) -> dict[int, Shards]:
        num = self.program.num_microbatches
        return {
            i.value: scatter(microbatch_of(t, i, num, index), i.placements, self.program.mesh)
            for i, t in zip(self.program.inputs, tensors)
        }

    def _play(self, act: Callable[[LockstepRank], R]) -> list[R]:
        """The result of ``act`` on each pipeline rank, with links between them."""
        turns = Turns(len(self.ranks))
        mail = Mail(turns)
        for device, rank in enumerate(self.ranks):
            machine = rank.executor.machine
            assert isinstance(machine, LockstepMachine)
            machine.seeds.begin_step(self.num_steps)
            if len(self.ranks) > 1:
                rank.executor.links = LockstepLinks(mail, device, len(self.ranks))
        with kept_generators(torch.device("cpu")):
            if len(self.ranks) == 1:
                return [act(self.ranks[0])]
            return turns.run([functools.partial(act, rank) for rank in self.ranks])

    def steps(
        self, tensors: Sequence[Tensor], updaters: Sequence[Updater[Shards]] = ()
    ) -> list[StepResult[Shards]]:
        """Forward and backward on each pipeline rank; updates buffers, and parameters by the
        ``updaters`` alone."""
        updater_of = {id(rank): updater for rank, updater in zip(self.ranks, updaters)}

        def act(rank: LockstepRank) -> StepResult[Shards]:
            batches = [self._inputs(tensors, i) for i in range(self.program.num_microbatches)]
            updater = updater_of.get(id(rank))
            result = rank.executor.step(rank.parameters, rank.buffers, batches, updater)
            rank.buffers.update(result.buffers)
            return result

        results = self._play(act)
        self.num_steps += 1
        return results

    def step(self, tensors: Sequence[Tensor]) -> StepResult[Shards]:
        """Like `steps`, for a program without a pipeline."""
        (result,) = self.steps(tensors)
        return result

    def forward(self, tensors: Sequence[Tensor]) -> dict[int, Shards]:
        """Loss and outputs by value, the same on every pipeline rank."""
        return self._play(
            lambda rank: rank.executor.forward(rank.parameters, rank.buffers, self._inputs(tensors))
        )[0]
