"""Movement plans on real processes: equal to eager, and within the capacity that they were made
for, under a memory that refuses to exceed it."""

from __future__ import annotations

import copy
import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.base.errors import (
    ConstraintError,
    InputError,
    NonFiniteError,
    OptimizerError,
    PlanError,
    WorkerError,
)
from autopar.comm.transports.sockets import WHOLE_BYTES
from autopar.cost_models import Cluster
from autopar.ir.mesh import Mesh
from autopar.lowering.early import with_early_update
from autopar.lowering.pipeline import with_pipeline
from autopar.lowering.program import lower
from autopar.lowering.training import lower_training
from autopar.lowering.types import RankProgram
from autopar.movement.execution import Gather, Movement, ProgramStep
from autopar.movement.gaps import gaps_of, movement_plan
from autopar.movement.program import step_of_program
from autopar.movement.residency import least_capacity, least_traffic
from autopar.movement.verify import worst_case_bytes
from autopar.planning.releases import scatterable, with_scattered
from autopar.plans.document import Plan
from autopar.runtime.runners import start
from autopar.runtime.runners.local import LocalRunner
from autopar.runtime.state.optimizers import is_elementwise, optimizer_spec
from autopar.runtime.step.moving import mover_of
from autopar.sharding.strategy import unsplit
from tests.effort import EXHAUSTIVE
from tests.equality.case import Case
from tests.equality.drawn_plans import drawn_programs
from tests.models.zoo import build
from tests.movement.test_lifetimes import reducing
from tests.oracles import to_double
from tests.runtime.conftest import Groups
from tests.runtime.processes import process_steps, runner_of

DEVICE = Cluster.preset("cpu", nodes=1, devices_per_node=1).device
NEAR = 1.01
"""The tolerance of the memory model."""
NUM_DRAWN = 500 if EXHAUSTIVE else 8
OPTIMIZERS: list[Any] = [
    functools.partial(torch.optim.SGD, lr=0.05),
    functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    functools.partial(torch.optim.AdamW, lr=1e-3),
    functools.partial(torch.optim.Adam, lr=1e-3, amsgrad=True),
]


@functools.cache
def case_of(kind: str, num_steps: int = 5) -> Case:
    return Case(kind, num_joined=2, num_steps=num_steps)


