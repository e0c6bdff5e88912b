"""The parent's side of the fork server: one warm process from which local workers are forked.

In: the files and the environment of a worker. Out: ``ForkedProcess``, which observes and ends it.
Importing torch takes longer than all else in a worker's start. The server imports it once, while
the parent plans (`begin`), and the workers of all groups are forks of it.

``multiprocessing`` has a fork server too. Its workers import the user's ``__main__`` again, which a
notebook does not have and which runs a script without a guard twice; it listens at a path where
other processes can connect; and its workers write to the standard streams of the server's start.

A variable that a library reads as it is loaded cannot be changed in a fork. So a server is made for
one environment, and replaced if the parent's has changed; the old one ends with its last worker.
"""

import atexit
import contextlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from autopar.base.errors import WorkerError
from autopar.runtime.faults import liveness
from autopar.runtime.host.heap import with_heap_settings

# -P keeps the working directory from being searched first. Modules are no garbage: without
# collections they are imported in less time. A timer ends a server whose parent is gone before it
# has imported all. The worker's program runs outside of the server's loop, whose frames would be in
# each of its stacks.
_BOOT = """
import gc, json, os, signal, sys
gc.disable()
control_fd, parent_pid, sys.path[:] = json.loads(sys.argv[1])
signal.signal(signal.SIGALRM, lambda *_: None if os.getppid() == parent_pid else os._exit(0))
signal.siginterrupt(signal.SIGALRM, False)
signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)
from autopar.runtime.workers import fork_server_main
signal.setitimer(signal.ITIMER_REAL, 0.0)
signal.signal(signal.SIGALRM, signal.SIG_DFL)
start = fork_server_main.serve(control_fd, parent_pid)
start()
"""
OWN_FILES = "/proc/self/fd"
NUMBER_BYTES = 4
NUM_FILES = 8
"""Files of a request: its JSON, a pipe for the answers (the process id, and later the exit code),
the standard output and error, and `WorkerFiles`. One byte carries them all."""
_END_WAIT_S = 2.0
_READ_WHEN_NEEDED = frozenset({"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"})
"""Variables that change in a running process and that no library needs as it is loaded: the test
that pytest runs, and a folder that Inductor looks up when it compiles. Torch sets the latter itself
when its compiler is imported, as tracing does after `begin`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFiles:
    """Descriptors of a worker's files: its connection, where its stack is written, the page of its
    progress, and the store of its group."""

    channel: int
    stack: int
    page: int
    store: int

    @property
    def store_path(self) -> str:
        """The path by which the worker opens a store without a name."""
        return f"{OWN_FILES}/{self.store}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Process attributes of a worker: environment, module search path, working directory, and CPU
    affinity."""

    env: dict[str, str]
    path: list[str]
    directory: str | None  # None: it was removed
    cores: list[int] | None  # None: the system does not tell


class ForkedProcess:
    """A worker as its parent sees it: the child of a server, which reports how it ended.

    ``outlived_server``: the server ended first, and the worker killed itself.
    """

    def __init__(self, pid: int, answers: io.FileIO) -> None:
        self.pid = pid
        self.outlived_server = False
        self._answers = answers
        self._code: int | None = None

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, negative for a signal; None if it has not ended in time."""
        is_open = self._code is None and not self._answers.closed
        if is_open and _is_readable(self._answers, timeout_s):
            found = _number(self._answers)
            self.outlived_server = found is None
            self._code = -signal.SIGKILL if found is None else found
        return self._code

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill_group(self) -> None:
        """Kill the worker and all processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self._answers.close()


