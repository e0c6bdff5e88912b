"""Lifetimes of programs: nothing moved, they peak where the count of a program's memory does."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from autopar import schedules
from autopar.base.errors import MovementError
from autopar.cost_models import Cluster
from autopar.cost_models.update import FUSED_ADAMW
from autopar.frontend.capture import capture
from autopar.ir.update import Update
from autopar.lowering.early import with_early_update
from autopar.lowering.pipeline import with_pipeline
from autopar.lowering.program import lower
from autopar.memory.program import device_memories, program_memory
from autopar.movement.execution import Gather, Run
from autopar.movement.lifetimes import Lifetime, StepLifetimes
from autopar.movement.program import lifetimes_of, step_of_program
from autopar.movement.residency import least_capacity, least_traffic
from autopar.movement.simulate import HostLink, simulate
from autopar.movement.single_ops import single_op_blocks
from autopar.movement.verify import verify
from autopar.planning.releases import scatterable, with_released, with_scattered
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


@pytest.mark.parametrize(
    ("name", "number"), [("gpt2", 0), ("gpt2", 1), ("gpt2", 9), ("mlp", 1), ("mlp", 2), ("mlp", 8)]
)
def test_drawn_plans_peak_where_their_programs_do(name: str, number: int):
    """With parameters that are released after each pass, and gradients that are scattered in every
    micro-batch, or neither."""
    for drawn in drawn_programs(Case(name, num_joined=2), number, 4):
        none = frozenset[int]()
        kept = with_scattered(with_released(drawn.program, none), none)
        every = with_scattered(drawn.program, scatterable(drawn.program))
        for program in (kept, drawn.program, every):
            memories = device_memories(program, DEVICE, optimizer=FUSED_ADAMW)
            for rank, memory in enumerate(memories):
                peak = lifetimes(program, pipeline_rank=rank).peak_bytes
                near = 0.01 if program.mesh.num_devices == 1 else 0.05
                assert peak == pytest.approx(memory.peak_bytes, rel=near), drawn.text


def test_released_parameters_are_gathered_for_each_pass():
    """Forward and backward, where the derivative reads them; kept ones once."""
    (drawn,) = drawn_programs(Case("gpt2", num_joined=2), 10, 1)
    program = drawn.program
    everything = frozenset(p.value for p in program.parameters)
    found = (with_released(program, each) for each in (everything, frozenset[int]()))
    released, kept = (
        Counter(t.name.split(":")[0] for t in lifetimes(each).tensors if "gathered_" in t.name)
        for each in found
    )
    assert released.keys() == kept.keys()
    assert set(kept.values()) == {1}
    factors = [name for name in released if name.endswith(("c_attn.weight", "c_fc.weight"))]
    assert factors
    # Embeddings and additions have derivatives that do not read them.
    assert all(released[name] == 2 * program.num_microbatches for name in factors)
    assert released["gathered_transformer.wte.weight"] == program.num_microbatches


def test_shards_of_gathered_parameters_move_between_their_gathers():
    (drawn,) = drawn_programs(Case("gpt2", num_joined=2), 10, 1)
    program = drawn.program
    step = step_of_program(program, DEVICE, optimizer=FUSED_ADAMW)
    places = {t.name: [step.places[op] for op in t.uses] for t in step.movable().tensors}
    gathered = {name for name, met in places.items() if any(isinstance(p, Gather) for p in met)}
    shards = [t for t in step.movable().tensors if t.name in gathered and t.persistent]
    assert shards
    for shard in shards:
        assert shard.movable
        # A gather may be under way until the block for which it began.
        for place, following in pairwise(places[shard.name]):
            if isinstance(place, Gather):
                assert isinstance(following, Run)
                assert following.block == place.block


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


def test_gradients_scattered_in_every_micro_batch_are_summed_as_shards():
    for drawn in drawn_programs(Case("gpt2", num_joined=2), 9, 1):
        every = scatterable(drawn.program)
        program = with_scattered(drawn.program, every)
        names = {p.name for p in program.parameters if p.value in every}
        ops = lifetimes(program).ops
        assert names
        for name in names:
            assert ops.count(f"reduce {name}") == program.num_microbatches
            assert ops.count(f"sum {name}") >= program.num_microbatches - 1


def test_updates_that_no_plan_covers_are_refused():
    program = lower(unsplit(analysis_of("mlp")))
    with pytest.raises(MovementError, match="in_steps=False"):
        lifetimes(with_early_update(program))
    names = [block.name for block in program.blocks]
    schedule = schedules.build("conventional", num_stages=1, num_microbatches=1, reduces=True)
    late = with_pipeline(program, dict.fromkeys(names, 0), schedule)
    with pytest.raises(MovementError, match="takes the memory that offloading would save"):
        lifetimes(late)
    delayed = with_pipeline(program, dict.fromkeys(names, 0), reducing(updates=False, num_stages=1))
    with pytest.raises(MovementError, match=r"delays reductions.*update at the end"):
        lifetimes(with_early_update(delayed, in_steps=False))


def reducing(*, updates: bool, num_stages: int) -> Schedule:
    """A schedule of one device that reduces, and perhaps updates, stage by stage."""
    placement = (tuple(0 for _ in range(num_stages)),)
    shape = PipelineShape(num_microbatches=1, placement=placement, reduces=True, updates=updates)
    forward = [step(Action(stage, Kind.F, 0)) for stage in range(num_stages)]
    kinds = (Kind.I, Kind.W, Kind.G, Kind.U) if updates else (Kind.I, Kind.W, Kind.G)
    backward = [
        step(Action(stage, kind, None if kind.per_stage else 0))
        for stage in reversed(range(num_stages))
        for kind in kinds
    ]
    return Schedule(name="drawn", shape=shape, devices=((*forward, *backward),))


@pytest.mark.parametrize("is_joint", [False, True])
def test_scheduled_updates_wait_for_the_end_of_the_step(is_joint: bool):
    """As the runtime runs them beside a movement plan: one by one, or as one."""
    program = lower(unsplit(analysis_of("mlp")))
    names = [block.name for block in program.blocks]
    stages = {name: int(number > 0) for number, name in enumerate(names)}
    program = with_pipeline(program, stages, reducing(updates=True, num_stages=2))
    optimizer = replace(FUSED_ADAMW, is_joint=is_joint)
    ops = lifetimes_of(program, DEVICE, optimizer=optimizer).ops
    updates = [op for op, name in enumerate(ops) if name.startswith("update")]
    assert len(updates) == (1 if is_joint else 6)
    assert updates == [*range(len(ops) - len(updates), len(ops))]


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
