"""Trace a local function with its derivative by ``make_fx`` over fake tensors.

In: a function of local tensors and their shapes. Out: its `Joint` graph, outputs and gradients from
inputs and cotangents, which `autopar.lowering.joint` splits into F, I and W.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autopar.base.exclusive import in_turn
from autopar.base.torch_private import FakeTensorMode
from autopar.ir.tracing import VIEWS, trace_fx
from autopar.lowering.joint import Joint
from autopar.lowering.op_marks import closing_marks
from autopar.lowering.types import TensorMeta
from autopar.rules.traced import traced_of

LocalFunction = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


@in_turn()
def trace_joint(
    function: LocalFunction,
    metas: Sequence[TensorMeta],
    differentiable: Sequence[bool],
    is_weight: Sequence[bool],
    device: torch.device,
    *,
    training: bool = True,
) -> Joint:
    """Trace ``function`` over fake tensors; without ``training``, without gradients."""
    # Loops over data (torch.while_loop) count their steps in the shape environment.
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()) as mode:
        operands = [_fake(meta, device) for meta in metas]
    wanted: list[int] = []
    sources: list[int] = []

    def joint(primals: list[Tensor]) -> list[Tensor | None]:
        leaves = [
            x.detach().requires_grad_() if d and training else x
            for x, d in zip(primals, differentiable)
        ]
        with torch.enable_grad():
            outputs = function(leaves)
        wanted[:] = [i for i, out in enumerate(outputs) if out.requires_grad]
        sources[:] = [i for i, d in enumerate(differentiable) if d and wanted]
        grads: list[Tensor | None] = []
        if sources:
            read = [outputs[i] for i in wanted]
            cotangents = [_COTANGENT(out.detach(), i) for i, out in enumerate(read)]
            with closing_marks():
                grads = list(
                    torch.autograd.grad(
                        read, [leaves[i] for i in sources], cotangents, allow_unused=True
                    )
                )
        return [*(o.detach() for o in outputs), *grads]

    module = trace_fx(joint, mode, operands)
    _take_cotangents(module, len(operands))
    _clean(module)
    with mode:
        _turn_products(module, len(sources))
    return Joint(module, tuple(wanted), tuple(sources), tuple(is_weight))


_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("cotangent(Tensor output, int number) -> Tensor")


@torch.library.register_fake("autopar::cotangent", lib=_LIBRARY)
def _(output: Tensor, number: int) -> Tensor:
    return torch.empty_like(output, memory_format=torch.contiguous_format)


_COTANGENT = torch.ops.autopar.cotangent.default
"""Stands for the gradient of an output, contiguous, while a function is traced."""


def _fake(meta: TensorMeta, device: torch.device) -> Tensor:
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)


def _take_cotangents(module: fx.GraphModule, num_operands: int) -> None:
    """Turn the cotangents into arguments, in order, after the operands."""
    graph = module.graph
    found = graph.find_nodes(op="call_function", target=_COTANGENT)
    given = [node for node in graph.nodes if node.op == "placeholder"]
    assert len(given) == num_operands
    after = given[-1] if given else graph._root
    for node in sorted(found, key=lambda node: node.args[1], reverse=True):
        with graph.inserting_after(after):
            argument = graph.placeholder(f"cotangent_{node.args[1]}")
        argument.meta = node.meta
        node.replace_all_uses_with(argument)
        graph.erase_node(node)


_IDENTITIES = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})
_RESHAPE = torch.ops.aten.reshape.default
_SWAPS = (torch.ops.aten.t.default, torch.ops.aten.transpose.int)


def _clean(module: fx.GraphModule) -> None:
    """Drop identities; turn views into reshapes, since real strides may differ from fake ones.

    Merge successive reshapes, and cancel pairs of equal transpositions.
    """
    for node in list(module.graph.nodes):
        if node.target in VIEWS:
            node.target = _RESHAPE
        source = node.args[0] if node.op == "call_function" and node.args else None
        if not isinstance(source, fx.Node):
            continue
        if node.target is _RESHAPE and source.target is _RESHAPE:
            node.args = (source.args[0], *node.args[1:])
        undone = node.target in _SWAPS and source.target is node.target
        if undone and source.args[1:] == node.args[1:]:
            node.replace_all_uses_with(source.args[0])
        elif node.target in _IDENTITIES:
            node.replace_all_uses_with(source)
    module.graph.eliminate_dead_code()
    _split_gradients(module)


_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)


def _turn_products(module: fx.GraphModule, num_gradients: int) -> None:
    """Compute gradients that are transposed products as products of the transposed operands.

    They are contiguous then, as they are reduced and used, and need no copy. The derivative of
    ``linear`` is made so, that of a batched product by a transposed weight is not.
    """
    graph = module.graph
    results = graph.output_node().args[0]
    assert isinstance(results, list | tuple)
    for gradient in results[len(results) - num_gradients :]:
        if not isinstance(gradient, fx.Node) or gradient.target not in _SWAPS:
            continue
        product, dims = gradient.args[0], gradient.args[1:]
        assert isinstance(product, fx.Node)
        are_last = sorted(d % 3 for d in dims if isinstance(d, int)) in ([], [1, 2])
        if product.target not in _PRODUCTS or len(product.users) > 1 or not are_last:
            continue
        swap, operands = gradient.target, []
        for operand in reversed(product.args):
            assert isinstance(operand, fx.Node)
            if operand.target is swap and operand.args[1:] == dims:
                operands.append(operand.args[0])
                continue
            with graph.inserting_before(product):
                operands.append(_added(graph, product, swap, (operand, *dims)))
        with graph.inserting_before(product):
            gradient.replace_all_uses_with(_added(graph, product, product.target, tuple(operands)))
    graph.eliminate_dead_code()


def _added(graph: fx.Graph, like: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    """A new call with the marks of another, and the fake tensor that it returns."""
    node = graph.call_function(target, args)
    values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
    node.meta = {**like.meta, "val": target(*values)}
    return node


def _split_gradients(module: fx.GraphModule) -> None:
    """Split calls that compute the gradients of input and weights into two, for I and W.

    Every backend computes the two separately.
    """
    graph = module.graph
    for node in list(graph.nodes):
        position = traced_of(node.target).gradient_mask
        if position is None:
            continue
        mask: Any = node.args[position]
        of_input, *of_weights = mask
        if not of_input or not any(of_weights):
            continue
        before, after = node.args[:position], node.args[position + 1 :]
        with graph.inserting_after(node):
            weights = graph.node_copy(node)
        weights.args = (*before, [False, *of_weights], *after)
        node.args = (*before, [True, *(False for _ in of_weights)], *after)
        first, *rest = node.meta["val"]
        weights.meta["val"] = (None, *rest)
        node.meta["val"] = (first, *(None for _ in rest))
        for part in list(node.users):
            if part.args[1] != 0:
                part.replace_input_with(node, weights)
