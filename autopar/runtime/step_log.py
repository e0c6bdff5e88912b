"""A line per so many training steps, as trainers log them: loss, time, throughput, MFU, memory.

In: the loss and the wall time of each step. Out: records of the logger ``autopar.training``, on the
first rank only. Where logging is not configured, they are printed to standard error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import Tensor

from autopar.base.errors import InputError
from autopar.base.units import format_bytes, format_seconds
from autopar.cost_models.hardware import is_count
from autopar.plans.document import Plan

_log = logging.getLogger("autopar.training")


class StepLog:
    """Logs every ``num_steps`` steps of a plan's batch; ``memory_bytes`` gives the growth of each
    rank's memory, and is called on all ranks. Raises InputError for another number of steps."""

    def __init__(
        self, num_steps: int, plan: Plan, memory_bytes: Callable[[], list[int]], *, speaks: bool
    ) -> None:
        if not is_count(num_steps):
            raise InputError(
                f"num_steps is {num_steps!r}; log every so many training steps, at least 1"
            )
        self.num_steps = num_steps
        self._plan = plan
        self._memory_bytes = memory_bytes
        self._speaks = speaks
        self._num_done = self._num_timed = 0
        self._time_s = 0.0
        if speaks:
            _configure()

    def after_step(self, loss: Tensor, time_s: float, *, is_planned: bool) -> None:
        """Log if a line is due. Only steps of batches of the plan's shape, which it ``is_planned``
        for, count in the time and the throughput."""
        self._num_done += 1
        if is_planned:
            self._num_timed += 1
            self._time_s += time_s
        if self._num_done % self.num_steps:
            return
        held = max(self._memory_bytes())
        if self._speaks:
            _log.info("%s", self._line(loss.item(), held))
        self._num_timed, self._time_s = 0, 0.0

    def _line(self, loss: float, held: int) -> str:
        parts = [f"step {self._num_done}", f"loss {loss:.4f}"]
        p = self._plan.prediction
        if self._num_timed:
            step_s = self._time_s / self._num_timed
            ratio = p.step_time_s / step_s
            rate, what = p.samples_per_s, "samples/s"
            if p.tokens_per_s is not None:
                rate, what = p.tokens_per_s, "tokens/s"
            parts += [f"{format_seconds(step_s)} a step", f"{rate * ratio:,.0f} {what}"]
            if p.model_flops_utilisation:
                parts.append(f"{p.model_flops_utilisation * ratio:.1%} MFU")
        return ", ".join([*parts, f"{format_bytes(held)} a device"])


def _configure() -> None:
    """Let records of autopar reach standard error where nobody has said where they go."""
    logger = logging.getLogger("autopar")
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    if not _log.isEnabledFor(logging.INFO):
        _log.setLevel(logging.INFO)
