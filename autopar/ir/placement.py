"""Placements of a value on a mesh, and the moves between them.

On each mesh axis a value and its gradient are in one of four states:

=====  ==============================================  ===================
state  value                                           gradient
=====  ==============================================  ===================
R      replicated: the same on all                     replicated
S(d)   split on tensor dimension d                     split likewise
P      a partial sum: the value is the sum over all    replicated
V      varying use: the same on all, but each device   a partial sum
       computes a different share of the work from it
=====  ==============================================  ===================

A move from one state to another costs exactly this in forward and backward; every entry follows
from the states of the value and the gradient before and after:

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

A split takes one *digit* of the index along its dimension, in a mixed-radix sense: ``S(d,
outer=k)`` views dimension d of size N as ``[k, n, N / (k n)]`` and gives device c slice c of the
middle factor. ``outer=1`` is the contiguous split; ``outer=3`` splits the heads of a fused
query-key-value projection; two axes on one dimension are two digits (the inner one's ``outer`` is
the outer one's ``outer * size``). Digits of one dimension never overlap, so any axis may be
gathered, sliced or moved on its own, in any order.

A size that n does not divide is *padded*: contiguous splits of size N over n devices give each
device ``ceil(N / n)`` elements, and the last shards end in zeros, in the value and in its gradient.
Moves append the zeros before a slice and drop them after a gather; axes that share a padded
dimension move together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from autopar.base.errors import PlanError
from autopar.ir.mesh import Mesh


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
    """A split of tensor dimension ``dim``, viewed as ``[outer, num_shards, rest]``."""
    return Placement(State.SHARD, dim, outer)


Placements = tuple[Placement, ...]
"""One placement per mesh axis, in mesh order."""

_TEXT = re.compile(r"([RPV])|S([0-9]{1,4})(?:/([1-9][0-9]{0,17}))?")


def parse_placement(text: str) -> Placement:
    """Parse ``str(placement)``; raises PlanError for anything else."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise PlanError(
            f"placement {text!r} is not R, P, V, S<dim> or S<dim>/<outer>, such as 'S0' or "
            "'S1/3', where outer is at least 1"
        )
    if match[1]:
        return Placement(State(match[1]))
    return S(int(match[2]), int(match[3] or 1))


def format_placements(placements: Placements) -> str:
    return " ".join(map(str, placements))


MAX_PADDING = 0.5
"""Largest padding of a split, as a fraction of the dimension's size."""

_NUM_KEPT = 1 << 14
"""Results that each function which a search asks again and again remembers."""

Digit = tuple[int, int, int]
"""A split of a dimension: (outer, size, mesh axis)."""


def check_placements(placements: Placements, shape: Sequence[int], mesh: Mesh) -> None:
    """Raise PlanError unless the splits of each dimension are disjoint, and even or padded."""
    if len(placements) != mesh.num_axes:
        raise PlanError(f"{len(placements)} placements for a mesh of {mesh.num_axes} axes ({mesh})")
    for dim, digits in _digits(placements, mesh.axis_sizes).items():
        if dim >= len(shape):
            raise PlanError(f"split on dimension {dim} of a value of shape {tuple(shape)}")
        if not _fits(shape[dim], digits):
            split = ", ".join(f"[{o}, {n}, ...] by {mesh.axis_names[a]!r}" for o, n, a in digits)
            raise PlanError(
                f"dimension {dim} of shape {tuple(shape)} cannot be split as {split}: splits of a "
                "dimension must not overlap, and must be even, or contiguous with at most "
                f"{MAX_PADDING:.0%} padding"
            )


def is_valid(placements: Placements, shape: Sequence[int], mesh: Mesh) -> bool:
    """Whether `check_placements` accepts them."""
    return _is_valid(placements, tuple(shape), mesh.axis_sizes)


@lru_cache(maxsize=_NUM_KEPT)
def _is_valid(placements: Placements, shape: tuple[int, ...], axis_sizes: tuple[int, ...]) -> bool:
    return all(
        dim < len(shape) and _fits(shape[dim], digits)
        for dim, digits in _digits(placements, axis_sizes).items()
    )


