"""Models of an array train as each does alone: losses, weights, optimizer state, random numbers."""

from __future__ import annotations

import copy
import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.base.errors import CaptureError, InputError, NonFiniteError, OptimizerError
from autopar.fusion.array import Array, Snapshot
from autopar.fusion.members import members_of
from autopar.runtime.runners.local import LocalRunner
from autopar.runtime.step.agreement import NonFinite
from tests.fusion.arrays import Alone, alone_of, array_of, assert_state, check_array, doubled
from tests.runtime.conftest import Groups

SGD = functools.partial(torch.optim.SGD, momentum=0.9, dampening=0.1)
OPTIMIZERS = (
    functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
    functools.partial(torch.optim.Adam, lr=0.01),
    functools.partial(torch.optim.AdamW, lr=0.03, weight_decay=0.2),
    functools.partial(torch.optim.Adadelta, lr=0.5),
    functools.partial(torch.optim.NAdam, lr=0.02),
    functools.partial(torch.optim.RMSprop, lr=0.01, centered=True),
    functools.partial(torch.optim.Adagrad, lr=0.1),
    functools.partial(torch.optim.SGD, lr=0.2),
)
SCHEDULERS = (
    functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5),
    functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0),
    None,
)


def mlp(width: int = 16, act: type[nn.Module] = nn.ReLU) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), act(), nn.Linear(width, 4)).double()


