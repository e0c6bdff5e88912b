"""Placements of a value on a mesh, and the moves between them.

On each mesh axis a value and its gradient are in one of four states:

=====  ==============================================  ===================
state  value                                           gradient
=====  ==============================================  ===================
R      replicated: the same on all                     replicated
S(d)   split on tensor dimension d                     split likewise
P      a partial sum: the value is the sum over all    replicated
V      varying use: the same on all, but each device   a partial sum
       computes with it on another share of the work
=====  ==============================================  ===================

A move from one state to another costs exactly this, forward and backward; every entry follows
from what the value and the gradient are before and after:

=========  ==================  ==================
from → to  forward             backward
=========  ==================  ==================
R → S      local slice         all-gather
R → V      –                   all-reduce
R → P      local mask          –
S → R      all-gather          local slice
S → V      all-gather          reduce-scatter
S → S'     all-to-all          all-to-all
S → P      local pad           local slice
P → R      all-reduce          –
P → S      reduce-scatter      all-gather
P → V      all-reduce          all-reduce
V → R      –                   local mask
V → S      local slice         local pad
V → P      local mask          local mask
=========  ==================  ==================

(Mask: position 0 of the group keeps the value, the others hold zeros.)

A split is a *digit* of the index along its dimension: ``S(d, outer=k)`` views dimension d of size
N as ``[k, n, N / (k n)]`` and gives device c the slice c of the middle part. ``outer=1`` is the
plain contiguous split; ``outer=3`` splits the heads of a fused query-key-value projection; two axes
on one dimension are two digits (an inner one has the outer one's ``outer * size``). Digits of one
dimension never overlap, so any axis may be gathered, sliced or moved on its own, in any order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from autopar.errors import PlanError
from autopar.mesh import Mesh


class State(StrEnum):
    """The four states of a value on one mesh axis."""

    REPLICATE = "R"
    SHARD = "S"
    PARTIAL = "P"
    VARYING = "V"


class Placement(NamedTuple):
    """The state of a value on one mesh axis; ``dim`` and ``outer`` matter for SHARD only."""

    state: State
    dim: int = -1
    outer: int = 1

    def __str__(self) -> str:
        if self.state is not State.SHARD:
            return str(self.state)
        return f"S{self.dim}" + (f"/{self.outer}" if self.outer != 1 else "")


R = Placement(State.REPLICATE)
P = Placement(State.PARTIAL)
V = Placement(State.VARYING)


def S(dim: int, outer: int = 1) -> Placement:
    """Split on tensor dimension ``dim``, viewed as ``[outer, num_shards, rest]``."""
    return Placement(State.SHARD, dim, outer)


Placements = tuple[Placement, ...]
"""One placement per mesh axis, in mesh order."""

_TEXT = re.compile(r"^(?:([RPV])|S(\d+)(?:/(\d+))?)$")


def parse_placement(text: str) -> Placement:
    """Read back ``str(placement)``; raises PlanError on anything else."""
    match = _TEXT.match(text)
    if match is None:
        raise PlanError(f"placement {text!r} is none of R, P, V, S<dim> or S<dim>/<outer>")
    if match[1]:
        return Placement(State(match[1]))
    return S(int(match[2]), int(match[3] or 1))


def format_placements(placements: Placements) -> str:
    return " ".join(map(str, placements))


def check_placements(placements: Placements, shape: Sequence[int], mesh: Mesh) -> None:
    """Raise PlanError unless every split is a whole, disjoint digit of its dimension."""
    if len(placements) != mesh.num_axes:
        raise PlanError(f"{len(placements)} placements for a mesh of {mesh.num_axes} axes ({mesh})")
    for dim, digits in _digits(placements, mesh).items():
        if dim >= len(shape):
            raise PlanError(f"split on dimension {dim} of a value of shape {tuple(shape)}")
        reached = 1
        for outer, size, axis in digits:
            if outer % reached or shape[dim] % (outer * size):
                raise PlanError(
                    f"axis {mesh.axis_names[axis]!r} cannot split dimension {dim} of shape "
                    f"{tuple(shape)} as [{outer}, {size}, ...]: the parts must be whole and apart"
                )
            reached = outer * size


def is_valid(placements: Placements, shape: Sequence[int], mesh: Mesh) -> bool:
    """Whether `check_placements` accepts them."""
    for dim, digits in _digits(placements, mesh).items():
        reached = 1
        for outer, size, _ in digits:
            if dim >= len(shape) or outer % reached or shape[dim] % (outer * size):
                return False
            reached = outer * size
    return True


def _digits(placements: Placements, mesh: Mesh) -> dict[int, list[tuple[int, int, int]]]:
    """Per split dimension: (outer, size, axis) of each digit, outermost first."""
    digits: dict[int, list[tuple[int, int, int]]] = {}
    for axis, placement in enumerate(placements):
        if placement.state is State.SHARD:
            entry = (placement.outer, mesh.axis_sizes[axis], axis)
            digits.setdefault(placement.dim, []).append(entry)
    for entries in digits.values():
        entries.sort()
    return digits


def local_shape(shape: Sequence[int], placements: Placements, mesh: Mesh) -> tuple[int, ...]:
    """Shape of one device's part of a value of global ``shape``."""
    local = list(shape)
    for axis, placement in enumerate(placements):
        if placement.state is State.SHARD:
            local[placement.dim] //= mesh.axis_sizes[axis]
    return tuple(local)


