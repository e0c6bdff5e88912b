"""Choices: how the mesh splits one op, and the placements that follow.

A *choice* assigns to each mesh axis one dimension of the op's iteration space to split, or none.
Space and choice determine, for every axis,

- what the op needs of each operand: ``S`` where the dimension is in its layout, else ``V`` (each
  device computes with the whole operand on a different share of the work) or ``R`` where no
  gradient flows; ``P`` for operands that enter a sum once, such as a bias, when the sum is split;
- what it supplies for each output: ``S`` where the dimension is in its layout, else ``P``, a
  partial sum; ``R`` where the op reduces inside (batch-norm statistics).

An axis without a dimension means ``R`` everywhere: the op is computed redundantly along it. An op
without a rule has only that choice.

A dimension may be split at a *digit* of its index rather than contiguously: with ``base`` b, the
index is (i, j, k) in row-major order with i < b, and the split is along j.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from autopar.ir.choice import Choice, Split
from autopar.ir.mesh import Mesh
from autopar.ir.placement import P, Placement, Placements, R, S, V, is_valid
from autopar.rules.space import Layout, Space

LINEAR_SPLIT = Split("+")
"""The split of a linear op along its terms: partial sums in, partial sums out."""

Bases = Mapping[str, tuple[int, ...]]
"""For each dimension, the bases other than 1 at which it may be split."""


def enumerate_choices(space: Space | None, mesh: Mesh, bases: Bases) -> tuple[Choice, ...]:
    """All valid choices of an op on a mesh, the redundant one first.

    ``bases``: the digits of each dimension to try besides contiguous splits, as from `find_bases`.
    An axis of size 1 splits nothing. An op without a rule (``space`` None) has only the redundant
    choice.
    """
    if space is None:
        return (Choice((None,) * mesh.num_axes),)
    options: list[Split | None] = [None]
    for dim in space.splittable():
        options.extend(Split(dim, base) for base in (1, *bases.get(dim, ())))
    by_axis = [options if size > 1 else [None] for size in mesh.axis_sizes]
    choices = map(Choice, itertools.product(*by_axis))
    return tuple(choice for choice in choices if is_valid_choice(space, choice, mesh))


def is_valid_choice(space: Space, choice: Choice, mesh: Mesh) -> bool:
    """Whether the splits are disjoint, divide their dimensions or may pad them, and are allowed."""
    allowed = set(space.splittable())
    for split in choice.splits:
        if split is None or (split == LINEAR_SPLIT and space.linear):
            continue
        if split.dim not in allowed or (split.base != 1 and split.dim in space.plain):
            return False
    if any(split is not None and split.dim in space.joint for split in choice.splits):
        return _is_valid_jointly(space, choice, mesh)
    return _is_disjoint(space, choice, mesh) and all(
        _may_pad(space, dim) for dim in padded_dims(space, choice, mesh)
    )


def _is_disjoint(space: Space, choice: Choice, mesh: Mesh) -> bool:
    """Whether the splits of each dimension are of different digits of its index."""
    names = list(space.sizes)
    placements = tuple(
        R if split is None or split == LINEAR_SPLIT else S(names.index(split.dim), outer)
        for split, outer in zip(choice.splits, _outers(choice, mesh))
    )
    return is_valid(placements, tuple(space.sizes.values()), mesh)


def _is_valid_jointly(space: Space, choice: Choice, mesh: Mesh) -> bool:
    """Whether each member of a joint dimension may be split in its place, without padding.

    No other split sums over a member: outputs would be complete along one axis and partial sums
    along another.
    """
    members = {m for s in choice.splits if s is not None for m in space.joint.get(s.dim, ())}
    if any(s is not None and s.dim in members & space.sums for s in choice.splits):
        return False
    for member in members:
        alone = Choice(
            tuple(
                s and Split(member if member in space.members(s.dim) else s.dim, s.base)
                for s in choice.splits
            )
        )
        if not _is_disjoint(space, alone, mesh) or member in padded_dims(space, alone, mesh):
            return False
    return all(_may_pad(space, dim) for dim in padded_dims(space, choice, mesh))


def padded_dims(space: Space, choice: Choice, mesh: Mesh) -> tuple[str, ...]:
    """The dimensions whose size the number of shards does not divide."""
    split = {s.dim for s in choice.splits if s is not None}
    return tuple(
        d for d in space.sizes if d in split and space.sizes[d] % mesh.size(choice.axes_of(d))
    )


def _may_pad(space: Space, dim: str) -> bool:
    """Whether the rule allows padding and ``dim`` is a tensor dimension of its own everywhere."""
    return dim in space.padded and all(
        all(f == dim or space.sizes[f] == 1 for f in factors)
        for operand in (*space.inputs, *space.outputs)
        for factors in operand
        if dim in factors
    )


def _outers(choice: Choice, mesh: Mesh) -> list[int]:
    """Where the digit of each axis starts: after those of earlier axes with the same split."""
    outers: list[int] = []
    for axis, split in enumerate(choice.splits):
        if split is None:
            outers.append(1)
            continue
        earlier = (a for a in range(axis) if choice.splits[a] == split)
        outers.append(split.base * math.prod(mesh.axis_sizes[a] for a in earlier))
    return outers


def needs(
    space: Space | None, choice: Choice, mesh: Mesh, differentiable: Sequence[bool]
) -> tuple[Placements, ...]:
    """The placements that an op needs under ``choice``, one tuple per operand.

    ``differentiable``: for each operand, whether a gradient flows back to it.
    """
    if space is None:
        return tuple(_whole(mesh, flows) for flows in differentiable)
    result = []
    for operand, layout in enumerate(space.inputs):
        placements = []
        whole = _whole(mesh, differentiable[operand])
        for axis, split in enumerate(choice.splits):
            found = _locate(space, layout, choice, mesh, axis)
            if split is None:
                placements.append(whole[axis])
            elif split == LINEAR_SPLIT and operand in space.linear:
                placements.append(P)
            elif found is not None:
                placements.append(found)
            elif operand in space.partial_inputs and split.dim in space.sums:
                placements.append(P)
            else:
                placements.append(V if differentiable[operand] else R)
        result.append(tuple(placements))
    return tuple(result)


def supplies(
    space: Space | None, choice: Choice, mesh: Mesh, num_outputs: int
) -> tuple[Placements, ...]:
    """The placements that an op supplies under ``choice``, one tuple per output."""
    whole = _whole(mesh, True)
    if space is None:
        return (whole,) * num_outputs
    result = []
    for layout in space.outputs:
        placements = []
        for axis, split in enumerate(choice.splits):
            found = _locate(space, layout, choice, mesh, axis)
            if split is None or (found is None and split.dim in space.reduced):
                placements.append(whole[axis])
            else:
                placements.append(found if found is not None else P)
        result.append(tuple(placements))
    return tuple(result)


def _whole(mesh: Mesh, flows: bool) -> Placements:
    """Placements of a value that the op does not split.

    It is replicated; along an axis in time a differentiable value is varying, so that its gradient
    is accumulated there.
    """
    return tuple(V if flows and mesh.is_sequential(a) else R for a in range(mesh.num_axes))


def _locate(
    space: Space, layout: Layout, choice: Choice, mesh: Mesh, axis: int
) -> Placement | None:
    """Where an axis splits an operand, if it does: its digit comes after those of earlier axes."""
    split = choice.splits[axis]
    if split is None:
        return None
    members = space.members(split.dim)
    for tensor_dim, factors in enumerate(layout):
        for member in factors:
            if member in members:
                before = factors[: factors.index(member)]
                earlier = (
                    mesh.axis_sizes[a]
                    for a, s in enumerate(choice.splits[:axis])
                    if s is not None and s.base == split.base and member in space.members(s.dim)
                )
                outer = split.base * math.prod(earlier)
                return S(tensor_dim, math.prod(space.sizes[f] for f in before) * outer)
    return None
