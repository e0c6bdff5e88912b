"""Arrays compiled by default settings, gradient check included, train each model as alone."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.base.errors import StepError
from autopar.fusion.fuse import LOOP
from tests.fusion.arrays import assert_state, check_array

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def compiled(models: Any, batch: Any, **options: Any) -> Any:
    given = {"optimizer": SGD, "seed": 5, "profile_limit_s": 0, **options}
    return autopar.compile(models, 1, example_inputs=batch, **given)


class Dropping(nn.Module):
    """Linear layers, with dropout before each."""

    def __init__(self, *shares: float) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for share in shares:
            self.layers.extend([nn.Dropout(share), nn.Linear(6, 6), nn.ReLU()])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class DroppingAttention(nn.Module):
    """Attention with dropout, in which row ``hidden`` attends to nothing; all query heads may share
    one of the keys, and the attention be causal."""

    def __init__(self, share: float, hidden: int | None = None, *, is_shared: bool = False) -> None:
        super().__init__()
        self.layer, self.share, self.is_shared = nn.Linear(6, 6), share, is_shared
        shown = torch.arange(4)[:, None].expand(4, 4) != hidden
        self.register_buffer("mask", None if hidden is None else shown)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.layer(x).view(2, 4, 2, 3).transpose(1, 2)
        keys = heads[:, :1] if self.is_shared else heads
        return F.scaled_dot_product_attention(
            heads, keys, keys, self.mask, dropout_p=self.share,
            is_causal=self.is_shared, enable_gqa=self.is_shared,
        ).square().mean()  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        lambda: [Dropping(0.2), Dropping(0.2)],
        lambda: [Dropping(0.2, 0.3, 0.4)],
        lambda: [Dropping(0.1, 0.5), Dropping(0.0, 0.5)],
        lambda: [DroppingAttention(0.2), DroppingAttention(0.2)],
        lambda: [DroppingAttention(0.2, hidden=2), DroppingAttention(0.2, hidden=2)],
        lambda: [DroppingAttention(0.2, is_shared=True), DroppingAttention(0.2, is_shared=True)],
    ],
    ids=["one", "three", "another", "attention", "masked_attention", "shared_keys"],
)
def test_a_model_drops_in_an_array_what_it_drops_alone(make: Any) -> None:
    torch.manual_seed(0)
    models, x = make(), torch.randn(8, 6)
    with compiled(copy.deepcopy(models), (x,)) as array:
        together = torch.stack([array.train_step(x) for _ in range(3)], 1)
    for losses, model in zip(together, models):
        with compiled(model, (x,)) as alone:
            torch.testing.assert_close(losses, torch.stack([alone.train_step(x) for _ in range(3)]))


class Written(nn.Module):
    """A linear layer of six features, and a loss written as a function of it and of the input."""

    def __init__(self, loss: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(6, 6), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.layer, x)


def weighted_bce(layer: nn.Linear, x: Tensor) -> Tensor:
    weight = torch.arange(1, 7, dtype=x.dtype)
    return F.binary_cross_entropy_with_logits(layer(x), (x > 0).to(x.dtype), pos_weight=weight)


def column_set(layer: nn.Linear, x: Tensor) -> Tensor:
    hidden = layer(x) * 1
    hidden[:, 0] = x[:, 0] * layer.bias.sum()
    return hidden.square().mean()


def rows_set(layer: nn.Linear, x: Tensor) -> Tensor:
    hidden = layer(x) * 1
    hidden[1:3] = layer.bias
    return hidden.square().mean()


def one_query(layer: nn.Linear, x: Tensor) -> Tensor:
    keys = layer(x).view(4, 2, 2, 3)
    query = layer.weight.view(1, 2, 6, 3)
    return F.scaled_dot_product_attention(query, keys, keys).square().mean()


def promoted(layer: nn.Linear, x: Tensor) -> Tensor:
    scaled = layer(x).float() * layer.bias.sum()  # float64, but of no dimension
    return F.linear(scaled, layer.weight.float()).square().mean()


class Sign(torch.autograd.Function):
    """The sign, with the gradient of a function that is linear between -1 and 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1)


