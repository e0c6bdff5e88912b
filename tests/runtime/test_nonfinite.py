"""A training step with a non-finite loss or gradient has no effect, on any plan.

Two runs are compared to the last bit: one that is given bad batches among good ones, and one with
``nonfinite="ignore"`` that is given the good ones alone. What counts as finite is eager PyTorch's.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.base.errors import InputError
from autopar.planning.constraints import Force

Batch = dict[str, Tensor]
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)
SGD = functools.partial(torch.optim.SGD, lr=1e-3)
ADAFACTOR = functools.partial(torch.optim.Adafactor, lr=0.01)
HALVED = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)

DATA = {"constraints": Force("data_parallel")}
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "data parallel": (2, DATA),
    "clipped": (2, {**DATA, "max_grad_norm": 0.5}),
    "joint optimizer": (2, {**DATA, "optimizer": ADAFACTOR}),
    "zero3": (2, {"constraints": Force("zero3")}),
    "tensor parallel": (2, {"constraints": Force("tensor_parallel")}),
    "micro-batches": (2, {**DATA, "num_microbatches": 2}),
    "conventional": (2, {**DATA, "schedule": "conventional", "num_stages": 3}),
    "reverse first k": (2, {**DATA, "schedule": "reverse_first_k", "num_stages": 3}),
    "pipeline": (2, {"num_stages": 2, "num_microbatches": 2}),
    "clipped pipeline": (2, {"num_stages": 2, "num_microbatches": 2, "max_grad_norm": 0.5}),
    "replicas": (2, {"num_stages": 2, "num_microbatches": 2, "schedule": "chimera"}),
    "pipeline of data parallel": (
        4, {"num_stages": 2, "num_microbatches": 2, "mesh": {"dp": 2}, **DATA},
    ),
    "zero3 and tensor parallel": (
        4,
        {
            "mesh": {"dp": 2, "tp": 2},
            "constraints": [Force("zero3", axis="dp"), Force("tensor_parallel", axis="tp")],
        },
    ),
}  # fmt: skip


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.norm(self.product(x))))


class Net(nn.Module):
    """Its first column of weights is 0, and stays 0 while the first column of ``x`` is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.last = nn.Linear(8, 4)
        with torch.no_grad():
            self.first.weight[:, 0] = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        for layer in self.layers:
            h = layer(h)
        return (self.last(h) * y).mean()


def good(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator)
    x[:, 0] = 0
    return {"x": x, "y": y}


def nan_in_one_row() -> Batch:
    """In the last shard of the last micro-batch alone."""
    batch = good(7)
    batch["x"][7, 2] = math.nan
    return batch


def overflow_in_backward() -> Batch:
    """A finite loss; the gradient of one column of the first weights is too large for float32."""
    batch = good(8)
    batch["x"][7, 0] = 1e25
    batch["y"][7] *= 1e18
    return batch


def infinite_target() -> Batch:
    batch = good(9)
    batch["y"][3, 1] = math.inf
    return batch


def large() -> Batch:
    """Finite gradients whose squares overflow: eager takes the step."""
    batch = good(10)
    batch["y"] *= 1e20
    return batch


BAD: dict[str, Callable[[], Batch]] = {
    "nan": nan_in_one_row,
    "backward": overflow_in_backward,
    "loss": infinite_target,
}


def model_of() -> Net:
    torch.manual_seed(0)
    return Net().train()


@pytest.fixture
def compiled_for(reused_workers: None) -> Any:
    """``autopar.compile`` on the workers of the tests; one plan for all runs of a kind."""
    plans: dict[str, Any] = {}

    def make(kind: str, nonfinite: str, **more: Any) -> autopar.Compiled:
        num_devices, options = KINDS[kind]
        options = {
            "optimizer": ADAMW, "lr_scheduler": HALVED, "seed": 3, "profile_limit_s": 0,
            "example_inputs": good(0), "nonfinite": nonfinite, **options, **more,
        }  # fmt: skip
        if kind in plans:
            planned = ("constraints", "mesh", "num_microbatches", "num_stages", "schedule")
            options = {k: v for k, v in options.items() if k not in planned}
            options["plan"] = plans[kind]
        else:
            options["batch_norm"] = "local"
        compiled = autopar.compile(model_of(), num_devices, **options)
        plans[kind] = compiled.plan
        return compiled

    return make


def everything(compiled: autopar.Compiled) -> dict[str, Any]:
    """State as plain numbers; a scheduler shows in the learning rate."""
    state: dict[str, Any] = dict(compiled.full_state_dict())
    optimizer = compiled.optimizer_state_dict()
    for name, entries in optimizer["state"].items():
        state |= {f"{name}.{key}": torch.as_tensor(value) for key, value in entries.items()}
    return {**state, "lr": torch.tensor(optimizer["param_groups"][0]["lr"])}


