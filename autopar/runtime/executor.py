"""Run one training step, or one forward pass, of a rank program.

The executor knows the order of things and who needs what; a `Machine` knows how to run one graph.
There are two: one bound to process groups (`autopar.runtime.binding`), and one that runs all ranks
side by side in one process (`autopar.runtime.lockstep`), where a value is a list of shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import fx

from autopar.lowering.differentiate import Kernel, TensorMeta
from autopar.lowering.program import BlockProgram, OutputProgram, RankProgram, Role

T = TypeVar("T")


class Machine(Protocol[T]):
    """Runs graphs on values of type T."""

    def run(self, module: fx.GraphModule, arguments: Sequence[T]) -> Sequence[T]: ...

    def begin_microbatch(self, index: int) -> None:
        """Set the position on the axis in time for the graphs that follow."""
        ...

    def add(self, left: T, right: T) -> T: ...

    def contiguous(self, value: T) -> T: ...

    def filled(self, meta: TensorMeta, fill: float) -> T: ...

    def start_moves(self, moves: Sequence[tuple[fx.GraphModule, T]]) -> Callable[[], Sequence[T]]:
        """Begin to run graphs of one operand and one result each; the returned call finishes.

        The machine may join what it communicates.
        """
        ...


@dataclass(slots=True)
class _Record(Generic[T]):
    """What the forward pass of a block leaves for its backward pass."""

    operands: dict[int, T]
    saved: list[T]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult(Generic[T]):
    """Of one step: the loss (replicated), gradients in stored placement, and next buffers."""

    loss: T
    gradients: Mapping[int, T]
    buffers: Mapping[int, T]


class Executor(Generic[T]):
    """One program on one machine. Parameters and buffers are handed in, never owned."""

    def __init__(self, program: RankProgram, machine: Machine[T]) -> None:
        self.program = program
        self.machine = machine
        self.fixed: dict[int, T] = {}
        self._freed = self._find_freed()
        self._parameter_of = {p.value: p for p in program.parameters}

    def _find_freed(self) -> list[tuple[int, ...]]:
        """Per block, the values that nobody reads after it."""
        program = self.program
        kept = {b.following.value for b in program.buffers if b.following is not None}
        kept |= {o.value for o in program.outputs}
        if program.loss is not None:
            kept.add(program.loss.value)
        last: dict[int, int] = {}
        for position, block in enumerate(program.blocks):
            last.update(dict.fromkeys(block.interface.outputs, position))
            last.update(dict.fromkeys(block.interface.inputs, position))
        freed: list[list[int]] = [[] for _ in program.blocks]
        for value, position in last.items():
            if value not in kept:
                freed[position].append(value)
        return [tuple(values) for values in freed]

    def forward(
        self, parameters: Mapping[int, T], buffers: Mapping[int, T], inputs: Mapping[int, T]
    ) -> dict[int, T]:
        """The loss and outputs of a forward program, made whole, by value."""
        run = _Pass(self, parameters)
        run.fix(buffers)
        self.machine.begin_microbatch(0)
        run.env = {**buffers, **inputs, **self.fixed}
        run.forward(keep_for_backward=False)
        wanted = [*self.program.outputs]
        if self.program.loss is not None:
            wanted.append(self.program.loss)
        result = {}
        values = {**parameters, **run.env}
        for output in wanted:
            result[output.value] = self._whole(output, values[output.value])
        return result

    def _early(
        self, buffers: Mapping[int, T], batches: Sequence[Mapping[int, T]]
    ) -> list[dict[int, T]]:
        """Per micro-batch what the block of totals makes; the totals are those of all."""
        early: list[dict[int, T]] = [{} for _ in batches]
        for block in self.program.blocks:
            if block.role is not Role.TOTALS:
                continue
            kernel = self.program.kernels[block.kernel]
            for index, batch in enumerate(batches):
                self.machine.begin_microbatch(index)
                env = {**self.fixed, **buffers, **batch}
                operands = [env[i] for i in block.interface.inputs]
                results = self.machine.run(kernel.forward, operands)
                early[index].update(zip(block.interface.outputs, results))
        for total in self.program.totals:
            summed = early[0][total.value]
            for made in early[1:]:
                summed = self.machine.add(summed, made[total.value])
            summed = self._whole(total, summed)
            for made in early:
                made[total.value] = summed
        return early

    def _whole(self, output: OutputProgram, value: T) -> T:
        if output.kernel is None:
            return value
        return self.machine.run(self.program.kernels[output.kernel].forward, [value])[0]

    def step(
        self,
        parameters: Mapping[int, T],
        buffers: Mapping[int, T],
        batches: Sequence[Mapping[int, T]],
    ) -> StepResult[T]:
        """Forward and backward of the micro-batches, one by one, in the conventional order."""
        program = self.program
        assert program.loss is not None
        run = _Pass(self, parameters)
        run.fix(buffers)
        early = self._early(buffers, batches)
        loss: T | None = None
        following: dict[int, T] = {}
        for index, batch in enumerate(batches):
            self.machine.begin_microbatch(index)
            run.env = {**buffers, **following, **batch, **early[index], **self.fixed}
            run.forward(keep_for_backward=True)
            part = run.env[program.loss.value]
            loss = part if loss is None else self.machine.add(loss, part)
            following.update(
                (b.value, self._whole(b.following, run.env[b.following.value]))
                for b in program.buffers
                if b.following is not None
            )
            run.backward(program.loss.value, is_last=index == len(batches) - 1)
        assert loss is not None
        loss = self._whole(program.loss, loss)
        return StepResult(loss=loss, gradients=run.gradients, buffers=following)


class _Pass(Generic[T]):
    """The values alive during one pass over the program."""

    def __init__(self, executor: Executor[T], parameters: Mapping[int, T]) -> None:
        self.executor = executor
        self.machine = executor.machine
        self.program = executor.program
        self.stored = parameters
        self.env: dict[int, T] = {}
        self.used: dict[int, T] = {}
        self.records: dict[int, _Record[T]] = {}
        self.cotangents: dict[int, T] = {}
        self.partial: dict[int, T] = {}
        self.gradients: dict[int, T] = {}
        self.reductions: list[tuple[list[int], Callable[[], Sequence[T]]]] = []

    def forward(self, *, keep_for_backward: bool) -> None:
        for position, block in enumerate(self.program.blocks):
            if block.role is Role.EVERY:
                self._run_block(position, block, keep_for_backward)
            self._free(position, block)

    def fix(self, buffers: Mapping[int, T]) -> None:
        """Blocks that depend on nothing but constants run in the first pass only."""
        fixed = self.executor.fixed
        for block in self.program.blocks:
            if block.role is not Role.FIXED or all(o in fixed for o in block.interface.outputs):
                continue
            kernel = self.program.kernels[block.kernel]
            operands = [fixed[i] if i in fixed else buffers[i] for i in block.interface.inputs]
            fixed.update(zip(block.interface.outputs, self.machine.run(kernel.forward, operands)))

    def _run_block(self, position: int, block: BlockProgram, keep: bool) -> None:
        kernel = self.program.kernels[block.kernel]
        interface = block.interface
        operands = [self.env[i] for i in interface.inputs]
        operands += [self._fetch(i) for i in interface.parameters]
        results = list(self.machine.run(kernel.forward, operands))
        self.env.update(zip(interface.outputs, results[: kernel.num_outputs]))
        if keep:
            sources = {*kernel.input_sources, *kernel.weight_sources}
            kept = {i for kind, i in sources if kind == "operand"}
            self.records[position] = _Record(
                operands={i: operands[i] for i in kept}, saved=results[kernel.num_outputs :]
            )

    def _fetch(self, value: int) -> T:
        """A parameter in the placement that blocks use it in."""
        if value not in self.used:
            parameter = self.executor._parameter_of[value]
            stored = self.stored[value]
            if parameter.kernel is None:
                self.used[value] = stored
            else:
                forward = self.program.kernels[parameter.kernel].forward
                self.used[value] = self.machine.run(forward, [stored])[0]
        return self.used[value]

    def _free(self, position: int, block: BlockProgram) -> None:
        for value in self.executor._freed[position]:
            self.env.pop(value, None)
        for value in block.interface.parameters:
            if self.executor._parameter_of[value].last_block == position:
                self.used.pop(value, None)

    def backward(self, loss: int, *, is_last: bool) -> None:
        for position in reversed(range(len(self.program.blocks))):
            block = self.program.blocks[position]
            kernel = self.program.kernels[block.kernel]
            record = self.records.pop(position, None)
            if record is None or not kernel.cotangents:
                continue
            self._run_backward(block, kernel, record, self._take(block, kernel, loss))
            if is_last:
                self._start_reductions(block, position)
        for values, finish in self.reductions:
            self.gradients.update(zip(values, finish()))
        self.reductions.clear()

    def _take(self, block: BlockProgram, kernel: Kernel, loss: int) -> list[T]:
        """Cotangents of the block's outputs; zeros where nothing flowed back."""
        taken = []
        for index in kernel.cotangents:
            value = block.interface.outputs[index]
            cotangent = self.cotangents.pop(value, None)
            if value == loss:
                cotangent = self.machine.filled(kernel.output_metas[index], 1.0)
            if cotangent is None:
                cotangent = self.machine.filled(kernel.output_metas[index], 0.0)
            taken.append(self.machine.contiguous(cotangent))
        return taken

    def _run_backward(
        self, block: BlockProgram, kernel: Kernel, record: _Record[T], cotangents: list[T]
    ) -> None:
        interface = block.interface
        sources: dict[str, Mapping[int, T]] = {
            "operand": record.operands,
            "saved": dict(enumerate(record.saved)),
            "cotangent": dict(enumerate(cotangents)),
        }
        if kernel.backward_input is not None:
            arguments = [sources[kind][i] for kind, i in kernel.input_sources]
            results = list(self.machine.run(kernel.backward_input, arguments))
            for operand, gradient in zip(kernel.input_grads, results):
                self._accumulate(self.cotangents, interface.inputs[operand], gradient)
            sources["handed"] = dict(enumerate(results[len(kernel.input_grads) :]))
        if kernel.backward_weight is not None:
            arguments = [sources[kind][i] for kind, i in kernel.weight_sources]
            gradients = self.machine.run(kernel.backward_weight, arguments)
            for operand, gradient in zip(kernel.weight_grads, gradients):
                value = interface.parameters[operand - len(interface.inputs)]
                self._accumulate(self.partial, value, gradient)

    def _accumulate(self, into: dict[int, T], value: int, gradient: T) -> None:
        into[value] = self.machine.add(into[value], gradient) if value in into else gradient

    def _start_reductions(self, block: BlockProgram, position: int) -> None:
        """Bring gradients whose last contribution is in to the stored placement.

        This goes on beside the backward pass of earlier blocks.
        """
        values, moves = [], []
        for value in block.interface.parameters:
            parameter = self.executor._parameter_of[value]
            if parameter.first_block != position or value not in self.partial:
                continue
            gradient = self.machine.contiguous(self.partial.pop(value))
            if parameter.kernel is None:
                self.gradients[value] = gradient
                continue
            backward = self.program.kernels[parameter.kernel].backward_input
            assert backward is not None
            values.append(value)
            moves.append((backward, gradient))
        if moves:
            self.reductions.append((values, self.machine.start_moves(moves)))
