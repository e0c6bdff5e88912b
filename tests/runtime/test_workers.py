"""Local workers: calls, failures reported with their cause, and no process left behind."""

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.base.errors import InputError, WorkerError
from autopar.cost_models.detect import usable_cores
from autopar.runtime.faults import liveness
from autopar.runtime.runners.local import LocalRunner
from autopar.runtime.workers.failures import Trouble, root_cause
from autopar.runtime.workers.group import WorkerGroup
from tests.runtime.ended import STOPPED_WITHIN_S, assert_gone
from tests.runtime.held_up import hold_up


class Service:
    """A worker's service: collectives, arguments and results of all kinds, and ways to fail."""

    def __init__(self, rank: int, world_size: int, base: int = 0) -> None:
        assert dist.get_rank() == rank
        assert dist.get_world_size() == world_size
        self.rank = rank
        self.base = base
        self.kept: torch.Tensor | None = None

    def add(self, *terms: int) -> int:
        return self.base + sum(terms)

    def rank_sum(self) -> float:
        return float(all_reduced(float(self.rank)))

    def fill(self, tensor: torch.Tensor, value: float) -> torch.Tensor:
        return tensor.fill_(value)

    def keep(self, tensor: torch.Tensor) -> None:
        self.kept = tensor

    def kept_sum(self) -> float:
        assert self.kept is not None
        return float(self.kept.sum())

    def mapping_of(self, tensor: torch.Tensor) -> tuple[str, str]:
        """The inode and the name of the file that the tensor's memory is mapped from."""
        for line in Path("/proc/self/maps").read_text().splitlines():
            bounds, _mode, _offset, _device, inode, *name = line.split()
            low, high = (int(bound, 16) for bound in bounds.split("-"))
            if low <= tensor.data_ptr() < high:
                return inode, " ".join(name)
        raise AssertionError("the tensor is mapped nowhere")

    def threads(self) -> tuple[int, str]:
        return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]

    def square_with_history(self) -> torch.Tensor:
        return torch.ones(1, requires_grad=True) ** 2

    def open_lock(self) -> Any:
        return threading.Lock()

    def fail(self, rank: int, how: str) -> None:
        """One rank fails while the others wait for it in a collective."""
        if self.rank == rank:
            HOW_TO_FAIL[how]()
        all_reduced(1.0)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def all_reduced(value: float) -> torch.Tensor:
    total = torch.tensor(value)
    dist.all_reduce(total)
    return total


def raise_bad_batch() -> None:
    raise ValueError("this batch is bad")


def die_slowly() -> None:
    """Cut the peers off two seconds before the process ends, as on a machine that is busy."""
    dist.destroy_process_group()
    time.sleep(2.0)
    os._exit(7)


BUSY_CHILD = "import time; end = time.monotonic() + 8\nwhile time.monotonic() < end: pass"
HOW_TO_FAIL: dict[str, Callable[[], Any]] = {
    "raise": raise_bad_batch,
    "os._exit": lambda: os._exit(7),
    "die slowly": die_slowly,
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
    "hang": lambda: time.sleep(600),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "compute": lambda: hold_up("compute", 8.0),
    "wait for a child": lambda: subprocess.run([sys.executable, "-c", BUSY_CHILD], check=True),
    "other collective": lambda: dist.recv(torch.zeros(1), 0),
}


def failing_service(rank: int, world_size: int) -> Service:
    if rank == 1:
        raise RuntimeError("no such checkpoint")
    return Service(rank, world_size)


@pytest.fixture(scope="module")
def group() -> Iterator[WorkerGroup]:
    with WorkerGroup(2, service=Service, service_args=(100,)) as started:
        yield started


def processes_of(group: WorkerGroup) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in group.pids]


