"""Tensors in memory that no other tensor has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor


def apart(values: Sequence[Tensor], others: Iterable[Tensor]) -> list[Tensor]:
    """The values, those cloned that share memory with one of the ``others`` or of each other."""
    taken = {_memory(x) for x in others}
    made = []
    for value in values:
        made.append(value.clone() if _memory(value) in taken else value)
        taken.add(_memory(made[-1]))
    return made


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
