"""What goes into an array and comes out of it: calls, states of single models, snapshots."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.base.errors import InputError
from autopar.fusion import Candidate, RandomSearch, Uniform, largest_array, sweep
from autopar.fusion.array import Array, Snapshot

SGD = functools.partial(torch.optim.SGD, lr=0.1)
X, Y = torch.randn(8, 6), torch.randn(8, 6)


class Scaled(nn.Module):
    """Its call has a number; it counts its calls in a buffer that its state does not have."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("scale", torch.tensor(scale))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def get_extra_state(self) -> str:
        return "kept"

    def set_extra_state(self, state: str) -> None:
        assert state == "kept"

    def forward(self, x: Tensor, y: Tensor, factor: float = 1.0) -> Tensor:
        self.calls.add_(1)
        return (self.layer(x) * self.scale * factor + self.calls - y).square().mean()


def compiled(models: list[nn.Module], batch: Any, **options: Any) -> Array:
    given = {"optimizer": SGD, "profile_limit_s": 0, "check_gradients": False, **options}
    array = autopar.compile(models, 1, example_inputs=batch, **given)
    assert isinstance(array, Array)
    return array


def losses(models: list[nn.Module], *call: Any) -> list[float]:
    return [model(*call).item() for model in models]


def test_a_shared_batch_is_read_as_each_model_takes_it() -> None:
    models: list[nn.Module] = [Scaled(), Scaled()]
    with compiled(models, [{"x": X, "y": Y}, {"y": Y, "x": X}]) as array:
        got = array.train_step(x=X, y=Y).tolist()
    assert got == pytest.approx(losses(models, X, Y))
    with (
        compiled(models, [(X, Y, 1.0), (X, Y, 2.0)]) as array,
        pytest.raises(InputError, match=r"2\.0"),
    ):
        array.train_step(X, Y, 1.0)


def test_a_wrong_number_of_batches_is_refused() -> None:
    models: list[nn.Module] = [Scaled(), Scaled(), Scaled()]
    with pytest.raises(InputError, match="list of 2 batches for 3 models"):
        compiled(models, [(X, Y), (X, Y)])
    with compiled(models, [(X, Y)] * 3) as array:
        array.leave(1)
        with pytest.raises(InputError, match="list of 3 batches for 2 models"):
            array.train_step([(X, Y)] * 3)


def test_a_model_comes_back_with_all_its_buffers() -> None:
    with compiled([Scaled(), Scaled(2.0)], (X, Y)) as array:
        for _ in range(3):
            array.train_step(X, Y)
        array.leave(1)
        array.train_step(X, Y)
        for number, num_steps in ((0, 4), (1, 3)):
            model, state = array.model(number), array.state_dict(number)
            assert model.calls.item() == num_steps
            assert list(state) == list(model.state_dict())
            Scaled().load_state_dict(state)


def test_a_snapshot_with_another_shared_buffer_is_refused() -> None:
    with compiled([Scaled(), Scaled(2.0)], (X, Y)) as different:
        snapshots = different.snapshots()
        with compiled([Scaled(), Scaled()], (X, Y)) as same:
            same.restore({1: snapshots[0]})
            with pytest.raises(InputError, match="'scale' in the snapshot for model 0 differs"):
                same.restore({0: snapshots[1]})
        adam = functools.partial(torch.optim.Adam, lr=0.1)
        with (
            compiled([Scaled(), Scaled(2.0)], (X, Y), optimizer=adam) as other,
            pytest.raises(InputError, match="an optimizer with other options"),
        ):
            other.restore(snapshots)


def made(configuration: Any) -> Candidate:
    return Candidate(model=Scaled(), optimizer=functools.partial(torch.optim.SGD, **configuration))


def test_a_trial_without_a_number_ranks_last() -> None:
    values = iter([3.0, float("nan"), 1.0])
    searcher = RandomSearch({"lr": Uniform(low=0.01, high=0.1)}, num_trials=3, num_steps=1)
    found = sweep(
        made, searcher, lambda step: (X, Y),
        functools.partial(
            autopar.compile, devices=1, example_inputs=(X, Y), profile_limit_s=0,
            check_gradients=False,
        ),
        evaluate=lambda model: next(values),
    )  # fmt: skip
    assert [trial.value for trial in found] == [1.0, 3.0, float("inf")]


