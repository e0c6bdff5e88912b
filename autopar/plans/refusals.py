"""Errors of refused plans: the JSON path, the rule and the fix.

In: a reason and a JSON path. Out: a PlanError that states both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from autopar.base.documents import path_of
from autopar.base.errors import AutoparError, PlanError

MAX_TEXT = 4000


def refused(why: str, place: str = "") -> PlanError:
    """The error for a plan that is unusable because of the value at a JSON path."""
    where = f" at {place}" if place else ""
    text = why if len(why) <= MAX_TEXT else f"{why[:MAX_TEXT]}..."
    return PlanError(
        f"the plan is refused{where}: {text.rstrip('.')}\nautopar.plan(...) makes a new one"
    )


@contextmanager
def at(*keys: str | int) -> Iterator[None]:
    """Re-raise errors from inside as PlanErrors at this JSON path."""
    try:
        yield
    except AutoparError as error:
        raise refused(str(error), path_of(keys)) from error
