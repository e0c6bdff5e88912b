"""Buffers that a step sets to an input, a constant or another buffer's value, as in eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.frontend.capture import capture
from autopar.ir.mesh import Mesh
from autopar.lowering.program import lower
from autopar.sharding.strategy import Analysis, Strategy
from autopar.testing.lockstep import LockstepRun
from tests.oracles import random_assignment, sgd


class Buffered(nn.Module):
    """A layer whose loss depends on two buffers, which it changes by ``change(self, x)``."""

    def __init__(self, change: Callable[[Buffered, Tensor], None]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("now", torch.zeros(4))
        self.register_buffer("before", torch.zeros(4))
        self.register_buffer("whole", torch.zeros(4, 4))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x) - self.before + 2 * self.now
        loss = out.square().mean() + (x * self.whole).sum()
        with torch.no_grad():
            self.change(self, x)
        return loss


def shift(model: Buffered, x: Tensor) -> None:
    """``before`` takes the value that ``now`` had."""
    model.before.copy_(model.now)
    model.now.copy_(x.mean(0))


def swap(model: Buffered, x: Tensor) -> None:
    now = model.now.clone()
    model.now.copy_(model.before)
    model.before.copy_(now + 1)


def keep(model: Buffered, x: Tensor) -> None:
    model.whole.copy_(x)


def take_the_bias(model: Buffered, x: Tensor) -> None:
    """The parameter itself, which the update changes in place afterwards."""
    model.before.copy_(model.layer.bias)


def take_a_row(model: Buffered, x: Tensor) -> None:
    model.before.copy_(model.layer.weight[1])
    model.now.copy_(x[0])


def count(model: Buffered, x: Tensor) -> None:
    """Two buffers with the same value, and the same memory to a tracer."""
    model.before.add_(1)
    model.now.copy_(model.before)


CHANGES = {
    "shift": shift, "swap": swap, "keep": keep, "bias": take_the_bias, "row": take_a_row,
    "count": count,
}  # fmt: skip


def eager_steps(model: nn.Module, batches: list[Tensor]) -> tuple[list[float], nn.Module]:
    """The losses of training, and the trained model."""
    model = copy.deepcopy(model)
    optimizer, losses = sgd(list(model.parameters())), []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, model


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("name", list(CHANGES))
def test_a_copy_reads_what_was_there_before(name: str, num_devices: int) -> None:
    torch.manual_seed(0)
    model = Buffered(CHANGES[name]).double()
    batches = [torch.randn(4, 4).double() for _ in range(4)]
    expected, trained = eager_steps(model, batches)
    captured = capture(model, (batches[0],))
    analysis = Analysis(captured.graph)
    for seed in range(3):
        mesh = Mesh(("a",), (num_devices,))
        program = lower(Strategy(analysis, random_assignment(analysis, mesh, seed)))
        state = {n: t.detach().clone() for n, t in model.state_dict().items()}
        run = LockstepRun(program, captured.graph, state)
        parameters = [p for p in program.parameters if p.value in run.ranks[0].parameters]
        optimizers = [
            sgd([run.ranks[0].parameters[p.value][place] for p in parameters])
            for place in range(num_devices)
        ]
        losses = []
        for batch in batches:
            (result,) = run.steps(captured.signature.flatten((batch,), {}))
            losses.append(result.loss[0].item())
            for place, optimizer in enumerate(optimizers):
                for p in parameters:
                    given = result.gradients.get(p.value)
                    own = run.ranks[0].parameters[p.value][place]
                    own.grad = None if given is None else given[place]
                optimizer.step()
        assert losses == pytest.approx(expected, rel=1e-10)
        for buffer in program.buffers:
            theirs = trained.get_buffer(buffer.name)
            torch.testing.assert_close(
                run.buffers[buffer.value][-1], theirs, rtol=1e-10, atol=1e-10
            )


PARALLEL = autopar.Force("data_parallel")
OPTIONS: dict[str, Any] = {
    "one": {"devices": ["cpu"]},
    "early": {"devices": ["cpu"], "update": "early"},
    "DDP": {"devices": ["cpu"] * 2, "constraints": [PARALLEL]},
    "ZeRO-3": {"devices": ["cpu"] * 2, "constraints": [autopar.Force("zero3")]},
}


@pytest.mark.parametrize("options", list(OPTIONS))
@pytest.mark.parametrize("name", list(CHANGES))
def test_a_compiled_model_trains_as_eager(name: str, options: str) -> None:
    torch.manual_seed(0)
    model = Buffered(CHANGES[name]).double()
    batches = [torch.randn(4, 4).double() for _ in range(4)]
    expected, trained = eager_steps(model, batches)
    with autopar.compile(
        model, example_inputs=(batches[0],), optimizer=sgd, profile_limit_s=0, **OPTIONS[options]
    ) as compiled:
        got = [compiled.train_step(x).item() for x in batches]
        state = compiled.full_state_dict()
    assert got == pytest.approx(expected, rel=1e-10)
    for key, tensor in trained.state_dict().items():
        torch.testing.assert_close(state[key], tensor, rtol=1e-10, atol=1e-10)


def set_to_the_bias(model: Buffered, x: Tensor) -> None:
    model.before = model.layer.bias.detach()


def set_to_a_row(model: Buffered, x: Tensor) -> None:
    model.before = model.layer.weight.detach()[1]


def set_to_another(model: Buffered, x: Tensor) -> None:
    model.before = model.now


def set_both(model: Buffered, x: Tensor) -> None:
    model.before = model.now = x.mean(0)


@pytest.mark.parametrize(
    ("change", "other"),
    [
        (set_to_the_bias, "layer.bias"), (set_to_a_row, "layer.weight"),
        (set_to_another, "now"), (set_both, "before"),
    ],
)  # fmt: skip
def test_a_buffer_set_to_the_memory_of_another_tensor_is_refused(
    change: Callable[[Buffered, Tensor], None], other: str
) -> None:
    """In eager mode a later change of the other, as by the optimizer, would change it too."""
    model = Buffered(change)
    with pytest.raises(autopar.CaptureError, match=rf"memory of '{other}'.*\n.*clone\(\)"):
        capture(model, (torch.randn(4, 4),))
    for buffer in model.buffers():
        assert not isinstance(buffer, torch._subclasses.FakeTensor)


def shift_by_setting(model: Buffered, x: Tensor) -> None:
    """No memory is shared behind the call: ``now`` has new memory."""
    model.before = model.now
    model.now = x.mean(0)


def set_to_halves(model: Buffered, x: Tensor) -> None:
    """Two parts of one tensor have no element in common, whichever dimension is split."""
    both = torch.cat([x, x + 1], -1).mean(0)
    model.before, model.now = both.chunk(2, -1)


def set_to_columns(model: Buffered, x: Tensor) -> None:
    both = torch.cat([x, model.whole], -1) * 0.5
    model.whole = both[:, 4:]
    model.before = both[0, :4]


@pytest.mark.parametrize("change", [shift_by_setting, set_to_halves, set_to_columns])
def test_buffers_may_be_set_to_memory_that_they_do_not_share(
    change: Callable[[Buffered, Tensor], None],
) -> None:
    torch.manual_seed(0)
    model = Buffered(change).double()
    batches = [torch.randn(4, 4).double() for _ in range(4)]
    expected, _ = eager_steps(model, batches)
    with autopar.compile(
        model, ["cpu"], example_inputs=(batches[0],), optimizer=sgd, profile_limit_s=0
    ) as compiled:
        got = [compiled.train_step(x).item() for x in batches]
    assert got == pytest.approx(expected, rel=1e-10)
