"""The parent's side of one local worker process: starting, observing and ending it.

In: a rank and the environment to start it in. Out: a process with a ``Channel`` to it, its Python
stack on demand, and a description of how it ended. The process is a fork of a warm one
(`autopar.runtime.workers.fork_server`).
"""

import os
import signal
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO

from autopar.runtime.faults import progress
from autopar.runtime.workers.fork_server import OWN_FILES, WorkerFiles, present_server
from autopar.runtime.workers.messages import Channel

_STACK_WAIT_S = 1.0
_KILL_WAIT_S = 10.0
_MAX_STACK_BYTES = 1 << 20


class WorkerProcess:
    """A worker, and the parent's ends of its connections; it is given the group's store."""

    def __init__(
        self, rank: int, store_fd: int, *, env: Mapping[str, str], deadline_s: float
    ) -> None:
        self.rank = rank
        # Where faulthandler writes: the stack on SIGUSR1, or when the interpreter crashes.
        self._stack_file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self._page = progress.new_page()
        files = WorkerFiles(
            channel=theirs.fileno(),
            stack=self._stack_file.fileno(),
            page=self._page.fileno(),
            store=store_fd,
        )
        try:
            self._process = present_server().fork(files, env, deadline_s=deadline_s)
        except BaseException:
            self._close_files()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_ended(self) -> bool:
        return self._process.wait(0.0) is not None

    def how_it_ended(self, *, timeout_s: float) -> str:
        """A description such as ``was killed by SIGKILL``."""
        code = self._process.wait(timeout_s)
        if code is None:
            return "broke off a message"
        if code >= 0:
            return f"exited with code {code}"
        if self._process.outlived_server:
            return "ended with the fork server that it came from"
        name = signal.Signals(-code).name
        hint = " (by a user, or by the kernel when memory ran out)" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"

    def written_stack(self) -> str:
        """The stack that faulthandler wrote, on demand or in a crash; empty if none."""
        return os.pread(self._stack_file.fileno(), _MAX_STACK_BYTES, 0).decode(errors="replace")

    def doing(self) -> str:
        """Its action in a training step, as `` in action 2B5``; empty outside of one."""
        text = progress.read(self._page.fileno())
        return f" in {text}" if text not in ("", progress.IN_CALL) else ""

    def has_begun(self) -> bool:
        """Whether it has received a call that it has not answered."""
        return bool(progress.read(self._page.fileno()))

    def ask_for_stack(self) -> None:
        """Make the worker write its main thread's Python stack, even if it is stuck in C code."""
        if not self.has_ended():
            stack_fd = self._stack_file.fileno()
            os.ftruncate(stack_fd, 0)
            os.lseek(stack_fd, 0, os.SEEK_SET)  # also the worker's own position in the file
            self._process.signal(signal.SIGUSR1)

    def wait(self, *, timeout_s: float) -> int | None:
        """The exit code, or None if it has not ended in time."""
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        """Send SIGKILL to the worker and to what it started; ``wait`` and ``close`` follow."""
        if not self.has_ended():
            self._process.kill_group()

    def close(self) -> None:
        """Close the connection and the files."""
        self._process.close()
        self._close_files()

    def _close_files(self) -> None:
        self.channel.close()
        self._stack_file.close()
        self._page.close()


def open_store_file() -> IO[bytes]:
    """Open the file through which the workers of a group find each other. A port would be open to
    every process of the machine; on Linux the file has no name, and only workers are given it."""
    if os.path.exists(OWN_FILES):
        return tempfile.TemporaryFile()
    return tempfile.NamedTemporaryFile(prefix="autopar-")  # readable by its owner alone


def path_of_store(file: IO[bytes]) -> str | None:
    """The path by which a worker opens the file again; None where it has no name."""
    return None if os.path.exists(OWN_FILES) else str(file.name)


def python_stacks(workers: Sequence[WorkerProcess]) -> dict[int, str]:
    """The Python stack of each worker's main thread by rank; empty if it does not react."""
    for worker in workers:
        worker.ask_for_stack()
    stacks: dict[int, str] = {}
    deadline_s = time.monotonic() + _STACK_WAIT_S
    while time.monotonic() < deadline_s:
        time.sleep(0.05)
        before, stacks = stacks, {worker.rank: worker.written_stack() for worker in workers}
        if all(stacks.values()) and stacks == before:
            break
    return stacks


def end_processes(workers: list[WorkerProcess], owner_pid: int) -> None:
    """Kill all workers and wait for their end; does nothing in a forked copy of the owner."""
    if os.getpid() != owner_pid:
        return
    for worker in workers:
        worker.kill()
    deadline_s = time.monotonic() + _KILL_WAIT_S
    for worker in workers:
        worker.wait(timeout_s=deadline_s - time.monotonic())
        worker.close()
    workers.clear()