class StepKind(StrEnum):
    """One row of the table above, named by what it does in forward."""

    SLICE = "slice"
    MASK = "mask"
    PAD = "pad"
    VARY = "vary"
    UNVARY = "unvary"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"


@dataclass(frozen=True, slots=True)
class Step:
    """One move of one value along one or several mesh axes at once.

    ``source`` and ``target`` are the states of the first axis; several axes move together only
    where they act as one larger axis. ``local_outer`` (``target_local_outer``) is the number of
    local parts in front of the digit on the source (target) dimension. ``shape`` is the local
    shape before the step.
    """

    kind: StepKind
    axes: tuple[int, ...]
    source: Placement
    target: Placement
    local_outer: int
    target_local_outer: int
    shape: tuple[int, ...]

    @property
    def backward(self) -> str | None:
        """Name of the collective in backward, or None where it is local or nothing."""
        return _BACKWARD.get((self.source.state, self.target.state))

    @property
    def forward(self) -> str | None:
        """Name of the collective in forward, or None where it is local or nothing."""
        if self.kind in (
            StepKind.ALL_REDUCE,
            StepKind.ALL_GATHER,
            StepKind.REDUCE_SCATTER,
            StepKind.ALL_TO_ALL,
        ):
            return str(self.kind)
        return None


_BACKWARD = {
    (State.REPLICATE, State.SHARD): "all_gather",
    (State.REPLICATE, State.VARYING): "all_reduce",
    (State.SHARD, State.VARYING): "reduce_scatter",
    (State.SHARD, State.SHARD): "all_to_all",
    (State.PARTIAL, State.SHARD): "all_gather",
    (State.PARTIAL, State.VARYING): "all_reduce",
}

_KINDS = {
    (State.REPLICATE, State.SHARD): StepKind.SLICE,
    (State.REPLICATE, State.VARYING): StepKind.VARY,
    (State.REPLICATE, State.PARTIAL): StepKind.MASK,
    (State.SHARD, State.REPLICATE): StepKind.ALL_GATHER,
    (State.SHARD, State.VARYING): StepKind.ALL_GATHER,
    (State.SHARD, State.SHARD): StepKind.ALL_TO_ALL,
    (State.SHARD, State.PARTIAL): StepKind.PAD,
    (State.PARTIAL, State.REPLICATE): StepKind.ALL_REDUCE,
    (State.PARTIAL, State.SHARD): StepKind.REDUCE_SCATTER,
    (State.PARTIAL, State.VARYING): StepKind.ALL_REDUCE,
    (State.VARYING, State.REPLICATE): StepKind.UNVARY,
    (State.VARYING, State.SHARD): StepKind.SLICE,
    (State.VARYING, State.PARTIAL): StepKind.MASK,
}

# Shrinking moves first, growing moves last: every collective then carries the fewest bytes.
_ORDER = (
    StepKind.SLICE,
    StepKind.REDUCE_SCATTER,
    StepKind.ALL_TO_ALL,
    StepKind.MASK,
    StepKind.ALL_REDUCE,
    StepKind.VARY,
    StepKind.UNVARY,
    StepKind.ALL_GATHER,
    StepKind.PAD,
)


