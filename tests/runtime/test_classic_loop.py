"""A loop of calls, backward() and optimizer steps over a compiled model equals eager PyTorch."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

import autopar
from autopar.base.errors import InputError, MissingError, NonFiniteError, StepError
from autopar.runtime.compiled import Compiled
from tests.models.zoo import build
from tests.oracles import loss_of
from tests.runtime.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("reused_workers")

adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """Has statistics that training changes, and a part that dropout may change."""

    def __init__(self, dropped: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.dropout = nn.Dropout(dropped)
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)).relu()
        return F.cross_entropy(self.head(self.dropout(hidden)), y)


def rows(seed: int, num: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 16, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 8, (num,), generator=generator)


def net(dropped: float = 0.0) -> Net:
    torch.manual_seed(0)
    return Net(dropped).double()


def compile_two(model: nn.Module, example: Any, strategy: str = "zero3", **options: Any) -> Any:
    given = {"optimizer": adamw, "profile_limit_s": 0, "check_gradients": False, **options}
    if "num_stages" not in given and "update" not in given:
        given["constraints"] = autopar.Force(strategy)
    return autopar.compile(model, 2, example_inputs=example, **given)


def train(
    model: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    clip: Callable[[float], Tensor],
    batches: Sequence[Sequence[Batch]],
    *,
    max_norm: float | None = None,
    make_scheduler: Callable[[Any], Any] | None = None,
) -> list[Tensor]:
    """The user's loop, the same for both; all losses, norms and learning rates."""
    scheduler = None if make_scheduler is None else make_scheduler(optimizer)
    seen = []
    for parts in batches:
        for batch in parts:
            loss = loss_of(model(*batch))
            (loss / len(parts)).backward()
            seen.append(loss.detach())
        if max_norm is not None:
            seen.append(clip(max_norm))
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(seen[-1])
        elif scheduler is not None:
            scheduler.step()
        seen.append(torch.tensor(optimizer.param_groups[0]["lr"]))
    return seen


def assert_trains_as_eager(
    compiled: Compiled,
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    make: Any = adamw,
    **how: Any,
) -> nn.Module:
    reference = copy.deepcopy(model)
    optimizer = make(reference.parameters())

    def clip(max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(reference.parameters(), max_norm)

    expected = train(reference, optimizer, clip, batches, **how)
    got = train(compiled, compiled.optimizer, compiled.clip_grad_norm_, batches, **how)
    torch.testing.assert_close(got, expected)
    assert_same_weights(compiled, reference)
    return reference


def assert_same_weights(compiled: Compiled, reference: nn.Module) -> None:
    for key, tensor in compiled.full_state_dict().items():
        torch.testing.assert_close(tensor, reference.state_dict()[key])


one_cycle = functools.partial(OneCycleLR, max_lr=0.05, total_steps=6)
plateau = functools.partial(ReduceLROnPlateau, factor=0.1, patience=0, threshold=0.5)


@pytest.mark.parametrize(
    ("strategy", "num_parts", "how"),
    [
        ("zero3", 1, {}),
        ("data_parallel", 3, {}),
        ("tensor_parallel", 2, {"max_norm": 0.1}),
        ("zero3", 1, {"max_norm": math.inf, "make_scheduler": one_cycle}),
        ("data_parallel", 1, {"make_scheduler": plateau}),
    ],
    ids=["plain", "accumulation", "clipping", "one cycle", "plateau"],
)
def test_a_loop_trains_as_eager(strategy: str, num_parts: int, how: dict[str, Any]) -> None:
    model = net()
    batches = [[rows(10 * step + part) for part in range(num_parts)] for step in range(5)]
    with compile_two(model, batches[0][0], strategy) as compiled:
        assert_trains_as_eager(compiled, model, batches, **how)


def test_a_pipeline_and_a_smaller_last_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).double()
    batches = [[rows(10 * step + part) for part in range(2)] for step in range(5)]
    options = {"num_stages": 2, "num_microbatches": 2, "schedule": "1f1b"}
    reference = copy.deepcopy(model)

    def with_loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(reference(x), y)

    optimizer = adamw(reference.parameters())
    with compile_two(model, batches[0][0], loss_fn=F.cross_entropy, **options) as compiled:
        expected = train(with_loss, optimizer, torch.tensor, batches)
        got = train(compiled, compiled.optimizer, compiled.clip_grad_norm_, batches)
        torch.testing.assert_close(got, expected)
        assert_same_weights(compiled, reference)
    model = net()
    with compile_two(model, rows(0)) as compiled:
        assert_trains_as_eager(compiled, model, [[rows(0), rows(1, 3)], [rows(2, 3)]])


