"""From a captured model to what strategies are made for: the passes, then the analysis.

In: a capture. Out: for any number of micro-batches, and any places inside its blocks at which these
are divided, the rewritten capture, its analysis, and how it is cut. Each is worked out once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from autopar.base.errors import InputError
from autopar.frontend.capture import Captured
from autopar.ir.block_cuts import narrow_cuts, with_block_cuts
from autopar.passes.batch_norm import BatchNorm, with_batch_norm
from autopar.passes.expert_layers import with_expert_layers
from autopar.passes.precision import with_stored_precision
from autopar.passes.row_order import with_rows_in_order
from autopar.sharding.microbatches import Microbatches, with_explicit_totals
from autopar.sharding.strategy import Analysis


class Cut(NamedTuple):
    """A capture as its strategies see it: with explicit totals where there are micro-batches."""

    captured: Captured
    analysis: Analysis
    microbatches: Microbatches | None


class Prepared:
    """A model behind the passes, analysed as a whole and for every number of micro-batches."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self._cuts: dict[tuple[int, tuple[str, ...]], Cut] = {}

    @cached_property
    def analysis(self) -> Analysis:
        """The analysis of the whole batch."""
        return Analysis(self.captured.graph)

    @cached_property
    def narrow_cuts(self) -> tuple[str, ...]:
        """Where the blocks can be divided with no more crossing than at their ends."""
        return narrow_cuts(self.captured.graph)

    @cached_property
    def _with_totals(self) -> tuple[Captured, Analysis]:
        graph = with_explicit_totals(self.analysis)
        if graph is self.captured.graph:
            return self.captured, self.analysis
        return replace(self.captured, graph=graph), Analysis(graph)

    def cut(self, num_microbatches: int, block_cuts: tuple[str, ...] = ()) -> Cut:
        """The model in so many micro-batches, its blocks divided in front of the modules that
        ``block_cuts`` names (`autopar.ir.block_cuts`); raises InputError or PlanError."""
        num = num_microbatches
        if isinstance(num, bool) or not isinstance(num, int):
            raise InputError(f"num_microbatches must be an int, got {num!r}")
        if num < 1:
            raise InputError(f"num_microbatches is {num}; it must be at least 1")
        key = num, block_cuts
        if key not in self._cuts:
            captured, analysis = self._divided(num > 1, block_cuts)
            microbatches = Microbatches(analysis, num) if num > 1 else None
            self._cuts[key] = Cut(captured, analysis, microbatches)
        return self._cuts[key]

    def _divided(self, has_totals: bool, block_cuts: tuple[str, ...]) -> tuple[Captured, Analysis]:
        """The capture, with explicit totals if there are micro-batches, and its blocks divided."""
        captured, analysis = self._with_totals if has_totals else (self.captured, self.analysis)
        if not block_cuts:
            return captured, analysis
        graph = with_block_cuts(captured.graph, block_cuts)
        return replace(captured, graph=graph), Analysis(graph)


def prepare(
    captured: Captured | Prepared, batch_norm: BatchNorm | str = BatchNorm.GLOBAL
) -> Prepared:
    """A capture behind every pass; what is prepared already stays as it is."""
    if isinstance(captured, Prepared):
        return captured
    captured = with_expert_layers(with_rows_in_order(with_stored_precision(captured)))
    return Prepared(with_batch_norm(captured, batch_norm))
