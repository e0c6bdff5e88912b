"""A strategy: the placement of every op and every stored value of a graph on a mesh.

`Analysis` holds what does not depend on the mesh (iteration spaces, digits, shared values). An
`Assignment` is one joint decision: a choice per op, a stored placement per parameter and input, and
a relay placement per shared value. A value with several uses is *relayed*: it is redistributed once
from the placement in which its producer supplies it to the relay placement, from which each
consumer continues. Consumers with the same need thus share one redistribution, in both passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from autopar.base.errors import PlanError
from autopar.ir.choice import Choice, Split
from autopar.ir.graph import Graph, Op, Value, ValueKind, map_refs
from autopar.ir.mesh import Mesh
from autopar.ir.placement import (
    Placements,
    R,
    State,
    check_placements,
    format_placements,
    is_reduce_scattered,
)
from autopar.rules import (
    Space,
    find_bases,
    needs,
    space_of,
    supplies,
)
from autopar.rules.choice import is_valid_choice
from autopar.rules.space import Layout

_T = TypeVar("_T")


class Analysis:
    """The facts about a graph that all its strategies share, computed once per graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.spaces: tuple[Space | None, ...] = tuple(
            space_of(op, graph.values) for op in graph.ops
        )
        self.bases = find_bases(graph, self.spaces)
        self.consumers = graph.consumers()
        self.producers = graph.producers()
        self._derived: dict[Callable[[Analysis], Any], Any] = {}

    def derived(self, make: Callable[[Analysis], _T]) -> _T:
        """The result of ``make`` for this graph, computed once and cached with the analysis."""
        if make not in self._derived:
            self._derived[make] = make(self)
        found: _T = self._derived[make]
        return found

    @cached_property
    def relayed(self) -> frozenset[int]:
        """Values that get a relay: computed values and parameters used more than once."""
        return frozenset(
            value
            for value, uses in self.consumers.items()
            if len(uses) > 1
            and self.graph.values[value].kind in (ValueKind.PARAMETER, ValueKind.ACTIVATION)
            and not self.graph.values[value].fixed
        )

    @cached_property
    def batch_size(self) -> int:
        """The size of the first dimension of the first input that has one, or 0."""
        graph = self.graph
        return next((graph.values[i].shape[0] for i in graph.inputs if graph.values[i].shape), 0)

    @cached_property
    def batch_splits(self) -> tuple[Split | None, ...]:
        """For each op, its split along the batch (the first dimension of the inputs), or None."""
        shaped = [i for i in self.graph.inputs if self.graph.values[i].shape]
        return self._splits_along(0, shaped)

    @cached_property
    def sequence_splits(self) -> tuple[Split | None, ...]:
        """For each op, its split along the sequence (dimension 1 of token ids), or None."""
        values = self.graph.values
        ids = [
            i
            for i in self.graph.inputs
            if len(values[i].shape) == 2 and not values[i].dtype.is_floating_point
        ]
        return self._splits_along(1, ids)

    def _splits_along(self, dim: int, inputs: Sequence[int]) -> tuple[Split | None, ...]:
        """For each op, its split along one dimension of inputs that agree with the first."""
        values = self.graph.values
        size = values[inputs[0]].shape[dim] if inputs else 0
        digits = {i: (dim, 1) for i in inputs if values[i].shape[dim] == size}
        return tuple(self._split_along(op, digits) for op in self.graph.ops)

    def _split_along(self, op: Op, digits: dict[int, tuple[int, int]]) -> Split | None:
        """Find the digit among an op's dimensions, and record it for the op's outputs."""
        space = self.spaces[op.index]
        if space is None:
            return None
        found: Split | None = None
        for value, layout in zip(op.inputs, space.inputs):
            if value in digits and found is None:
                found = _split_at(space, layout, digits[value])
        if found is None:
            return None
        for output, layout in zip(op.outputs, space.outputs):
            for dim, factors in enumerate(layout):
                if output is not None and found.dim in factors:
                    before = factors[: factors.index(found.dim)]
                    outer = math.prod(space.sizes[f] for f in before) * found.base
                    digits[output] = (dim, outer)
        return found if found.dim in space.splittable() else None

    @cached_property
    def kinds(self) -> tuple[Any, ...]:
        """For each op, a key that is equal for ops that cost the same under every choice.

        It has the operator, arguments, shapes and strides.
        """
        return tuple(self._kind(op) for op in self.graph.ops)

    def _kind(self, op: Op) -> Any:
        values = self.graph.values

        def describe(index: int) -> Any:
            v = values[index]
            is_parameter = v.kind is ValueKind.PARAMETER
            return (v.shape, v.dtype, v.mixed, v.strides, v.differentiable, is_parameter, v.fixed)

        bases = tuple(self.bases[op.index].items())
        outputs = tuple(None if o is None else describe(o) for o in op.outputs)
        args = map_refs((op.args, op.kwargs), lambda ref: ("ref", *describe(ref.index)))
        return (op.target_name, str(args), outputs, bases, op.per_shard)

    @cached_property
    def _flows(self) -> tuple[tuple[bool, ...], ...]:
        values = self.graph.values
        return tuple(
            tuple(
                any(o is not None and values[o].differentiable for o in op.outputs)
                and values[i].differentiable
                for i in op.inputs
            )
            for op in self.graph.ops
        )

    def differentiable(self, op: Op) -> tuple[bool, ...]:
        """For each operand of ``op``, whether a gradient flows back to it through this op."""
        return self._flows[op.index]

    def needs(self, op: Op, choice: Choice, mesh: Mesh) -> tuple[Placements, ...]:
        return needs(self.spaces[op.index], choice, mesh, self.differentiable(op))

    def supplies(self, op: Op, choice: Choice, mesh: Mesh) -> tuple[Placements, ...]:
        return supplies(self.spaces[op.index], choice, mesh, len(op.outputs))


