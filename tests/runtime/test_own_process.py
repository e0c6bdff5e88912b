"""A model compiled for one CPU runs in this process: as eager, as in a worker, and unnoticed."""

from __future__ import annotations

import copy
import functools
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.runtime.runners import start
from autopar.runtime.runners.own_process import OwnProcess

ADAM = functools.partial(torch.optim.AdamW, lr=1e-2)
NUM_STEPS = 5


class Net(nn.Module):
    """Words to classes, with a dropout and running statistics."""

    def __init__(self, dropped: float = 0.0) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(20, 16), nn.BatchNorm1d(16)
        self.dropout, self.out = nn.Dropout(dropped), nn.Linear(16, 5)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.dropout(self.norm(self.words(words).mean(1))))


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(20, (8, 4), generator=generator)
    return words, torch.randint(5, (8,), generator=generator)


def net(dropped: float = 0.0) -> Net:
    torch.manual_seed(1)
    return Net(dropped)


def compiled_of(model: Any, **options: Any) -> Any:
    known = {"optimizer": ADAM, "seed": 3, "profile_limit_s": 0.0, "check_gradients": False}
    return autopar.compile(
        model, 1, example_inputs=batch(0), loss_fn=F.cross_entropy, **(known | options)
    )


@pytest.fixture
def in_worker(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """As `compiled_of`, in a worker."""

    def make(model: Any, **options: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(start, "is_own_process", lambda devices: False)
            return compiled_of(model, **options)

    return make


def children() -> set[int | None]:
    import psutil

    return {child.pid for child in psutil.Process().children(recursive=True)}


def equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)


def test_steps_equal_eager_and_start_no_process() -> None:
    model, before = net(), children()
    eager = copy.deepcopy(model)
    optimizer = ADAM(eager.parameters())
    with compiled_of(model) as compiled:
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            words, classes = batch(step)
            loss = F.cross_entropy(eager(words), classes)
            loss.backward()
            optimizer.step()
            torch.testing.assert_close(compiled.train_step(words, classes), loss.detach())
        equal(compiled.state_dict(), dict(eager.state_dict()))
        equal(compiled.gradients(), {n: p.grad for n, p in eager.named_parameters()})
        held = compiled.optimizer_state_dict()["state"]
        for name, parameter in eager.named_parameters():
            equal(held[name], optimizer.state[parameter])
        torch.testing.assert_close(compiled.eval()(words), eager.eval()(words))
        assert children() == before


def test_the_same_numbers_as_in_a_worker(in_worker: Callable[..., Any], tmp_path: Path) -> None:
    found: list[list[Any]] = []
    for make in (compiled_of, in_worker):
        with make(net(0.5), max_grad_norm=0.1, precision="bf16") as compiled:
            losses = [compiled.train_step(*batch(step)) for step in range(NUM_STEPS)]
            compiled.save(tmp_path / make.__name__)
            outputs = compiled(batch(7)[0])  # in train mode: with dropout
            peaks = compiled.peak_tensor_bytes(*batch(0))
            found.append([losses, outputs, compiled.full_state_dict(), compiled.grad_norm, peaks])
    own, workers = found
    for one, other in zip(own[:-1], workers[:-1], strict=True):
        # A worker may have other threads, which round sums otherwise.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    # A worker's count includes the batch, which it maps, and a few numbers of torch's.
    assert own[-1][0] == pytest.approx(workers[-1][0], rel=0.05, abs=4096)
    with in_worker(net(0.5), max_grad_norm=0.1, precision="bf16") as compiled:
        compiled.load(tmp_path / "compiled_of")
        equal(compiled.full_state_dict(), workers_state(tmp_path / "make"))


def workers_state(path: Path) -> dict[str, Tensor]:
    with compiled_of(net(0.5), max_grad_norm=0.1, precision="bf16") as compiled:
        compiled.load(path)
        found: dict[str, Tensor] = compiled.full_state_dict()
        return found


def test_an_array_equals_its_models_alone() -> None:
    models = [net(0.2), net(0.2)]
    rates = [functools.partial(torch.optim.AdamW, lr=lr) for lr in (1e-2, 1e-3)]
    with compiled_of(models, optimizer=rates, seed=[3, 4]) as array:
        losses = torch.stack([array.train_step(*batch(step)) for step in range(NUM_STEPS)])
        states = [array.state_dict(i) for i in range(2)]
    for model, optimizer, seed, i in zip(models, rates, (3, 4), range(2)):
        with compiled_of(model, optimizer=optimizer, seed=seed) as alone:
            own = torch.stack([alone.train_step(*batch(step)) for step in range(NUM_STEPS)])
            torch.testing.assert_close(losses[:, i], own, check_dtype=False)
            equal(states[i], alone.state_dict())


@pytest.fixture
def settings() -> Iterator[None]:
    """Settings of this process that are not torch's own, restored afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(threads)


def test_what_this_process_has_set_is_kept_and_changes_nothing(
    request: pytest.FixtureRequest,
) -> None:
    with compiled_of(net(0.5)) as compiled, compiled_of(net(0.5)) as again:
        expected = [compiled.train_step(*batch(step)) for step in range(3)]
        batches = [batch(step) for step in range(3)]
        request.getfixturevalue("settings")
        torch.manual_seed(5)
        before = torch.random.get_rng_state()
        with torch.inference_mode():
            losses = [again.train_step(*each) for each in batches]
        again.train_step(*batches[0])
        assert torch.equal(torch.random.get_rng_state(), before)
        assert torch.get_num_threads() == 2
        assert torch.get_default_dtype() is torch.float64
        assert torch.get_default_device().type == "meta"
    # Two threads round sums otherwise.
    torch.testing.assert_close(losses, expected)


def test_what_the_caller_gets_is_its_own() -> None:
    with compiled_of(net()) as compiled:
        compiled.train_step(*batch(0))
        gradients = compiled.gradients()
        expected = {name: held.clone() for name, held in compiled.state_dict().items()}
        for held in (*compiled.state_dict().values(), *gradients.values()):
            held.fill_(7)
        for entries in compiled.optimizer_state_dict()["state"].values():
            for value in entries.values():
                value.fill_(7)
        equal(compiled.state_dict(), expected)
        assert all((held != 7).any() for held in compiled.gradients().values())
        assert compiled.optimizer_state_dict()["state"]["out.bias"]["step"] == 1


def test_an_error_in_a_step_names_the_op_and_training_goes_on() -> None:
    with compiled_of(net()) as compiled, compiled_of(net()) as other:
        words, classes = batch(0)
        with pytest.raises(autopar.StepError, match=r"in action 0F0 of training step 1.*nll_loss"):
            compiled.train_step(words, classes + 5)
        for step in range(3):
            own, expected = (each.train_step(*batch(step)) for each in (compiled, other))
            torch.testing.assert_close(own, expected)


class Stubborn(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ArithmeticError("no step today")


def test_an_error_of_the_optimizer_keeps_its_type_and_traceback() -> None:
    with compiled_of(net(), optimizer=functools.partial(Stubborn, lr=0.1)) as compiled:
        with pytest.raises(ArithmeticError, match="no step today") as caught:
            compiled.train_step(*batch(0))
        assert caught.traceback[-1].name == "step"
        assert compiled.state_dict().keys() == net().state_dict().keys()


def test_close_releases_what_it_held() -> None:
    import gc

    def num_bytes() -> int:
        gc.collect()
        tensors = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)]
        held = [t for t in tensors if t.layout is torch.strided and t.device.type == "cpu"]
        return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in held)}.values())

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(20, 1 << 16)

        def forward(self, words: Tensor) -> Tensor:
            return self.words(words).mean(1)

    model = Wide()
    size = sum(p.nbytes for p in model.parameters())
    before = num_bytes()
    compiled = compiled_of(model)
    compiled.train_step(*batch(0))
    assert num_bytes() > before + 3 * size  # weights, gradients, two moments
    compiled.close()
    compiled.close()
    assert num_bytes() < before + size / 2
    with pytest.raises(autopar.WorkerError, match=r"closed because close\(\) was called"):
        compiled.train_step(*batch(0))


def test_threads_take_turns() -> None:
    with compiled_of(net()) as compiled:
        threads = [
            threading.Thread(target=lambda: compiled.train_step(*batch(0))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert compiled.optimizer_state_dict()["state"]["out.bias"]["step"] == 4


def _error_in_fork(pipe: Any, group: OwnProcess) -> None:
    try:
        group.call("loss_scale")
    except autopar.WorkerError as error:
        pipe.send(str(error))


def test_a_fork_of_this_process_is_refused() -> None:
    with compiled_of(net()) as compiled:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        fork = context.Process(target=_error_in_fork, args=(theirs, compiled._runner.group))
        fork.start()
        assert ours.poll(30)
        assert "which this one was forked from" in ours.recv()
        fork.join(30)
