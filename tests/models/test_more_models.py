"""Further models: nearly all of their work can be split, and any valid way gives eager's results.

Random valid assignments run in lockstep and are compared with eager PyTorch in double precision:
losses, gradients, weights and buffers after two steps.
"""

from __future__ import annotations

import math
from functools import lru_cache

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from autopar.base.torch_private import FakeTensorMode
from autopar.frontend.capture import capture
from autopar.ir.graph import Graph, Op
from autopar.ir.mesh import Mesh
from autopar.rules.base import call_op
from autopar.sharding.strategy import Analysis, Strategy
from tests.models.zoo import MODELS, MORE_MODELS, build, optimizer_of
from tests.oracles import (
    assert_same,
    lockstep_steps,
    random_assignment,
    reference_steps,
    state_of,
    to_double,
)

NUM_STEPS = 2
MESHES = {"2": Mesh(("a",), (2,)), "2x2": Mesh(("a", "b"), (2, 2))}
SEEDS = {"2": [0], "2x2": [1]}
# transformers computes some losses and norms in float32 whatever the model's dtype.
TOLERANCE = {"llama": 5e-6, "t5": 5e-6, "mixtral": 1e-4}
# PyTorch's product of rows grouped by expert, which eager Mixtral uses, has no double precision.
SINGLE_PRECISION = {"mixtral"}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def flops_of_ops(graph: Graph) -> list[int]:
    """Floating-point operations of each op's forward, by torch's own counter on fake tensors."""
    counts = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = {v.index: torch.empty(v.shape, dtype=v.dtype) for v in graph.values}
        for op in graph.ops:
            args, kwargs = op.bind([fakes[i] for i in op.inputs])
            with FlopCounterMode(display=False) as counter:
                call_op(op, args, kwargs)
            counts.append(counter.get_total_flops() or uncounted_flops(op, graph))
    return counts


def uncounted_flops(op: Op, graph: Graph) -> int:
    """Products that torch's counter does not know: recurrent layers and grouped products."""
    shapes = [graph.values[i].shape for i in op.inputs]
    if op.target_name == "aten.lstm.input":
        return 2 * math.prod(shapes[0][:2]) * sum(math.prod(s) for s in shapes if len(s) == 2)
    if "grouped_mm" in op.target_name:
        return 2 * shapes[0][0] * math.prod(shapes[1][1:])
    return 0


@pytest.mark.parametrize("name", [*MODELS, *MORE_MODELS])
def test_share_of_flops_that_can_be_split(name, capsys):
    _, captured, _ = prepared(name)
    graph, analysis = captured.graph, Analysis(captured.graph)
    flops = flops_of_ops(graph)
    total = sum(flops)
    split = sum(
        count
        for count, space in zip(flops, analysis.spaces)
        if space is not None and space.splittable()
    )
    with capsys.disabled():
        print(f"\n{name}: {split / total:.2%} of {total:,} flops have a split choice")
    assert total > 0
    assert split >= 0.999 * total


@lru_cache
def prepared(name: str):
    """The model, its capture and its batches, in double precision where it can be."""
    model, make_batch = build(name)
    batches = [make_batch(seed) for seed in range(NUM_STEPS)]
    if name not in SINGLE_PRECISION:
        model, batches = model.double(), [to_double(batch) for batch in batches]
    return model, capture(model, batches[0]), batches


@pytest.fixture(scope="module", params=list(MORE_MODELS))
def case(request: pytest.FixtureRequest):
    name = request.param
    model, captured, batches = prepared(name)
    expected = reference_steps(model, batches, optimizer_of(name))
    return name, captured, Analysis(captured.graph), state_of(model), batches, expected


@pytest.mark.parametrize("mesh", list(MESHES))
def test_random_assignments_equal_eager(case, mesh):
    name, captured, analysis, state, batches, expected = case
    for seed in SEEDS[mesh]:
        strategy = Strategy(analysis, random_assignment(analysis, MESHES[mesh], seed))
        strategy.verify()
        with torch.random.fork_rng():
            got = lockstep_steps(strategy, captured, state, batches, optimizer_of(name))
        try:
            assert_same(got, expected, tolerance=TOLERANCE.get(name, 1e-7))
        except AssertionError as error:
            raise AssertionError(f"{name}, seed {seed}: {error}") from error
