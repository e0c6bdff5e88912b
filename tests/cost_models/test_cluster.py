"""Clusters: presets against published totals, JSON round trips, rejected input, detection."""

import itertools
import json
import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.base.errors import ClusterError
from autopar.cost_models import Cluster, DeviceSpec, Level, PeakFlops
from autopar.cost_models.detect import usable_cores
from autopar.cost_models.presets import PRESET_NAMES

TERA = 1e12


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_presets_survive_json_and_name_their_sources(name, tmp_path):
    cluster = Cluster.preset(name, nodes=2, devices_per_node=4)
    assert Cluster.from_json(cluster.to_json()) == cluster
    cluster.to_json(tmp_path / "cluster.json")
    assert Cluster.from_json(tmp_path / "cluster.json") == cluster
    assert Cluster.from_json(str(tmp_path / "cluster.json")) == cluster
    assert cluster.num_devices == 8
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


def test_what_a_network_reaches_is_a_parameter():
    usual = Cluster.preset("h100-sxm", nodes=2)
    half = Cluster.preset("h100-sxm", nodes=2, network_efficiency=0.45)
    assert half.levels[0] == usual.levels[0]
    assert half.levels[1].efficiency == 0.45
    assert half.levels[1].message_efficiency == pytest.approx(
        usual.levels[1].message_efficiency / 2
    )
    for wrong, nodes in itertools.product((0, -0.5, 1.1, math.nan, "most"), (1, 2)):
        with pytest.raises(ClusterError, match="efficiency"):
            Cluster.preset("h100-sxm", nodes=nodes, network_efficiency=wrong)


@pytest.mark.parametrize(("devices", "sizes"), [(1, (1,)), (2, (2,)), (3, (3,)), (8, (2, 4))])
def test_bridged_cards_are_pairs_of_one_node(devices, sizes):
    cluster = Cluster.preset("h100-pcie", nodes=3, devices_per_node=devices)
    assert tuple(level.size for level in cluster.levels) == (*sizes, 3)
    assert (cluster.num_nodes, cluster.devices_per_node) == (3, devices)


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
        (lambda d: d["levels"][0].update(message_efficiency=2), "message_efficiency 2.*at most 1"),
        (lambda d: d["levels"][0].update(in_node=1), "in_node"),
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


H200 = Cluster.preset("h200")


