"""Losses over rows that a mask selects: over all rows, split, and equal to eager mode.

``x`` has shape ``[2, 3, 4]``; masks depend on data, so that later batches select other rows.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.models.test_masked_writes import MESHES, is_left
from tests.models.test_odd_captures import Odd
from tests.oracles import assert_splits_equal_eager


def labels_of(x: Tensor) -> Tensor:
    return x.argmax(-1)


def cross_entropy(model: Odd, x: Tensor) -> Tensor:
    y, labels = model.linear(x), labels_of(x)
    mask = labels > 0
    return F.cross_entropy(y[mask], labels[mask])


def cross_entropy_with_two_masks(model: Odd, x: Tensor) -> Tensor:
    """The same mask, computed twice."""
    y, labels = model.linear(x), labels_of(x)
    return F.cross_entropy(y[(labels != 1) & (labels > 0)], labels[(labels != 1) & (labels > 0)])


def cross_entropy_of_flat_rows(model: Odd, x: Tensor) -> Tensor:
    y, labels = model.linear(x).view(-1, 4), labels_of(x).view(-1)
    mask = x.view(-1, 4)[:, 0] > 0
    return F.cross_entropy(
        y[mask].float().contiguous(), labels[mask], weight=torch.arange(1.0, 5.0),
        label_smoothing=0.1, reduction="sum",
    ).double()  # fmt: skip


def cross_entropy_with_smoothing(model: Odd, x: Tensor) -> Tensor:
    y, labels, mask = model.linear(x), labels_of(x), x[..., 0] > 0
    return F.cross_entropy(y[mask], labels[mask], label_smoothing=0.2, ignore_index=2)


def likelihood(model: Odd, x: Tensor) -> Tensor:
    y, labels, mask = model.linear(x), labels_of(x), x[..., 0] > 0
    return F.nll_loss(F.log_softmax(y[mask], dim=1), labels[mask])


def missing_targets(model: Odd, x: Tensor) -> Tensor:
    """The targets that are left out are NaN."""
    y, targets = model.linear(x), torch.where(x > 0.5, torch.nan, x)
    mask = ~targets.isnan()
    return F.mse_loss(y[mask], targets[mask]) + F.l1_loss(y[mask], targets[mask], reduction="sum")


def other_losses(model: Odd, x: Tensor) -> Tensor:
    y, mask = model.linear(x), x[..., 1] > 0
    weight = torch.arange(1.0, 5.0, dtype=y.dtype)
    found = F.binary_cross_entropy_with_logits(y[mask], x[mask].sigmoid())
    found = found + F.binary_cross_entropy(y[mask].sigmoid(), x[mask].sigmoid())
    found = found + F.binary_cross_entropy_with_logits(
        y[mask], x[mask].sigmoid(), weight=weight, pos_weight=weight
    )
    found = found + F.smooth_l1_loss(y[mask], x[mask], beta=0.3)
    return found + F.huber_loss(y[mask], x[mask], delta=0.2)


def written_by_hand(model: Odd, x: Tensor) -> Tensor:
    y, mask = model.linear(x), x[..., 1] > 0
    errors = (y[mask] - x[mask] * model.linear.bias - 0.5) ** 2
    return errors.mean() + y[mask].tanh().sum() + (y - x).square()[mask].mean()


def first_losses_of_rows(model: Odd, x: Tensor) -> Tensor:
    """Losses of each row, of which some are selected."""
    y, labels = model.linear(x), labels_of(x)
    losses = F.cross_entropy(y.view(-1, 4), labels.view(-1), reduction="none")
    return losses[labels.view(-1) > 0].mean()


def changed_afterwards(model: Odd, x: Tensor) -> Tensor:
    """The tensor is written to in place between the selection and the loss."""
    y, mask = model.linear(x) * 1.0, x[..., 1] > 0
    chosen, targets = y[mask], x[mask]
    y.mul_(2)
    return F.mse_loss(chosen, targets) + y.mean()


def square_roots(model: Odd, x: Tensor) -> Tensor:
    """Neither it nor its derivative is finite in rows that are not selected."""
    y, mask = model.linear(x), x[..., 1] > 0
    return x[mask].mul(y[mask].exp()).div(x[mask]).log().abs().sqrt().mean()


def quotients(model: Odd, x: Tensor) -> Tensor:
    y, mask = model.linear(x), x[..., 1] > 0
    return (y[mask] / x[mask]).mean()


BY_ROWS = [
    cross_entropy, cross_entropy_with_two_masks, cross_entropy_of_flat_rows,
    cross_entropy_with_smoothing, likelihood, missing_targets, other_losses, written_by_hand,
    first_losses_of_rows, square_roots, quotients,
]  # fmt: skip


def masks_around_a_write(model: Odd, x: Tensor) -> Tensor:
    """Equal expressions for the mask, with a write to their operand in between."""
    y, labels = model.linear(x), labels_of(x)
    first = labels > 1
    labels.add_((labels == 0) * 0 + 1).sub_(1)
    return F.cross_entropy(y[first], labels[labels > 1])


def normalized_over_rows(model: Odd, x: Tensor) -> Tensor:
    y, mask = model.linear(x), x[..., 1] > 0
    return (F.softmax(y[mask], dim=0) * x[mask]).sum()


def the_largest_weighted(model: Odd, x: Tensor) -> Tensor:
    """Torch does not differentiate the weight, which this region reads like its other operands."""
    y, mask = model.linear(x), x[..., 1] > 0
    weight = torch.arange(1.0, 5.0, dtype=y.dtype)
    return F.binary_cross_entropy_with_logits(
        y[mask], x[mask].sigmoid(), weight=weight, reduction="none"
    ).max()


def the_largest(model: Odd, x: Tensor) -> Tensor:
    y, mask = model.linear(x), x[..., 1] > 0
    return y[mask].max() + y[mask].mean(0).square().sum()


LEFT = [
    changed_afterwards, masks_around_a_write, normalized_over_rows, the_largest,
    the_largest_weighted,
]  # fmt: skip


@pytest.mark.parametrize("body", [*BY_ROWS, *LEFT], ids=lambda body: body.__name__)
def test_losses_over_selected_rows_train_as_in_eager(body):
    torch.manual_seed(0)
    model = Odd(body).double()
    batches = [{"x": torch.randn(2, 3, 4, dtype=torch.float64)} for _ in range(3)]
    tolerance = 1e-6 if body is cross_entropy_of_flat_rows else 1e-9  # computed in float32
    names = assert_splits_equal_eager(model, batches, MESHES, tolerance=tolerance)
    assert any(map(is_left, names)) == (body in LEFT), names


def test_no_selected_row_gives_what_it_gives_in_eager_mode():
    """A sum of nothing is zero, a mean of nothing NaN, and neither has a gradient."""

    class Nothing(nn.Module):
        def __init__(self, how: str) -> None:
            super().__init__()
            self.linear, self.how = nn.Linear(4, 4), how

        def forward(self, x: Tensor) -> Tensor:
            y, mask = self.linear(x), x[:, 0] > 99
            return F.mse_loss(y[mask], x[mask], reduction=self.how) + y.square().mean()

    x = torch.randn(4, 4)
    for how in ("sum", "mean"):
        model = Nothing(how)
        expected = model(x)
        with autopar.compile(
            model, 1, example_inputs=(x,), profile_limit_s=0, nonfinite="ignore",
            check_gradients=False,
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        ) as compiled:  # fmt: skip
            loss = compiled.train_step(x)
        torch.testing.assert_close(loss, expected.detach(), equal_nan=True)