@pytest.fixture(autouse=True)
def in_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models for one CPU train in a worker, whose memory can be capped."""
    monkeypatch.setattr(start, "is_own_process", lambda devices: False)


def step_of(case: Case, program: RankProgram, make: Any = None) -> ProgramStep:
    spec = optimizer_spec(make or case.optimizer, DEVICE)
    return step_of_program(program, DEVICE, optimizer=spec)


def between(step: ProgramStep, share: float) -> int:
    """A capacity: 0 is the least with which the step runs, 1 what it takes if nothing moves."""
    movable = step.movable()
    least = least_capacity(movable)
    return least + int(share * (movable.peak_bytes - least))


def moved(step: ProgramStep, capacity_bytes: int) -> Movement:
    movable = step.movable()
    plan = least_traffic(movable, capacity_bytes, relative_gap=0.01, time_limit_s=5.0).plan(movable)
    return step.execution(plan, capacity_bytes)


def capped(
    case: Case, groups: Groups, program: RankProgram, movement: tuple[Movement, ...], cap: int,
    make: Any = None,
) -> LocalRunner:  # fmt: skip
    """A runner whose device holds ``cap`` bytes besides the inputs, which the caller holds."""
    running = runner_of(
        groups(1), case.captured, program, case.model,
        optimizer=make or case.optimizer, movement=movement,
    )  # fmt: skip
    inputs = step_of(case, program).step.tensors
    size = sum(t.size_bytes for t in inputs if t.category == "inputs")
    running.group.call("cap_memory", cap - size)
    return running


@pytest.mark.sampled(5)
@pytest.mark.parametrize("share", [0.0, 0.4])
@pytest.mark.parametrize("kind", ["mlp", "gpt2", "bert", "resnet", "lstm"])
def test_training_within_a_capacity_equals_eager(kind: str, share: float, groups: Groups) -> None:
    case = case_of(kind)
    program = lower(unsplit(case.analysis))
    step = step_of(case, program)
    capacity = between(step, share)
    movement = moved(step, capacity)
    assert movement.plan.transfers
    running = capped(case, groups, program, (movement,), int(NEAR * capacity))
    case.compare(process_steps(running, case.captured, case.batches), 1)
    (copied,) = running.group.call("copied_bytes")
    sizes = {t.name: t.size_bytes for t in step.step.tensors}
    assert copied > 0.9 * len(case.batches) * movement.plan.moved_bytes(sizes)


def test_updates_that_a_schedule_places_run_at_the_end_and_equal_eager(groups: Groups) -> None:
    case = case_of("mlp")
    whole = lower(unsplit(case.analysis))
    stages = {block.name: int(number > 0) for number, block in enumerate(whole.blocks)}
    program = with_pipeline(whole, stages, reducing(updates=True, num_stages=2))
    step = step_of(case, program)
    capacity = between(step, 0.2)
    movement = moved(step, capacity)
    assert movement.plan.transfers
    running = capped(case, groups, program, (movement,), int(NEAR * capacity))
    case.compare(process_steps(running, case.captured, case.batches), 1)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_device_may_hold_less_than_all_parameters(num_processes: int, groups: Groups) -> None:
    """From the start on, if torch's optimizer is asked for by name; another one may read parameters
    when it is made, and has them there until the first step."""
    case = case_of("dlrm", num_steps=2)
    program = case.lowered(1, Mesh(("x",), (num_processes,)), 0)
    make = functools.partial(torch.optim.AdamW, lr=1e-3)
    step = step_of(case, program, make)
    movable = step.movable()
    plan = movement_plan(movable, gaps_of(movable))
    assert len(plan.starts_on_host) > 20  # parameters and states
    movement = (step.execution(plan, max(worst_case_bytes(plan, movable))),)
    sizes = {t.name: t.size_bytes for t in step.step.tensors if t.category == "parameters"}
    away = sum(size for name, size in sizes.items() if name in plan.starts_on_host)
    alone = runner_of(
        groups(num_processes), case.captured, program, case.model, optimizer=make
    )  # fmt: skip
    expected = process_steps(alone, case.captured, case.batches)
    for optimizer in (make, lambda parameters: make(parameters)):
        running = runner_of(
            groups(num_processes), case.captured, program, case.model,
            optimizer=optimizer, movement=movement,
        )  # fmt: skip
        held = running.group.call("state_bytes")
        assert all(size < sum(sizes.values()) - away / 2 for size in held) == (optimizer is make)
        got = process_steps(running, case.captured, case.batches)
        assert got.losses == expected.losses
        for name, weight in expected.weights.items():
            assert torch.equal(got.weights[name], weight), name
        assert min(running.group.call("state_bytes")) > away / 2  # weights were read


def test_without_movement_the_cap_is_refused(groups: Groups) -> None:
    case = case_of("gpt2")
    program = lower(unsplit(case.analysis))
    step = step_of(case, program)
    running = capped(case, groups, program, (), int(0.99 * step.movable().peak_bytes))
    with pytest.raises(WorkerError, match=r"over the cap of \d+: move or recompute more"):
        process_steps(running, case.captured, case.batches)


@pytest.mark.parametrize("number", range(NUM_DRAWN))
def test_drawn_models_optimizers_and_movements(number: int, groups: Groups) -> None:
    """Any set of gaps is a plan, and its worst case is a cap that it keeps: with micro-batches,
    whose gradients move in between, and with early updates."""
    kinds = ["mlp", "gpt2", "bert", "resnet", "lstm", "llama", "vit", "t5", "dlrm", "odd_llama"]
    generator = random.Random(number)
    case = case_of(generator.choice(kinds), num_steps=2)
    make = generator.choice(OPTIMIZERS)
    counts = [1] if case.kind == "dlrm" else [1, 2, 4]  # embedding bags need the whole batch
    num = generator.choice([num for num in counts if case.num_rows % num == 0])
    program = lower_training(case.unsplit(num), num)
    if generator.random() < 0.5:
        program = with_early_update(program, autopar.Update(when="early"), in_steps=False)
    step = step_of(case, program, make)
    movable = step.movable()
    share = generator.random()
    plan = movement_plan(movable, [g for g in gaps_of(movable) if generator.random() < share])
    capacity = max(worst_case_bytes(plan, movable))
    movement = step.execution(plan, capacity)
    running = capped(case, groups, program, (movement,), int(NEAR * capacity), make)
    got = process_steps(running, case.captured, case.batches)
    alone = runner_of(groups(1), case.captured, program, case.model, optimizer=make)
    expected = process_steps(alone, case.captured, case.batches)
    assert got.losses == expected.losses
    for name, weight in expected.weights.items():
        assert torch.equal(got.weights[name], weight), name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [1, 2, 9, 10])
def test_drawn_movements_of_drawn_programs_on_two_processes(number: int, groups: Groups) -> None:
    """Released and kept parameters, scattered and whole gradients, splits of all kinds: what moves
    changes no bit, and the worst case of any set of gaps is a cap that it keeps."""
    case = case_of("gpt2", num_steps=2)
    (drawn,) = drawn_programs(case, number, 1)
    program = with_scattered(drawn.program, scatterable(drawn.program))
    assert program.mesh.num_devices == 2
    step = step_of(case, program)
    movable, generator = step.movable(), random.Random(number)
    plan = movement_plan(movable, [g for g in gaps_of(movable) if generator.random() < 0.7])
    gathered = {v for place in step.places if isinstance(place, Gather) for v in place.values}
    moved_shards = {t.tensor for t in plan.transfers} & {
        name for name, (value, _) in step.stored.items() if value in gathered
    }
    assert moved_shards
    capacity = max(worst_case_bytes(plan, movable))
    running = runner_of(
        groups(2), case.captured, program, case.model, optimizer=case.optimizer,
        movement=(step.execution(plan, capacity),),
    )  # fmt: skip
    # The buffers of small sums are in a plan's count, not in its movable tensors.
    running.group.call("cap_memory", int(NEAR * capacity) + 2 * WHOLE_BYTES)
    got = process_steps(running, case.captured, case.batches)
    alone = runner_of(groups(2), case.captured, program, case.model, optimizer=case.optimizer)
    expected = process_steps(alone, case.captured, case.batches)
    assert got.losses == expected.losses
    for name, weight in expected.weights.items():
        assert torch.equal(got.weights[name], weight), name


# --- as users ask for it ------------------------------------------------------------------------
adamw = functools.partial(torch.optim.AdamW, lr=1e-3)


@functools.cache
def gpt2() -> tuple[Any, list[dict[str, torch.Tensor]]]:
    model, make_batch = build("gpt2")
    return model.double(), [to_double(make_batch(step)) for step in range(5)]


def compiled_for(num_devices: int = 1, **options: Any) -> Any:
    model, batches = gpt2()
    given = {
        "example_inputs": batches[0], "optimizer": adamw, "profile_limit_s": 0,
        "check_gradients": False, **options,
    }  # fmt: skip
    return autopar.compile(model, num_devices, **given)


def needed_bytes(compiled: Any) -> int:
    return sum(compiled.plan.prediction.memory_bytes.values())


def losses(compiled: Any) -> list[float]:
    return [compiled.train_step(**batch).item() for batch in gpt2()[1]]


class MeanSquare(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(x).square().mean()
        return loss


PLAIN: dict[str, Any] = {"recompute": "none", "update": "at_end", "num_microbatches": 1}
EARLY: dict[str, Any] = {"recompute": "none", "update": "early", "num_microbatches": 1}
WAYS: list[tuple[int, dict[str, Any]]] = [
    (1, {**PLAIN, "max_grad_norm": 0.5}),
    (1, {**PLAIN, "recompute": "full"}),
    (1, {**PLAIN, "num_microbatches": 2}),
    (2, {**PLAIN, "mesh": {"dp": 2}, "constraints": [autopar.Force("data_parallel")]}),
    (2, {**PLAIN, "mesh": {"dp": 2}, "constraints": [autopar.Force("zero3")],
         "reshard_after_forward": False}),
    (2, {**PLAIN, "num_stages": 2, "num_microbatches": 2, "schedule": "1f1b"}),
    (2, {**PLAIN, "num_stages": 2, "num_microbatches": 2, "schedule": "zb_h1"}),
    (4, {**PLAIN, "num_stages": 2, "num_microbatches": 2, "schedule": "chimera"}),
    (1, EARLY),
    (1, {**EARLY, "update": autopar.Update(when="early", clipping="last_norm"),
         "max_grad_norm": 0.5}),
    (1, {**EARLY, "update": autopar.Update(when="early", keep_gradients=True)}),
    (1, {**EARLY, "recompute": "full", "num_microbatches": 2}),
    (2, {**EARLY, "mesh": {"dp": 2}, "constraints": [autopar.Force("data_parallel")]}),
    (2, {**EARLY, "num_stages": 2, "num_microbatches": 2, "schedule": "1f1b"}),
]  # fmt: skip
SOME = [WAYS[i] for i in (0, 1, 3, 5, 8, 9, 11, 12)]
CHIMERA, TWO_PASSES = WAYS[7], WAYS[10]
LESS = 0.7
"""A share for plans that fit 0.85 by splitting more tensors, without moving any."""
ZERO3: dict[str, Any] = {
    "mesh": {"dp": 2}, "constraints": [autopar.Force("zero3")], "reshard_after_forward": True
}  # fmt: skip
SECOND_PASS: dict[str, Any] = {
    "update": autopar.Update(when="early", clipping="second_pass"), "max_grad_norm": 0.5
}  # fmt: skip
FORMS: dict[str, tuple[int, dict[str, Any]]] = {
    "released": (2, {**PLAIN, **ZERO3}),
    "released, early": (2, {**EARLY, **ZERO3}),
    "scattered": (2, {**PLAIN, **ZERO3, "reshard_after_forward": False, "num_microbatches": 2,
                      "reduce_every_microbatch": True}),
    "released and scattered": (
        2, {**PLAIN, **ZERO3, "num_microbatches": 2, "reduce_every_microbatch": True}
    ),
    "two passes": (1, {**EARLY, **SECOND_PASS}),
    "two passes, released": (2, {**EARLY, **ZERO3, **SECOND_PASS}),
    "all": (2, {**EARLY, **ZERO3, **SECOND_PASS, "recompute": "full", "num_microbatches": 2,
                "reduce_every_microbatch": True}),
}  # fmt: skip
"""What a plan repeats in a step, beside movement."""


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("reused_workers")
@pytest.mark.parametrize(
    ("num_devices", "options", "share"),
    [
        *((*way, LESS if way is CHIMERA else 0.85) for way in (WAYS if EXHAUSTIVE else SOME)),
        (*TWO_PASSES, 0.6),
    ],
    ids=str,
)
def test_offloading_fits_what_did_not_and_trains_the_same(
    num_devices: int, options: dict[str, Any], share: float, groups: Groups, tmp_path: Path
) -> None:
    whole = compiled_for(num_devices, **options)
    needed, expected = needed_bytes(whole), losses(whole)
    budget = autopar.MemoryBudget(int(share * needed))
    given = {**options, "constraints": [*options.get("constraints", ()), budget]}
    compiled = compiled_for(num_devices, offload=True, **given)
    assert compiled.plan.offload is not None
    assert needed_bytes(compiled) <= budget.size_bytes
    assert "computation waits" in str(compiled.report())
    groups(num_devices).call("cap_memory", int(NEAR * budget.size_bytes))
    assert losses(compiled) == pytest.approx(expected, abs=1e-12)
    compiled.plan.to_json(tmp_path / "plan.json")
    running = {k: v for k, v in options.items() if k == "max_grad_norm"}
    replayed = compiled_for(num_devices, plan=tmp_path / "plan.json", **running)
    assert replayed.plan == compiled.plan
    assert losses(replayed) == pytest.approx(expected, abs=1e-12)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("reused_workers")
@pytest.mark.parametrize("form", FORMS)
def test_what_is_repeated_in_a_step_moves_too(form: str, groups: Groups) -> None:
    num_devices, options = FORMS[form]
    whole = compiled_for(num_devices, **options)
    budget = autopar.MemoryBudget(int(0.85 * needed_bytes(whole)))
    given = {**options, "constraints": [*options.get("constraints", ()), budget]}
    compiled = compiled_for(num_devices, offload=True, **given)
    program, chosen = compiled.program, compiled.plan
    assert chosen.offload is not None
    assert chosen.offload.moved_bytes > 0
    assert any(p.released for p in program.parameters) == ("released" in form or form == "all")
    assert any(p.scattered for p in program.parameters) == ("scattered" in form or form == "all")
    assert needed_bytes(compiled) <= budget.size_bytes
    assert "computation waits" in str(compiled.report())
    groups(num_devices).call("cap_memory", int(NEAR * budget.size_bytes))
    got = losses(compiled)
    expected, weights = eager_training(options.get("max_grad_norm"))
    assert got == pytest.approx(expected, abs=2e-6)
    state = compiled.full_state_dict()
    for name, weight in weights.items():
        torch.testing.assert_close(state[name], weight, rtol=0, atol=2e-6, msg=name)
    _, batches = gpt2()
    compiled.train_step(**batches[0])  # puts on the host what was read
    copied = min(groups(num_devices).call("copied_bytes"))
    compiled.train_step(**batches[0])
    copied = min(groups(num_devices).call("copied_bytes")) - copied
    assert copied == pytest.approx(chosen.offload.moved_bytes, rel=0.01)


@functools.cache
def eager_training(max_grad_norm: float | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of eager steps on the batches of `gpt2`."""
    model, batches = gpt2()
    model, found = copy.deepcopy(model), []
    optimizer = adamw(model.parameters())
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        found.append(loss.item())
    return found, {name: p.detach() for name, p in model.named_parameters()}


