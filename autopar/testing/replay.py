"""One training step of two streams, replayed in any order that their events allow.

The executor issues a step to a `ReplayMachine`, which computes nothing yet: it notes operations on
two queues, with the events that they wait for. Then the step is played in an order that a `Choose`
draws: at any time either stream may run its next operation, unless that waits for an event of the
other. Memory is that of PyTorch's caching allocator at its least patient: what the host released is
lost as soon as its own stream, and those for which a use was recorded, have come to that point. An
operation that reads what has not been made, or what is lost, raises Hazard. All ranks of a mesh
run in lockstep (`autopar.testing.lockstep`), so results can be compared with eager PyTorch. The
side stream is that of weight gradients or, if a program updates early, that of updates.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autopar.base.accelerators import kept_generators
from autopar.base.errors import AutoparError
from autopar.lowering.streams import Issue, Part
from autopar.lowering.types import RankProgram, TensorMeta
from autopar.runtime.machine.protocols import NoLinks, Phase
from autopar.runtime.machine.streams import UpdateStream
from autopar.runtime.state.shards import microbatch_of, scatter
from autopar.runtime.step.executor import ActionSpan, Executor
from autopar.runtime.step.reductions import Arrived, Gradients
from autopar.schedules.action import Action
from autopar.schedules.schedule import Resource
from autopar.testing.lockstep import LockstepMachine

Shards = list[Tensor]
Choose = Callable[[Sequence[Resource]], Resource]
"""Draws the stream that runs next from those that can."""
STREAMS = (Resource.MAIN, Resource.SIDE)
LEARNING_RATE = 0.125
"""Of early updates, which are plain gradient descent."""


class Hazard(AutoparError):
    """An order of two streams in which an operation reads what is not there."""


def main_first(streams: Sequence[Resource]) -> Resource:
    """The side stream runs only what the main stream waits for."""
    return streams[0]


def side_first(streams: Sequence[Resource]) -> Resource:
    """The side stream runs whatever it can."""
    return streams[-1]


@dataclass(slots=True)
class _Storage:
    """The memory of a rank that values share: views of one tensor."""

    size_bytes: int = 0
    num_values: int = 0


@dataclass(slots=True, eq=False)
class _Memory:
    """The shards of one value, on the stream that makes it, and the streams that it was noted to
    be used on. Views are copied, but share the ``storage`` that is counted."""

    stream: Resource
    shards: Shards | None = None
    storage: _Storage = field(default_factory=_Storage)
    is_lost: bool = False
    users: set[Resource] = field(default_factory=set)

    def read(self, what: str) -> Shards:
        if self.is_lost:
            raise Hazard(f"{what} reads memory that was released: a use of it was not recorded")
        if self.shards is None:
            raise Hazard(f"{what} reads a value before it is made: it does not wait for its event")
        return self.shards


class Cell:
    """A value that will be made when its stream comes to it; released with its last reference."""

    def __init__(self, memory: _Memory, tape: _Tape | None = None) -> None:
        self.memory = memory
        self._tape = tape

    def __del__(self) -> None:
        if self._tape is not None:
            self._tape.release(self.memory)


@dataclass(frozen=True, slots=True)
class _Op:
    """An operation of a queue, which waits until a stream has run so many operations."""

    run: Callable[[], None]
    waits: tuple[Resource, int] | None = None


class _Tape:
    """The operations issued to two streams, and their replay."""

    def __init__(self) -> None:
        self.queues: dict[Resource, list[_Op]] = {stream: [] for stream in STREAMS}
        self.done = dict.fromkeys(STREAMS, 0)
        self._released: list[tuple[_Memory, dict[Resource, int]]] = []
        self._held_bytes = 0
        self.peak_bytes = 0

    def release(self, memory: _Memory) -> None:
        streams = {memory.stream, *memory.users}
        self._released.append((memory, {s: len(self.queues[s]) for s in streams}))

    def take(
        self, given: Sequence[_Memory], made: Sequence[_Memory], results: Sequence[Shards]
    ) -> None:
        """Take the results of an operation, and note the memory that is new."""
        storages = {_place(memory.shards[0]): memory.storage for memory in given if memory.shards}
        for memory, shards in zip(made, results, strict=True):
            place, size_bytes = _place(shards[0]), shards[0].untyped_storage().nbytes()
            memory.storage = storages.setdefault(place, _Storage(size_bytes))
            self._held_bytes += 0 if memory.storage.num_values else memory.storage.size_bytes
            memory.storage.num_values += 1
        for memory, shards in zip(made, results, strict=True):
            memory.shards = [shard.clone() for shard in shards]
        self.peak_bytes = max(self.peak_bytes, self._held_bytes)

    def play(self, choose: Choose) -> None:
        """Run all operations; raises Hazard."""
        while able := [stream for stream in STREAMS if self._can_run(stream)]:
            stream = choose(able)
            self.queues[stream][self.done[stream]].run()
            self.done[stream] += 1
            self._lose()
        stuck = [s.value for s in STREAMS if self.done[s] < len(self.queues[s])]
        assert not stuck, f"streams wait for each other: {stuck}"

    def _can_run(self, stream: Resource) -> bool:
        if self.done[stream] == len(self.queues[stream]):
            return False
        waits = self.queues[stream][self.done[stream]].waits
        return waits is None or self.done[waits[0]] >= waits[1]

    def _lose(self) -> None:
        kept = []
        for memory, until in self._released:
            if any(self.done[stream] < place for stream, place in until.items()):
                kept.append((memory, until))
                continue
            memory.is_lost, memory.shards = True, None
            memory.storage.num_values -= 1
            self._held_bytes -= 0 if memory.storage.num_values else memory.storage.size_bytes
        self._released = kept


class TapeMoment:
    """A moment of a stream; its time is the number of operations that all streams had run."""

    def __init__(self, stream: Resource, tape: _Tape) -> None:
        self.stream = stream
        self.at: int | None = None
        self._tape = tape

    def passed(self) -> None:
        self.at = sum(self._tape.done.values())

    def elapsed_time(self, later: TapeMoment) -> float:
        assert self.at is not None, "the stream has not come to it"
        assert later.at is not None, "the stream has not come to it"
        return 1e3 * (later.at - self.at)


class _TapeStream:
    """A stream of the tape, with the calls of a stream of torch."""

    def __init__(self, tape: _Tape, resource: Resource) -> None:
        self.resource = resource
        self._tape = tape

    def record_event(self, event: Any = None) -> tuple[Resource, int]:
        return self.resource, len(self._tape.queues[self.resource])

    def wait_event(self, event: tuple[Resource, int]) -> None:
        self._tape.queues[self.resource].append(_Op(_nothing, event))

    def wait_stream(self, other: _TapeStream) -> None:
        self.wait_event(other.record_event())


class _TapeModule:
    """The streams of the tape, with the calls of a module such as `torch.cuda`."""

    def __init__(self, machine: ReplayMachine) -> None:
        self._machine = machine

    def Stream(self, device: torch.device) -> _TapeStream:
        return _TapeStream(self._machine.tape, Resource.SIDE)

    def current_stream(self, device: torch.device) -> _TapeStream:
        return _TapeStream(self._machine.tape, self._machine.stream)

    @contextlib.contextmanager
    def stream(self, stream: _TapeStream) -> Iterator[None]:
        outer, self._machine.stream = self._machine.stream, stream.resource
        yield
        self._machine.stream = outer


class ReplayMachine:
    """The `Machine` that notes a step instead of running it. ``stream`` is the current one."""

    def __init__(self, inner: LockstepMachine) -> None:
        self.inner = inner
        self.tape = _Tape()
        self.stream = Resource.MAIN
        self.updates = UpdateStream(torch.device("cuda"), _TapeModule(self))
        self._notes_uses = False
        self._events: dict[int, tuple[Resource, int]] = {}
        self._name = "the step"
        self._call: tuple[int, int, Phase] | None = None

    @contextlib.contextmanager
    def on(self, issue: Issue) -> Iterator[None]:
        outer = self.stream, self._notes_uses, self._name
        self.stream, self._notes_uses, self._name = issue.stream, bool(issue.uses), str(issue)
        for number in issue.waits:
            self.tape.queues[self.stream].append(_Op(_nothing, self._events[number]))
        yield
        if issue.records:
            self._events[issue.number] = self.stream, len(self.tape.queues[self.stream])
        self.stream, self._notes_uses, self._name = outer

    def updating(self, gradients: Sequence[Cell]) -> contextlib.AbstractContextManager[None]:
        return self.updates.on(gradients)

    def end_updates(self) -> None:
        self.updates.join()

    def moment(self) -> TapeMoment:
        made = TapeMoment(self.stream, self.tape)
        self.tape.queues[self.stream].append(_Op(made.passed))
        return made

    @property
    def waits(self) -> Sequence[tuple[TapeMoment, TapeMoment]]:
        return ()

    def begin(self, microbatch: int, block: int, phase: Phase) -> None:
        self._call = microbatch, block, phase

    def begin_gather(self, block: int, values: tuple[int, ...]) -> None:
        pass

    def begin_sum(self, value: int, gradient: Cell, contribution: Cell) -> None:
        pass

    def end_sum(self, gradient: Cell) -> None:
        pass

    def _op(
        self, function: Callable[[list[Shards]], Sequence[Shards]], read: Sequence[Cell], num: int
    ) -> list[Cell]:
        """Note an operation with ``num`` results, which are new memory."""
        given = [cell.memory for cell in read]
        if self._notes_uses:
            for memory in given:
                memory.users.add(self.stream)
        made = [_Memory(self.stream) for _ in range(num)]
        name, tape = self._name, self.tape

        def run() -> None:
            results = function([memory.read(name) for memory in given])
            tape.take(given, made, results)

        tape.queues[self.stream].append(_Op(run))
        return [Cell(memory, tape) for memory in made]

    def run(self, module: fx.GraphModule, arguments: Sequence[Cell]) -> list[Cell]:
        call, inner = self._call, self.inner

        def function(given: list[Shards]) -> list[Shards]:
            if call is not None:
                inner.begin(*call)
            return inner.run(module, given)

        (output,) = (node for node in module.graph.nodes if node.op == "output")
        return self._op(function, arguments, len(output.args[0]))

    def add(self, left: Cell, right: Cell) -> Cell:
        return self._op(lambda given: [self.inner.add(*given)], [left, right], 1)[0]

    def add_to(self, left: Cell, right: Cell) -> None:
        def function(given: list[Shards]) -> list[Shards]:
            self.inner.add_to(*given)
            return []

        self._op(function, [left, right], 0)

    def add_in(self, dtype: torch.dtype, left: Cell, right: Cell) -> Cell:
        return self._op(lambda given: [self.inner.add_in(dtype, *given)], [left, right], 1)[0]

    def add_rows(self, rows: Cell, whole: Cell, first: int, end: int) -> None:
        def function(given: list[Shards]) -> list[Shards]:
            self.inner.add_rows(given[0], given[1], first, end)
            return []

        self._op(function, [rows, whole], 0)

    def descend(self, parameter: Cell, gradient: Cell, rows: slice = slice(None)) -> None:
        """Subtract a gradient from rows of a parameter, in place."""

        def function(given: list[Shards]) -> list[Shards]:
            for weight, change in zip(*given, strict=True):
                weight[rows] -= LEARNING_RATE * change
            return []

        self._op(function, [parameter, gradient], 0)

    def weighted_sum(self, terms: Sequence[tuple[float, Cell]]) -> Cell:
        weights = [weight for weight, _ in terms]
        return self._op(
            lambda given: [self.inner.weighted_sum(list(zip(weights, given)))],
            [cell for _, cell in terms], 1,
        )[0]  # fmt: skip

    def apart(self, values: Sequence[Cell], others: Iterable[Cell]) -> list[Cell]:
        """The values themselves: no buffer is a parameter or an input here."""
        return list(values)

    def contiguous(self, value: Cell) -> Cell:
        """The value itself, as a contiguous tensor is."""
        self._op(lambda given: [], [value], 0)
        return value

    def filled(self, meta: TensorMeta, fill: float) -> Cell:
        return self._op(lambda given: [self.inner.filled(meta, fill)], [], 1)[0]

    def start_moves(self, moves: list[tuple[fx.GraphModule, Cell]]) -> Callable[[], Sequence[Cell]]:
        results = [self.run(module, [operand])[0] for module, operand in moves]
        moves.clear()
        return lambda: results

    start_gradients = start_moves

    def result(self, cell: Cell) -> Callable[[], Shards]:
        """Read a value on the main stream; the returned call gives it after the play."""
        found: list[Shards] = []

        def function(given: list[Shards]) -> list[Shards]:
            found.append([shard.clone() for shard in given[0]])
            return []

        self._op(function, [cell], 0)
        return lambda: found[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The results of one step in one order: shards of the loss and, by value, of gradients and of
    ``parameters``, which early updates change.

    ``peak_bytes``: the most bytes of values on one rank, without parameters, buffers and inputs.
    ``spans``: the actions with the moments of the tape at which they started and ended.
    """

    loss: Shards
    gradients: dict[int, Shards]
    parameters: dict[int, Shards]
    peak_bytes: int
    spans: list[ActionSpan]


