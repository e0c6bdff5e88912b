"""The calls that a device makes for an op, at local shapes: what is priced and measured.

In: an op, its choice and the mesh. Out: calls as values. Usually the call is the op itself on its
shards; a rule may lower the op to other kernels.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from autopar.cost_models import OpCall, TensorSpec
from autopar.cost_models.update import update_call
from autopar.ir.choice import Choice
from autopar.ir.graph import Op, Value, ValueKind
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements, R, S, State, is_valid, local_shape
from autopar.rules import enumerate_choices, rule_of
from autopar.rules.context import LocalContext
from autopar.rules.kernels import LocalCall, Phase
from autopar.rules.local import shard_call
from autopar.rules.space import NO_SPACE
from autopar.sharding.microbatches import Microbatches
from autopar.sharding.strategy import Analysis

__all__ = ["LocalCall", "calls_of", "local_call", "local_calls", "split_placements"]


def calls_of(
    analysis: Analysis, meshes: Sequence[Mesh], microbatches: Microbatches | None = None
) -> dict[OpCall, int]:
    """All distinct calls of all choices of all ops on all of the meshes, in graph order.

    Each with the most times that a device makes it in a step, on any of the meshes.
    """
    num = 1 if microbatches is None else microbatches.num
    ops, found = distinct_ops(analysis, microbatches), dict[OpCall, int]()
    for mesh in meshes:
        counts: Counter[OpCall] = Counter()
        for op, count in ops:
            made = _calls_of_op(analysis, op, mesh, microbatches)
            counts.update(dict.fromkeys(made, count * num))
        for value in analysis.graph.parameters:
            if value.differentiable:
                counts.update(_update_calls(value, mesh))
        for call, count in counts.items():
            found[call] = max(count, found.get(call, 0))
    return found


def distinct_ops(
    analysis: Analysis, microbatches: Microbatches | None = None
) -> list[tuple[Op, int]]:
    """The ops that are not fixed, one for all that make the same calls, with their counts."""
    values = analysis.graph.values
    first: dict[Hashable, Op] = {}
    counts: Counter[Hashable] = Counter()
    for op in analysis.graph.ops:
        if not all(o is None or values[o].fixed for o in op.outputs):
            split = None if microbatches is None else microbatches.splits[op.index]
            kind = analysis.kinds[op.index], split
            first.setdefault(kind, op)
            counts[kind] += 1
    return [(op, counts[kind]) for kind, op in first.items()]


def _calls_of_op(
    analysis: Analysis, op: Op, mesh: Mesh, microbatches: Microbatches | None
) -> dict[OpCall, None]:
    """The distinct calls of all choices of ``op`` on a mesh."""
    timed = mesh if microbatches is None else microbatches.mesh_of(mesh)
    found: dict[OpCall, None] = {}
    for choice in enumerate_choices(analysis.spaces[op.index], mesh, analysis.bases[op.index]):
        if microbatches is not None:
            if not microbatches.allows(op.index, choice, mesh):
                continue
            choice = Choice((microbatches.splits[op.index], *choice.splits))
        needs = analysis.needs(op, choice, timed)
        supplies = analysis.supplies(op, choice, timed)
        made = local_calls(analysis, op, choice, needs, supplies, timed)
        found |= dict.fromkeys(call.call for call in made)
    return found


def _update_calls(value: Value, mesh: Mesh) -> set[OpCall]:
    """The updates of every shard size in which a trained parameter may be stored."""
    return {
        update_call(math.prod(local_shape(value.shape, placements, mesh)), value.stored_dtype)
        for placements in split_placements(value, mesh, (R,), ())
    }


def local_calls(
    analysis: Analysis,
    op: Op,
    choice: Choice,
    needs: tuple[Placements, ...],
    supplies: tuple[Placements, ...],
    mesh: Mesh,
) -> tuple[LocalCall, ...]:
    """The calls that a device makes for ``op`` under ``choice``, at local shapes."""
    plain = local_call(analysis, op, choice, needs, supplies, mesh)
    space, rule = analysis.spaces[op.index], rule_of(op)
    if space is not None and rule is not None and rule.kernels is not None:
        kernels = rule.kernels(op, space, choice, mesh, plain)
        if kernels is not None:
            return kernels
    return (LocalCall(call=plain, phase=Phase.BOTH),)


def local_call(
    analysis: Analysis,
    op: Op,
    choice: Choice,
    needs: tuple[Placements, ...],
    supplies: tuple[Placements, ...],
    mesh: Mesh,
) -> OpCall:
    """``op`` itself at the local shapes of ``choice``."""
    values = analysis.graph.values
    flows = analysis.differentiable(op)
    specs = [
        _local_spec(values[i], local_shape(values[i].shape, need, mesh), grad)
        for i, need, grad in zip(op.inputs, needs, flows)
    ]
    args, kwargs = op.bind(specs)
    rule = rule_of(op)
    if rule is None or (rule.arguments is None and rule.runs_as is None):
        return OpCall.of(op.target, args, kwargs)
    shapes = (
        () if o is None else local_shape(values[o].shape, supply, mesh)
        for o, supply in zip(op.outputs, supplies)
    )
    context = LocalContext(
        op=op,
        space=analysis.spaces[op.index] or NO_SPACE,
        choice=choice,
        mesh=mesh,
        output_shapes=tuple(shapes),
    )
    return OpCall.of(*shard_call(context, args, kwargs))


def _local_spec(value: Value, shape: tuple[int, ...], requires_grad: bool) -> TensorSpec:
    """A dense shard of ``value`` whose dimensions have the same order in memory as in the whole."""
    is_parameter = value.kind is ValueKind.PARAMETER
    plain = TensorSpec(shape, value.dtype, None, requires_grad, is_parameter)
    whole = value.strides
    if whole is None:
        return plain
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (whole[d], -d)):
        if whole[dim]:
            strides[dim], step = step, step * max(shape[dim], 1)
    spec = replace(plain, stride=tuple(strides))
    return plain if spec.is_contiguous else spec


def split_placements(
    value: Value,
    mesh: Mesh,
    states: Sequence[Any],
    digits: Sequence[tuple[int, int]],
) -> list[Placements]:
    """All valid placements from ``states``, contiguous (nested) splits, and ``digits``.

    An axis of size 1 splits nothing.
    """
    bases = [(dim, 1) for dim in range(len(value.shape))] + list(digits)
    splits = [S(dim, outer) for dim, outer in bases]
    options = [[*states, *(splits if size > 1 else ())] for size in mesh.axis_sizes]
    found: dict[Placements, None] = {}
    for placements in itertools.product(*options):
        nested = _nest(placements, mesh)
        if is_valid(nested, value.shape, mesh):
            found.setdefault(nested)
    return list(found)


def _nest(placements: Placements, mesh: Mesh) -> Placements:
    """Turn equal splits on several axes into consecutive digits."""
    result = []
    for axis, placement in enumerate(placements):
        if placement.state is State.SHARD:
            earlier = [a for a in range(axis) if placements[a] == placement]
            placement = S(placement.dim, placement.outer * mesh.size(earlier))
        result.append(placement)
    return tuple(result)