@pytest.mark.parametrize(
    "loss",
    [
        weighted_bce,
        column_set,
        rows_set,
        lambda layer, x: F.hinge_embedding_loss(layer(x), x.sign()),
        lambda layer, x: layer(x).norm(),
        lambda layer, x: Sign.apply(layer(x)).square().mean() + layer(x).mean(),
        promoted,
        lambda layer, x: layer(x).masked_fill(x > 0.5, layer.bias.sum()).square().mean(),
        lambda layer, x: layer(x).masked_fill(x > 0.5, layer.bias.float().sum()).square().mean(),
        one_query,
    ],
    ids=[
        "weighted_bce", "column_set", "rows_set", "hinge_embedding", "norm", "custom_function",
        "promotion", "masked_fill", "masked_fill_of_another_dtype", "one_query",
    ],
)  # fmt: skip
def test_losses_and_gradients_are_those_of_eager(loss: Any) -> None:
    torch.manual_seed(0)
    models, x = [Written(loss).double() for _ in range(3)], torch.randn(8, 6).double()
    with compiled(models, (x,)) as array:
        check_array(array, [(x,)] * 2, tolerance=1e-6)
        assert LOOP not in {op.form for op in array.fused.ops}


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4, padding_idx=2), nn.Linear(4, 1)

    def forward(self, index: Tensor, y: Tensor) -> Tensor:
        return (self.head(self.table(index)).sum(1) - y).square().mean()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_an_index_in_the_table_of_another_model_is_refused(dtype: torch.dtype) -> None:
    models = [Embedding().double() for _ in range(2)]
    batch = [(torch.randint(5, (8, 3), dtype=dtype), torch.randn(8, 1).double()) for _ in models]
    with compiled(models, batch) as array:
        check_array(array, [batch] * 2, own=True)
        before = [array.state_dict(number) for number in range(2)]
        for model, index in ((0, 5), (0, 7), (0, -1), (1, -1), (1, -5), (1, 5)):
            wrong = copy.deepcopy(batch)
            wrong[model][0][0, 0] = index
            with pytest.raises(StepError, match="IndexError: index out of range in self"):
                array.train_step(wrong)
        for number, state in enumerate(before):
            assert_state(array.state_dict(number), state, 0)


class Stopped(nn.Module):
    """Two weights, of which the gradient reaches the first only where it is ``penalized``."""

    def __init__(self, *, penalized: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(6, 1)), nn.Parameter(torch.ones(6, 1))
        self.penalized = penalized

    def forward(self, x: Tensor) -> Tensor:
        loss = (x @ self.first.detach() + x @ self.second).square().mean()
        return loss + self.first.square().sum() if self.penalized else loss


@pytest.mark.parametrize(
    "optimizer",
    [
        functools.partial(torch.optim.SGD, lr=0.1, weight_decay=0.5, momentum=0.9),
        functools.partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5),
    ],
    ids=["sgd", "adamw"],
)
def test_no_weight_decays_that_the_gradient_of_its_own_model_does_not_reach(optimizer: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 6).double()
    models = [Stopped(penalized=each).double() for each in (True, False, True)]
    with compiled(models, (x,), optimizer=optimizer, max_grad_norm=[None, 0.5, 0.5]) as array:
        check_array(array, [(x,)] * 3)
        assert list(array.optimizer_state_dict(1)["state"]) == [1]


def cross_entropy(*weights: float) -> nn.Module:
    return nn.CrossEntropyLoss(weight=torch.tensor(weights).double())


@pytest.mark.parametrize(
    ("losses", "target"),
    [
        (cross_entropy(1, 2, 3), torch.arange(8) % 3),
        ([cross_entropy(1, 2, 3), cross_entropy(3, 1, 2)], torch.arange(8) % 3),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2, 3])).double(), torch.eye(8, 3)),
    ],
    ids=["shared", "own", "positive"],
)
def test_a_loss_function_has_buffers_of_its_own(losses: Any, target: Tensor) -> None:
    target = target.double() if target.is_floating_point() else target
    batch = torch.randn(8, 6).double(), target
    with compiled([nn.Linear(6, 3).double() for _ in range(2)], batch, loss_fn=losses) as array:
        check_array(array, [batch] * 2)


class Shifted(nn.Module):
    """A layer plus a buffer, which shrinks in each step where it is ``tracked``."""

    def __init__(self, *, tracked: bool) -> None:
        super().__init__()
        self.layer, self.tracked = nn.Linear(6, 1), tracked
        self.register_buffer("shift", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x) + self.shift
        if self.tracked:
            self.shift.mul_(0.9)
        return hidden.square().mean()


@pytest.mark.parametrize(
    "tracked", [(False, False, True), (True, False, False), (True, True, False)]
)
def test_a_buffer_changes_in_the_models_that_change_it(tracked: tuple[bool, ...]) -> None:
    x = torch.randn(8, 6).double()
    with compiled([Shifted(tracked=each).double() for each in tracked], (x,)) as array:
        check_array(array, [(x,)] * 3)
