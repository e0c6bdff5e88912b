"""A watch over the processes of a job: a fault of one ends all, with an error that names it.

In: the process group, and each call that communicates. Out: a `WorkerError` in every other process
when one dies, hangs or raises in the middle of a call. It exists because without a parent of ours
nobody else does this: a collective of gloo fails where the dead rank was its neighbour and waits
where it was not, no collective says who is at fault, and ``torchrun`` ends the other processes
before they can speak.
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
from types import TracebackType
from typing import Any

import torch.distributed as dist

from autopar.base.errors import AutoparError
from autopar.comm.transports import handshake
from autopar.runtime.faults import whereabouts
from autopar.runtime.faults.here import Call, Here
from autopar.runtime.faults.judge import CallNumber, Diagnosis, raised_by_peers
from autopar.runtime.faults.lines import Lines, listen
from autopar.runtime.faults.neighbours import Neighbours, Place, new_place
from autopar.runtime.faults.step_limit import StepLimit
from autopar.runtime.faults.watchers import Hub, Member, Watcher

_CONNECT_S = 20.0
_DIAGNOSIS_S = 6.0  # how long a rank that failed, or is told to end, waits to hear why
_REFUSAL_S = 1.5  # how long one that failed before any action does
_EXIT_S = 10.0  # how long the exit of a process may take after a fault


class Watch:
    """Over the present default process group. Making it is collective."""

    def __init__(self) -> None:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self.world = dist.group.WORLD
        self._watcher: Watcher | None = None
        place = new_place()
        try:
            places = _of_all(place)
            self.here = Here(rank, Neighbours(places, rank))
            lines, reason = _connected(places, rank)
            reasons = [text for text in _of_all(reason) if text]
        finally:
            os.unlink(place.page_path)
        names = [place.name for place in places]
        if reasons:
            for line in lines.values():
                line.close()
            _warn_of(reasons[0], rank)
        elif num_ranks > 1:
            kind = Hub if rank == 0 else Member
            self._watcher = kind(self.here, lines, names)
            os.register_at_fork(after_in_child=self._in_child)
            self._watcher.start()
        self._was_raised = False
        self._hook = sys.excepthook
        if self._watcher is not None:
            sys.excepthook = self._on_uncaught
        self._has_handler = self._watcher is not None and self._handle_termination()
        atexit.register(self._at_exit)

    @property
    def has_fault(self) -> bool:
        """Whether there was a fault, after which nothing can be communicated."""
        return self.here.diagnosis is not None

    @contextlib.contextmanager
    def call(self, name: str, limit: StepLimit | None = None) -> Iterator[None]:
        """Raise the fault of another rank from within; ``limit`` for a call that may hang."""
        here = self.here
        if here.call is not None and here.call.thread == threading.get_ident():
            yield  # a part of a call
            return
        here.begun[name] = here.begun.get(name, 0) + 1
        number = CallNumber(name=name, number=here.begun[name])
        whereabouts.say(whereabouts.padded(f"{whereabouts.START}{number}"))
        here.call = Call(
            number=number,
            thread=threading.get_ident(),
            since_s=time.monotonic(),
            limit=limit,
        )
        try:
            if here.diagnosis is not None:
                raise self._raised(here.diagnosis)
            yield
            if limit is not None:
                limit.note(time.monotonic() - here.call.since_s)
        except BaseException as error:
            self._judge(error)
            raise
        finally:
            here.call = None
            whereabouts.say(whereabouts.padded(f"{whereabouts.AFTER}{number}"))

    def stop(self) -> None:
        """Leave the others; not collective."""
        if self._watcher is not None and self.here.diagnosis is None:
            self._watcher.stop()
        self.here.neighbours.close()
        self._let_go()

    def _judge(self, error: BaseException) -> None:
        """Raise the fault of another rank if it is behind ``error``; note one of this rank."""
        here, doing = self.here, whereabouts.current()
        if self._watcher is None or self._was_raised:
            return
        by_peers = isinstance(error, RuntimeError) and raised_by_peers(error.__traceback__)
        summary = traceback.format_exception_only(error)[0].strip()  # without its notes
        assert here.call is not None
        has_begun = doing and not doing.startswith(whereabouts.START)
        if not by_peers and not has_begun:  # the job may go on, if that is all
            here.last_error, here.failed_call = summary, str(here.call.number)
            diagnosis = None
            if not isinstance(error, AutoparError):
                diagnosis = here.diagnosis_within(_REFUSAL_S)
            if diagnosis is not None:
                raise self._raised(diagnosis) from error
            return
        call = str(here.call.number)
        told = {"text": summary, "by_peers": by_peers, "doing": doing, "call": call}
        self._watcher.post({"kind": "error", "error": told, "status": here.status()})
        here.error = told
        diagnosis = here.diagnosis_within(_DIAGNOSIS_S)
        if diagnosis is not None and diagnosis.rank != here.rank and by_peers:
            raise self._raised(diagnosis) from error
        error.add_note(f"on rank {here.rank} in {doing} of {call}: all ranks stop")

    def _raised(self, diagnosis: Diagnosis) -> BaseException:
        """The diagnosis's error; from now on the process must end, whatever is left to wait for."""
        self._was_raised = True
        return diagnosis.error()

    def _handle_termination(self) -> bool:
        """Let SIGTERM, with which ``torchrun`` follows up a fault, raise it first."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            return False
        signal.signal(signal.SIGTERM, self._on_termination)
        return True

    def _on_termination(self, _number: int, _frame: Any) -> None:
        assert self._watcher is not None
        self.here.told_to_end = True
        self._watcher.post({"kind": "status", **self.here.status()})
        diagnosis = self.here.diagnosis_within(_DIAGNOSIS_S)
        if self._was_raised:  # on its way out: let it speak, but not for ever
            faulthandler.dump_traceback_later(_EXIT_S, exit=True)
            return
        if diagnosis is not None and diagnosis.rank != self.here.rank:
            raise self._raised(diagnosis)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _on_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Tell the others at once why this process ends; the interpreter may take its time."""
        diagnosis = self.here.diagnosis
        if diagnosis is None and self.here.error is None:
            assert self._watcher is not None
            text = traceback.format_exception_only(error)[0].strip()
            status = {**self.here.status(), "last_error": text, "fatal": True}
            self._watcher.post({"kind": "dying", **status})
        elif diagnosis is not None and diagnosis.rank != self.here.rank and not self._was_raised:
            error.add_note(f"before it, {diagnosis.text}")
        self._hook(kind, error, trace)

    def _let_go(self) -> None:
        """Take back what was asked of the interpreter."""
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._hook
        if self._has_handler and signal.getsignal(signal.SIGTERM) == self._on_termination:
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _in_child(self) -> None:
        """A process that the user's script forks is no rank, and holds no connection open."""
        if self._watcher is not None:
            self._watcher.forget_connections()
        self._let_go()

    def _at_exit(self) -> None:
        if self.has_fault:
            # The process group's threads may wait for others that never come.
            faulthandler.dump_traceback_later(_EXIT_S, exit=True)
        else:
            self.stop()


