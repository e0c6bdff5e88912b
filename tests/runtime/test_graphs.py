"""Recorded passes, with a recorder that runs a recorded function again into the same memory.

It behaves as a CUDA graph does: what the function reads is read anew from the same tensors, and
what it returned is overwritten.
"""

from __future__ import annotations

import copy
import functools
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.runtime.machine.cuda_graphs import NotRecorded, Recording
from autopar.runtime.runners.spmd import SpmdRunner
from autopar.runtime.step import rank as rank_module
from autopar.runtime.step.graphs import MAX_GRAPHS, NUM_WARM_UPS

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


class Again:
    def __init__(self, function: Callable[[], Any], results: Any) -> None:
        self.function = function
        self.targets = _tensors(results)

    def replay(self) -> None:
        for target, source in zip(self.targets, _tensors(self.function()), strict=True):
            target.copy_(source)


class Rerun:
    """Records by keeping the function."""

    def __init__(self) -> None:
        self.num_records = 0
        self.refuses: str | None = None
        self.error: Exception | None = None

    def record(self, function: Callable[[], Any]) -> tuple[Recording, Any]:
        function()  # as to find what waits
        self.num_records += 1
        if self.error is not None:
            raise self.error
        results = function()
        for tensor in _tensors(results):
            tensor.zero_()  # nothing has run yet
        return Again(function, results), results

    def why_no_room(self) -> str | None:
        return self.refuses


def _tensors(results: Any) -> list[Tensor]:
    whole = results.loss if results.loss._base is None else results.loss._base
    return [whole, *results.gradients.values(), *results.following.values()]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rerun]:
    """Training runs in this process, as under ``torchrun`` with one rank, and is recorded."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    made = Rerun()
    monkeypatch.setattr(rank_module, "recorder_of", lambda device: made)
    dist.init_process_group("gloo")
    yield made
    dist.destroy_process_group()


class Normed(nn.Module):
    """A convolution network with batch norm, whose buffers each step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x).mean((2, 3))), y)


def batch(seed: int, size: int = 6) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 3, 8, 8, generator=made, dtype=torch.float64)
    return x, torch.randint(0, 4, (size,), generator=made)


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return Normed().double()


def compiled_of(model: nn.Module, given: Any, **options: Any) -> autopar.Compiled:
    options = {"optimizer": SGD, "profile_limit_s": 0, "check_gradients": False, **options}
    made = autopar.compile(model, 1, example_inputs=given, **options)
    assert isinstance(made, autopar.Compiled)
    assert isinstance(made._runner, SpmdRunner)
    return made


class Eager:
    def __init__(self) -> None:
        self.model = model_of()
        self.optimizer = SGD(self.model.parameters())

    def step(self, given: tuple[Tensor, Tensor]) -> float:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(*given)
        loss.backward()
        self.optimizer.step()
        return loss.item()


def assert_like(compiled: autopar.Compiled, eager: Eager) -> None:
    state = compiled.full_state_dict()
    for name, tensor in eager.model.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-10)


def test_replayed_steps_train_as_eager(recorder: Rerun) -> None:
    """With batch norm's buffers, evaluation between steps, and loaded state."""
    eager = Eager()
    with compiled_of(model_of(), batch(0)) as compiled:
        losses: list[Tensor] = []
        for seed in range(6):
            expected = eager.step(batch(seed))
            losses.append(compiled.train_step(*batch(seed)))
            assert losses[-1].item() == pytest.approx(expected, rel=1e-9)
            assert_like(compiled, eager)
        assert recorder.num_records == 1
        assert len({x.item() for x in losses}) == 6, "a loss was overwritten"
        evaluated = compiled.eval()(*batch(9))
        expected_loss = eager.model.eval()(*batch(9))
        torch.testing.assert_close(evaluated, expected_loss, rtol=1e-9, atol=1e-10)
        compiled.train(), eager.model.train()
        fresh = {name: x + 0.01 for name, x in model_of().state_dict().items()}
        compiled.load_state_dict(fresh)
        eager.model.load_state_dict(fresh)
        for seed in range(3):
            expected = eager.step(batch(seed))
            assert compiled.train_step(*batch(seed)).item() == pytest.approx(expected, rel=1e-9)
        assert_like(compiled, eager)
        for name, gradient in compiled.gradients().items():
            theirs = eager.model.get_parameter(name).grad
            torch.testing.assert_close(gradient.full_tensor(), theirs, rtol=1e-7, atol=1e-9)
        assert "1 of 1 programs are replayed" in compiled.report()


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_replayed_step_that_is_not_finite_is_undone(recorder: Rerun, nonfinite: str) -> None:
    eager = Eager()
    with compiled_of(model_of(), batch(0), nonfinite=nonfinite) as compiled:
        for seed in range(4):
            eager.step(batch(seed))
            compiled.train_step(*batch(seed))
        x, y = batch(7)
        if nonfinite == "raise":
            with pytest.raises(autopar.NonFiniteError, match="body"):
                compiled.train_step(x * torch.inf, y)
        else:
            compiled.train_step(x * torch.inf, y)
            assert compiled.num_skipped_steps == 1
        assert_like(compiled, eager)
        for seed in range(4, 6):
            expected = eager.step(batch(seed))
            assert compiled.train_step(*batch(seed)).item() == pytest.approx(expected, rel=1e-9)
        assert_like(compiled, eager)
    assert recorder.num_records == 1


