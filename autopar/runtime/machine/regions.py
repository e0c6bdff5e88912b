"""Regions of graphs as functions that Inductor compiles, on this process's device.

In: a graph and the operands of its regions. Out: a function for each region. It is compiled before
the first step for the strides that the trace has, and again for others when they appear. Processes
that compile the same region share its code through Inductor's cache on disk.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.base.torch_private import compile_graph, returns_views
from autopar.lowering.types import TensorMeta
from autopar.runtime.machine.direct_calls import DIRECT

MAX_VARIANTS = 4
"""A region is compiled for at most so many strides of its operands; for others it runs op by op."""

Strides = tuple[tuple[int, ...], ...]
Function = Callable[..., Sequence[Tensor]]


class RegionFunction:
    """A region's function, compiled for each layout of its operands; ``module`` is the region as a
    graph, ``where`` names it in warnings."""

    def __init__(self, module: fx.GraphModule, device: torch.device, where: str) -> None:
        self.where = where
        self._device = device
        self._module = module
        self._variants: dict[Strides, Function] = {}

    def compile(self, operands: Sequence[TensorMeta]) -> None:
        """Compile for operands with these shapes and strides; raises what Inductor raises."""
        made = [
            torch.empty_strided(m.shape, m.stride, dtype=m.dtype, device=self._device)
            for m in operands
        ]
        self._variants[tuple(m.stride for m in operands)] = self._compiled(made)

    def run(self, *operands: Tensor) -> Sequence[Tensor]:
        strides = tuple([operand.stride() for operand in operands])
        function = self._variants.get(strides)
        if function is None:
            function = self._variants[strides] = self._another(operands)
        return function(*operands)

    def _another(self, operands: Sequence[Tensor]) -> Function:
        """The function for strides that no variant was compiled for."""
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


def op_by_op(module: fx.GraphModule) -> fx.GraphModule:
    """A region's graph as it runs op by op."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        node.target = DIRECT.get(node.target, node.target)
    return fx.GraphModule({}, graph)


def first_line(error: BaseException) -> str:
    """The type of an error, and what it says first."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


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
