"""Gains of reverse-first-k and of the second stream, against independent recurrences."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.base.errors import ScheduleError
from autopar.schedules import (
    CoRun,
    Durations,
    Kind,
    Memory,
    Resource,
    build,
    multi_stream_gain,
    priority_iteration_s,
    reverse_first_k_gain,
    simulate,
    verify,
)
from autopar.schedules.generators.multi_stream import Phase, regions_of
from autopar.schedules.generators.out_of_order import golden_section, place_weights

Layers = tuple[list[int], list[int], list[int], list[int]]


@st.composite
def layer_costs(draw: st.DrawFn) -> Layers:
    count = draw(st.integers(1, 9))

    def costs(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=count, max_size=count))

    return costs(1, 9), costs(1, 9), costs(1, 9), costs(0, 30)


def data_parallel_s(layers: Layers, k: int, num_iterations: int = 4) -> float:
    """Seconds of the last of several iterations: one compute stream, one channel, in order."""
    forward, inputs, weights, reductions = layers
    count = len(forward)
    compute = channel = 0.0
    reduced = [0.0] * count
    ends = []
    for _ in range(num_iterations):
        for layer in range(count):
            compute = max(compute, reduced[layer]) + forward[layer]
        order = []
        for layer in reversed(range(count)):
            order.append((inputs[layer], None))
            if layer >= k:
                order.append((weights[layer], layer))
        order += [(weights[layer], layer) for layer in range(k)]
        for cost, made in order:
            compute += cost
            if made is None:
                last_input = compute
            else:
                channel = max(channel, compute) + reductions[made]
                reduced[made] = channel
        ends.append(last_input)
    return ends[-1] - ends[-2]


def durations(layers: Layers) -> Durations:
    return Durations(F=layers[0], I=layers[1], W=layers[2], G=layers[3])


@settings(deadline=None, max_examples=80)
@given(layer_costs())
def test_the_curve_of_k_is_the_recurrences(layers: Layers) -> None:
    count = len(layers[0])
    gain = reverse_first_k_gain(durations(layers), num_layers=count)
    assert [point.k for point in gain.curve] == list(range(count + 1))
    expected = [data_parallel_s(layers, k) for k in range(count + 1)]
    assert [point.iteration_s for point in gain.curve] == pytest.approx(expected)
    assert gain.conventional_s == pytest.approx(expected[0])
    assert gain.best_s == pytest.approx(min(expected))
    assert expected[gain.best_k] == pytest.approx(min(expected))
    assert gain.speedup >= 1
    verify(gain.schedule)


def by_priority_s(layers: Layers) -> float:
    """One second at a time: the channel serves the first layer whose gradient is ready."""
    forward, inputs, weights, reductions = layers
    count, now = len(forward), 0
    todo = [(layer, inputs[layer] + weights[layer]) for layer in reversed(range(count))]
    todo += [(layer, 0) for layer in range(count)]  # its update, then its forward
    ready: set[int] = set()
    left = list(reductions)
    while todo:
        layer, cost = todo.pop(0)
        is_forward = cost == 0
        while is_forward and left[layer]:
            _serve(ready, left)
            now += 1
        for _ in range(forward[layer] if is_forward else cost):
            _serve(ready, left)
            now += 1
        if not is_forward:
            ready.add(layer)
    return now


def _serve(ready: set[int], left: list[int]) -> None:
    waiting = [layer for layer in sorted(ready) if left[layer]]
    if waiting:
        left[waiting[0]] -= 1


@settings(deadline=None, max_examples=200)
@given(layer_costs())
def test_reductions_by_priority_take_what_serving_them_by_the_second_takes(layers: Layers) -> None:
    count = len(layers[0])
    found = priority_iteration_s(durations(layers), num_layers=count)
    assert found == pytest.approx(by_priority_s(layers))
    assert found <= reverse_first_k_gain(durations(layers), num_layers=count).conventional_s + 1e-9
    compute = sum(map(sum, layers[:3]))
    assert found >= max(compute, sum(layers[3]))


def test_first_layers_reduced_first_hide_behind_the_next_forward() -> None:
    """Conventionally the channel ends with layer 0, for whose long reduction the next forward
    waits; in reverse order it overlaps with the other W's."""
    costs = Durations(F=2, I=2, W=2, G=[6, 1, 1, 1, 1, 1, 1, 1])
    gain = reverse_first_k_gain(costs, num_layers=8)
    assert gain.conventional_s == 8 * 6 + 6
    assert gain.best_s == 8 * 6
    assert gain.best_k is not None
    assert gain.best_k > 0


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_every_k_does_the_same_work_with_accumulation(micro_batches: int) -> None:
    base = build("conventional", num_stages=5, num_microbatches=micro_batches, reduces=True)
    work = sorted(str(item) for item in base.devices[0])
    for k in range(6):
        other = build("reverse_first_k", num_stages=5, num_microbatches=micro_batches, k=k)
        verify(other)
        assert sorted(str(item) for item in other.devices[0]) == work


def test_memory_bounds_k() -> None:
    """A delayed W holds its layer's input and output gradient; the memory cap limits k."""
    costs = Durations(F=1, I=1, W=1, G=[6, 3, 2, 1, 1, 1, 1, 1])
    memory = Memory(activation_bytes=1.0, after_input_gradient_bytes=2.0)
    free = reverse_first_k_gain(costs, num_layers=8, memory=memory)
    peaks = [point.peak_memory_bytes for point in free.curve]
    assert peaks == sorted(peaks)
    assert peaks[-1] > peaks[0]
    for cap in sorted(set(peaks)):
        capped = reverse_first_k_gain(costs, num_layers=8, memory=memory, max_memory_bytes=cap)
        fitting = [p.iteration_s for p in free.curve if p.peak_memory_bytes <= cap]
        assert capped.best_s == min(fitting)
        held = simulate(capped.schedule, costs, memory=memory, num_iterations=4)
        assert held.peak_memory_bytes[0] <= cap
    with pytest.raises(ScheduleError, match="conventional order needs"):
        reverse_first_k_gain(costs, num_layers=8, memory=memory, max_memory_bytes=peaks[0] / 2)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 5), st.integers(1, 5))
