"""A watch over the processes of a job: a fault of one stops all, with an error that names it.

In: the process group, and each call that communicates. Out: a `WorkerError` in every other process
when one dies, hangs or raises in the middle of a call. It exists because nothing else does this
under ``torchrun``: a collective of gloo fails if the dead rank was its neighbour and otherwise
waits, no collective says which rank is at fault, and ``torchrun`` kills the other processes before
they can report anything.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from autopar.base.errors import AutoparError, WorkerError
from autopar.comm.transports import handshake
from autopar.runtime.faults import progress
from autopar.runtime.faults.host_peers import Location
from autopar.runtime.faults.json_lines import JsonLines, listen
from autopar.runtime.faults.judge import CallNumber, Diagnosis, raised_by_peers
from autopar.runtime.faults.own_rank import Call, OwnRank
from autopar.runtime.faults.rendezvous import EXIT_S, Rendezvous
from autopar.runtime.faults.step_limit import StepLimit
from autopar.runtime.faults.termination import end_by_sigterm, handle_termination
from autopar.runtime.faults.watchers import Hub, Member, Watcher

_CONNECT_S = 20.0
_DIAGNOSIS_S = 6.0  # how long a rank that failed, or is told to end, waits for the diagnosis
_REFUSAL_S = 1.5  # the same for one that failed before any action


class Interrupt(BaseException):
    """Leaves a call for the sake of ``error``, which the call raises.

    Not an Exception, or what the call tries and catches would take the error for its own.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class Watch:
    """The watch over the present default process group. Making it is collective."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        rank, num_ranks = rendezvous.rank, rendezvous.num_ranks
        self.world = dist.group.WORLD
        self._watcher: Watcher | None = None
        locations = rendezvous.locations
        self.own_rank = OwnRank(rank, rendezvous.peers)
        lines, reason = rendezvous.supervised(lambda: _connected(locations, rank))
        reasons = [text for text in rendezvous.supervised(lambda: _of_all(reason)) if text]
        names = [location.name for location in locations]
        if reasons:
            for line in lines.values():
                line.close()
            _warn_of(reasons[0], rank)
        elif num_ranks > 1:
            kind = Hub if rank == 0 else Member
            self._watcher = kind(self.own_rank, lines, names)
            os.register_at_fork(after_in_child=self._in_child)
            self._watcher.start()
        self._was_raised = False
        self._interrupt: Interrupt | None = None
        self._hook = sys.excepthook
        if self._watcher is not None:
            sys.excepthook = self._on_uncaught
        self._has_handler = self._watcher is not None and handle_termination(self._on_termination)
        atexit.register(self._at_exit)

    @property
    def has_fault(self) -> bool:
        """Whether there was a fault, after which nothing can be communicated."""
        return self.own_rank.diagnosis is not None

    @contextlib.contextmanager
    def call(self, name: str, limit: StepLimit | None = None) -> Iterator[None]:
        """Run a call in which a fault of another rank is raised; ``limit`` if it may hang."""
        own = self.own_rank
        if own.call is not None and own.call.thread == threading.get_ident():
            yield  # inside another call
            return
        own.begun[name] = own.begun.get(name, 0) + 1
        number = CallNumber(name=name, number=own.begun[name])
        progress.report(progress.encoded(f"{progress.START}{number}"))
        own.call = Call(
            number=number,
            thread=threading.get_ident(),
            since_s=time.monotonic(),
            limit=limit,
        )
        try:
            try:
                if own.diagnosis is not None:
                    raise self._raised(own.diagnosis)
                yield
                if limit is not None:
                    limit.note(time.monotonic() - own.call.since_s)
            except Interrupt:
                raise
            except BaseException as error:
                if self._interrupt is None:
                    self._judge(error)
                    raise
            if self._interrupt is not None:  # code that it left made another error of it, or none
                raise self._interrupt
        except Interrupt as interrupt:  # also of the judgement
            raise interrupt.error from None
        finally:
            own.call = None
            progress.report(progress.encoded(f"{progress.AFTER}{number}"))

    def stop(self) -> None:
        """Leave the watch; not collective."""
        if self._watcher is not None and self.own_rank.diagnosis is None:
            self._watcher.stop()
        self.own_rank.peers.close()
        self._restore_interpreter()

    def _judge(self, error: BaseException) -> None:
        """Raise another rank's fault if it caused ``error``; report an error of this rank."""
        own, doing = self.own_rank, progress.current()
        if self._watcher is None or self._was_raised:
            return
        by_peers = isinstance(error, RuntimeError) and raised_by_peers(error.__traceback__)
        summary = traceback.format_exception_only(error)[0].strip()  # without its notes
        assert own.call is not None
        has_begun = doing and not doing.startswith(progress.START)
        if not by_peers and not has_begun:  # the job may go on, if that is all
            own.last_error, own.failed_call = summary, str(own.call.number)
            diagnosis = None
            if not isinstance(error, AutoparError):
                diagnosis = own.diagnosis_within(_REFUSAL_S)
            if diagnosis is not None:
                raise self._raised(diagnosis) from error
            return
        call = str(own.call.number)
        told = {"text": summary, "by_peers": by_peers, "doing": doing, "call": call}
        self._watcher.post({"kind": "error", "error": told, "status": own.status()})
        own.error = told
        diagnosis = own.diagnosis_within(_DIAGNOSIS_S)
        if diagnosis is not None and diagnosis.rank != own.rank and by_peers:
            raise self._raised(diagnosis) from error
        if diagnosis is None and by_peers:
            self._was_raised = True
            raise WorkerError(
                f"rank {own.rank} was cut off in {doing} of {call} ({summary}), and no rank was "
                "found to be at fault in time: the output of the others says more. This job cannot "
                "go on: start it again, and compiled.load(path) the last checkpoint"
            ) from error
        error.add_note(f"on rank {own.rank} in {doing} of {call}: all ranks stop")

    def _raised(self, diagnosis: Diagnosis) -> BaseException:
        """The diagnosis's error; from now on the process must end, whatever it still waits for."""
        self._was_raised = True
        return diagnosis.error()

    def _on_termination(self, _number: int, _frame: FrameType | None) -> None:
        """Raise a fault before SIGTERM ends the process."""
        assert self._watcher is not None
        self.own_rank.told_to_end = True
        self._watcher.post({"kind": "status", **self.own_rank.status()})
        diagnosis = self.own_rank.diagnosis_within(_DIAGNOSIS_S)
        if self._was_raised:  # it is exiting: let it print its error, but not for ever
            faulthandler.dump_traceback_later(EXIT_S, exit=True)
            return
        if diagnosis is not None and diagnosis.rank != self.own_rank.rank:
            error, call = self._raised(diagnosis), self.own_rank.call
            if call is not None and call.thread == threading.get_ident():
                error = self._interrupt = Interrupt(error)
            raise error
        end_by_sigterm()

    def _on_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Tell the others at once why this process ends: the interpreter may take long to exit."""
        own = self.own_rank
        diagnosis = own.diagnosis
        if diagnosis is None and own.error is None:
            assert self._watcher is not None
            text = traceback.format_exception_only(error)[0].strip()
            status = {**own.status(), "last_error": text, "fatal": True}
            self._watcher.post({"kind": "dying", **status})
        elif (
            diagnosis is not None and diagnosis.rank != self.own_rank.rank and not self._was_raised
        ):
            error.add_note(f"before it, {diagnosis.text}")
        self._hook(kind, error, trace)

    def _restore_interpreter(self) -> None:
        """Remove the hooks and handlers that were installed."""
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._hook
        if self._has_handler and signal.getsignal(signal.SIGTERM) == self._on_termination:
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _in_child(self) -> None:
        """In a process that the user's script forks, which is no rank: close all connections."""
        if self._watcher is not None:
            self._watcher.forget_connections()
        self._restore_interpreter()

    def _at_exit(self) -> None:
        if self.has_fault:
            # The process group's threads may wait for others that never come.
            faulthandler.dump_traceback_later(EXIT_S, exit=True)
        else:
            self.stop()


