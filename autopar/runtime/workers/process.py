"""One local worker process as its parent sees it: start it, see how it fares, end it.

In: a rank and the environment to start it in. Out: a process with a ``Channel`` to it, its Python
stack on demand, and words for how it ended.

The worker is a fresh ``python -c`` and not a child of ``multiprocessing``: that would import the
user's ``__main__`` again, which a notebook and ``python -`` do not have, and which runs a script
without an ``if __name__ == "__main__"`` guard a second time.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO

from autopar.runtime.faults import progress
from autopar.runtime.workers.messages import Channel

# Before anything is imported: the stack can be asked for from the first moment, and modules come
# from where the parent finds them (-P keeps the working directory from coming first).
_BOOT = """
import faulthandler, json, signal, sys
socket_fd, stack_fd, page_fd, parent_pid, path = json.loads(sys.argv[1])
faulthandler.enable(stack_fd, False)
faulthandler.register(signal.SIGUSR1, stack_fd, False)
sys.path[:] = path
from autopar.runtime.workers.main import main
main(socket_fd, page_fd, parent_pid)
"""
_STACK_WAIT_S = 1.0
_KILL_WAIT_S = 10.0
_MAX_STACK_BYTES = 1 << 20
_OWN_FILES = "/proc/self/fd"


class WorkerProcess:
    """A worker and the parent's ends of what leads to it; it inherits the group's store."""

    def __init__(self, rank: int, store_fd: int, *, env: Mapping[str, str]) -> None:
        self.rank = rank
        # Where faulthandler writes: the stack on SIGUSR1, or when the interpreter crashes.
        self._stack_file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by kill()
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self._page = progress.new_page()
        stack_fd, page_fd = self._stack_file.fileno(), self._page.fileno()
        path = [os.path.abspath(entry) if entry == "" else entry for entry in sys.path]
        boot_args = json.dumps([theirs.fileno(), stack_fd, page_fd, os.getpid(), path])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, boot_args],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), stack_fd, page_fd, store_fd),
                env=env,
                start_new_session=True,  # the terminal's Ctrl-C is for the parent alone
            )
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def how_it_ended(self, *, timeout_s: float) -> str:
        """In words, such as ``was killed by SIGKILL``."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return "broke off a message"
        if code >= 0:
            return f"exited with code {code}"
        name = signal.Signals(-code).name
        hint = " (by a user, or by the kernel when memory ran out)" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"

    def written_stack(self) -> str:
        """What faulthandler wrote, asked to or in a crash; empty if nothing."""
        return os.pread(self._stack_file.fileno(), _MAX_STACK_BYTES, 0).decode(errors="replace")

    def doing(self) -> str:
        """`` in action 2B5``: what it was doing in a training step; empty outside of one."""
        text = progress.read(self._page.fileno())
        return f" in {text}" if text not in ("", progress.IN_CALL) else ""

    def has_begun(self) -> bool:
        """Whether it has taken up a call that it has not answered."""
        return bool(progress.read(self._page.fileno()))

    def ask_for_stack(self) -> None:
        """Make the worker write down its main thread's Python stack, even one stuck in C code."""
        if not self.has_ended():
            stack_fd = self._stack_file.fileno()
            os.ftruncate(stack_fd, 0)
            os.lseek(stack_fd, 0, os.SEEK_SET)  # the worker's own place in the file too
            self._process.send_signal(signal.SIGUSR1)

    def wait(self, *, timeout_s: float) -> int | None:
        """The exit code, or None if it has not ended in time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(timeout_s, 0.0))
        return self._process.poll()

    def kill(self) -> None:
        """Send SIGKILL to the worker and to what it started; ``wait`` and ``close`` follow."""
        if not self.has_ended():
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let go of the connection and the files."""
        self.channel.close()
        self._stack_file.close()
        self._page.close()


def open_store_file() -> IO[bytes]:
    """The file by which the workers of one group find each other, where a port would be open to
    every process of the machine. On Linux it has no name: only who inherits it can read it."""
    if os.path.exists(_OWN_FILES):
        return tempfile.TemporaryFile()
    return tempfile.NamedTemporaryFile(prefix="autopar-")  # the owner's alone


def path_of_store(file: IO[bytes]) -> str:
    """By which a process that has inherited the file opens it again."""
    return f"{_OWN_FILES}/{file.fileno()}" if os.path.exists(_OWN_FILES) else str(file.name)


def python_stacks(workers: Sequence[WorkerProcess]) -> dict[int, str]:
    """The Python stack of each worker's main thread by rank; empty for one that cannot react."""
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
    """Kill all, then see them gone; nothing in a process that was forked from the owner."""
    if os.getpid() != owner_pid:
        return
    for worker in workers:
        worker.kill()
    deadline_s = time.monotonic() + _KILL_WAIT_S
    for worker in workers:
        worker.wait(timeout_s=deadline_s - time.monotonic())
        worker.close()
    workers.clear()
