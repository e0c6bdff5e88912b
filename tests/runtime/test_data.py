"""`autopar.integrations.data`: each rank's samples of a batch, and batches fetched ahead."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import autopar
from autopar.frontend.capture import capture
from autopar.integrations.data import THREAD, LocalBatches, ahead, local_rows
from autopar.ir.mesh import Mesh
from autopar.lowering.training import lower_training
from autopar.passes.prepare import prepare
from autopar.runtime.state.shards import check_local_inputs, local_part, microbatch_of
from autopar.sharding.strategy import Strategy
from tests.models.zoo import build
from tests.oracles import random_assignment
from tests.runtime.ranks import run_ranks


@pytest.mark.sampled(4)
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)])
@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_rows_are_what_a_rank_passes(
    name: str, sizes: tuple[int, ...], num_microbatches: int
) -> None:
    """Their micro-batches are the rank's shards of the global batch's, for drawn strategies."""
    model, make_batch = build(name)
    batch = {key: torch.cat([value] * 2) for key, value in make_batch(0).items()}
    captured = capture(model, batch)
    analysis = prepare(captured).cut(num_microbatches)[1]
    mesh = Mesh(tuple("ab"[: len(sizes)]), sizes)
    num_found = num_refused = 0
    for seed in range(16 if name == "mlp" else 4):
        strategy = Strategy(analysis, random_assignment(analysis, mesh, seed))
        program = lower_training(strategy, num_microbatches, device_type="cpu")
        tensors = captured.signature.flatten((), batch)
        for rank in range(mesh.num_devices):
            try:
                rows = local_rows(program, rank)
            except autopar.InputError:
                num_refused += 1
                continue
            num_found += 1
            own = [tensor[rows] for tensor in tensors]
            check_local_inputs(program, own)
            for source, part, whole in zip(program.inputs, own, tensors):
                for index in range(num_microbatches):
                    expected = local_part(
                        microbatch_of(whole, source, num_microbatches, index),
                        source.placements, mesh, rank,
                    )  # fmt: skip
                    got = microbatch_of(part, source, num_microbatches, index)
                    assert torch.equal(got, expected)
    assert num_refused, "drawn strategies also split inputs otherwise"
    assert num_found or name == "gpt2"


def test_ranks_load_their_own_samples() -> None:
    run_ranks(2, "tests.runtime.torchrun_data")


def test_local_workers_are_given_the_whole_batch() -> None:
    model, make_batch = build("mlp")
    with (
        autopar.compile(
            model, ["cpu"] * 2, example_inputs=make_batch(0), profile_limit_s=0
        ) as compiled,
        pytest.raises(autopar.InputError, match="under torchrun"),
    ):
        LocalBatches([[0, 1, 2, 3]], compiled)


def loader_of(num: int = 6, num_workers: int = 0) -> DataLoader:
    data = TensorDataset(torch.arange(2.0 * num).view(-1, 1), torch.arange(2 * num))
    return DataLoader(data, batch_size=2, num_workers=num_workers)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("depth", [1, 3])
def test_batches_ahead_are_those_of_the_loader(depth: int, num_workers: int) -> None:
    expected = list(loader_of())
    found = list(ahead(loader_of(num_workers=num_workers), depth=depth))
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


def test_the_next_batch_is_fetched_while_the_caller_works() -> None:
    fetched = []

    def slow() -> Iterator[int]:
        for number in range(3):
            fetched.append(number)
            yield number

    batches = ahead(slow())
    assert next(batches) == 0
    end_s = time.monotonic() + 30
    while len(fetched) < 2 and time.monotonic() < end_s:
        time.sleep(0.01)
    assert 1 in fetched
    assert list(batches) == [1, 2]


def test_a_loaders_error_comes_after_the_batches_before_it() -> None:
    def failing() -> Iterator[int]:
        yield from (1, 2)
        raise OSError("the disk is full")

    batches = ahead(failing(), depth=4)
    assert [next(batches), next(batches)] == [1, 2]
    with pytest.raises(OSError, match="the disk is full"):
        next(batches)


def test_a_caller_that_stops_ends_the_thread() -> None:
    def endless() -> Iterator[int]:
        while True:
            yield 0

    batches = ahead(endless())
    next(batches)
    del batches
    gc.collect()
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s and any(
        thread.name == THREAD for thread in threading.enumerate()
    ):
        time.sleep(0.02)
    assert not any(thread.name == THREAD for thread in threading.enumerate())


@pytest.mark.parametrize("depth", [0, -1, True, 1.5])
def test_a_depth_is_checked(depth: object) -> None:
    with pytest.raises(autopar.InputError, match="depth is"):
        ahead([], depth=depth)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_arrive_on_the_gpu() -> None:
    for (x, y), (expected, labels) in zip(ahead(loader_of(), "cuda"), loader_of(), strict=True):
        assert x.is_cuda
        assert y.is_cuda
        assert torch.equal((x + 1).cpu(), expected + 1)
        assert torch.equal(y.cpu(), labels)