@lru_cache(maxsize=1 << 18)
def redistribute(
    source: Placements, target: Placements, shape: tuple[int, ...], mesh: Mesh
) -> tuple[Step, ...]:
    """The steps that turn a value of global ``shape`` from ``source`` into ``target``.

    Axes whose moves are alike act as one larger axis. Moves that shrink the local part come
    first. A split that would overlap a digit still in use waits until that digit is gone; where
    two splits wait for each other, one of them is gathered first.
    """
    current = list(source)
    steps: list[Step] = []
    pending = [a for a in range(mesh.num_axes) if source[a] != target[a]]
    while pending:
        goal = tuple(_next_goal(now, then) for now, then in zip(current, target))
        group = _next_group(current, goal, shape, mesh, pending)
        if group is None:
            axis = next(a for a in pending if current[a].state is State.SHARD)
            steps.append(_make_step(current, (axis,), R, shape, mesh))
            current[axis] = R
            if target[axis] == R:
                pending.remove(axis)
            continue
        steps.append(_make_step(current, group, goal[group[0]], shape, mesh))
        for axis in group:
            current[axis] = goal[axis]
            if goal[axis] == target[axis]:
                pending.remove(axis)
    return tuple(steps)


def _next_goal(now: Placement, then: Placement) -> Placement:
    """Another digit of the same dimension is reached through R."""
    same_dim = now.state is then.state is State.SHARD and now.dim == then.dim
    return R if same_dim and now != then else then


def _next_group(
    current: list[Placement],
    target: Placements,
    shape: tuple[int, ...],
    mesh: Mesh,
    pending: Iterable[int],
) -> tuple[int, ...] | None:
    """The axes of the next legal step: the earliest kind in `_ORDER`, merged where possible."""
    candidates = sorted(
        (a for a in pending if _is_legal(current, a, target[a], shape, mesh)),
        key=lambda a: (_ORDER.index(_KINDS[current[a].state, target[a].state]), a),
    )
    if not candidates:
        return None
    group = [candidates[0]]
    for axis in candidates[1:]:
        if _acts_as_one(current, target, group, axis, mesh):
            group.append(axis)
    if len(group) > 1 and not _is_legal_group(current, group, target, shape, mesh):
        group = group[:1]
    return tuple(group)


def _is_legal(
    current: list[Placement], axis: int, target: Placement, shape: tuple[int, ...], mesh: Mesh
) -> bool:
    changed = list(current)
    changed[axis] = target
    return is_valid(tuple(changed), shape, mesh)


def _is_legal_group(
    current: list[Placement],
    group: Sequence[int],
    target: Placements,
    shape: tuple[int, ...],
    mesh: Mesh,
) -> bool:
    changed = list(current)
    for axis in group:
        changed[axis] = target[axis]
    return is_valid(tuple(changed), shape, mesh)


def _acts_as_one(
    current: list[Placement], target: Placements, group: Sequence[int], axis: int, mesh: Mesh
) -> bool:
    """Whether ``axis`` continues the digit chain of ``group`` in source and in target."""
    last = group[-1]
    for side in (current, target):
        before, after = side[last], side[axis]
        if before.state is not after.state or before.dim != after.dim:
            return False
        if before.state is State.SHARD and after.outer != before.outer * mesh.axis_sizes[last]:
            return False
    return axis > last


def _make_step(
    current: list[Placement],
    axes: tuple[int, ...],
    target: Placement,
    shape: tuple[int, ...],
    mesh: Mesh,
) -> Step:
    source = current[axes[0]]
    return Step(
        kind=_KINDS[source.state, target.state],
        axes=axes,
        source=source,
        target=target,
        local_outer=_local_outer(current, axes, source, mesh),
        target_local_outer=_local_outer(current, axes, target, mesh),
        shape=local_shape(shape, tuple(current), mesh),
    )


def _local_outer(
    current: list[Placement], axes: tuple[int, ...], placement: Placement, mesh: Mesh
) -> int:
    """Local parts in front of the digit: its ``outer`` less what other axes already split off."""
    if placement.state is not State.SHARD:
        return 1
    taken = math.prod(
        mesh.axis_sizes[a]
        for a, other in enumerate(current)
        if a not in axes
        and other.state is State.SHARD
        and other.dim == placement.dim
        and other.outer < placement.outer
    )
    return placement.outer // taken
