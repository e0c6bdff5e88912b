"""Collective times against closed formulas, counted link traffic, and real gloo processes."""

import itertools
import json
import math
import socket

import msgspec
import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.cost_models import (
    Cluster,
    Collective,
    CollectiveGrid,
    CommunicationModel,
    CostError,
    Level,
    ProfileStore,
    Source,
    all_measured,
    collective_measure,
    measure_collectives,
    measured_model,
)
from autopar.cost_models.communication import MeasuredCurve, slowed_s
from autopar.cost_models.nccl import across_nodes
from autopar.cost_models.spans import spans_of
from autopar.cost_models.store import CollectiveTime, StoreWarning

SIZE = 1 << 26


def _cluster(*levels):
    base = Cluster.preset("h100-sxm")
    return msgspec.structs.replace(base, levels=tuple(levels), collective_launch_s=0.0)


def _level(size, **changes):
    given_ = {"name": "link", "latency_s": 0.0, "bandwidth_bytes_per_s": 1e9} | changes
    return Level(size=size, **given_)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_one_level_takes_the_textbooks_ring_times(count):
    latency_s, bandwidth = 1e-3, 1e9
    model = CommunicationModel(_cluster(_level(count, latency_s=latency_s)))
    ranks = tuple(range(count))
    ring = (count - 1) / count * SIZE / bandwidth
    steps = count - 1
    tree = math.ceil(math.log2(count))
    expected = {
        "all_gather": steps * latency_s + ring,
        "reduce_scatter": steps * latency_s + ring,
        "all_to_all": steps * latency_s + ring,
        "all_reduce": 2 * tree * latency_s + 2 * ring,
        "broadcast": tree * latency_s + SIZE / bandwidth,
        "send_recv": latency_s + SIZE / bandwidth,
    }
    for kind, time_s in expected.items():
        assert model.estimate(kind, SIZE, ranks).time_s == pytest.approx(time_s)


def _crossing_of_all_to_all(ranks, devices_per_node):
    """Bytes out of the busiest node, message by message."""
    node = {rank: rank // devices_per_node for rank in ranks}
    out = {}
    for a, b in itertools.permutations(ranks, 2):
        if node[a] != node[b]:
            out[node[a]] = out.get(node[a], 0) + SIZE / len(ranks)
    return max(out.values(), default=0)


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_an_exchange_across_nodes_moves_the_bytes_that_its_messages_cross(inside, across, skip):
    per_node, nodes = 4, 8
    model = CommunicationModel(
        _cluster(_level(per_node, bandwidth_bytes_per_s=1e15), _level(nodes))
    )
    stride = per_node // inside
    chosen = range(0, across * skip, skip)
    ranks = tuple(n * per_node + d * stride for n in chosen for d in range(inside))
    # The other groups of the axis use what this one leaves of each node.
    sharing = per_node // inside
    expected = sharing * _crossing_of_all_to_all(ranks, per_node) / 1e9
    assert model.estimate("all_to_all", SIZE, ranks).time_s == pytest.approx(
        expected, rel=1e-3, abs=1e-6
    )


def test_groups_that_share_a_nodes_link_share_its_bandwidth():
    cluster = _cluster(_level(8, bandwidth_bytes_per_s=1e15), _level(4))
    model = CommunicationModel(cluster)
    alone = model.estimate("all_gather", SIZE, tuple(range(32)))
    shared = model.estimate("all_gather", SIZE, (0, 8, 16, 24))
    # Eight groups each gather the whole buffer from nodes; one ring of 32 does so once.
    assert alone.time_s == pytest.approx(31 / 32 * SIZE / 1e9, rel=2e-3)
    assert shared.time_s == pytest.approx(8 * 3 / 4 * SIZE / 1e9, rel=2e-3)


def _ring_traffic(ranks, devices_per_node):
    """Bytes out of the busiest node in an all-gather by a ring, message by message."""
    out = {}
    for _ in range(len(ranks) - 1):
        for sender, receiver in zip(ranks, (*ranks[1:], ranks[0])):
            if sender // devices_per_node != receiver // devices_per_node:
                node = sender // devices_per_node
                out[node] = out.get(node, 0) + SIZE / len(ranks)
    return max(out.values())


@given(st.sampled_from([1, 2, 4]), st.sampled_from([2, 3, 8]))
def test_a_ring_between_nodes_moves_the_bytes_that_its_messages_cross(inside, across):
    per_node = 4
    model = CommunicationModel(_cluster(_level(per_node, bandwidth_bytes_per_s=1e15), _level(8)))
    stride = per_node // inside
    ranks = tuple(n * per_node + d * stride for n in range(across) for d in range(inside))
    expected = stride * _ring_traffic(ranks, per_node) / 1e9
    for kind in ("all_gather", "reduce_scatter"):
        found = model.estimate(kind, SIZE, ranks).time_s
        assert found == pytest.approx(expected, rel=2e-3, abs=5e-4)


@given(
    st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]),
    st.sampled_from([2, 3, 8]),
    st.integers(20, 33),
    st.sampled_from(["v100", "a100-80", "h100-sxm", "h100-pcie", "a100-80-ethernet"]),
)
def test_no_collective_between_nodes_beats_the_bytes_that_must_cross(kind, nodes, power, preset):
    cluster = Cluster.preset(preset, nodes=nodes)
    model, size = CommunicationModel(cluster), 1 << power
    # What a node lacks must enter it, and its own sum must leave it, at the nominal rate.
    least_s = size * (nodes - 1) / nodes / cluster.levels[-1].bandwidth_bytes_per_s
    ranks = tuple(range(8 * nodes))
    assert model.estimate(kind, size, ranks).time_s >= least_s
    # The same on one device of each node, in eight groups at once, sends eight times as much.
    assert model.estimate(kind, size, ranks[::8]).time_s >= 8 * least_s


