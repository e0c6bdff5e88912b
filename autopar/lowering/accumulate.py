"""The micro-batch axis in lowered programs: sums along it accumulate over micro-batches.

A program may sum over micro-batches in three places only: the gradients of parameters, the loss,
and the totals that means divide by. There the axis is removed from the all-reduce, and the executor
accumulates the micro-batches before it runs the all-reduce over the device axes.
"""

from __future__ import annotations

from torch import fx

from autopar.comm.ops import ALL_REDUCE, COLLECTIVES
from autopar.ir.mesh import MICROBATCH
from autopar.lowering.types import Kernel


def spans_microbatches(node: fx.Node) -> bool:
    """Whether a node communicates along the micro-batch axis."""
    return node.target in COLLECTIVES and _is_timed(node)


def _is_timed(node: fx.Node) -> bool:
    return str(node.args[1]).split(",")[0] == MICROBATCH


def accumulated(kernel: Kernel, num_microbatches: int) -> Kernel:
    """A redistribution whose operand or gradient is already summed over micro-batches."""
    for module in (kernel.forward, kernel.backward_input):
        nodes = () if module is None else tuple(module.graph.nodes)
        for node in nodes:
            if node.target is ALL_REDUCE and _is_timed(node):
                _drop_time(node, num_microbatches)
        if module is not None:
            module.recompile()
    return kernel


def _drop_time(node: fx.Node, num_microbatches: int) -> None:
    """Reduce over the device axes alone, or drop the all-reduce if there are none."""
    operand, label, num = node.args
    axes = str(label).split(",")[1:]
    if axes:
        node.args = (operand, ",".join(axes), int(num) // num_microbatches)  # type: ignore[arg-type]
    else:
        node.replace_all_uses_with(operand)  # type: ignore[arg-type]
        node.graph.erase_node(node)


def before_sums(
    module: fx.GraphModule, num_microbatches: int
) -> tuple[fx.GraphModule, dict[int, fx.GraphModule]]:
    """The graph without its final sums over micro-batches, and these sums by output."""
    graph = module.graph
    results: list[fx.Node] = list(graph.output_node().args[0])  # type: ignore[arg-type]
    sums: dict[int, fx.GraphModule] = {}
    for position, node in enumerate(results):
        if node.target is ALL_REDUCE and _is_timed(node):
            sums[position] = _alone(node, num_microbatches)
            (results[position],) = node.all_input_nodes
    graph.output_node().args = (tuple(results),)
    graph.eliminate_dead_code()
    module.recompile()
    return module, sums


def _alone(node: fx.Node, num_microbatches: int) -> fx.GraphModule:
    """The sum over the device axes as a graph of its own."""
    graph = fx.Graph()
    operand = graph.placeholder("x0")
    operand.meta = dict(node.meta)
    copied = graph.node_copy(node, lambda _: operand)
    graph.output((copied,))
    _drop_time(copied, num_microbatches)
    return fx.GraphModule({}, graph)
