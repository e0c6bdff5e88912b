"""Gains from out-of-order weight gradients on one device and under data parallelism.

In: seconds per layer (F, I, W, and G for the reduction of its gradients), a memory cap, and how
streams slow each other down. Out: the gain over the conventional order, with the curve over k for
reverse-first-k and the chosen regions for the second stream (Oh et al., 2022). Its user is
``benchmarks/out_of_order.py``; plans use `STEADY_ITERATIONS`.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from autopar.schedules.action import Action, Kind
from autopar.schedules.generators.conventional import conventional
from autopar.schedules.generators.multi_stream import (
    Phase,
    Region,
    allowed,
    multi_stream,
    regions_of,
)
from autopar.schedules.generators.reverse_first_k import reverse_first_k
from autopar.schedules.generators.shapes import require
from autopar.schedules.schedule import Schedule
from autopar.schedules.simulate.durations import CoRun, Durations, Memory, is_number
from autopar.schedules.simulate.simulator import simulate

STEADY_ITERATIONS = 4
_GOLDEN = (5**0.5 - 1) / 2


class KPoint(NamedTuple):
    """Reverse-first-k at one k: seconds per iteration in the steady state, and peak memory."""

    k: int
    iteration_s: float
    peak_memory_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """The best schedule of a kind, compared with the conventional one.

    ``curve`` has every k that was tried, in order (empty for multi_stream), and ``best_k`` is the
    smallest k with the best time that fits the memory cap (None for multi_stream). ``speedup`` is
    the time of the conventional iteration over that of the best, at least 1.
    """

    name: str
    conventional_s: float
    best_s: float
    schedule: Schedule
    curve: tuple[KPoint, ...] = ()
    best_k: int | None = None

    @property
    def speedup(self) -> float:
        return self.conventional_s / self.best_s if self.best_s else 1.0


class _Steady(NamedTuple):
    iteration_s: float
    peak_memory_bytes: float


def steady_state(
    schedule: Schedule, durations: Durations, memory: Memory, co_run: CoRun | None = None
) -> _Steady:
    """Seconds per iteration and peak bytes in the steady state."""
    timeline = simulate(
        schedule, durations, memory=memory, co_run=co_run, num_iterations=STEADY_ITERATIONS
    )
    return _Steady(timeline.period_s, timeline.peak_memory_bytes[0])


def golden_section(evaluate: Callable[[int], float], low: int, high: int, look: int = 2) -> int:
    """Minimize a nearly convex function over the integers in [low, high].

    A golden-section search, then a descent over neighbours up to ``look`` away.
    """
    left, right = low, high
    while right - left > 2:
        width = right - left
        first = right - round(width * _GOLDEN)
        second = max(left + round(width * _GOLDEN), first + 1)
        if evaluate(first) <= evaluate(second):
            right = second if second < right else right - 1
        else:
            left = first if first > left else left + 1
    best = min(range(left, right + 1), key=lambda k: (evaluate(k), k))
    while True:
        around = range(max(low, best - look), min(high, best + look) + 1)
        nearer = min(around, key=lambda k: (evaluate(k), k))
        if nearer == best:
            return best
        best = nearer


def reverse_first_k_gain(
    durations: Durations,
    *,
    num_layers: int,
    num_microbatches: int = 1,
    memory: Memory | None = None,
    max_memory_bytes: float = float("inf"),
    whole_curve: bool = True,
) -> Gain:
    """The best k under the memory cap, and the curve over all k (or over those searched).

    ``durations`` are seconds of each layer for a micro-batch, ``G`` those of the reduction of its
    gradients. Raises ScheduleError if not even the conventional order fits.
    """
    _check_num_layers(num_layers)
    held, num = memory or Memory(), num_microbatches
    known: dict[int, KPoint] = {}

    def point(k: int) -> KPoint:
        if k not in known:
            schedule = reverse_first_k(num_stages=num_layers, num_microbatches=num, k=k)
            known[k] = KPoint(k, *steady_state(schedule, durations, held))
        return known[k]

    order = conventional(num_stages=num_layers, num_microbatches=num, reduces=True)
    baseline = steady_state(order, durations, held)
    _require_fits(baseline, max_memory_bytes)

    def cost(k: int) -> float:
        fits = point(k).peak_memory_bytes <= max_memory_bytes
        return point(k).iteration_s if fits else float("inf")

    candidates = range(num_layers + 1)
    best = (
        min(candidates, key=lambda k: (cost(k), k))
        if whole_curve
        else golden_section(cost, 0, num_layers)
    )
    best = best if cost(best) < baseline.iteration_s else 0
    return Gain(
        name="reverse_first_k",
        conventional_s=baseline.iteration_s,
        best_s=min(cost(best), baseline.iteration_s),
        schedule=reverse_first_k(num_stages=num_layers, num_microbatches=num, k=best),
        curve=tuple(known[k] for k in sorted(known)),
        best_k=best,
    )


def priority_iteration_s(durations: Durations, *, num_layers: int) -> float:
    """Seconds per iteration of the conventional order with reductions by priority.

    The baseline of Oh et al.: BytePS, which schedules tensors as Peng et al. (SOSP 2019). The
    channel always reduces the gradient of the first layer that is ready, as the next forward pass
    needs it first, and sets another aside for it. Gradients are taken to be cut so finely that this
    costs nothing, so the time is a lower bound.
    """
    _check_num_layers(num_layers)
    table = durations.table(num_layers)
    ready_s, at_s = [0.0] * num_layers, 0.0
    for layer in reversed(range(num_layers)):
        at_s += table[Kind.I][layer] + table[Kind.W][layer]
        ready_s[layer] = at_s
    left_s, done_s, waiting, channel_s = list(table[Kind.G]), [0.0] * num_layers, list[int](), 0.0
    for layer in reversed(range(num_layers)):
        channel_s = max(channel_s, ready_s[layer])
        heapq.heappush(waiting, layer)
        until_s = ready_s[layer - 1] if layer else float("inf")
        while waiting and channel_s < until_s:
            first = waiting[0]
            spent_s = min(left_s[first], until_s - channel_s)
            left_s[first] -= spent_s
            channel_s += spent_s
            if left_s[first] <= 0:
                done_s[heapq.heappop(waiting)] = channel_s
    for layer in range(num_layers):
        at_s = max(at_s, done_s[layer]) + table[Kind.U][layer] + table[Kind.F][layer]
    return at_s


def _check_num_layers(num_layers: int) -> None:
    require(
        type(num_layers) is int and num_layers >= 1,
        f"num_layers={num_layers!r} is not a number of layers",
        "give a whole number, at least 1",
    )


def _require_fits(conventional_order: _Steady, max_memory_bytes: float) -> None:
    require(
        is_number(max_memory_bytes) and conventional_order.peak_memory_bytes <= max_memory_bytes,
        f"the conventional order needs {conventional_order.peak_memory_bytes} bytes, more than "
        f"max_memory_bytes={max_memory_bytes!r}",
        "raise the cap, or recompute activations",
    )


def multi_stream_gain(
    durations: Durations,
    *,
    num_layers: int,
    co_run: CoRun,
    region_size: int | None = None,
    memory: Memory | None = None,
    max_memory_bytes: float = float("inf"),
) -> Gain:
    """The gain of a second stream for W's, placed by co-run speedup under the memory cap.

    ``durations`` are seconds of each layer. Without ``region_size``, powers of two are tried and
    the best is kept. Raises ScheduleError if not even the conventional order fits.
    """
    _check_num_layers(num_layers)
    held = memory or Memory()
    best = conventional(num_stages=num_layers)
    baseline = steady_state(best, durations, held, co_run)
    _require_fits(baseline, max_memory_bytes)
    best_s = baseline.iteration_s
    sizes = [2**power for power in range(num_layers.bit_length())]
    for size in sizes if region_size is None else [region_size]:
        placement = place_weights(durations, num_layers, co_run, size)
        while placement:
            schedule = multi_stream(num_stages=num_layers, placement=placement, region_size=size)
            found = steady_state(schedule, durations, held, co_run)
            if found.peak_memory_bytes <= max_memory_bytes:
                if found.iteration_s < best_s:
                    best, best_s = schedule, found.iteration_s
                break
            placement = _without_longest_held(placement, num_layers, size)
    return Gain(
        name="multi_stream", conventional_s=baseline.iteration_s, best_s=best_s, schedule=best
    )


def place_weights(
    durations: Durations, num_layers: int, co_run: CoRun, region_size: int = 1
) -> dict[int, int]:
    """A region for each W that gains from co-running, in the form that ``multi_stream`` takes.

    A W of w seconds that co-runs at a mutual slowdown of s ends after w s seconds, in which the
    main stream does w seconds of its own work: it saves w (2 - s). Layers choose in the order in
    which their gradients arrive, each the region with the largest saving that has enough time left.
    Ties go to the first region in the backward, where the activation is freed soonest, and to the
    last in the next forward, which leaves the early ones to layers that have no other. A layer
    without a region stays on the main stream.
    """
    table = durations.split_table(num_layers)
    regions = regions_of(num_layers, region_size)
    free = [
        sum(table[_main_kind(region)][layer] for layer in _layers(region)) for region in regions
    ]
    half = len(regions) // 2
    placement: dict[int, int] = {}
    for layer in reversed(range(num_layers)):
        weight_s = table[Kind.W][layer]
        savings = {
            number: weight_s * (2.0 - _mean_slowdown(region, layer, table, co_run))
            for number, region in enumerate(regions)
            if allowed(layer, region) and free[number] >= weight_s
        }
        chosen = max(
            savings,
            key=lambda number: (savings[number], -number if number < half else number - 2 * half),
            default=-1,
        )
        if chosen >= 0 and savings[chosen] > 0:
            placement[layer] = chosen
            free[chosen] -= weight_s
    return placement


def _main_kind(region: Region) -> Kind:
    return Kind.I if region.phase is Phase.BACKWARD else Kind.F


def _layers(region: Region) -> range:
    return range(region.first_layer, region.last_layer + 1)


def _mean_slowdown(
    region: Region, layer: int, table: dict[Kind, list[float]], co_run: CoRun
) -> float:
    """The slowdown of the layer's W and the region's actions, weighted by their time."""
    kind = _main_kind(region)
    weight = Action(layer, Kind.W, 0)
    total = sum(table[kind][main] for main in _layers(region))
    if not total:
        return 2.0
    return (
        sum(
            table[kind][main] * co_run.slowdown(Action(main, kind, 0), weight)
            for main in _layers(region)
        )
        / total
    )


def _without_longest_held(
    placement: dict[int, int], num_layers: int, region_size: int
) -> dict[int, int]:
    """The placement without the W that is delayed over the most layers."""
    regions = regions_of(num_layers, region_size)

    def wait(layer: int) -> int:
        region = regions[placement[layer]]
        if region.phase is Phase.BACKWARD:
            return layer - region.last_layer
        return layer + region.first_layer + 1

    longest = max(placement, key=lambda layer: (wait(layer), layer))
    return {layer: number for layer, number in placement.items() if layer != longest}