@given(st.sampled_from([2, 4, 32]), st.integers(24, 33))
def test_a_gather_over_two_axes_costs_no_more_than_over_one_after_the_other(nodes, power):
    cluster = Cluster.preset("h100-sxm", nodes=nodes)
    model, size = CommunicationModel(cluster), 1 << power
    at_once_s = model.estimate("all_gather", size, tuple(range(8 * nodes))).time_s
    across_s = model.estimate("all_gather", size // 8, tuple(range(0, 8 * nodes, 8))).time_s
    inside_s = model.estimate("all_gather", size, tuple(range(8))).time_s
    # But for the steps, of which one ring over all has more.
    steps_s = 8 * nodes * 5e-6
    assert at_once_s <= across_s + inside_s + steps_s


def _tree(first, last, parent, children):
    """In-order binary tree over first..last: leaves are the even positions from ``first``."""
    if first > last:
        return
    middle = (first + last) // 2
    children.setdefault(parent, []).append(middle)
    _tree(first, middle - 1, middle, children)
    _tree(middle + 1, last, middle, children)


@pytest.mark.parametrize("num_nodes", [2, 7, 15])
def test_trees_between_nodes_send_the_bytes_that_two_trees_cross(num_nodes):
    # A complete tree over the nodes, and the same one shifted by one: leaves of one are inner nodes
    # of the other. Each reduces half of the bytes up and broadcasts it down.
    out = [0.0] * num_nodes
    for shift in (0, 1):
        children = {}
        _tree(0, num_nodes - 1, None, children)
        for parent, below in children.items():
            for child in below:
                if parent is not None:
                    out[(child + shift) % num_nodes] += SIZE / 2
                    out[(parent + shift) % num_nodes] += SIZE / 2
    busiest = {2: 1.0}.get(num_nodes, 2.0) * SIZE
    assert max(out) == pytest.approx(busiest)
    levels = (_level(8, bandwidth_bytes_per_s=1e15), _level(num_nodes, efficiency=0.5))
    ranks = tuple(range(8 * num_nodes))
    group = across_nodes(levels, 1, spans_of(_cluster(*levels), ranks))
    # Trees reach 1.2 times the rate of rings between two nodes, 0.8 between more.
    rate = 0.5 * (1.2 if num_nodes == 2 else 0.8)
    assert group.tree_s(SIZE) == pytest.approx(busiest / 1e9 / rate, rel=5e-3)


def test_nccl_takes_the_algorithm_that_measurements_show():
    # Vidur's all-reduces between two nodes (microsoft/vidur): with two devices a node they take
    # 2.05 ms at 8.2 MB, 1.24 at 8.5, 2.3 at 16.3 and 4.37 at 17, so a tree in between; with eight
    # they take 3.2 ms at 12.9 MB, 1.71 at 13.2, 4.4 at 17 and 2.65 at 21.
    sizes = (4, 8.2, 8.5, 10, 14, 16.6, 17.5, 24, 64)
    taken = {}
    for each in (2, 8):
        cluster = Cluster.preset("a100-80-ethernet", nodes=2, devices_per_node=each)
        spans = spans_of(cluster, tuple(range(2 * each)))
        group = across_nodes(cluster.levels, cluster.num_node_levels, spans)
        taken[each] = [size for size in sizes if group.takes_tree(int(size * 1e6))]
    assert taken == {2: [8.5, 10, 14, 16.6], 8: [14, 16.6, 24, 64]}


def test_groups_on_a_switch_do_not_slow_each_other_and_on_a_bus_they_do():
    switch = CommunicationModel(_cluster(_level(8)))
    bus = CommunicationModel(_cluster(_level(8, total_bandwidth_bytes_per_s=2e9)))
    pair = (0, 4)
    assert switch.estimate("broadcast", SIZE, pair).time_s == pytest.approx(SIZE / 1e9)
    assert bus.estimate("broadcast", SIZE, pair).time_s == pytest.approx(8 * SIZE / 2e9)


def test_one_device_cannot_fill_its_nodes_link():
    cluster = _cluster(
        _level(1, bandwidth_bytes_per_s=1e15), _level(4, device_bandwidth_bytes_per_s=1e8)
    )
    time_s = CommunicationModel(cluster).estimate("all_gather", SIZE, (0, 1, 2, 3)).time_s
    assert time_s == pytest.approx(3 / 4 * SIZE / 1e8, rel=1e-3)


@given(
    st.sampled_from(list(Collective)),
    st.integers(0, 1 << 30),
    st.integers(0, 1 << 30),
    st.sampled_from([(0, 1), (0, 8), tuple(range(8)), tuple(range(16)), (0, 8, 16, 24)]),
)
def test_more_bytes_never_take_less_time(kind, one, other, ranks):
    model = CommunicationModel(Cluster.preset("a100-80", nodes=4))
    small, large = sorted((one, other))
    if kind == "all_reduce" and max(ranks) >= 8:
        group = across_nodes(model.cluster.levels, 1, model.spans(ranks))
        # Only NCCL's change of its algorithm can make more bytes faster.
        assume(group.takes_tree(small) == group.takes_tree(large))
    assert model.estimate(kind, small, ranks).time_s <= model.estimate(kind, large, ranks).time_s


@given(st.sampled_from(list(Collective)), st.integers(0, 1 << 30), st.integers(0, 15))
def test_a_group_of_one_costs_nothing(kind, size_bytes, rank):
    model = CommunicationModel(Cluster.preset("v100", nodes=2))
    assert model.estimate(kind, size_bytes, (rank,)).time_s == 0


def test_bus_bandwidths_are_those_that_nccl_tests_report():
    # A node of H100s all-reduces at about 360 GB/s without in-switch reduction, A100s at 230.
    for name, reported in (("h100-sxm", 360e9), ("a100-80", 235e9), ("v100", 130e9)):
        model = CommunicationModel(Cluster.preset(name))
        time_s = model.estimate("all_reduce", 1 << 30, tuple(range(8))).time_s
        assert 2 * 7 / 8 * (1 << 30) / time_s == pytest.approx(reported, rel=0.1)


def test_bus_bandwidths_between_nodes_are_those_that_nccl_tests_report():
    # DGX A100: 192 GB/s (NVIDIA/nccl issue 1576); adapters of 400 Gb/s: 46 to 48 GB/s each
    # (NVIDIA/nccl-tests issue 290).
    for name, reported in (("a100-80", 192e9), ("h100-sxm", 8 * 47e9)):
        model = CommunicationModel(Cluster.preset(name, nodes=4))
        time_s = model.estimate("all_gather", 8 << 30, tuple(range(32))).time_s
        assert 31 / 32 * (8 << 30) / time_s == pytest.approx(reported, rel=0.1)
    # Reduce-scatters lose bandwidth with their length: 360, 345, 320 and 300 GB/s for 4, 8, 16 and
    # 32 nodes of H100 (NVIDIA/nccl issue 1229, which does not say the size).
    for nodes, reported in ((4, 360e9), (8, 345e9), (16, 320e9), (32, 300e9)):
        model = CommunicationModel(Cluster.preset("h100-sxm", nodes=nodes))
        num = 8 * nodes
        time_s = model.estimate("reduce_scatter", 2 << 30, tuple(range(num))).time_s
        assert (num - 1) / num * (2 << 30) / time_s == pytest.approx(reported, rel=0.1)


def test_an_exchange_between_nodes_is_bound_by_each_devices_adapter():
    # A share 1 - 1/n of the bytes leaves the node, over one adapter of 50 GB/s for each device
    # (NVIDIA/nccl-tests issue 130).
    model = CommunicationModel(Cluster.preset("h100-sxm", nodes=4))
    time_s = model.estimate("all_to_all", 1 << 30, tuple(range(32))).time_s
    assert time_s == pytest.approx(3 / 4 * (1 << 30) / (0.9 * 50e9), rel=0.02)


def test_pairs_of_a_node_share_its_slower_links():
    cluster = Cluster.preset("h100-pcie", nodes=2, devices_per_node=4)
    assert (cluster.num_nodes, cluster.devices_per_node) == (2, 4)
    model = CommunicationModel(cluster)
    # Vidur's all-reduces of 64 MiB on such nodes: 0.352 ms in a pair, 2.068 ms on two pairs.
    for ranks, measured_s in (((0, 1), 0.352e-3), ((0, 1, 2, 3), 2.068e-3)):
        found = model.estimate("all_reduce", 64 << 20, ranks).time_s
        assert found == pytest.approx(measured_s, rel=0.1)


def test_gloo_reduces_inside_nodes_first():
    cluster = Cluster.preset("cpu", nodes=2, devices_per_node=4)
    fast = msgspec.structs.replace(cluster.levels[0], bandwidth_bytes_per_s=1e15)
    fast = msgspec.structs.replace(fast, total_bandwidth_bytes_per_s=0.0)
    cluster = msgspec.structs.replace(cluster, levels=(fast, cluster.levels[1]))
    time_s = CommunicationModel(cluster).estimate("all_gather", SIZE, tuple(range(8))).time_s
    assert time_s == pytest.approx(SIZE / 2 / (0.9 * 1.25e9), rel=0.03)


@given(st.floats(0, 10), st.floats(0, 10), st.floats(1, 3))
def test_overlap_takes_what_a_step_by_step_run_takes(compute_s, communication_s, slowdown):
    step_s, now, done = 0.002, 0.0, 0.0
    while done < compute_s or now < communication_s:
        done += step_s / (slowdown if now < communication_s else 1.0)
        now += step_s
    found = max(communication_s, slowed_s(compute_s, communication_s, slowdown))
    assert found == pytest.approx(now, abs=4 * step_s)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_shuffle", 8, (0, 1)), "all_reduce"),
        (("all_reduce", -1, (0, 1)), "at least 0"),
        (("all_reduce", 8, (0, 0)), "without repetition"),
        (("all_reduce", 8, (0, 8)), "8 devices"),
        (("all_reduce", 8, ()), "at least one"),
    ],
)
def test_wrong_questions_are_refused(arguments, message):
    with pytest.raises(CostError, match=message):
        CommunicationModel(Cluster.preset("h200")).estimate(*arguments)


