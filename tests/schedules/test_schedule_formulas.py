"""Simulated bubbles and peak activations equal the closed formulas of the papers."""

import pytest

from autopar.base.errors import ScheduleError
from autopar.schedules import (
    CoRun,
    Durations,
    Links,
    Timeline,
    build,
    simulate,
    with_reductions,
)
from autopar.schedules.simulate.asynchronous import pipedream, pipedream_2bw
from autopar.schedules.simulate.chimera_equation import chimera_step_s

DEPTHS = (4, 6, 8, 16, 32)
UNIT = Durations(F=1, I=1, W=1)
# costs at which the zero-bubble formulas hold: W at most F and at most I
SPLIT_COSTS = (UNIT, Durations(F=2, I=2, W=1), Durations(F=3, I=4, W=2))


def batch_counts(depth: int) -> tuple[int, ...]:
    """From D to 8D, fewer for deep pipelines, whose lists are long."""
    factors = (1, 2, 3, 4, 8) if depth <= 8 else (1, 3, 8) if depth == 16 else (1, 2, 8)
    return tuple(depth * factor for factor in factors)


CASES = [(depth, batches) for depth in DEPTHS for batches in batch_counts(depth)]


def timeline(name: str, depth: int, batches: int, costs: Durations, **options: object) -> Timeline:
    built = build(name, num_stages=depth, num_microbatches=batches, **options)
    return simulate(built, costs)


def work_s(costs: Durations) -> float:
    return costs.F + costs.I + costs.W


