"""The interface of fused forms: one op of several models becomes ops on stacked values.

A form takes a `Call` and returns where its results lie. It does not apply where it returns None,
raises an error, or has results of another shape or dtype than a model's own; then the next form is
tried, and where none applies the op is computed model by model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from autopar.fusion.builder import GraphBuilder
from autopar.fusion.lanes import Operand
from autopar.ir.graph import Op, Ref

aten = torch.ops.aten

Results: TypeAlias = tuple[Operand | None, ...]


@dataclass(frozen=True, slots=True)
class Draw:
    """Which random op of a model this is: the index of its block, and its position there."""

    block: int
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One op of ``num`` models: ``op`` is that of the first, ``operands`` are those of all.

    ``ranks``: the number of dimensions of each operand in a single model; ``out_ranks``: those of
    the results. ``draws``: the draw of each model; none for ops that draw nothing.
    """

    builder: GraphBuilder
    op: Op
    operands: tuple[Operand, ...]
    models: tuple[int, ...]
    ranks: tuple[int, ...]
    out_ranks: tuple[int, ...]
    draws: tuple[Draw, ...] = ()

    @property
    def num(self) -> int:
        return len(self.models)

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        return self.builder.emit(target, *args, **kwargs)

    def shape(self, ref: Ref) -> tuple[int, ...]:
        return self.builder.shape(ref)

    def at(self, place: int, dim: int) -> Ref:
        """An operand with the model dimension at ``dim``."""
        operand = self.operands[place]
        if operand.dim is None:
            size = (*self.shape(operand.ref)[:dim], self.num, *self.shape(operand.ref)[dim:])
            one = self.emit(aten.unsqueeze.default, operand.ref, dim)
            return self.expand(one, size)
        return self.moved(operand, dim)

    def moved(self, operand: Operand, dim: int) -> Ref:
        """A stacked operand with the model dimension at ``dim``."""
        if operand.dim is None:
            return operand.ref
        return self.builder.moved(operand.ref, operand.dim, dim)

    def expand(self, ref: Ref, size: Sequence[int]) -> Ref:
        return self.emit(aten.expand.default, ref, list(size))

    def reshape(self, ref: Ref, size: Sequence[int]) -> Ref:
        if self.shape(ref) == tuple(size):
            return ref
        return self.emit(aten.reshape.default, ref, list(size))

    def fold(self, ref: Ref, dim: int) -> Ref:
        """Dimensions ``dim`` and ``dim + 1`` merged into one."""
        size = self.shape(ref)
        return self.reshape(ref, (*size[:dim], size[dim] * size[dim + 1], *size[dim + 2 :]))

    def unfold(self, ref: Ref, dim: int, outer: int) -> Ref:
        """Dimension ``dim`` split into two, the first of size ``outer``."""
        size = self.shape(ref)
        return self.reshape(ref, (*size[:dim], outer, size[dim] // outer, *size[dim + 1 :]))

    def argument(self, name: str) -> Any:
        """The argument ``name`` of the op, or its default; a `Ref` for a tensor."""
        schema = self.op.target._schema.arguments
        kwargs = dict(self.op.kwargs)
        for place, argument in enumerate(schema):
            if argument.name == name:
                if place < len(self.op.args):
                    return self.op.args[place]
                return kwargs.get(name, argument.default_value)
        raise KeyError(name)

    def operand_of(self, name: str) -> int | None:
        """The index among the operands of the tensor passed as ``name``."""
        given = self.argument(name)
        if not isinstance(given, Ref):
            return None
        seen = 0
        names = [a.name for a in self.op.target._schema.arguments]
        for argument, value in zip(names, self.op.args):
            if argument == name:
                return seen
            seen += _num_refs(value)
        for key, value in self.op.kwargs:
            if key == name:
                return seen
            seen += _num_refs(value)
        return None


def _num_refs(node: Any) -> int:
    if isinstance(node, Ref):
        return 1
    return sum(map(_num_refs, node)) if isinstance(node, tuple) else 0


Form: TypeAlias = Callable[[Call], Results | None]

FORMS: dict[str, list[tuple[str, Form]]] = {}


def form(name: str, *targets: str) -> Callable[[Form], Form]:
    """Register a form of these operators; the first one that applies is used."""

    def registered(function: Form) -> Form:
        for target in targets:
            FORMS.setdefault(target, []).append((name, function))
        return function

    return registered
