"""What becomes of the axis in time: sums along it are made by running one part after the other.

Only three places of a program may add up micro-batches: the gradients of parameters, the loss, and
the totals that means divide by. There the all-reduce loses that axis; the executor adds the parts
before it runs the rest.
"""

from __future__ import annotations

from torch import fx

from autopar.comm.ops import ALL_REDUCE, COLLECTIVES
from autopar.ir.mesh import MICROBATCH
from autopar.lowering.types import Kernel


def spans_microbatches(node: fx.Node) -> bool:
    """Whether a node communicates along the axis in time."""
    return node.target in COLLECTIVES and _is_timed(node)


def _is_timed(node: fx.Node) -> bool:
    return str(node.args[1]).split(",")[0] == MICROBATCH


def accumulated(kernel: Kernel, num_microbatches: int) -> Kernel:
    """A redistribution whose operand, or whose gradient, has been summed over micro-batches."""
    for module in (kernel.forward, kernel.backward_input):
        nodes = () if module is None else tuple(module.graph.nodes)
        for node in nodes:
            if node.target is ALL_REDUCE and _is_timed(node):
                _drop_time(node, num_microbatches)
        if module is not None:
            module.recompile()
    return kernel


def _drop_time(node: fx.Node, num_microbatches: int) -> None:
    """An all-reduce over the device axes alone, or none."""
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
    """The graph without the sums over micro-batches that end it, and these, by output."""
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