def test_what_is_no_sweep_and_no_size_is_refused() -> None:
    space, cluster = {"lr": Uniform(low=0.01, high=0.1)}, autopar.Cluster.detect(1)

    def swept(make: Any = made, **options: Any) -> None:
        searcher = RandomSearch(space, num_trials=1, num_steps=1)
        sweep(make, searcher, lambda step: (X, Y), autopar.compile, **options)

    with pytest.raises(InputError, match=r"array_size is 1\.5"):
        swept(array_size=1.5)
    with pytest.raises(InputError, match=r"returned a Scaled; return an autopar\.fusion\.Cand"):
        swept(lambda configuration: Scaled())
    with pytest.raises(InputError, match=r"'lr': \[1, 2\], which is no distribution"):
        RandomSearch({"lr": [1, 2]}, num_trials=1, num_steps=1)  # type: ignore[dict-item]
    with pytest.raises(InputError, match=r"cluster must be an autopar\.Cluster, got 1"):
        largest_array(Scaled(), 1, (X, Y))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="at_most is 0"):
        largest_array(Scaled(), cluster, (X, Y), at_most=0)
    with pytest.raises(InputError, match="'skip', 'ignore' or 'leave'"):
        compiled([Scaled(), Scaled()], (X, Y), nonfinite="drop")


class Noisy(nn.Module):
    """Dropout and batch norm."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 6)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layers(x) - y).square().mean()


def noisy(width: int = 6, devices: int = 1, **options: Any) -> Array:
    torch.manual_seed(0)
    rates = (0.1, 0.03, 0.01)
    given = {
        "optimizer": [functools.partial(torch.optim.AdamW, lr=lr) for lr in rates],
        "lr_scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
        "nonfinite": "skip", "seed": 3, **options,
    }  # fmt: skip
    models: list[nn.Module] = [Noisy(width) for _ in rates]
    array = autopar.compile(
        models, devices, example_inputs=(X, Y), profile_limit_s=0, check_gradients=False, **given
    )
    assert isinstance(array, Array)
    return array


@pytest.mark.parametrize("devices", [1, 2])
def test_an_array_goes_on_from_a_checkpoint(devices: int, tmp_path: Path) -> None:
    """Bitwise, with one model that had left, in an array compiled anew."""
    with noisy() as array:
        for _ in range(3):
            array.train_step(X, Y)
        array.leave(1)
        array.train_step(X, Y)
        array.num_skipped_steps[2] = 7
        array.save(tmp_path / "saved")
        expected = [array.train_step(X, Y) for _ in range(3)]
        states = [array.state_dict(i) for i in range(3)]
        optimizers = [array.optimizer_state_dict(i) for i in range(3)]
    with noisy(devices=devices) as again:
        again.train_step(X, Y)
        again.load(tmp_path / "saved")
        assert again.active == (0, 2)
        assert again.num_skipped_steps == [0, 0, 7]
        for losses_ in expected:
            torch.testing.assert_close(again.train_step(X, Y), losses_)
        for i in range(3):
            torch.testing.assert_close(again.state_dict(i), states[i])
            own = again.optimizer_state_dict(i)
            torch.testing.assert_close(own["state"], optimizers[i]["state"])
            assert own["param_groups"] == optimizers[i]["param_groups"]
        again.save(tmp_path / "saved")  # over the one before
        again.leave(0)
        with pytest.raises(InputError, match="model 0 trains in the checkpoint"):
            again.load(tmp_path / "saved")


def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    with noisy() as array, compiled([Scaled()], (X, Y)) as other:
        array.save(tmp_path / "array")
        other.save(tmp_path / "other")
        array.compiled.save(tmp_path / "model")
        before = array.state_dict(0)
        for name, message in (
            ("other", r"is of an array of 1 models, and this one has 3; compile as many$"),
            ("model", "is not of an array"),
            ("none", "there is no checkpoint"),
        ):
            with pytest.raises(InputError, match=message):
                array.load(tmp_path / name)
        torch.testing.assert_close(array.state_dict(0), before)
    with (
        noisy(width=7) as wider,
        pytest.raises(InputError, match=r"'layers.0.bias' of model 0 has shape \(6,\) there"),
    ):
        wider.load(tmp_path / "array")
    with (
        noisy(optimizer=SGD) as plainer,
        pytest.raises(InputError, match="an optimizer with other options"),
    ):
        plainer.load(tmp_path / "array")
    for file in (tmp_path / "array").glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    with noisy() as array:
        before = array.state_dict(0)
        with pytest.raises(InputError, match="does not have its checksum"):
            array.load(tmp_path / "array")
        torch.testing.assert_close(array.state_dict(0), before)


def test_a_checkpoint_of_numbers_that_are_not_finite_is_refused(tmp_path: Path) -> None:
    with noisy(optimizer=functools.partial(torch.optim.SGD, lr=1e30), nonfinite="skip") as array:
        array.train_step(X, Y)
        snapshot = array.snapshot(1)
        state = {**snapshot.state, "layers.0.weight": torch.full((6, 6), torch.nan)}
        array.restore({1: Snapshot(state=state, training=snapshot.training)})
        with pytest.raises(InputError, match=r"'layers.0.weight' of model 1 holds numbers that"):
            array.save(tmp_path / "saved")
        assert not (tmp_path / "saved").exists()
        array.save(tmp_path / "saved", allow_nonfinite=True)
        array.load(tmp_path / "saved")
