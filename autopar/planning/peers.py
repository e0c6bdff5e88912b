"""Baselines of a pipeline: the schedules of other systems at the plan's own prices.

In: the option of a plan that is a pipeline. Out: the step of each peer with the plan's sharding,
pipeline ranks and micro-batches, or the reason why it does not exist for these numbers. GPipe,
1F1B (DAPPLE's schedule), interleaved 1F1B and GEMS train as eager PyTorch does; PipeDream and
PipeDream-2BW use old weights, which their notes say, and are never run
(`autopar.schedules.simulate.asynchronous`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from autopar.base.errors import AutoparError
from autopar.cost_models import CommunicationModel
from autopar.ir.placement import local_shape
from autopar.planning.baselines import Baseline, Baselines
from autopar.planning.option import Option
from autopar.planning.space import PipelineChoice
from autopar.planning.staging import (
    asynchronous_costs,
    choose_stages,
    residence_of,
    stage,
)
from autopar.plans.strategy_names import NOT_EAGER
from autopar.pricing.candidate import Candidate
from autopar.schedules import Durations, Links, Schedule, build
from autopar.schedules.simulate.asynchronous import Asynchronous, pipedream, pipedream_2bw

FLUSHED: Mapping[str, tuple[str, int]] = {
    "GPipe": ("gpipe", 1),
    "1F1B (DAPPLE)": ("1f1b", 1),
    "interleaved 1F1B": ("interleaved", 2),
    "GEMS": ("gems", 1),
}
"""The peers that train as eager: generator, and stages per pipeline rank."""
ASYNCHRONOUS: Mapping[str, Callable[[int, int, Durations, Links], Asynchronous]] = {
    "PipeDream": pipedream,
    "PipeDream-2BW": pipedream_2bw,
}


def price_peers(
    option: Option, communication: CommunicationModel, crossing: Sequence[int]
) -> Baselines:
    """The peers of a pipeline on as many pipeline ranks; ``crossing`` as in `staging.stage`."""
    found: dict[str, Baseline] = {}
    missing: dict[str, str] = {}
    for name in (*FLUSHED, *ASYNCHRONOUS):
        try:
            price = _flushed if name in FLUSHED else _asynchronous
            found[name] = price(name, option, communication, crossing)
        except AutoparError as error:
            missing[name] = str(error)
    return Baselines(found=found, missing=missing)


def _flushed(
    name: str, option: Option, communication: CommunicationModel, crossing: Sequence[int]
) -> Baseline:
    generator, per_rank = FLUSHED[name]
    schedule = _built(generator, option, per_rank)
    best = option.best
    staged = stage(best, PipelineChoice(schedule=schedule), communication, crossing)
    return Baseline(
        mesh=best.mesh,
        time_s=staged.times.step_s,
        memory_bytes=best.estimated_bytes(residence_of(schedule, best.priced.pricing.analysis)),
        candidate=best,
    )


def _built(generator: str, option: Option, per_rank: int = 1) -> Schedule:
    num_ranks = option.combination.num_devices
    devices = {"num_devices": num_ranks} if per_rank > 1 else {}
    return build(
        generator,
        num_stages=per_rank * num_ranks,
        num_microbatches=option.combination.num_microbatches,
        **devices,
    )


def _asynchronous(
    name: str, option: Option, communication: CommunicationModel, crossing: Sequence[int]
) -> Baseline:
    schedule, best = _built("1f1b", option), option.best
    num_ranks, num = schedule.shape.num_devices, schedule.shape.num_microbatches
    stages = choose_stages(best, schedule.shape, crossing)
    costs = asynchronous_costs(best, stages, schedule, communication, crossing)
    found = ASYNCHRONOUS[name](num_ranks, num, *costs)
    filled = build("1f1b", num_stages=num_ranks, num_microbatches=max(num_ranks, num))
    residence = residence_of(filled, best.priced.pricing.analysis)  # batches overlap
    versions_bytes = (found.num_versions - 1) * residence.weights * _weight_bytes(best)
    return Baseline(
        mesh=best.mesh,
        time_s=best.priced.pricing.num_passes * found.time_s,
        memory_bytes=best.estimated_bytes(residence) + versions_bytes,
        candidate=best,
        note=staleness_text(found),
    )


def staleness_text(found: Asynchronous) -> str:
    """The note of a pipeline without a flush: the age of the weights that it trains on."""
    updates = f"{found.staleness} update{'s' * (found.staleness != 1)}"
    return f"{NOT_EAGER}: on weights up to {updates} old"


def _weight_bytes(candidate: Candidate) -> float:
    """Bytes of all parameters on one device of a mesh that has the whole model."""
    stored = candidate.priced.assignment(candidate.solution.assignment).stored
    return sum(
        math.prod(local_shape(value.shape, stored[value.index], candidate.mesh))
        * value.stored_dtype.itemsize
        for value in candidate.priced.pricing.graph.parameters
        if value.index in stored
    )
