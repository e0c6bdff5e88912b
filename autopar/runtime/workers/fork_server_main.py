"""The fork server's program: import what workers need, fork one for each request, report its end.

In: a connected socket from the parent (`autopar.runtime.workers.fork_server` starts this module).
Out: the process id of each worker and later its exit code, through the pipe of its request.

The server has one thread, so a fork is whole; it initializes no device. It ends when its parent is
gone, and its workers end with it; or when the parent has closed the connection and the last worker
has ended.
"""

import contextlib
import faulthandler
import functools
import gc
import json
import os
import random
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping

# The services that workers build: they are imported once, here.
import autopar.runtime.measure.collective_times
import autopar.runtime.measure.op_times
import autopar.runtime.measure.region_times
import autopar.runtime.runners.local  # noqa: F401 - as those above
from autopar.base.torch_private import import_compiler
from autopar.runtime.workers.fork_server import (
    NUM_FILES,
    NUMBER_BYTES,
    Request,
    WorkerFiles,
)
from autopar.runtime.workers.main import main

import_compiler()
_PARENT_POLL_S = 1.0


def serve(control_fd: int, parent_pid: int) -> Callable[[], None]:
    """Fork workers until there is nothing left to do; returns in workers only, with their program.

    The program runs outside of this function, whose frames would be in every worker's stack.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # a collection in a worker writes into no page that it shares with the others
    gc.enable()
    server = _Server(socket.socket(fileno=control_fd), parent_pid)
    while server.has_work():
        worker = server.next()
        if worker is not None:
            return worker
    os._exit(0)


class _Server:
    def __init__(self, control: socket.socket, parent_pid: int) -> None:
        self._control = control
        self._parent_pid = parent_pid
        self._answer_fds: dict[int, int] = {}  # by the worker's process id
        self._is_retired = False
        # A signal of a child's end wakes the wait for requests.
        self._woken, self._waking = os.pipe()
        os.set_blocking(self._waking, False)
        os.set_blocking(self._woken, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waking, warn_on_full_buffer=False)

    def has_work(self) -> bool:
        return os.getppid() == self._parent_pid and not (self._is_retired and not self._answer_fds)

    def next(self) -> Callable[[], None] | None:
        """Wait for an event and serve it; in the worker that it forks, the worker's program."""
        control_fd = self._control.fileno()
        files = [self._woken] if self._is_retired else [self._woken, control_fd]
        ready, _, _ = select.select(files, [], [], _PARENT_POLL_S)
        if self._woken in ready:
            os.read(self._woken, 1 << 12)
        self._report_ended()
        return self._fork() if control_fd in ready else None

    def _report_ended(self) -> None:
        for pid in list(self._answer_fds):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                fd = self._answer_fds.pop(pid)
                _answer(fd, os.waitstatus_to_exitcode(status))
                os.close(fd)

    def _fork(self) -> Callable[[], None] | None:
        byte, fds, _, _ = socket.recv_fds(self._control, 1, NUM_FILES)
        if not byte:
            self._is_retired = True
            return None
        request_fd, answer_fd, out_fd, error_fd, *own = fds
        with os.fdopen(request_fd) as file:
            request = Request(**json.load(file))
        server_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._leave_to_worker()
            os.close(answer_fd)
            return functools.partial(
                _become_worker, request, (out_fd, error_fd), _files(own), server_pid
            )
        _lead_group(pid)
        for fd in (out_fd, error_fd, *own):
            os.close(fd)
        self._answer_fds[pid] = answer_fd
        _answer(answer_fd, pid)
        return None

    def _leave_to_worker(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        for fd in (self._woken, self._waking, *self._answer_fds.values()):
            os.close(fd)


def _answer(fd: int, number: int) -> None:
    """Write at once, as the pipe holds both answers; the parent may have given up on the worker."""
    with contextlib.suppress(BrokenPipeError):
        os.write(fd, number.to_bytes(NUMBER_BYTES, signed=True))


def _files(fds: list[int]) -> WorkerFiles:
    channel, stack, page, store = fds
    return WorkerFiles(channel=channel, stack=stack, page=page, store=store)


def _lead_group(pid: int) -> None:
    """Make the worker lead a process group; whichever of the two processes comes first does it."""
    with contextlib.suppress(PermissionError, ProcessLookupError):  # it has ended
        os.setpgid(pid, pid)


def _become_worker(
    request: Request, streams: tuple[int, int], files: WorkerFiles, server_pid: int
) -> None:
    _lead_group(0)
    for fd, standard in zip(streams, (1, 2), strict=True):
        os.dup2(fd, standard)
        os.close(fd)
    faulthandler.enable(files.stack, False)
    faulthandler.register(signal.SIGUSR1, files.stack, False)
    _take_on(request.env)
    sys.path[:] = request.path
    if request.directory is not None:
        os.chdir(request.directory)
    if request.cores is not None:
        os.sched_setaffinity(0, request.cores)
    random.seed()  # forks would draw the same numbers
    main(files, server_pid)


def _take_on(env: Mapping[str, str]) -> None:
    for name in [name for name in os.environ if name not in env]:
        del os.environ[name]
    os.environ.update(env)
