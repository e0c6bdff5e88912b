"""What users of plain modules do with a compiled one: it works, or the error says what to write."""

from __future__ import annotations

import copy
import functools
import logging
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar

ADAM = functools.partial(torch.optim.Adam, lr=0.01)
BATCH = torch.randn(8, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return scale * self.layers(x).square().mean()


def compiled_net(num_devices: int = 1, **options: Any) -> Any:
    return autopar.compile(Net(), num_devices, BATCH, profile_limit_s=0.0, **options)


@pytest.fixture(scope="module")
def compiled() -> Iterator[Any]:
    with compiled_net(optimizer=ADAM) as made:
        yield made


# --- options of compile and plan ------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "name"), [("adamw", "AdamW"), ("Adm", "Adam"), ("mine", "AdamW"), ("sgd", "SGD")]
)
def test_an_optimizer_by_name_is_refused_with_that_optimizer(given: str, name: str) -> None:
    with pytest.raises(autopar.OptimizerError, match=rf"'{given}'.*partial\(torch\.optim\.{name},"):
        compiled_net(optimizer=given)


def test_an_optimizer_or_anything_else_in_its_place_is_refused() -> None:
    made = torch.optim.SGD(Net().parameters(), lr=0.1)
    with pytest.raises(autopar.OptimizerError, match=r"a SGD over the model's own .*optim\.SGD,"):
        compiled_net(optimizer=made)
    with pytest.raises(autopar.OptimizerError, match=r"optimizer is 3; .*optim\.AdamW,"):
        compiled_net(optimizer=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": functools.partial(torch.optim.SGD, learning_rate=0.1)},
         r"optimizer\(parameters\) raised TypeError: .*'learning_rate'.*optim\.AdamW, lr="),
        ({"optimizer": functools.partial(torch.optim.SGD, lr=-1)},
         r"optimizer\(parameters\) raised ValueError: Invalid learning rate: -1"),
        ({"optimizer": ADAM, "lr_scheduler": torch.optim.lr_scheduler.StepLR},
         r"lr_scheduler\(optimizer\) raised TypeError: .*'step_size'.*CosineAnnealingLR, T_max="),
    ],
    ids=["keyword", "value", "scheduler"],
)  # fmt: skip
def test_an_optimizer_or_scheduler_that_cannot_be_made_is_told(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(autopar.OptimizerError, match=message):
        compiled_net(**options)


def test_a_missing_optimizer_is_told_before_anything_is_compiled() -> None:
    def refuses(*_: Any) -> None:
        raise AssertionError("the loss was computed")

    waiting = autopar.compile(Net(), 1, loss_fn=refuses)
    with pytest.raises(autopar.InputError, match=r"needs an optimizer: .*optimizer=functools"):
        waiting.train_step(BATCH)


def test_targets_without_a_loss_function_are_named() -> None:
    with pytest.raises(autopar.InputError, match=r"Linear.forward takes no .* 2.*loss_fn=torch"):
        autopar.compile(nn.Linear(8, 4), 1, (BATCH, torch.randn(8, 4)), optimizer=ADAM)


def test_an_argument_that_the_model_does_not_take_is_named() -> None:
    inputs = {"x": BATCH, "scael": 2.0}
    with pytest.raises(autopar.InputError, match=r"takes no scael.*did you mean 'scale'"):
        autopar.compile(Net(), 1, inputs, optimizer=ADAM)
    with pytest.raises(autopar.InputError, match=r"takes no .* 3.*leave these out"):
        autopar.compile(
            Net(),
            1,
            (BATCH, 1.0, 2.0, BATCH),
            loss_fn=lambda output, target: output,
            optimizer=ADAM,
        )
    with pytest.raises(autopar.InputError, match=r"Net\.forward lacks 'x': loss_fn takes the last"):
        autopar.compile(Net(), 1, (BATCH,), loss_fn=nn.functional.mse_loss, optimizer=ADAM)


def test_inputs_by_name_that_are_not_the_models_are_named() -> None:
    inputs = {"input": BATCH, "target": torch.randn(())}
    with pytest.raises(autopar.InputError, match=r"lacks 'x': the inputs are keywords \['input'\]"):
        autopar.compile(Net(), 1, inputs, loss_fn=nn.functional.mse_loss, optimizer=ADAM)


def test_a_class_in_place_of_a_model_is_refused() -> None:
    with pytest.raises(autopar.InputError, match="is the class Net; pass an instance"):
        autopar.compile(Net, 1, BATCH, optimizer=ADAM)  # type: ignore[call-overload]


def test_an_example_without_a_finite_loss_is_refused() -> None:
    with pytest.raises(autopar.InputError, match="loss of the example inputs is nan in eager mode"):
        autopar.compile(Net(), 1, BATCH[:0], optimizer=ADAM, profile_limit_s=0.0)


def test_a_model_that_fails_is_told_without_torchs_own_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(autopar.InputError, match="the model itself fails in eager mode"):
        autopar.compile(Net(), 1, BATCH[:, :5], optimizer=ADAM)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


CLUSTER = autopar.Cluster.preset("a100-80", nodes=1, devices_per_node=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": {"dp": 2, "tp": 2}, "constraints": autopar.Force("zero3", axis="tpp")},
         r"no axis 'tpp'; write axis='dp' or axis='tp'; did you mean 'tp'\?$"),
        ({"constraints": autopar.Force("zero3", axis="dp")}, r"with mesh=\{'dp': None\}$"),
        ({"constraints": autopar.Pin("layers.0.weight", choice="m0")},
         r"matches a parameter or input, which takes stored=: .*'layers\.0\.weight', stored='S0'"),
        ({"constraints": autopar.Pin("layers.0", stored="S0")},
         r"matches an op or module, which takes choice=: write Pin\('layers\.0', choice='m0'"),
        ({"precision": "bf61"}, "did you mean 'bf16'"),
        ({"recompute": "FULL"}, "did you mean 'full'"),
        ({"recompute": "ful"}, "did you mean 'full'"),
        ({"batch_norm": "globl"}, "did you mean 'global'"),
        ({"update": "earlier"}, "did you mean 'early'"),
        ({"schedule": "1fb1"}, "did you mean '1f1b'"),
        ({"schedule": "atuo"}, "did you mean 'auto'"),
        ({"mesh": {"x": 4}, "constraints": autopar.Pin("layers.0", choice="m0 -")},
         r"write Pin\('layers\.0', choice='m0'\) for a mesh of one axis"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_is_misspelt_or_misplaced_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((autopar.InputError, autopar.ConstraintError), match=message):
        autopar.plan(Net(), CLUSTER, BATCH, **options)


@pytest.mark.parametrize("axis", [0, ["dp"], True])
@pytest.mark.parametrize("kind", [autopar.Force, autopar.Forbid])
def test_an_axis_that_is_no_name_is_refused(kind: Any, axis: Any) -> None:
    with pytest.raises(autopar.ConstraintError, match=r"axis is .*; it is the name of one mesh"):
        kind("zero3", axis=axis)


def test_suggestions_can_be_pasted() -> None:
    named = autopar.plan(
        Net(), CLUSTER, BATCH, mesh={"dp": None}, constraints=autopar.Force("zero3", axis="dp")
    )
    assert "FSDP" in str(named)
    autopar.plan(
        Net(), CLUSTER, BATCH, mesh={"x": 4},
        constraints=autopar.Pin("layers.0.weight", stored="S0"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "preset"), [("A100_80", "a100-80"), ("h100", "h100-sxm"), ("a10080", "a100-80")]
)
def test_a_preset_in_other_spelling_is_suggested(given: str, preset: str) -> None:
    with pytest.raises(autopar.ClusterError, match=f"did you mean '{preset}'"):
        autopar.Cluster.preset(given, nodes=1, devices_per_node=1)


def test_an_optimizer_that_cannot_be_made_is_told_in_the_log(caplog: Any) -> None:
    autopar.plan(Net(), CLUSTER, BATCH, optimizer=lambda parameters: parameters[9])
    assert "those of AdamW" in caplog.text
    assert "IndexError" in caplog.text


def test_a_model_that_is_closed_before_its_first_call_does_not_compile() -> None:
    compiled = autopar.compile(Net(), 1, optimizer=ADAM)
    compiled.close()
    with pytest.raises(autopar.WorkerError, match="closed because close"):
        compiled.train_step(BATCH)


# --- a compiled model -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("parameters", "state_dict"), ("module", "copy_to"), ("to", "autopar.compile"),
        ("half", "precision="), ("backward", "train_step"), ("no_sync", r"loss\.backward\(\)"),
        ("param_groups", "optimizer_state_dict"), ("compile", "kernels="),
        ("register_forward_hook", "before autopar.compile"),
        ("trian_step", "did you mean 'train_step'"), ("pln", "did you mean 'plan'"),
        ("_modules", r"compiled\.copy_to"),
    ],
)  # fmt: skip
def test_attributes_of_modules_are_missing_with_what_to_call(
    compiled: Any, name: str, instead: str
) -> None:
    assert not hasattr(compiled, name)
    with pytest.raises(autopar.MissingError, match=instead):
        getattr(compiled, name)


