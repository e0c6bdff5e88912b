"""If an op raises on one rank, no rank keeps the step, and training continues."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.base.errors import StepError, WorkerError
from autopar.runtime.step.timing import Timing

NUM_CLASSES = 5
sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Classifier(nn.Module):
    def __init__(self, share_dropped: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(share_dropped)) for _ in range(3)
        )
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)), labels)


def batches(num: int) -> list[tuple[Tensor, Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(16, 8, generator=drawn, dtype=torch.float64),
            torch.randint(NUM_CLASSES, (16,), generator=drawn),
        )
        for _ in range(num)
    ]


def spoilt(batch: tuple[Tensor, Tensor], row: int) -> tuple[Tensor, Tensor]:
    x, labels = batch
    labels = labels.clone()
    labels[row] = NUM_CLASSES + 7
    return x, labels


def compiled_model(model: nn.Module, **options: Any) -> Any:
    return autopar.compile(
        model, 2, example_inputs=batches(1)[0], optimizer=sgd, profile_limit_s=0, seed=3, **options
    )


def eager_steps(
    model: nn.Module, given: Sequence[tuple[Tensor, Tensor]], max_grad_norm: float | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    plain = copy.deepcopy(model)
    optimizer, losses = sgd(plain.parameters()), []
    for batch in given:
        optimizer.zero_grad()
        loss = plain(*batch)
        loss.backward()
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses, plain.state_dict()


DATA_PARALLEL: dict[str, Any] = {"constraints": [autopar.Force("data_parallel")]}
PLANS: dict[str, dict[str, Any]] = {
    "data parallel": DATA_PARALLEL,
    "clipped": {**DATA_PARALLEL, "max_grad_norm": 0.5},
    "pipeline": {
        "num_stages": 2, "num_microbatches": 4, "schedule": "zb_h1", "batch_norm": "local",
    },
    "late updates": {"schedule": "conventional", "num_stages": 3},
}  # fmt: skip


@pytest.mark.parametrize("kind", PLANS)
def test_training_goes_on_as_if_the_step_had_not_been(kind: str) -> None:
    """Losses, weights and batch statistics are those of eager steps on the good batches."""
    torch.manual_seed(0)
    model, given = Classifier().double(), batches(4)
    if kind == "pipeline":  # statistics are of a micro-batch there
        model.norm = nn.LayerNorm(8).double()  # type: ignore[assignment]
    options = PLANS[kind]
    expected, state = eager_steps(model, given, options.get("max_grad_norm"))
    with compiled_model(model, **options) as compiled:
        pids = compiled._runner.group.pids
        losses = []
        for number, batch in enumerate(given):
            losses.append(compiled.train_step(*batch).item())
            with pytest.raises(StepError, match=r"rank \d of 2 raised IndexError") as caught:
                compiled.train_step(*spoilt(batch, row=15 - number))
            text = str(caught.value)
            assert f"of training step {number + 2}" in text
            assert "cross_entropy(self.head" in text or "test_failed_steps.py" in text
            assert "nothing has changed on any rank" in text
        assert compiled._runner.group.pids == pids
        got = compiled.full_state_dict()
    assert losses == pytest.approx(expected, abs=1e-9)
    for name, tensor in state.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-7, atol=1e-9)


def test_random_numbers_are_those_of_a_run_without_the_failed_step() -> None:
    torch.manual_seed(0)
    model, given = Classifier(share_dropped=0.4).double(), batches(3)

    def losses_of(steps: Callable[[Any, tuple[Tensor, Tensor]], None]) -> list[float]:
        losses = []
        with compiled_model(model, **DATA_PARALLEL) as compiled:
            for batch in given:
                steps(compiled, batch)
                losses.append(compiled.train_step(*batch).item())
        return losses

    def fail(compiled: Any, batch: tuple[Tensor, Tensor]) -> None:
        for row in (0, 15):
            with pytest.raises(StepError):
                compiled.train_step(*spoilt(batch, row))

    assert losses_of(fail) == losses_of(lambda *_: None)


def test_an_error_names_action_block_and_line() -> None:
    torch.manual_seed(0)
    options = PLANS["pipeline"]
    model, (batch,) = Classifier().double(), batches(1)
    model.norm = nn.LayerNorm(8).double()  # type: ignore[assignment]
    with compiled_model(model, **options) as compiled:
        with pytest.raises(StepError) as caught:
            compiled.train_step(*spoilt(batch, 15))
        assert caught.value.rank == 1
        assert "IndexError" in caught.value.traceback
        named = (
            r"rank 1 of 2 raised IndexError: .* in action 1F3 of training step 1: "
            r".*nll_loss.* at .*test_failed_steps.py:\d+ \(block '.*', forward, micro-batch 3\)"
        )
        assert re.match(named, str(caught.value)), str(caught.value)


@pytest.mark.parametrize("kind", ["data parallel", "pipeline"])
def test_a_step_whose_ops_are_timed_fails_alike(kind: str) -> None:
    torch.manual_seed(0)
    model, given = Classifier().double(), batches(2)
    model.norm = nn.LayerNorm(8).double()  # type: ignore[assignment]
    expected, _ = eager_steps(model, given)
    with compiled_model(model, **PLANS[kind]) as compiled:
        compiled._runner.set_timing(Timing.OPS)
        losses = []
        for batch in given:
            with pytest.raises(StepError, match=r"rank 1 of 2 raised IndexError: .*nll_loss.* at "):
                compiled.train_step(*spoilt(batch, row=15))
            losses.append(compiled.train_step(*batch).item())
            assert all(rank.ops for rank in compiled._runner.step_times())
        plain = compiled_error(compiled, batches(1)[0])
        compiled._runner.set_timing(Timing.ACTIONS)
        assert plain == compiled_error(compiled, batches(1)[0])
    assert losses == pytest.approx(expected, abs=1e-9)


def compiled_error(compiled: Any, batch: tuple[Tensor, Tensor]) -> str:
    """The first line of the error of a step with a spoilt batch."""
    with pytest.raises(StepError) as caught:
        compiled.train_step(*spoilt(batch, row=15))
    return str(caught.value).splitlines()[0]


def test_where_steps_are_not_agreed_on_an_error_ends_all() -> None:
    model, (batch,) = Classifier().double(), batches(1)
    compiled = compiled_model(model, nonfinite="ignore", **DATA_PARALLEL)
    with pytest.raises(WorkerError, match=r"worker 1 of 2 raised IndexError") as caught:
        compiled.train_step(*spoilt(batch, 15))
    assert not isinstance(caught.value, StepError)
    with pytest.raises(WorkerError, match="closed because worker 1"):
        compiled.train_step(*batch)