def paddings(placements: Placements, shape: Sequence[int], mesh: Mesh) -> Mapping[int, int]:
    """Zeros appended to each split dimension so that it divides evenly."""
    return _paddings(placements, tuple(shape), mesh.axis_sizes)


@lru_cache(maxsize=_NUM_KEPT)
def _paddings(
    placements: Placements, shape: tuple[int, ...], axis_sizes: tuple[int, ...]
) -> Mapping[int, int]:
    return {
        dim: -shape[dim] % math.prod(size for _, size, _ in digits)
        for dim, digits in _digits(placements, axis_sizes).items()
    }


def _fits(size: int, digits: Sequence[Digit]) -> bool:
    """Whether digits, outermost first, are disjoint, and even or contiguous with little padding."""
    reached, last_axis = 1, -1
    whole = nested = True
    for outer, num, axis in digits:
        if outer % reached:
            return False
        whole = whole and size % (outer * num) == 0
        nested = nested and outer == reached and axis > last_axis
        reached, last_axis = outer * num, axis
    return whole or (nested and -size % reached <= MAX_PADDING * size)


@lru_cache(maxsize=_NUM_KEPT)
def _digits(placements: Placements, axis_sizes: tuple[int, ...]) -> Mapping[int, tuple[Digit, ...]]:
    """The digits of each split dimension, outermost first."""
    digits: dict[int, list[Digit]] = {}
    for axis, placement in enumerate(placements):
        if placement.state is State.SHARD:
            entry = (placement.outer, axis_sizes[axis], axis)
            digits.setdefault(placement.dim, []).append(entry)
    return {dim: tuple(sorted(entries)) for dim, entries in digits.items()}


def is_reduce_scattered(stored: Placements, used: Placements) -> bool:
    """Whether the gradient of what is stored and used so is only summed, and over some axes
    scattered, on its way back."""
    moved = [(s.state, u.state) for s, u in zip(stored, used) if s != u]
    return (State.SHARD, State.VARYING) in moved and all(u is State.VARYING for _, u in moved)