def test_ranks_may_be_any_sequence():
    model = CommunicationModel(Cluster.preset("h200"))
    of_tuple = model.estimate("all_reduce", 1 << 20, (0, 2, 4))
    assert model.estimate("all_reduce", 1 << 20, [0, 2, 4]) == of_tuple
    assert model.estimate("all_reduce", 1 << 20, range(0, 6, 2)) == of_tuple
    assert model.spans([0, 2]) == model.spans((0, 2))
    assert model.group_shape([0, 2]) == model.group_shape((0, 2))


@given(st.floats(0, 1e-3), st.floats(1e-12, 1e-8), st.integers(1, 1 << 24))
def test_a_measured_line_is_recovered_between_and_beyond_its_points(latency_s, per_byte, size):
    sizes = (1 << 10, 1 << 15, 1 << 20)
    curve = MeasuredCurve(
        sizes_bytes=sizes, times_s=tuple(latency_s + per_byte * size for size in sizes)
    )
    found = curve.at(size)
    assert found.source == (Source.MEASURED if size in sizes else Source.INTERPOLATED)
    if size >= sizes[0]:
        assert found.time_s == pytest.approx(latency_s + per_byte * size, rel=1e-6)
    else:
        assert found.time_s == curve.times_s[0]


@given(
    st.dictionaries(st.integers(1, 1 << 24), st.floats(0, 1), min_size=1, max_size=6),
    st.integers(1, 1 << 28),
    st.integers(1, 1 << 28),
)
def test_more_bytes_never_take_less_measured_time(times, one, other):
    curve = MeasuredCurve(sizes_bytes=tuple(sorted(times)), times_s=tuple(sorted(times.values())))
    small, large = sorted((one, other))
    assert curve.at(small).time_s <= curve.at(large).time_s