def test_updates_are_early_where_no_movement_at_the_end_fits() -> None:
    """Gradients of ten wide layers are in memory layer by layer instead of all at once."""
    layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh()) for _ in range(10)]
    model = MeanSquare(torch.nn.Sequential(*layers))
    needed = 10 * 256 * 256 * 4
    options: dict[str, Any] = {
        "example_inputs": (torch.zeros(4, 256),), "optimizer": adamw, "offload": True,
        "recompute": "none", "constraints": autopar.MemoryBudget(needed), "num_microbatches": 1,
    }  # fmt: skip
    cluster = Cluster.preset("cpu", nodes=1, devices_per_node=1)
    with pytest.raises(ConstraintError, match="Even if every tensor moves"):
        autopar.plan(model, cluster, update="at_end", **options)
    chosen = autopar.plan(model, cluster, **options)
    assert chosen.update.when == "early"
    assert chosen.offload is not None


ACCUMULATED: dict[str, tuple[int, float, dict[str, Any]]] = {
    "one device": (1, 0.35, {**EARLY, "num_microbatches": 4}),
    "one device, at the end": (1, 0.45, {**PLAIN, "num_microbatches": 4}),
    "bf16": (1, 0.3, {**EARLY, "num_microbatches": 4, "precision": "bf16"}),
    "two passes": (1, 0.35, {**EARLY, **SECOND_PASS, "num_microbatches": 4}),
    "data parallel": (
        2, 0.4, {**EARLY, "num_microbatches": 4, "mesh": {"dp": 2},
                 "constraints": [autopar.Force("data_parallel")]},
    ),
    "pipeline": (
        2, 0.4, {**EARLY, "num_stages": 2, "num_microbatches": 4, "schedule": "1f1b"}
    ),
}  # fmt: skip
"""Plans that accumulate gradients over micro-batches, with the share of their memory that is left
to them: so little that gradients move."""


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("reused_workers")
@pytest.mark.parametrize("form", ACCUMULATED)
def test_gradients_move_between_the_micro_batches_that_contribute(
    form: str, groups: Groups
) -> None:
    num_devices, share, options = ACCUMULATED[form]
    layers = [torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Tanh()) for _ in range(6)]
    torch.manual_seed(0)
    model, batch = MeanSquare(torch.nn.Sequential(*layers)), torch.randn(16, 128)
    given = {
        "example_inputs": (batch,), "optimizer": adamw, "profile_limit_s": 0,
        "check_gradients": False, **options,
    }  # fmt: skip
    whole = autopar.compile(copy.deepcopy(model), num_devices, **given)
    expected = [whole.train_step(batch).item() for _ in range(3)]
    weights = whole.full_state_dict()
    budget = autopar.MemoryBudget(int(share * needed_bytes(whole)))
    given["constraints"] = [*options.get("constraints", ()), budget]
    compiled = autopar.compile(copy.deepcopy(model), num_devices, offload=True, **given)
    assert compiled.plan.offload is not None
    away = {t.tensor for p in compiled.plan.offload.plans() for t in p.transfers}
    assert any(name.endswith(":gradient") for name in away)
    groups(num_devices).call("cap_memory", int(NEAR * budget.size_bytes))
    assert [compiled.train_step(batch).item() for _ in range(3)] == expected
    for name, weight in compiled.full_state_dict().items():
        assert torch.equal(weight, weights[name]), name