def _of_all(own: Any) -> list[Any]:
    """What every rank has, by rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


def _connected(places: Sequence[Place], rank: int) -> tuple[dict[int, Lines], str]:
    """Connections between rank 0 and all others; on rank 0 to each, else to rank 0. Or why not."""
    on_one_host = len({place.host for place in places}) == 1
    if rank == 0:
        with contextlib.closing(listen(everywhere=not on_one_host)) as listener:
            key = handshake.new_key()
            dist.broadcast_object_list([listener.getsockname()[1], key], src=0)
            made = handshake.accept(listener, key, range(1, len(places)), _CONNECT_S)
            lines = {other: Lines(connected) for other, connected in made.items()}
        absent = [other for other in range(1, len(places)) if other not in lines]
        return lines, f"ranks {absent} did not reach rank 0" if absent else ""
    offer: list[Any] = [None, None]
    dist.broadcast_object_list(offer, src=0)
    port, key = offer
    # torchrun's master is where rank 0 is; without it, gloo also goes by the host's name.
    host = "127.0.0.1" if on_one_host else os.environ.get("MASTER_ADDR", places[0].host[0])
    try:
        made_here = handshake.connect(
            lambda limit_s: socket.create_connection((host, port), limit_s), key, rank, _CONNECT_S
        )
        return {0: Lines(made_here)}, ""
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
