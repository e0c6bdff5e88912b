"""The user's ``Compiled`` object, in one process."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from autopar.base.errors import InputError, OptimizerError, WorkerError
from autopar.base.units import format_seconds
from autopar.cost_models import Cluster
from autopar.frontend.capture import capture
from autopar.ir.mesh import Mesh
from autopar.ir.placement import S
from autopar.lowering.program import lower
from autopar.planning.planner import make_planned
from autopar.plans.document import Plan
from autopar.runtime.compiled import Compiled
from autopar.runtime.options import RunOptions
from autopar.runtime.state.shards import local_input_shape
from autopar.sharding.strategy import Analysis, Strategy
from tests.models.zoo import MLP, build
from tests.oracles import loss_of, random_assignment
from tests.runtime.processes import lower_forward, stored_assignment

MESH = Mesh(("dp",), (2,))
sgd = functools.partial(torch.optim.SGD, lr=0.1)


class DyingSGD(torch.optim.SGD):
    """Rank 1 ends in its second step, while rank 0 continues to the third."""

    def step(self, closure: Any = None) -> Any:
        self.num_steps = getattr(self, "num_steps", 0) + 1
        if self.num_steps == 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


def compile_here(
    model: nn.Module,
    example: Any,
    *,
    loss_fn: Any = None,
    stored: Any = None,
    initial: nn.Module | None = None,
    plan: Plan | None = None,
    **options: Any,
) -> Compiled:
    captured = capture(model, example, loss_fn=loss_fn)
    analysis = Analysis(captured.graph)
    if stored is None:
        assignment = random_assignment(analysis, MESH, 1)
    else:
        assignment = stored_assignment(analysis, MESH, stored)
    strategy = Strategy(analysis, assignment)
    return Compiled(
        captured=captured,
        program=lower(strategy),
        forward_program=lambda: lower(strategy, training=False),
        lower_forward=lower_forward(MESH),
        plan=plan,  # type: ignore[arg-type]
        devices=[torch.device("cpu")] * 2,
        model=initial or model,
        options=RunOptions(loss_fn=loss_fn, **options),
    )


@pytest.fixture(scope="module")
def batch() -> dict[str, Tensor]:
    return build("gpt2")[1](0)


@pytest.fixture(scope="module")
def gpt2(batch: dict[str, Tensor]) -> Iterator[tuple[nn.Module, Compiled]]:
    model, _ = build("gpt2")
    cluster = Cluster.preset("cpu", devices_per_node=2)
    plan = make_planned(capture(model, batch), cluster).plan
    with compile_here(model, batch, plan=plan, optimizer=sgd) as compiled:
        yield model, compiled


def test_forward_returns_what_the_model_returns(
    gpt2: tuple[nn.Module, Compiled], batch: dict[str, Tensor]
) -> None:
    model, compiled = gpt2
    expected = model(**batch)
    compiled.load_state_dict(model.state_dict())
    output = compiled(**batch)
    assert type(output) is type(expected)
    assert output.keys() == expected.keys()
    torch.testing.assert_close(output.logits, expected.logits)
    torch.testing.assert_close(output.loss, expected.loss)


def test_training_and_taking_the_weights_back(
    gpt2: tuple[nn.Module, Compiled], batch: dict[str, Tensor]
) -> None:
    model, compiled = gpt2
    before = {k: v.clone() for k, v in model.state_dict().items()}
    compiled.load_state_dict(before)
    reference, _ = build("gpt2")
    optimizer = sgd(reference.parameters())
    loss = compiled.train_step(**batch)
    expected = loss_of(reference(**batch))
    expected.backward()
    optimizer.step()
    assert loss.dim() == 0
    torch.testing.assert_close(loss, expected.detach())
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key]), f"{key} of the user's model changed"
    compiled.copy_to(model)
    for key, tensor in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], tensor)
    assert list(compiled.state_dict()) == list(model.state_dict())


def test_what_it_tells(gpt2: tuple[nn.Module, Compiled], batch: dict[str, Tensor]) -> None:
    _, compiled = gpt2
    compiled.train_step(**batch)
    assert compiled.step_time_s is not None
    for detail in ("screen", "full"):
        assert compiled.report(detail).startswith(compiled.plan.report(detail))
    ratio = compiled.step_time_s / compiled.plan.prediction.step_time_s
    said = f"measured: {format_seconds(compiled.step_time_s)} a step"
    assert compiled.report().splitlines()[-1].startswith(said)
    assert compiled.report().endswith(f"{ratio:.2f}x the predicted")
    assert "transformer" in str(compiled.program)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": torch.zeros(3, 8, dtype=torch.int64)}, r"'input_ids' has shape \(3, 8\)"),
        ({"extra": torch.zeros(1)}, "do not match the example inputs"),
        ({"local": True}, "local=True is for torchrun"),
    ],
)
def test_inputs_that_do_not_fit(
    gpt2: tuple[nn.Module, Compiled], batch: dict[str, Tensor], change: Any, message: str
) -> None:
    _, compiled = gpt2
    if "local" in change:
        shapes = [local_input_shape(source, compiled.program) for source in compiled.program.inputs]
        batch = {k: v[: s[0], : s[1]] for (k, v), s in zip(batch.items(), shapes)}
    with pytest.raises(InputError, match=message):
        compiled.train_step(**{**batch, **change})
    assert compiled.train_step(**build("gpt2")[1](0)).isfinite()


def test_loss_fn_with_its_own_buffers() -> None:
    weight = torch.rand(8) + 0.5
    loss_fn = nn.CrossEntropyLoss(weight=weight)
    torch.manual_seed(0)
    model, x, y = MLP(), torch.randn(4, 16), torch.randint(0, 8, (4,))
    with compile_here(model, (x, y), loss_fn=loss_fn, optimizer=sgd) as compiled:
        loss = compiled.train_step(x, y)
        torch.testing.assert_close(loss, loss_fn(model(x), y).detach())
        assert list(compiled.state_dict()) == list(model.state_dict())
        compiled.load_state_dict(model.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, y), model(x))


class OneWeight(nn.Module):
    """Its parameter has the name of a loss function's buffer, and the loss is a part of it too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16))
        self.loss_fn = nn.CrossEntropyLoss(weight=torch.rand(8) + 0.5)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        logits = x @ self.weight.t()
        return logits if y is None else self.loss_fn(logits, y)


