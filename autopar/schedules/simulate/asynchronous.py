"""Pipelines without a flush, PipeDream and PipeDream-2BW: the seconds of a batch in steady state.

In: seconds of the stages, one per device, and their links. Out: the time of a batch, by simulation
of a long 1F1B. These train on old weights, so they do not equal eager PyTorch: they are priced, to
be compared with, and never run.

- **PipeDream** (Narayanan et al., SOSP 2019) reduces and updates after every micro-batch. A stage
  keeps a version of its weights for each of the up to D micro-batches that are in flight at any
  time, and a gradient is D-1 updates old when it is used.
- **PipeDream-2BW** (Narayanan et al., ICML 2021) reduces and updates once per batch of at least D
  micro-batches, with two versions of the weights; gradients are one update old.

Reductions are overlapped with computation, and only limit the rate.
"""

from dataclasses import dataclass, replace

from autopar.base.errors import ScheduleError
from autopar.schedules.action import Kind
from autopar.schedules.generators.one_forward_one_backward import one_forward_one_backward
from autopar.schedules.simulate.durations import Durations, Links
from autopar.schedules.simulate.simulator import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Asynchronous:
    """The steady time of a batch, the age of its gradients in updates, and versions of weights."""

    time_s: float
    staleness: int
    num_versions: int


def pipedream(
    num_stages: int, num_microbatches: int, durations: Durations, links: Links | None = None
) -> Asynchronous:
    """PipeDream: G and U of the durations are those after each micro-batch."""
    table = durations.table(num_stages)
    whole = tuple(b + u for b, u in zip(table[Kind.B], table[Kind.U]))
    period_s = _period_s(num_stages, num_microbatches, replace(durations, B=whole), links)
    return Asynchronous(
        time_s=max(period_s, num_microbatches * max(table[Kind.G])),
        staleness=num_stages - 1,
        num_versions=num_stages,
    )


def pipedream_2bw(
    num_stages: int, num_microbatches: int, durations: Durations, links: Links | None = None
) -> Asynchronous:
    """PipeDream-2BW: G and U of the durations are those after each batch.

    Raises ScheduleError for batches of fewer micro-batches than stages, which it does not have.
    """
    if num_microbatches < num_stages:
        raise ScheduleError(
            f"PipeDream-2BW needs as many micro-batches as stages, got {num_microbatches} for "
            f"{num_stages} stages; use num_microbatches={num_stages}"
        )
    table = durations.table(num_stages)
    period_s = _period_s(num_stages, num_microbatches, durations, links)
    return Asynchronous(
        time_s=max(period_s + max(table[Kind.U]), max(table[Kind.G])),
        staleness=1,
        num_versions=2,
    )


def _period_s(
    num_stages: int, num_microbatches: int, durations: Durations, links: Links | None
) -> float:
    """Seconds that a batch adds to a run of 1F1B that has filled the pipeline."""
    filled = max(num_stages, num_microbatches)
    short_s, long_s = (
        simulate(
            one_forward_one_backward(num_stages=num_stages, num_microbatches=count),
            durations,
            links,
        ).makespan_s
        for count in (filled, filled + num_microbatches)
    )
    return long_s - short_s
