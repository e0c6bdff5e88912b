"""Writes in place that decompositions would get wrong, rewritten as writes that they get right.

``torch.export`` records writes in place as they are made, and ``run_decompositions`` replaces them
by rebuilding the whole value from what was written to a view of it. This is wrong for two kinds of
writes in torch 2.11 to 2.13:

- writes that autograd does not see, under ``no_grad`` or through ``detach()``: the gradient of the
  value, which should flow as if nothing had been written, is lost;
- writes through windows (``Tensor.unfold``) that do not cover their dimension: the elements
  between them are set to zero.

Decompositions also fail where two buffers get one value (``total.add_(1); last.copy_(total)``).

Input: one graph of an exported program, before its decompositions, with its ``no_grad`` regions
inlined. Output: the same program in which the first kind uses `autopar.ir.overwrite.overwrite`, the
second ``as_strided``, and what is copied into a buffer is cloned first. Writes that have no such
form are refused with their file and line.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from autopar.base.errors import CaptureError
from autopar.base.torch_private import is_composite, is_wrapped, pytree, written_arguments
from autopar.frontend.call_groups import ReturnedOperands, operands
from autopar.frontend.reader import location
from autopar.frontend.rewrites.edit import Ops, meta_of, value_of
from autopar.ir.overwrite import overwrite

_ATEN = torch.ops.aten
_UNSAFE = frozenset({
    _ATEN.unsafe_chunk.default, _ATEN.unsafe_split.Tensor, _ATEN.unsafe_split_with_sizes.default,
})  # fmt: skip
"""Operators that return views although their schema does not declare it."""
_DETACHES = frozenset({_ATEN.detach.default, _ATEN.detach_.default})


def show_hidden_writes(module: fx.GraphModule, without_grad: Collection[fx.Node]) -> None:
    """Rewrite the writes of one graph; ``without_grad`` are the nodes that ran under ``no_grad``.

    Raises CaptureError for writes that have no correct form.
    """
    writes = [node for node in module.graph.nodes if any(_written(node))]
    if not writes:
        return
    _share_returned_inputs(module.graph, without_grad, writes)
    memory = _Memory(module.graph, without_grad)
    for node in writes:
        _Write(module.graph, memory, node, list(_written(node))).rewrite()
    for node in writes:
        if node.target is _ATEN.copy_.default and _is_placeholder(memory, node.args[0]):
            _copy_of_its_own(module.graph, node, node.args[1])


def _is_placeholder(memory: _Memory, written: Any) -> bool:
    return memory.chain(written)[0].op == "placeholder"


def _copy_of_its_own(graph: fx.Graph, node: fx.Node, source: Any) -> None:
    """Let a buffer get a copy of what another may get, or is."""
    with graph.inserting_before(node):
        node.replace_input_with(source, Ops(graph, node)(_ATEN.clone.default, source))


def _share_returned_inputs(
    graph: fx.Graph, without_grad: Collection[fx.Node], writes: Sequence[fx.Node]
) -> None:
    """Replace operators that return their input itself (disabled dropout) by that input.

    The exported graph has a new value for such composite operators, which would not share a write;
    and if they ran under ``no_grad``, it would seem to have no gradient.

    Raises CaptureError where they return another view of it, unknown to the graph, before a write.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    written = {_storage(t): order[node] for node in writes for t in _written(node)}
    known = ReturnedOperands()
    for node in list(graph.nodes):
        is_hidden = is_composite(node.target) or node.target in _UNSAFE
        if not (is_hidden or node in without_grad) or any(_written(node)):
            continue
        if written.keys().isdisjoint(map(_storage, (node, *node.all_input_nodes))):
            continue
        sources = operands([node])
        if any(map(is_wrapped, pytree.tree_leaves([*map(meta_of, sources)]))):
            continue  # inside vmap
        for source, found in zip(sources, known.of(node)):
            if found == "itself":
                node.replace_all_uses_with(source)
                graph.erase_node(node)
                break
            last = max(written.get(_storage(each), -1) for each in (node, source))
            if is_hidden and found == "a view" and last > order[node]:
                _refuse(node, "returns views of what is written to", "Write into a copy: x.clone()")


def _refuse(node: fx.Node, what: str, fix: str) -> NoReturn:
    raise CaptureError(
        f"the model cannot be captured as one graph: {node.target} at "
        f"{location(node) or 'an unknown line'} {what}\nHow to fix it: {fix}"
    )


