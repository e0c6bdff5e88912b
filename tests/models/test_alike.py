"""Models share a capture only if their graphs are the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.frontend.alike import capture_key

X, Y = torch.randn(4, 8), torch.randint(3, (4,))


class Scaled(nn.Module):
    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)
        self.scale = scale
        self.offset = torch.zeros(8)  # a constant of the graph

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first(x)) * self.scale + self.offset
        out: Tensor = self.last(self.second(hidden))
        return out


def same(_: Scaled) -> None:
    """Nothing but the values of parameters."""


def scaled(model: Scaled) -> None:
    model.scale = 3.0


def shifted(model: Scaled) -> None:
    model.offset += 1


def frozen(model: Scaled) -> None:
    model.first.weight.requires_grad_(False)


def evaluated(model: Scaled) -> None:
    model.eval()


def tied(model: Scaled) -> None:
    model.second.weight = model.first.weight


def overlapping(model: Scaled) -> None:
    model.second.weight.data = model.first.weight.data


def widened(model: Scaled) -> None:
    model.first, model.second = nn.Linear(8, 16), nn.Linear(16, 8)


def wrapped(model: Scaled) -> None:
    model.second = nn.Sequential(model.second)  # type: ignore[assignment]


@pytest.mark.parametrize(
    "change",
    [same, scaled, shifted, frozen, evaluated, tied, overlapping, widened, wrapped],
    ids=lambda change: change.__name__,
)
def test_what_a_graph_depends_on_changes_the_key(change: Callable[[Scaled], None]) -> None:
    model, other = Scaled(), Scaled()
    change(other)
    keys = [capture_key(each, F.cross_entropy, (X, Y)) for each in (model, other)]
    assert None not in keys
    assert (keys[0] == keys[1]) == (change is same)


def test_calls_have_keys_of_their_own() -> None:
    model = Scaled()
    own = capture_key(model, F.cross_entropy, (X, Y))
    assert own == capture_key(copy.deepcopy(model), F.cross_entropy, (X + 1, Y))
    others: list[Any] = [
        capture_key(model, F.cross_entropy, (X[:2], Y[:2])),
        capture_key(model, F.cross_entropy, (X.double(), Y)),
        capture_key(model, F.nll_loss, (X, Y)),
        capture_key(model, nn.CrossEntropyLoss(label_smoothing=0.1), (X, Y)),
    ]
    assert own not in others
    assert None not in others


def test_what_cannot_be_compared_has_no_key() -> None:
    model = Scaled()
    model.activation = lambda x: x  # type: ignore[assignment]
    assert capture_key(model, F.cross_entropy, (X, Y)) is None
    assert capture_key(Scaled(), lambda out, y: out.sum(), (X, Y)) is None


def test_models_of_an_array_that_differ_in_an_attribute_train_as_alone() -> None:
    models = [Scaled(scale) for scale in (2.0, 2.0, 0.5)]
    alone = copy.deepcopy(models)
    with autopar.compile(
        models, 1, example_inputs=(X, Y), loss_fn=F.cross_entropy, optimizer=torch.optim.SGD
    ) as array:
        losses = [array.train_step(X, Y) for _ in range(3)]
        snapshots = array.snapshots()
        assert list(array.snapshots([2, 0])) == [2, 0]
    for index, model in enumerate(alone):
        optimizer = torch.optim.SGD(model.parameters())
        for step in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(X), Y)
            loss.backward()
            optimizer.step()
            torch.testing.assert_close(losses[step][index], loss.detach())
        for name, value in model.named_parameters():
            torch.testing.assert_close(snapshots[index].state[name], value.detach())