@pytest.mark.parametrize(("depth", "batches"), CASES)
@pytest.mark.parametrize("costs", [Durations(F=1, B=1), Durations(F=1, B=2), Durations(F=3, B=5)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_bubble(name: str, depth: int, batches: int, costs: Durations) -> None:
    found = timeline(name, depth, batches, costs)
    assert found.bubble_ratio == pytest.approx((depth - 1) / (batches + depth - 1), abs=1e-12)
    assert found.bubble_s == pytest.approx((depth - 1) * (costs.F + costs.B))


@pytest.mark.parametrize(("depth", "batches"), CASES)
def test_gpipe_and_1f1b_activations(depth: int, batches: int) -> None:
    assert timeline("gpipe", depth, batches, UNIT).peak_activations == (batches,) * depth
    peaks = timeline("1f1b", depth, batches, UNIT).peak_activations
    assert peaks == tuple(range(depth, 0, -1))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    ("costs", "lost"), [(Durations(F=1, B=1), 1.0), (Durations(F=1, B=2), 0.5)]
)
def test_gems_bubble(depth: int, costs: Durations, lost: float) -> None:
    """Long runs: (D-1)/(D+1/2) at B = 2F, as Chimera's paper has it, and (D-1)/(D+1) at B = F."""
    short, long = (timeline("gems", depth, batches, costs) for batches in (4, 24))
    one_s = (long.makespan_s - short.makespan_s) / 20
    bubble = 1 - (costs.F + costs.B) / one_s
    assert bubble == pytest.approx((depth - 1) / (depth + lost), abs=1e-12)
    assert set(long.peak_activations) == {1}


@pytest.mark.parametrize(("depth", "batches"), CASES)
@pytest.mark.parametrize("costs", SPLIT_COSTS)
def test_zb_h1(depth: int, batches: int, costs: Durations) -> None:
    found = timeline("zb_h1", depth, batches, costs)
    bubble_s = (depth - 1) * (costs.F + costs.I - costs.W)
    assert found.bubble_s == pytest.approx(bubble_s)
    assert found.makespan_s == pytest.approx(batches * work_s(costs) + bubble_s)
    assert max(found.peak_activations) == depth


@pytest.mark.parametrize(("depth", "batches"), [(d, n) for d, n in CASES if n >= 2 * d - 1])
@pytest.mark.parametrize("costs", SPLIT_COSTS)
def test_zb_h2(depth: int, batches: int, costs: Durations) -> None:
    found = timeline("zb_h2", depth, batches, costs)
    assert found.bubble_s == pytest.approx((depth - 1) * (costs.F + costs.I - 2 * costs.W))
    assert max(found.peak_activations) == 2 * depth - 1


@pytest.mark.parametrize("depth", DEPTHS)
def test_zb_h2_idles_where_forwards_run_out_before_the_first_gradient(depth: int) -> None:
    """No order is faster: the first gradient is back after 2D-1 units, of which N are filled."""
    for batches in range(depth, 2 * depth - 1):
        found = timeline("zb_h2", depth, batches, UNIT)
        assert found.bubble_s == pytest.approx(2 * depth - 1 - batches)
        assert max(found.peak_activations) == batches


@pytest.mark.parametrize(("depth", "batches"), [(4, 8), (6, 18), (8, 64), (16, 48)])
def test_zb_v_has_no_bubble_at_equal_costs(depth: int, batches: int) -> None:
    found = timeline("zb_v", 2 * depth, batches, UNIT)
    assert found.bubble_s == pytest.approx(0, abs=1e-9)
    assert found.peak_activations == (depth,) * depth


@pytest.mark.parametrize(
    ("depth", "batches"),
    [(d, n) for d, n in CASES if d <= 16] + [(2, 9), (3, 12), (5, 5), (7, 40), (32, 64)],
)
def test_v_half_and_v_min_reach_the_papers_activations_and_bubbles(
    depth: int, batches: int
) -> None:
    """Peaks (D+2)//2 and (D+4)//3; at F = I = W bubbles of about D/2 and 2D/3 times F + I + W."""
    costs = Durations(F=0.5, I=0.5, W=0.5)
    half = timeline("v_half", 2 * depth, batches, costs)
    least = timeline("v_min", 2 * depth, batches, costs)
    assert max(half.peak_activations) == (depth + 2) // 2
    assert max(least.peak_activations) == (depth + 4) // 3
    assert half.makespan_s - 3 * batches <= 3 * depth / 2 * 1.04
    assert least.makespan_s - 3 * batches <= 3 * depth * 2 / 3


def pair_s(costs: Durations, slowdown: float) -> float:
    """Seconds of F&B: both are slowed down while they run together; the longer one ends alone."""
    shorter, longer = sorted((costs.F, costs.I + costs.W))
    return shorter * slowdown + longer - shorter


@pytest.mark.parametrize(("depth", "batches"), [(d, n) for d, n in CASES if n >= 2 * d])
@pytest.mark.parametrize("slowdown", [1.0, 1.3, 2.0])
def test_dualpipe(depth: int, batches: int, slowdown: float) -> None:
    """The paper's (D/2-1)(F&B + B - 3W) on the most idle device, for F = I and any W."""
    built = build("dualpipe", num_stages=depth, num_microbatches=batches, overlap=True)
    co_run = CoRun(default_occupancy=slowdown / 2, end_together=True)
    for costs in (UNIT, Durations(F=2, I=2, W=1), Durations(F=5, I=5, W=0)):
        found = simulate(built, costs, co_run=co_run)
        idle_s = max(found.makespan_s - found.busy_s(device) for device in range(depth))
        backward = costs.I + costs.W
        paper_s = (depth / 2 - 1) * (pair_s(costs, slowdown) + backward - 3 * costs.W)
        assert idle_s == pytest.approx(paper_s)
        assert max(found.peak_activations) == depth + 1


@pytest.mark.parametrize("slowdown", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("costs", [Durations(F=3, I=4, W=2), Durations(F=1, I=4, W=1)])
def test_a_pair_whose_forward_starts_first_idles_less(slowdown: float, costs: Durations) -> None:
    built = build("dualpipe", num_stages=8, num_microbatches=20, overlap=True)
    co_run = CoRun(default_occupancy=slowdown / 2, end_together=True)
    found = simulate(built, costs, co_run=co_run)
    idle_s = max(found.makespan_s - found.busy_s(device) for device in range(8))
    paper_s = 3 * (pair_s(costs, slowdown) + costs.I - 2 * costs.W)
    assert 0.8 * paper_s < idle_s < paper_s


@pytest.mark.parametrize(("depth", "batches"), [(4, 8), (6, 12), (8, 64), (16, 64)])
@pytest.mark.parametrize("costs", SPLIT_COSTS)
def test_dualpipe_on_one_stream(depth: int, batches: int, costs: Durations) -> None:
    """A pair that runs sequentially sends its forward's output before its backward starts.

    So the bubble is below the paper's at F&B = F + B, and is half of ZB-H1's but for one device.
    """
    found = timeline("dualpipe", depth, batches, costs)
    paper_s = (depth / 2 - 1) * (pair_s(costs, 2.0) + costs.I - 2 * costs.W)
    bubble_s = found.makespan_s - batches * work_s(costs)
    assert bubble_s < paper_s
    if costs.F == costs.I:
        assert bubble_s == pytest.approx((depth / 2 - 1) * (costs.F + costs.I - costs.W))
    assert max(found.peak_activations) == depth + 1


@pytest.mark.parametrize(("devices", "batches"), [(4, 4), (4, 16), (8, 32)])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_interleaving_divides_the_bubble_by_the_stages_a_device(
    devices: int, batches: int, chunks: int
) -> None:
    found = timeline(
        "interleaved", chunks * devices, batches, Durations(F=1, B=2), num_devices=devices
    )
    assert found.makespan_s - 3 * chunks * batches == pytest.approx(3 * (devices - 1))


@pytest.mark.parametrize("depth", DEPTHS)
def test_chimera_for_every_number_of_pipelines(depth: int) -> None:
    pairs = [f for f in range(1, depth // 2 + 1) if (depth // 2) % f == 0]
    for f in pairs:
        found = timeline("chimera", depth, depth, Durations(F=1, B=1), num_pipelines=2 * f)
        formula = (depth - 2 * f) / (2 * f * depth + depth - 2 * f)
        assert found.bubble_ratio == pytest.approx(formula, abs=1e-12)
        assert min(found.peak_activations) == depth - depth / (2 * f) + 1
        assert max(found.peak_activations) == depth


@pytest.mark.parametrize("depth", DEPTHS)
def test_chimera_at_twice_the_backward(depth: int) -> None:
    found = timeline("chimera", depth, depth, Durations(F=1, B=2))
    assert found.bubble_ratio == pytest.approx((depth - 2) / (1.5 * depth + depth - 2))


@pytest.mark.parametrize(
    ("depth", "batches", "one_f_one_b", "naive"),
    [(4, 16, 0.158, None), (8, 32, 0.180, 0.238), (16, 64, 0.190, 0.267)],
)
def test_merged_chimera_beats_1f1b_where_joined_units_do_not(
    depth: int, batches: int, one_f_one_b: float, naive: float | None
) -> None:
    costs = Durations(F=1, B=2)
    plain = timeline("1f1b", depth, batches, costs)
    joined = timeline("chimera", depth, batches, costs, concatenation="direct")
    merged = timeline("chimera", depth, batches, costs, concatenation="merged")
    assert plain.bubble_ratio == pytest.approx(one_f_one_b, abs=6e-4)
    assert joined.bubble_ratio > plain.bubble_ratio > merged.bubble_ratio
    if naive is not None:
        assert joined.bubble_ratio == pytest.approx(naive, abs=6e-4)
    assert max(merged.peak_activations) <= depth


@pytest.mark.parametrize(("depth", "batches"), [(4, 16), (8, 32)])
def test_doubling_and_halving_beat_direct_concatenation(depth: int, batches: int) -> None:
    """One forward of two micro-batches fills the time of one backward, so seams close."""
    direct = timeline("chimera", depth, batches, Durations(F=1, B=2))
    doubled = timeline(
        "chimera", depth, batches, Durations(F=1, B=2), concatenation="forward_doubling"
    )
    halves = timeline(
        "chimera", depth, batches, Durations(F=0.5, B=1), concatenation="backward_halving"
    )
    assert doubled.bubble_ratio < direct.bubble_ratio
    assert halves.bubble_ratio < direct.bubble_ratio
    assert max(doubled.peak_activations) < max(direct.peak_activations)
    assert halves.makespan_s < direct.makespan_s


@pytest.mark.parametrize("batches", [1, 2, 3, 5])
def test_chimera_below_a_unit_runs_every_micro_batch(batches: int) -> None:
    found = timeline("chimera", 8, batches, Durations(F=1, B=2))
    assert sum(found.busy_s(device) for device in range(8)) == pytest.approx(8 * 3 * batches)


@pytest.mark.parametrize("group_size", [1, 2, 4])
def test_fast_forwarding_makes_devices_busy_early(group_size: int) -> None:
    """With modulo allocation the last device starts after group_size layers times D - 1."""
    devices, layers = 4, 16
    costs = Durations(F=1, I=1, W=1)
    found = timeline("fast_forward", layers, 8, costs, num_devices=devices, group_size=group_size)
    starts = [min(item.start_s for item in found.of_device(d)) for d in range(devices)]
    assert starts == [d * group_size for d in range(devices)]
    # the limit ends at a micro-batch's last I; the W's still to run may hold one more
    assert max(found.peak_activations) <= devices + 1


def test_modulo_allocation_beats_contiguous_stages_on_free_links() -> None:
    costs = Durations(F=1, I=1, W=1)
    spread = timeline("fast_forward", 16, 4, costs, num_devices=4, group_size=1)
    blocks = timeline("fast_forward", 16, 4, costs, num_devices=4, group_size=4)
    pipe = timeline("gpipe", 4, 4, Durations(F=4, B=8))
    assert spread.makespan_s < blocks.makespan_s < pipe.makespan_s


@pytest.mark.parametrize(
    ("name", "stages", "batches", "options"),
    [
        ("zigzag", 4, 4, {}),
        ("1f1b", 4, 4, {"depth": 3}),
        ("1f1b", 0, 4, {}),
        ("zb_v", 5, 4, {}),
        ("v_half", 3, 4, {}),
        ("chimera", 5, 4, {}),
        ("chimera", 8, 8, {"num_pipelines": 6}),
        ("chimera", 8, 8, {"num_pipelines": 3}),
        ("chimera", 8, 8, {"concatenation": "sideways"}),
        ("chimera", 4, 5, {"concatenation": "forward_doubling"}),
        ("dualpipe", 4, 6, {}),
        ("interleaved", 8, 9, {"num_devices": 4}),
        ("interleaved", 7, 8, {"num_devices": 4}),
        ("fast_forward", 4, 4, {"num_devices": 4, "group_size": 2}),
        ("fast_forward", 4, 4, {"num_devices": 2, "in_flight": 0}),
        ("reverse_first_k", 4, 1, {"k": 5}),
        ("multi_stream", 4, 1, {"placement": {0: 0}}),
        ("multi_stream", 4, 1, {"placement": {9: 0}}),
        ("multi_stream", 4, 1, {"region_size": 0}),
    ],
)
def test_schedules_that_do_not_exist_are_refused(
    name: str, stages: int, batches: int, options: dict
) -> None:
    with pytest.raises(ScheduleError):
        build(name, num_stages=stages, num_microbatches=batches, **options)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("reduction_s", [0.0, 1.0, 3.0, 20.0])
@pytest.mark.parametrize(("forward_s", "backward_s"), [(1, 1), (1, 2), (2, 3)])
def test_chimeras_performance_equation(
    depth: int, reduction_s: float, forward_s: float, backward_s: float
) -> None:
    """Exact without messages, with eager reductions, which run while devices compute."""
    costs = Durations(F=forward_s, B=backward_s, G=reduction_s)
    built = build("chimera", num_stages=depth, num_microbatches=depth)
    found = simulate(with_reductions(built, costs, hidden_share=0.0), costs)
    expected = chimera_step_s(
        depth, forward_s=forward_s, backward_s=backward_s, reduction_s=reduction_s
    )
    assert found.makespan_s == pytest.approx(expected)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("latency_s", [0.05, 0.2])
def test_chimeras_performance_equation_counts_a_message_per_pass(
    depth: int, latency_s: float
) -> None:
    """Not every pass of the critical path waits for a message, so the equation is 10% off at most,
    as the paper says of it."""
    built = build("chimera", num_stages=depth, num_microbatches=depth)
    found = simulate(built, Durations(F=1, B=2), Links(latency_s=latency_s)).makespan_s
    expected = chimera_step_s(depth, forward_s=1, backward_s=2, message_s=latency_s)
    assert found <= expected <= 1.1 * found


@pytest.mark.parametrize("depth", [4, 8])
def test_chimeras_performance_equation_of_several_units(depth: int) -> None:
    found = timeline("chimera", depth, 3 * depth, Durations(F=1, B=1))
    expected = chimera_step_s(depth, forward_s=1, backward_s=1, num_units=3)
    assert found.makespan_s == expected


@pytest.mark.parametrize("depth", DEPTHS)
def test_pipelines_without_a_flush_have_no_bubble(depth: int) -> None:
    """Their slowest stage never waits: PipeDream updates in each micro-batch, 2BW once a batch."""
    forwards = tuple(1.0 + (stage == 1) for stage in range(depth))
    costs = Durations(F=forwards, I=1, W=1, G=0.5, U=0.25)
    each = pipedream(depth, 2 * depth, costs, Links(latency_s=0.1))
    once = pipedream_2bw(depth, 2 * depth, costs, Links(latency_s=0.1))
    assert each.time_s == pytest.approx(2 * depth * 4.25)
    assert once.time_s == pytest.approx(2 * depth * 4 + 0.25)
    assert (each.staleness, each.num_versions) == (depth - 1, depth)
    assert (once.staleness, once.num_versions) == (1, 2)


def test_pipelines_without_a_flush_wait_for_a_slow_network() -> None:
    costs = Durations(F=1, I=1, W=1, G=10)
    assert pipedream(4, 8, costs).time_s == 80
    assert pipedream_2bw(4, 8, costs).time_s == 24
    with pytest.raises(ScheduleError, match="use num_microbatches=4"):
        pipedream_2bw(4, 3, costs)