def test_a_large_message_is_not_free_where_the_largest_two_were_disturbed():
    cluster = Cluster.preset("cpu", devices_per_node=2)
    shape = json.dumps(CommunicationModel(cluster).group_shape((0, 1)))
    times_ms = {1 << 10: 0.1, 1 << 20: 0.8, 1 << 22: 12.0, 1 << 24: 10.0}
    with ProfileStore(None, cluster.device) as store:
        for size_bytes, time_ms in times_ms.items():
            time = CollectiveTime(
                size_bytes=size_bytes, time_s=time_ms / 1e3, spread=0.0, num_samples=9
            )
            store.put_collective("all_reduce", shape, cluster.backend, time)
        model = measured_model(cluster, store)
    assert model.estimate("all_reduce", 1 << 24, (0, 1)).time_s == pytest.approx(11e-3)
    for times in (2, 10, 100):
        found = model.estimate("all_reduce", times << 24, (0, 1))
        assert found.time_s == pytest.approx(times * 11e-3, rel=0.02)


def test_a_kind_of_collective_that_is_not_known_is_left_out():
    cluster = Cluster.preset("cpu", devices_per_node=2)
    shape = json.dumps(CommunicationModel(cluster).group_shape((0, 1)))
    time = CollectiveTime(size_bytes=1 << 10, time_s=1e-3, spread=0.0, num_samples=9)
    with ProfileStore(None, cluster.device) as store:
        for kind in ("all_to_some", "all_reduce"):
            store.put_collective(kind, shape, cluster.backend, time)
        model = measured_model(cluster, store)
    assert model.estimate("all_reduce", 1 << 10, (0, 1)).time_s == 1e-3


