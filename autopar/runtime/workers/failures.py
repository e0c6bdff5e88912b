"""The faults of local workers, as conditions for the judge and as errors for the user.

In: for each worker that failed, its exception or its death; or the workers that did not answer.
Out: the ``WorkerError`` to raise, with the rank that `autopar.runtime.faults.judge` finds at fault,
and its traceback.
"""

import re
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from autopar.base.errors import WorkerError
from autopar.runtime.faults.judge import Condition, State, culprit_of, waits_for_peers
from autopar.runtime.faults.liveness import is_stopped
from autopar.runtime.workers.main import Failure
from autopar.runtime.workers.process import WorkerProcess, python_stacks

_EXIT_WAIT_S = 2.0
_GO_ON = (
    "all workers are ended, and with them this session: go on with a new autopar.compile(...), and "
    "compiled.load(path) the last checkpoint"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """The failure of one worker. ``time_s`` is on the machine's monotonic clock.

    ``doing`` is the action of a training step it was in, as `WorkerProcess.doing` has it;
    ``by_peers`` as in `Failure`.
    """

    rank: int
    time_s: float
    died: bool
    summary: str
    traceback: str
    doing: str = ""
    by_peers: bool = False

    def condition(self, what: str) -> Condition:
        state = State.CUT_OFF if self.by_peers else State.FAILED
        state = State.ENDED if self.died else state
        return Condition(rank=self.rank, state=state, doing=what, time_s=self.time_s)

    @classmethod
    def of_failure(cls, worker: WorkerProcess, failure: Failure) -> Self:
        return cls(
            rank=worker.rank,
            time_s=failure.time_s,
            died=False,
            summary=f"raised {failure.summary}",
            doing=worker.doing(),
            traceback=failure.traceback,
            by_peers=failure.by_peers,
        )

    @classmethod
    def of_death(cls, worker: WorkerProcess) -> Self:
        how = worker.how_it_ended(timeout_s=_EXIT_WAIT_S)
        return cls(
            rank=worker.rank,
            time_s=time.monotonic(),
            died=True,
            summary=f"(process {worker.pid}) {how}",
            doing=worker.doing(),
            traceback=worker.written_stack(),
        )

    @classmethod
    def of_unreadable_result(cls, rank: int, error: Exception) -> Self:
        return cls(
            rank=rank,
            time_s=time.monotonic(),
            died=False,
            summary=f"returned a result that cannot be rebuilt here: {error!r}",
            traceback="".join(traceback.format_exception(error)),
        )


def _condition_of_late(
    worker: WorkerProcess, what: str, stack: str, *, is_stopped: bool, is_idle: bool
) -> Condition:
    state = State.WAITING if _waits_for_peers_by(stack) else State.BUSY
    if is_stopped or not stack:
        state = State.STOPPED if is_stopped else State.SILENT
    return Condition(rank=worker.rank, state=state, doing=what, late=not is_idle, idle=is_idle)


def root_cause(troubles: list[Trouble], what: str, world_size: int) -> WorkerError:
    """The error of the worker that failed first.

    A worker that raises stays connected, so its peers go on waiting; only a death breaks their
    collectives.
    """
    culprit = culprit_of([trouble.condition(what) for trouble in troubles])
    assert culprit is not None
    first = next(trouble for trouble in troubles if trouble.rank == culprit.rank)
    others = sorted((t for t in troubles if t is not first), key=lambda t: (not t.died, t.time_s))
    lines = [f"worker {first.rank} of {world_size} {first.summary} (during {what}{first.doing})"]
    lines += [
        f"after it, worker {other.rank} {_first_line(other.summary)}{other.doing}"
        for other in others
    ]
    lines.append(_GO_ON)
    if first.traceback:
        lines += [f"traceback of worker {first.rank}:", first.traceback.rstrip()]
    return WorkerError("\n".join(lines), rank=first.rank, traceback=first.traceback)


def hang_error(
    late: Sequence[WorkerProcess], what: str, world_size: int, *, idle_s: float | None = None
) -> WorkerError | None:
    """The error for workers that did not answer, naming the one the others wait for.

    With ``idle_s`` they have used no processor time for so long; then the result is None if all of
    them wait for each other, as a slow link may be carrying a message. Without it they have taken
    too long.
    """
    stacks = python_stacks(late)
    by_rank = {worker.rank: worker for worker in late}
    doing = {worker.rank: worker.doing() for worker in late}
    stopped = {worker.rank for worker in late if is_stopped(worker.pid)}
    conditions = [
        _condition_of_late(
            worker,
            what,
            stacks[worker.rank],
            is_stopped=worker.rank in stopped,
            is_idle=idle_s is not None,
        )
        for worker in late
    ]
    culprit = culprit_of(conditions)
    if culprit is None:
        return None
    rank = culprit.rank
    name = f"worker {rank} of {world_size}"
    if rank in stopped:
        place = doing[rank] if by_rank[rank].has_begun() else ": it had not begun"
        hangs = f"{name} (process {by_rank[rank].pid}) is stopped and gives no sign of life{place}"
        lines = [f"{hangs} (during {what})"]
    elif idle_s is not None:
        hangs = f"{name} hangs{doing[rank]}: for {idle_s:g} s no worker has used its processor"
        lines = [f"{hangs} (during {what})"]
    else:
        lines = [f"{name} did not finish {what}{doing[rank]}"]
    for other in (rank, *(other for other in stacks if other != rank)):
        stack = stacks[other].rstrip() or "none: it cannot write one (stopped?)"
        lines += [f"Python stack of worker {other}{doing[other]}:", stack]
    lines.append(_GO_ON)
    if rank not in stopped and idle_s is None:
        lines.append("if the work only takes long, pass a larger limit: call(..., timeout_s=3600)")
    return WorkerError("\n".join(lines), rank=rank, traceback=stacks[rank])


def _waits_for_peers_by(stack: str) -> bool:
    """Whether the innermost frame of faulthandler's text waits for other processes."""
    innermost = re.search(r'^\s*File "(.*)", line ', stack, re.MULTILINE)
    return innermost is not None and waits_for_peers(innermost[1])


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""