class ForkServer:
    """A process that forks workers; see the module. Threads may use it at the same time."""

    def __init__(self) -> None:
        self._env = _compared(os.environ)
        self._control, theirs = socket.socketpair()
        boot = [theirs.fileno(), os.getpid(), _search_path()]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, json.dumps(boot)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # A pool of threads would not survive a fork: a library starts none.
                env=with_heap_settings({**os.environ, "OMP_NUM_THREADS": "1"}),
                start_new_session=True,  # the terminal's Ctrl-C is for the parent alone
            )
        except BaseException:
            self._control.close()
            raise
        finally:
            theirs.close()

    def serves(self) -> bool:
        """Whether it runs, takes requests, and has this process's environment."""
        is_open = self._control.fileno() >= 0
        return is_open and self._env == _compared(os.environ) and not self.has_ended()

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def fork(
        self, files: WorkerFiles, env: Mapping[str, str], *, deadline_s: float
    ) -> ForkedProcess:
        """Fork a worker with this environment.

        Raises WorkerError if the server has ended or does not answer until ``deadline_s``, on the
        monotonic clock.
        """
        request = Request(
            env=dict(env), path=_search_path(), directory=_directory(), cores=_cores()
        )
        read_fd, write_fd = os.pipe()
        answers = io.FileIO(read_fd)
        try:
            try:
                self._send(request, write_fd, files)
            finally:
                os.close(write_fd)  # now the end of the server is the end of the pipe
            self._wait_for_answer(answers, deadline_s)
            pid = _number(answers)
            if pid is None:
                raise self._error(self._how_it_ended())
        except BaseException:
            answers.close()
            raise
        return ForkedProcess(pid, answers)

    def _send(self, request: Request, answers_fd: int, files: WorkerFiles) -> None:
        with tempfile.TemporaryFile("w+") as body, _standard_streams() as streams:
            json.dump(asdict(request), body)
            body.seek(0)
            passed = [body.fileno(), answers_fd, *streams, *asdict(files).values()]
            with contextlib.suppress(OSError):  # the pipe tells too that it takes no request
                socket.send_fds(self._control, [b"\0"], passed)

    def _wait_for_answer(self, answers: io.FileIO, deadline_s: float) -> None:
        activity = liveness.Activity(self._process.pid)
        while not _is_readable(answers, min(liveness.SAMPLE_S, deadline_s - time.monotonic())):
            activity.sample("")
            if activity.stopped_s > liveness.SILENT_S:
                raise self._error(f"has been stopped for {liveness.SILENT_S:g} s")
            if time.monotonic() > deadline_s:
                raise self._error(
                    "did not answer in time; it imports torch first: pass a greater "
                    "start_timeout_s to autopar.compile(...)"
                )

    def _how_it_ended(self) -> str:
        self.retire()
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_END_WAIT_S)
            return f"ended with exit code {code}; see what it wrote on standard error"
        return "took no more requests"

    def _error(self, what: str) -> WorkerError:
        """An error after which this server takes no requests."""
        self.retire()
        return WorkerError(
            f"the fork server, from which workers start (process {self._process.pid}), {what}; the "
            "next autopar.compile(...) starts a new one"
        )

    def retire(self) -> None:
        """Let the server end as soon as it has no worker."""
        self._control.close()

    def end(self) -> None:
        """Wait for the end of a server without workers, and kill any other."""
        self.retire()
        try:
            self._process.wait(_END_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Servers:
    """The server of the present environment, and those before it that still have workers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._present: ForkServer | None = None
        self._retired: list[ForkServer] = []
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._end)

    def present(self) -> ForkServer:
        with self._lock:
            if self._present is None or not self._present.serves():
                self._retired = [server for server in self._retired if not server.has_ended()]
                if self._present is not None:
                    self._present.retire()
                    self._retired.append(self._present)
                self._present = ForkServer()
            return self._present

    def _forget(self) -> None:
        """In a process that the user's script forks: its parent's servers are not its own."""
        self._lock = threading.Lock()
        if self._present is not None:
            self._present.retire()  # closes a copy of the connection
        self._present, self._retired = None, []

    def _end(self) -> None:
        for server in [*self._retired, *filter(None, [self._present])]:
            server.end()


_servers = _Servers()
present_server = _servers.present


def begin() -> None:
    """Start the server if there is none, without waiting until it has imported torch."""
    present_server()


def _is_readable(file: io.FileIO, timeout_s: float) -> bool:
    poller = select.poll()
    poller.register(file, select.POLLIN)
    return bool(poller.poll(1000 * max(timeout_s, 0.0)))


def _number(answers: io.FileIO) -> int | None:
    """The next number that the server has written; None if it has ended instead."""
    found = answers.read(NUMBER_BYTES)
    return int.from_bytes(found, signed=True) if found else None


def _compared(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that a library may read as it is loaded."""
    return {
        name: value
        for name, value in env.items()
        if not name.startswith("AUTOPAR_") and name not in _READ_WHEN_NEEDED
    }


def _search_path() -> list[str]:
    return [os.path.abspath(entry) if entry == "" else entry for entry in sys.path]


def _directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None


def _cores() -> list[int] | None:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


@contextlib.contextmanager
def _standard_streams() -> Iterator[list[int]]:
    """This process's standard output and error; a closed one is replaced by the null device."""
    with open(os.devnull, "w") as null:
        yield [fd if _is_open(fd) else null.fileno() for fd in (1, 2)]


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