def test_gradients_follow_the_derivative_of_the_loss() -> None:
    model = net()
    with compile_two(model, rows(0)) as compiled:
        reference = copy.deepcopy(model)

        def check(run: Callable[[Any], None]) -> None:
            run(compiled)
            run(reference)
            gradients = compiled.gradients()
            for name, parameter in reference.named_parameters():
                torch.testing.assert_close(gradients[name], parameter.grad)
            compiled.zero_grad()
            reference.zero_grad()
            assert compiled.gradients() == {}

        check(lambda m: (m(*rows(0)) ** 2).backward())
        check(lambda m: (m(*rows(1)) / 3 + 2 * m(*rows(2)).log()).backward())
        check(lambda m: m(*rows(2)).div_(4).backward())
        check(lambda m: [m(*rows(seed)).backward() for seed in (3, 4)] and None)
        check(lambda m: torch.autograd.backward([m(*rows(5)), m(*rows(6))]))
        assert compiled(*rows(0)).requires_grad  # a loss that is dropped adds nothing
        reference(*rows(0))
        check(lambda m: m(*rows(7)).backward())
        assert_same_weights(compiled, reference)


def test_gradients_may_be_edited() -> None:
    model = net()
    with compile_two(model, rows(0)) as compiled:
        reference = copy.deepcopy(model)
        optimizer = adamw(reference.parameters())
        for each in (compiled, reference):
            each(*rows(0)).backward()
        signs = {name: g.sign() for name, g in compiled.gradients().items() if "head" in name}
        compiled.set_gradients(signs)
        for name, parameter in reference.named_parameters():
            if name in signs:
                parameter.grad = signs[name]
        compiled.optimizer.step()
        optimizer.step()
        assert_same_weights(compiled, reference)
        for wrong, message in (
            ({"head": signs["head.bias"]}, r"'head' is no parameter .*compiled\.gradients\(\)"),
            ({"head.bias": signs["head.weight"]}, r"'head\.bias' is \(8, 32\); .*shape, \(8,\)"),
            ({"head.bias": 1.0}, r"'head\.bias' is 1\.0; it must be a tensor"),
        ):
            with pytest.raises(InputError, match=message):
                compiled.set_gradients(wrong)


def test_evaluation_and_training_steps_in_between() -> None:
    model = net()
    with compile_two(model, rows(0)) as compiled:
        reference = assert_trains_as_eager(compiled, model, [[rows(0)]])
        optimizer, eager = compiled.optimizer, adamw(reference.parameters())
        eager.load_state_dict(adamw_after(model, rows(0)).state_dict())
        compiled(*rows(1)).backward()
        reference(*rows(1)).backward()
        with pytest.raises(InputError, match=r"train_step was called .*optimizer\.step\(\)"):
            compiled.train_step(*rows(2))
        compiled.eval()
        torch.testing.assert_close(compiled(*rows(3)), reference.eval()(*rows(3)))
        with pytest.raises(InputError, match="is in eval mode"):
            compiled(*rows(3)).backward()
        compiled.train()
        reference.train()
        with torch.no_grad():
            assert not compiled(*rows(3)).requires_grad
        for each in (optimizer, eager):
            each.param_groups[0]["lr"] = 0.03
            each.step()
            each.zero_grad()
        loss = compiled.train_step(*rows(2))
        expected = reference(*rows(2))
        expected.backward()
        eager.step()
        eager.zero_grad()
        torch.testing.assert_close(loss, expected.detach())
        # The gradients of a training step are not added to those of the loop.
        compiled(*rows(4)).backward()
        reference(*rows(4)).backward()
        optimizer.step()
        eager.step()
        assert_same_weights(compiled, reference)
        saved = optimizer.state_dict()
        assert saved["param_groups"][0]["lr"] == 0.03
        assert saved["state"].keys() == dict(model.named_parameters()).keys()
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == 0.03


def adamw_after(model: nn.Module, batch: Batch) -> torch.optim.Optimizer:
    """The eager optimizer after one step on a copy of the model."""
    copied = copy.deepcopy(model)
    optimizer = adamw(copied.parameters())
    copied(*batch).backward()
    optimizer.step()
    return optimizer


def test_of_several_outputs_the_loss_has_gradients() -> None:
    model, make_batch = build("gpt2")
    batches = [make_batch(seed) for seed in range(2)]
    reference = copy.deepcopy(model)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    optimizer = sgd(reference.parameters())
    with compile_two(model, batches[0], "data_parallel", optimizer=sgd) as compiled:
        for batch in batches:
            expected, output = reference(**batch), compiled(**batch)
            assert type(output) is type(expected)
            assert output.keys() == expected.keys()
            torch.testing.assert_close(output.loss, expected.loss)
            torch.testing.assert_close(output.logits, expected.logits, rtol=1e-4, atol=1e-4)
            for loss, each in ((expected.loss, optimizer), (output.loss, compiled.optimizer)):
                loss.backward()
                each.step()
                each.zero_grad()
        with pytest.raises(InputError, match="only its loss has some"):
            output.logits.sum().backward()
        for key, tensor in compiled.full_state_dict().items():
            torch.testing.assert_close(tensor, reference.state_dict()[key], rtol=1e-4, atol=1e-5)


