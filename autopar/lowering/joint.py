"""A traced function with its derivative, split into F, I and W.

The joint graph computes outputs and gradients from inputs and cotangents. It is partitioned by
reachability from the cotangents:

- ``F``: inputs to outputs and saved values,
- ``I``: saved values and cotangents to the gradients of the inputs (the critical path) and the
  intermediate values that ``W`` needs,
- ``W``: saved values, cotangents and the values handed over by ``I`` to the gradients of the
  parameters (off the critical path).

A schedule that never runs anything between I and W can *join* them: I computes the gradients of the
parameters too, each as soon as it can, and hands them over, so that activations are released in
between.

Which values are saved is a choice. By default all that the derivative reads, except those that cost
nothing to make again: views, values that only the backward pass needs, and cheap functions of
operands without gradient (such as the additive mask that attention makes of a boolean one, which
every layer would save otherwise). If a set of values is given, the backward pass saves these and
recomputes all others, as late as possible, from saved values and operands: in I, which hands over
what W reads too, or in W if only W reads it. Random ops draw the same numbers again. Results of
collectives (other than all-to-alls), of ops that write to their operands and of control flow are
saved wherever they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, fx

from autopar.base.errors import PlanError
from autopar.base.spelling import did_you_mean
from autopar.base.torch_private import (
    is_overload,
    largest_bytes,
    lazy_graph_module,
    written_arguments,
)
from autopar.comm.ops import COLLECTIVES, REPEATED, SHARD
from autopar.cost_models.memory import graph_memory
from autopar.ir.random_ops import DRAWN_AS, is_random
from autopar.lowering.op_marks import mark_weight_gradients, op_place
from autopar.lowering.types import Kernel, TensorMeta

_INDEXING = "<built-in function getitem>"
Sources = list[tuple[str, int]]
Test = Callable[[fx.Node], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class JointValue:
    """A value of the forward pass that the backward pass reads, or can recompute others from.

    ``inputs`` are the positions of the values that it is computed from among those of the joint
    graph. ``operand``: its position among the operands, if it is one. ``is_free``: views, and
    values that are recomputed in any case.
    """

    node: fx.Node
    size_bytes: int
    inputs: tuple[int, ...]
    operand: int | None
    is_needed: bool
    is_free: bool
    can_keep: bool
    can_repeat: bool

    @property
    def name(self) -> str:
        return self.node.name


class Joint:
    """A graph from operands and cotangents to outputs and the gradients of some operands.

    ``wanted`` are the outputs with a cotangent, ``sources`` the operands with a gradient;
    ``is_weight`` says of each operand whether it is a parameter.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        wanted: tuple[int, ...],
        sources: tuple[int, ...],
        is_weight: tuple[bool, ...],
    ) -> None:
        self.module = module
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        self.operands = placeholders[: len(is_weight)]
        self.cotangents = placeholders[len(is_weight) :]
        self.fixed = [n for i, n in enumerate(self.operands) if i not in sources]
        results = list(next(n for n in module.graph.nodes if n.op == "output").args[0])
        self.outputs = results[: len(results) - len(sources)]
        grads = dict(zip(sources, results[len(self.outputs) :]))
        self.grads = {i: g for i, g in grads.items() if isinstance(g, fx.Node)}
        self.wanted = wanted
        self.input_grads = tuple(i for i in self.grads if not is_weight[i])
        self.weight_grads = tuple(i for i in self.grads if is_weight[i])
        self.order = {n: i for i, n in enumerate(module.graph.nodes)}
        mark_weight_gradients([*self.order], {self.grads[i] for i in self.input_grads})
        self.late = self._reach(self.cotangents)
        forward = _ancestors(self.outputs)
        self.forward_nodes = forward - self._cheap()
        drawn = sorted((n for n in forward if is_random(n)), key=self.order.__getitem__)
        self.places = {node: place for place, node in enumerate(drawn)}

    # --- the choice of what is saved --------------------------------------------------------
    def kernel(self, kept: Collection[str] | None = None, *, may_join: bool = False) -> Kernel:
        """F, I and W; ``kept`` names the values that are saved, None saves all that are needed.

        If they ``may_join``, I and W are joined where the backward pass takes less memory then.
        Raises PlanError for a name that is not that of a value which can be saved.
        """
        split = _Split(self, self._test(kept))
        separate = split.kernel()
        if not (may_join and self.input_grads and self.weight_grads):
            return separate
        return min(separate, split.kernel(is_joined=True), key=_backward_bytes)

    @cached_property
    def default_names(self) -> tuple[str, ...]:
        """The names of the values that F saves by default."""
        return _Split(self, self.stays_by_default).saved_names()

    def names_without(self, is_recomputed: Callable[[int], bool]) -> tuple[str, ...]:
        """The names of the values that F saves if it saves no results of some ops.

        ``is_recomputed`` gets the place of an op in the block. Results that cannot be recomputed
        are saved all the same.
        """

        def stays(node: fx.Node) -> bool:
            place = op_place(node)
            return self.stays_by_default(node) and (
                place is None or not is_recomputed(place) or not self.can_repeat(_call(node))
            )

        return _Split(self, stays).saved_names()

    def _test(self, kept: Collection[str] | None) -> Test:
        if kept is None:
            return self.stays_by_default
        known = {v.name for v in self.values if v.can_keep and v.operand is None}
        for name in kept:
            if name not in known:
                raise PlanError(
                    f"{name!r} is no value that the backward pass can read"
                    + did_you_mean(name, known)
                )
        names = frozenset(kept)

        def stays(node: fx.Node) -> bool:
            if not self.stays_by_default(node):
                return False
            return node.name in names or not self.can_repeat(_call(node))

        return stays

    def stays_by_default(self, node: fx.Node) -> bool:
        if node in self.late or _is_view(node) or node.op != "call_function":
            return False
        return _call(node) in self.forward_nodes

    def can_repeat(self, node: fx.Node) -> bool:
        """Whether a call can run again in the backward pass with the same result."""
        is_kept = node.target in COLLECTIVES and node.target not in REPEATED
        return not self._writes and _is_plain(node) and not is_kept

    @cached_property
    def _writes(self) -> bool:
        """Whether an op of the forward pass writes to its operands."""
        calls = (n for n in self.forward_nodes if n.op == "call_function" and _is_plain(n))
        return any(any(written_arguments(n.target, n.args, n.kwargs)) for n in calls)

    @cached_property
    def values(self) -> tuple[JointValue, ...]:
        """All values that the backward pass reads or can recompute others from, in order."""
        wanted = [self.grads[i] for i in (*self.input_grads, *self.weight_grads)]
        inside = _ancestors(wanted)
        read = {
            a for n in inside & self.late for a in n.all_input_nodes if a not in self.late
        }.union(n for n in wanted if n not in self.late)
        found = [n for n in inside - self.late if n.op != "get_attr"]
        found.sort(key=self.order.__getitem__)
        number = {node: i for i, node in enumerate(found)}
        return tuple(
            JointValue(
                node=node,
                size_bytes=_size_bytes(node),
                inputs=tuple(number[a] for a in node.all_input_nodes if a in number),
                operand=self.operands.index(node) if node.op == "placeholder" else None,
                is_needed=node in read,
                is_free=_is_view(node) or _call(node) not in self.forward_nodes or _is_item(node),
                can_keep=node.op == "placeholder"
                or (self.stays_by_default(node) and isinstance(node.meta.get("val"), Tensor)),
                can_repeat=node.op != "placeholder"
                and (self.can_repeat(_call(node)) or not self.stays_by_default(node)),
            )
            for node in found
        )

    def _cheap(self) -> set[fx.Node]:
        """Element-wise results of fixed operands that are at least as large as these."""
        read: dict[fx.Node, set[fx.Node]] = {n: {n} for n in self.fixed}
        found: set[fx.Node] = set()
        for node in self.sorted(set(self.module.graph.nodes)):
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

    def sorted(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """Calls, and the constants and subgraphs (of ``torch.cond``) they refer to, in order."""
        kinds = ("call_function", "get_attr")
        return sorted((n for n in nodes if n.op in kinds), key=lambda n: self.order[n])


class _Split:
    """One split of a joint graph; ``stays`` says which values are saved if they are needed."""

    def __init__(self, joint: Joint, stays: Test) -> None:
        self.joint = joint
        self.stays = stays
        self.saved: list[fx.Node] = []

    def kernel(self, *, is_joined: bool = False) -> Kernel:
        joint = self.joint
        input_results = [joint.grads[i] for i in joint.input_grads]
        weight_results = [joint.grads[i] for i in joint.weight_grads]
        results = [*input_results, *(weight_results if is_joined else ())]
        made = {n for n in self._close(results, lambda _: False) if self._is_worth(n)}

        def is_handed(node: fx.Node) -> bool:
            return _call(node) in made and _call(node).op == "call_function"

        read = [n for n in self._close(weight_results, is_handed) if is_handed(n)]
        handed = joint.sorted(read)
        number = {n: i for i, n in enumerate(handed)}
        input_graph = self._late_graph([*input_results, *handed], {})
        weight_graph = self._late_graph(weight_results, number)
        empty_input = not joint.input_grads and not handed
        return Kernel(
            forward=self._forward_graph(),
            backward_input=None if empty_input else input_graph[0],
            backward_weight=weight_graph[0] if joint.weight_grads else None,
            num_outputs=len(joint.outputs),
            output_metas=tuple(TensorMeta.of(n.meta["val"]) for n in joint.outputs),
            cotangents=joint.wanted,
            input_sources=() if empty_input else input_graph[1],
            weight_sources=weight_graph[1] if joint.weight_grads else (),
            input_grads=joint.input_grads,
            weight_grads=joint.weight_grads,
        )

    def saved_names(self) -> tuple[str, ...]:
        self.kernel()
        return tuple(node.name for node in self.saved)

    def _is_worth(self, node: fx.Node) -> bool:
        """Whether W gets a value that I makes from I: gradients, and what takes time to repeat."""
        joint = self.joint
        return node in joint.late or (joint.stays_by_default(node) and not self.stays(node))

    def _forward_graph(self) -> fx.GraphModule:
        joint, graph = self.joint, fx.Graph()
        results = [*joint.outputs, *self.saved]
        env: dict[fx.Node, fx.Node] = {}
        for position, node in enumerate(joint.operands):
            env[node] = graph.placeholder(f"x{position}")
            env[node].meta = dict(node.meta)
        for node in joint.sorted(_ancestors(results)):
            env[node] = graph.node_copy(node, lambda n: env[n])
        graph.output(tuple(env[n] for n in results))
        return lazy_graph_module(joint.module, graph)

    def _late_graph(
        self, results: Sequence[fx.Node], handed: dict[fx.Node, int]
    ) -> tuple[fx.GraphModule, tuple[tuple[str, int], ...]]:
        """A graph of ``results`` whose arguments are the values that it reads from outside."""
        order = self.joint.order
        needed = sorted(self._close(results, handed.__contains__), key=lambda n: order[n])
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        sources: Sources = []
        for node in needed:
            source = self._source(node, handed)
            if source is not None:
                env[node] = graph.placeholder(f"{source[0]}{source[1]}")
                env[node].meta = dict(node.meta)
                sources.append(source)
        for node in self._as_late_as_possible(needed, results, env):
            env[node] = graph.node_copy(node, lambda n: env[n])
            if node in self.joint.places:
                custom = env[node].meta.get("custom") or {}
                drawn = {**custom, DRAWN_AS: self.joint.places[node]}
                env[node].meta = {**env[node].meta, "custom": drawn}
        graph.output(tuple(env[n] for n in results))
        return lazy_graph_module(self.joint.module, graph), tuple(sources)

    def _as_late_as_possible(
        self, needed: Sequence[fx.Node], results: Sequence[fx.Node], given: Collection[fx.Node]
    ) -> list[fx.Node]:
        """The calls of a backward graph: each recomputed value right before its first reader."""
        done, ordered = set(given), list[fx.Node]()
        for root in [*(n for n in needed if n in self.joint.late), *results]:
            stack = [root]
            while stack:
                node = stack[-1]
                missing = [a for a in node.all_input_nodes if a not in done]
                if node in done:
                    stack.pop()
                elif missing:
                    stack.extend(reversed(missing))
                else:
                    done.add(node)
                    ordered.append(stack.pop())
        return ordered

    def _close(self, results: Sequence[fx.Node], is_handed: Test) -> set[fx.Node]:
        """The nodes of a backward graph: from the results back to values from outside."""
        needed: set[fx.Node] = set()
        stack = list(results)
        while stack:
            node = stack.pop()
            if node in needed:
                continue
            needed.add(node)
            if not (node.op == "placeholder" or is_handed(node) or self.stays(node)):
                stack.extend(node.all_input_nodes)
        return needed

    def _source(self, node: fx.Node, handed: dict[fx.Node, int]) -> tuple[str, int] | None:
        joint = self.joint
        if node in handed:
            return ("handed", handed[node])
        if node in joint.cotangents:
            return ("cotangent", joint.cotangents.index(node))
        if node in joint.operands:
            return ("operand", joint.operands.index(node))
        if not self.stays(node):
            return None
        if node not in self.saved:
            self.saved.append(node)
        return ("saved", self.saved.index(node))


def _is_item(node: fx.Node) -> bool:
    return str(node.target) == _INDEXING


def _call(node: fx.Node) -> fx.Node:
    """The call that computes a node: its source, for one of several results."""
    source = node.args[0] if _is_item(node) else node
    assert isinstance(source, fx.Node)
    return source


def _is_plain(node: fx.Node) -> bool:
    """Whether a node calls an operator, rather than control flow over subgraphs."""
    return is_overload(node.target)


def _is_view(node: fx.Node) -> bool:
    """A view, or one part of a view with several parts."""
    return getattr(_call(node).target, "is_view", False)


def _is_cheap(node: fx.Node) -> bool:
    """Whether a node is a constant, a shard or one deterministic pass over tensors."""
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return False
    is_pass = torch.Tag.pointwise in tags or node.target is SHARD
    return is_pass or not node.all_input_nodes


def _backward_bytes(kernel: Kernel) -> int:
    """The most bytes that I and then W hold besides what F has saved and the cotangents."""
    assert kernel.backward_input is not None
    assert kernel.backward_weight is not None
    handed = [
        node
        for node, (kind, _) in zip(_given(kernel.backward_weight), kernel.weight_sources)
        if kind == "handed"
    ]
    made = [
        graph_memory(module.graph).peak_bytes - sum(map(_size_bytes, _given(module)))
        for module in (kernel.backward_input, kernel.backward_weight)
    ]
    return max(made[0], made[1] + sum(map(_size_bytes, handed)))


def _given(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _size_bytes(node: fx.Node) -> int:
    """Size of the storage behind a value."""
    value = node.meta.get("val")
    return largest_bytes(value.untyped_storage()) if isinstance(value, Tensor) else 0


def _ancestors(results: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = [n for n in results if isinstance(n, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found
