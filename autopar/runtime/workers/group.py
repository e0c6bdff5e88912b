"""Local worker processes, for one process or a notebook that drives several devices.

In: how many workers, and a service to build in each. Out: ``WorkerGroup``, whose ``call`` runs a
method of the service on all ranks at once. It exists because ``torchrun`` starts one script for
each device, which a notebook cannot do.

When a worker fails, the error names the first rank that died or raised, with its traceback, and not
the ranks whose collectives broke because of it; all workers are ended at once, whatever they wait
for; and the group is closed. Workers do not outlive their parent: they are killed at interpreter
exit, and a worker notices the death of a parent that could not do it.
"""

import contextlib
import itertools
import math
import os
import select
import socket
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from autopar.base.accelerators import cpu_by_default
from autopar.base.closing import Closing, closed_error
from autopar.base.errors import InputError, WorkerError
from autopar.cost_models.detect import usable_cores
from autopar.runtime.host.heap import with_heap_settings
from autopar.runtime.workers.failures import Trouble, hang_error, root_cause
from autopar.runtime.workers.main import Build, Call, Reply, Start, Stop
from autopar.runtime.workers.messages import Message, Spare, packed, unpack
from autopar.runtime.workers.process import (
    WorkerProcess,
    end_processes,
    open_store_file,
    path_of_store,
)
from autopar.runtime.workers.watchdog import Watchdog

_POLL_S = 0.2  # how late a death is noticed if the worker's children hold its socket open
_SETTLE_S = 0.5  # how long after a rank's exception another's death may show up
_CUT_OFF_S = 10.0  # the same after the error of a wait for others, which a death explains