def replayed_step(
    program: RankProgram,
    state: Mapping[str, Tensor],
    tensors: Sequence[Tensor],
    choose: Choose,
    *,
    changed: Mapping[tuple[Action | None, Part], Issue] | None = None,
) -> Replayed:
    """One step of a program with one pipeline device, in the order that ``choose`` draws.

    ``changed`` replaces issues, as tests do to find what a missing event breaks. Raises Hazard.
    """
    inner = LockstepMachine(program.mesh)
    machine = ReplayMachine(inner)
    executor: Executor[Cell] = Executor(program, machine, NoLinks())
    executor.issues.update(changed or {})
    mesh, num, constants = program.mesh, program.num_microbatches, dict(program.constants)
    held = functools.partial(_held, num_ranks=mesh.num_devices)
    parameters = {
        p.value: _given([shard.clone() for shard in scatter(state[p.name], p.stored, mesh)])
        for p in program.parameters
    }
    buffers = {
        b.value: held(constants[b.name] if b.name in constants else state[b.name])
        for b in program.buffers
    }
    batches = [
        {
            i.value: _given(scatter(microbatch_of(t, i, num, index), i.placements, mesh))
            for i, t in zip(program.inputs, tensors)
        }
        for index in range(num)
    ]
    inner.seeds.begin_step(0)
    reader = _Reader(machine, parameters)
    step = executor.step(parameters, buffers, batches, reader)
    loss = machine.result(step.loss)
    for arrived in step.reductions.arrivals():
        reader.read(arrived)
    with kept_generators(torch.device("cpu")):
        machine.tape.play(choose)
    return Replayed(
        loss=loss(),
        gradients={value: found() for value, found in reader.found.items()},
        parameters={value: cell.memory.read("a test") for value, cell in parameters.items()},
        peak_bytes=machine.tape.peak_bytes,
        spans=executor.spans,
    )


