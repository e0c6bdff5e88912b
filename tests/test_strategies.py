"""Searched and forced strategies of the zoo, in lockstep, against eager PyTorch."""

from __future__ import annotations

import pytest
from autopar.cost_models import Cluster

from autopar.capture import capture
from autopar.constraints import Constraint, Force
from autopar.planner import make_planned
from tests.models.zoo import MODELS, build
from tests.oracles import (
    NUM_STEPS,
    assert_same,
    lockstep_steps,
    reference_steps,
    state_of,
    to_double,
)

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
TOLERANCE = {"gpt2": 2e-6, "bert": 1e-9, "resnet": 1e-8, "mlp": 1e-9, "lstm": 1e-9}


@pytest.fixture(scope="module", params=list(MODELS))
def case(request: pytest.FixtureRequest):
    model, make_batch = build(request.param)
    model = model.double()
    batches = [to_double(make_batch(seed)) for seed in range(NUM_STEPS)]
    captured = capture(model, batches[0])
    expected = reference_steps(model, batches)
    return request.param, captured, state_of(model), batches, expected


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_strategy_equals_eager(case, strategy):
    name, captured, state, batches, expected = case
    mesh, constraints = STRATEGIES[strategy]
    devices = 1
    for size in mesh.values():
        devices *= size
    cluster = Cluster.preset("cpu", nodes=1, devices_per_node=devices)
    planned = make_planned(captured, cluster, mesh=mesh, constraints=constraints)
    got = lockstep_steps(planned.strategy, captured, state, batches)
    assert_same(got, expected, tolerance=TOLERANCE[name])
