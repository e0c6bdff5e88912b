"""Indices that count a dimension: ``x[arange(n), y]`` rewritten as a gather in each row.

An indexed dimension stays whole, as any of its elements may be read. Where an index is 0, 1, 2, ...
along a dimension of its own, each row is read once and in order: the dimension is as free as one
without an index, so a batch may be split on it and cut into micro-batches. Padding masks of
transformers and losses that pick each row's label are written this way.

Input: an exported program. Output: the program without indices on such dimensions; the other
indices are the same for all rows (``index``), or a single tensor (``gather``). Where several others
depend on the row, the op stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.frontend.reader import is_random
from autopar.frontend.rewrites.edit import Ops, meta_of, value_of

_ATEN = torch.ops.aten
_MAX_ANCESTORS = 50
_Label = tuple[str, int]
"""A dimension: ("x", d) of the source, or ("picked", k) of the indices' common shape."""


def free_counted_dimensions(module: fx.GraphModule) -> None:
    """Rewrite all ops of a functional graph that allow it."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target is _ATEN.index.Tensor:
            _rewrite(module.graph, node)
    module.recompile()


@dataclass(frozen=True, slots=True)
class _Indexed:
    """An ``index`` op with its counted dimensions.

    ``indices``: the index of each dimension of the source that has one. ``counted``: for each
    counted dimension, its position in ``picked``, the common shape of all indices.
    """

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
        return [d for d in range(value_of(self.source).dim()) if d not in self.indices]

    def labels(self) -> list[_Label]:
        """The dimensions of the result: picked ones in place for adjacent indices, else first."""
        return _placed(self.free, sorted(self.indices), [*range(len(self.picked))])


def _rewrite(graph: fx.Graph, node: fx.Node) -> None:
    found = _indexed(node)
    if found is None:
        return
    with graph.inserting_before(node), torch.no_grad():
        ops = Ops(graph, node)
        wide = {d: ops.wide(index, len(found.picked)) for d, index in found.others.items()}
        places = found.counted.values()
        if all(value_of(index).shape[k] == 1 for index in wide.values() for k in places):
            result, labels = _indexed_alike(ops, found, wide)
        elif len(wide) == 1:
            result, labels = _gathered(ops, found, *wide.popitem())
        else:
            return
        result = ops.permuted(result, [labels.index(label) for label in found.labels()])
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _indexed(node: fx.Node) -> _Indexed | None:
    """The counted indices of an op; None without any, or with a non-integer index."""
    source, entries = node.args
    assert isinstance(source, fx.Node)
    assert isinstance(entries, Sequence)
    indices = {d: index for d, index in enumerate(entries) if isinstance(index, fx.Node)}
    if any(value_of(index).dtype in (torch.bool, torch.uint8) for index in indices.values()):
        return None
    if not all(type(s) is int for n in (source, *indices.values()) for s in value_of(n).shape):
        return None  # sizes that depend on values, which the reader refuses
    picked = tuple(torch.broadcast_shapes(*(value_of(index).shape for index in indices.values())))
    counted: dict[int, int] = {}
    for d, index in indices.items():
        place = _counted_place(index, value_of(source).shape[d], picked)
        if place is not None and place not in counted.values():
            counted[d] = place
    return _Indexed(source, indices, counted, picked) if counted else None


def _counted_place(index: fx.Node, size: int, picked: Sequence[int]) -> int | None:
    """The picked dimension along which an index is 0, 1, ..., size - 1, or None."""
    shape = value_of(index).shape
    places = [k for k, length in enumerate(shape, len(picked) - len(shape)) if length > 1]
    if len(places) != 1 or size != math.prod(shape) or picked[places[0]] != size:
        return None
    values = _known(index)
    if values is None or not torch.equal(values.flatten(), torch.arange(size)):
        return None
    return places[0]


def _known(node: fx.Node) -> Tensor | None:
    """The values of a small node that depends on few nodes and on no input or random number."""
    needed: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        found = stack.pop()
        if found in needed:
            continue
        needed[found] = None
        is_plain = found.op == "call_function" and not is_random(found.target)
        if not is_plain or not isinstance(meta_of(found), Tensor) or len(needed) > _MAX_ANCESTORS:
            return None
        if value_of(found).numel() > value_of(node).numel():
            return None
        stack += found.all_input_nodes
    values: dict[fx.Node, Any] = {}
    for found in sorted(needed):
        args, kwargs = fx.map_arg((found.args, found.kwargs), values.__getitem__)
        run: Callable[..., Any] = found.target  # type: ignore[assignment]
        values[found] = run(*args, **kwargs)
    return values[node]


def _indexed_alike(
    ops: Ops, found: _Indexed, wide: Mapping[int, fx.Node]
) -> tuple[fx.Node, list[_Label]]:
    """The op where the other indices are the same in all rows."""
    places = sorted(found.counted.values())
    left = [k for k in range(len(found.picked)) if k not in places]
    result = found.source
    dims = range(value_of(result).dim())
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


def _gathered(ops: Ops, found: _Indexed, dim: int, index: fx.Node) -> tuple[fx.Node, list[_Label]]:
    """The op where each row has its own index into one dimension."""
    rows = sorted(found.counted, key=found.counted.__getitem__)
    places = [found.counted[d] for d in rows]
    left = [k for k in range(len(found.picked)) if k not in places]
    source = ops.permuted(found.source, [*rows, dim, *found.free])
    sizes = [found.picked[k] for k in places]
    length, *rest = value_of(source).shape[len(rows) :]
    index = ops(_ATEN.expand.default, index, list(found.picked))
    index = ops.reshaped(ops.permuted(index, [*places, *left]), [*sizes, -1])
    is_from_the_end = ops(_ATEN.lt.Scalar, index, 0)
    index = ops(_ATEN.where.self, is_from_the_end, ops(_ATEN.add.Tensor, index, length), index)
    for _ in rest:
        index = ops(_ATEN.unsqueeze.default, index, -1)
    num_picked = value_of(index).shape[len(rows)]
    index = ops(_ATEN.expand.default, index, [*sizes, num_picked, *rest])
    result = ops(_ATEN.gather.default, source, len(rows), index)
    result = ops.reshaped(result, [*sizes, *(found.picked[k] for k in left), *rest])
    labels = [("picked", k) for k in (*places, *left)]
    return result, [*labels, *(("x", d) for d in found.free)]


def _placed(free: Sequence[int], indexed: Sequence[int], picked: Sequence[int]) -> list[_Label]:
    """The dimensions of an indexed tensor: picked ones in place for adjacent indices, or first."""
    if not indexed:
        return [("x", d) for d in free]
    is_adjacent = indexed[-1] - indexed[0] + 1 == len(indexed)
    first = indexed[0] if is_adjacent else 0
    labels: list[_Label] = [("x", d) for d in free]
    at = sum(d < first for d in free)
    labels[at:at] = [("picked", k) for k in picked]
    return labels
