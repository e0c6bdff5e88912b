"""Arrays compiled by default settings, gradient check included, train each model as alone."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

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
    def __init__(self, share: float) -> None:
        super().__init__()
        self.layer, self.share = nn.Linear(6, 6), share

    def forward(self, x: Tensor) -> Tensor:
        heads = self.layer(x).view(2, 4, 2, 3).transpose(1, 2)
        return F.scaled_dot_product_attention(
            heads, heads, heads, dropout_p=self.share
        ).square().mean()  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        lambda: [Dropping(0.2), Dropping(0.2)],
        lambda: [Dropping(0.2, 0.3, 0.4)],
        lambda: [Dropping(0.1, 0.5), Dropping(0.0, 0.5)],
        lambda: [DroppingAttention(0.2), DroppingAttention(0.2)],
    ],
    ids=["one", "three", "another", "attention"],
)
def test_a_model_drops_in_an_array_what_it_drops_alone(make: Any) -> None:
    torch.manual_seed(0)
    models, x = make(), torch.randn(8, 6)
    with compiled(copy.deepcopy(models), (x,)) as array:
        together = torch.stack([array.train_step(x) for _ in range(3)], 1)
    for losses, model in zip(together, models):
        with compiled(model, (x,)) as alone:
            torch.testing.assert_close(losses, torch.stack([alone.train_step(x) for _ in range(3)]))
