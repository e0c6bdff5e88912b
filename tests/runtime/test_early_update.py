"""Weights updated within the backward pass: results, memory, and what cannot be undone."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Force, InputError, MemoryBudget, NonFiniteError, OptimizerError, Update
from tests.models.zoo import build
from tests.oracles import reference_steps, to_double
from tests.runtime.test_counted_memory import Branches, Deep, Tables, bags, images, rows

pytestmark = pytest.mark.usefixtures("reused_workers")

NUM_STEPS = 5
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
AdamW = functools.partial(torch.optim.AdamW, lr=1e-3)
QUICK = {"profile_limit_s": 0.001, "check_gradients": False}


def trained(model: nn.Module, batches: list[Any], num: int, **options: Any) -> dict[str, Tensor]:
    with autopar.compile(
        model, num, example_inputs=batches[0], update="early", **QUICK, **options
    ) as compiled:
        assert compiled.plan.update.when == "early"
        for batch in batches:
            compiled.train_step(**batch)
        return compiled.full_state_dict()


def test_five_steps_equal_eager() -> None:
    """In a process; more models and optimizers in `tests.equality.test_early_updates`."""
    model, make_batch = build("bert")
    model = model.double()  # AdamW divides differences of rounding by small roots
    batches = [to_double(make_batch(step)) for step in range(NUM_STEPS)]
    expected = reference_steps(model, batches, AdamW)
    state = trained(model, batches, 1, optimizer=AdamW)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(state[name], weight, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("num", "options"),
    [
        (2, {"constraints": [Force("data_parallel")]}),
        (2, {"constraints": [Force("zero3")], "num_microbatches": 2}),
        (4, {"mesh": {"dp": 2, "tp": 2}}),
        (4, {"num_stages": 2, "num_microbatches": 2, "mesh": {"dp": 2}}),
    ],
)
def test_processes_equal_eager(num: int, options: dict[str, Any]) -> None:
    model, make_batch = build("gpt2")
    batches = [make_batch(step) for step in range(NUM_STEPS)]
    expected = reference_steps(model, batches, SGD)
    state = trained(model, batches, num, optimizer=SGD, **options)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(state[name], weight, rtol=1e-4, atol=2e-5, msg=name)


COUNTED = {
    "branches, alone": (Branches, images, 1, {}),
    "deep, alone": (Deep, rows, 1, {}),
    "tables, alone": (Tables, bags, 1, {}),
    "deep, data parallel": (Deep, rows, 2, {"constraints": [Force("data_parallel")]}),
    "deep, ZeRO-3": (Deep, rows, 2, {"constraints": [Force("zero3")]}),
    "deep, bf16": (Deep, rows, 1, {"precision": "bf16"}),
    "deep, two micro-batches": (Deep, rows, 1, {"num_microbatches": 2}),
    "deep, kept": (Deep, rows, 1, {"update": Update(keep_gradients=True)}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", COUNTED)
def test_counted_is_held(case: str) -> None:
    make_model, make_batch, num, options = COUNTED[case]
    torch.manual_seed(0)
    with autopar.compile(
        make_model(), num, example_inputs=make_batch(), optimizer=AdamW,
        **{"update": "early", **QUICK, **options},
    ) as compiled:  # fmt: skip
        held = max(compiled.peak_tensor_bytes(**make_batch()))
        counted = compiled.plan.prediction.memory_bytes
    own = sum(counted.values()) - counted["inputs"]
    assert own == pytest.approx(held, rel=0.01)


class Risky(nn.Module):
    """The gradient of the first weight is infinite where the loss is finite, if ``x`` is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).abs().sqrt()).square().mean()


def risky(update: Any, **options: Any) -> autopar.Compiled:
    torch.manual_seed(0)
    return autopar.compile(
        Risky(), 1, example_inputs=(torch.ones(2, 4),), optimizer=SGD, update=update, **QUICK,
        **options,
    )  # fmt: skip


