"""Indices that count a dimension: ``x[arange(n), y]`` as the choice in each row that it is.

An indexed dimension stays whole, as any of its elements may be asked for. Where an index is 0, 1,
2, ... along a dimension of its own, each row is asked for once, in order: the dimension is as free
as one that is not indexed, so a batch may be split on it and cut into micro-batches. Padding masks
of transformers and losses that pick each row's label are written this way. In comes an exported
program; in the one that goes out, such dimensions are not indexed: what else is indexed is the same
for all rows (``index``), or is one tensor (``gather``). Where several others depend on the row, the
op stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.exported import is_random

_ATEN = torch.ops.aten
_MAX_ANCESTORS = 50
_Label = tuple[str, int]
"""Of a dimension: ("x", d) of the source, ("picked", k) of the indices' common shape."""


def free_counted_dimensions(module: fx.GraphModule) -> None:
    """Rewrite all ops of a functional graph that can be."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target is _ATEN.index.Tensor:
            _rewrite(module.graph, node)
    module.recompile()


@dataclass(frozen=True, slots=True)
class _Indexed:
    """An ``index`` op: its indices by dimension of the source, those dimensions that are counted
    with the place of theirs in the common shape of all indices, and that shape."""

    source: fx.Node
    indices: Mapping[int, fx.Node]
    counted: Mapping[int, int]
    picked: tuple[int, ...]

    @property
    def others(self) -> dict[int, fx.Node]:
        return {d: index for d, index in self.indices.items() if d not in self.counted}

    @property
    def free(self) -> list[int]:
        """Dimensions of the source that have no index."""
        return [d for d in range(_value(self.source).dim()) if d not in self.indices]

    def labels(self) -> list[_Label]:
        """Of the result: the picked dimensions where adjacent indices stood, else first."""
        return _placed(self.free, sorted(self.indices), [*range(len(self.picked))])


def _rewrite(graph: fx.Graph, node: fx.Node) -> None:
    found = _indexed(node)
    if found is None:
        return
    with graph.inserting_before(node), torch.no_grad():
        ops = _Ops(graph, node)
        wide = {d: ops.wide(index, len(found.picked)) for d, index in found.others.items()}
        places = found.counted.values()
        if all(_value(index).shape[k] == 1 for index in wide.values() for k in places):
            result, labels = _indexed_alike(ops, found, wide)
        elif len(wide) == 1:
            result, labels = _gathered(ops, found, *wide.popitem())
        else:
            return
        result = ops.permuted(result, [labels.index(label) for label in found.labels()])
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _indexed(node: fx.Node) -> _Indexed | None:
    """None where nothing is counted, or an index is no tensor of whole numbers."""
    source, entries = node.args
    assert isinstance(source, fx.Node)
    assert isinstance(entries, Sequence)
    indices = {d: index for d, index in enumerate(entries) if isinstance(index, fx.Node)}
    if any(_value(index).dtype in (torch.bool, torch.uint8) for index in indices.values()):
        return None
    if not all(type(s) is int for n in (source, *indices.values()) for s in _value(n).shape):
        return None  # sizes that depend on values: the reader says so
    picked = tuple(torch.broadcast_shapes(*(_value(index).shape for index in indices.values())))
    counted: dict[int, int] = {}
    for d, index in indices.items():
        place = _counted_place(index, _value(source).shape[d], picked)
        if place is not None and place not in counted.values():
            counted[d] = place
    return _Indexed(source, indices, counted, picked) if counted else None


def _counted_place(index: fx.Node, size: int, picked: Sequence[int]) -> int | None:
    """Along which of the picked dimensions an index is 0, 1, ..., size - 1; None if along none."""
    shape = _value(index).shape
    places = [k for k, length in enumerate(shape, len(picked) - len(shape)) if length > 1]
    if len(places) != 1 or size != math.prod(shape) or picked[places[0]] != size:
        return None
    values = _known(index)
    if values is None or not torch.equal(values.flatten(), torch.arange(size)):
        return None
    return places[0]


def _known(node: fx.Node) -> Tensor | None:
    """The values of a node that depends on nothing a model is given or draws, and on little."""
    needed: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        found = stack.pop()
        if found in needed:
            continue
        needed[found] = None
        is_plain = found.op == "call_function" and not is_random(found.target)
        if not is_plain or not isinstance(_meta(found), Tensor) or len(needed) > _MAX_ANCESTORS:
            return None
        if _value(found).numel() > _value(node).numel():
            return None
        stack += found.all_input_nodes
    values: dict[fx.Node, Any] = {}
    for found in sorted(needed):
        args, kwargs = fx.map_arg((found.args, found.kwargs), values.__getitem__)
        run: Callable[..., Any] = found.target  # type: ignore[assignment]
        values[found] = run(*args, **kwargs)
    return values[node]


def _indexed_alike(
    ops: _Ops, found: _Indexed, wide: Mapping[int, fx.Node]
) -> tuple[fx.Node, list[_Label]]:
    """What else is indexed is so in all rows alike."""
    places = sorted(found.counted.values())
    left = [k for k in range(len(found.picked)) if k not in places]
    result = found.source
    dims = range(_value(result).dim())
    if wide:
        narrow = {d: ops(_ATEN.squeeze.dims, index, places) for d, index in wide.items()}
        result = ops(_ATEN.index.Tensor, result, [narrow.get(d) for d in dims])
    labels = _placed([d for d in dims if d not in wide], sorted(wide), left if wide else [])
    if not wide:  # what is left of the common shape has one element
        for k in left:
            result = ops(_ATEN.unsqueeze.default, result, 0)
            labels.insert(0, ("picked", k))
    rows = {("x", d): ("picked", k) for d, k in found.counted.items()}
    return result, [rows.get(label, label) for label in labels]


def _gathered(ops: _Ops, found: _Indexed, dim: int, index: fx.Node) -> tuple[fx.Node, list[_Label]]:
    """One dimension is indexed in each row by its own."""
    rows = sorted(found.counted, key=found.counted.__getitem__)
    places = [found.counted[d] for d in rows]
    left = [k for k in range(len(found.picked)) if k not in places]
    source = ops.permuted(found.source, [*rows, dim, *found.free])
    sizes = [found.picked[k] for k in places]
    length, *rest = _value(source).shape[len(rows) :]
    index = ops(_ATEN.expand.default, index, list(found.picked))
    index = ops.reshaped(ops.permuted(index, [*places, *left]), [*sizes, -1])
    is_from_the_end = ops(_ATEN.lt.Scalar, index, 0)
    index = ops(_ATEN.where.self, is_from_the_end, ops(_ATEN.add.Tensor, index, length), index)
    for _ in rest:
        index = ops(_ATEN.unsqueeze.default, index, -1)
    num_picked = _value(index).shape[len(rows)]
    index = ops(_ATEN.expand.default, index, [*sizes, num_picked, *rest])
    result = ops(_ATEN.gather.default, source, len(rows), index)
    result = ops.reshaped(result, [*sizes, *(found.picked[k] for k in left), *rest])
    labels = [("picked", k) for k in (*places, *left)]
    return result, [*labels, *(("x", d) for d in found.free)]


def _placed(free: Sequence[int], indexed: Sequence[int], picked: Sequence[int]) -> list[_Label]:
    """The dimensions of an indexed tensor: the picked ones where adjacent indices stood, else
    first."""
    if not indexed:
        return [("x", d) for d in free]
    is_adjacent = indexed[-1] - indexed[0] + 1 == len(indexed)
    first = indexed[0] if is_adjacent else 0
    labels: list[_Label] = [("x", d) for d in free]
    at = sum(d < first for d in free)
    labels[at:at] = [("picked", k) for k in picked]
    return labels


class _Ops:
    """Adds calls to a graph, as if the op that they stand for had been written as them."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph = graph
        self.meta = {k: v for k, v in node.meta.items() if k in ("nn_module_stack", "stack_trace")}

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = self.graph.call_function(target, args, kwargs)
        made.meta = {**self.meta, "val": target(*fx.map_arg(args, _meta), **kwargs)}
        return made

    def wide(self, index: fx.Node, num_dims: int) -> fx.Node:
        """With as many dimensions, new ones of size 1 in front."""
        for _ in range(num_dims - _value(index).dim()):
            index = self(_ATEN.unsqueeze.default, index, 0)
        return index

    def permuted(self, node: fx.Node, order: Sequence[int]) -> fx.Node:
        if list(order) == sorted(order):
            return node
        return self(_ATEN.permute.default, node, list(order))

    def reshaped(self, node: fx.Node, shape: Sequence[int]) -> fx.Node:
        if not _value(node).is_contiguous():
            node = self(_ATEN.clone.default, node, memory_format=torch.contiguous_format)
        return self(_ATEN.view.default, node, list(shape))


def _meta(node: fx.Node) -> Any:
    return node.meta.get("val")


def _value(node: fx.Node) -> Tensor:
    found = _meta(node)
    assert isinstance(found, Tensor), node
    return found
