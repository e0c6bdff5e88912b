"""Trace a local function with its derivative, and split the trace into F, I and W.

The joint graph (outputs and gradients from inputs and cotangents) is traced by ``make_fx`` over
fake tensors and partitioned by reachability from the cotangents:

- ``F``: inputs to outputs and saved values,
- ``I``: saved values and cotangents to the gradients of the inputs (the critical path) and the
  intermediate values that ``W`` needs,
- ``W``: saved values, cotangents and the values handed over by ``I`` to the gradients of the
  parameters (off the critical path).

The backward pass recomputes views, values that only it needs, and cheap functions of operands
without gradient (such as the additive mask that attention makes of a boolean one, which every layer
would save otherwise).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autopar.base.exclusive import in_turn
from autopar.base.torch_private import FakeTensorMode
from autopar.comm.ops import SHARD
from autopar.ir.tracing import trace_fx
from autopar.lowering.types import Kernel, TensorMeta
from autopar.rules.traced import traced_of

LocalFunction = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


@in_turn()
def trace_kernel(
    function: LocalFunction,
    metas: Sequence[TensorMeta],
    differentiable: Sequence[bool],
    is_weight: Sequence[bool],
    device: torch.device,
    *,
    training: bool = True,
) -> Kernel:
    """Trace ``function`` over fake tensors and split it; without ``training``, F only."""
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
    cut = _Cut(module, len(metas), len(outputs_meta), wanted, tuple(sources), tuple(is_weight))
    return cut.kernel()


def _fake(meta: TensorMeta, device: torch.device) -> Tensor:
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)


def _outputs_of(
    function: LocalFunction, operands: Sequence[Tensor], differentiable: Sequence[bool]
) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() if d else x for x, d in zip(operands, differentiable)]
    with torch.enable_grad():
        return function(leaves)


_IDENTITIES = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})
_INDEXING = "<built-in function getitem>"


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


def _is_view(node: fx.Node) -> bool:
    """A view, or one part of a view with several parts."""
    if str(node.target) == _INDEXING:
        source = node.args[0]
        return isinstance(source, fx.Node) and getattr(source.target, "is_view", False)
    return getattr(node.target, "is_view", False)


def _is_cheap(node: fx.Node) -> bool:
    """Whether a node is a constant, a shard or one deterministic pass over tensors."""
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return False
    is_pass = torch.Tag.pointwise in tags or node.target is SHARD
    return is_pass or not node.all_input_nodes


def _size_bytes(node: fx.Node) -> int:
    """Size of the storage behind a value."""
    value = node.meta.get("val")
    return value.untyped_storage().nbytes() if isinstance(value, Tensor) else 0


class _Cut:
    """The joint graph, cut at the cotangents."""

    def __init__(
        self,
        module: fx.GraphModule,
        num_operands: int,
        num_outputs: int,
        wanted: tuple[int, ...],
        sources: tuple[int, ...],
        is_weight: tuple[bool, ...],
    ) -> None:
        self.module = module
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        self.operands = placeholders[:num_operands]
        self.cotangents = placeholders[num_operands:]
        self.fixed = [n for i, n in enumerate(self.operands) if i not in sources]
        results = list(next(n for n in module.graph.nodes if n.op == "output").args[0])
        self.outputs = results[:num_outputs]
        grads = dict(zip(sources, results[num_outputs:]))
        self.grads = {i: g for i, g in grads.items() if isinstance(g, fx.Node)}
        self.wanted, self.is_weight = wanted, is_weight
        self.input_grads = tuple(i for i in self.grads if not is_weight[i])
        self.weight_grads = tuple(i for i in self.grads if is_weight[i])
        self.order = {n: i for i, n in enumerate(module.graph.nodes)}
        self.late = self._reach(self.cotangents)

    def kernel(self) -> Kernel:
        forward_nodes = _ancestors(self.outputs) - self._cheap()
        input_results = [self.grads[i] for i in self.input_grads]
        weight_results = [self.grads[i] for i in self.weight_grads]
        in_input = _ancestors(input_results) & self.late
        in_weight = (_ancestors(weight_results) & self.late) - in_input
        handed = self._sorted(
            {
                a
                for n in (*in_weight, *_nodes(weight_results))
                for a in _inputs_or_self(n, in_weight)
            }
            & in_input
        )
        saved: list[fx.Node] = []
        input_graph = self._late_graph(
            [*input_results, *handed], in_input, forward_nodes, saved, {}
        )
        weight_graph = self._late_graph(
            weight_results, in_weight, forward_nodes, saved, {n: i for i, n in enumerate(handed)}
        )
        forward = self._forward_graph([*self.outputs, *saved])
        empty_input = not self.input_grads and not handed
        return Kernel(
            forward=forward,
            backward_input=None if empty_input else input_graph[0],
            backward_weight=weight_graph[0] if self.weight_grads else None,
            num_outputs=len(self.outputs),
            output_metas=tuple(TensorMeta.of(n.meta["val"]) for n in self.outputs),
            cotangents=self.wanted,
            input_sources=() if empty_input else input_graph[1],
            weight_sources=weight_graph[1] if self.weight_grads else (),
            input_grads=self.input_grads,
            weight_grads=self.weight_grads,
        )

    def _cheap(self) -> set[fx.Node]:
        """Element-wise results of fixed operands that are at least as large as these."""
        read: dict[fx.Node, set[fx.Node]] = {n: {n} for n in self.fixed}
        found: set[fx.Node] = set()
        for node in self._sorted(set(self.module.graph.nodes)):
            of_fixed = all(a in read for a in node.all_input_nodes)
            if not of_fixed or not (_is_view(node) or _is_cheap(node)):
                continue
            read[node] = set().union(*(read[a] for a in node.all_input_nodes))
            if _size_bytes(node) >= sum(_size_bytes(n) for n in read[node]):
                found.add(node)
        return found

    def _reach(self, roots: Sequence[fx.Node]) -> set[fx.Node]:
        reached = set(roots)
        for node in self.module.graph.nodes:
            if node.op == "call_function" and any(a in reached for a in node.all_input_nodes):
                reached.add(node)
        return reached

    def _sorted(self, nodes: set[fx.Node]) -> list[fx.Node]:
        """Calls, and the constants and subgraphs (of ``torch.cond``) they refer to, in order."""
        kinds = ("call_function", "get_attr")
        return sorted((n for n in nodes if n.op in kinds), key=lambda n: self.order[n])

    def _forward_graph(self, results: Sequence[fx.Node]) -> fx.GraphModule:
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for position, node in enumerate(self.operands):
            env[node] = graph.placeholder(f"x{position}")
            env[node].meta = dict(node.meta)
        for node in self._sorted(_ancestors(results)):
            env[node] = graph.node_copy(node, lambda n: env[n])
        graph.output(tuple(env[n] for n in results))
        return fx.GraphModule(self.module, graph)

    def _late_graph(
        self,
        results: Sequence[fx.Node],
        late: set[fx.Node],
        forward_nodes: set[fx.Node],
        saved: list[fx.Node],
        handed: dict[fx.Node, int],
    ) -> tuple[fx.GraphModule, tuple[tuple[str, int], ...]]:
        """A graph of ``results`` whose arguments are the values that it reads from outside."""
        needed = self._close(results, late, forward_nodes, handed)
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        sources: list[tuple[str, int]] = []
        for node in sorted(needed, key=lambda n: self.order[n]):
            source = self._source(node, late, forward_nodes, saved, handed)
            if source is not None:
                env[node] = graph.placeholder(f"{source[0]}{source[1]}")
                env[node].meta = dict(node.meta)
                sources.append(source)
        for node in sorted(needed, key=lambda n: self.order[n]):
            if node not in env:
                env[node] = graph.node_copy(node, lambda n: env[n])
        graph.output(tuple(env[n] for n in results))
        return fx.GraphModule(self.module, graph), tuple(sources)

    def _close(
        self,
        results: Sequence[fx.Node],
        late: set[fx.Node],
        forward_nodes: set[fx.Node],
        handed: dict[fx.Node, int],
    ) -> set[fx.Node]:
        """The nodes of a backward graph: from the results back to values from outside."""
        needed: set[fx.Node] = set()
        stack = list(results)
        while stack:
            node = stack.pop()
            if node in needed:
                continue
            needed.add(node)
            if not self._from_outside(node, late, forward_nodes, handed):
                stack.extend(node.all_input_nodes)
        return needed

    def _from_outside(
        self,
        node: fx.Node,
        late: set[fx.Node],
        forward_nodes: set[fx.Node],
        handed: dict[fx.Node, int],
    ) -> bool:
        if node.op == "placeholder" or node in handed:
            return True
        if node in late or _is_view(node) or node.op != "call_function":
            return False
        if str(node.target) == _INDEXING:
            return node.args[0] in forward_nodes
        return node in forward_nodes

    def _source(
        self,
        node: fx.Node,
        late: set[fx.Node],
        forward_nodes: set[fx.Node],
        saved: list[fx.Node],
        handed: dict[fx.Node, int],
    ) -> tuple[str, int] | None:
        if node in handed:
            return ("handed", handed[node])
        if node in self.cotangents:
            return ("cotangent", self.cotangents.index(node))
        if node in self.operands:
            return ("operand", self.operands.index(node))
        if not self._from_outside(node, late, forward_nodes, handed):
            return None
        if node not in saved:
            saved.append(node)
        return ("saved", saved.index(node))


def _nodes(items: Sequence[fx.Node]) -> list[fx.Node]:
    return [n for n in items if isinstance(n, fx.Node)]


def _inputs_or_self(node: fx.Node, inside: set[fx.Node]) -> list[fx.Node]:
    return list(node.all_input_nodes) if node in inside else [node]


def _ancestors(results: Sequence[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = _nodes(results)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found