def _of_all(own: Any) -> list[Any]:
    """Every rank's ``own``, by rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


def _connected(locations: Sequence[Location], rank: int) -> tuple[dict[int, JsonLines], str]:
    """Connect rank 0 with all others: the connections by rank, and the reason of a failure."""
    on_one_host = len({location.host for location in locations}) == 1
    if rank == 0:
        with contextlib.closing(listen(everywhere=not on_one_host)) as listener:
            key = handshake.new_key()
            dist.broadcast_object_list([listener.getsockname()[1], key], src=0)
            made = handshake.accept(listener, key, range(1, len(locations)), _CONNECT_S)
            lines = {other: JsonLines(connected) for other, connected in made.items()}
        absent = [other for other in range(1, len(locations)) if other not in lines]
        return lines, f"ranks {absent} did not reach rank 0" if absent else ""
    offer: list[Any] = [None, None]
    dist.broadcast_object_list(offer, src=0)
    port, key = offer
    # torchrun's master address is rank 0's host; without it use the host name, as gloo does.
    host = "127.0.0.1" if on_one_host else os.environ.get("MASTER_ADDR", locations[0].host[0])
    try:
        made_here = handshake.connect(
            lambda limit_s: socket.create_connection((host, port), limit_s), key, rank, _CONNECT_S
        )
        return {0: JsonLines(made_here)}, ""
    except OSError as error:
        return {}, f"rank {rank} did not reach rank 0 at {host}:{port}: {error}"


def _warn_of(reason: str, rank: int) -> None:
    if rank == 0:
        warnings.warn(
            f"no watch over the processes of this job: {reason}. A rank that dies or hangs will "
            "be noticed only by the time limits of the process group; let the hosts reach each "
            "other on all ports",
            RuntimeWarning,
            stacklevel=5,
        )
