"""Plans for clusters of unequal islands, beside closed formulas for a chain of equal layers."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn

import autopar
from autopar.base.errors import ClusterError
from autopar.cost_models import Cluster, DeviceSpec, OpCall, OpEstimate, RooflineModel
from autopar.plans.document import Plan

FAST = Cluster.preset("a100-80", devices_per_node=1)
NUM_LAYERS, NUM_MICROBATCHES, WIDTH = 12, 8, 4096


def slowed(cluster: Cluster, factor: float) -> Cluster:
    """A cluster whose devices take ``factor`` times as long for everything."""
    device: DeviceSpec = cluster.device
    peaks = msgspec.structs.asdict(device.peak_flops_per_s)
    slow = msgspec.structs.replace(
        device,
        peak_flops_per_s=type(device.peak_flops_per_s)(
            **{dtype: peak / factor for dtype, peak in peaks.items()}
        ),
        memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s / factor,
        cache_bandwidth_bytes_per_s=device.cache_bandwidth_bytes_per_s / factor,
        kernel_launch_s=device.kernel_launch_s * factor,
        dispatch_s=device.dispatch_s * factor,
    )
    return msgspec.structs.replace(cluster, device=slow)


def joined(*islands: Cluster) -> Cluster:
    return Cluster.joined(islands, bandwidth_bytes_per_s=1e12, latency_s=1e-9)


class Chain(nn.Module):
    """Equal layers, with nothing before or after them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
                for _ in range(NUM_LAYERS)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def planned(cluster: Cluster, **options: object) -> Plan:
    with torch.device("meta"):
        model, batch = Chain(), (torch.zeros(8192 * NUM_MICROBATCHES, WIDTH),)
    return autopar.plan(model, cluster, batch, precision="bf16", **options)


def starts(plan: Plan) -> list[int]:
    return [int(name.rsplit(".", 1)[1]) for name in plan.schedule.first_blocks]


ONE_STAGE = {"schedule": "1f1b", "num_stages": 2, "num_microbatches": NUM_MICROBATCHES}


def test_layers_are_dealt_by_speed_and_the_step_is_that_of_the_formula() -> None:
    cluster = joined(FAST, slowed(FAST, 2.0))
    alone = planned(FAST, num_microbatches=NUM_MICROBATCHES).prediction
    layer_s = alone.step_time_s / NUM_LAYERS / NUM_MICROBATCHES
    best = planned(cluster, **ONE_STAGE)
    assert starts(best) == [0, 8]
    # Both stages take as long, and one waits for one micro-batch of the other.
    assert best.prediction.step_time_s == pytest.approx(
        8 * layer_s * (NUM_MICROBATCHES + 1), rel=0.03
    )
    uniform = planned(cluster, **ONE_STAGE, cuts=("layers.6",))
    assert uniform.prediction.step_time_s == pytest.approx(
        6 * layer_s * (2 * NUM_MICROBATCHES + 1), rel=0.03
    )


def test_the_slow_island_may_come_first() -> None:
    assert starts(planned(joined(slowed(FAST, 2.0), FAST), **ONE_STAGE)) == [0, 4]


def test_the_search_finds_the_unequal_pipeline_by_itself() -> None:
    cluster = joined(FAST, slowed(FAST, 3.0))
    plan = planned(cluster)
    even = planned(cluster, num_stages=1)
    assert plan.schedule.num_devices == 2
    # Together they have the speed of 4/3 devices; split evenly, that of 2/3.
    assert even.prediction.step_time_s / plan.prediction.step_time_s > 1.6
    assert plan.prediction.model_flops_utilisation < 1
    assert Plan.from_json(plan.to_json()) == plan
    assert cluster.devices_text == f"1 x {FAST.device.name} + 1 x {FAST.device.name}"


def test_a_slow_link_between_sites_is_priced_where_it_is() -> None:
    sites = [Cluster.preset("a100-80", nodes=2, devices_per_node=1)] * 2
    near = Cluster.joined(sites, bandwidth_bytes_per_s=25e9, latency_s=1e-5)
    far = Cluster.joined(sites, bandwidth_bytes_per_s=25e6, latency_s=1e-2)
    assert not far.islands  # sites of equal devices: the levels say it all
    fixed = {**ONE_STAGE, "num_stages": 4}
    slower_s = planned(far, **fixed).prediction.step_time_s
    faster = planned(near, **fixed)
    assert starts(faster) == [0, 3, 6, 9]
    assert slower_s > faster.prediction.step_time_s + 2e-2


def test_what_cannot_be_joined_is_refused() -> None:
    link = {"bandwidth_bytes_per_s": 1e9, "latency_s": 1e-5}
    with pytest.raises(ClusterError, match="at least two"):
        Cluster.joined([FAST], **link)
    with pytest.raises(ClusterError, match="one kind of device, not None"):
        Cluster.joined(None, **link)  # type: ignore[arg-type]
    with pytest.raises(ClusterError, match="no common program"):
        Cluster.joined([FAST, Cluster.preset("cpu")], **link)
    with pytest.raises(ClusterError, match="one kind of device, not"):
        Cluster.joined([FAST, joined(FAST, slowed(FAST, 2.0))], **link)
    with pytest.raises(ClusterError, match="islands have 1 devices and the levels 2"):
        msgspec.structs.replace(joined(FAST, FAST), islands=(FAST,))
    both = joined(Cluster.preset("a100-80", nodes=2), Cluster.preset("v100"))
    assert [level.size for level in both.levels] == [8, 3]
    assert Cluster.from_json(both.to_json()) == both


def test_the_link_between_islands_is_no_link_inside_a_node() -> None:
    uneven = joined(Cluster.preset("a100-80"), Cluster.preset("v100", devices_per_node=3))
    assert [level.size for level in uneven.levels] == [1, 11]
    alone = Cluster(device=FAST.device)
    bare = joined(alone, alone)
    assert [level.size for level in bare.levels] == [1, 2]
    for cluster in (uneven, bare, joined(FAST, FAST)):
        assert cluster.devices_per_node == 1
        assert cluster.levels[-1].name == "between islands"


def test_inside_a_node_what_spans_islands_takes_the_slowest_of_all_levels() -> None:
    """Pairs of these cards have a bridge, and PCI Express between them."""
    pairs, whole = Cluster.preset("h100-pcie"), Cluster.preset("v100")
    assert [level.size for level in pairs.levels] == [2, 4]
    first, _ = joined(pairs, whole).levels
    assert first.bandwidth_bytes_per_s == pairs.levels[1].bandwidth_bytes_per_s
    assert (first.size, first.in_node) == (8, False)


def test_a_model_of_compute_prices_the_slowest_devices_of_whatever_memory() -> None:
    class Slower(RooflineModel):
        def estimate(self, call: OpCall) -> OpEstimate:
            return super().estimate(call).times(2)

    slow = slowed(FAST, 2.0)
    large = msgspec.structs.replace(slow.device, memory_bytes=2 * slow.device.memory_bytes)
    cluster = joined(msgspec.structs.replace(slow, device=large), FAST)
    # Twice as slow as the roofline of the slow devices, whose memory is not the least.
    assert starts(planned(cluster, **ONE_STAGE, compute=Slower(cluster.device))) == [0, 2]
