"""Every model under searched and known strategies equals eager PyTorch, in lockstep.

Each model and each strategy at least once; `test_drawn_plans` has thousands of other plans.
"""

from __future__ import annotations

import functools
import math

import pytest

from autopar.cost_models import Cluster
from autopar.planning.constraints import Constraint, Force
from autopar.planning.planner import Planned, make_planned
from autopar.planning.space import Space
from tests.equality.case import Case
from tests.models.zoo import MODELS, MORE_MODELS, UNEVEN_MODELS

STRATEGIES: dict[str, tuple[dict[str, int], list[Constraint]]] = {
    "searched on 2": ({"x": 2}, []),
    "searched on 2x2": ({"x": 2, "y": 2}, []),
    "data parallel on 2": ({"x": 2}, [Force("data_parallel")]),
    "data parallel on 2x2": ({"x": 2, "y": 2}, [Force("data_parallel")]),
    "zero3 on 2": ({"x": 2}, [Force("zero3")]),
    "zero3 on 4": ({"x": 4}, [Force("zero3")]),
    "tensor parallel on 2": ({"x": 2}, [Force("tensor_parallel")]),
    "tensor parallel on 4": ({"x": 4}, [Force("tensor_parallel")]),
    "data x tensor on 2x2": (
        {"x": 2, "y": 2},
        [Force("data_parallel", axis="x"), Force("tensor_parallel", axis="y")],
    ),
    "zero3 x tensor on 2x2": (
        {"x": 2, "y": 2},
        [Force("zero3", axis="x"), Force("tensor_parallel", axis="y")],
    ),
}


@functools.cache
def case_of(name: str) -> Case:
    return Case(name)


def planned(name: str, strategy: str) -> Planned:
    mesh, constraints = STRATEGIES[strategy]
    cluster = Cluster.preset("cpu", nodes=1, devices_per_node=math.prod(mesh.values()))
    captured = case_of(name).captured
    return make_planned(captured, cluster, Space(mesh=mesh), constraints=constraints)


def divides(name: str, strategy: str) -> bool:
    """Forced splits of the batch need a batch that divides."""
    return name not in UNEVEN_MODELS or not ("data" in strategy or "zero3" in strategy)


def pairs() -> list[tuple[str, str]]:
    """All for the first five models; one that is searched and one of two axes for the others."""
    found = [(name, strategy) for name in MODELS for strategy in STRATEGIES]
    for name in (*MORE_MODELS, *UNEVEN_MODELS):
        found += [(name, "searched on 2"), (name, "zero3 x tensor on 2x2")]
    return [pair for pair in found if divides(*pair)]


@pytest.mark.sampled(30)
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(name, strategy, marks=pytest.mark.xdist_group(f"known {name}"))
        for name, strategy in pairs()
    ],
)
def test_equals_eager(name: str, strategy: str) -> None:
    case_of(name).check(planned(name, strategy).program)