def local_shape(shape: Sequence[int], placements: Placements, mesh: Mesh) -> tuple[int, ...]:
    """Shape of one device's shard of a value of global ``shape``, padding included."""
    shards = [1] * len(shape)
    for axis, placement in enumerate(placements):
        if placement.state is State.SHARD:
            shards[placement.dim] *= mesh.axis_sizes[axis]
    return tuple(-(-size // num) for size, num in zip(shape, shards))


class MoveKind(StrEnum):
    """The kinds of move in the table above, named after the forward."""

    SLICE = "slice"
    MASK = "mask"
    PAD = "pad"
    VARY = "vary"
    UNVARY = "unvary"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"


class Move(NamedTuple):
    """A move of one value along one or several mesh axes at once.

    ``source`` and ``target`` are the placements on the first axis; several axes move together only
    where they act as one larger axis. ``local_outer`` (``target_local_outer``) is the local size of
    the index in front of the digit on the source (target) dimension, ``padding``
    (``target_padding``) the number of zeros appended to that dimension while it is split. ``shape``
    is the local shape before the move.
    """

    kind: MoveKind
    axes: tuple[int, ...]
    source: Placement
    target: Placement
    local_outer: int
    target_local_outer: int
    padding: int
    target_padding: int
    shape: tuple[int, ...]

    @property
    def backward(self) -> str | None:
        """The collective in backward; None if the move is local there."""
        return _BACKWARD.get((self.source.state, self.target.state))

    @property
    def forward(self) -> str | None:
        """The collective in forward; None if the move is local."""
        if self.kind in (
            MoveKind.ALL_REDUCE,
            MoveKind.ALL_GATHER,
            MoveKind.REDUCE_SCATTER,
            MoveKind.ALL_TO_ALL,
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
    (State.REPLICATE, State.SHARD): MoveKind.SLICE,
    (State.REPLICATE, State.VARYING): MoveKind.VARY,
    (State.REPLICATE, State.PARTIAL): MoveKind.MASK,
    (State.SHARD, State.REPLICATE): MoveKind.ALL_GATHER,
    (State.SHARD, State.VARYING): MoveKind.ALL_GATHER,
    (State.SHARD, State.SHARD): MoveKind.ALL_TO_ALL,
    (State.SHARD, State.PARTIAL): MoveKind.PAD,
    (State.PARTIAL, State.REPLICATE): MoveKind.ALL_REDUCE,
    (State.PARTIAL, State.SHARD): MoveKind.REDUCE_SCATTER,
    (State.PARTIAL, State.VARYING): MoveKind.ALL_REDUCE,
    (State.VARYING, State.REPLICATE): MoveKind.UNVARY,
    (State.VARYING, State.SHARD): MoveKind.SLICE,
    (State.VARYING, State.PARTIAL): MoveKind.MASK,
}

# Shrinking moves first, growing moves last, so that every collective transfers the fewest bytes.
_ORDER = (
    MoveKind.SLICE,
    MoveKind.REDUCE_SCATTER,
    MoveKind.ALL_TO_ALL,
    MoveKind.MASK,
    MoveKind.ALL_REDUCE,
    MoveKind.VARY,
    MoveKind.UNVARY,
    MoveKind.ALL_GATHER,
    MoveKind.PAD,
)
_TURNS = {states: _ORDER.index(kind) for states, kind in _KINDS.items()}


def redistribute(
    source: Placements, target: Placements, shape: tuple[int, ...], mesh: Mesh
) -> tuple[Move, ...]:
    """The moves that take a value of global ``shape`` from ``source`` to ``target``.

    Axes with the same move act as one larger axis. Moves that shrink the local shard come first. A
    split that would overlap a digit still in use waits until that digit is gathered; where two
    splits wait for each other, one of them is gathered first. Axes that share a padded dimension
    are gathered from it and split on it together.
    """
    units = _units(source, target, mesh.axis_sizes)
    # Sizes that every split divides evenly have the same moves: they are found once, for the least.
    parts = [units.get(dim, 1) for dim in range(len(shape))]
    least = tuple([size if size % part else part for size, part in zip(shape, parts)])
    moves = _moves(source, target, least, mesh)
    if least == shape:
        return moves
    times = [1 if size % part else size // part for size, part in zip(shape, parts)]
    return tuple(
        [Move(*move[:-1], tuple([n * by for n, by in zip(move.shape, times)])) for move in moves]
    )


@lru_cache(maxsize=_NUM_KEPT)
def _units(
    source: Placements, target: Placements, axis_sizes: tuple[int, ...]
) -> Mapping[int, int]:
    """For each split dimension, the least size that all its splits divide evenly."""
    units: dict[int, int] = {}
    for side in (source, target):
        for dim, digits in _digits(side, axis_sizes).items():
            units[dim] = math.lcm(units.get(dim, 1), *(outer * num for outer, num, _ in digits))
    return units


@lru_cache(maxsize=_NUM_KEPT)
def _moves(
    source: Placements, target: Placements, shape: tuple[int, ...], mesh: Mesh
) -> tuple[Move, ...]:
    gathered = _gathered(source, target, shape, mesh)
    return (*_moves_to(source, gathered, shape, mesh), *_moves_to(gathered, target, shape, mesh))


def _gathered(
    source: Placements, target: Placements, shape: tuple[int, ...], mesh: Mesh
) -> Placements:
    """``source`` with R on the axes that share a padded dimension whose splits change."""
    zeros = [paddings(side, shape, mesh) for side in (source, target)]
    if not any(map(any, (side.values() for side in zeros))):
        return source
    padded = {d for side in zeros for d, n in side.items() if n}
    before, after = _digits(source, mesh.axis_sizes), _digits(target, mesh.axis_sizes)
    result = list(source)
    for dim in padded:
        axes = {axis for side in (before, after) for _, _, axis in side.get(dim, ())}
        if len(axes) > 1 and before.get(dim) != after.get(dim):
            for axis in axes:
                result[axis] = R
    return tuple(result)


def _moves_to(
    current: Placements, target: Placements, shape: tuple[int, ...], mesh: Mesh
) -> Iterator[Move]:
    """The moves from ``current`` to ``target``, each that follows from where the last one ended."""
    while current != target:
        move, current = _next_move(current, target, shape, mesh)
        yield move


def _next_move(
    current: Placements, target: Placements, shape: tuple[int, ...], mesh: Mesh
) -> tuple[Move, Placements]:
    """The first move on the way to ``target``, and the placements behind it."""
    pending = [a for a in range(mesh.num_axes) if current[a] != target[a]]
    goal = tuple(_next_goal(now, then) for now, then in zip(current, target))
    group = _next_group(current, goal, shape, mesh, pending)
    if group is None:
        group = (next(a for a in pending if current[a].state is State.SHARD),)
        goal = tuple(R if a in group else p for a, p in enumerate(goal))
    changed = _changed(current, group, goal)
    return _make_move(current, changed, group, shape, mesh), changed


def _next_goal(now: Placement, then: Placement) -> Placement:
    """The next placement on an axis; another digit of the same dimension is reached through R."""
    same_dim = now.state is then.state is State.SHARD and now.dim == then.dim
    return R if same_dim and now != then else then


def _next_group(
    current: Placements,
    target: Placements,
    shape: tuple[int, ...],
    mesh: Mesh,
    pending: Iterable[int],
) -> tuple[int, ...] | None:
    """The axes of the next legal move: the earliest kind in `_ORDER`, merged where possible."""
    ordered = sorted(pending, key=lambda a: (_TURNS[current[a].state, target[a].state], a))
    for position, first in enumerate(ordered):
        group = [first]
        for axis in ordered[position + 1 :]:
            if _acts_as_one(current, target, group, axis, mesh):
                group.append(axis)
        for axes in (tuple(group), (first,)):
            if _is_legal(current, _changed(current, axes, target), shape, mesh):
                return axes
    return None


def _changed(current: Placements, axes: Sequence[int], target: Placements) -> Placements:
    """``current``, with the placements of ``target`` on some axes."""
    changed = list(current)
    for axis in axes:
        changed[axis] = target[axis]
    return tuple(changed)


def _is_legal(current: Placements, changed: Placements, shape: tuple[int, ...], mesh: Mesh) -> bool:
    """Whether all splits stay valid and no other axis's padding changes."""
    if not is_valid(changed, shape, mesh):
        return False
    before, after = paddings(current, shape, mesh), paddings(changed, shape, mesh)
    return all(after.get(dim, padding) == padding for dim, padding in before.items())


def _acts_as_one(
    current: Placements, target: Placements, group: Sequence[int], axis: int, mesh: Mesh
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


def _make_move(
    current: Placements,
    changed: Placements,
    axes: tuple[int, ...],
    shape: tuple[int, ...],
    mesh: Mesh,
) -> Move:
    source, target = current[axes[0]], changed[axes[0]]
    before, after = paddings(current, shape, mesh), paddings(changed, shape, mesh)
    return Move(
        kind=_KINDS[source.state, target.state],
        axes=axes,
        source=source,
        target=target,
        local_outer=_local_outer(current, axes, source, mesh),
        target_local_outer=_local_outer(current, axes, target, mesh),
        padding=before[source.dim] if source.state is State.SHARD else 0,
        target_padding=after[target.dim] if target.state is State.SHARD else 0,
        shape=local_shape(shape, current, mesh),
    )


def _local_outer(
    current: Placements, axes: tuple[int, ...], placement: Placement, mesh: Mesh
) -> int:
    """Local size in front of the digit: its ``outer`` divided by the other axes' splits of it."""
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
