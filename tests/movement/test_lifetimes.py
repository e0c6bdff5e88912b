"""Lifetimes of programs: nothing moved, they peak where the count of a program's memory does."""

from __future__ import annotations

import pytest

from autopar.base.errors import MovementError
from autopar.cost_models import Cluster
from autopar.cost_models.update import FUSED_ADAMW
from autopar.frontend.capture import capture
from autopar.lowering.program import lower
from autopar.memory.program import program_memory
from autopar.movement.lifetimes import Lifetime, StepLifetimes
from autopar.movement.program import lifetimes_of, single_op_blocks
from autopar.sharding.strategy import Analysis, unsplit
from tests.equality.case import Case
from tests.equality.drawn_plans import drawn_programs
from tests.models.zoo import build

DEVICE = Cluster.preset("a100-80", nodes=1, devices_per_node=1).device


def analysis_of(name: str) -> Analysis:
    model, make_batch = build(name)
    return Analysis(capture(model, make_batch(0)).graph)


def lifetimes(program, pipeline_rank: int = 0) -> StepLifetimes:
    return lifetimes_of(program, DEVICE, optimizer=FUSED_ADAMW, pipeline_rank=pipeline_rank)


def counted(program) -> int:
    return program_memory(program, DEVICE, optimizer=FUSED_ADAMW).peak_bytes


@pytest.mark.parametrize("name", ["mlp", "gpt2", "resnet", "lstm"])
def test_the_peak_of_the_lifetimes_is_that_of_the_program(name: str):
    program = lower(unsplit(analysis_of(name)))
    assert lifetimes(program).peak_bytes == counted(program)


@pytest.mark.parametrize("name", ["mlp", "gpt2", "resnet"])
def test_single_ops_peak_where_their_program_does(name: str):
    """Less where outputs are views, which the program counts as tensors of their own."""
    analysis = analysis_of(name)
    program = lower(unsplit(analysis), blocks=single_op_blocks(analysis))
    found = lifetimes(program)
    assert 0.97 * counted(program) <= found.peak_bytes <= counted(program)


@pytest.mark.parametrize(("name", "number"), [("gpt2", 0), ("gpt2", 1), ("mlp", 1)])
def test_drawn_plans_peak_where_their_programs_do(name: str, number: int):
    """On meshes, the program's count has the transports' buffers for joined tensors too."""
    for drawn in drawn_programs(Case(name, num_joined=2), number, 4):
        program = drawn.program
        peak = max(
            lifetimes(program, pipeline_rank=rank).peak_bytes
            for rank in range(program.pipeline.num_devices)
        )
        near = 0.002 if program.mesh.num_devices == 1 else 0.05
        assert peak == pytest.approx(counted(program), rel=near), drawn.text


def test_a_perceptron_has_the_lifetimes_of_backpropagation():
    """An activation is used by two forwards and by the gradients around it; a weight by its
    forward, by the gradient of its input, and by its update, which writes it."""
    analysis = analysis_of("mlp")
    step = lifetimes(lower(unsplit(analysis), blocks=single_op_blocks(analysis)))
    kinds = {t.name: [step.ops[op].split()[0] for op in t.uses] for t in step.tensors}
    writes = {t.name: [step.ops[op].split()[0] for op in t.writes] for t in step.tensors}
    weights = [t.name for t in step.tensors if t.category == "parameters" and "weight" in t.name]
    assert len(weights) == 3
    for name in weights[1:]:
        assert sorted(kinds[name]) == ["F", "I", "update"]
    assert kinds[weights[0]] == ["F", "update"]
    for name in weights:
        assert writes[name] == ["update"]
    states = [t for t in step.tensors if t.category == "optimizer_state"]
    assert len(states) == 2 * 6
    for state in states:
        assert state.persistent
        assert kinds[state.name] == writes[state.name] == ["update"]
    gradients = [t for t in step.tensors if t.category == "gradients"]
    assert [kinds[t.name] for t in gradients] == [["W", "update"]] * 6


def test_lifetimes_that_make_no_sense_are_refused():
    good = {"name": "x", "category": "a", "size_bytes": 1, "uses": (0, 2), "writes": (0,)}
    Lifetime(**good)
    for change, message in [
        ({"name": "a b"}, "one word"),
        ({"size_bytes": -1}, "negative"),
        ({"uses": (2, 0)}, "must ascend"),
        ({"writes": (1,)}, "must be among uses"),
        ({"writes": (2,)}, "persistent=True"),
    ]:
        with pytest.raises(MovementError, match=message):
            Lifetime(**{**good, **change})
    with pytest.raises(MovementError, match="must be in"):
        StepLifetimes(ops=("a",), tensors=(Lifetime(**good),), workspace_bytes=(0,))
