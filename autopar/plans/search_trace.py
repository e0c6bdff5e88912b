"""What a search for a plan found, and when: it is kept beside the plan, never in its JSON."""

from __future__ import annotations

from typing import NamedTuple


class SearchMoment(NamedTuple):
    """What was known ``elapsed_s`` wall seconds after a search began, and what it did then.

    ``best_s`` is the fastest step found so far that is estimated to fit the memory, ``fits_s`` the
    fastest that was lowered and counted to fit, ``bound_s`` a lower bound on the step of every plan
    in the spaces that were begun, which sinks where a larger one is; None where there is none yet.
    """

    elapsed_s: float
    doing: str
    best_s: float | None
    fits_s: float | None
    bound_s: float | None


SearchTrace = tuple[SearchMoment, ...]
"""The moments of a search in order; the last one has the step of its plan."""