def test_a_loss_that_is_not_finite_changes_nothing() -> None:
    with risky("early") as compiled:
        compiled.train_step(torch.ones(2, 4))
        before = compiled.full_state_dict()
        with pytest.raises(NonFiniteError, match="Nothing has changed"):
            compiled.train_step(torch.full((2, 4), torch.inf))
        after = compiled.full_state_dict()
        assert all(torch.equal(after[name], before[name]) for name in before)
        compiled.train_step(torch.ones(2, 4))


def test_a_gradient_that_is_not_finite_is_said_to_have_changed_weights() -> None:
    with (
        risky("early") as compiled,
        pytest.raises(NonFiniteError, match=r"Weights have changed.*Load the last checkpoint"),
    ):
        compiled.train_step(torch.zeros(2, 4))
    with risky("at_end") as compiled, pytest.raises(NonFiniteError, match="Nothing has changed"):
        compiled.train_step(torch.zeros(2, 4))


def test_gradients_are_gone_unless_kept() -> None:
    with risky("early") as compiled:
        compiled.train_step(torch.ones(2, 4))
        with pytest.raises(InputError, match=r"gradients are gone.*keep_gradients=True"):
            compiled.gradients()
    with risky(Update(keep_gradients=True)) as kept, risky("at_end") as other:
        kept.train_step(torch.ones(2, 4))
        other.train_step(torch.ones(2, 4))
        found = kept.gradients()
        assert {n: t.tolist() for n, t in found.items()} == {
            n: t.tolist() for n, t in other.gradients().items()
        }


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"nonfinite": "skip"}, InputError, "cannot be skipped"),
        ({"precision": "fp16"}, InputError, "precision='bf16'"),
        ({"max_grad_norm": 1.0}, InputError, "max_grad_norm: .* after the last gradient"),
        ({"optimizer": torch.optim.Adafactor}, OptimizerError, "each element by itself"),
        ({"schedule": "reverse_first_k", "num_stages": 2}, autopar.PlanError, "in the next step"),
    ],
)
def test_what_an_early_update_cannot_do_is_refused(
    options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        autopar.compile(
            Deep(64), 1, example_inputs={"x": torch.ones(2, 64)}, update="early",
            **{"optimizer": SGD, **QUICK, **options},
        )  # fmt: skip


@pytest.mark.parametrize("update", ["never", 3, "EARLY"])
def test_another_update_is_refused(update: Any) -> None:
    with pytest.raises(InputError, match=r"update is .*update='early'"):
        risky(update)


def test_the_planner_updates_early_where_the_memory_needs_it() -> None:
    cluster = autopar.Cluster.preset("cpu", nodes=1, devices_per_node=1)

    def planned(**options: Any) -> autopar.Plan:
        return autopar.plan(Deep(), cluster, rows(), **options)

    free = planned()
    assert free.update.when == "at_end"
    whole = sum(free.prediction.memory_bytes.values())
    saved = free.update.gradient_bytes_at_end // 2
    budget = [MemoryBudget(whole - saved)]
    tight = planned(constraints=budget)
    assert tight.update.when == "early"
    assert tight.update.gradient_bytes < free.update.gradient_bytes_at_end / 2
    assert "early: at most" in " ".join(tight.report("full").split())
    assert autopar.Plan.from_json(tight.to_json()) == tight
    with pytest.raises(autopar.ConstraintError):
        planned(constraints=budget, update="at_end")


def test_state_and_steps_are_those_of_one_update() -> None:
    """Optimizer state, of rows too, is what the whole update makes, so checkpoints are the same."""
    states = []
    for update in ("early", "at_end"):
        torch.manual_seed(0)
        with autopar.compile(
            Tables(), 1, example_inputs=bags(), optimizer=AdamW, update=update, **QUICK
        ) as compiled:
            for _ in range(2):
                compiled.train_step(**bags())
            states.append(copy.deepcopy(compiled.optimizer_state_dict()))
    early, at_end = states
    assert early["param_groups"] == at_end["param_groups"]
    torch.testing.assert_close(early["state"], at_end["state"])