@pytest.fixture(scope="module")
def planned() -> Plan:
    model, batches = gpt2()
    cluster = Cluster.preset("cpu", nodes=1, devices_per_node=1)
    needed = sum(
        autopar.plan(
            model, cluster, batches[0], optimizer=adamw, **PLAIN
        ).prediction.memory_bytes.values()
    )
    return autopar.plan(
        model, cluster, batches[0], offload=True, optimizer=adamw,
        constraints=autopar.MemoryBudget(int(0.6 * needed)), **PLAIN,
    )  # fmt: skip


@pytest.mark.usefixtures("reused_workers")
def test_a_batch_of_other_shapes_is_refused(planned: Plan) -> None:
    _, steps = gpt2()
    compiled = compiled_for(plan=planned)
    with pytest.raises(InputError, match=r"With offloading.*drop_last=True"):
        compiled.train_step(**{name: x[:-1] for name, x in steps[0].items()})
    assert compiled.train_step(**steps[0]).isfinite()


@pytest.mark.usefixtures("reused_workers")
def test_state_is_read_and_loaded_between_steps(planned: Plan, tmp_path: Path) -> None:
    _, steps = gpt2()
    plain = compiled_for(**PLAIN)
    expected = [plain.train_step(**batch).item() for batch in steps[:2]]
    saved = {name: t.clone() for name, t in plain.full_state_dict().items()}
    expected += [plain.train_step(**batch).item() for batch in steps[2:]]

    compiled = compiled_for(plan=planned)
    got = [compiled.train_step(**batch).item() for batch in steps[:2]]
    for name, tensor in compiled.full_state_dict().items():
        assert torch.equal(tensor, saved[name]), name
    compiled.save(tmp_path / "checkpoint")
    got += [compiled.train_step(**batch).item() for batch in steps[2:]]
    assert got == expected
    compiled.load(tmp_path / "checkpoint")
    assert [compiled.train_step(**batch).item() for batch in steps[2:]] == expected[2:]

    state = compiled.full_state_dict()
    broken = {name: t.clone() for name, t in state.items()}
    broken["transformer.ln_f.weight"][0] = float("nan")
    compiled.load_state_dict(broken)
    with pytest.raises(NonFiniteError):
        compiled.train_step(**steps[0])
    compiled.load(tmp_path / "checkpoint")
    assert [compiled.train_step(**batch).item() for batch in steps[2:]] == expected[2:]