def assert_equal(got: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_bad_batches_leave_no_trace(compiled_for: Any, kind: str) -> None:
    reference = compiled_for(kind, "ignore")
    expected_losses = [reference.train_step(**good(seed)).item() for seed in range(3)]
    expected = everything(reference)
    is_clipped = "clip" in kind
    if not is_clipped:
        reference.train_step(**large())
    after_large = everything(reference)

    skipping = compiled_for(kind, "skip")
    losses = []
    for seed, bad in enumerate(BAD.values()):
        losses.append(skipping.train_step(**good(seed)).item())
        assert skipping.num_skipped_steps == seed
        loss = skipping.train_step(**bad())
        assert loss.isfinite() == (bad is overflow_in_backward)
        assert skipping.num_skipped_steps == seed + 1
        if is_clipped:
            assert not skipping.grad_norm.isfinite()
    assert_equal(everything(skipping), expected)
    skipping.train_step(**large())  # its norm is infinite, so clipping has no factor for it
    assert skipping.num_skipped_steps == len(BAD) + is_clipped
    assert_equal(everything(skipping), after_large)
    assert losses == pytest.approx(expected_losses, rel=1e-6)

    raising = compiled_for(kind, "raise")
    for seed, (name, bad) in enumerate(BAD.items()):
        raising.train_step(**good(seed))
        before = everything(raising) if seed == 1 else None
        with pytest.raises(autopar.NonFiniteError) as raised:
            raising.train_step(**bad())
        error = raised.value
        assert f"in training step {seed + 2} " in str(error)
        assert error.phase == ("backward" if name == "backward" else "forward")
        assert error.block is not None
        if before is not None:
            assert_equal(everything(raising), before)
    assert_equal(everything(raising), expected)
    assert raising.num_skipped_steps == 0


class Product(nn.Module):
    """The gradient of its weights is the product of ``x`` and ``y``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((x @ self.weight) * y).sum()


def product_batch(dtype: torch.dtype, products: list[float]) -> Batch:
    """By row, its contribution to the gradient of the first weight."""
    x, y = torch.zeros(4, 4, dtype=dtype), torch.zeros(4, 4, dtype=dtype)
    for row, product in enumerate(products):
        x[row, 0] = math.sqrt(abs(product))
        y[row, 0] = math.copysign(math.sqrt(abs(product)), product)
    return {"x": x, "y": y}


@pytest.mark.usefixtures("reused_workers")
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("parallelism", ["data_parallel", "zero3"])
def test_it_is_finite_where_it_is_in_eager_pytorch(parallelism: str, num_microbatches: int) -> None:
    for dtype, most in ((torch.float32, 3.4e38), (torch.float16, 6.5e4)):
        model = Product().to(dtype)
        compiled = autopar.compile(
            model, 2, example_inputs=product_batch(dtype, [1.0] * 4), optimizer=SGD,
            constraints=Force(parallelism), num_microbatches=num_microbatches,
            nonfinite="skip", profile_limit_s=0,
        )  # fmt: skip
        num_skipped = 0
        for shares in (
            [0.1, 0.2, 0.3, 0.1],
            [0.7, 0.0, 0.0, 0.7],  # finite on each device, too large together
            [0.7, 0.7, 0.0, 0.0],  # too large on one device
            [0.7, 0.0, 0.0, -0.7],
            [0.4, 0.0, 0.0, 0.4],
            [math.nan, 0.0, 0.0, 0.0],
            [0.0, 0.0, 0.0, 2.0],
        ):
            batch = product_batch(dtype, [share * most for share in shares])
            model.zero_grad()
            with torch.no_grad():
                model.weight.zero_()
            model(**batch).backward()
            assert model.weight.grad is not None
            num_skipped += not model.weight.grad.isfinite().all()
            compiled.load_state_dict(model.state_dict())
            compiled.train_step(**batch)
            assert compiled.num_skipped_steps == num_skipped, (dtype, shares)
        assert num_skipped == 4


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(4, 4, bias=False)
        nn.init.eye_(self.product.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.product(x) + 1
        return h + h.sqrt()  # this line


class Roots(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Root() for _ in range(3)))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)).mean()


LINE = 1 + next(
    number
    for number, line in enumerate(Path(__file__).read_text().splitlines())
    if line.endswith("# this line")
)


@pytest.mark.usefixtures("reused_workers")
@pytest.mark.parametrize("kind", ["data parallel", "micro-batches", "pipeline", "replicas"])
def test_the_error_says_where_the_first_one_was_made(kind: str) -> None:
    num_devices, options = KINDS[kind]
    model, x = Roots(), torch.ones(8, 4)
    compiled = autopar.compile(
        model, num_devices, example_inputs=x, optimizer=ADAMW, profile_limit_s=0, **options
    )
    assert compiled.train_step(x).isfinite()
    compiled.load_state_dict(model.state_dict())
    last = copy.deepcopy(x)
    last[7, 1] = -4  # in the last shard of the last micro-batch: the root of a negative number
    with pytest.raises(autopar.NonFiniteError, match=r"made by aten\.sqrt at") as raised:
        compiled.train_step(last)
    error = raised.value
    assert str(error.block).startswith("layers.0")
    assert error.location is not None
    assert error.location.endswith(f"test_nonfinite.py:{LINE}")
    assert error.phase == "forward"
    assert error.microbatch == compiled.program.num_microbatches - 1
    with torch.no_grad():
        model.layers[1].product.weight.copy_(-torch.eye(4))
    compiled.load_state_dict(model.state_dict())
    with pytest.raises(autopar.NonFiniteError, match="the loss is nan") as raised:
        compiled.train_step(x)
    assert str(raised.value.block).startswith("layers.1")
    with torch.no_grad():
        model.layers[1].product.weight.copy_(torch.eye(4))
        x = 0 * x - 1  # the root of 0, which has no slope
    compiled.load_state_dict(model.state_dict())
    with pytest.raises(autopar.NonFiniteError, match="a gradient is not finite") as raised:
        compiled.train_step(x)
    assert str(raised.value.block).startswith("layers.0")
    assert raised.value.phase == "backward"
    assert not compiled.gradients()["layers.0.product.weight"].isfinite().all()
    torch.testing.assert_close(compiled.eval()(x), model.eval()(x))


@pytest.mark.parametrize("wrong", ["warn", None, True, 1])
def test_an_option_that_is_none(wrong: Any) -> None:
    with pytest.raises(InputError, match=r"nonfinite is .* 'raise', 'skip' or 'ignore'"):
        autopar.compile(Product(), 2, nonfinite=wrong)