@pytest.mark.parametrize("outside", [True, False], ids=["beside the model", "inside the model"])
def test_tensors_of_a_loss_keep_apart_from_the_models(outside: bool) -> None:
    torch.manual_seed(0)
    model, x, y = OneWeight(), torch.randn(4, 16), torch.randint(0, 8, (4,))
    loss_fn = nn.CrossEntropyLoss(weight=torch.rand(8) + 0.5) if outside else None
    with compile_here(model, (x, y), loss_fn=loss_fn, optimizer=sgd) as compiled:
        loss = compiled.train_step(x, y)
        expected = loss_fn(model(x), y) if loss_fn else model(x, y)
        torch.testing.assert_close(loss, expected.detach())
        expected.backward()
        assert model.weight.grad is not None
        updated = model.weight - 0.1 * model.weight.grad
        torch.testing.assert_close(compiled.full_state_dict()["weight"], updated.detach())


def test_a_model_without_a_loss_runs_forward_only() -> None:
    model, x = MLP(), torch.randn(4, 16)
    with compile_here(model, (x,), optimizer=sgd) as compiled:
        torch.testing.assert_close(compiled(x), model(x).detach())
        with pytest.raises(InputError, match="loss_fn="):
            compiled.train_step(x)


def test_a_model_on_the_meta_device_is_refused_before_workers_start() -> None:
    children = psutil.Process().children()
    model, make_batch = build("mlp")
    with pytest.raises(InputError, match=r"to_empty\(device='cpu'\)"):
        compile_here(model, make_batch(0), initial=MLP().to("meta"), optimizer=sgd)
    assert psutil.Process().children() == children


def test_an_optimizer_that_cannot_work_is_refused_here() -> None:
    model, make_batch = build("mlp")
    stored = {"head.weight": (S(0),)}
    adafactor = functools.partial(torch.optim.Adafactor, lr=0.1)
    children = psutil.Process().children()
    with pytest.raises(OptimizerError, match=r"head\.weight(.|\n)*Adafactor"):
        compile_here(model, make_batch(0), stored=stored, optimizer=adafactor)
    assert psutil.Process().children() == children


def test_a_worker_killed_in_a_step() -> None:
    model, make_batch = build("mlp")
    compiled = compile_here(
        model, make_batch(0), stored={}, optimizer=functools.partial(DyingSGD, lr=0.1)
    )
    pids = compiled._runner.group.pids
    compiled.train_step(**make_batch(0))
    started_s = time.monotonic()
    with pytest.raises(WorkerError, match="SIGKILL") as caught:
        compiled.train_step(**make_batch(0))
    assert caught.value.rank == 1
    assert time.monotonic() - started_s < 30
    deadline_s = time.monotonic() + 10
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in pids)
    with pytest.raises(WorkerError, match="closed"):
        compiled.train_step(**make_batch(0))


def test_without_an_optimizer_and_without_closing() -> None:
    model, make_batch = build("mlp")
    compiled = compile_here(model, make_batch(0), stored={})
    with pytest.raises(InputError, match="needs an optimizer"):
        compiled.train_step(**make_batch(0))
    torch.testing.assert_close(compiled(**make_batch(0)), model(**make_batch(0)).detach())
    pids = compiled._runner.group.pids
    assert all(_runs(pid) for pid in pids)
    del compiled
    gc.collect()
    deadline_s = time.monotonic() + 10
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in pids)


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False