class WorkerGroup(Closing):
    """``num_workers`` processes in one ``torch.distributed`` group, each with a service object.

    ``service(rank, world_size, *service_args)`` is called in each worker once the group is up.
    On ``device_type="cuda"`` rank r has device ``device_indices[r]``, by default r.
    ``threads_per_worker`` is the number of threads of torch's operators on the CPU; by default
    the cores are divided among the workers, and if they divide exactly, each worker is pinned to
    its own (`cores_by_worker`). Raises ``WorkerError`` if the workers are not ready in time, and
    ``InputError`` if the service or its arguments cannot be sent.

    Functions and classes from ``__main__`` are sent by value (`autopar.runtime.workers.pickling`).
    Calls from several threads take turns. With ``with``, at exit, and when the last reference to
    the group is gone, the workers are ended.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        service: Callable[..., Any],
        service_args: Sequence[Any] = (),
        backend: str = "gloo",
        device_type: str = "cpu",
        device_indices: Sequence[int] | None = None,
        threads_per_worker: int | None = None,
        start_timeout_s: float = 120.0,
        call_timeout_s: float = 600.0,
    ) -> None:
        if num_workers < 1:
            raise InputError(
                f"num_workers={num_workers}: a group has at least one worker; "
                "pass num_workers=1 or more"
            )
        indices = range(num_workers) if device_indices is None else device_indices
        if len(indices) != num_workers:
            raise InputError(
                f"device_indices={list(indices)} for {num_workers} workers: each worker has one "
                f"device; pass {num_workers} indices"
            )
        num_threads = threads_per_worker
        if num_threads is None:
            num_threads = max(1, usable_cores() // num_workers)
        self._world_size = num_workers
        self._call_timeout_s = call_timeout_s
        self._lock = threading.Lock()
        self._owner_pid = os.getpid()
        self._why_closed: str | None = None
        self._store: IO[bytes] | None = None
        self._workers: list[WorkerProcess] = []
        self._spare = Spare()
        self._finalizer = weakref.finalize(self, end_processes, self._workers, self._owner_pid)
        build = Build(service=service, service_args=tuple(service_args))
        with (
            _sendable(build, "service and service_args") as message,
            self._closing_on_error("its start was interrupted"),
        ):
            self._store = open_store_file()
            cores = cores_by_worker(num_workers, num_threads) if device_type == "cpu" else None
            starts = [
                Start(
                    rank=rank,
                    world_size=num_workers,
                    store_path=path_of_store(self._store),
                    backend=backend,
                    device_type=device_type,
                    device_index=device_index,
                    num_threads=num_threads,
                    cores=cores[rank] if cores else None,
                    start_timeout_s=start_timeout_s,
                )
                for rank, device_index in enumerate(indices)
            ]
            self._start_workers(starts, message, start_timeout_s)

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def call_timeout_s(self) -> float:
        """The time limit of a call without one of its own."""
        return self._call_timeout_s

    @property
    def closed(self) -> bool:
        return self._why_closed is not None

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank; empty once closed."""
        return tuple(worker.pid for worker in self._workers)

    @cpu_by_default()
    def call(
        self,
        method: str,
        *args: Any,
        timeout_s: float | None = None,
        idle_limit_s: float = math.inf,
        per_rank_args: Sequence[tuple[Any, ...]] | None = None,
    ) -> list[Any]:
        """Run ``service.method(*args, *per_rank_args[rank])`` on all ranks; results by rank.

        Tensors travel through shared memory, those in ``args`` once for all ranks, and by value:
        what a worker writes into them is seen by nobody else. A tensor with a gradient history
        must be detached. Raises ``InputError``, and stays usable, if the arguments
        cannot be sent; ``WorkerError``, closed from then on, if a worker dies or raises, or if
        the results are not there after ``timeout_s`` (by default the group's), if a worker has been
        stopped for `liveness.SILENT_S`, or if for ``idle_limit_s`` no worker has done anything.
        """
        rank_args = list(per_rank_args or ())
        if per_rank_args is not None and len(rank_args) != self._world_size:
            raise InputError(
                f"per_rank_args has {len(rank_args)} entries for {self._world_size} workers: "
                "pass one tuple of arguments for each"
            )
        limit_s = self._call_timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + limit_s
        what = f"{method}()"
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._turn(deadline_s, what))
            call = Call(method=method, args=args, by_rank=bool(rank_args))
            common = stack.enter_context(_sendable(call, f"the arguments of {what}", self._spare))
            by_rank = [
                stack.enter_context(_sendable(tuple(own), f"per_rank_args[{rank}] of {what}"))
                for rank, own in enumerate(rank_args)
            ]
            stack.enter_context(self._closing_on_error(f"{what} was interrupted"))
            for worker, own in itertools.zip_longest(self._workers, by_rank):
                self._send(worker, common, deadline_s)
                if own is not None:
                    self._send(worker, own, deadline_s)
            what = f"{what}, within timeout_s={limit_s:g}"
            answers = self._replies(deadline_s, what, idle_limit_s)
            if common.segment_fd is not None:
                self._spare.free = all(answer.released for answer in answers)
            return [answer.value for answer in answers]

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop the workers, by force after ``timeout_s`` or if another thread is in a call."""
        if self.closed:
            return
        holds_lock = idle = self._lock.acquire(blocking=False)
        try:
            self._why_closed = "close() was called"
            if os.getpid() != self._owner_pid:
                return
            if idle:
                self._stop(timeout_s)
            else:  # the thread in the call sees its workers end, and releases the lock
                for worker in list(self._workers):
                    worker.kill()
                holds_lock = self._lock.acquire(timeout=timeout_s)
        finally:
            self._end()
            if holds_lock:
                self._lock.release()

    def _start_workers(self, starts: list[Start], build: Message, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        for start in starts:
            assert self._store is not None
            own_env = _worker_env(start)
            self._workers.append(
                WorkerProcess(start.rank, self._store.fileno(), env=own_env, deadline_s=deadline_s)
            )
        for worker, start in zip(self._workers, starts, strict=True):
            with packed(start) as own:
                self._send(worker, own, deadline_s)
            self._send(worker, build, deadline_s)
        self._replies(deadline_s, f"the start, within start_timeout_s={timeout_s:g}")

    def _stop(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        with packed(Stop()) as message:
            for worker in self._workers:
                # One that cannot be reached is noticed by its exit code, and killed by _end.
                with contextlib.suppress(TimeoutError, ConnectionError):
                    worker.channel.send(message, deadline_s=deadline_s)
        for worker in self._workers:
            code = worker.wait(timeout_s=deadline_s - time.monotonic())
            if code != 0:
                state = f"did not stop within {timeout_s:g} s" if code is None else f"left {code}"
                warnings.warn(f"worker {worker.rank} {state}", RuntimeWarning, stacklevel=3)

    def _end(self) -> None:
        self._finalizer()  # kills those still running; does nothing the second time
        self._spare.close()
        if self._store is not None:
            self._store.close()

    @contextlib.contextmanager
    def _turn(self, deadline_s: float, what: str) -> Iterator[None]:
        """Hold the group for one call; raises if it is closed."""
        self.check_open(what)
        if not self._lock.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            raise WorkerError(f"{what}: another thread's call used the workers all the time")
        try:
            self.check_open(what)
            yield
        finally:
            self._lock.release()

    def check_open(self, what: str) -> None:
        """Raise WorkerError, for a call of ``what``, where it is closed or of another process."""
        if self._why_closed is not None:
            raise closed_error(self._why_closed)
        if os.getpid() != self._owner_pid:
            raise WorkerError(
                f"cannot call {what} in process {os.getpid()}: the workers belong to process "
                f"{self._owner_pid}, which this one was forked from; call it there"
            )

    @contextlib.contextmanager
    def _closing_on_error(self, reason: str) -> Iterator[None]:
        """End all workers on any exception, Ctrl-C included: they may be at any point."""
        try:
            yield
        except BaseException as error:
            if self._why_closed is None:
                failed = isinstance(error, WorkerError)
                self._why_closed = str(error).splitlines()[0].rstrip(".") if failed else reason
            self._end()
            raise

    def _send(self, worker: WorkerProcess, message: Message, deadline_s: float) -> None:
        # A worker that is gone, or does not read, is reported by _replies.
        with contextlib.suppress(ConnectionError, TimeoutError):
            worker.channel.send(message, deadline_s=deadline_s)

    def _replies(
        self, deadline_s: float, what: str, idle_limit_s: float = math.inf
    ) -> "list[_Answer]":
        """One result from each worker, by rank; raises for the first that failed."""
        watchdog = Watchdog(self._workers, what, idle_limit_s)
        answers: dict[int, _Answer] = {}
        troubles: list[Trouble] = []
        settled_s = deadline_s
        poller = select.poll()
        files = {worker.rank: worker.channel.fileno() for worker in self._workers}
        for file in files.values():
            poller.register(file, select.POLLIN)
        while len(answers) + len(troubles) < self._world_size and not self.closed:
            done = {*answers, *(trouble.rank for trouble in troubles)}
            waiting = [worker for worker in self._workers if worker.rank not in done]
            left_s = min(settled_s, deadline_s) - time.monotonic()
            ready = dict(poller.poll(1000 * max(0, min(left_s, _POLL_S))))
            for worker in waiting:
                if files[worker.rank] in ready:
                    outcome = _outcome(worker, deadline_s)
                elif worker.has_ended():  # a process that it forked holds its socket open
                    outcome = Trouble.of_death(worker)
                else:
                    continue
                poller.unregister(files[worker.rank])
                if isinstance(outcome, Trouble):
                    troubles.append(outcome)
                    now_s = time.monotonic()
                    wait_s = _CUT_OFF_S if outcome.by_peers else _SETTLE_S
                    settled_s = min(settled_s, now_s if outcome.died else now_s + wait_s)
                else:
                    answers[worker.rank] = outcome
            if left_s <= 0:
                break
            if not troubles:
                late = [worker for worker in waiting if worker.rank not in answers]
                error = watchdog.trouble(late)
                if error is not None:
                    raise error
        if self.closed:
            raise WorkerError(f"the worker group was closed by another thread during {what}")
        if troubles:
            raise root_cause(troubles, what, self._world_size)
        if len(answers) < self._world_size:
            late = [worker for worker in self._workers if worker.rank not in answers]
            error = hang_error(late, what, self._world_size)
            assert error is not None
            raise error
        return [answers[rank] for rank in range(self._world_size)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """A worker's result, and whether it has released the arguments' memory."""

    value: Any
    released: bool


def _outcome(worker: WorkerProcess, deadline_s: float) -> _Answer | Trouble:
    """The answer or the trouble of a worker that has sent a message or ended."""
    try:
        message = worker.channel.receive(deadline_s=deadline_s)
        reply: Reply = unpack(message)
    except (ConnectionError, TimeoutError):
        return Trouble.of_death(worker)
    except Exception as error:
        return Trouble.of_unreadable_result(worker.rank, error)
    if reply.failure is not None:
        return Trouble.of_failure(worker, reply.failure)
    return _Answer(value=reply.value, released=message.released)


@contextlib.contextmanager
def _sendable(value: object, what: str, spare: Spare | None = None) -> Iterator[Message]:
    with contextlib.ExitStack() as stack:
        try:
            message = stack.enter_context(packed(value, spare))
        except Exception as error:
            raise InputError(
                f"{what} cannot be sent to another process: {error}. They are pickled: pass "
                "tensors, plain data and functions, and open files, locks or generators in the "
                "service itself"
            ) from error
        yield message


def cores_by_worker(num_workers: int, num_threads: int) -> list[tuple[int, ...]] | None:
    """The cores that each worker is pinned to if they divide exactly; None otherwise.

    Processes that migrate between cores have runs of slow steps. If cores are left over, or are
    time slices in a container, other programs may need the scheduler's freedom.
    """
    if num_workers < 2 or not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    if not len(cores) == usable_cores() == num_workers * num_threads:
        return None
    return [tuple(cores[i : i + num_threads]) for i in range(0, len(cores), num_threads)]


def _worker_env(start: Start) -> Mapping[str, str]:
    env = with_heap_settings(os.environ)
    env["RANK"] = str(start.rank)
    env["LOCAL_RANK"] = str(start.device_index)  # DeviceMesh may make it the current device
    env["WORLD_SIZE"] = env["LOCAL_WORLD_SIZE"] = str(start.world_size)
    env["OMP_NUM_THREADS"] = str(start.num_threads)
    for _index, name in socket.if_nameindex():
        if name in ("lo", "lo0"):  # gloo would resolve the host's name, which may lead elsewhere
            env["GLOO_SOCKET_IFNAME"] = name
    return env