def test_each_shape_has_a_graph_up_to_a_number(recorder: Rerun) -> None:
    eager = Eager()
    sizes = [6, 4, 6, 5, 7, 3, 8] * 4
    with compiled_of(model_of(), batch(0)) as compiled:
        for seed, size in enumerate(sizes):
            expected = eager.step(batch(seed, size))
            given = batch(seed, size)
            assert compiled.train_step(*given).item() == pytest.approx(expected, rel=1e-9)
        assert_like(compiled, eager)
        assert recorder.num_records == MAX_GRAPHS
        assert f"{MAX_GRAPHS} programs have graphs already" in compiled.report()


def test_clipped_gradients(recorder: Rerun) -> None:
    eager = Eager()
    with compiled_of(model_of(), batch(0, 8), max_grad_norm=0.05) as compiled:
        for seed in range(5):
            eager.optimizer.zero_grad()
            loss = eager.model(*batch(seed, 8))
            loss.backward()
            norm = nn.utils.clip_grad_norm_(eager.model.parameters(), 0.05)
            eager.optimizer.step()
            got = compiled.train_step(*batch(seed, 8))
            assert got.item() == pytest.approx(loss.item(), rel=1e-9)
            assert compiled.grad_norm is not None
            assert compiled.grad_norm.item() == pytest.approx(norm.item(), rel=1e-9)
        assert_like(compiled, eager)
    assert recorder.num_records == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("operation not permitted"), "recorded (RuntimeError: operation not"),
        (NotRecorded("the host waits for the device: .item()"), "the host waits for the device"),
    ],
)
def test_what_prevents_a_recording_is_reported(
    recorder: Rerun, error: Exception, reason: str
) -> None:
    """After one that CUDA refused none is tried again."""
    recorder.error = error
    eager = Eager()
    with compiled_of(model_of(), batch(0)) as compiled:
        for seed in range(NUM_WARM_UPS + 3):
            expected = eager.step(batch(seed))
            assert compiled.train_step(*batch(seed)).item() == pytest.approx(expected, rel=1e-9)
        for seed in range(NUM_WARM_UPS + 2):  # of another shape
            expected = eager.step(batch(seed, 5))
            assert compiled.train_step(*batch(seed, 5)).item() == pytest.approx(expected, rel=1e-9)
        assert reason in compiled.report()
        assert recorder.num_records == (2 if isinstance(error, NotRecorded) else 1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"update": "early"}, "weights are updated in the backward pass"),
        ({"model": "dropout"}, "operators draw random numbers"),
        ({"room": "only 1 MB are free"}, "only 1 MB are free"),
    ],
    ids=["early", "dropout", "room"],
)
def test_programs_that_are_not_recorded(
    recorder: Rerun, options: dict[str, Any], reason: str
) -> None:
    model = model_of()
    recorder.refuses = options.pop("room", None)
    if options.pop("model", None):
        model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(192, 4)).double()
        options["loss_fn"] = F.cross_entropy
    with compiled_of(model, batch(0), **options) as compiled:
        for seed in range(NUM_WARM_UPS + 2):
            compiled.train_step(*batch(seed))
        assert reason in compiled.report()
    assert recorder.num_records == 0


def test_counting_and_profiling_launch_op_by_op(recorder: Rerun) -> None:
    with compiled_of(model_of(), batch(0)) as compiled:
        for seed in range(4):
            compiled.train_step(*batch(seed))
        assert compiled.action_times() == [[]]
        assert compiled.profile(*batch(0), num_steps=3).times[0].actions
        compiled.peak_tensor_bytes(*batch(0))
        assert recorder.num_records == 1
        for seed in range(4):
            compiled.train_step(*batch(seed))
    assert recorder.num_records == 2


def test_the_option_turns_it_off(recorder: Rerun) -> None:
    with compiled_of(model_of(), batch(0), cuda_graphs=False) as compiled:
        for seed in range(4):
            compiled.train_step(*batch(seed))
        assert "CUDA graphs" not in compiled.report()
    assert recorder.num_records == 0
    with pytest.raises(autopar.InputError, match="cuda_graphs is 'yes'"):
        compiled_of(model_of(), batch(0), cuda_graphs="yes")


