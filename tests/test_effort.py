"""The sample of a table that ``make test`` runs."""

from __future__ import annotations

import itertools
from typing import Any

from tests.effort import sample

GRID = [
    {"model": m, "schedule": s, "num": n}
    for m, s, n in itertools.product("abc", ("gpipe", "1f1b"), (2, 4, 8))
]


def values(cases: list[dict[str, Any]]) -> set[tuple[str, Any]]:
    return {item for case in cases for item in case.items()}


def test_three_cases_hold_all_values_of_a_grid() -> None:
    kept = sample(GRID, 3)
    assert len(kept) == 3
    assert values([GRID[i] for i in kept]) == values(GRID)


def test_a_list_is_sampled_from_end_to_end() -> None:
    assert sample([{"number": i} for i in range(9)], 3) == [0, 4, 8]


def test_of_fewer_cases_than_asked_for_all_run() -> None:
    assert sample(GRID[:2], 5) == [0, 1]
    assert sample(GRID, len(GRID)) == list(range(len(GRID)))