def test_an_impossible_capacity_names_the_least_possible() -> None:
    model, batches = gpt2()
    cluster = Cluster.preset("cpu", nodes=1, devices_per_node=1)
    with pytest.raises(ConstraintError, match=r"Even if every tensor moves .* ([\d,]+) bytes") as e:
        autopar.plan(
            model, cluster, batches[0], offload=True, constraints=autopar.MemoryBudget(10_000),
            optimizer=adamw, **PLAIN,
        )  # fmt: skip
    least = int(str(e.value).split("whenever it can, ")[1].split(" bytes")[0].replace(",", ""))
    for size, fits in ((least, True), (least - 1, False)):
        budget = autopar.MemoryBudget(size)
        options = {"offload": True, "constraints": budget, "optimizer": adamw, **PLAIN}
        if fits:
            assert autopar.plan(model, cluster, batches[0], **options).offload is not None
        else:
            with pytest.raises(ConstraintError):
                autopar.plan(model, cluster, batches[0], **options)


@pytest.mark.usefixtures("reused_workers")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["transfers"].pop(), "ends on the|next step would not find|on the host"),
        (lambda r: r["transfers"].insert(0, "to_host nothing after 0 before 2"), "no tensor of"),
        (lambda r: r["transfers"].insert(0, "away"), "is not a transfer"),
        (lambda r: r.update(num_ops=3), "the plan is for 3 operations"),
        (lambda r: r["starts_on_host"].clear(), "is not on the device|is on the device already|"
         "starts on the device"),
    ],
)  # fmt: skip
def test_a_plan_that_was_edited_is_refused(planned: Plan, change: Any, message: str) -> None:
    document = json.loads(planned.to_json())
    change(document["offload"]["ranks"][0])
    with pytest.raises(PlanError, match=message) as error:
        compiled_for(plan=Plan.from_json(json.dumps(document)))
    assert "$.offload.ranks[0]" in str(error.value)


