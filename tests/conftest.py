"""Hypothesis draws new examples on every run, except in CI, where they are fixed; an example may
take as long as the machine needs. Garbage is collected less often than by default: traces make many
objects and little garbage."""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import settings

from tests.effort import EXHAUSTIVE, left_out

settings.register_profile("here", deadline=None)
settings.register_profile("ci", derandomize=True, database=None, deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "here")
gc.set_threshold(10_000)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    rest = [] if EXHAUSTIVE else left_out(items)
    config.hook.pytest_deselected(items=rest)
    items[:] = [item for item in items if item not in rest]
