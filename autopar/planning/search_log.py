"""The log of a search: it shows what is done, and keeps what was found, and when."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from autopar.base.units import format_seconds
from autopar.plans.search_trace import SearchMoment, SearchTrace


class SearchLog:
    """Shows what a search does by ``show``, with the best step so far and its gap to a bound."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._started_s = time.perf_counter()
        self._best_s = self._fits_s = math.inf
        self._bound_s: float | None = None
        self._moments: list[SearchMoment] = []

    def __call__(self, doing: str) -> None:
        """Show what is done from now on."""
        self._keep(doing)
        self._show(f"{doing}{self._so_far()}")

    def found(self, step_s: float) -> None:
        """Note the step of an option that is estimated to fit."""
        if step_s < self._best_s:
            self._best_s = step_s
            self._keep()

    def fitted(self, step_s: float) -> None:
        """Note the step of a plan that is counted to fit."""
        if step_s < self._fits_s:
            self._fits_s = step_s
            self._best_s = min(self._best_s, step_s)
            self._keep()

    def bounded(self, bound_s: float) -> None:
        """Note a lower bound on every step of a space, 0 without one.

        The bound of all spaces that are searched is the smallest of theirs.
        """
        if self._bound_s is None or bound_s < self._bound_s:
            self._bound_s = bound_s
            self._keep()

    def trace(self, step_s: float) -> SearchTrace:
        """All moments of a search that ends with a plan of this step."""
        self._fits_s = step_s
        self._keep("the plan")
        return tuple(self._moments)

    def _keep(self, doing: str | None = None) -> None:
        if doing is None:
            doing = self._moments[-1].doing if self._moments else ""
        self._moments.append(
            SearchMoment(
                elapsed_s=time.perf_counter() - self._started_s,
                doing=doing,
                best_s=self._best_s if math.isfinite(self._best_s) else None,
                fits_s=self._fits_s if math.isfinite(self._fits_s) else None,
                bound_s=self._bound_s or None,
            )
        )

    def _so_far(self) -> str:
        if not math.isfinite(self._best_s):
            return ""
        gap = f", gap {max(1 - self._bound_s / self._best_s, 0.0):.0%}" if self._bound_s else ""
        return f"; best so far {format_seconds(self._best_s)}{gap}"
