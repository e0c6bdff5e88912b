"""How much is tried: ``make test`` runs a sample of the longest tables, ``make exhaustive`` all.

``EXHAUSTIVE`` is true under ``AUTOPAR_EXHAUSTIVE=1``. A test marked ``sampled(n)`` otherwise runs n
of its cases: those that together have as many of the values of its parameters as n cases can.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

EXHAUSTIVE = os.environ.get("AUTOPAR_EXHAUSTIVE", "0") != "0"


def sample(cases: Sequence[dict[str, Any]], num: int) -> list[int]:
    """The positions of ``num`` cases, in order.

    Each next one has the most values that none before it has; of several such, the one that is
    furthest from those before it.
    """
    values = [{(name, repr(value)) for name, value in case.items()} for case in cases]
    chosen: list[int] = []
    covered: set[tuple[str, str]] = set()

    def gain(at: int) -> tuple[int, int, int]:
        return len(values[at] - covered), min((abs(at - i) for i in chosen), default=0), -at

    left = set(range(len(cases)))
    while left and len(chosen) < num:
        best = max(left, key=gain)
        left.remove(best)
        chosen.append(best)
        covered |= values[best]
    return sorted(chosen)


def left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """The items that ``make test`` leaves out."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            groups.setdefault(item.nodeid.split("[")[0], []).append(item)
    rest: list[pytest.Item] = []
    for group in groups.values():
        marker = group[0].get_closest_marker("sampled")
        assert marker is not None
        kept = sample([item.callspec.params for item in group], *marker.args)  # type: ignore[attr-defined]
        rest += [item for i, item in enumerate(group) if i not in kept]
    return rest
