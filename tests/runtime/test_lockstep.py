"""Random valid assignments of the zoo, in lockstep, against eager PyTorch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.frontend.capture import capture
from autopar.ir.mesh import Mesh
from autopar.sharding.strategy import Analysis, Strategy
from tests.models.zoo import MODELS, build
from tests.oracles import (
    NUM_STEPS,
    assert_same,
    lockstep_steps,
    random_assignment,
    reference_steps,
    state_of,
    to_double,
)

MESHES = {"2": Mesh(("a",), (2,)), "2x2": Mesh(("a", "b"), (2, 2))}
EXAMPLES_PER_MESH = 1
# transformers computes the loss in float32 whatever the model's dtype.
TOLERANCE = {"gpt2": 2e-6, "bert": 1e-9, "resnet": 1e-8, "mlp": 1e-9, "lstm": 1e-9}


@pytest.fixture(scope="module", params=list(MODELS))
def case(request: pytest.FixtureRequest):
    name = request.param
    model, make_batch = build(name)
    model = model.double()
    batches = [to_double(make_batch(seed)) for seed in range(NUM_STEPS)]
    captured = capture(model, batches[0])
    return (
        name,
        captured,
        Analysis(captured.graph),
        state_of(model),
        batches,
        reference_steps(model, batches),
    )


@pytest.mark.parametrize("mesh", list(MESHES))
@settings(max_examples=EXAMPLES_PER_MESH, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32))
def test_random_assignments_equal_eager(case, mesh, seed):
    name, captured, analysis, state, batches, expected = case
    strategy = Strategy(analysis, random_assignment(analysis, MESHES[mesh], seed))
    strategy.verify()
    got = lockstep_steps(strategy, captured, state, batches)
    assert_same(got, expected, tolerance=TOLERANCE[name])
