"""One block on one device: its ops on local shards, with redistributions between placements.

In: a block and a strategy. Out: a function of local tensors that fx can trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from autopar.comm.ops import move
from autopar.ir.graph import Block, Graph, Op, Ref, Value, ValueKind, map_refs
from autopar.ir.placement import Placements, local_shape
from autopar.lowering.op_marks import mark_gradient, marking
from autopar.lowering.types import BlockInterface
from autopar.rules.context import LocalContext
from autopar.rules.local import run_local
from autopar.rules.space import NO_SPACE
from autopar.sharding.strategy import Strategy


def last_uses(graph: Graph) -> dict[int, int]:
    """The last op that reads each value."""
    return {value: op.index for op in graph.ops for value in op.inputs}


def block_interface(
    graph: Graph, block: Block, kept: frozenset[int], last_use: Mapping[int, int]
) -> BlockInterface:
    """The values that enter and leave a block.

    ``kept``: values needed after all blocks (the loss, next buffers, the model's outputs);
    ``last_use``: the result of `last_uses`.
    """
    ops = graph.block_ops(block)
    made = {o for op in ops for o in op.outputs if o is not None}
    entering = dict.fromkeys(i for op in ops for i in op.inputs if i not in made)
    is_parameter = {i: graph.values[i].kind is ValueKind.PARAMETER for i in entering}
    return BlockInterface(
        inputs=tuple(i for i in entering if not is_parameter[i]),
        parameters=tuple(i for i in entering if is_parameter[i]),
        outputs=tuple(
            o for op in ops for o in op.outputs
            if o is not None and (last_use.get(o, -1) >= block.stop or o in kept)
        ),
    )  # fmt: skip


def block_function(
    strategy: Strategy, block: Block, interface: BlockInterface, device: torch.device
) -> Callable[[Sequence[Tensor]], tuple[Tensor, ...]]:
    """A function from the local shards of ``inputs + parameters`` to those of ``outputs``."""

    def run(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        machine = _BlockMachine(strategy, device, block.start)
        for index, tensor in zip((*interface.inputs, *interface.parameters), operands):
            machine.local[index] = tensor
        for op in strategy.graph.block_ops(block):
            machine.run(op)
        return tuple(machine.local[index] for index in interface.outputs)

    return run


class _BlockMachine:
    """Runs ops one by one on local tensors, each value in its interface placement."""

    def __init__(self, strategy: Strategy, device: torch.device, first_op: int) -> None:
        self.strategy = strategy
        self.first_op = first_op
        self.device = device
        self.local: dict[int, Tensor] = {}
        self.moved: dict[tuple[int, Placements], Tensor] = {}

    def run(self, op: Op) -> None:
        strategy, graph = self.strategy, self.strategy.graph
        operands = [
            self._operand(graph.values[index], need)
            for index, need in zip(op.inputs, strategy.needs(op))
        ]
        supplies = strategy.supplies(op)
        space = strategy.analysis.spaces[op.index]
        shapes = tuple(
            () if o is None else local_shape(graph.values[o].shape, supply, strategy.mesh)
            for o, supply in zip(op.outputs, supplies)
        )
        context = LocalContext(
            op=op,
            space=space or NO_SPACE,
            choice=strategy.assignment.choices[op.index],
            mesh=strategy.mesh,
            output_shapes=shapes,
            device=self.device,
        )
        choice = strategy.assignment.choices[op.index]
        mesh = strategy.mesh
        split_axes = tuple(
            mesh.devices.axis_names.index(mesh.axis_names[a])
            for a, split in enumerate(choice.splits)
            if split is not None and not mesh.is_sequential(a)
        )
        # Random ops draw equal numbers on replicas and different ones on shards: see
        # autopar.runtime.machine.randomness, which reads this from the traced nodes.
        place = op.index - self.first_op
        with marking(place, split_axes=split_axes):
            results = run_local(context, operands)
        mark_gradient(place, [x for x in results if isinstance(x, Tensor)], operands)
        for index, supply, result in zip(op.outputs, supplies, results):
            if index is not None:
                self._define(graph.values[index], supply, result)

    def _operand(self, value: Value, need: Placements) -> Tensor:
        key = (value.index, need)
        if key not in self.moved:
            placement = self.strategy.interface(value)
            mesh = self.strategy.mesh
            tensor = self.local[value.index]
            self.moved[key] = move(tensor, placement, need, value.shape, mesh)
        return self.moved[key]

    def _define(self, value: Value, supply: Placements, result: Tensor) -> None:
        interface = self.strategy.interface(value)
        expected = local_shape(value.shape, supply, self.strategy.mesh)
        assert tuple(result.shape) == expected, (value.name, tuple(result.shape), expected)
        if not value.differentiable:
            # Made under no_grad, or by an op that stops the gradient: none flows back through it.
            result = result.detach()
        self.local[value.index] = move(result, supply, interface, value.shape, self.strategy.mesh)


def block_signature(
    strategy: Strategy,
    block: Block,
    interface: BlockInterface,
    strides: dict[int, tuple[int, ...]],
) -> str:
    """Equal for blocks that lower to the same graphs: ops, arguments, shapes and placements."""
    graph = strategy.graph
    numbers: dict[int, int] = {}

    def number(index: int) -> int:
        return numbers.setdefault(index, len(numbers))

    def describe(index: int) -> str:
        value = graph.values[index]
        return (
            f"{number(index)}:{value.shape}{value.dtype}{value.differentiable}{value.fixed}"
            f"{strategy.supply(value)}{strategy.interface(value)}{strides.get(index)}"
        )

    parts = [describe(i) for i in (*interface.inputs, *interface.parameters)]
    for op in graph.block_ops(block):
        args = map_refs((op.args, op.kwargs), lambda ref: Ref(number(ref.index)))
        outputs = [None if o is None else describe(o) for o in op.outputs]
        parts.append(
            f"{op.target_name}{args}{strategy.assignment.choices[op.index]}"
            f"{strategy.needs(op)}{outputs}{op.per_shard}"
        )
    parts.append(str([number(o) for o in interface.outputs]))
    return "\n".join(parts)
