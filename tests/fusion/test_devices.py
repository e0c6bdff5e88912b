"""Arrays on two processes: models are placed by splitting their dimension, like any other."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.ir.mesh import Mesh
from autopar.ir.placement import S
from tests.fusion.arrays import array_of, check_array
from tests.fusion.test_array import (
    OPTIMIZERS,
    SCHEDULERS,
    Dropped,
    batches_of,
    mlp,
    models_of,
)
from tests.runtime.conftest import Groups

TWO = Mesh(("x",), (2,))
BYTES_OF_A_LOSS = 8


def large(num: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), mlp_head())
        for _ in range(num)
    ]


def mlp_head() -> nn.Module:
    return nn.Linear(512, 4)


def test_models_of_two_devices_share_nothing_but_their_losses(groups: Groups) -> None:
    models = [m.double() for m in large(4)]
    batches = [list(each) for each in zip(*(batches_of(3, seed=s) for s in range(4)))]
    array = array_of(
        groups, models, batches[0], mesh=TWO, is_searched=True, loss_fn=F.cross_entropy,
        optimizer=list(OPTIMIZERS[:4]), lr_scheduler=SCHEDULERS[0], max_grad_norm=0.5,
    )  # fmt: skip
    program = array.compiled.program
    assert {p.stored for p in program.parameters} == {(S(0),)}
    assert {i.placements for i in program.inputs} == {(S(0),)}
    assert sum(c.size_bytes for c in program.collectives()) <= 4 * BYTES_OF_A_LOSS
    check_array(array, batches, own=True)


@pytest.mark.parametrize("seed", range(3))
def test_drawn_plans_train_every_model_as_alone(seed: int, groups: Groups) -> None:
    batches = batches_of(3)
    array = array_of(
        groups, [*models_of(2), mlp(24)], batches[0], mesh=TWO, seed_of_plan=seed,
        loss_fn=F.cross_entropy, optimizer=list(OPTIMIZERS[:3]), max_grad_norm=0.5,
    )  # fmt: skip
    check_array(array, batches)


def test_a_model_that_leaves_takes_its_state_from_whatever_device(groups: Groups) -> None:
    batches = batches_of(4)
    make = functools.partial(
        array_of, groups, models_of(3), batches[0], mesh=TWO, seed_of_plan=1,
        loss_fn=F.cross_entropy, optimizer=list(OPTIMIZERS[:3]), lr_scheduler=SCHEDULERS[0],
    )  # fmt: skip
    states = []
    for leaves in (False, True):
        array = make()
        for number, batch in enumerate(batches):
            array.train_step(*batch)
            if leaves and number == 1:
                array.leave(1)
        states.append([array.state_dict(i) for i in (0, 2)])
    for whole, left in zip(*states):
        for name, tensor in left.items():
            torch.testing.assert_close(tensor, whole[name], rtol=1e-12, atol=1e-12)


def test_dropout_of_a_model_is_the_same_on_whatever_device(groups: Groups) -> None:
    torch.manual_seed(0)
    models: list[nn.Module] = [Dropped(4096).double() for _ in range(4)]
    batches = [[b] * 4 for b in batches_of(2)]
    make = functools.partial(torch.optim.SGD, lr=0.1)
    losses = []
    for mesh in (TWO, Mesh(("x",), (1,))):
        array = array_of(
            groups, models, batches[0], optimizer=make, seed=[3, 4, 5, 6], mesh=mesh,
            is_searched=True,
        )  # fmt: skip
        if mesh is TWO:
            assert {p.stored for p in array.compiled.program.parameters} == {(S(0),)}
        losses.append(torch.stack([array.train_step(b) for b in batches]))
    torch.testing.assert_close(losses[0], losses[1])
