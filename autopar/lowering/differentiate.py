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
from autopar.ir.tracing import trace_fx
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
        outputs_meta = _outputs_of(function, operands, differentiable)
    wanted = tuple(i for i, out in enumerate(outputs_meta) if out.requires_grad and training)
    sources = [i for i, d in enumerate(differentiable) if d and training and wanted]

    def joint(primals: list[Tensor], cotangents: list[Tensor]) -> list[Tensor | None]:
        leaves = [p.detach().requires_grad_() if i in sources else p for i, p in enumerate(primals)]
        with torch.enable_grad():
            outputs = function(leaves)
        grads: list[Tensor | None] = []
        if sources:
            with closing_marks():
                grads = list(
                    torch.autograd.grad(
                        [outputs[i] for i in wanted],
                        [leaves[i] for i in sources],
                        cotangents,
                        allow_unused=True,
                    )
                )
        return [*(o.detach() for o in outputs), *grads]

    with mode:
        tangents = [
            torch.empty(outputs_meta[i].shape, dtype=outputs_meta[i].dtype, device=device)
            for i in wanted
        ]
    module = trace_fx(joint, operands, tangents, mode)
    _clean(module)
    return Joint(module, len(metas), len(outputs_meta), wanted, tuple(sources), tuple(is_weight))


def _fake(meta: TensorMeta, device: torch.device) -> Tensor:
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)


def _outputs_of(
    function: LocalFunction, operands: Sequence[Tensor], differentiable: Sequence[bool]
) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() if d else x for x, d in zip(operands, differentiable)]
    with torch.enable_grad():
        return function(leaves)


_IDENTITIES = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})
_RESHAPE = torch.ops.aten.reshape.default
_SWAPS = (torch.ops.aten.t.default, torch.ops.aten.transpose.int)


def _clean(module: fx.GraphModule) -> None:
    """Drop identities; turn views into reshapes, since real strides may differ from fake ones.

    Merge successive reshapes, and cancel pairs of equal transpositions.
    """
    for node in list(module.graph.nodes):
        if node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
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
        for part in list(node.users):
            if part.args[1] != 0:
                part.replace_input_with(node, weights)
