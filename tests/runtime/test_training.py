"""Training on real processes equals eager PyTorch: five models, one and two mesh axes."""

from __future__ import annotations

import functools
import math

import pytest
from autopar.cost_models import Cluster
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.capture import capture
from autopar.constraints import Constraint, Force
from autopar.lowering import lower
from autopar.mesh import Mesh
from autopar.planner import make_planned
from autopar.strategy import Analysis, Strategy
from tests.models.zoo import MODELS, build
from tests.oracles import (
    NUM_STEPS,
    assert_same,
    random_assignment,
    reference_steps,
    sgd,
    to_double,
)
from tests.runtime.conftest import Groups
from tests.runtime.processes import process_steps, runner_of

# transformers computes the loss in float32 whatever the model's dtype.
TOLERANCE = {"gpt2": 2e-6, "bert": 1e-9, "resnet": 1e-8, "mlp": 1e-9, "lstm": 1e-9}
MESHES = {
    "2": Mesh(("a",), (2,)),
    "2x1": Mesh(("a", "b"), (2, 1)),
    "4": Mesh(("a",), (4,)),
    "2x2": Mesh(("a", "b"), (2, 2)),
}
EXAMPLES_PER_MESH = 3
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


class Case:
    def __init__(self, name: str) -> None:
        self.name = name
        self.model, make_batch = build(name)
        self.model = self.model.double()
        self.batches = [to_double(make_batch(seed)) for seed in range(NUM_STEPS)]
        self.captured = capture(self.model, self.batches[0])
        self.analysis = Analysis(self.captured.graph)
        self.expected = reference_steps(self.model, self.batches)

    def check(self, groups: Groups, strategy: Strategy) -> None:
        program = lower(strategy)
        group = groups(program.mesh.num_devices)
        runner = runner_of(group, self.captured, program, self.model, optimizer=sgd)
        got = process_steps(runner, self.captured, self.batches)
        assert_same(got, self.expected, tolerance=TOLERANCE[self.name])


@functools.cache
def case_of(name: str) -> Case:
    return Case(name)


@pytest.mark.parametrize("mesh", list(MESHES))
@pytest.mark.parametrize("name", list(MODELS))
@settings(max_examples=EXAMPLES_PER_MESH, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32))
def test_random_assignments(name: str, mesh: str, groups: Groups, seed: int) -> None:
    case = case_of(name)
    assignment = random_assignment(case.analysis, MESHES[mesh], seed)
    case.check(groups, Strategy(case.analysis, assignment))


@pytest.mark.parametrize("strategy", list(STRATEGIES))
@pytest.mark.parametrize("name", list(MODELS))
def test_searched_and_known_strategies(name: str, strategy: str, groups: Groups) -> None:
    case = case_of(name)
    mesh, constraints = STRATEGIES[strategy]
    cluster = Cluster.preset("cpu", nodes=1, devices_per_node=math.prod(mesh.values()))
    planned = make_planned(case.captured, cluster, mesh=mesh, constraints=constraints)
    case.check(groups, planned.strategy)
