"""Pipelines on real processes equal eager PyTorch: messages, groups, updates and reductions.

That every model equals eager under every schedule and mesh is checked in lockstep
(`tests.equality`); here is what only processes show, once for some kinds of schedule and mesh.
``make exhaustive`` tries all models under all of them.
"""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.base.errors import InputError, PlanError, ScheduleError
from autopar.cost_models import Cluster
from autopar.ir.mesh import Mesh
from autopar.lowering.pipeline import with_pipeline
from autopar.lowering.stages import lower_staged_forward, stage_of_blocks, stages_from_cuts
from autopar.lowering.training import lower_training
from autopar.lowering.types import RankProgram
from autopar.planning.constraints import Constraint, Force
from autopar.planning.planner import make_planned
from autopar.planning.space import Space
from autopar.schedules import Action, Durations, Kind, Schedule, build, step, with_reductions
from tests.effort import EXHAUSTIVE
from tests.equality.case import ALONE, Case
from tests.models.zoo import gpt2
from tests.runtime.conftest import Groups
from tests.runtime.processes import process_steps, runner_of

# Name, stages, micro-batches, options: on two devices.
ON_2: list[tuple[str, int, int, dict[str, Any]]] = [
    ("gpipe", 2, 4, {}),
    ("1f1b", 2, 4, {}),
    ("interleaved", 4, 4, {"num_devices": 2}),
    ("zb_h1", 2, 4, {}),
    ("zb_h2", 2, 4, {}),
    ("zb_v", 4, 4, {}),
    ("v_half", 4, 4, {}),
    ("v_min", 4, 4, {}),
    ("dualpipe", 2, 4, {}),
    ("chimera", 2, 4, {}),
    ("chimera", 2, 4, {"concatenation": "forward_doubling"}),
    ("chimera", 2, 2, {"concatenation": "backward_halving"}),
    ("chimera", 2, 4, {"concatenation": "merged"}),
    ("gems", 2, 4, {}),
    ("fast_forward", 4, 4, {"num_devices": 2}),
]
ON_4: list[tuple[str, int, int, dict[str, Any]]] = [
    ("gpipe", 4, 2, {}),
    ("1f1b", 4, 4, {}),
    ("zb_h1", 4, 4, {}),
    ("chimera", 4, 4, {}),
    ("chimera", 4, 4, {"num_pipelines": 4}),
    ("chimera", 4, 8, {"num_pipelines": 4, "concatenation": "merged"}),
    ("dualpipe", 4, 8, {}),
]
ON_4_TWICE: list[tuple[str, int, int, dict[str, Any]]] = [
    ("interleaved", 8, 4, {"num_devices": 4}),
    ("zb_v", 8, 4, {}),
    ("v_half", 8, 4, {}),
    ("v_min", 8, 4, {}),
    ("fast_forward", 8, 4, {"num_devices": 4}),
]


@functools.cache
def case_of(name: str) -> Case:
    if name == "gpt2 of 8 layers":
        return Case("gpt2", lambda: gpt2(8), num_joined=2)
    return Case(name, num_joined=2)


def check(case: Case, groups: Groups, program: RankProgram) -> None:
    """Train it on real processes."""
    runner = runner_of(
        groups(program.num_ranks), case.captured, program, case.model, optimizer=case.optimizer
    )
    got = process_steps(runner, case.captured, case.batches)
    case.compare(got, program.num_microbatches)


def check_schedule(
    case: Case, groups: Groups, schedule: Schedule, mesh: Mesh = ALONE, seed: int = 0
) -> None:
    program = case.lowered(schedule.shape.num_microbatches, mesh, seed)
    check(case, groups, case.piped(program, schedule))


ALL_MODELS = ("gpt2", "bert", "llama", "t5", "resnet")
USUAL_ON_2 = {"t5": "1f1b", "resnet": "chimera"}
"""Of other models than GPT-2: values of two kinds that cross stages, and shared statistics."""
USUAL_ON_4 = ("1f1b", "chimera 4", "chimera 4 merged", "interleaved 4", "zb_v", "fast_forward 4")


def named(rows: list[tuple[str, int, int, dict[str, Any]]]) -> dict[str, Any]:
    return {" ".join([row[0], *map(str, row[3].values())]): row for row in rows}