def test_models_of_an_array_train_as_alone(recorder: Rerun) -> None:
    """Also with a model that skips a step, whose buffers stay as they were."""
    torch.manual_seed(0)
    models: list[nn.Module] = [Normed().double() for _ in range(3)]
    eager = [copy.deepcopy(model) for model in models]
    optimizers = [SGD(model.parameters()) for model in eager]
    with autopar.compile(
        models, 1, example_inputs=[batch(n) for n in range(3)], optimizer=SGD, nonfinite="skip",
        profile_limit_s=0, check_gradients=False,
    ) as array:  # fmt: skip
        for seed in range(7):
            own = [batch(10 * seed + number) for number in range(3)]
            if seed == 4:
                own[1] = (own[1][0] * torch.inf, own[1][1])
            losses = array.train_step(own)
            for number, (model, optimizer, given) in enumerate(zip(eager, optimizers, own)):
                if seed == 4 and number == 1:
                    continue
                optimizer.zero_grad()
                loss = model(*given)
                loss.backward()
                optimizer.step()
                assert losses[number].item() == pytest.approx(loss.item(), rel=1e-8)
        for number, model in enumerate(eager):
            state = array.state_dict(number)
            for name, tensor in model.state_dict().items():
                torch.testing.assert_close(state[name], tensor, rtol=1e-8, atol=1e-9)
    assert recorder.num_records == 1


class Held(nn.Module):
    """A layer and buffers, which ``change(self, x)`` changes in each step."""

    def __init__(self, change: Callable[[Held, Tensor], None]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("a", torch.zeros(4))
        self.register_buffer("b", torch.zeros(4))
        self.register_buffer("batch", torch.zeros(6, 4))
        self.register_buffer("shifts", torch.arange(4.0))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x) - self.a + 2 * self.b + torch.exp(-self.shifts)
        loss = out.square().mean() + (x * self.batch).mean()
        with torch.no_grad():
            self.change(self, x)
        return loss


def keep_the_batch(model: Held, x: Tensor) -> None:
    model.batch.copy_(x)


def set_both_alike(model: Held, x: Tensor) -> None:
    mean = x.mean(0)
    model.a.copy_(mean)
    model.b.copy_(mean)


def shift(model: Held, x: Tensor) -> None:
    model.b.copy_(model.a)
    model.a.copy_(x.mean(0))


def take_the_constant(model: Held, x: Tensor) -> None:
    model.a.copy_(model.shifts)
    model.b.copy_(x.mean(0))


@pytest.mark.parametrize("change", [keep_the_batch, set_both_alike, shift, take_the_constant])
def test_buffers_that_share_memory_with_something(
    recorder: Rerun, change: Callable[[Held, Tensor], None]
) -> None:
    """With other values loaded in between; the user's batches stay as they were."""
    torch.manual_seed(0)
    model = Held(change).double()
    reference = copy.deepcopy(model)
    optimizer = SGD(reference.parameters())
    batches = [torch.randn(6, 4).double() for _ in range(9)]
    before = [x.clone() for x in batches]
    with compiled_of(model, (batches[0],)) as compiled:
        for number, x in enumerate(batches):
            if number == 5:
                state = {k: v.clone() for k, v in reference.state_dict().items()}
                state["a"] += 1
                state["b"] -= 1
                state["shifts"] *= 0.5
                reference.load_state_dict(state)
                compiled.load_state_dict(state)
            optimizer.zero_grad()
            loss = reference(x)
            loss.backward()
            optimizer.step()
            assert compiled.train_step(x).item() == pytest.approx(loss.item(), rel=1e-9)
        state = compiled.full_state_dict()
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-10)
    assert all(torch.equal(x, y) for x, y in zip(batches, before))
    assert recorder.num_records == 2  # again after the load, which changed a constant's place


class Centred(nn.Module):
    """Evaluation reads a view of a buffer that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        mean = self.mean.clone() if self.training else self.mean
        loss = (self.layer(x) - mean[None]).square().mean()
        if self.training:
            with torch.no_grad():
                self.mean.copy_(0.9 * self.mean + 0.1 * x.mean(0))
        return loss


def test_evaluation_after_a_refused_step(recorder: Rerun) -> None:
    torch.manual_seed(0)
    model = Centred().double()
    reference = copy.deepcopy(model)
    optimizer = SGD(reference.parameters())
    batches = [torch.randn(6, 4).double() for _ in range(6)]
    with compiled_of(model, (batches[0],), nonfinite="skip") as compiled:
        for x in batches[:5]:
            optimizer.zero_grad()
            reference(x).backward()
            optimizer.step()
            compiled.train_step(x)
        reference.eval()
        for _ in range(2):
            expected = reference(batches[0]).item()
            assert compiled.eval()(batches[0]).item() == pytest.approx(expected, rel=1e-9)
            compiled.train()
            compiled.train_step(batches[5] * torch.inf)
        assert compiled.num_skipped_steps == 2
    assert recorder.num_records == 1


def test_two_shapes_in_turn_are_recorded_once_each(recorder: Rerun) -> None:
    eager = Eager()
    with compiled_of(model_of(), batch(0)) as compiled:
        for seed in range(14):
            size = 6 if seed % 2 else 5
            expected = eager.step(batch(seed, size))
            given = batch(seed, size)
            assert compiled.train_step(*given).item() == pytest.approx(expected, rel=1e-9)
        assert_like(compiled, eager)
    assert recorder.num_records == 2