@pytest.mark.parametrize(
    ("described", "change", "message"),
    [
        (H200.device, {"memory_bytes": 80e9}, r"memory_bytes=80000000000\.0; .*=80000000000\."),
        (H200.device, {"memory_bytes": 10**400}, "memory_bytes=a whole number of 1329 bits; .*2"),
        (H200.device, {"memory_bandwidth_bytes_per_s": 10**400}, "must be positive and finite"),
        (H200.device, {"kernel_launch_s": 10**5000}, "finite and at least 0"),
        (H200.device, {"dispatch_s": np.float64(1e-6)}, "dispatch_s=np.float64.*an int or a float"),
        (H200.device, {"num_units": True}, "num_units=True"),
        (H200.device, {"allow_tensor_float32": "no"}, "allow_tensor_float32='no'; .*bool"),
        (
            H200.device,
            {"kind": "gpu"},
            "kind='gpu'; it must be 'cuda' or 'cpu'. For example, write kind='cuda'",
        ),
        (H200.device, {"name": "\ud800"}, r"name='\\ud800'; it must be a string"),
        (H200.device, {"peak_flops_per_s": 1e15}, r"Write peak_flops_per_s=PeakFlops\(...\)"),
        (
            H200.device.peak_flops_per_s,
            {"float16": "1e15"},
            "float16='1e15'; it must be an int or a float",
        ),
        (H200, {"device": H200}, r"Write device=DeviceSpec\(...\)"),
        (H200, {"levels": (H200.device,)}, r"Write levels=\(Level\(...\),\)"),
        (H200, {"backend": "mpi"}, "backend='mpi'; it must be 'nccl' or 'gloo'"),
        (H200, {"overlap_slowdown": 10**5000}, "overlap_slowdown is a whole number of"),
        (H200, {"memory_reserve_bytes": 1e9}, "Write memory_reserve_bytes=1000000000"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_json_could_not_give_back_is_refused_where_it_is_made(described, change, message):
    with pytest.raises(ClusterError, match=message):
        msgspec.structs.replace(described, **change)


_NAMES = st.text(st.characters(), max_size=5)  # half characters included
_NUMBERS = st.one_of(st.floats(), st.integers(), st.integers(10**18, 10**24))
_CHANGES = {
    "name": _NAMES, "memory_bytes": _NUMBERS, "num_units": _NUMBERS, "dispatch_s": st.floats(),
}  # fmt: skip


@given(st.data(), st.sampled_from([*_CHANGES]))
def test_every_device_that_is_accepted_is_read_back_from_json(data, field):
    value = data.draw(_CHANGES[field])
    try:
        device = msgspec.structs.replace(H200.device, **{field: value})
        cluster = msgspec.structs.replace(H200, device=device)
    except ClusterError:
        return
    assert Cluster.from_json(cluster.to_json()) == cluster


def test_whole_numbers_may_be_written_as_users_write_them():
    text = H200.to_json().replace(f": {H200.device.memory_bytes},", ": 80e9,")
    found = Cluster.from_json(text.replace('"size": 8', '"size": 8.0'))
    assert found.device.memory_bytes == 80 * 10**9
    assert [level.size for level in found.levels] == [level.size for level in H200.levels]
    assert json.loads(found.to_json())["device"]["memory_bytes"] == 80 * 10**9
    with pytest.raises(ClusterError, match=r"\$\.device\.memory_bytes"):
        Cluster.from_json(text.replace("80e9", "80.5"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["device"].update(kind="gpu"), r"\$\.device\.kind is 'gpu'; .*'cuda' or 'cpu'"),
        (lambda d: d.update(backend=3), r"\$\.backend is 3; .*'nccl' or 'gloo'"),
        (
            lambda d: d["device"].update(memory_bytes=10**400),
            r"\$\.device\.memory_bytes: a whole number of",
        ),
        (lambda d: d["device"].update(kernel_launch_s=10**400), r"\$\.device\.kernel_launch_s"),
        (lambda d: d["device"].update(name="\ud800"), "surrogate"),
    ],
)
def test_json_that_python_cannot_hold_is_refused(change, message):
    text = _broken(change)
    with pytest.raises(ClusterError, match=message):
        Cluster.from_json(text)


def test_text_that_is_not_quite_json_is_named_by_how_it_begins():
    text = H200.to_json()
    for broken in ("// of mine\n" + text, text.replace("NVIDIA", "\ud800"), "[" * 100_000 + "\n"):
        with pytest.raises(ClusterError, match="not a cluster description") as refused:
            Cluster.from_json(broken)
        assert len(str(refused.value)) < 300
    for other in (json.loads(text), text.encode(), None, 3):
        with pytest.raises(ClusterError, match="from_json") as refused:
            Cluster.from_json(other)
        assert len(str(refused.value)) < 400
    with pytest.raises(ClusterError, match="File name too long") as refused:
        Cluster.from_json("x" * 5000)
    assert len(str(refused.value)) < 300


def test_a_byte_order_mark_is_passed_over(tmp_path):
    (tmp_path / "cluster.json").write_text(H200.to_json(), encoding="utf-8-sig")
    assert Cluster.from_json(tmp_path / "cluster.json") == H200
    assert Cluster.from_json("\ufeff" + H200.to_json()) == H200


def test_what_is_no_description_at_all_is_refused(tmp_path):
    with pytest.raises(ClusterError, match="to_json"):
        Cluster.from_json(tmp_path / "missing.json")
    with pytest.raises(ClusterError, match="not a cluster description"):
        Cluster.from_json("{]")
    with pytest.raises(ClusterError, match="h100-sxm"):
        Cluster.preset("h100-sxn")
    with pytest.raises(ClusterError, match="to_json"):
        Cluster.from_json("\0")
    with pytest.raises(ClusterError, match="h100-sxm"):
        Cluster.preset(["h200"])
    for count in (0, "2", 1.5):
        with pytest.raises(ClusterError, match="nodes=1"):
            Cluster.preset("h200", nodes=count)
        with pytest.raises(ClusterError, match="num_devices="):
            Cluster.detect(count)


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
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_rank_in_a_process_of_the_users_has_its_threads(tmp_path, monkeypatch, num_threads):
    """One CPU runs in the caller's process, and ranks of ``torchrun`` are started by others."""
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        expected = min(num_threads, usable_cores())
        assert Cluster.detect(1).device.num_threads == expected
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(name, "2")
        assert Cluster.detect().device.num_threads == expected
    finally:
        torch.set_num_threads(before)


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
    with pytest.raises(ClusterError, match="at least 1"):
        Cluster.detect(0)
