"""The progress of the search for a plan, kept beside the plan and never in its JSON."""

from __future__ import annotations

from typing import NamedTuple


class SearchMoment(NamedTuple):
    """The state of a search ``elapsed_s`` seconds of wall time after it began.

    ``doing`` is the line of progress shown then. ``best_s`` is the fastest step so far that is
    estimated to fit the memory, ``fits_s`` the fastest that was lowered and counted to fit,
    ``bound_s`` a lower bound on the steps of all spaces searched so far, which falls when a larger
    space is opened; None where there is none yet.
    """

    elapsed_s: float
    doing: str
    best_s: float | None
    fits_s: float | None
    bound_s: float | None


SearchTrace = tuple[SearchMoment, ...]
"""The moments of a search in order; the last one has the step of its plan."""
