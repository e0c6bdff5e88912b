"""The last part of an open search: better orders of the fastest pipelines' actions.

In: the options of `autopar.planning.schedule_search`. Out: for the fastest pipelines, orders of the
same actions that no generator makes (`autopar.schedules.generators.refine`), each as a choice of
its own, and how far the order is from a lower bound. Such a schedule is named after the one that it
starts from, "searched, from zb_h1". Activations count as in `staging.residence_of`, in stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.planning.option import Option
from autopar.planning.space import PipelineChoice
from autopar.pricing.node_memory import late_share
from autopar.pricing.problem import Residence
from autopar.schedules import Durations, Links, Memory, PipelineShape
from autopar.schedules.generators.refine import Costs, is_plain, refine

MAX_REFINED, NEAR = 2, 1.25
"""So many pipelines are refined, if they take up to so many times the fastest one's time."""
MAX_RUNS = 384
"""Limit on stages times micro-batches of a schedule that is refined."""
MAX_EXACT_RUNS, EXACT_S = 64, 2.0
"""Limit on those that CP-SAT gets, and the most seconds that it gets for each."""
MOST_WORK = 300_000
"""Limit on moves times actions of a local search: a few tenths of a second."""
SEARCHED = "searched"


def worth_refining(options: Sequence[Option]) -> list[Option]:
    """The fastest simulated pipelines of different shapes; ``options`` are those that fit."""
    chosen: dict[tuple[object, PipelineShape], Option] = {}
    for option in sorted(options, key=lambda option: option.time_s):
        if option.choice is None or option.staged is None:
            continue
        schedule = option.choice.schedule
        key = option.combination, schedule.shape
        runs = schedule.shape.num_stages * schedule.shape.num_microbatches
        if key not in chosen and runs <= MAX_RUNS and is_plain(schedule):
            chosen[key] = option
    found = list(chosen.values())[:MAX_REFINED]
    return [option for option in found if option.time_s <= NEAR * found[0].time_s]


def refined(
    option: Option,
    durations: Durations,
    links: Links,
    budget_bytes: float,
    time_limit_s: float,
) -> Iterator[PipelineChoice]:
    """The best orders found within the activations of the option's own, and within the budget.

    The first is the option's own schedule if there is no better one in its memory.
    """
    assert option.choice is not None
    schedule = option.choice.schedule
    num_stages = schedule.shape.num_stages
    own = option.held.activations * num_stages
    caps = {SEARCHED: own}
    most = _most_activations(option, budget_bytes) * num_stages
    if not option.recomputes and most >= own + 1:
        caps[f"{SEARCHED} with more memory"] = most
    runs = num_stages * schedule.shape.num_microbatches
    late = option.best.priced.pricing.analysis.derived(late_share)
    memory = Memory(activation_bytes=1.0, after_input_gradient_bytes=late)
    exact_time_s = min(EXACT_S, time_limit_s) if runs <= MAX_EXACT_RUNS else 0.0
    for name, cap in caps.items():
        costs = Costs(
            durations=durations, links=links, memory=memory,
            max_bytes=[cap] * schedule.shape.num_devices,
        )  # fmt: skip
        found = refine(
            schedule, costs, num_moves=MOST_WORK // (3 * runs), exact_time_s=exact_time_s,
        )  # fmt: skip
        made = found.schedule
        if made is not schedule:
            made = replace(made, name=f"{name}, from {schedule.name}")
        yield PipelineChoice(schedule=made, gap=found.gap, places_sums=True)


def _most_activations(option: Option, budget_bytes: float) -> float:
    """The activations of the whole model, for one micro-batch, that a rank can hold in the budget;
    memory as estimated is linear in them."""
    held = option.held
    fixed, one = (
        option.best.estimated_bytes(Residence(weights=held.weights, activations=count))
        for count in (0.0, 1.0)
    )
    num = option.combination.num_microbatches
    return min(num, (budget_bytes - fixed) / (one - fixed)) if one > fixed else num
