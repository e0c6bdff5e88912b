"""Data parallelism whose reductions and updates last into the next step equals one process.

The schedules are those of layers on one device: a stage's gradients are reduced when its W is done
(in the order of reverse-first-k, where asked), and updated just before its next forward.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cost_models import Cluster
from autopar.frontend.capture import Captured, capture
from autopar.ir.stages import Stages
from autopar.lowering.pipeline import with_pipeline
from autopar.lowering.stages import stage_of_blocks, staged_blocks
from autopar.lowering.types import RankProgram
from autopar.passes.batch_norm import with_batch_norm
from autopar.planning.constraints import Constraint, Force
from autopar.planning.planner import make_planned
from autopar.planning.space import Space
from autopar.runtime.runners.local import LocalRunner
from autopar.schedules import Schedule, build
from tests.models.zoo import build as build_model
from tests.oracles import NUM_STEPS, assert_same, reference_steps, to_double
from tests.runtime.conftest import Groups
from tests.runtime.processes import process_steps, runner_of

TOLERANCE = {"gpt2": 2e-6, "resnet": 1e-8}  # GPT-2's loss is computed in float32
adam = functools.partial(torch.optim.AdamW, lr=1e-3)
sgd = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
decaying = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
SCHEDULES = {
    "conventional": functools.partial(build, "conventional", reduces=True),
    "reverse-first-2": functools.partial(build, "reverse_first_k", k=2),
    "reverse-first-all": functools.partial(build, "reverse_first_k", k=4),
}


class Case:
    """A model, its batches, and the programs of its strategies."""

    def __init__(self, name: str) -> None:
        self.name = name
        model, make_batch = build_model(name)
        self.model: nn.Module = model.double()
        self.batches = [to_double(make_batch(seed)) for seed in range(NUM_STEPS)]
        self.captured: Captured = capture(self.model, self.batches[0])

    @functools.cache  # noqa: B019  a case lives as long as the tests
    def lowered(self, strategy: str, num_microbatches: int) -> RankProgram:
        captured = self.captured
        if num_microbatches > 1:
            captured = with_batch_norm(captured, "local")
        constraints: list[Constraint] = [Force(strategy)]
        return make_planned(
            captured,
            Cluster.preset("cpu", nodes=1, devices_per_node=2),
            Space(mesh={"x": 2}, num_microbatches=num_microbatches),
            constraints=constraints,
        ).program

    def program(
        self, make: Callable[..., Schedule], strategy: str = "data_parallel", num: int = 1
    ) -> RankProgram:
        names = [block.name for block in staged_blocks(self.captured.graph)]
        num_stages = 4
        firsts = [names[len(names) * i // num_stages] for i in range(num_stages)]
        stages = stage_of_blocks(Stages(first_blocks=tuple(firsts)), self.captured.graph)
        made = make(num_stages=num_stages, num_microbatches=num)
        return with_pipeline(self.lowered(strategy, num), stages, made)

    def runner(self, groups: Groups, program: RankProgram, **options: Any) -> LocalRunner:
        return runner_of(groups(2), self.captured, program, self.model, **options)

    def check(self, groups: Groups, program: RankProgram, optimizer: Any, **options: Any) -> None:
        runner = self.runner(groups, program, optimizer=optimizer, **options)
        got = process_steps(runner, self.captured, self.batches)
        expected = reference_steps(self.model, self.batches, optimizer)
        assert_same(got, expected, tolerance=TOLERANCE[self.name])


@functools.cache
def case_of(name: str) -> Case:
    return Case(name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_late_updates_train_as_one_process(name: str, schedule: str, groups: Groups) -> None:
    """ResNet with the statistics of the whole batch; GPT-2's embedding is of two stages."""
    case = case_of(name)
    program = case.program(SCHEDULES[schedule])
    assert program.pipeline.shape.updates
    case.check(groups, program, adam)


@pytest.mark.parametrize("strategy", ["zero3", "tensor_parallel"])
def test_other_strategies_with_late_updates(strategy: str, groups: Groups) -> None:
    """Sharded parameters too: their next all-gather waits for their update."""
    case = case_of("gpt2")
    case.check(groups, case.program(SCHEDULES["reverse-first-2"], strategy), adam)


def test_micro_batches_with_late_updates(groups: Groups) -> None:
    case = case_of("gpt2")
    case.check(groups, case.program(SCHEDULES["reverse-first-2"], num=2), sgd)