def _split_at(space: Space, layout: Layout, digit: tuple[int, int]) -> Split | None:
    """The split of the iteration dimension that holds a digit of a tensor dimension."""
    dim, outer = digit
    before = 1
    for name in layout[dim]:
        base, remainder = divmod(outer, before)
        if not remainder and base < max(space.sizes[name], 2):
            return Split(name, base)
        before *= space.sizes[name]
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One joint decision for a graph on a mesh; see the module's docstring.

    A parameter that is gathered for its blocks is gathered once per step and kept until its last
    use, or it is ``released`` after each forward pass and gathered again for the backward pass. Its
    gradient is accumulated whole over the micro-batches and reduced once, or ``scattered`` in every
    micro-batch, so that only the shard accumulates.
    """

    mesh: Mesh
    choices: tuple[Choice, ...]
    stored: Mapping[int, Placements]
    relays: Mapping[int, Placements]
    released: frozenset[int] = frozenset()
    scattered: frozenset[int] = frozenset()


class Strategy:
    """An assignment with its graph, which together determine every placement."""

    def __init__(self, analysis: Analysis, assignment: Assignment) -> None:
        self.analysis = analysis
        self.graph = analysis.graph
        self.assignment = assignment
        self.mesh = assignment.mesh
        self.replicated: Placements = (R,) * self.mesh.num_axes
        self._needs: dict[int, tuple[Placements, ...]] = {}
        self._supplies: dict[int, tuple[Placements, ...]] = {}

    def keeping(self, *, released: frozenset[int], scattered: frozenset[int]) -> Strategy:
        """The same placements with other parameters released and other gradients scattered."""
        assignment = replace(self.assignment, released=released, scattered=scattered)
        other = Strategy(self.analysis, assignment)
        other._needs, other._supplies = self._needs, self._supplies
        return other

    def needs(self, op: Op) -> tuple[Placements, ...]:
        """The placement that ``op`` needs of each operand."""
        if op.index not in self._needs:
            choice = self.assignment.choices[op.index]
            self._needs[op.index] = self.analysis.needs(op, choice, self.mesh)
        return self._needs[op.index]

    def supplies(self, op: Op) -> tuple[Placements, ...]:
        """The placement in which ``op`` supplies each output."""
        if op.index not in self._supplies:
            choice = self.assignment.choices[op.index]
            self._supplies[op.index] = self.analysis.supplies(op, choice, self.mesh)
        return self._supplies[op.index]

    def supply(self, value: Value) -> Placements:
        """The placement in which a value is produced or stored."""
        if value.kind is ValueKind.ACTIVATION:
            op, position = self.analysis.producers[value.index]
            return self.supplies(self.graph.ops[op])[position]
        return self.assignment.stored.get(value.index, self.replicated)

    def interface(self, value: Value) -> Placements:
        """The placement in which consumers find a value.

        It is the relay's, or else the supply; for a parameter with one consumer it is what that
        consumer needs, as the parameter is gathered outside the block.
        """
        if value.index in self.assignment.relays:
            return self.assignment.relays[value.index]
        if value.kind is ValueKind.PARAMETER:
            uses = self.analysis.consumers.get(value.index, ())
            if uses:
                op, position = uses[0]
                return self.needs(self.graph.ops[op])[position]
        return self.supply(value)

    def is_gathered(self, parameter: Value) -> bool:
        """Whether blocks read a parameter in another placement, or dtype, than it is stored in."""
        moved = self.supply(parameter) != self.interface(parameter)
        return moved or parameter.mixed is not None

    def is_reduce_scattered(self, parameter: Value) -> bool:
        """Whether the gradient of a parameter is reduce-scattered to where it is stored."""
        return is_reduce_scattered(self.supply(parameter), self.interface(parameter))

    def verify(self) -> None:
        """Raise PlanError naming the first op or value whose decision is invalid."""
        graph = self.graph
        if len(self.assignment.choices) != len(graph.ops):
            raise PlanError(
                f"{len(self.assignment.choices)} choices for a graph of {len(graph.ops)} ops"
            )
        for op in graph.ops:
            self.verify_choice(op)
        for index in self.assignment.stored:
            self.verify_stored(graph.values[index])
        for index in self.assignment.relays:
            self.verify_relay(graph.values[index])

    def verify_choice(self, op: Op) -> None:
        """Raise PlanError if the choice of one op is invalid."""
        space, choice, mesh = (
            self.analysis.spaces[op.index],
            self.assignment.choices[op.index],
            self.mesh,
        )
        if len(choice.splits) != mesh.num_axes:
            raise PlanError(f"op {op.name!r}: choice '{choice}' on a mesh of {mesh}")
        valid = choice.is_redundant if space is None else is_valid_choice(space, choice, mesh)
        if not valid:
            raise PlanError(f"op {op.name!r} cannot be split as '{choice}' on {mesh}")

    def verify_stored(self, value: Value) -> None:
        """Raise PlanError if the stored placement of one parameter or input is invalid."""
        placements = self.assignment.stored[value.index]
        check_placements(placements, value.shape, self.mesh)
        if any(p.state in (State.PARTIAL, State.VARYING) for p in placements):
            raise PlanError(
                f"{value.name!r} cannot be stored as {format_placements(placements)}: only R and "
                "S are"
            )

    def verify_relay(self, value: Value) -> None:
        """Raise PlanError if the relay placement of one shared value is invalid."""
        placements = self.assignment.relays[value.index]
        check_placements(placements, value.shape, self.mesh)
        if any(p.state is State.PARTIAL for p in placements):
            raise PlanError(f"{value.name!r} cannot be relayed as a partial sum")


def unsplit(analysis: Analysis) -> Strategy:
    """The strategy of a single device, on which nothing is split."""
    assignment = Assignment(
        mesh=Mesh(("x",), (1,)),
        choices=tuple(Choice((None,)) for _ in analysis.graph.ops),
        stored={},
        relays=dict.fromkeys(analysis.relayed, (R,)),
    )
    return Strategy(analysis, assignment)
