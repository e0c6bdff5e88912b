"""The calls that a device makes for an op, at local shapes: what is priced and measured.

In: an op, its choice and the mesh. Out: calls as values. Usually the call is the op itself on its
shards; a rule may lower the op to other kernels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from autopar.cost_models import OpCall, TensorSpec
from autopar.cost_models.update import update_call
from autopar.ir.graph import Graph, Op, Value, ValueKind
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements, R, S, State, is_valid, local_shape
from autopar.rules import Choice, enumerate_choices, rule_of
from autopar.rules.context import LocalContext
from autopar.rules.kernels import LocalCall, Phase
from autopar.rules.local import shard_call
from autopar.rules.space import NO_SPACE
from autopar.sharding.microbatches import Microbatches
from autopar.sharding.strategy import Analysis

__all__ = ["LocalCall", "calls_of", "local_call", "local_calls", "split_placements"]


def calls_of(
    analysis: Analysis, meshes: Sequence[Mesh], microbatches: Microbatches | None = None
) -> tuple[OpCall, ...]:
    """All distinct calls of all choices of all ops on all of the meshes, in graph order."""
    found: dict[OpCall, None] = {}
    seen: set[Any] = set()
    for mesh in meshes:
        timed = mesh if microbatches is None else microbatches.mesh_of(mesh)
        for op in analysis.graph.ops:
            if all(o is None or analysis.graph.values[o].fixed for o in op.outputs):
                continue
            split = None if microbatches is None else microbatches.splits[op.index]
            kind = (mesh, analysis.kinds[op.index], split)
            if kind in seen:
                continue
            seen.add(kind)
            space = analysis.spaces[op.index]
            for choice in enumerate_choices(space, mesh, analysis.bases[op.index]):
                if microbatches is not None:
                    if not microbatches.allows(op.index, choice, mesh):
                        continue
                    choice = Choice((split, *choice.splits))
                needs = analysis.needs(op, choice, timed)
                supplies = analysis.supplies(op, choice, timed)
                made = local_calls(analysis, op, choice, needs, supplies, timed)
                found |= dict.fromkeys(call.call for call in made)
        found |= dict.fromkeys(_update_calls(analysis.graph, mesh))
    return tuple(found)


def _update_calls(graph: Graph, mesh: Mesh) -> Iterator[OpCall]:
    """The updates of every shard size in which a trained parameter may be stored."""
    for value in graph.parameters:
        if value.differentiable:
            for placements in split_placements(value, mesh, (R,), ()):
                num_elements = math.prod(local_shape(value.shape, placements, mesh))
                yield update_call(num_elements, value.stored_dtype)


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
    """All valid placements from ``states``, contiguous (nested) splits, and ``digits``."""
    bases = [(dim, 1) for dim in range(len(value.shape))] + list(digits)
    options = [*states, *(S(dim, outer) for dim, outer in bases)]
    found: dict[Placements, None] = {}
    for placements in itertools.product(options, repeat=mesh.num_axes):
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
