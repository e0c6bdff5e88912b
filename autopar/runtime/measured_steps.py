"""Training steps that are measured: their times, their ops, and their peak memory.

In: the ranks, and a call that runs one training step. Out: what all ranks measured in some steps.
`autopar.runtime.profile` shows it beside the prediction.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from autopar.frontend.capture import Captured
from autopar.lowering.types import RankProgram
from autopar.plans.document import Plan
from autopar.runtime.measure.op_prices import op_prices
from autopar.runtime.memory_profile import MemoryProfile
from autopar.runtime.op_profile import op_profiles, pass_times
from autopar.runtime.profile import Profile
from autopar.runtime.runner import Runner
from autopar.runtime.step.timing import RankTimes, Timing

MOST_OP_STEPS = 3
MOST_COUNTS = 3
STEPS_A_COUNT = 2
"""A count of tensors takes two steps: the second holds nothing from before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """The wall time of a step, and its times by rank."""

    time_s: float
    ranks: tuple[RankTimes, ...]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measures steps that ``train`` runs on the ranks of a ``runner``, launched op by op."""

    runner: Runner
    train: Callable[[], Tensor]

    def profile(
        self, plan: Plan, captured: Captured, program: RankProgram, num_steps: int
    ) -> Profile:
        """Run a step that is not measured, and measure ``num_steps`` beside the prediction; further
        steps, at most as many, time ops, and count tensors."""
        with self._launched():
            self.train()
            steps = self.steps(num_steps, Timing.COMMUNICATION)
            growth = self.runner.memory_growth_bytes()  # before counting takes memory
            timed = self.steps(min(num_steps, MOST_OP_STEPS), Timing.OPS)
            peaks = self.peak_tensor_bytes(min(num_steps, MOST_COUNTS))
        median_s = statistics.median_low(step.time_s for step in steps)
        ops = [[rank.ops for rank in step.ranks] for step in timed]
        prices = op_prices(plan, captured)
        return Profile(
            plan=plan,
            step_times_s=tuple(step.time_s for step in steps),
            times=next(step.ranks for step in steps if step.time_s == median_s),
            ops=op_profiles(prices, program, ops, plan.cluster.device),
            passes=pass_times(program, [step.ranks for step in timed]),
            memory=MemoryProfile(tensor_bytes=tuple(peaks), growth_bytes=tuple(growth)),
        )

    def steps(self, num_steps: int, timing: Timing) -> list[MeasuredStep]:
        """Run so many steps, and time this much of them."""
        found = []
        self.runner.set_timing(timing)
        try:
            for _ in range(num_steps):
                started_s = time.perf_counter()
                self.train()
                time_s = time.perf_counter() - started_s
                ranks = tuple(self.runner.step_times())
                found.append(MeasuredStep(time_s=time_s, ranks=ranks))
        finally:
            self.runner.set_timing(Timing.ACTIONS)
        return found

    def peak_tensor_bytes(self, num_counts: int = MOST_COUNTS) -> list[int]:
        """Per rank, the highest of some counts of the peak bytes of tensors."""
        counts: list[Sequence[int]] = []
        with self._launched():
            for _ in range(num_counts):
                self.runner.start_counting_tensors()
                for _ in range(STEPS_A_COUNT):
                    self.train()
                counts.append(self.runner.counted_tensor_bytes())
        return [max(found) for found in zip(*counts, strict=True)]

    @contextlib.contextmanager
    def _launched(self) -> Iterator[None]:
        """Within: CUDA graphs and their memory are dropped."""
        self.runner.allow_graphs(False)
        try:
            yield
        finally:
            self.runner.allow_graphs(True)
