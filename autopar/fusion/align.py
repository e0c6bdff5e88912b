"""Alignment: which ops of several models are computed as one.

Two ops are alike if operator, arguments, and shapes and kinds of their operands are equal. The op
sequences of the models are merged one after another by a longest common subsequence, which keeps
the order of each model; an op that no other model has gets a row of its own. A poor alignment costs
time (values are stacked and unstacked again), never correctness.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.ir.graph import Graph, Op, Ref, ValueKind, map_refs

Key = Hashable


@dataclass(frozen=True, slots=True)
class Row:
    """Ops computed as one: for each of ``models``, the op at the same position in ``ops``."""

    models: tuple[int, ...]
    ops: tuple[int, ...]


def aligned(graphs: Sequence[Graph]) -> tuple[Row, ...]:
    """The ops of all graphs, each in one row, in an order that is valid for every graph."""
    keys = [[_key(op, graph) for op in graph.ops] for graph in graphs]
    rows = [Row((0,), (i,)) for i in range(len(keys[0]))]
    row_keys = list(keys[0])
    for model in range(1, len(graphs)):
        rows, row_keys = _merged(rows, row_keys, model, keys[model])
    return tuple(rows)


def _merged(
    rows: list[Row], row_keys: list[Key], model: int, keys: list[Key]
) -> tuple[list[Row], list[Key]]:
    pairs = _common(row_keys, keys)
    merged: list[Row] = []
    merged_keys: list[Key] = []
    i = j = 0
    for left, right in [*pairs, (len(rows), len(keys))]:
        merged += rows[i:left]
        merged_keys += row_keys[i:left]
        merged += [Row((model,), (place,)) for place in range(j, right)]
        merged_keys += keys[j:right]
        if left < len(rows):
            merged.append(Row((*rows[left].models, model), (*rows[left].ops, right)))
            merged_keys.append(row_keys[left])
        i, j = left + 1, right + 1
    return merged, merged_keys


def _common(left: Sequence[Key], right: Sequence[Key]) -> list[tuple[int, int]]:
    """Index pairs of a longest common subsequence; equal ends are matched directly."""
    start = 0
    while start < min(len(left), len(right)) and left[start] == right[start]:
        start += 1
    stop = 0
    while stop < min(len(left), len(right)) - start and left[-1 - stop] == right[-1 - stop]:
        stop += 1
    middle_left, middle_right = left[start : len(left) - stop], right[start : len(right) - stop]
    pairs = [(i, i) for i in range(start)]
    pairs += [(start + i, start + j) for i, j in _longest(middle_left, middle_right)]
    pairs += [(len(left) - k, len(right) - k) for k in range(stop, 0, -1)]
    return pairs


def _longest(left: Sequence[Key], right: Sequence[Key]) -> list[tuple[int, int]]:
    lengths = np.zeros((len(left) + 1, len(right) + 1), dtype=np.int32)
    for i in range(len(left) - 1, -1, -1):
        for j in range(len(right) - 1, -1, -1):
            if left[i] == right[j]:
                lengths[i, j] = lengths[i + 1, j + 1] + 1
            else:
                lengths[i, j] = max(lengths[i + 1, j], lengths[i, j + 1])
    pairs = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] == right[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif lengths[i + 1, j] >= lengths[i, j + 1]:
            i += 1
        else:
            j += 1
    return pairs


def _key(op: Op, graph: Graph) -> Key:
    def described(ref: Ref) -> Key:
        value = graph.values[ref.index]
        is_trained = value.kind is ValueKind.PARAMETER and value.differentiable
        return value.shape, str(value.dtype), value.kind is ValueKind.PARAMETER, is_trained

    args, kwargs = map_refs((op.args, op.kwargs), described)
    outputs = tuple(
        None if o is None else (graph.values[o].differentiable, graph.values[o].shape)
        for o in op.outputs
    )
    return op.target_name, _hashable(args), _hashable(kwargs), outputs


def _hashable(node: object) -> Key:
    if isinstance(node, tuple):
        return tuple(_hashable(n) for n in node)
    return repr(node)