@pytest.mark.parametrize(
    "text", ["garbage", "[[2]]", '{"a":1}', '[["x",1,"link"]]', "null", "[" * 20_000]
)
def test_groups_that_cannot_be_read_are_left_out(text):
    cluster = Cluster.preset("cpu", devices_per_node=2)
    time = CollectiveTime(size_bytes=1 << 10, time_s=1e-3, spread=0.0, num_samples=9)
    with ProfileStore(None, cluster.device) as store:
        store.put_collective("all_reduce", text, cluster.backend, time)
        with pytest.warns(StoreWarning, match="cannot be parsed"):
            model = measured_model(cluster, store)
    assert model.estimate("all_reduce", 1 << 10, (0, 1)).source == Source.ANALYTICAL


def test_times_over_one_kind_of_link_say_nothing_of_another():
    fast = Cluster.preset("a100-80", devices_per_node=2)
    slow = msgspec.structs.replace(fast, levels=Cluster.preset("2080ti", devices_per_node=2).levels)
    shape = json.dumps(CommunicationModel(fast).group_shape((0, 1)))
    time = CollectiveTime(size_bytes=1 << 24, time_s=8e-5, spread=0.0, num_samples=9)
    grid = CollectiveGrid(kinds=(Collective.ALL_REDUCE,), sizes_bytes=(1 << 24,))
    with ProfileStore(None, fast.device) as store:
        store.put_collective("all_reduce", shape, fast.backend, time)
        assert all_measured(fast, store, grid)
        assert not all_measured(slow, store, grid)
        found = measured_model(slow, store).estimate("all_reduce", 1 << 24, (0, 1))
    assert found == CommunicationModel(slow).estimate("all_reduce", 1 << 24, (0, 1))


