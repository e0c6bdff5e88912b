"""The numerical kernel of elimination: the minimum over a dim of a sum of tables.

In: tables over some of the dims 0..n. Out: the minimum over dim 0 of their broadcast sum, a table
over dims 1..n. The work is done in pieces that fit the processor's cache; in large steps, choices
that are equal in all tables are computed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from autopar.search.problem import Array

_CHUNK_ELEMENTS = 1 << 20
_COMPRESS_ABOVE = 1 << 22

Local = Sequence[tuple[tuple[int, ...], Array]]
Check = Callable[[], None]


def go_on() -> None:
    """The check of a computation without a time limit."""


def min_sum_step(
    shape: tuple[int, ...],
    local: Local,
    classes: dict[tuple[int, int], Array],
    check: Check = go_on,
) -> Array:
    """The minimum over dim 0 of the sum of ``local`` tables, given with their dims.

    classes: caches which slices of a table are equal, by (id of the table, axis); it must not
    outlive the tables. check: called between the pieces of a large step; may raise to stop.
    """
    if math.prod(shape) < _COMPRESS_ABOVE:
        return _min_sum(shape, aligned(len(shape), local), check)
    keep, back = _classes(shape, local, classes)
    small = []
    for dims, table in local:
        for axis, dim in enumerate(dims):
            if dim and len(keep[dim - 1]) < shape[dim]:
                table = np.take(table, keep[dim - 1], axis=axis)
        small.append((dims, table))
    inner = (shape[0], *(len(first) for first in keep))
    result = _min_sum(inner, aligned(len(shape), small), check)
    for axis, inverse in enumerate(back):
        if inner[axis + 1] < shape[axis + 1]:
            result = np.take(result, inverse, axis=axis)
    return result


def aligned(num_dims: int, local: Local) -> list[Array]:
    """Tables with ``num_dims`` dims each; a table whose dims another one covers is added to it."""
    wide: list[tuple[frozenset[int], Array]] = []
    for dims, table in sorted(local, key=lambda item: -len(item[0])):
        index: list[slice | None] = [None] * num_dims
        for dim in dims:
            index[dim] = slice(None)
        order = sorted(range(len(dims)), key=dims.__getitem__)
        spread = np.transpose(table, order)[tuple(index)]
        for slot, (covered, total) in enumerate(wide):
            if covered.issuperset(dims):
                wide[slot] = (covered, total + spread)
                break
        else:
            wide.append((frozenset(dims), spread))
    return [table for _, table in wide]


def _classes(
    shape: tuple[int, ...], local: Local, known: dict[tuple[int, int], Array]
) -> tuple[list[Array], list[Array]]:
    """For dims 1..n, a representative of each class of equal choices, and each choice's class."""
    keep: list[Array] = []
    back: list[Array] = []
    for dim in range(1, len(shape)):
        label = np.zeros(shape[dim], dtype=np.int64)
        for dims, table in local:
            if dim in dims:
                label = label * shape[dim] + _labels(table, dims.index(dim), known)
                label = np.unique(label, return_inverse=True)[1]
        _, first, inverse = np.unique(label, return_index=True, return_inverse=True)
        keep.append(first)
        back.append(inverse)
    return keep, back


def _labels(table: Array, axis: int, known: dict[tuple[int, int], Array]) -> Array:
    """Labels of the slices of ``table`` along ``axis``, equal for equal slices."""
    key = (id(table), axis)
    if key not in known:
        seen: dict[bytes, int] = {}
        moved = np.moveaxis(table, axis, 0)
        known[key] = np.array([seen.setdefault(row.tobytes(), len(seen)) for row in moved])
    return known[key]


def _min_sum(shape: tuple[int, ...], tables: Sequence[Array], check: Check) -> Array:
    """The minimum over dim 0 of the broadcast sum of tables with all dims (size 1 where absent)."""
    if len(tables) == 1:
        return np.asarray(tables[0].min(axis=0))
    if math.prod(shape) <= _CHUNK_ELEMENTS:
        return np.asarray(_add_all(tables).min(axis=0))
    result = np.empty(shape[1:])
    width = max(1, _CHUNK_ELEMENTS * shape[1] // math.prod(shape))
    for start in range(0, shape[1], width):
        check()
        part = [
            table if table.shape[1] == 1 else table[:, start : start + width] for table in tables
        ]
        if width == 1 and len(shape) > 2:
            inner = [table[:, 0] for table in part]
            result[start] = _min_sum((shape[0], *shape[2:]), inner, check)
        else:
            result[start : start + width] = _add_all(part).min(axis=0)
    return result


def _add_all(tables: Sequence[Array]) -> Array:
    """The broadcast sum, smallest tables first so that only the last addition is full size."""
    total, *rest = sorted(tables, key=lambda table: table.size)
    for table in rest:
        total = total + table
    return total