def test_an_optimizer_that_combines_parameters_needs_a_plan_of_its_own() -> None:
    """A step of it updates all parameters, and the plan has an update for each."""

    class Combined(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return super().step(closure)

    parameter = torch.nn.Parameter(torch.zeros(2))
    assert not is_elementwise(Combined([parameter]))
    step = step_of(case_of("mlp"), lower(unsplit(case_of("mlp").analysis)), adamw)
    movement = moved(step, between(step, 0.0))
    with pytest.raises(OptimizerError, match=r"groups of parameters one after the other.*Combined"):
        mover_of(movement, torch.device("cpu"), {}, Combined([parameter]))


def test_gpus_offload_by_default_where_nothing_else_fits() -> None:
    model, batches = gpt2()
    gpu = Cluster.preset("h100-sxm", nodes=1, devices_per_node=1)
    cpu = Cluster.preset("cpu", nodes=1, devices_per_node=1)
    plan = functools.partial(
        autopar.plan, model, example_inputs=batches[0], optimizer=adamw, num_microbatches=1
    )
    roomy = plan(gpu)
    assert roomy.offload is None
    least = {"recompute": "full", "offload": False}
    needed = min(
        sum(plan(cluster, update=when, **least).prediction.memory_bytes.values())
        for cluster in (gpu, cpu)
        for when in ("early", "at_end")
    )
    budget = autopar.MemoryBudget(int(0.9 * needed))
    tight = plan(gpu, constraints=budget)
    assert tight.offload is not None
    assert sum(tight.prediction.memory_bytes.values()) <= budget.size_bytes
    for cluster, offload in ((gpu, False), (cpu, None)):
        with pytest.raises(ConstraintError, match="no strategy"):
            plan(cluster, constraints=budget, offload=offload)


def test_offload_is_true_or_false() -> None:
    with pytest.raises(InputError, match="offload is 'cpu'; it must be True, False or None"):
        compiled_for(offload="cpu")