class _Reader:
    """The updater of a replay: it reads gradients where the schedule, or the end, updates, and
    holds them, as parameters do until the next step. Early updates change ``parameters``."""

    agrees, loss_scale = False, 1.0

    def __init__(self, machine: ReplayMachine, parameters: Mapping[int, Cell]) -> None:
        self.parameters = parameters
        self.found: dict[int, Callable[[], Shards]] = {}
        self._machine = machine
        self._held: list[Cell] = []

    def read(self, gradients: Mapping[int, Cell]) -> None:
        self._held += gradients.values()
        self.found.update((v, self._machine.result(cell)) for v, cell in gradients.items())

    def update(self, values: Sequence[int], gradients: Gradients[Cell]) -> None:
        self.read(gradients.take(values))

    def update_last(self, values: Sequence[int]) -> None:
        """There is no step before."""

    def inspect(self, gradients: Sequence[Cell], dtypes: Sequence[torch.dtype]) -> None:
        pass

    def total_loss(self, part: Cell | None) -> Cell:
        raise AssertionError("it agrees with nobody")

    def may_update(self, arrived: Arrived[Cell], loss: Cell | None) -> bool:
        return True

    def update_early(self, arrived: Arrived[Cell]) -> None:
        for value, gradient in arrived.gradients.items():
            self._machine.descend(self.parameters[value], gradient)
        arrived.gradients.clear()
        for found in arrived.rows:
            rows = slice(found.first, found.end)
            self._machine.descend(self.parameters[found.value], found.gradient, rows)
        arrived.rows.clear()


def _given(shards: Shards) -> Cell:
    """A value that was there before the step, and stays."""
    return Cell(_Memory(Resource.MAIN, shards))


def _held(whole: Tensor, *, num_ranks: int) -> Cell:
    return _given([whole.clone() for _ in range(num_ranks)])


def _place(tensor: Tensor) -> int:
    """Where the storage of a tensor is; of an empty one, the tensor itself."""
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _nothing() -> None:
    pass
