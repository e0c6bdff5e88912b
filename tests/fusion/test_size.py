"""The largest array is predicted, and is what counted memory says it is."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.base.errors import InputError
from autopar.cost_models import Cluster
from autopar.fusion import largest_array
from tests.fusion.arrays import array_of
from tests.fusion.test_array import batches_of
from tests.runtime.conftest import Groups

ADAM = functools.partial(torch.optim.Adam, lr=0.01)


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4096), nn.ReLU(), nn.Linear(4096, 4)).double()


def counted_bytes(groups: Groups, num: int) -> int:
    """The most bytes of tensors that a worker held in steps of an array."""
    batch = batches_of(1)[0]
    array = array_of(
        groups, [wide() for _ in range(num)], batch, loss_fn=F.cross_entropy, optimizer=ADAM
    )
    runner = array.compiled.runner  # type: ignore[attr-defined]
    array.train_step(*batch)
    runner.start_counting_tensors()
    for _ in range(2):
        array.train_step(*batch)
    return int(runner.counted_tensor_bytes()[0])


def test_the_largest_array_is_the_true_one_within_a_model(groups: Groups) -> None:
    budget = 12_000_000
    found = largest_array(
        wide(), Cluster.detect(1), batches_of(1)[0], loss_fn=F.cross_entropy, optimizer=ADAM,
        memory_bytes=budget,
    )  # fmt: skip
    num = found.largest.num_models
    assert found.largest.peak_bytes <= budget
    assert counted_bytes(groups, num - 1) <= budget < counted_bytes(groups, num + 2)
    assert found.pays_best.time_of_a_model_s <= found.looked_at[0].time_of_a_model_s


def test_no_array_and_no_single_device_are_refused() -> None:
    batch = batches_of(1)[0]
    with pytest.raises(InputError, match="asked for one device"):
        largest_array(wide(), Cluster.detect(2), batch, loss_fn=F.cross_entropy)
    with pytest.raises(InputError, match="not even one"):
        largest_array(
            wide(), Cluster.detect(1), batch, loss_fn=F.cross_entropy, memory_bytes=10_000
        )


def test_a_loss_function_may_have_weights() -> None:
    cluster = Cluster.preset("t4", nodes=1, devices_per_node=1)
    loss_fn = nn.CrossEntropyLoss(weight=torch.ones(4).double())
    found = largest_array(wide(), cluster, batches_of(1)[0], loss_fn=loss_fn, at_most=2)
    assert found.largest.num_models == 2
