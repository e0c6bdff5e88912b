"""Clusters: presets against published totals, JSON both ways, refusals, detection."""

import json
import math

import msgspec
import pytest
import torch
from autopar.cost_models import Cluster, DeviceSpec, Level, PeakFlops
from autopar.cost_models.detect import usable_cores
from autopar.cost_models.presets import PRESET_NAMES
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import ClusterError

TERA = 1e12


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_presets_survive_json_and_name_their_sources(name, tmp_path):
    cluster = Cluster.preset(name, nodes=2, devices_per_node=4)
    assert Cluster.from_json(cluster.to_json()) == cluster
    cluster.to_json(tmp_path / "cluster.json")
    assert Cluster.from_json(tmp_path / "cluster.json") == cluster
    assert Cluster.from_json(str(tmp_path / "cluster.json")) == cluster
    assert cluster.num_devices == 8
    assert [cluster.node_of(rank) for rank in range(8)] == [0] * 4 + [1] * 4
    for described in (cluster.device, *cluster.levels):
        assert len(described.source) > 10


def test_figures_are_those_of_the_datasheets():
    # From the printed tables: DGX H100 has 7.2 TB/s of NVLink both ways for 8 and 640 GB.
    h100 = Cluster.preset("h100-sxm", nodes=2)
    assert 2 * 8 * h100.levels[0].bandwidth_bytes_per_s == 7.2e12
    assert 8 * h100.device.memory_bytes == 640 << 30
    # DGX A100: 1.6 Tb/s of InfiniBand a node, 5 PFLOPS of float16 with sparsity for 8.
    a100 = Cluster.preset("a100-80", nodes=2)
    assert a100.levels[1].bandwidth_bytes_per_s * 8 == 1.6e12
    assert 8 * 2 * a100.device.matrix_flops_per_s(torch.float16) == pytest.approx(5e15, rel=0.01)
    # V100 whitepaper: 5,120 cores at 1,530 MHz, 640 tensor cores of 128 operations a cycle.
    v100 = Cluster.preset("v100").device
    assert v100.matrix_flops_per_s(torch.float32) == pytest.approx(5120 * 2 * 1.53e9, rel=0.01)
    assert v100.matrix_flops_per_s(torch.float16) == pytest.approx(640 * 128 * 1.53e9, rel=0.01)
    # 1080 Ti: 3,584 cores at 1,582 MHz; 352 bits at 11 Gb/s.
    gtx = Cluster.preset("1080ti").device
    assert gtx.matrix_flops_per_s(torch.float32) == pytest.approx(3584 * 2 * 1.582e9, rel=0.01)
    assert gtx.memory_bandwidth_bytes_per_s == 352 / 8 * 11e9


def test_a_dtype_without_units_of_its_own_runs_at_float32s_rate():
    gtx = Cluster.preset("1080ti").device
    assert gtx.matrix_flops_per_s(torch.bfloat16) == gtx.matrix_flops_per_s(torch.float32)


def test_tensor_float32_counts_only_where_it_is_allowed():
    device = Cluster.preset("a100-40").device
    allowed = msgspec.structs.replace(device, allow_tensor_float32=True)
    assert device.matrix_flops_per_s(torch.float32) == 19.5 * TERA
    assert allowed.matrix_flops_per_s(torch.float32) == 156 * TERA
    assert allowed.matrix_flops_per_s(torch.float64) == device.matrix_flops_per_s(torch.float64)


def test_a_users_cluster_is_a_few_lines_of_json():
    text = """{
      "device": {"name": "mine", "kind": "cuda", "peak_flops_per_s": {"float32": 1e13},
                 "memory_bandwidth_bytes_per_s": 5e11, "memory_bytes": 8000000000,
                 "kernel_launch_s": 5e-6},
      "levels": [{"name": "pcie", "size": 4, "latency_s": 2e-6, "bandwidth_bytes_per_s": 1e10}]
    }"""
    cluster = Cluster.from_json(text)
    assert cluster.num_devices == cluster.devices_per_node == 4
    assert cluster.num_nodes == 1


def _broken(change):
    description = json.loads(Cluster.preset("h100-sxm").to_json())
    change(description)
    return json.dumps(description)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(nodes=3), "nodes"),
        (lambda d: d["device"].update(colour="green"), "colour"),
        (lambda d: d["device"].pop("memory_bytes"), "memory_bytes"),
        (lambda d: d["device"].update(memory_bytes="80GB"), r"\$\.device\.memory_bytes"),
        (lambda d: d["device"].update(kind="tpu"), "tpu"),
        (lambda d: d["device"]["peak_flops_per_s"].update(float32=0), "float32=0"),
        (lambda d: d["device"]["peak_flops_per_s"].update(bfloat16=-3e14), "bfloat16=-3"),
        (lambda d: d["levels"][0].update(size=0), "size=0"),
        (lambda d: d["levels"][0].update(efficiency=1.5), "efficiency"),
        (lambda d: d["levels"][0].update(latency_s=-1), "latency_s=-1"),
        (lambda d: d.update(memory_reserve_bytes=1 << 50), "Lower it"),
        (lambda d: d.update(overlap_slowdown=0.5), "overlap_slowdown"),
        (lambda d: d["device"].update(kind="cpu"), "backend='gloo'"),
    ],
)
def test_a_wrong_description_is_refused_by_the_field_that_is_wrong(change, message):
    with pytest.raises(ClusterError, match=message):
        Cluster.from_json(_broken(change))


