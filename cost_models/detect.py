"""The local machine as a ``Cluster``: its CUDA devices, or local CPU workers.

CUDA devices with a preset use its figures; others are measured. A CPU's bandwidth is measured with
the threads of all workers, since workers share the memory of the host. Results are kept in the
cache folder, so that a machine is measured once, a CPU once per number of workers.
"""

import hashlib
import json
import math
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from msgspec import structs

from autopar.base.errors import ClusterError
from autopar.cost_models import cgroup
from autopar.cost_models.hardware import DeviceSpec, Hardware, PeakFlops, is_count
from autopar.cost_models.presets import PRESET_NAMES, preset_cluster

_CACHE_VERSION = 3
_PROBE_S = 0.15
_LEAST_RATE, _MOST_RATE, _LONGEST_LAUNCH_S = 1e6, 1e18, 1.0
"""Bounds on plausible peaks, in operations or bytes per second, and launch times."""


def cache_folder() -> Path:
    """The folder of measurements: ``$AUTOPAR_CACHE_DIR``, or ``autopar`` in the user's cache."""
    folder = os.environ.get("AUTOPAR_CACHE_DIR")
    if folder:
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "autopar"


def num_side_by_side(device: DeviceSpec) -> int:
    """How many of the host's processes its cores can run at the same time."""
    return min(device.num_processes, max(1, usable_cores() // device.num_threads))


def usable_cores() -> int:
    """The number of cores that this process may use, within affinity and quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, int(min(cores, cgroup.limits().num_cores)))


def cpu_name() -> str:
    """The processor's model name, as reported by the operating system."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine() or "cpu"


def detect_cluster(num_devices: int | None = None) -> Hardware:
    """The local machine with ``num_devices`` of its devices; see ``Cluster.detect``."""
    if num_devices is not None and not is_count(num_devices):
        raise ClusterError(f"num_devices={num_devices!r}; it must be a whole number of at least 1.")
    if torch.cuda.is_available():
        return _detect_cuda(num_devices)
    return _detect_cpu(num_devices)


def _detect_cuda(num_devices: int | None) -> Hardware:
    world_size = int(os.environ.get("WORLD_SIZE", 0))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or torch.cuda.device_count()
    count = num_devices or world_size or torch.cuda.device_count()
    per_node = min(count, local)
    if count > per_node and (not world_size or count > world_size or count % per_node):
        raise ClusterError(
            f"{count} devices were asked for and this machine has {torch.cuda.device_count()} CUDA "
            f"devices. Ask for Cluster.detect({torch.cuda.device_count()}), or describe the whole "
            "machine with Cluster.preset(name, nodes=..., devices_per_node=...)."
        )
    properties = torch.cuda.get_device_properties(0)
    known = preset_of(properties.name, properties.total_memory)
    nodes = count // per_node
    if known is None:
        base = preset_cluster("2080ti", nodes=nodes, devices_per_node=per_node)
        expected = {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "num_units": properties.multi_processor_count,
        }
        device = kept_device("cuda", (*expected.values(),), measured_cuda_device, expected)
    else:
        base = preset_cluster(known, nodes=nodes, devices_per_node=per_node)
        device = structs.replace(
            base.device,
            name=properties.name,
            memory_bytes=properties.total_memory,
            num_units=properties.multi_processor_count,
            source=f"{base.device.source}; memory and multiprocessors as the driver reports",
        )
    if not _peers_connected(per_node) and base.levels[0].name == "nvlink":
        pcie = preset_cluster("2080ti", devices_per_node=per_node).levels[0]
        base = structs.replace(base, levels=(pcie, *base.levels[1:]))
    return structs.replace(base, device=structs.replace(device, **float32_settings()))


def float32_settings() -> dict[str, bool]:
    """PyTorch's precision settings for float32 products, as fields of a device."""
    convolution = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    return {
        "allow_tensor_float32": torch.backends.cuda.matmul.fp32_precision == "tf32",
        "allow_tensor_float32_in_cudnn": convolution == "tf32",
    }


def preset_of(name: str, memory_bytes: int) -> str | None:
    """The preset that describes the CUDA device called ``name``, or None."""
    text = name.upper()
    if {"NVL", "MIG"} & set(text.split()):
        return None  # paired cards, and partitions of a device, have other rates and links
    large = memory_bytes > 60 * 10**9
    if "H100" in text:
        # The PCIe card has other rates; only SXM modules carry HBM3 in the name.
        return "h100-sxm" if "HBM3" in text or "SXM" in text else None
    if "A100" in text:
        return ("a100-80" if large else "a100-40") if "SXM" in text else None
    if "V100" in text:
        return "v100" if "SXM" in text else None
    for mark, preset in (("H200", "h200"), ("B200", "b200")):
        if mark in text.split("NVIDIA")[-1].split() and preset in PRESET_NAMES:
            return preset
    for mark, preset in (("1080 TI", "1080ti"), ("2080 TI", "2080ti")):
        if mark in text:
            return preset
    return None


def _peers_connected(count: int) -> bool:
    return all(
        torch.cuda.can_device_access_peer(a, b)
        for a in range(min(count, torch.cuda.device_count()))
        for b in range(min(count, torch.cuda.device_count()))
        if a != b
    )


def measured_cuda_device() -> DeviceSpec:
    properties = torch.cuda.get_device_properties(0)
    peaks = _measure_peaks(torch.device("cuda"), size=4096)
    return DeviceSpec(
        name=properties.name,
        kind="cuda",
        peak_flops_per_s=peaks,
        memory_bandwidth_bytes_per_s=_measure_bandwidth(torch.device("cuda"), 1 << 28),
        memory_bytes=properties.total_memory,
        kernel_launch_s=_measure_launch(torch.device("cuda")),
        num_units=properties.multi_processor_count,
        source="measured here: square matrix products, a copy, and the smallest addition",
    )


def _detect_cpu(num_devices: int | None) -> Hardware:
    cores = usable_cores()
    count = num_devices or int(os.environ.get("WORLD_SIZE", 0)) or cores
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    per_node = local if local and count % local == 0 else count
    threads = _num_threads(cores, per_node, local > 0)
    base = preset_cluster("cpu", nodes=count // per_node, devices_per_node=per_node)
    memory_bytes = usable_memory_bytes() // per_node
    device = kept_device(
        "cpu",
        (cpu_name(), cores, per_node, threads, memory_bytes),
        lambda: _measured_cpu_device(per_node, threads, memory_bytes),
        {
            "name": cpu_name(),
            "memory_bytes": memory_bytes,
            "num_threads": threads,
            "num_processes": per_node,
        },
    )
    reserve = min(base.memory_reserve_bytes, memory_bytes // 4)
    return structs.replace(base, device=device, memory_reserve_bytes=reserve)


def _num_threads(cores: int, per_node: int, is_launched: bool) -> int:
    """The threads that a rank computes with: torch's own, where it is this process, alone or
    launched by ``torchrun``; a local worker's share of the cores."""
    if is_launched or per_node == 1:
        return max(1, min(cores, torch.get_num_threads()))
    return max(1, cores // per_node)


def usable_memory_bytes() -> int:
    """The memory of the host, within this process's limits."""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        size_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        size_bytes = preset_cluster("cpu").device.memory_bytes
    return int(min(size_bytes, cgroup.limits().memory_bytes))


def kept_device(
    kind: str,
    identity: tuple[object, ...],
    measure: Callable[[], DeviceSpec],
    expected: Mapping[str, object] | None = None,
) -> DeviceSpec:
    """The cached result of ``measure`` for ``identity``, or a new one.

    A cached result is used if its fields match ``expected`` and its rates are plausible; otherwise
    a warning says why it is measured again.
    """
    key = json.dumps([_CACHE_VERSION, *identity, torch.__version__])
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    path = cache_folder() / f"{kind}-{digest}.json"
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=DeviceSpec)
        _check_kept(kept, {"kind": kind, **(expected or {})})
        return kept
    except FileNotFoundError:
        pass  # this is the first measurement
    except (OSError, ValueError, RecursionError) as error:
        warnings.warn(f"{path} cannot be used and is measured again: {error}", stacklevel=4)
    device = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_bytes(msgspec.json.encode(device))
        scratch.replace(path)
    except OSError as error:
        warnings.warn(f"this machine's peaks cannot be cached: {error}", stacklevel=4)
    return device


def _check_kept(device: DeviceSpec, expected: Mapping[str, object]) -> None:
    """Raise ClusterError if the description is implausible or of another device."""
    for field, wanted in expected.items():
        found = getattr(device, field)
        if found != wanted:
            raise ClusterError(f"it describes a device with {field}={found!r}, not {wanted!r}")
    peaks = structs.asdict(device.peak_flops_per_s)
    rates = {f"peak_flops_per_s.{dtype}": peak for dtype, peak in peaks.items()}
    rates["memory_bandwidth_bytes_per_s"] = device.memory_bandwidth_bytes_per_s
    rates["cache_bandwidth_bytes_per_s"] = device.cache_bandwidth_bytes_per_s
    for field, rate in rates.items():
        if rate and not _LEAST_RATE <= rate <= _MOST_RATE:  # 0: no rate of its own
            raise ClusterError(f"{field}={rate} is not a plausible rate")
    for field in ("kernel_launch_s", "dispatch_s"):
        if getattr(device, field) > _LONGEST_LAUNCH_S:
            raise ClusterError(f"{field}={getattr(device, field)} is not plausible")


def _measured_cpu_device(count: int, threads: int, memory_bytes: int) -> DeviceSpec:
    """Measure one of ``count`` workers.

    A worker has cores of its own, so its arithmetic is measured alone; memory is shared, so the
    bandwidth of the whole host is measured and divided equally.
    """
    cpu = torch.device("cpu")
    cache_bytes = _cache_bytes(count, threads)
    busy = min(usable_cores(), threads * count)
    part = min(1.0, usable_cores() / (threads * count))
    with _threads(busy):
        shared_bandwidth = _measure_bandwidth(cpu, 1 << 26)
    with _threads(threads):
        alone = _measure_peaks(cpu, size=768)
        alone_bandwidth = _measure_bandwidth(cpu, 1 << 26)
        cache_bandwidth = _measure_bandwidth(cpu, max(cache_bytes // 8, 1 << 16))
        launch_s = _measure_launch(cpu)
        dispatch_s = _measure_dispatch()
    return DeviceSpec(
        name=cpu_name(),
        kind="cpu",
        peak_flops_per_s=PeakFlops(**{k: v * part for k, v in structs.asdict(alone).items()}),
        memory_bandwidth_bytes_per_s=min(alone_bandwidth, shared_bandwidth / count),
        memory_bytes=memory_bytes,
        kernel_launch_s=launch_s,
        dispatch_s=dispatch_s,
        num_units=threads,
        num_threads=threads,
        num_processes=count,
        cache_bytes=cache_bytes,
        cache_bandwidth_bytes_per_s=cache_bandwidth,
        source=(
            f"measured here: matrix products on {threads} threads, a copy on {busy} threads "
            f"shared equally by {count} workers, a copy in the cache, the smallest addition, a view"
        ),
    )


def _cache_bytes(count: int, threads: int) -> int:
    """A worker's share of the host's caches: those of its cores, or of the last level."""
    sizes = {}
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            level = int((index / "level").read_text())
            text = (index / "size").read_text().strip()
            sizes[level] = int(text.rstrip("K")) * 1024
        except (OSError, ValueError):
            # Some hosts do not describe their caches, or in other units: the preset's size is used.
            continue
    own = sizes.get(2, preset_cluster("cpu").device.cache_bytes) * threads
    return max(own, sizes.get(3, 0) // count)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _best_s(function: Callable[[], object], device: torch.device) -> float:
    """The shortest of many runs within `_PROBE_S`, in seconds."""

    def once() -> float:
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    best = math.inf
    num_runs = 0
    end = time.perf_counter() + _PROBE_S
    while num_runs < 3 or time.perf_counter() < end:
        best = min(best, once())
        num_runs += 1
    return best


def _measure_peaks(device: torch.device, size: int) -> PeakFlops:
    def rate(dtype: torch.dtype) -> float:
        # A dtype without hardware support can be a hundred times slower: use smaller matrices.
        side = size if dtype in (torch.float32, torch.bfloat16) else size // 2
        a = torch.ones(side, side, dtype=dtype, device=device)
        b = torch.ones(side, side, dtype=dtype, device=device)
        return 2 * side**3 / _best_s(lambda: torch.mm(a, b), device)

    with float32_products("ieee"):
        dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
        rates = {str(dtype).removeprefix("torch."): rate(dtype) for dtype in dtypes}
    if device.type == "cuda":
        with float32_products("tf32"):
            rates["tensor_float32"] = rate(torch.float32)
    return PeakFlops(**rates)


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Set the precision of float32 matrix products: "ieee", or "tf32" on CUDA devices."""
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    setting.fp32_precision = precision
    try:
        yield
    finally:
        setting.fp32_precision = before


def _measure_bandwidth(device: torch.device, size_bytes: int) -> float:
    source = torch.ones(size_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size_bytes / _best_s(lambda: target.copy_(source), device)


def _measure_launch(device: torch.device) -> float:
    small = torch.ones(4, device=device)
    repeats = 200

    def several() -> None:
        for _ in range(repeats):
            # Called as compiled graphs do, not through the faster Python binding.
            torch.ops.aten.add.Tensor(small, small)

    return _best_s(several, device) / repeats


def _measure_dispatch() -> float:
    small = torch.ones(4)
    repeats = 200

    def several() -> None:
        for _ in range(repeats):
            torch.ops.aten.view.default(small, (2, 2))

    return _best_s(several, torch.device("cpu")) / repeats
