"""How the models of an array train: each as if it were alone.

An array's program has one tensor for what its models have alike, stacked along a first dimension
of models. `ModelOptions` says, for one model, which rows of these it trains and with what.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.runtime.state.optimizers import MakeOptimizer, MakeScheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRef:
    """Row ``row`` of the program's tensor ``name``; the whole of it where row is None."""

    name: str
    row: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """One model: ``trained`` in the order of its own parameters, ``buffers`` that are its own."""

    trained: tuple[RowRef, ...]
    buffers: tuple[RowRef, ...]
    optimizer: MakeOptimizer
    lr_scheduler: MakeScheduler | None = None
    max_grad_norm: float | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayOptions:
    """All models of an array; ``losses`` names the buffer that holds their losses."""

    models: tuple[ModelOptions, ...]
    losses: str

    @property
    def num_models(self) -> int:
        return len(self.models)