def test_golden_section_finds_the_minimum_of_a_convex_function(
    high: int, at: int, left: int, right: int
) -> None:
    calls = set()

    def value(k: int) -> float:
        calls.add(k)
        return float(max(left * (at - k), right * (k - at)))

    found = golden_section(value, 0, high)
    assert value(found) == min(max(left * (at - k), right * (k - at)) for k in range(high + 1))


@settings(deadline=None, max_examples=4)
@given(st.integers(0, 10_000))
def test_searching_k_costs_little_and_loses_little(seed: int) -> None:
    """On deep networks with noisy layers and reductions that grow with depth, as convolutional
    networks have them, the search tries a fraction of the k's and loses at most 2%."""
    rng = random.Random(seed)
    count = 64
    work = [[rng.uniform(0.8, 1.2) for _ in range(count)] for _ in range(3)]
    load = rng.uniform(0.5, 1.5)
    reductions = [6 * load * (layer + 1) / count * rng.uniform(0.8, 1.2) for layer in range(count)]
    costs = Durations(F=work[0], I=work[1], W=work[2], G=reductions)
    whole = reverse_first_k_gain(costs, num_layers=count)
    fast = reverse_first_k_gain(costs, num_layers=count, whole_curve=False)
    assert set(fast.curve) <= set(whole.curve)
    assert len(fast.curve) <= count // 2
    assert whole.best_s <= fast.best_s <= min(fast.conventional_s, 1.02 * whole.best_s)


@settings(deadline=None, max_examples=40)
@given(layer_costs(), st.integers(1, 4), st.sampled_from((0.3, 0.5, 0.7, 0.9, 1.0)))
def test_a_second_stream_never_loses_and_never_beats_its_bounds(
    layers: Layers, region_size: int, share: float
) -> None:
    forward, inputs, weights, _ = layers
    count = len(forward)
    costs = Durations(F=forward, I=inputs, W=weights)
    co_run = CoRun(default_occupancy=share)
    gain = multi_stream_gain(costs, num_layers=count, co_run=co_run, region_size=region_size)
    verify(gain.schedule)
    total = sum(forward) + sum(inputs) + sum(weights)
    assert gain.conventional_s == pytest.approx(total)
    assert gain.best_s <= total * (1 + 1e-9)
    assert gain.best_s >= max(sum(forward) + sum(inputs), total * share) * (1 - 1e-9)
    if share == 1.0:
        assert gain.best_s == pytest.approx(total)


def test_half_filled_devices_hide_all_but_the_last_weight_gradient() -> None:
    costs = Durations(F=1, I=1, W=1)
    gain = multi_stream_gain(costs, num_layers=20, co_run=CoRun(default_occupancy=0.5))
    assert gain.conventional_s == 60
    assert 41 <= gain.best_s <= 43
    coarse = multi_stream_gain(
        costs, num_layers=20, co_run=CoRun(default_occupancy=0.5), region_size=20
    )
    assert coarse.best_s >= gain.best_s
    side = [item for item in gain.schedule.devices[0] if item.resource is Resource.SIDE]
    assert len(side) >= 18


def test_weights_go_where_co_running_is_fastest() -> None:
    """Forwards use a fifth of the device, input gradients most of it: W's wait for the forward."""
    costs = Durations(F=3, I=1, W=1)
    co_run = CoRun(occupancy={Kind.F: 0.2, Kind.I: 0.9, Kind.W: 0.7})
    placement = place_weights(costs, 6, co_run)
    regions = regions_of(6, 1)
    assert placement
    assert {regions[number].phase for number in placement.values()} == {Phase.NEXT_FORWARD}
    for layer, number in placement.items():
        assert regions[number].last_layer < layer
    gain = multi_stream_gain(costs, num_layers=6, co_run=co_run)
    assert any(item.lag == 1 for item in gain.schedule.devices[0])
    assert gain.speedup > 1.1


def test_the_memory_cap_brings_weight_gradients_home() -> None:
    costs = Durations(F=3, I=1, W=1)
    co_run = CoRun(occupancy={Kind.F: 0.2, Kind.I: 0.9, Kind.W: 0.7})
    memory = Memory(activation_bytes=1.0, after_input_gradient_bytes=2.0)
    free = multi_stream_gain(costs, num_layers=6, co_run=co_run, memory=memory)
    peaks = []
    for cap in (20.0, 9.0, 8.0, 7.0):
        gain = multi_stream_gain(
            costs, num_layers=6, co_run=co_run, memory=memory, max_memory_bytes=cap
        )
        played = simulate(gain.schedule, costs, memory=memory, co_run=co_run, num_iterations=4)
        peaks.append(played.peak_memory_bytes[0])
        assert peaks[-1] <= cap
        assert free.best_s <= gain.best_s <= gain.conventional_s
    assert peaks == sorted(peaks, reverse=True)


def test_regions_cover_the_main_stream_once() -> None:
    for count, size in itertools.product(range(1, 9), range(1, 5)):
        regions = regions_of(count, size)
        for phase, order in ((Phase.BACKWARD, -1), (Phase.NEXT_FORWARD, 1)):
            layers = [
                layer
                for region in regions
                if region.phase is phase
                for layer in range(region.first_layer, region.last_layer + 1)[::order]
            ]
            assert layers == list(range(count))[::order]
