"""Memory that an operator takes on a CPU beside its operands and results, measured."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.base.allocations import Recording
from autopar.base.torch_private import pytree

MOST_MEASURED = 1e9
"""Multiplications and additions of a call that is worth running; some tens of milliseconds."""


def measured_scratch(operator: Any, args: tuple[Any, ...], num_threads: int) -> int:
    """Run an operator on zeros like ``args``, twice, and return the bytes that it allocates at once
    beyond its results. Alike calls are run once in a process.

    For operators that may be called with any numbers and draw none. The caller asks
    `autopar.base.torch_private.is_profiling` before, as no other profiler may run.
    """
    return _measured(operator, tuple(map(_Like.of, args)), num_threads)


@dataclass(frozen=True, slots=True)
class _Like:
    """Stands for a tensor in the arguments of a call."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(arg: Any) -> Any:
        """An argument that can be hashed, without data."""
        if isinstance(arg, Tensor):
            return _Like(tuple(arg.shape), arg.stride(), arg.dtype)
        return tuple(arg) if isinstance(arg, list) else arg

    def zeros(self) -> Tensor:
        reach = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride))
        numbers = torch.zeros(reach, dtype=self.dtype, device="cpu")
        return numbers.as_strided(self.shape, self.stride)


@functools.lru_cache(maxsize=4096)
@torch.no_grad()
def _measured(operator: Any, args: tuple[Any, ...], num_threads: int) -> int:
    given = [
        arg.zeros() if isinstance(arg, _Like) else list(arg) if isinstance(arg, tuple) else arg
        for arg in args
    ]
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        operator(*given)  # what stays for later calls is not counted
        recording = Recording()
        results = operator(*given)
        changes = recording.end()
    finally:
        torch.set_num_threads(before)
    made = sum(
        result.nbytes for result in pytree.tree_leaves(results) if isinstance(result, Tensor)
    )
    return max(max(itertools.accumulate(changes, initial=0)) - made, 0)
