"""The main program of a local worker: join the process group, build the service, answer calls.

In: a connected socket from the process that drives the workers (the fork server starts this
program). Out: one ``Reply`` for ``Start`` and for each ``Call``. It is separate from the other side
so that a worker never imports the user's ``__main__``.

A worker never outlives the process that drives it. While it waits, the socket's end of file means
that this one has died. A call may take long, and a process that the driving one forked (a data
loader's) may hold the other end of the socket open; so a thread watches the fork server too, which
ends with the process that started it. ``PR_SET_PDEATHSIG`` is not used: it fires when the *thread*
that started a process ends.

A worker that fails reports it and then stays alive with its connections open until its parent ends
it: the other workers go on waiting in their collectives and do not add errors of their own.
"""

import dataclasses
import datetime
import io
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from autopar.base.accelerators import is_accelerator, module_of
from autopar.comm.transports.ports import sealed
from autopar.runtime.faults import progress
from autopar.runtime.faults.judge import raised_by_peers
from autopar.runtime.host.heap import keep_freed_memory
from autopar.runtime.workers.fork_server import WorkerFiles
from autopar.runtime.workers.messages import Channel, Message, packed, unpack, unpack_watched

# The parent limits every call. A shorter limit of collectives would expire in a rank that only
# waits, and put the blame on it.
_COLLECTIVE_TIMEOUT = datetime.timedelta(days=1)
_SERVER_POLL_S = 1.0
_IN_CALL = progress.encoded(progress.IN_CALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first message to a worker: its place in the process group, and its device."""

    rank: int
    world_size: int
    store_path: str | None  # None: that of `WorkerFiles`
    backend: str
    device_type: str
    device_index: int  # meaningless on CPU
    num_threads: int
    cores: tuple[int, ...] | None  # None: any
    start_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """The second message, the same to all workers; answered when the service is built."""

    service: Callable[..., Any]
    service_args: tuple[Any, ...]


class Call(NamedTuple):
    """Call a method of the service; ``by_rank``: a message with further arguments follows.

    What every step sends is named tuples, which are quicker to pickle than dataclasses.
    """

    method: str
    args: tuple[Any, ...]
    by_rank: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Leave the process group and exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The error of a worker; ``time_s`` is on the machine's monotonic clock.

    ``by_peers``: a wait for other workers raised it, probably because one of them is gone.
    """

    time_s: float
    summary: str
    traceback: str
    by_peers: bool


class Reply(NamedTuple):
    """The result of one message, or its failure."""

    value: Any = None
    failure: Failure | None = None


def main(files: WorkerFiles, server_pid: int) -> None:
    """Serve the process at the other end of the socket until it sends `Stop` or is gone."""
    keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    sys.argv = ["autopar-worker"]
    progress.publish_to(files.page)
    progress.report(_IN_CALL)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Write whole lines, so that two workers' do not mix, also with PYTHONUNBUFFERED.
            stream.reconfigure(line_buffering=True, write_through=False)
    channel = Channel(socket.socket(fileno=files.channel))
    threading.Thread(target=_watch, args=(server_pid,), daemon=True).start()
    try:
        _serve(channel, files)
    except BaseException as error:
        _report(channel, error)
        threading.Event().wait()


def _serve(channel: Channel, files: WorkerFiles) -> None:
    start: Start = unpack(_next(channel))
    _join_group(start, start.store_path or files.store_path)
    build: Build = unpack(_next(channel))
    service = build.service(start.rank, start.world_size, *build.service_args)
    del build
    progress.report(progress.NOTHING)
    _reply(channel, Reply())
    while True:
        request, common = unpack_watched(_taken_up(channel))
        if isinstance(request, Stop):
            break
        rank_args, own = unpack_watched(_next(channel)) if request.by_rank else ((), lambda: None)
        value = getattr(service, request.method)(*request.args, *rank_args)
        progress.report(_IN_CALL)
        with packed(Reply(value=value)) as reply:
            del request, rank_args, value  # do not keep a batch while waiting for the next
            released = common() is own() is None
            progress.report(progress.NOTHING)  # before the parent can send anything else
            channel.send(dataclasses.replace(reply, released=released), deadline_s=math.inf)
    _leave()


def _leave() -> NoReturn:
    """Exit without finalizing the interpreter, which sometimes aborts while gloo's threads still
    refer to the tensors of an interrupted step."""
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _taken_up(channel: Channel) -> Message:
    message = _next(channel)
    progress.report(_IN_CALL)
    return message


def _next(channel: Channel) -> Message:
    try:
        return channel.receive(deadline_s=math.inf)
    except ConnectionError:
        _die()


def _join_group(start: Start, store_path: str) -> None:
    if start.cores is not None:
        os.sched_setaffinity(0, start.cores)  # also for the threads started from here on
    torch.set_num_threads(start.num_threads)
    torch.set_flush_denormal(True)  # also for the threads that torch starts from here on
    device_id = None
    if is_accelerator(start.device_type):
        module_of(start.device_type).set_device(start.device_index)
        if start.backend != "gloo":
            device_id = torch.device(start.device_type, start.device_index)
    store = dist.FileStore(store_path, start.world_size)
    store.set_timeout(datetime.timedelta(seconds=start.start_timeout_s))
    with sealed(start.backend):
        dist.init_process_group(
            start.backend,
            store=store,
            rank=start.rank,
            world_size=start.world_size,
            timeout=_COLLECTIVE_TIMEOUT,
            device_id=device_id,
        )


def _reply(channel: Channel, reply: Reply) -> None:
    with packed(reply) as message:
        channel.send(message, deadline_s=math.inf)


def _report(channel: Channel, error: BaseException) -> None:
    time_s = time.monotonic()
    summary = "".join(traceback.format_exception_only(error)).strip()
    text = "".join(traceback.format_exception(error))
    by_peers = isinstance(error, RuntimeError) and raised_by_peers(error.__traceback__)
    failure = Failure(time_s=time_s, summary=summary, traceback=text, by_peers=by_peers)
    _reply(channel, Reply(failure=failure))


def _watch(server_pid: int) -> None:
    while os.getppid() == server_pid:
        time.sleep(_SERVER_POLL_S)
    _die()


def _die() -> NoReturn:
    """Kill this worker and its children; a worker leads an operating-system process group."""
    os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)  # not reached: the signal reaches this process too
