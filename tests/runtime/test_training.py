"""Training on real processes equals eager PyTorch: five models, one and two mesh axes."""

from __future__ import annotations

import functools

import pytest
from autopar.cost_models import Cluster

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
KNOWN: dict[str, tuple[dict[str, int], list[Constraint]]] = {
    "data parallel on 2": ({"x": 2}, [Force("data_parallel")]),
    "zero3 on 4": ({"x": 4}, [Force("zero3")]),
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


SMALL = ("mlp", "lstm", "gpt2")  # quick to lower: these run on every mesh
RANDOM = [(name, mesh) for name in MODELS for mesh in MESHES if mesh in ("2", "2x2")]
RANDOM += [(name, mesh) for name in SMALL for mesh in ("2x1", "4")]
FORCED = [(name, "zero3 x tensor on 2x2") for name in MODELS]
FORCED += [(name, "data parallel on 2") for name in ("mlp", "gpt2", "resnet")]
FORCED += [(name, "zero3 on 4") for name in ("mlp", "lstm", "bert")]


@pytest.mark.parametrize(("name", "mesh"), RANDOM)
def test_a_random_assignment(name: str, mesh: str, groups: Groups) -> None:
    case = case_of(name)
    assignment = random_assignment(case.analysis, MESHES[mesh], seed=10)
    case.check(groups, Strategy(case.analysis, assignment))


@pytest.mark.parametrize(("name", "known"), FORCED)
def test_a_known_strategy(name: str, known: str, groups: Groups) -> None:
    case = case_of(name)
    mesh, constraints = KNOWN[known]
    num_devices = 2 if mesh == {"x": 2} else 4
    cluster = Cluster.preset("cpu", nodes=1, devices_per_node=num_devices)
    planned = make_planned(case.captured, cluster, mesh=mesh, constraints=constraints)
    case.check(groups, planned.strategy)