def test_measurements_that_spread_are_flagged_where_they_are_used():
    cluster = Cluster.preset("cpu", devices_per_node=2)
    shape = json.dumps(CommunicationModel(cluster).group_shape((0, 1)))
    with ProfileStore(None, cluster.device) as store:
        for power, spread in ((10, 0.0), (12, 0.0), (14, 0.9), (16, 0.0), (18, 0.0)):
            time = CollectiveTime(
                size_bytes=1 << power, time_s=power / 1e3, spread=spread, num_samples=9
            )
            store.put_collective("all_reduce", shape, cluster.backend, time)
        model = measured_model(cluster, store)
    noisy = [
        power for power in range(9, 20) if model.estimate("all_reduce", 1 << power, (0, 1)).is_noisy
    ]
    assert noisy == [13, 14, 15]
    assert model.joined("all_reduce", 1 << 13, (0, 1), 2).is_noisy


def _measure_with_a_disturbance(rank, world, port, path):
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    cluster = Cluster.preset("cpu", devices_per_node=world)
    times_s = {1 << 10: [1.0, 1.1, 1.0], 1 << 12: [1.0, 2.0, 9.0, 1.0, 1.1]}
    visits = []

    def disturbed(kind, size_bytes, *_):
        visits.append(size_bytes)
        time_s = times_s[size_bytes].pop(0)
        return CollectiveTime(size_bytes=size_bytes, time_s=time_s, spread=0.0, num_samples=3)

    collective_measure._measure = disturbed
    with ProfileStore(path, cluster.device) as store:
        measure_collectives(
            cluster,
            store,
            CollectiveGrid(kinds=(Collective.ALL_REDUCE,), sizes_bytes=tuple(times_s)),
        )
        (curve,) = store.collectives("gloo").values()
    assert visits == [1 << 10, 1 << 12] * 3 + [1 << 12] * 2
    assert [times.time_s for times in curve] == [1.0, 1.1]
    assert [times.spread > collective_measure.MAX_SPREAD for times in curve] == [False, True]
    dist.destroy_process_group()


def test_rounds_that_differ_are_repeated(tmp_path):
    arguments = (2, _free_port(), tmp_path / "store.sqlite3")
    mp.spawn(_measure_with_a_disturbance, arguments, nprocs=2)


