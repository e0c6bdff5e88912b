"""Where the values of each model lie in the graph of all of them.

An array's graph has one value for what several models have alike: stacked along a dimension of the
models, or shared where it is the same for all. A `Lane` says where one model's value is; an
`Operand` what one argument of several models' ops is together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.graph import Ref


@dataclass(frozen=True, slots=True)
class Lane:
    """One model's value: row ``row`` of dimension ``dim`` of ``ref``, or all of it (dim None)."""

    ref: Ref
    dim: int | None = None
    row: int = 0


@dataclass(frozen=True, slots=True)
class Operand:
    """One argument of all models: stacked along ``dim`` of ``ref``, or shared (dim None)."""

    ref: Ref
    dim: int | None = None


def as_operand(lanes: Sequence[Lane], size: int | None) -> Operand | None:
    """The lanes as they lie, where they are all of one value in its order; ``size`` is that of its
    dimension of models."""
    first = lanes[0]
    if any(lane.ref != first.ref or lane.dim != first.dim for lane in lanes):
        return None
    if first.dim is None:
        return Operand(first.ref)
    if [lane.row for lane in lanes] == list(range(size or 0)):
        return Operand(first.ref, first.dim)
    return None
