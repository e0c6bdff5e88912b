"""The moments of a search: beside the plan, never in its JSON, and drawn as they are."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import numpy as np
import pytest
from matplotlib.text import Text

import autopar
from autopar import Plan
from autopar.base.errors import InputError
from autopar.base.units import format_seconds
from autopar.plans.figures import SearchChart, figure_data
from tests.models.zoo import build
from tests.test_reports import CLUSTER, planned

OPEN: dict[str, Any] = {"schedule": "auto", "mesh": {"x": 4}, "time_limit_s": 6.0}


@functools.cache
def searched(case: str) -> Plan:
    """A plan of the reports' tests, or of an open search over pipelines too."""
    if case != "open":
        return planned(case)
    model, make_batch = build("gpt2")
    return autopar.plan(model, CLUSTER, make_batch(0, batch=8), **OPEN)


@pytest.mark.parametrize("case", ["free", "FSDP", "PP", "recomputed", "open"])
def test_a_search_only_gets_better_and_ends_with_the_plan_above_its_bound(case: str) -> None:
    plan = searched(case)
    moments, step_s = plan.search_trace, plan.prediction.step_time_s
    assert [each.elapsed_s for each in moments] == sorted(each.elapsed_s for each in moments)
    for known in ([m.best_s for m in moments], [m.bound_s for m in moments]):
        numbers = [each for each in known if each is not None]
        assert numbers == sorted(numbers, reverse=True)
        assert None not in known[known.index(numbers[0]) :] if numbers else True
    assert moments[-1].fits_s == step_s
    assert moments[-1].doing == "the plan"
    assert 0 < moments[-1].bound_s <= step_s * (1 + 1e-9)  # type: ignore[operator]
    assert any(each.doing.startswith("lower") for each in moments)


def test_the_bound_is_that_of_the_exact_search() -> None:
    for case in ("free", "DDP"):
        plan = searched(case)
        assert plan.search_trace[-1].bound_s == pytest.approx(plan.search.bound_s, rel=1e-8)


def test_moments_are_no_part_of_a_plan_s_json() -> None:
    plan = planned("free")
    model, make_batch = build("gpt2")
    again = autopar.plan(model, CLUSTER, make_batch(0, batch=8))
    assert again.search_trace
    assert again.search_trace != plan.search_trace
    assert again.to_json() == plan.to_json()
    assert again == plan
    assert "elapsed" not in plan.to_json()
    read = Plan.from_json(plan.to_json())
    assert read.search_trace == ()
    with pytest.raises(InputError, match="no figure 'search': it was read from JSON"):
        read.figure("search")
    assert json.loads(read.to_json()) == json.loads(plan.to_json())


@pytest.mark.parametrize("case", ["free", "open"])
def test_the_figure_draws_the_moments(case: str) -> None:
    plan = searched(case)
    data: SearchChart = figure_data(plan, "search")
    assert data.elapsed_s == tuple(each.elapsed_s for each in plan.search_trace)
    assert data.step_s == plan.prediction.step_time_s
    figure, axes = plan.figure("search")
    scale = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
    across, up = (scale[text.split()[0]] for text in (axes.get_xlabel(), axes.get_ylabel()))
    rows = [data.best_s, data.fits_s, (data.step_s,)]
    rows += [data.bound_s] * data.is_bound_shown
    assert len(axes.lines) == len(rows)
    for line, row in zip(axes.lines, rows):
        x, y = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
        assert list(x * across) == pytest.approx(data.elapsed_s[-len(row) :])
        wanted = [math.nan if each is None else each for each in row]
        assert list(y * up) == pytest.approx(wanted, nan_ok=True)
    written = [each.get_text() for each in figure.findobj(Text)]
    assert data.title in written
    assert format_seconds(plan.prediction.step_time_s) in data.title
    assert any(text.startswith("lower bound, ") for text in written)
