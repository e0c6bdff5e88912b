"""Training on real processes equals eager PyTorch, on meshes of one and two axes.

Every model trains under a searched strategy, the known ones and drawn assignments: all of it for
the first five models, a part of it for the others. ``AUTOPAR_TEST_ASSIGNMENTS=20`` (``make
exhaustive``) runs all of it for all, with that many drawn assignments a model.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from autopar.cost_models import Cluster
from autopar.frontend.capture import capture
from autopar.ir.mesh import Mesh
from autopar.lowering import lower
from autopar.planning.constraints import Constraint, Force
from autopar.planning.planner import make_planned
from autopar.sharding.strategy import Analysis, Strategy
from tests.models.zoo import MODELS, MORE_MODELS, UNEVEN_MODELS, build, optimizer_of
from tests.oracles import (
    NUM_STEPS,
    assert_same,
    random_assignment,
    reference_steps,
    to_double,
)
from tests.runtime.conftest import Groups
from tests.runtime.processes import process_steps, runner_of

# transformers computes some losses and norms in float32 whatever the model's dtype.
TOLERANCE = {
    "gpt2": 2e-6, "resnet": 1e-8, "llama": 5e-6, "t5": 5e-6, "mixtral": 1e-4, "vit": 1e-7,
    "odd_gpt2": 2e-6, "odd_llama": 5e-6, "odd_vit": 1e-7, "inception_v3": 1e-7, "densenet": 1e-7,
    "mobilenet_v2": 1e-7,
}  # fmt: skip
# PyTorch's product of rows grouped by expert, which eager Mixtral uses, has no double precision.
SINGLE_PRECISION = {"mixtral"}
MESHES = {
    "2": Mesh(("a",), (2,)),
    "2x1": Mesh(("a", "b"), (2, 1)),
    "4": Mesh(("a",), (4,)),
    "2x2": Mesh(("a", "b"), (2, 2)),
}
ASSIGNMENTS = int(os.environ.get("AUTOPAR_TEST_ASSIGNMENTS", "0"))
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
        self.batches = [make_batch(seed) for seed in range(NUM_STEPS)]
        if name not in SINGLE_PRECISION:
            self.model = self.model.double()
            self.batches = [to_double(batch) for batch in self.batches]
        self.captured = capture(self.model, self.batches[0])
        self.analysis = Analysis(self.captured.graph)
        self.expected = reference_steps(self.model, self.batches, optimizer_of(name))

    def check(self, groups: Groups, strategy: Strategy) -> None:
        program = lower(strategy)
        group = groups(program.mesh.num_devices)
        runner = runner_of(
            group, self.captured, program, self.model, optimizer=optimizer_of(self.name)
        )
        got = process_steps(runner, self.captured, self.batches)
        assert_same(got, self.expected, tolerance=TOLERANCE.get(self.name, 1e-9))


@functools.cache
def case_of(name: str) -> Case:
    return Case(name)


def pairs(ours: Sequence[str], others: Sequence[str]) -> list[tuple[str, str]]:
    """Models with what they are tested on: ``ours`` for the first five, ``others`` for the rest."""
    found = [(name, x) for name in MODELS for x in ours]
    found += [(name, x) for name in MORE_MODELS for x in (ours if ASSIGNMENTS else others)]
    # A batch that does not divide cannot be forced apart.
    uneven = [x for x in (ours if ASSIGNMENTS else others) if "data" not in x and "zero3" not in x]
    return found + [(name, x) for name in UNEVEN_MODELS for x in uneven]


@pytest.mark.parametrize(("name", "mesh"), pairs(list(MESHES), ["2x2"]))
def test_random_assignments(name: str, mesh: str, groups: Groups) -> None:
    case = case_of(name)

    @settings(
        max_examples=math.ceil(ASSIGNMENTS / len(MESHES)) or (3 if name in MODELS else 1),
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # no seed is simpler than another
    )
    @given(seed=st.integers(0, 2**32))
    def check(seed: int) -> None:
        assignment = random_assignment(case.analysis, MESHES[mesh], seed)
        case.check(groups, Strategy(case.analysis, assignment))

    check()


@pytest.mark.parametrize(
    ("name", "strategy"), pairs(list(STRATEGIES), ["searched on 2", "zero3 x tensor on 2x2"])
)
def test_searched_and_known_strategies(name: str, strategy: str, groups: Groups) -> None:
    case = case_of(name)
    mesh, constraints = STRATEGIES[strategy]
    cluster = Cluster.preset("cpu", nodes=1, devices_per_node=math.prod(mesh.values()))
    planned = make_planned(case.captured, cluster, mesh=mesh, constraints=constraints)
    case.check(groups, planned.strategy)
