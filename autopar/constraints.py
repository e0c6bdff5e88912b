"""What the user may force, forbid or pin; each constraint narrows the choices of the search.

``Force("zero3", axis="dp")`` and ``Forbid("tensor_parallel")`` speak of the known strategies as
rows of the placement table, one mesh axis at a time:

==================  ===================  ====================  ==================
strategy            parameters stored    parameters needed     inputs
==================  ===================  ====================  ==================
data_parallel       R                    R or V                S on the batch
zero3               S where possible     R or V                S on the batch
tensor_parallel     as needed            S where possible      R
==================  ===================  ====================  ==================
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from autopar.errors import ConstraintError
from autopar.graph import ValueKind
from autopar.mesh import Mesh
from autopar.placement import Placement, Placements, State, parse_placement
from autopar.pricing import Array, OpTable, PlacementTable, ValueTable
from autopar.problem import NodeKind, PricedGraph
from autopar.rules import parse_choice


class Parallelism(StrEnum):
    """The known strategies, by their usual names."""

    DATA_PARALLEL = "data_parallel"
    ZERO3 = "zero3"
    TENSOR_PARALLEL = "tensor_parallel"


@dataclass(frozen=True, slots=True)
class Force:
    """Use one known strategy on one mesh axis (on every axis if ``axis`` is None)."""

    parallelism: str
    axis: str | None = None

    def __post_init__(self) -> None:
        _check_parallelism(self.parallelism)


@dataclass(frozen=True, slots=True)
class Forbid:
    """Never split what this strategy would split, on one mesh axis or on all."""

    parallelism: str
    axis: str | None = None

    def __post_init__(self) -> None:
        _check_parallelism(self.parallelism)


@dataclass(frozen=True, slots=True)
class Pin:
    """Fix the choice of ops, or the stored placement of parameters and inputs, by name.

    ``pattern`` is a shell pattern over op names, module paths, parameter and input names, such as
    ``"layers.3.*"``. ``choice`` reads as in plans (``"n -"``), ``stored`` likewise (``"S0 R"``).
    """

    pattern: str
    choice: str | None = None
    stored: str | None = None

    def __post_init__(self) -> None:
        if (self.choice is None) == (self.stored is None):
            raise ConstraintError(
                f"Pin({self.pattern!r}) needs exactly one of choice= and stored=, such as "
                "Pin('layers.0.*', choice='m0 -') or Pin('*.weight', stored='S0 R')"
            )


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """At most this much memory per device: bytes, or text such as ``"60GiB"``."""

    size: int | str

    @property
    def size_bytes(self) -> int:
        return parse_bytes(self.size)

    def __post_init__(self) -> None:
        parse_bytes(self.size)


Constraint = Force | Forbid | Pin | MemoryBudget

Mask = np.ndarray[Any, np.dtype[np.bool_]]
"""Which choices of one node are allowed."""

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(size: int | str) -> int:
    """Bytes from a number or text such as ``60GiB``; raises ConstraintError."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]+)\s*", str(size))
    if match is None or match[2].upper() not in _UNITS or match[1].count(".") > 1:
        raise ConstraintError(
            f"memory size {size!r} is neither a positive number of bytes nor text such as '60GiB'"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _check_parallelism(name: str) -> None:
    if name not in list(Parallelism):
        known = ", ".join(Parallelism)
        raise ConstraintError(f"unknown strategy {name!r}; known are: {known}")


def narrow(priced: PricedGraph, constraints: Sequence[Constraint]) -> tuple[Array, ...]:
    """Node costs with +inf where a constraint forbids a choice.

    Raises ConstraintError where one names nothing, or leaves a node without any choice.
    """
    costs = [np.array(c) for c in priced.costs]
    by_name: list[list[str]] = [[] for _ in costs]
    for constraint in constraints:
        if isinstance(constraint, MemoryBudget):
            continue
        masks = _masks(priced, constraint)
        for node, mask in masks.items():
            costs[node][~mask] = np.inf
            by_name[node].append(str(constraint))
            if not np.isfinite(costs[node]).any():
                raise ConstraintError(
                    f"nothing is left to choose for {priced.nodes[node].kind} "
                    f"{priced.nodes[node].name!r} under {' and '.join(by_name[node])}; drop one"
                )
    return tuple(
        original if not by_name[n] else costs[n] for n, original in enumerate(priced.costs)
    )


def _masks(priced: PricedGraph, constraint: Constraint) -> dict[int, Mask]:
    if isinstance(constraint, Pin):
        return _pin_masks(priced, constraint)
    assert isinstance(constraint, Force | Forbid)
    masks: dict[int, Mask] = {}
    mesh = priced.pricing.mesh
    for axis in _axes(mesh, constraint.axis):
        make = _force_masks if isinstance(constraint, Force) else _forbid_masks
        for node, mask in make(priced, Parallelism(constraint.parallelism), axis).items():
            masks[node] = masks[node] & mask if node in masks else mask
    return masks


def _axes(mesh: Mesh, name: str | None) -> tuple[int, ...]:
    if name is None:
        return tuple(range(mesh.num_axes))
    if name not in mesh.axis_names:
        raise ConstraintError(
            f"the mesh has no axis {name!r}, only {', '.join(mesh.axis_names)}; "
            "name the axes with mesh={'dp': 2, 'tp': 2}"
        )
    return (mesh.axis_names.index(name),)


def _on_axis(table: PlacementTable, axis: int, allowed: object) -> Mask:
    assert callable(allowed)
    distinct = np.array([bool(allowed(p[axis])) for p in table.distinct])
    return distinct[table.index]


def _is_split(placement: Placement) -> bool:
    return placement.state is State.SHARD


def _is_whole(placement: Placement) -> bool:
    return placement.state in (State.REPLICATE, State.VARYING)


def _force_masks(priced: PricedGraph, parallelism: Parallelism, axis: int) -> dict[int, Mask]:
    if parallelism is not Parallelism.TENSOR_PARALLEL:
        _check_batch(priced, parallelism, axis)
    masks = {}
    for node, table in zip(range(len(priced.nodes)), priced.tables):
        masks[node] = _node_mask(priced, node, table, parallelism, axis)
    return {node: mask for node, mask in masks.items() if not mask.all()}


def _check_batch(priced: PricedGraph, parallelism: Parallelism, axis: int) -> None:
    """Raise ConstraintError where no input can be split along its first dimension."""
    graph, mesh = priced.pricing.graph, priced.pricing.mesh
    inputs = [graph.values[i] for i in graph.inputs if graph.values[i].shape]
    size = mesh.axis_sizes[axis]
    if inputs and all(v.shape[0] % size for v in inputs):
        first = inputs[0]
        raise ConstraintError(
            f"{parallelism} on axis {mesh.axis_names[axis]!r} splits the batch in {size} equal "
            f"parts, but input {first.name!r} has shape {first.shape}: {first.shape[0]} is not "
            f"divisible by {size}. Use a batch of "
            f"{first.shape[0] // size * size or size} or {(first.shape[0] // size + 1) * size}"
        )


def _node_mask(
    priced: PricedGraph, node: int, table: OpTable | ValueTable, kind: Parallelism, axis: int
) -> Mask:
    values = priced.pricing.graph.values
    decision = priced.nodes[node]
    if isinstance(table, OpTable):
        return _op_mask(priced, decision.index, table, kind, axis)
    value = values[decision.index]
    if value.kind is ValueKind.INPUT:
        return _input_mask(table, kind, axis)
    if value.kind is not ValueKind.PARAMETER:
        return np.ones(len(table.placements.index), dtype=bool)
    if decision.kind == NodeKind.RELAY:
        if kind is Parallelism.TENSOR_PARALLEL:
            return np.ones(len(table.placements.index), dtype=bool)
        return _on_axis(table.placements, axis, _is_whole)
    if kind is Parallelism.DATA_PARALLEL:
        return _on_axis(table.placements, axis, lambda p: not _is_split(p))
    if kind is Parallelism.ZERO3:
        return _prefer(_on_axis(table.placements, axis, _is_split))
    return np.ones(len(table.placements.index), dtype=bool)


def _input_mask(table: ValueTable, kind: Parallelism, axis: int) -> Mask:
    if kind is Parallelism.TENSOR_PARALLEL:
        return _on_axis(table.placements, axis, lambda p: not _is_split(p))
    return _prefer(_on_axis(table.placements, axis, lambda p: _is_split(p) and p.dim == 0))


def _op_mask(priced: PricedGraph, index: int, table: OpTable, kind: Parallelism, axis: int) -> Mask:
    """Weights are used whole and the batch is split where it can be (data parallelism), or
    weights are split where they can be (tensor parallelism)."""
    graph = priced.pricing.graph
    op = graph.ops[index]
    mask = np.ones(len(table.choices), dtype=bool)
    if kind is not Parallelism.TENSOR_PARALLEL:
        batch = priced.pricing.analysis.batch_splits[index]
        along = np.array([c.splits[axis] == batch for c in table.choices])
        mask &= along if along.any() else np.array([c.splits[axis] is None for c in table.choices])
    weights = [
        (position, value)
        for position, value in enumerate(op.inputs)
        if graph.values[value].kind is ValueKind.PARAMETER
    ]
    for position, value in weights:
        if kind is Parallelism.TENSOR_PARALLEL and len(graph.values[value].shape) >= 2:
            mask &= _prefer(_on_axis(table.needs[position], axis, _is_split))
    return mask if mask.any() else np.ones(len(table.choices), dtype=bool)


def _weights_whole(priced: PricedGraph, index: int, table: OpTable, axis: int) -> Mask:
    """Choices that use every parameter whole."""
    graph = priced.pricing.graph
    mask = np.ones(len(table.choices), dtype=bool)
    for position, value in enumerate(graph.ops[index].inputs):
        if graph.values[value].kind is ValueKind.PARAMETER:
            mask &= _on_axis(table.needs[position], axis, _is_whole)
    return mask


def _prefer(mask: Mask) -> Mask:
    """The mask where it leaves something, else everything."""
    return mask if mask.any() else np.ones_like(mask)


def _forbid_masks(priced: PricedGraph, parallelism: Parallelism, axis: int) -> dict[int, Mask]:
    """No weight split (tensor), no parameter stored split (zero3), or no batch split (data)."""
    graph = priced.pricing.graph
    masks = {}
    for node, (decision, table) in enumerate(zip(priced.nodes, priced.tables)):
        if isinstance(table, OpTable):
            if parallelism is Parallelism.TENSOR_PARALLEL:
                masks[node] = _weights_whole(priced, decision.index, table, axis)
            continue
        value = graph.values[decision.index]
        if decision.kind != NodeKind.STORED:
            continue
        if value.kind is ValueKind.INPUT and parallelism is Parallelism.DATA_PARALLEL:
            masks[node] = _on_axis(table.placements, axis, lambda p: not _is_split(p))
        if value.kind is ValueKind.PARAMETER and parallelism is Parallelism.ZERO3:
            masks[node] = _on_axis(table.placements, axis, lambda p: not _is_split(p))
    return masks


def _pin_masks(priced: PricedGraph, pin: Pin) -> dict[int, Mask]:
    graph = priced.pricing.graph
    masks = {}
    for node, (decision, table) in enumerate(zip(priced.nodes, priced.tables)):
        names = [decision.name]
        if isinstance(table, OpTable):
            names.append(graph.ops[decision.index].module_path)
        if not any(fnmatch.fnmatchcase(name, pin.pattern) for name in names):
            continue
        if isinstance(table, OpTable) and pin.choice is not None:
            choice = parse_choice(pin.choice)
            masks[node] = np.array([c == choice for c in table.choices])
        elif decision.kind == NodeKind.STORED and pin.stored is not None:
            assert isinstance(table, ValueTable)
            wanted: Placements = tuple(parse_placement(w) for w in pin.stored.split())
            distinct = np.array([p == wanted for p in table.placements.distinct])
            masks[node] = distinct[table.placements.index]
    if not masks:
        what = "op" if pin.choice is not None else "parameter or input"
        raise ConstraintError(
            f"{pin} matches no {what}; print the graph's names with "
            "[op.name for op in autopar.capture(model, inputs).graph.ops]"
        )
    return masks