def eager_losses(case: Case, make: Any, *, scheduler: Any = None, clip: float = 0.0) -> list[float]:
    model = copy.deepcopy(case.model)
    optimizer = make(list(model.parameters()))
    schedule = None if scheduler is None else scheduler(optimizer)
    losses = []
    for batch in case.batches:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        losses.append(loss.item())
    return losses


def train(
    runner: LocalRunner, case: Case, between: Callable[[], Any] = lambda: None
) -> list[float]:
    losses = []
    for batch in case.batches:
        losses.append(runner.train_step(case.captured.signature.flatten((), batch)).item())
        between()
    return losses


def near(losses: list[float]) -> Any:
    return pytest.approx(losses, abs=TOLERANCE["gpt2"])


def test_a_learning_rate_schedule_follows_the_update(groups: Groups) -> None:
    """The late updates of a step have that step's learning rate."""
    case, big = case_of("gpt2"), functools.partial(torch.optim.SGD, lr=0.5)
    program = case.program(SCHEDULES["reverse-first-2"])
    runner = case.runner(groups, program, optimizer=big, lr_scheduler=decaying)
    assert train(runner, case) == near(eager_losses(case, big, scheduler=decaying))
    group = runner.optimizer_state_dict()["param_groups"][0]
    assert group["lr"] == pytest.approx(0.5 * 0.5**NUM_STEPS)


def test_clipping_and_other_optimizers_wait_for_all_gradients(groups: Groups) -> None:
    """Adafactor looks at whole tensors and is not known to update them one by one."""
    case = case_of("gpt2")
    program = case.program(SCHEDULES["reverse-first-2"])
    clipped = case.runner(groups, program, optimizer=sgd, max_grad_norm=0.1)
    assert train(clipped, case) == near(eager_losses(case, sgd, clip=0.1))
    assert clipped.grad_norm is not None
    assert clipped.grad_norm > 0.1
    whole = functools.partial(torch.optim.Adafactor, lr=0.01)
    runner = case.runner(groups, program, optimizer=whole)
    assert train(runner, case) == near(eager_losses(case, whole))


def test_whoever_looks_at_the_state_waits(groups: Groups, tmp_path: Path) -> None:
    """Reading weights, gradients or optimizer state, and saving: after the update."""
    case = case_of("gpt2")
    program = case.program(SCHEDULES["conventional"])
    expected = near(eager_losses(case, adam))
    for read in ("full_state_dict", "gradients", "optimizer_state_dict"):
        runner = case.runner(groups, program, optimizer=adam)
        assert train(runner, case, getattr(runner, read)) == expected
    runner = case.runner(groups, program, optimizer=adam)
    first = case.captured.signature.flatten((), case.batches[0])
    runner.train_step(first)
    runner.save(tmp_path / "state")
    rest = train(runner, case)
    resumed = case.runner(groups, program, optimizer=adam)
    resumed.load(tmp_path / "state")
    assert train(resumed, case) == near(rest)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("reused_workers")
@pytest.mark.parametrize("schedule", ["conventional", "reverse_first_k"])
def test_by_the_schedules_name(schedule: str) -> None:
    """From the user's side: k by prices, evaluation between steps, and a replayed plan."""
    case = case_of("gpt2")
    options = {"example_inputs": case.batches[0], "optimizer": adam, "profile_limit_s": 0}
    compiled = autopar.compile(
        case.model, 2, schedule=schedule, num_stages=3, constraints=Force("data_parallel"),
        **options,
    )  # fmt: skip
    made = compiled.plan.schedule
    assert (made.name, made.num_devices, made.num_stages) == (schedule, 1, 3)
    assert "3 stages on every device" in compiled.plan.report("full")
    expected = eager_losses(case, adam)
    model, evaluated = copy.deepcopy(case.model), case.batches[-1]
    losses = []
    for batch in case.batches:
        losses.append(compiled.train_step(**batch).item())
        logits = compiled.eval()(**evaluated).logits
        compiled.copy_to(model)
        torch.testing.assert_close(logits, model.eval()(**evaluated).logits.detach())
    assert losses == near(expected)
    replayed = autopar.compile(case.model, 2, plan=compiled.plan, **options)
    assert [replayed.train_step(**b).item() for b in case.batches] == near(expected)
