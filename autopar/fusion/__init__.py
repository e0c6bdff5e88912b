"""Horizontal fusion: many models trained as one program, each with the result of training alone.

`autopar.compile` turns a list of models into an `Array`; `sweep` packs the trials of a search into
arrays, and `largest_array` computes how many models fit one device. The idea is that of HFTA (Wang
et al., MLSys 2021).
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
