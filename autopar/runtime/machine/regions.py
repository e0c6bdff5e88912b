"""Regions of graphs as functions that Inductor compiles, on this process's device.

In: a graph and the operands of its regions. Out: a function for each region. It is compiled before
the first step for the strides and dtypes of the trace, and again for others when they appear.
Processes that compile the same region share its code through Inductor's cache on disk.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from autopar.base.errors import first_line
from autopar.base.torch_private import compile_graph, returns_views
from autopar.lowering.types import TensorMeta
from autopar.runtime.machine.direct_calls import DIRECT

MAX_VARIANTS = 4
"""A region is compiled for at most so many layouts of its operands; for others it runs op by op."""

_NORMS = ("batch", "layer", "group")

Layout = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Strides and dtype of each operand. Fake kernels sometimes give another dtype than real ones."""
Function = Callable[..., Sequence[Tensor]]


class RegionFunction:
    """A region's function, compiled for each layout of its operands; ``module`` is the region as a
    graph, ``where`` names it in warnings."""

    def __init__(self, module: fx.GraphModule, device: torch.device, where: str) -> None:
        self.where = where
        self._device = device
        self._module = module
        self._variants: dict[Layout, Function] = {}

    def compile(self, operands: Sequence[TensorMeta]) -> None:
        """Compile for operands with these shapes and strides; raises what Inductor raises."""
        made = [
            torch.empty_strided(m.shape, m.stride, dtype=m.dtype, device=self._device)
            for m in operands
        ]
        self._variants[tuple((m.stride, m.dtype) for m in operands)] = self._compiled(made)

    def run(self, *operands: Tensor) -> Sequence[Tensor]:
        layout = tuple([(operand.stride(), operand.dtype) for operand in operands])
        function = self._variants.get(layout)
        if function is None:
            function = self._variants[layout] = self._another(operands)
        return function(*operands)

    def _another(self, operands: Sequence[Tensor]) -> Function:
        """The function for a layout that no variant was compiled for."""
        reason: object = f"its operands come in more than {MAX_VARIANTS} layouts"
        if len(self._variants) < MAX_VARIANTS:
            try:
                return self._compiled(operands)
            except Exception as error:
                reason = first_line(error)
        warnings.warn(f"{self.where} runs op by op: {reason}", stacklevel=2)
        function: Function = self._module.forward
        return function

    def _compiled(self, operands: Sequence[Tensor]) -> Function:
        if self._device.type == "cpu":
            _refuse_rounded_statistics(self._module, operands)
        function = compile_graph(self._module, operands)
        roots = _roots(self._module)
        shared: list[int] | None = None

        def run(*operands: Tensor) -> Sequence[Tensor]:
            nonlocal shared
            results = list(function(*operands))
            if shared is None:
                shared = _shared(results, operands, roots)
            for place in shared:
                results[place] = results[place].clone()
            return results

        return run


def _refuse_rounded_statistics(module: fx.GraphModule, operands: Sequence[Tensor]) -> None:
    """Raise RuntimeError for a norm whose statistics Inductor would round to low precision.

    ATen keeps them in float32 where the input is in low precision and the weights are not, and the
    kernels of the backward pass read them so.
    """
    names = {node: str(node.target) for node in module.graph.nodes}
    norms = [n for n, name in names.items() if any(f"{kind}_norm" in name for kind in _NORMS)]
    if norms:
        FakeTensorProp(module).propagate(*operands)
    for node in norms:
        name, dtypes = names[node], [n.meta["val"].dtype for n in node.all_input_nodes]
        is_rounded = dtypes[0].itemsize < 4 and ("batch_norm" in name or len(set(dtypes)) > 1)
        if is_rounded and "backward" not in name:
            raise RuntimeError(f"Inductor rounds the statistics of {name} to {dtypes[0]}")


def op_by_op(module: fx.GraphModule) -> fx.GraphModule:
    """A region's graph as it runs op by op."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        node.target = DIRECT.get(node.target, node.target)
    return fx.GraphModule({}, graph)


def _roots(module: fx.GraphModule) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nodes whose memory the operands and the results are, if results are views."""
    nodes = list(module.graph.nodes)
    results: Any = next(n for n in nodes if n.op == "output").args[0]
    return [n for n in nodes if n.op == "placeholder"], [_root(n) for n in results]


def _root(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and returns_views(node.target):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


def _shared(
    results: Sequence[Tensor],
    operands: Sequence[Tensor],
    roots: tuple[Sequence[fx.Node], Sequence[fx.Node]],
) -> list[int]:
    """The results that share memory with an operand or another result, but are no views of it.

    A compiler computes equal values once and drops copies; a step adds in place to what a graph
    has made. It is the same in every call.
    """
    seen: dict[int, fx.Node] = {}
    found = []
    for operand, root in zip(operands, roots[0], strict=True):
        seen.setdefault(operand.untyped_storage().data_ptr(), root)
    own = {id(root) for root in roots[0]}
    for place, (result, root) in enumerate(zip(results, roots[1], strict=True)):
        if not result.numel() or id(root) in own:
            continue
        known = seen.setdefault(result.untyped_storage().data_ptr(), root)
        if known is not root:
            found.append(place)
    return found