class TestCalls:
    def test_results_come_by_rank(self, group: WorkerGroup) -> None:
        assert group.call("add", 1, per_rank_args=[(10,), (20,)]) == [111, 121]
        assert group.world_size == 2
        assert not group.closed

    def test_the_workers_are_one_process_group(self, group: WorkerGroup) -> None:
        assert group.call("rank_sum") == [1.0, 1.0]

    def test_ranks_map_the_same_shared_memory(self, group: WorkerGroup) -> None:
        first, second = group.call("mapping_of", torch.zeros(1 << 20))
        assert first == second
        assert "memfd:autopar" in first[1]

    def test_what_a_worker_writes_is_seen_by_nobody_else(self, group: WorkerGroup) -> None:
        batch = torch.zeros(10_000)
        filled = group.call("fill", batch, per_rank_args=[(1.0,), (2.0,)])
        assert [float(tensor.mean()) for tensor in filled] == [1.0, 2.0]
        assert not batch.any()

    def test_a_tensor_outlives_its_call(self, group: WorkerGroup) -> None:
        group.call("keep", torch.ones(10_000))
        group.call("fill", torch.zeros(10_000), 5.0)
        assert group.call("kept_sum") == [10_000.0, 10_000.0]

    def test_shared_memory_serves_call_after_call_until_a_worker_keeps_a_tensor(
        self, group: WorkerGroup
    ) -> None:
        first, again = (group.call("mapping_of", torch.zeros(10_000))[0] for _ in range(2))
        assert first == again
        assert group.call("mapping_of", torch.zeros(100_000))[0] != first  # too small for it
        group.call("keep", torch.ones(10_000))
        group.call("add", 1)  # which uses no shared memory and does not free any
        for value in (2.0, 3.0):
            filled = group.call("fill", torch.zeros(10_000), value)
            assert [float(tensor.sum()) for tensor in filled] == [10_000 * value] * 2
        assert group.call("kept_sum") == [10_000.0, 10_000.0]
        group.call("keep", torch.ones(1))  # lets the other one go

    def test_training_steps_find_the_shared_memory_free(self) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
        batch = {"input": torch.randn(128, 64), "target": torch.randn(128, 64)}
        loss_fn = torch.nn.functional.mse_loss
        with autopar.compile(
            model, 2, example_inputs=batch, loss_fn=loss_fn, optimizer=torch.optim.SGD
        ) as compiled:
            runner = compiled._runner
            assert isinstance(runner, LocalRunner)
            for _ in range(3):
                compiled.train_step(**batch)
                assert runner.group._spare.free

    def test_threads_of_the_parent_take_turns(self, group: WorkerGroup) -> None:
        results: dict[int, list[int]] = {}

        def call_ten_times(start: int) -> None:
            for number in range(start, start + 10):
                results[number] = group.call("add", number)

        threads = [threading.Thread(target=call_ten_times, args=(k * 10,)) for k in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert results == {number: [100 + number] * 2 for number in range(30)}

    def test_calls_leave_no_descriptor_open(self, group: WorkerGroup) -> None:
        def fill(times: int) -> list[int]:
            for _ in range(times):
                group.call("fill", torch.zeros(10), 0.0)
            group.call("add")  # begun once the call before it has let go of its tensors
            return [psutil.Process(pid).num_fds() for pid in (os.getpid(), *group.pids)]

        assert fill(1) == fill(20)

    def test_arguments_that_cannot_be_sent_leave_the_group_usable(self, group: WorkerGroup) -> None:
        with pytest.raises(InputError, match=r"the arguments of add\(\) cannot be sent"):
            group.call("add", threading.Lock())
        with pytest.raises(InputError, match=r"detach"):
            group.call("add", per_rank_args=[(1,), (torch.ones(1, requires_grad=True) * 2,)])
        with pytest.raises(InputError, match="3 entries for 2 workers"):
            group.call("add", per_rank_args=[(), (), ()])
        assert group.call("add", 1) == [101, 101]

    def test_the_cores_are_shared_out(self, group: WorkerGroup) -> None:
        expected = max(1, usable_cores() // 2)
        assert group.call("threads") == [(expected, str(expected))] * 2

    def test_two_groups_at_once(self, group: WorkerGroup) -> None:
        with WorkerGroup(3, service=Service, service_args=(7,), threads_per_worker=3) as other:
            assert other.call("rank_sum") == [3.0] * 3
            assert group.call("rank_sum") == [1.0] * 2
            assert other.call("threads") == [(3, "3")] * 3
        assert group.call("add") == [100, 100]


class TestClosing:
    def test_close_twice_then_use(self) -> None:
        group = WorkerGroup(1, service=Service)
        workers = processes_of(group)
        group.close()
        assert_gone(workers, within_s=0.5)
        group.close()
        assert group.closed
        with pytest.raises(WorkerError, match=r"closed because close\(\) was called"):
            group.call("add")

    def test_no_reference_left(self) -> None:
        group = WorkerGroup(1, service=Service)
        workers = processes_of(group)
        del group
        gc.collect()
        assert_gone(workers)

    def test_by_another_thread_during_a_call(self) -> None:
        group = WorkerGroup(1, service=Service)
        workers = processes_of(group)
        timer = threading.Timer(0.5, group.close)
        timer.start()
        started_s = time.monotonic()
        with pytest.raises(WorkerError, match="closed by another thread"):
            group.call("sleep", 600.0)
        timer.join(STOPPED_WITHIN_S)
        assert time.monotonic() - started_s < STOPPED_WITHIN_S
        assert_gone(workers)

    def test_a_worker_that_does_not_stop_is_killed_and_said(self) -> None:
        group = WorkerGroup(1, service=Service)
        workers = processes_of(group)
        os.kill(group.pids[0], signal.SIGSTOP)
        with pytest.warns(RuntimeWarning, match="worker 0 did not stop within 0.2 s"):
            group.close(timeout_s=0.2)
        assert_gone(workers)

    @pytest.mark.parametrize("num_workers", [0, -1])
    def test_a_group_of_nobody_is_refused(self, num_workers: int) -> None:
        with pytest.raises(InputError, match="at least one worker"):
            WorkerGroup(num_workers, service=Service)

    def test_device_indices_must_fit(self) -> None:
        with pytest.raises(InputError, match="pass 2 indices"):
            WorkerGroup(2, service=Service, device_indices=[0])


class TestFailures:
    """All others wait in an all_reduce for the one that fails; it is the one named."""

    @pytest.mark.parametrize(
        ("num_workers", "how", "message", "traceback"),
        [
            (2, "raise", "worker 1 of 2 raised ValueError: this batch is bad", "raise_bad_batch"),
            (2, "os._exit", "exited with code 7", ""),
            (2, "die slowly", "exited with code 7", ""),
            (3, "sigkill", "was killed by SIGKILL", ""),
            (2, "segfault", "was killed by SIGSEGV", "in string_at"),
        ],
    )
    def test_a_rank_fails_in_a_collective(
        self, num_workers: int, how: str, message: str, traceback: str
    ) -> None:
        group = WorkerGroup(num_workers, service=Service)
        workers = processes_of(group)
        started_s = time.monotonic()
        with pytest.raises(WorkerError) as caught:
            group.call("fail", 1, how)
        assert time.monotonic() - started_s < STOPPED_WITHIN_S
        assert caught.value.rank == 1
        assert message in str(caught.value)
        assert str(caught.value).startswith(f"worker 1 of {num_workers} ")
        assert traceback in caught.value.traceback
        assert_gone(workers)
        assert group.closed
        with pytest.raises(WorkerError, match="closed because worker 1 of"):
            group.call("add")

    @pytest.mark.parametrize(
        ("how", "message", "stack"),
        [
            ("hang", r"did not finish fail", "in <lambda>"),
            ("stop", r"\(process \d+\) is stopped and gives no sign of life \(during fail", ""),
        ],
    )
    def test_a_rank_that_hangs_is_named_with_its_stack(
        self, how: str, message: str, stack: str
    ) -> None:
        group = WorkerGroup(2, service=Service)
        workers = processes_of(group)
        with pytest.raises(WorkerError, match=f"worker 1 of 2 {message}") as caught:
            group.call("fail", 1, how, timeout_s=0.5)
        assert caught.value.rank == 1
        assert stack in caught.value.traceback
        assert "Python stack of worker 0" in str(caught.value)
        assert "in all_reduced" in str(caught.value)
        assert_gone(workers)

    def test_a_worker_that_reads_nothing_cannot_block_the_parent(self) -> None:
        group = WorkerGroup(1, service=Service)
        workers = processes_of(group)
        os.kill(group.pids[0], signal.SIGSTOP)
        started_s = time.monotonic()
        with pytest.raises(WorkerError, match="stopped") as caught:
            group.call("add", bytes(1 << 24), timeout_s=0.5)
        assert time.monotonic() - started_s < STOPPED_WITHIN_S
        assert caught.value.rank == 0
        assert_gone(workers)

    @pytest.mark.parametrize("begun", [True, False])
    def test_a_stopped_rank_is_not_waited_for(
        self, begun: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(liveness, "SILENT_S", 2.0)
        group = WorkerGroup(2, service=Service)
        workers = processes_of(group)
        if not begun:
            os.kill(group.pids[1], signal.SIGSTOP)
        started_s = time.monotonic()
        with pytest.raises(WorkerError, match=r"1 of 2 .* is stopped and gives no sign") as caught:
            group.call("fail", 1, "stop")
        assert time.monotonic() - started_s < 30
        assert caught.value.rank == 1
        assert ("it had not begun" in str(caught.value)) != begun
        assert "Python stack of worker 0" in str(caught.value)
        assert_gone(workers)

    def test_a_rank_that_does_nothing_is_not_waited_for(self) -> None:
        group = WorkerGroup(2, service=Service)
        workers = processes_of(group)
        started_s = time.monotonic()
        message = r"worker 1 of 2 hangs: for 3 s no worker has used its processor \(during fail"
        with pytest.raises(WorkerError, match=message) as caught:
            group.call("fail", 1, "hang", idle_limit_s=3.0)
        assert time.monotonic() - started_s < 30
        assert "in <lambda>" in caught.value.traceback
        assert_gone(workers)

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("how", ["compute", "wait for a child"])
    def test_a_rank_that_is_slow_is_waited_for(
        self, how: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(liveness, "_CHILDREN_S", 1.0)
        with WorkerGroup(2, service=Service) as group:
            assert group.call("fail", 1, how, idle_limit_s=3.0) == [None, None]

    def test_ranks_that_wait_for_each_other_have_their_time(self) -> None:
        group = WorkerGroup(2, service=Service)
        with pytest.raises(WorkerError, match=r"did not finish fail\(\), within timeout_s=8"):
            group.call("fail", 1, "other collective", idle_limit_s=2.0, timeout_s=8.0)

    def test_a_death_between_calls_is_found_by_the_next(self) -> None:
        group = WorkerGroup(2, service=Service)
        workers = processes_of(group)
        workers[1].kill()
        with pytest.raises(WorkerError, match="was killed by SIGKILL") as caught:
            group.call("rank_sum")
        assert caught.value.rank == 1
        assert_gone(workers)

    @pytest.mark.parametrize(
        ("method", "message"), [("square_with_history", "detach"), ("open_lock", "pickle")]
    )
    def test_a_result_that_cannot_be_sent(self, method: str, message: str) -> None:
        group = WorkerGroup(1, service=Service)
        with pytest.raises(WorkerError, match=message) as caught:
            group.call(method)
        assert caught.value.rank == 0

    def test_a_service_that_cannot_be_built(self) -> None:
        with pytest.raises(WorkerError, match="no such checkpoint") as caught:
            WorkerGroup(2, service=failing_service)
        assert caught.value.rank == 1
        assert "failing_service" in caught.value.traceback

    def test_a_service_that_cannot_be_sent(self) -> None:
        with pytest.raises(InputError, match="service and service_args cannot be sent"):
            WorkerGroup(2, service=Service, service_args=(threading.Lock(),))

    def test_a_start_that_takes_too_long(self) -> None:
        before = psutil.Process().children()
        with pytest.raises(WorkerError, match=r"did not finish the start, within .*=0\.05"):
            WorkerGroup(1, service=Service, start_timeout_s=0.05)
        assert_gone([child for child in psutil.Process().children() if child not in before])


class TestRootCause:
    @staticmethod
    def trouble(rank: int, time_s: float, *, died: bool = False) -> Trouble:
        return Trouble(rank=rank, time_s=time_s, died=died, summary="failed", traceback="")

    def test_the_earliest_exception_not_the_first_to_arrive(self) -> None:
        troubles = [self.trouble(0, 2.0), self.trouble(2, 1.0), self.trouble(1, 3.0)]
        error = root_cause(troubles, "step()", 3)
        assert error.rank == 2
        assert "after it, worker 0 failed\nafter it, worker 1 failed" in str(error)

    def test_a_death_before_the_exceptions_of_its_peers(self) -> None:
        troubles = [self.trouble(0, 1.0), self.trouble(1, 2.0, died=True)]
        assert root_cause(troubles, "step()", 2).rank == 1


class CudaService:
    def __init__(self, rank: int, world_size: int) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())

    def reduced(self, tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
        total = tensor.to(self.device).clone()
        mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),))
        dist.all_reduce(total, group=mesh.get_group())
        assert torch.cuda.current_device() == self.device.index
        return self.device.index, total.cpu()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("batch_device", ["cpu", "cuda:0"])
def test_nccl_workers_have_one_device_each(batch_device: str) -> None:
    count = min(2, torch.cuda.device_count())
    indices = list(reversed(range(count)))
    with WorkerGroup(
        count, service=CudaService, backend="nccl", device_type="cuda", device_indices=indices
    ) as group:
        batch = torch.arange(4.0, device=batch_device)
        results = group.call("reduced", batch)
        assert [index for index, _ in results] == indices
        for _, total in results:
            assert torch.equal(total, torch.arange(4.0) * count)