def test_equal_times_say_that_bytes_cost_what_the_last_did():
    curve = MeasuredCurve(sizes_bytes=(1 << 10, 1 << 20), times_s=(1e-3, 1e-3))
    assert curve.at(1 << 15).time_s == 1e-3
    assert curve.at(1 << 24).time_s == pytest.approx(16e-3)


@pytest.mark.parametrize(
    ("sizes", "times", "message"),
    [
        ((), (), "at least one"),
        ((8, 16), (1.0,), "one time for each"),
        ((16, 8), (1.0, 2.0), "sizes .* must ascend"),
        ((8, 16), (2.0, 1.0), "must not decrease"),
    ],
)
def test_what_is_no_curve_is_refused(sizes, times, message):
    with pytest.raises(CostError, match=message):
        MeasuredCurve(sizes_bytes=sizes, times_s=times)


def _measure_in_a_process(rank, world, port, path):
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    cluster = Cluster.preset("cpu", devices_per_node=world)
    with ProfileStore(path, cluster.device) as store:
        sizes = (1 << 10, 1 << 16)
        model = measure_collectives(cluster, store, CollectiveGrid(sizes_bytes=sizes), max_s=0.005)
        spent = model.estimate("all_gather", 1 << 16, (0, 1))
        assert spent.source == Source.MEASURED
        collective_measure._measure = None  # Measuring again would fail.
        again = measure_collectives(cluster, store, CollectiveGrid(sizes_bytes=sizes))
        assert again.estimate("all_gather", 1 << 16, (0, 1)) == spent
    dist.destroy_process_group()


def test_collectives_are_measured_on_real_processes_once(tmp_path):
    path = tmp_path / "store.sqlite3"
    port = _free_port()
    mp.spawn(_measure_in_a_process, (2, port, path), nprocs=2)
    cluster = Cluster.preset("cpu", devices_per_node=2)
    with ProfileStore(path, cluster.device) as store:
        model = measured_model(cluster, store)
    for kind in Collective:
        measured = model.estimate(kind, 1 << 16, (0, 1))
        assert measured.source == Source.MEASURED
        assert measured.time_s > 0
        assert model.estimate(kind, 1 << 12, (0, 1)).source == Source.INTERPOLATED


def _stop_after_the_first_round(rank, world, port, path):
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    cluster = Cluster.preset("cpu", devices_per_node=world)
    grid = CollectiveGrid(kinds=(Collective.ALL_REDUCE,), sizes_bytes=(1 << 10, 1 << 12))
    measure, visits = collective_measure._measure, []

    def stopping(*arguments):
        if len(visits) == 2:
            raise KeyboardInterrupt
        visits.append(arguments)
        return measure(*arguments)

    with ProfileStore(path, cluster.device) as store:
        collective_measure._measure = stopping
        with pytest.raises(KeyboardInterrupt):
            measure_collectives(cluster, store, grid)
        collective_measure._measure = measure
        assert not all_measured(cluster, store, grid)
        measure_collectives(cluster, store, grid)
        assert all_measured(cluster, store, grid)
    dist.destroy_process_group()


def test_a_collective_is_known_after_its_last_round(tmp_path):
    mp.spawn(_stop_after_the_first_round, (2, _free_port(), tmp_path / "store.sqlite3"), nprocs=2)


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_measuring_without_a_process_group_says_what_to_do():
    cluster = Cluster.preset("cpu", devices_per_node=2)
    with pytest.raises(CostError, match="init_process_group"):
        measure_collectives(cluster, ProfileStore(None, cluster.device))


@settings(max_examples=10)
@given(st.permutations(range(8)))
def test_the_order_of_ranks_does_not_matter(order):
    model = CommunicationModel(Cluster.preset("b200"))
    expected = model.estimate("all_reduce", SIZE, tuple(range(8)))
    assert model.estimate("all_reduce", SIZE, tuple(order)) == expected