def test_dropout_draws_anew_in_every_call() -> None:
    with compile_two(net(0.5), rows(0), "data_parallel", seed=3) as compiled:
        with torch.no_grad():
            first = compiled(*rows(0))
        losses = [compiled(*rows(0)) for _ in range(3)]
        assert len({first.item(), *(loss.item() for loss in losses)}) == 3
        torch.testing.assert_close(losses[0].detach(), first)
        with torch.no_grad():
            drawn = [compiled(*rows(0)).item() for _ in range(4)]
        assert len(set(drawn)) == 4
        compiled.train_step(*rows(0))
        with torch.no_grad():
            assert compiled(*rows(0)) not in drawn


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(16, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        found = self.dropout(self.layer(x))
        return {"loss": F.cross_entropy(found, y), "found": found}


def test_outputs_are_those_of_which_the_loss_is_computed() -> None:
    x, y = rows(0)
    with compile_two(Dropped().double(), rows(0), "data_parallel") as compiled:
        for _ in range(3):
            with torch.no_grad():
                compiled(x, y)
            output = compiled(x, y)
            torch.testing.assert_close(output["loss"], F.cross_entropy(output["found"], y))
            output["loss"].backward()


def test_targets_that_cannot_be_used_are_refused() -> None:
    x, y = rows(0)
    layer = nn.Linear(16, 8).double()
    options: dict[str, Any] = {"loss_fn": F.cross_entropy, "check_gradients": False}
    with compile_two(layer, (x, y), "data_parallel", **options) as compiled:
        for wrong in (y.int(), y.numpy(), None):
            with pytest.raises(InputError, match=r"input '1' (has dtype|must be a tensor)"):
                compiled(x, wrong)
        assert compiled(x, y).dim() == 0
        assert compiled(x).shape == (8, 8)


def test_buffers_that_a_call_leaves_are_told_of() -> None:
    with compile_two(net(), rows(0)) as compiled:
        before = compiled.full_state_dict()
        with torch.no_grad(), pytest.warns(UserWarning, match="leaves the buffers"):
            compiled(*rows(0))
        found = compiled.full_state_dict()
        assert torch.equal(found["norm.running_mean"], before["norm.running_mean"])


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}], ids=["free", "clipped"])
def test_calls_that_are_not_finite(options: dict[str, Any]) -> None:
    model, (x, y) = net(), rows(0)
    wrong = x.clone()
    wrong[5, 3] = math.nan
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with compile_two(model, (x, y), nonfinite="skip", **options) as compiled:
        compiled(x, y).backward()
        assert compiled(wrong, y).isnan()
        compiled(wrong, y).backward()
        compiled.optimizer.step()
        assert compiled.num_skipped_steps == 1
        weights = compiled.full_state_dict()
        assert all(torch.equal(weights[k], before[k]) for k, _ in model.named_parameters())
        compiled.zero_grad()
        compiled(x, y).backward()
        compiled.optimizer.step()
        assert not torch.equal(compiled.full_state_dict()["head.bias"], before["head.bias"])
    with compile_two(net(), (x, y), **options) as compiled:
        with pytest.raises(NonFiniteError, match="input 'args_0' has nan"):
            compiled(wrong, y)
        with pytest.raises(StepError, match="out of bounds"):
            compiled(x, y + 8 * (torch.arange(8) == 6))  # on one rank alone
        (compiled(x, y) * 1e200 * 1e200).backward()
        with pytest.raises(NonFiniteError, match="zero_grad"):
            compiled.optimizer.step()
        weights = compiled.full_state_dict()
        assert all(torch.equal(weights[k], before[k]) for k, _ in model.named_parameters())
        compiled.zero_grad()
        compiled(x, y).backward()
        compiled.optimizer.step()
        assert compiled.full_state_dict()["head.bias"].isfinite().all()


