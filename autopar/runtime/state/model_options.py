"""Options of the models of an array, each of which trains as if it were alone.

An array's program stacks corresponding tensors of its models along a first dimension.
`ModelOptions` says which rows of these a model trains, and with what optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.runtime.state.optimizers import MakeOptimizer, MakeScheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRef:
    """Row ``row`` of the program's tensor ``name``; the whole tensor if ``row`` is None."""

    name: str
    row: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """One model: its ``trained`` parameters, in their own order, and its ``buffers``.

    ``without_gradient``: the indices of the trained parameters that the gradient of its loss does
    not reach, though it may reach the same rows of other models.
    """

    trained: tuple[RowRef, ...]
    buffers: tuple[RowRef, ...]
    optimizer: MakeOptimizer
    without_gradient: frozenset[int] = frozenset()
    lr_scheduler: MakeScheduler | None = None
    max_grad_norm: float | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayOptions:
    """The models of an array; ``losses`` names the buffer that holds their losses."""

    models: tuple[ModelOptions, ...]
    losses: str

    @property
    def num_models(self) -> int:
        return len(self.models)