def _written(node: fx.Node) -> Iterator[fx.Node]:
    for argument in written_arguments(node.target, node.args, node.kwargs):
        if isinstance(argument, fx.Node) and _storage(argument) is not None:
            yield argument


def _storage(node: fx.Node) -> int | None:
    """The storage of a tensor; for several tensors, that of the first."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return _storage_of(leaves[0]) if leaves else None


def _storage_of(value: Any) -> int | None:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return None
    try:
        return int(value.untyped_storage()._cdata)
    except NotImplementedError:  # inside vmap
        return None


class _Memory:
    """Which nodes share memory, how each was derived, and through which a gradient flows."""

    def __init__(self, graph: fx.Graph, without_grad: Collection[fx.Node]) -> None:
        self.without_grad = without_grad
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.base: dict[fx.Node, fx.Node] = {}
        self.detached: set[fx.Node] = set()
        self.flowing: set[fx.Node | int] = set()  # detached nodes, and memory
        self.sharing: dict[int, list[fx.Node]] = {}
        for node in graph.nodes:
            storage = _storage(node)
            if storage is not None:
                self.sharing.setdefault(storage, []).append(node)
                self._see(node, storage)

    def _see(self, node: fx.Node, storage: int) -> None:
        base = next((s for s in node.all_input_nodes if _storage(s) == storage), None)
        is_off = node in self.without_grad
        is_itself = node.target is operator.getitem or any(True for _ in _written(node))
        if base is not None:
            self.base[node] = base
        if node.target in _DETACHES or (is_off and not is_itself) or base in self.detached:
            self.detached.add(node)
        if node.op == "placeholder":
            flows = value_of(node).requires_grad
        else:
            flows = node.target not in _DETACHES and not is_off
            flows = flows and any(self.has_gradient(s) for s in node.all_input_nodes)
        if flows and _holds_numbers(node):
            self.flowing.add(node if node in self.detached else storage)

    def has_gradient(self, node: fx.Node) -> bool:
        return (node if node in self.detached else _storage(node)) in self.flowing

    def chain(self, node: fx.Node) -> list[fx.Node]:
        """The nodes from the one that allocated the memory to this view of it."""
        found = [node]
        while found[-1] in self.base:
            found.append(self.base[found[-1]])
        return found[::-1]

    def read_after(self, node: fx.Node, storage: int) -> Iterator[fx.Node]:
        """The nodes that share the memory and are read later."""
        now = self.order[node]
        for alias in self.sharing[storage]:
            if any(self.order.get(user, now) > now for user in alias.users):
                yield alias


def _holds_numbers(node: fx.Node) -> bool:
    leaves = pytree.tree_leaves(node.meta["val"])
    return any(x.is_floating_point() or x.is_complex() for x in leaves if isinstance(x, Tensor))


class _Write:
    """One operator with all that it writes to."""

    def __init__(
        self, graph: fx.Graph, memory: _Memory, node: fx.Node, written: Sequence[fx.Node]
    ) -> None:
        self.graph, self.memory, self.node, self.written = graph, memory, node, written
        self.is_off = node in memory.without_grad
        self.others = [s for s in node.all_input_nodes if s not in written]
        self.sources = [s for s in self.others if memory.has_gradient(s)]

    def rewrite(self) -> None:
        if len(self.written) == 1 and self._begins_another_value(self.written[0]):
            return
        hidden = [t for t in self.written if self._hides_a_gradient(t)]
        if self.is_off or hidden:
            self._pass_on_the_written_value()
        with self.graph.inserting_before(self.node):
            ops = Ops(self.graph, self.node)
            seen = {t: self._visible(ops, t, is_hidden=t in hidden) for t in self.written}
            for other in self.others if self.is_off else ():
                if other in self.memory.without_grad or other in self.sources:
                    self.node.replace_input_with(other, ops(_ATEN.detach.default, other))
            copies = {
                t: ops(_ATEN.clone.default, ops(_ATEN.detach.default, seen[t])) for t in hidden
            }
        for t in self.written:
            self.node.replace_input_with(t, copies.get(t, seen[t]))
        with self.graph.inserting_after(self.node):
            after = Ops(self.graph, self.node)
            for t in reversed(hidden):
                shown = after(overwrite._opoverload, seen[t], copies[t])
                with self.graph.inserting_after(shown):
                    after(_ATEN.copy_.default, seen[t], shown)

    def _begins_another_value(self, written: fx.Node) -> bool:
        """Copy a detached value before a value with a gradient is written into it.

        From then on it has a gradient of its own. Returns whether this applies. Raises CaptureError
        where the memory is also read under its other names, without that gradient.
        """
        memory, node = self.memory, self.node
        if self.is_off or not self.sources or written not in memory.detached:
            return False
        storage = _storage(written)
        assert storage is not None
        now = memory.order[node]
        for alias in memory.read_after(node, storage):
            if alias is not written and memory.order[alias] < now:
                _refuse(
                    self.node,
                    f"writes {str(self.sources[0])!r}, which needs a gradient, through detach() "
                    f"into memory that is read again as {str(alias)!r}",
                    "Write into the value itself, or into detach().clone()",
                )
        with self.graph.inserting_before(node):
            copy = Ops(self.graph, node)(_ATEN.clone.default, written)
        written.replace_all_uses_with(
            copy, delete_user_cb=lambda user: memory.order.get(user, -1) >= now
        )
        memory.base[node] = copy
        return True

    def _hides_a_gradient(self, written: fx.Node) -> bool:
        """Whether the write changes a value with a gradient that is read later."""
        memory, storage = self.memory, _storage(written)
        assert storage is not None
        if not (self.is_off or written in memory.detached) or storage not in memory.flowing:
            return False
        if all(alias in memory.detached for alias in memory.read_after(self.node, storage)):
            return False
        if memory.chain(written)[0].op == "placeholder":
            _refuse(
                self.node,
                "changes a parameter in place",
                "Compute the changed value from the parameter, or change it between the steps",
            )
        return True

    def _pass_on_the_written_value(self) -> None:
        """Let readers of the result read the written value itself, which carries the gradient."""
        if not self.node.users:
            return
        if not isinstance(self.node.meta["val"], Tensor):
            _refuse(
                self.node, "writes several values at once without gradients", "Write them singly"
            )
        self.node.replace_all_uses_with(self.written[0])

    def _visible(self, ops: Ops, written: fx.Node, *, is_hidden: bool) -> fx.Node:
        """The written view, rebuilt from its memory such that decompositions see the write."""
        view = value_of(written)
        if _overlaps(view):
            _refuse(
                self.node,
                "writes through a view whose elements share memory",
                "Write into the value that it is a view of, or into a copy of it",
            )
        maker, *steps = self.memory.chain(written)
        views = [v for v in steps if v.target not in _DETACHES and not any(_written(v))]
        has_gaps = any(_skips_some(v) for v in views)
        if not is_hidden and not has_gaps:
            return written
        if has_gaps or not all(isinstance(v.meta["val"], Tensor) for v in views):
            size, stride = list(view.shape), list(view.stride())
            return ops(_ATEN.as_strided.default, maker, size, stride, view.storage_offset())
        for step in views:
            maker = self._again(ops, step, maker)
        return maker

    def _again(self, ops: Ops, view: fx.Node, base: fx.Node) -> fx.Node:
        """The same view of another value."""
        old = self.memory.base[view]
        args, kwargs = fx.map_arg((view.args, view.kwargs), lambda n: base if n is old else n)
        return ops(view.target, *args, **kwargs)


def _skips_some(view: fx.Node) -> bool:
    """Whether the view has windows with gaps between them, or that overlap."""
    if view.target is not _ATEN.unfold.default:
        return False
    source, dim, size, step = _unfolded(*view.args)
    length = source.shape[dim] if source.dim() else 1
    return size != step or length % size != 0


def _unfolded(source: Any, dim: Any, size: Any, step: Any) -> tuple[Tensor, int, int, int]:
    return value_of(source), dim, size, step


def _overlaps(view: Tensor) -> bool:
    """Whether two elements of the view may share a memory location.

    False for a view whose size depends on data: eager mode itself refuses writes to expanded ones.
    """
    if any(type(number) is not int for number in (*view.shape, *view.stride())):
        return False
    reach = 1
    for step, size in sorted(zip(view.stride(), view.shape)):
        if size > 1 and step < reach:
            return True
        reach += step * (size - 1)
    return False