def test_what_cannot_be_is_refused_with_what_to_write() -> None:
    model = net()
    with compile_two(model, rows(0), "data_parallel") as compiled:
        optimizer = compiled.optimizer
        assert optimizer is compiled.optimizer
        for call in (optimizer.step, lambda: compiled.clip_grad_norm_(1.0)):
            with pytest.raises(InputError, match=r"without gradients.*loss\.backward\(\)"):
                call()
        loss, late = compiled(*rows(0)), compiled(*rows(1))
        loss.backward(retain_graph=True)
        with pytest.raises(InputError, match=r"backward\(\) was called again"):
            loss.backward()
        with pytest.raises(InputError, match="leave out create_graph"):
            late.backward(create_graph=True, retain_graph=True)
        for wrong in (0, -1.0, math.nan, "1", True, None):
            with pytest.raises(InputError, match=r"max_norm is .*a positive number"):
                compiled.clip_grad_norm_(wrong)
        for key, value, why in (
            ("lr", "fast", "of the kind of"), ("lr", [0.1], "of the kind of"),
            ("betas", 0.9, "of the kind of"), ("amsgrad", 2.0, "of the kind of"),
            ("weight_decay", math.nan, "every updated parameter becomes nan"),
        ):  # fmt: skip
            kept = optimizer.param_groups[0][key]
            optimizer.param_groups[0][key] = value
            with pytest.raises(InputError, match=rf"'{key}' of .* was set to .* {why}"):
                optimizer.step()
            optimizer.param_groups[0][key] = kept
        optimizer.step()
        with pytest.raises(
            InputError, match=r"computed before the last update.*call the model again"
        ):
            late.backward()
        optimizer.param_groups[0]["amsgrad"] = True  # it has no state for it
        with pytest.raises(InputError, match=r"'amsgrad' to True, and AdamW cannot go on"):
            optimizer.step()
        optimizer.param_groups[0]["amsgrad"] = False
        del optimizer.param_groups[0]["weight_decay"]
        with pytest.raises(InputError, match=r"'weight_decay' was deleted from .* was: 0\.01"):
            optimizer.step()
        optimizer.param_groups[0]["weight_decay"] = 0.0
        with pytest.raises(InputError, match=r"norm_type is 1; .*the 2-norm alone"):
            compiled.clip_grad_norm_(1.0, norm_type=1)
        assert compiled.clip_grad_norm_(torch.tensor(1.0)) > 0
        optimizer.step()
        with pytest.raises(InputError, match="clip_grad_norm_"):
            list(optimizer.param_groups[0]["params"])
        with pytest.raises(InputError, match="optimizer=lambda parameters"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"update": "early"}, r"update='early'.*train_step.*update='at_end'"),
        ({"optimizer": None}, r"no optimizer: .*optimizer=functools"),
    ],
    ids=["early", "no optimizer"],
)
def test_where_calls_have_no_gradients(options: dict[str, Any], reason: str) -> None:
    with compile_two(net(), rows(0), **options) as compiled:
        loss = compiled(*rows(0))
        with pytest.raises(InputError, match=rf"has no gradients: .*{reason}"):
            loss.backward()
        assert not hasattr(compiled, "optimizer")
        with pytest.raises(MissingError, match=reason):
            _ = compiled.optimizer


def test_the_first_call_may_compile() -> None:
    model = net()
    with autopar.compile(
        model, 2, optimizer=adamw, profile_limit_s=0, check_gradients=False
    ) as compiled:
        with pytest.raises(MissingError, match="nothing is compiled yet"):
            _ = compiled.optimizer
        compiled(*rows(0)).backward()
        compiled.zero_grad()
        model(*rows(0))  # changes its statistics
        assert_trains_as_eager(compiled, model, [[rows(1)], [rows(2)]])


def test_under_torchrun() -> None:
    run_ranks(2, "tests.runtime.torchrun_loop")


def test_updates_count_as_steps_of_periodic_checkpoints(tmp_path: Path) -> None:
    """A loop that is started again goes on with the weights and the rate of the newest one."""
    batches = [[rows(seed)] for seed in range(5)]
    model = net()
    with compile_two(model, rows(0)) as compiled:
        assert compiled.checkpoint_every(2, tmp_path) == 0
        group = compiled.optimizer.param_groups[0]
        train(compiled, compiled.optimizer, compiled.clip_grad_norm_, batches[:2])
        group["lr"] = 0.003
        expected = train(compiled, compiled.optimizer, compiled.clip_grad_norm_, batches[2:])
        weights = compiled.full_state_dict()
    with compile_two(model, rows(0)) as compiled:
        assert compiled.optimizer.param_groups[0]["lr"] == 1e-2
        assert compiled.checkpoint_every(2, tmp_path) == 4
        assert compiled.optimizer.param_groups[0]["lr"] == 0.003
        got = train(compiled, compiled.optimizer, compiled.clip_grad_norm_, batches[4:])
        assert got == expected[-2:]
        torch.testing.assert_close(compiled.full_state_dict(), weights, rtol=0, atol=0)
