"""From a captured model to what strategies are made for: the passes, then the analysis.

In: a capture. Out: for any number of micro-batches the rewritten capture, its analysis, and how it
is cut. Each is worked out once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from autopar.base.errors import InputError
from autopar.frontend.capture import Captured
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
        self._cuts: dict[int, Cut] = {}

    @cached_property
    def analysis(self) -> Analysis:
        """The analysis of the whole batch."""
        return Analysis(self.captured.graph)

    @cached_property
    def _with_totals(self) -> tuple[Captured, Analysis]:
        graph = with_explicit_totals(self.analysis)
        if graph is self.captured.graph:
            return self.captured, self.analysis
        return replace(self.captured, graph=graph), Analysis(graph)

    def cut(self, num_microbatches: int) -> Cut:
        """The model in so many micro-batches; raises InputError or PlanError."""
        num = num_microbatches
        if isinstance(num, bool) or not isinstance(num, int):
            raise InputError(f"num_microbatches must be an int, got {num!r}")
        if num < 1:
            raise InputError(f"num_microbatches is {num}; it must be at least 1")
        if num not in self._cuts:
            if num == 1:
                self._cuts[num] = Cut(self.captured, self.analysis, None)
            else:
                captured, analysis = self._with_totals
                self._cuts[num] = Cut(captured, analysis, Microbatches(analysis, num))
        return self._cuts[num]


def prepare(
    captured: Captured | Prepared, batch_norm: BatchNorm | str = BatchNorm.GLOBAL
) -> Prepared:
    """A capture behind every pass; what is prepared already stays as it is."""
    if isinstance(captured, Prepared):
        return captured
    captured = with_expert_layers(with_rows_in_order(with_stored_precision(captured)))
    return Prepared(with_batch_norm(captured, batch_norm))
