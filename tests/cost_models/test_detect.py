"""Detection: container limits, device names, stored measurements."""

import functools
import json
import math
import warnings

import msgspec
import pytest
import torch

from autopar.cost_models import Cluster, cgroup, detect
from autopar.cost_models.cgroup import limits
from autopar.cost_models.detect import (
    float32_products,
    float32_settings,
    kept_device,
    measured_cuda_device,
    preset_of,
    usable_cores,
)

GIB = 1 << 30
UNLIMITED_V1 = str((1 << 63) - 4096)  # what version 1 shows where nothing is limited


def _lay_out(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


V1_GROUPS = "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc"


@pytest.mark.parametrize(
    ("files", "num_cores", "memory_bytes"),
    [
        pytest.param({}, math.inf, math.inf, id="no control groups"),
        pytest.param({"proc/self/cgroup": "0::/"}, math.inf, math.inf, id="no limits"),
        pytest.param(
            {
                "proc/self/cgroup": "0::/",
                "sys/fs/cgroup/memory.max": str(4 * GIB),
                "sys/fs/cgroup/cpu.max": "200000 100000",
            },
            2.0,
            4 * GIB,
            id="docker run -m 4g --cpus 2",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/",
                "sys/fs/cgroup/memory.max": "max",
                "sys/fs/cgroup/cpu.max": "max 100000",
            },
            math.inf,
            math.inf,
            id="unlimited",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/user.slice/run.scope",
                "sys/fs/cgroup/user.slice/memory.max": str(2 * GIB),
                "sys/fs/cgroup/user.slice/cpu.max": "max 100000",
                "sys/fs/cgroup/user.slice/run.scope/memory.max": str(3 * GIB),
                "sys/fs/cgroup/user.slice/run.scope/cpu.max": "150000 100000",
            },
            1.5,
            2 * GIB,
            id="the least of a group and those above",
        ),
        pytest.param(
            {
                "proc/self/cgroup": V1_GROUPS,
                "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": str(GIB),
                "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED_V1,
                "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            0.5,
            GIB,
            id="version 1 seen from the host",
        ),
        pytest.param(
            {
                "proc/self/cgroup": V1_GROUPS,
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(GIB),
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            math.inf,
            GIB,
            id="version 1 seen from the container",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/",
                "sys/fs/cgroup/memory.max": "",
                "sys/fs/cgroup/cpu.max": "many",
            },
            math.inf,
            math.inf,
            id="files of another kernel",
        ),
    ],
)
def test_limits_of_control_groups_are_read(tmp_path, files, num_cores, memory_bytes):
    _lay_out(tmp_path, files)
    found = limits(tmp_path)
    assert (found.num_cores, found.memory_bytes) == (num_cores, memory_bytes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="detects the CUDA devices instead")
def test_a_limited_process_plans_within_its_limits(tmp_path, monkeypatch):
    """Two workers share half a core's time and 1 GiB."""
    _lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": str(GIB),
            "sys/fs/cgroup/cpu.max": "50000 100000",
        },
    )
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cgroup, "limits", functools.partial(limits, tmp_path))
    cluster = Cluster.detect(2)
    assert cluster.device.memory_bytes == GIB // 2
    assert cluster.device.num_threads == 1
    assert usable_cores() == 1


@pytest.mark.parametrize(
    ("name", "memory_bytes", "preset"),
    [
        ("NVIDIA H200", 141 * 10**9, "h200"),
        ("NVIDIA H200 NVL", 141 * 10**9, None),
        ("NVIDIA H200 MIG 1g.18gb", 18 * 10**9, None),
        ("NVIDIA GH200 480GB", 96 * 10**9, None),
        ("NVIDIA H100 80GB HBM3", 80 * GIB, "h100-sxm"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10 * GIB, None),
        ("NVIDIA H100 NVL", 94 * GIB, None),
        ("NVIDIA H100 PCIe", 80 * GIB, None),
        ("NVIDIA A100-SXM4-40GB", 40 * GIB, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 80 * GIB, "a100-80"),
        ("NVIDIA A100 80GB PCIe", 80 * GIB, None),
        ("NVIDIA B200", 180 * 10**9, "b200"),
        ("Tesla V100-SXM2-32GB", 32 * GIB, "v100"),
        ("NVIDIA GeForce RTX 2080 Ti", 11 * GIB, "2080ti"),
        ("NVIDIA GeForce RTX 4090", 24 * GIB, None),
        ("NVIDIA L4", 23 * GIB, None),
    ],
)
def test_only_devices_with_a_presets_rates_take_them(name, memory_bytes, preset):
    assert preset_of(name, memory_bytes) == preset


def test_a_measured_device_is_measured_once_for_each_identity(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    names = iter(("first", "second", "third"))

    def measure():
        return msgspec.structs.replace(Cluster.preset("2080ti").device, name=next(names))

    assert [kept_device("cuda", ("L4", 72), measure).name for _ in range(3)] == ["first"] * 3
    assert kept_device("cuda", ("L40", 72), measure).name == "second"
    for kept in tmp_path.glob("cuda-*.json"):
        kept.write_text('{"name": "L4"}')
    with pytest.warns(UserWarning, match="measured again"):
        assert kept_device("cuda", ("L4", 72), measure).name == "third"


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "cpu"},
        {"name": "another"},
        {"num_processes": 4},
        {"memory_bytes": 10**400},
        {"memory_bandwidth_bytes_per_s": 1e-9},
        {"cache_bandwidth_bytes_per_s": 1e30},
        {"peak_flops_per_s": {"float32": 3.0}},
        {"kernel_launch_s": 60.0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_kept_record_of_another_device_or_of_none_is_measured_again(
    tmp_path, monkeypatch, change
):
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    device = Cluster.preset("2080ti").device
    expected = {"name": device.name, "num_processes": 1}
    asked = ("cuda", (device.name,), lambda: device, expected)
    assert kept_device(*asked) == device
    (kept,) = tmp_path.glob("cuda-*.json")
    record = kept.read_bytes()
    kept.write_text(json.dumps(json.loads(record) | change))
    with pytest.warns(UserWarning, match="is measured again"):
        assert kept_device(*asked) == device
    assert kept.read_bytes() == record
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kept_device(*asked) == device


@pytest.mark.skipif(torch.cuda.is_available(), reason="detects the CUDA devices instead")
def test_peaks_of_another_number_of_workers_are_not_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(detect, "_PROBE_S", 0.001)
    Cluster.detect(1)
    (of_one,) = tmp_path.glob("cpu-*.json")
    Cluster.detect(2)
    (of_two,) = set(tmp_path.glob("cpu-*.json")) - {of_one}
    of_two.write_bytes(of_one.read_bytes())
    with pytest.warns(UserWarning, match="measured again: it describes a device with"):
        found = Cluster.detect(2).device
    assert found.num_processes == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_is_measured_in_both_precisions_of_float32():
    with float32_products("tf32"):
        peaks = measured_cuda_device().peak_flops_per_s
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    if torch.cuda.get_device_capability() >= (8, 0):
        assert peaks.tensor_float32 > 1.5 * peaks.float32


def test_detection_follows_pytorchs_settings_of_float32():
    as_it_starts = {"allow_tensor_float32": False, "allow_tensor_float32_in_cudnn": True}
    assert float32_settings() == as_it_starts
    with float32_products("tf32"), torch.backends.cudnn.flags(allow_tf32=False):
        other = {"allow_tensor_float32": True, "allow_tensor_float32_in_cudnn": False}
        assert float32_settings() == other
    assert float32_settings() == as_it_starts
