"""Horizontal fusion: many models trained as one, each as if it were alone.

`autopar.compile` makes an `Array` of a list of models; `sweep` packs the trials of a search into
arrays, and `largest_array` says how many models fit.
"""

from autopar.fusion.array import Array
from autopar.fusion.searchers import (
    Choice,
    Hyperband,
    Integers,
    RandomSearch,
    Request,
    Searcher,
    Uniform,
)
from autopar.fusion.size import ArraySize, LargestArray, largest_array
from autopar.fusion.sweeps import Candidate, Trial, sweep

__all__ = [
    "Array",
    "ArraySize",
    "Candidate",
    "Choice",
    "Hyperband",
    "Integers",
    "LargestArray",
    "RandomSearch",
    "Request",
    "Searcher",
    "Trial",
    "Uniform",
    "largest_array",
    "sweep",
]
