"""Entries of many arrays at once.

In: arrays, of which few are distinct, and a place in each. Out: the entries there, by one numpy
operation for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Entries = npt.NDArray[Any]
Places = npt.NDArray[np.intp]


class Lookup:
    """One entry of each of many arrays; those that occur several times are stored once."""

    def __init__(self, arrays: Sequence[Entries]) -> None:
        starts, distinct, end = dict[int, int](), list[Entries](), 0
        for array in arrays:
            if id(array) not in starts:
                starts[id(array)] = end
                distinct.append(array.ravel())
                end += array.size
        self.offsets = np.array([starts[id(array)] for array in arrays], dtype=np.intp)
        self.entries = np.concatenate([np.zeros(0), *distinct])

    def at(self, places: Places) -> Entries:
        """The entry of each array at its place, which counts its elements in C order."""
        found: Entries = self.entries[self.offsets + places]
        return found


class PairLookup:
    """One entry of each of many matrices, at the choices of the two nodes that each joins."""

    def __init__(self, matrices: dict[tuple[int, int], Entries]) -> None:
        self.ends = np.array(list(matrices), dtype=np.intp).reshape(-1, 2).T
        self.widths = np.array([each.shape[1] for each in matrices.values()], dtype=np.intp)
        self.entries = Lookup(list(matrices.values()))

    def at(self, picks: Places) -> Entries:
        """The entry of each matrix (i, j) in row ``picks[i]``, column ``picks[j]``."""
        rows, columns = self.ends
        return self.entries.at(picks[rows] * self.widths + picks[columns])