def pairs_on_2() -> list[Any]:
    return [
        pytest.param(model, *row, id=f"{model} {name}")
        for model in ALL_MODELS
        for name, row in named(ON_2).items()
        if EXHAUSTIVE or model == "gpt2" or USUAL_ON_2.get(model) == name
    ]


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("name", "schedule", "num_stages", "num", "options"), pairs_on_2())
def test_every_schedule_on_two_devices(
    name: str, schedule: str, num_stages: int, num: int, options: dict[str, Any], groups: Groups
) -> None:
    made = build(schedule, num_stages=num_stages, num_microbatches=num, **options)
    check_schedule(case_of(name), groups, made)


def pairs_on_4() -> list[Any]:
    return [
        pytest.param(model, *row, id=f"{model} {name}")
        for model in ("gpt2 of 8 layers", "t5")
        for name, row in named(ON_4 + ON_4_TWICE).items()
        if EXHAUSTIVE or (model != "t5" and name in USUAL_ON_4)
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "schedule", "num_stages", "num", "options"), pairs_on_4())
def test_schedules_on_four_devices(
    name: str, schedule: str, num_stages: int, num: int, options: dict[str, Any], groups: Groups
) -> None:
    made = build(schedule, num_stages=num_stages, num_microbatches=num, **options)
    check_schedule(case_of(name), groups, made)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "chimera"] if EXHAUSTIVE else ["chimera"])
@pytest.mark.parametrize("name", ALL_MODELS if EXHAUSTIVE else ["gpt2", "t5"])
def test_drawn_meshes_inside_stages(name: str, schedule: str, groups: Groups) -> None:
    """Two stages of two processes each; ResNet with the whole batch, whose statistics it needs."""
    if name == "resnet" and schedule == "chimera":
        pytest.skip("two micro-batches at least, and each shard would have its own statistics")
    num = 1 if name == "resnet" else 2
    made = build(schedule, num_stages=2, num_microbatches=num)
    for seed in range(4 if EXHAUSTIVE else 2):
        try:
            check_schedule(case_of(name), groups, made, Mesh(("x",), (2,)), seed)
        except PlanError as error:
            if "micro-batches leaves" not in str(error):
                raise


INSIDE: dict[str, list[Constraint]] = {
    "data": [Force("data_parallel")],
    "tensor": [Force("tensor_parallel")],
    "zero3": [Force("zero3")],
}


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"] if EXHAUSTIVE else ["zb_h1"])
@pytest.mark.parametrize("inside", list(INSIDE))
@pytest.mark.parametrize("name", ["gpt2", "t5", "llama"] if EXHAUSTIVE else ["gpt2"])
def test_known_strategies_inside_stages(
    name: str, inside: str, schedule: str, groups: Groups
) -> None:
    case = case_of(name)
    program = planned_program(name, inside, (2,))
    made = build(schedule, num_stages=2, num_microbatches=2)
    stages = stage_of_blocks(case.stages(2), case.captured.graph)
    check(case, groups, with_pipeline(program, stages, made))


@functools.cache
def planned_program(name: str, inside: str, sizes: tuple[int, ...]) -> RankProgram:
    constraints = {
        **INSIDE,
        "data x tensor": [
            Force("data_parallel", axis="x"), Force("tensor_parallel", axis="y"),
        ],
    }  # fmt: skip
    cluster = Cluster.preset("cpu", nodes=1, devices_per_node=math.prod(sizes))
    mesh = dict(zip(("x", "y"), sizes))
    planned = make_planned(
        case_of(name).captured,
        cluster,
        Space(mesh=mesh, num_microbatches=2),
        constraints=constraints[inside],
    )
    return planned.program


@pytest.mark.parametrize("schedule", ["chimera", "1f1b"])
def test_schedules_with_reductions_of_their_own(schedule: str, groups: Groups) -> None:
    durations = Durations(F=1.0, I=1.0, W=1.0, G=0.5)
    made = with_reductions(build(schedule, num_stages=2, num_microbatches=4), durations)
    check_schedule(case_of("gpt2"), groups, made)


def test_one_device_runs_schedules_of_layers(groups: Groups) -> None:
    """Reverse-first-k on data-parallel processes: no pipeline, gradients in the plan's order."""
    case = case_of("gpt2")
    made = build("reverse_first_k", num_stages=4, num_microbatches=2, k=2, reduces=False)
    made = with_reductions(made, Durations(F=1.0, I=1.0, W=1.0, G=0.5))
    stages = stage_of_blocks(case.stages(4), case.captured.graph)
    program = with_pipeline(planned_program("gpt2", "data", (2,)), stages, made)
    assert program.num_ranks == 2
    check(case, groups, program)


