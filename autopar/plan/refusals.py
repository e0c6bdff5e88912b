"""How a plan is refused: with the place in it, the rule, and the fix.

In: what was wrong, and a JSON path. Out: a PlanError that says both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from autopar.base.documents import path_of
from autopar.base.errors import AutoparError, PlanError

MAX_TEXT = 4000


def refused(why: str, place: str = "") -> PlanError:
    """The error of a plan that cannot be used because of what is at a JSON path in it."""
    where = f" at {place}" if place else ""
    text = why if len(why) <= MAX_TEXT else f"{why[:MAX_TEXT]}..."
    return PlanError(
        f"the plan is refused{where}: {text.rstrip('.')}\nautopar.plan(...) makes a new one"
    )


@contextmanager
def at(*keys: str | int) -> Iterator[None]:
    """Errors inside are about what the plan says at this place."""
    try:
        yield
    except AutoparError as error:
        raise refused(str(error), path_of(keys)) from error