def test_repr_names_the_model_and_the_plan(compiled: Any) -> None:
    assert repr(compiled).startswith("<Compiled Net: <Plan ")
    assert "by its first call" in repr(autopar.compile(Net(), 1))


@pytest.mark.parametrize(
    "use", [copy.copy, copy.deepcopy, lambda made: torch.save(made, "/dev/null")]
)
def test_copies_and_pickles_are_refused_with_what_to_write(
    compiled: Any, use: Callable[[Any], Any]
) -> None:
    with pytest.raises(autopar.InputError, match=r"compiled\.save\(folder\).*full_state_dict"):
        use(compiled)


def test_backward_on_an_output_names_train_step() -> None:
    with compiled_net() as compiled:
        loss = compiled(BATCH)
        with pytest.raises(autopar.InputError, match=r"backward\(\) was .* no optimizer: .*AdamW"):
            loss.backward()
        changed = compiled(BATCH)
        changed /= 2
        changed[()] = 1.0
        assert changed.item() == 1
        with pytest.raises(autopar.InputError, match="no optimizer"):
            (2 * changed.log()).backward()
        with torch.no_grad():
            assert not compiled(BATCH).requires_grad
        compiled.eval()
        with torch.no_grad():
            assert not compiled(BATCH).requires_grad
        with pytest.raises(autopar.InputError, match=r"is in eval mode\. Call compiled\.train\(\)"):
            compiled(BATCH).backward()