@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet"])
def test_forward_passes_find_the_parameters(name: str, groups: Groups) -> None:
    case = case_of(name)
    strategy = case.strategy(1, ALONE, 0)
    made = build("1f1b", num_stages=2, num_microbatches=1)
    program = lower_training(strategy, pipeline=(case.stages(2), made))
    runner = runner_of(groups(2), case.captured, program, case.model, optimizer=case.optimizer)
    batch = case.batches[0]
    tensors = case.captured.signature.flatten((), batch)
    runner.set_forward_program(0, lower_staged_forward(strategy, program))
    got = runner.forward(0, tensors)
    expected = copy.deepcopy(case.model)(**batch)
    wanted = [v for v in torch.utils._pytree.tree_leaves(dict(expected)) if v is not None]
    assert len(got) == len(wanted)
    for ours, theirs in zip(got, wanted):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=case.tolerance)


# --- what is refused ---------------------------------------------------------------------------
def test_replicas_of_other_buffers_are_refused() -> None:
    """A cumulative average has no momentum: a batch's weight depends on the number before it."""
    case = case_of("resnet")
    made = build("chimera", num_stages=2, num_microbatches=2)
    program = case.lowered(2, ALONE, 0)
    buffers = tuple(replace(buffer, factor=None) for buffer in program.buffers)
    stages = stage_of_blocks(case.stages(2), case.captured.graph)
    with pytest.raises(PlanError, match=r"buffer .*running_mean.* 2 replicas, .*momentum"):
        with_pipeline(replace(program, buffers=buffers), stages, made)


def test_other_micro_batches_are_refused() -> None:
    case = case_of("gpt2")
    stages = stage_of_blocks(case.stages(2), case.captured.graph)
    made = build("1f1b", num_stages=2, num_microbatches=4)
    with pytest.raises(PlanError, match="pass num_microbatches=4"):
        with_pipeline(case.lowered(2, ALONE, 0), stages, made)


def test_weight_gradients_of_the_last_step_are_refused() -> None:
    case = case_of("gpt2")
    made = build("multi_stream", num_stages=2, num_microbatches=1, placement={1: 2})
    with pytest.raises(PlanError, match=r"1W0@side~1 computes gradients of the last training step"):
        with_pipeline(
            case.lowered(1, ALONE, 0), stage_of_blocks(case.stages(2), case.captured.graph), made
        )


def test_late_updates_of_several_pipeline_devices_are_refused() -> None:
    case = case_of("gpt2")
    made = build("1f1b", num_stages=2, num_microbatches=2)
    late = tuple(
        (step(Action(device, Kind.U), lag=1), *row) for device, row in enumerate(made.devices)
    )
    late_made = replace(made, shape=replace(made.shape, updates=True), devices=late)
    with pytest.raises(PlanError, match=r"0U~1 updates weights with the last .* several pipeline"):
        with_pipeline(
            case.lowered(2, ALONE, 0),
            stage_of_blocks(case.stages(2), case.captured.graph),
            late_made,
        )


def test_cuts_name_blocks_or_modules() -> None:
    graph = case_of("gpt2").captured.graph
    stages = stages_from_cuts(graph, ["transformer.h.1"])
    assert stages.first_blocks == ("transformer", "transformer.h.1")
    assert stage_of_blocks(stages, graph)["transformer+lm_head"] == 1
    with pytest.raises(InputError, match=r"'nothing', .* can begin at 'transformer.h.0'"):
        stages_from_cuts(graph, ["nothing"])
    with pytest.raises(InputError, match="each must begin behind the one before"):
        stages_from_cuts(graph, ["transformer.h.1", "transformer.h.0"])
    with pytest.raises(PlanError, match="2 stages, but the graph is cut into 3"):
        lower_training(
            case_of("gpt2").strategy(2, ALONE, 0), 2,
            pipeline=(case_of("gpt2").stages(3), build("1f1b", num_stages=2, num_microbatches=2)),
        )  # fmt: skip


def test_a_broken_schedule_names_the_step() -> None:
    case = case_of("gpt2")
    made = build("1f1b", num_stages=2, num_microbatches=2)
    broken = Schedule(
        name=made.name, shape=made.shape, devices=(made.devices[0][:-1], made.devices[1])
    )
    with pytest.raises(ScheduleError, match="missing"):
        with_pipeline(
            case.lowered(2, ALONE, 0), stage_of_blocks(case.stages(2), case.captured.graph), broken
        )
