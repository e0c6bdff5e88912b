"""Every pipeline generator is in every table of cases, so that a new one is tried everywhere."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from autopar.schedules.generators.build import GENERATORS, PIPELINES
from tests.equality import drawn_plans, pipeline_table
from tests.runtime import test_pipelines
from tests.schedules import schedule_cases

TABLES: dict[str, tuple[Collection[str], Collection[str]]] = {
    "schedule_cases.VARIANTS": ({name for name, _, _ in schedule_cases.VARIANTS}, GENERATORS),
    "drawn_plans.PIPELINES": ({name for name, _, _ in drawn_plans.PIPELINES}, PIPELINES),
    "pipeline_table.ROWS": ({row.name for row in pipeline_table.ROWS.values()}, PIPELINES),
    "test_pipelines.ON_2": ({row[0] for row in test_pipelines.ON_2}, PIPELINES),
}


@pytest.mark.parametrize("table", TABLES)
def test_every_generator_has_a_case(table: str) -> None:
    found, wanted = TABLES[table]
    assert not set(wanted) - set(found), f"add cases of them to {table}"