@pytest.mark.parametrize(
    ("args", "kwargs", "hint"),
    [
        (((BATCH,),), {}, r"write \(\*batch\)$"),
        (([BATCH],), {}, r"write \(\*batch\)$"),
        (([1.0, 2.0],), {}, r"Argument '0' must be a tensor, got list: write torch\.tensor"),
        ((), {"x": BATCH}, "the example has no keyword 'x'"),
        ((BATCH,), {"scale": 2.0}, "the example has no keyword 'scale'"),
        ((BATCH, BATCH), {}, "got 2 positional and keywords"),
    ],
    ids=["tuple", "list", "numbers", "keyword", "extra", "two"],
)
def test_a_batch_of_another_structure_is_told_how_to_pass(
    compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any], hint: str
) -> None:
    with pytest.raises(autopar.InputError, match=f"(?i){hint}"):
        compiled.train_step(*args, **kwargs)


def test_a_batch_of_keywords_is_told_how_to_pass() -> None:
    with compiled_net(optimizer=ADAM) as by_place:
        assert by_place.train_step(BATCH) > 0
    batch = {"x": BATCH}
    with autopar.compile(Net(), 1, batch, optimizer=ADAM, profile_limit_s=0.0) as made:
        with pytest.raises(autopar.InputError, match=r"write \(\*\*batch\)$"):
            made.train_step(batch)
        with pytest.raises(autopar.InputError, match=r"no keyword 'X'; did you mean 'x'\?$"):
            made.train_step(X=BATCH)