def models_of(num: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [mlp() for _ in range(num)]


def batches_of(num: int, *, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(seed)
    return [doubled((torch.randn(6, 8), torch.randint(4, (6,)))) for _ in range(num)]


@pytest.mark.parametrize("num", [1, 3, 8])
def test_every_model_trains_with_its_own_optimizer_and_scheduler(num: int, groups: Groups) -> None:
    batches = batches_of(5)
    array = array_of(
        groups, models_of(num), batches[0], loss_fn=F.cross_entropy,
        optimizer=list(OPTIMIZERS[:num]),
        lr_scheduler=[SCHEDULERS[i % 3] for i in range(num)],
        max_grad_norm=[None if i % 2 else 0.5 for i in range(num)],
    )  # fmt: skip
    check_array(array, batches)


def hooked(parameters: list[nn.Parameter], *, lr: float) -> torch.optim.Optimizer:
    """AdamW that halves all gradients before each of its steps."""

    def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)

    optimizer = torch.optim.AdamW(parameters, lr=lr, eps=0.1)  # so that a factor does not cancel
    optimizer.register_step_pre_hook(halve)
    return optimizer


def test_hooks_of_a_models_optimizer_run_in_each_step(groups: Groups) -> None:
    batches = batches_of(4)
    array = array_of(
        groups, models_of(3), batches[0], loss_fn=F.cross_entropy,
        optimizer=[functools.partial(hooked, lr=0.1), OPTIMIZERS[2], OPTIMIZERS[-1]],
        lr_scheduler=[SCHEDULERS[0], None, SCHEDULERS[0]],
    )  # fmt: skip
    check_array(array, batches)


def test_each_model_trains_on_a_batch_of_its_own(groups: Groups) -> None:
    batches = [list(each) for each in zip(*(batches_of(5, seed=s) for s in range(3)))]
    array = array_of(
        groups, models_of(3), batches[0], loss_fn=F.cross_entropy, optimizer=list(OPTIMIZERS[:3])
    )
    check_array(array, batches, own=True)
    assert repr(array) == "<Array of 3 models, 3 of them training>"


def test_an_array_for_own_batches_takes_a_shared_one(groups: Groups) -> None:
    batches = batches_of(3)
    array = array_of(
        groups, models_of(3), [batches[0]] * 3, loss_fn=F.cross_entropy, optimizer=OPTIMIZERS[1]
    )
    check_array(array, batches)


def test_ignored_rows_count_for_no_model(groups: Groups) -> None:
    def batch(seed: int) -> tuple[Tensor, Tensor]:
        x, y = batches_of(1, seed=seed)[0]
        y[:seed] = -100
        return x, y

    own = [[batch(0), batch(2), batch(5)]]
    array = array_of(groups, models_of(3), own[0], loss_fn=F.cross_entropy, optimizer=OPTIMIZERS[0])
    check_array(array, own, own=True)


@pytest.mark.parametrize("loss_fn", [F.mse_loss, F.l1_loss, F.huber_loss])
def test_losses_by_element(loss_fn: object, groups: Groups) -> None:
    x = torch.randn(6, 8).double()
    batch = x, torch.randn(6, 4).double()
    array = array_of(groups, models_of(3), batch, loss_fn=loss_fn, optimizer=OPTIMIZERS[0])
    check_array(array, [batch] * 2)


def test_models_of_other_shapes_are_computed_beside_the_fused_ones(groups: Groups) -> None:
    torch.manual_seed(0)
    models = [mlp(), mlp(24), mlp(), mlp(act=nn.Tanh), mlp(24)]
    batches = batches_of(3)
    array = array_of(
        groups, models, batches[0], loss_fn=F.cross_entropy, optimizer=list(OPTIMIZERS[:5])
    )
    hidden = {op.models for op in array.fused.ops if op.target == "aten.linear.default"}
    assert {(0, 2, 3), (1, 4)} <= hidden
    check_array(array, batches)


class Dropped(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = F.dropout(F.relu(self.first(F.dropout(x, 0.2))), 0.5)
        return F.cross_entropy(self.second(hidden), y)


class Attentive(nn.Module):
    """Attention that drops nothing, before dropout in the same block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        heads = self.first(x).view(-1, 2, 4, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads).flatten(1)
        return F.cross_entropy(self.second(F.dropout(mixed, 0.5)), y)


@pytest.mark.parametrize("kind", [Dropped, Attentive])
def test_a_model_draws_in_an_array_what_it_draws_alone(
    kind: type[nn.Module], groups: Groups
) -> None:
    torch.manual_seed(0)
    models: list[nn.Module] = [kind().double() for _ in range(3)]
    batches = batches_of(3)
    make = functools.partial(torch.optim.SGD, lr=0.1)
    array = array_of(groups, models, batches[0], optimizer=make, seed=[3, 4, 3])
    together = torch.stack([array.train_step(*b) for b in batches], 1)
    for index, model in enumerate(models):
        alone = alone_of(groups, model, batches[0], optimizer=make, seed=[3, 4, 3][index])
        losses = torch.stack([alone.train_step(b) for b in batches])
        torch.testing.assert_close(together[index], losses)
    assert len({float(x) for x in together[:, 0]}) == 3


def test_models_go_on_from_a_snapshot_of_before_the_first_step(groups: Groups) -> None:
    """Nothing of the steps since is left, neither momentum nor counts of steps."""
    batches = batches_of(2)
    array = array_of(
        groups, models_of(2), batches[0], loss_fn=F.cross_entropy, optimizer=list(OPTIMIZERS[:2])
    )
    first = {index: array.snapshot(index) for index in range(2)}
    array.train_step(*batches[1])
    array.restore(first)
    check_array(array, batches)


def test_no_gradient_of_a_model_reaches_another(groups: Groups) -> None:
    batches = [list(each) for each in zip(*(batches_of(2, seed=s) for s in range(2)))]
    runs = []
    for changed in (False, True):
        for batch in batches:
            if changed:
                batch[1] = (batch[1][0] * 100, batch[1][1])
        array = array_of(
            groups, models_of(2), batches[0], loss_fn=F.cross_entropy, optimizer=OPTIMIZERS[1]
        )
        for batch in batches:
            array.train_step(batch)
        runs.append(array.state_dict(0))
    assert all(torch.equal(a, b) for a, b in zip(runs[0].values(), runs[1].values()))


def infinite(batch: list[tuple[Tensor, Tensor]], model: int) -> list[tuple[Tensor, Tensor]]:
    x, y = batch[model]
    changed = list(batch)
    changed[model] = (torch.full_like(x, torch.inf), y)
    return changed


def test_a_model_that_overflows_skips_its_step_alone(groups: Groups) -> None:
    batches = [list(each) for each in zip(*(batches_of(3, seed=s) for s in range(3)))]
    array = array_of(
        groups, models_of(3), batches[0], loss_fn=F.cross_entropy, optimizer=list(OPTIMIZERS[:3]),
        nonfinite=NonFinite.SKIP,
    )  # fmt: skip
    alone = [Alone(member) for member in array.members]
    for number, batch in enumerate(batches):
        array.train_step(infinite(batch, 1) if number == 1 else batch)
        for index, model in enumerate(alone):
            if (number, index) != (1, 1):
                model.step(batch[index])
    for index, model in enumerate(alone):
        assert_state(array.state_dict(index), model.model.state_dict(), 1e-9)
    assert array.num_skipped_steps == [0, 1, 0]


def test_a_step_that_raises_changes_no_model_and_names_the_culprit(groups: Groups) -> None:
    batch = [batches_of(1, seed=s)[0] for s in range(3)]
    array = array_of(groups, models_of(3), batch, loss_fn=F.cross_entropy, optimizer=OPTIMIZERS[1])
    before = [array.state_dict(i) for i in range(3)]
    with pytest.raises(NonFiniteError, match=r"model 2 is not finite"):
        array.train_step(infinite(batch, 2))
    for index, state in enumerate(before):
        assert all(torch.equal(state[k], v) for k, v in array.state_dict(index).items())


def test_a_model_that_leaves_changes_no_other_by_a_bit(groups: Groups) -> None:
    batches = [list(each) for each in zip(*(batches_of(4, seed=s) for s in range(4)))]
    states = []
    for leaves in (False, True):
        array = array_of(
            groups, models_of(4), batches[0], loss_fn=F.cross_entropy,
            optimizer=list(OPTIMIZERS[:4]), lr_scheduler=SCHEDULERS[0],
            nonfinite=NonFinite.SKIP, leaves=True,
        )  # fmt: skip
        for number, batch in enumerate(batches):
            given = infinite(batch, 1) if leaves and number == 1 else batch
            array.train_step([given[i] for i in array.active])
        assert array.active == ((0, 2, 3) if leaves else (0, 1, 2, 3))
        states.append([array.state_dict(i) for i in range(4)])
    for index in (0, 2, 3):
        kept, left = states[0][index], states[1][index]
        assert all(torch.equal(kept[name], left[name]) for name in kept)
    one = Alone(array.members[1])
    one.step(batches[0][1])
    assert_state(states[1][1], one.model.state_dict(), 1e-9)


def test_a_model_comes_back_as_a_plain_one_with_its_optimizer_state(groups: Groups) -> None:
    batches = batches_of(4)
    array = array_of(
        groups, models_of(3), batches[0], loss_fn=F.cross_entropy, optimizer=list(OPTIMIZERS[:3])
    )
    alone = Alone(array.members[2])
    for batch in batches[:2]:
        array.train_step(*batch)
        alone.step(batch)
    back = Alone(array.members[2])
    back.model = array.model(2)
    back.optimizer = array.members[2].optimizer(list(back.model.parameters()))
    back.optimizer.load_state_dict(copy.deepcopy(array.optimizer_state_dict(2)))
    for batch in batches[2:]:
        back.step(batch)
        alone.step(batch)
    assert_state(back.model.state_dict(), alone.model.state_dict(), 1e-9)


def test_what_cannot_be_an_array_is_refused(groups: Groups) -> None:
    batch = batches_of(1)[0]
    with pytest.raises(InputError, match="2 entries for 3 models"):
        members_of(
            models_of(3), loss_fn=None, optimizer=list(OPTIMIZERS[:2]), lr_scheduler=None,
            max_grad_norm=None, seed=None,
        )  # fmt: skip
    with pytest.raises(InputError, match="no scalar loss"):
        array_of(groups, models_of(2), (batch[0],), optimizer=OPTIMIZERS[0])
    array = array_of(groups, models_of(2), batch, loss_fn=F.cross_entropy, optimizer=OPTIMIZERS[0])
    with pytest.raises(InputError, match="compiled for one batch that all models share"):
        array.train_step([batch, batch])


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"num_stages": 2}, "is not for an array of models"),
        ({"schedule": "1f1b"}, "is not for an array of models"),
        ({"num_microbatches": 4}, "is not for an array of models"),
        ({"num_microbatches": True}, "is not for an array of models"),
        ({"offload": True}, "offload=True is not for an array of models.* no offloading"),
        ({"reshard_after_forward": True}, "is not for an array of models"),
        ({"max_grad_norm": -1}, "max_grad_norm is -1; .*positive finite"),
        ({"max_grad_norm": [1.0, math.nan]}, "max_grad_norm is nan; .*positive finite"),
        ({"max_grad_norm": ["x", None]}, "max_grad_norm is 'x'; .*positive finite"),
        ({"seed": "a"}, "seed is 'a'; it must be an int"),
        ({"seed": [1.5, 2]}, "seed is 1.5; it must be an int"),
        ({"lr_scheduler": ["x", None]}, "lr_scheduler is 'x', .*pass a callable"),
        ({"optimizer": [OPTIMIZERS[0], "x"]}, "optimizer is 'x'; it must be a callable"),
        ({"optimizer": [OPTIMIZERS[0], lambda _: None]}, "returned a NoneType; pass a callable"),
    ],
)
def test_a_wrong_keyword_of_an_array_is_refused(
    own: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalRunner, "start_workers", None)  # refused before any worker starts
    given: dict[str, Any] = {
        "example_inputs": batches_of(1)[0], "loss_fn": F.cross_entropy,
        "optimizer": OPTIMIZERS[0], "profile_limit_s": 0,
    }  # fmt: skip
    with pytest.raises((InputError, OptimizerError), match=message):
        autopar.compile(models_of(2), 1, **{**given, **own})


def unstarted(num: int) -> Array:
    """An array without workers."""
    members = members_of(
        models_of(num), loss_fn=F.cross_entropy, optimizer=OPTIMIZERS[0], lr_scheduler=None,
        max_grad_norm=None, seed=None,
    )  # fmt: skip
    return Array(members, batches_of(1)[0], lambda *_: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", ["a", None, 0.5, -1, 2, [1]], ids=str)
@pytest.mark.parametrize(
    "method", ["state_dict", "model", "optimizer_state_dict", "snapshot", "leave"]
)
def test_a_number_of_no_model_is_refused(method: str, number: Any) -> None:
    with pytest.raises(InputError, match=r"there is no model .*from 0 to 1, such as"):
        getattr(unstarted(2), method)(number)


@pytest.mark.parametrize(
    ("snapshots", "message"),
    [
        ([1], r"given a list; pass a mapping"),
        ({1: None}, r"given a NoneType; pass a mapping"),
        ({2: Snapshot(state={}, training=None)}, r"no model 2"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_snapshot_is_refused(snapshots: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        unstarted(2).restore(snapshots)


def test_an_array_refuses_a_plan_that_moves_tensors(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "example_inputs": batches_of(1)[0], "loss_fn": nn.functional.cross_entropy,
        "optimizer": functools.partial(torch.optim.SGD, lr=0.1), "profile_limit_s": 0,
    }  # fmt: skip
    with autopar.compile(models_of(2), 1, **given) as array:
        document = json.loads(array.plan.to_json())
    document["offload"] = {
        "ranks": [{"num_ops": 0, "starts_on_host": [], "transfers": []}],
        "moved_bytes": 0,
        "stall_s": 0.0,
    }
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match="an array of models does not"):
        autopar.compile(models_of(2), 1, plan=path, **given)


def test_steps_that_are_profiled_train_as_others() -> None:
    """Against an array of the same models without it: one step before the measured ones, one more
    in which ops are timed, and two in which tensors are counted."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(3)]
    batch = torch.randn(12, 8), torch.randint(4, (12,))
    losses = []
    for num_steps in (0, 1):
        with autopar.compile(
            copy.deepcopy(models), 1, example_inputs=batch, loss_fn=F.cross_entropy,
            optimizer=functools.partial(torch.optim.SGD, lr=0.1), profile_limit_s=0,
        ) as array:  # fmt: skip
            if num_steps:
                profile = array.profile(*batch, num_steps=num_steps)
                assert len(profile.step_times_s) == num_steps
                assert profile.plan is array.plan
                drawn, _ = array.figure("phases")
                assert drawn.get_suptitle() == profile.figure("phases")[0].get_suptitle()
                assert "a step by phase" in array._repr_html_()
                assert all(each.forward_s > 0 for each in profile.ranks)
            else:
                for _ in range(5):
                    array.train_step(*batch)
            losses.append(array.train_step(*batch))
            array.leave(0, 1, 2)
            with pytest.raises(InputError, match="every model has left this array"):
                array.profile(*batch)
    assert torch.equal(*losses)


def test_an_array_has_the_figures_of_its_fusion_and_of_its_plan() -> None:
    with autopar.compile(
        models_of(2), 1, batches_of(1)[0], loss_fn=F.cross_entropy, optimizer=OPTIMIZERS[0]
    ) as array:
        assert array.figure()[0].get_suptitle() == array.figure("fusion")[0].get_suptitle()
        assert "2 models in" in array.figure("fusion")[0].get_suptitle()
        assert array.figure("step")[0].get_suptitle().startswith("A step of ")
        with pytest.raises(InputError, match=r"'fusoin'; write fusion \| .*did you mean 'fusion'"):
            array.figure("fusoin")
        with pytest.raises(InputError, match="the plan has no figure 'offload'"):
            array.figure("offload")


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


def test_hooks_and_shared_parameters_of_any_model_are_refused() -> None:
    models, x = [Hooked(), Hooked()], torch.randn(4, 4)
    compiled = functools.partial(
        autopar.compile, devices=1, example_inputs=x, profile_limit_s=0,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    )  # fmt: skip
    handle = models[1].linear.weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(CaptureError, match=r"linear\.weight.* has a hook"):
        compiled(models)
    handle.remove()
    models[1].linear = models[0].linear
    with pytest.raises(InputError, match=r"models 0 and 1 share the parameter 'linear\.weight'"):
        compiled(models)
    models[0].linear.requires_grad_(False)
    with pytest.raises(InputError, match="cannot be trained"):
        compiled(models)


def test_a_model_leaves_whatever_became_of_the_originals_and_of_others() -> None:
    models, x = [Hooked(), Hooked(), Hooked()], torch.randn(4, 4)
    array = autopar.compile(
        models, 1, example_inputs=x, profile_limit_s=0, nonfinite="skip",
        optimizer=[functools.partial(torch.optim.SGD, lr=lr) for lr in (0.1, 0.2, 1e30)],
    )  # fmt: skip
    assert isinstance(array, Array)
    with array:
        for _ in range(4):
            array.train_step(x)
        before = array.state_dict(1)
        models[1].linear = nn.Linear(4, 7)
        models[0].eval().half()
        array.leave(0)
        assert array.active == (1, 2)
        torch.testing.assert_close(array.state_dict(1), before)
        assert array.model(0).linear.weight.dtype == torch.float32
        array.train_step(x)
        with pytest.raises(InputError, match="no model is named"):
            array.leave()
