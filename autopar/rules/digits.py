"""Which digits of which dimensions are worth splitting at, found by walking the graph.

A digit is a factor of a dimension whose index is a tuple in row-major order (see
`autopar.rules.choice`): in the output of a fused query-key-value projection the heads are the digit
after the factor 3, in a flattened batch the sequence is the digit after the batch. Digits start at
anchors, the ops that do the work (products, attention), as contiguous splits of their dimensions;
views and element-wise ops carry them to other anchors, where they become options.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from autopar.ir.graph import Graph
from autopar.rules.space import Layout, Space

MAX_BASES = 3
"""The largest number of bases per dimension besides 1; the smallest are kept."""

Digit = tuple[int, int]
"""(tensor dimension, outer), as in autopar.ir.placement.S."""


def find_bases(
    graph: Graph, spaces: Sequence[Space | None]
) -> tuple[dict[str, tuple[int, ...]], ...]:
    """For each op, the bases other than 1 at which each of its dimensions may be split.

    ``spaces`` has one entry per op of the graph.
    """
    digits: dict[int, set[Digit]] = {}
    users: dict[int, set[int]] = {}
    for op in graph.ops:
        for value in (*op.inputs, *(o for o in op.outputs if o is not None)):
            users.setdefault(value, set()).add(op.index)
    bases: list[dict[str, set[int]]] = [{} for _ in graph.ops]
    queue = deque(op.index for op in graph.ops)
    queued = set(queue)
    while queue:
        index = queue.popleft()
        queued.discard(index)
        space = spaces[index]
        if space is None:
            continue
        operands = _operands(graph, index, space)
        _collect(space, operands, digits, bases[index])
        for value in _publish(space, operands, digits, bases[index]):
            for user in users[value] - queued:
                queue.append(user)
                queued.add(user)
    return tuple(
        {dim: tuple(sorted(b - {1})[:MAX_BASES]) for dim, b in found.items() if b - {1}}
        for found in bases
    )


def _operands(graph: Graph, index: int, space: Space) -> list[tuple[int, Layout]]:
    op = graph.ops[index]
    pairs = list(zip(op.inputs, space.inputs))
    pairs += [(o, layout) for o, layout in zip(op.outputs, space.outputs) if o is not None]
    return pairs


def _collect(
    space: Space,
    operands: list[tuple[int, Layout]],
    digits: dict[int, set[Digit]],
    bases: dict[str, set[int]],
) -> None:
    """Add the digits of the operands to the op's own dimensions."""
    allowed = space.splittable()
    for value, layout in operands:
        for tensor_dim, outer in digits.get(value, ()):
            before = 1
            for name in layout[tensor_dim]:
                size = space.sizes[name]
                base, remainder = divmod(outer, before)
                if name in allowed and not remainder and base < size and size % base == 0:
                    bases.setdefault(name, set()).add(base)
                before *= size
    if space.anchor:
        for name in allowed:
            bases.setdefault(name, set()).add(1)


def _publish(
    space: Space,
    operands: list[tuple[int, Layout]],
    digits: dict[int, set[Digit]],
    bases: dict[str, set[int]],
) -> list[int]:
    """Add the op's digits to its operands; returns the values that gained some."""
    changed = []
    for value, layout in operands:
        known = digits.setdefault(value, set())
        before_count = len(known)
        for tensor_dim, factors in enumerate(layout):
            for position, name in enumerate(factors):
                before = math.prod(space.sizes[f] for f in factors[:position])
                known.update((tensor_dim, before * b) for b in bases.get(name, ()))
        if len(known) != before_count:
            changed.append(value)
    return changed
