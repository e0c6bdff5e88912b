"""The times of training steps on one rank: actions, waits in collectives, and ops.

In: what is to be timed. Out: its seconds since they were last read. Actions are always timed, the
rest only while somebody measures: it takes moments of its own, and ops run one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from autopar.runtime.machine.moments import moments_of, on_host, present_of
from autopar.runtime.machine.op_clock import OpClock, OpSeconds
from autopar.runtime.machine.process import ProcessMachine
from autopar.runtime.step.executor import ActionTime, Executor, action_times
from autopar.runtime.step.recovery import Recovery


class Timing(IntEnum):
    """The levels of timing training steps, each with all before it."""

    ACTIONS = 0
    COMMUNICATION = 1
    OPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """The times of a training step on one rank.

    ``waits``: when each wait in a collective began and ended on the host's monotonic clock, where
    they are timed, those outside of ``actions`` too. ``ops`` are the ops of blocks, where these
    are timed.
    """

    actions: tuple[ActionTime, ...] = ()
    waits: tuple[tuple[float, float], ...] = ()
    ops: tuple[OpSeconds, ...] = ()

    @property
    def communication_s(self) -> float:
        """The seconds of exposed communication: all waits in collectives."""
        return sum(end_s - start_s for start_s, end_s in self.waits)


class StepClock:
    """Times the training steps of one rank."""

    def __init__(self, machine: ProcessMachine, recovery: Recovery) -> None:
        self._device = machine.device
        self._waits = machine.communicator.waits
        self._recovery = recovery

    def set(self, timing: Timing) -> None:
        """Time this much of the steps from now on."""
        moment = moments_of(self._device)
        self._waits.moment = moment if timing >= Timing.COMMUNICATION else None
        self._waits.spans.clear()
        self._recovery.clock = OpClock(moment) if timing >= Timing.OPS else None

    def read(self, executor: Executor[Any]) -> RankTimes:
        """The times of the last step, which the executor ran: waits and ops since the last call.

        It waits for the device.
        """
        now = present_of(self._device)
        ops, waits = self._recovery.clock, [*self._waits.spans]
        self._waits.spans.clear()
        return RankTimes(
            actions=tuple(action_times(executor.spans, *now)),
            waits=tuple((on_host(start, *now), on_host(end, *now)) for start, end in waits),
            ops=() if ops is None else tuple(ops.seconds(self._device)),
        )
