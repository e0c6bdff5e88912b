"""Lifetimes of programs: nothing moved, they peak where the count of a program's memory does."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar import schedules
from autopar.base.errors import MovementError
from autopar.cost_models import Cluster
from autopar.cost_models.update import FUSED_ADAMW
from autopar.frontend.capture import capture
from autopar.ir.update import Clipping, Update
from autopar.lowering.early import with_early_update
from autopar.lowering.pipeline import with_pipeline
from autopar.lowering.program import lower
from autopar.memory.program import program_memory
from autopar.movement.lifetimes import Lifetime, StepLifetimes
from autopar.movement.program import lifetimes_of, step_of_program
from autopar.movement.residency import least_capacity, least_traffic
from autopar.movement.simulate import HostLink, simulate
from autopar.movement.single_ops import single_op_blocks
from autopar.movement.verify import verify
from autopar.planning.releases import with_released, with_scattered
from autopar.schedules.action import Action, Kind
from autopar.schedules.schedule import PipelineShape, Schedule, step
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


@pytest.mark.parametrize("name", ["mlp", "gpt2", "resnet", "lstm"])
@pytest.mark.parametrize("keeps", [False, True])
def test_early_updates_release_gradients_where_the_program_does(name: str, keeps: bool):
    update = Update(when="early", keep_gradients=keeps)
    program = with_early_update(lower(unsplit(analysis_of(name))), update, in_steps=False)
    found = step_of_program(program, DEVICE, optimizer=FUSED_ADAMW)
    assert found.movable().peak_bytes == counted(program)


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
        none = frozenset[int]()
        program = with_scattered(with_released(drawn.program, none), none)
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


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_planned_movement_keeps_programs_within_caps_at_any_speed(name: str):
    """From the least capacity to the peak, below which tensors move and above which none does."""
    analysis = analysis_of(name)
    step = lifetimes(lower(unsplit(analysis), blocks=single_op_blocks(analysis)))
    least, peak = least_capacity(step), step.peak_bytes
    draw = random.Random(name)
    moved = []
    for quarter in range(5):
        capacity = least + (peak - least) * quarter // 4
        found = least_traffic(step, capacity, relative_gap=0.01)
        assert found.moved_bytes <= 1.01 * found.bound_bytes
        moved.append(found.moved_bytes)
        plan = found.plan(step)
        verify(plan, step, capacity)
        for _ in range(5):
            times = [draw.uniform(0, 2) for _ in step.ops]
            link = HostLink(bandwidth_bytes_per_s=10 ** draw.uniform(2, 7))
            timeline = simulate(plan, step, times, link)
            assert timeline.peak_bytes <= capacity
            assert timeline.busy_s("compute") == pytest.approx(sum(times))
    assert sorted(moved, reverse=True) == moved
    assert moved[0] > moved[-1] == 0
    with pytest.raises(MovementError, match=f"at least {least} bytes"):
        least_traffic(step, least - 1)


class Masked(nn.Module):
    """Dropout by a mask that the model draws itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        return self.layers[1](x * torch.empty_like(x).bernoulli_(0.5)).sum()


def test_a_draw_stays_with_the_tensor_that_it_is_written_over():
    """Alone it would be an op of an input with a gradient, and has no derivative."""
    analysis = Analysis(capture(Masked(), (torch.randn(4, 8),)).graph)
    draws = {op.index for op in analysis.graph.ops if "bernoulli" in op.target_name}
    blocks = single_op_blocks(analysis)
    assert draws
    assert not draws.intersection(block.start for block in blocks)
    program = lower(unsplit(analysis), blocks=blocks)
    assert lifetimes(program).peak_bytes <= counted(program)


def test_parameters_that_are_released_are_refused():
    drawn = (each.program for each in drawn_programs(Case("gpt2", num_joined=2), 0, 4))
    program = next(each for each in drawn if any(p.released for p in each.parameters))
    with pytest.raises(MovementError, match="reshard_after_forward=False"):
        lifetimes(program)


def test_gradients_that_are_reduced_in_every_micro_batch_are_refused():
    program = lower(unsplit(analysis_of("mlp")))
    program = with_scattered(program, frozenset({program.parameters[0].value}))
    with pytest.raises(MovementError, match="reduce_every_microbatch=False"):
        lifetimes(program)


def test_updates_that_no_plan_covers_are_refused():
    program = lower(unsplit(analysis_of("mlp")))
    with pytest.raises(MovementError, match="in_steps=False"):
        lifetimes(with_early_update(program))
    twice = Update(when="early", clipping=Clipping.SECOND_PASS)
    with pytest.raises(MovementError, match="clipping='last_norm'"):
        lifetimes(with_early_update(program, twice, in_steps=False))
    schedule = schedules.build("conventional", num_stages=1, num_microbatches=1, reduces=True)
    late = with_pipeline(program, {block.name: 0 for block in program.blocks}, schedule)
    with pytest.raises(MovementError, match="the step before"):
        lifetimes(late)


@pytest.mark.parametrize("is_joint", [False, True])
def test_scheduled_updates_run_in_their_place_unless_the_optimizer_is_joint(is_joint: bool):
    program = lower(unsplit(analysis_of("mlp")))
    names = [block.name for block in program.blocks]
    shape = PipelineShape(num_microbatches=1, placement=((0, 0),), reduces=True, updates=True)
    forward = [step(Action(stage, Kind.F, 0)) for stage in (0, 1)]
    backward = [
        step(Action(stage, kind, None if kind.per_stage else 0))
        for stage in (1, 0)
        for kind in (Kind.I, Kind.W, Kind.G, Kind.U)
    ]
    schedule = Schedule(name="drawn", shape=shape, devices=((*forward, *backward),))
    stages = {name: int(number > 0) for number, name in enumerate(names)}
    program = with_pipeline(program, stages, schedule)
    optimizer = replace(FUSED_ADAMW, is_joint=is_joint)
    ops = lifetimes_of(program, DEVICE, optimizer=optimizer).ops
    updates = [op for op, name in enumerate(ops) if name.startswith("update")]
    if is_joint:
        assert updates == [len(ops) - 1]
    else:
        assert len(updates) == 6
        assert updates[0] < max(op for op, name in enumerate(ops) if name.startswith("W"))


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