@given(
    st.sampled_from(PeakFlops.__struct_fields__),
    st.sampled_from([-3e14, -1.0, math.nan, math.inf, -math.inf]),
)
def test_a_peak_that_is_no_rate_is_refused_by_its_field(field, peak):
    device = Cluster.preset("h100-sxm").device
    peaks = msgspec.structs.replace(device.peak_flops_per_s, **{field: peak})
    with pytest.raises(ClusterError, match=f"peak_flops_per_s.{field}={peak}"):
        msgspec.structs.replace(device, peak_flops_per_s=peaks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": "8"}, "size='8'"),
        ({"size": 2.5}, "size=2.5"),
        ({"latency_s": "1us"}, "latency_s='1us'"),
        ({"bandwidth_bytes_per_s": True}, "bandwidth_bytes_per_s=True"),
    ],
    ids=str,
)
def test_numbers_of_another_type_are_refused_by_their_field(change, message):
    cluster = Cluster.preset("h200")
    with pytest.raises(ClusterError, match=message):
        msgspec.structs.replace(cluster.levels[0], **change)
    with pytest.raises(ClusterError, match="levels is a list"):
        msgspec.structs.replace(cluster, levels=list(cluster.levels))


def test_what_is_no_description_at_all_is_refused(tmp_path):
    with pytest.raises(ClusterError, match="to_json"):
        Cluster.from_json(tmp_path / "missing.json")
    with pytest.raises(ClusterError, match="not a cluster description"):
        Cluster.from_json("{]")
    with pytest.raises(ClusterError, match="h100-sxm"):
        Cluster.preset("h100-sxn")
    for source in (None, "\0"):
        with pytest.raises(ClusterError, match="to_json"):
            Cluster.from_json(source)
    with pytest.raises(ClusterError, match="h100-sxm"):
        Cluster.preset(["h200"])
    for count in (0, "2", 1.5):
        with pytest.raises(ClusterError, match="nodes=1"):
            Cluster.preset("h200", nodes=count)
        with pytest.raises(ClusterError, match="num_devices="):
            Cluster.detect(count)
    with pytest.raises(ClusterError, match="from 0 to 7"):
        Cluster.preset("h200").node_of(8)


@given(st.integers(1, 9), st.integers(1, 9))
def test_ranks_fill_nodes_in_order(nodes, devices_per_node):
    cluster = Cluster.preset("b200", nodes=nodes, devices_per_node=devices_per_node)
    assert (cluster.num_nodes, cluster.devices_per_node) == (nodes, devices_per_node)
    homes = [cluster.node_of(rank) for rank in range(cluster.num_devices)]
    assert homes == sorted(homes)
    assert {homes.count(node) for node in range(nodes)} == {devices_per_node}


def test_a_cluster_of_one_device_needs_no_links():
    device = DeviceSpec(
        name="one",
        kind="cpu",
        peak_flops_per_s=PeakFlops(float32=1e9),
        memory_bandwidth_bytes_per_s=1e9,
        memory_bytes=1 << 30,
        kernel_launch_s=1e-6,
    )
    assert Cluster(device=device).num_devices == 1
    level = Level(name="bus", size=3, latency_s=0.0, bandwidth_bytes_per_s=1.0)
    assert Cluster(device=device, levels=(level, level), backend="gloo").num_devices == 9


@pytest.mark.skipif(torch.cuda.is_available(), reason="detects the CUDA devices instead")
def test_detection_measures_this_machine_once(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    threads_before = torch.get_num_threads()
    cluster = Cluster.detect(2)
    assert torch.get_num_threads() == threads_before
    assert cluster.num_devices == 2
    assert cluster.backend == "gloo"
    assert cluster.device.num_threads == max(1, usable_cores() // 2)
    assert Cluster.detect(2) == cluster
    # A real product does not run faster than the peak that was found, within the clock's noise.
    assert cluster.device.matrix_flops_per_s(torch.float32) > 1e8
    (kept,) = tmp_path.glob("cpu-*.json")
    kept.write_text("{broken")
    with pytest.warns(UserWarning, match="measured again"):
        Cluster.detect(2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="detects the CUDA devices instead")
def test_detection_follows_the_launcher_over_several_hosts(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    cluster = Cluster.detect()
    assert (cluster.num_nodes, cluster.devices_per_node) == (2, 2)
    assert [level.name for level in cluster.levels] == ["loopback", "ethernet"]


def test_detection_refuses_no_devices():
    with pytest.raises(ClusterError, match="at least one"):
        Cluster.detect(0)
