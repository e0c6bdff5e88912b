"""Where the values of each model lie in the fused graph.

The graph of an array has one value for what several models compute alike: stacked along a model
dimension, or shared where it is the same for all. A `Lane` locates the value of one model; an
`Operand` is one argument of the ops of several models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.graph import Ref


@dataclass(frozen=True, slots=True)
class Lane:
    """One model's value: ``row`` along ``dim`` of ``ref``, or all of ``ref`` if dim is None."""

    ref: Ref
    dim: int | None = None
    row: int = 0


@dataclass(frozen=True, slots=True)
class Operand:
    """One argument of all models: stacked along ``dim`` of ``ref``, or shared if dim is None."""

    ref: Ref
    dim: int | None = None


def as_operand(lanes: Sequence[Lane], size: int | None) -> Operand | None:
    """The lanes as one operand without copying, if they are all rows of one value in its order.

    ``size``: the size of that value's model dimension, None for a shared value.
    """
    first = lanes[0]
    if any(lane.ref != first.ref or lane.dim != first.dim for lane in lanes):
        return None
    if first.dim is None:
        return Operand(first.ref)
    if [lane.row for lane in lanes] == list(range(size or 0)):
        return Operand(first.ref, first.dim)
    return None