def test_a_batch_as_one_argument_of_a_loops_call_is_told_how_to_pass() -> None:
    batch = BATCH, torch.randn(8, 4)
    options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "optimizer": ADAM}
    with (
        autopar.compile(nn.Linear(8, 4), 1, batch, profile_limit_s=0.0, **options) as made,
        pytest.raises(autopar.InputError, match=r"without its loss_fn: .*write \(\*batch\)$"),
    ):
        made(batch)


def test_a_keyword_that_compile_or_plan_does_not_take_is_named() -> None:
    with pytest.raises(
        TypeError, match=r"autopar\.compile takes no optimiser=; did you mean 'optimizer'"
    ):
        compiled_net(optimiser=ADAM)
    with pytest.raises(
        autopar.InputError, match=r"autopar\.plan takes no q=; it takes model, cluster"
    ):
        autopar.plan(Net(), CLUSTER, BATCH, q=1)


def test_the_optimizer_of_a_compiled_model_is_not_copied_or_scaled(compiled: Any) -> None:
    for use in (copy.deepcopy, pickle.dumps):
        with pytest.raises(autopar.InputError, match=r"compiled\.optimizer\.state_dict\(\) has"):
            use(compiled.optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(compiled(BATCH)).backward()
    with pytest.raises(autopar.InputError, match=r"GradScaler is not needed: precision='fp16'"):
        scaler.step(compiled.optimizer)
    compiled.optimizer.zero_grad()


def test_a_misspelt_attribute_of_an_uncompiled_model_is_named() -> None:
    waiting = autopar.compile(Net(), 1, optimizer=ADAM)
    with pytest.raises(autopar.MissingError, match="did you mean 'train_step'"):
        _ = waiting.trian_step
    with pytest.raises(autopar.MissingError, match="nothing is compiled yet"):
        _ = waiting.plan


@pytest.mark.filterwarnings("error:Dynamo")
def test_torch_compile_around_it_changes_nothing(compiled: Any) -> None:
    compiled.eval()
    try:
        assert torch.equal(torch.compile(compiled)(BATCH), compiled(BATCH))
        step = torch.compile(lambda x: 2 * compiled(x))
        assert torch.equal(step(BATCH), 2 * compiled(BATCH))
    finally:
        compiled.train()
        torch.compiler.reset()


def test_after_close_every_call_says_so(tmp_path: Path) -> None:
    with compiled_net(optimizer=ADAM, max_grad_norm=1.0) as made:
        made.train_step(BATCH)
        optimizer = made.optimizer
        made.save(tmp_path / "saved")
        norm = made.grad_norm
    calls: list[Callable[[], Any]] = [
        lambda: made.train_step(BATCH), lambda: made(BATCH), made.state_dict, made.gradients,
        lambda: made.save(tmp_path / "new"), lambda: made.load(tmp_path / "saved"),
        made.action_times, made.optimizer_state_dict, lambda: made.copy_to(Net()),
        made.memory_growth_bytes, lambda: made.clip_grad_norm_(1.0), optimizer.step,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(autopar.WorkerError, match=r"closed because close\(\) was called"):
            call()
    assert made.grad_norm is norm
    assert "a step (the first, which warms up), " in made.report()
    made.close()


def test_closing_after_a_worker_died_keeps_the_error_of_the_step() -> None:
    """Closing asks the workers nothing; later calls are told what ended them."""

    def lose_a_worker(made: Any) -> None:
        with made:
            made.train_step(BATCH)
            os.kill(made._runner.group.pids[0], signal.SIGKILL)
            made.train_step(BATCH)

    made = compiled_net(2, optimizer=ADAM)
    for use in (lose_a_worker, lambda made: made.train_step(BATCH)):
        with pytest.raises(autopar.WorkerError, match=r"worker 0 .* SIGKILL"):
            use(made)


def test_closing_does_not_wait_for_a_stopped_worker() -> None:
    made = compiled_net(2, optimizer=ADAM)
    made.train_step(BATCH)
    os.kill(made._runner.group.pids[0], signal.SIGSTOP)
    started_s = time.monotonic()
    made.close()
    assert time.monotonic() - started_s < 60
