"""Peak memory of this process on its device since a given moment."""

from __future__ import annotations

import contextlib
import gc
import itertools
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from autopar.base.accelerators import is_accelerator, module_of
from autopar.base.allocations import Recording
from autopar.base.torch_private import clear_matmul_workspaces
from autopar.runtime.host.heap import give_back_freed_memory, resident_bytes

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class PeakMemory:
    """Growth of the peak since this object was made, in bytes.

    On an accelerator the memory that torch's allocator handed out. On the CPU the process's
    resident memory (Linux: the high-water mark, reset at the start; elsewhere the peak of the
    process's life). Libraries that any training loads are loaded before, and freed memory is
    returned to the kernel, so neither counts.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if is_accelerator(device):
            self._start = module_of(device).memory_allocated(device)
        else:
            _load_libraries()
            give_back_freed_memory()  # the start is read after that, and before the peak is reset
            self._start = _resident_bytes()
        self.forget_peak()

    def forget_peak(self) -> None:
        """Reset the peak to the present, as after loading; the start stays as it was."""
        if is_accelerator(self.device):
            module_of(self.device).reset_peak_memory_stats(self.device)
            return
        give_back_freed_memory()
        if _CLEAR.exists():
            _CLEAR.write_text("5")

    def growth_bytes(self) -> int:
        """Bytes by which the peak exceeds the start."""
        if is_accelerator(self.device):
            return int(module_of(self.device).max_memory_allocated(self.device)) - self._start
        return max(_peak_resident_bytes() - self._start, 0)


class PeakTensors:
    """The peak bytes of tensors between `start` and `stop`.

    The memory requested of the allocator, without fragmentation and rounding: torch's own count on
    an accelerator, without what cuBLAS keeps for matrix products; on the CPU from the allocations
    and frees that torch's profiler sees, and the tensors at the end. On the CPU these are all of
    the process, or those that ``held`` gives, where the process has others.
    """

    def __init__(
        self, device: torch.device, held: Callable[[], Iterable[torch.Tensor]] | None = None
    ) -> None:
        self.device = device
        self._held = held or _tensors_of_process
        self._recording: Recording | None = None

    def start(self) -> None:
        if is_accelerator(self.device):
            module_of(self.device).reset_peak_memory_stats(self.device)
            return
        self._recording = Recording()

    def stop(self) -> int:
        """The peak in bytes, without tensors from before `start` that were freed before `stop`."""
        if is_accelerator(self.device):
            return self._requested_bytes("peak") - self._kept_by_libraries()
        assert self._recording is not None, "stop() comes after start()"
        changes = self._recording.end()
        self._recording = None
        return (
            _bytes_of(self._held()) - sum(changes) + max(itertools.accumulate(changes, initial=0))
        )

    def _requested_bytes(self, when: str) -> int:
        stats = module_of(self.device).memory_stats(self.device)
        # CUDA's own asynchronous allocator does not know what was requested.
        return int(stats[f"requested_bytes.all.{when}"] or stats[f"allocated_bytes.all.{when}"])

    def _kept_by_libraries(self) -> int:
        """Bytes that cuBLAS holds from step to step, one workspace for each stream."""
        if self.device.type != "cuda":
            return 0
        module_of(self.device).synchronize(self.device)
        before = self._requested_bytes("current")
        clear_matmul_workspaces()
        return before - self._requested_bytes("current")


def _tensors_of_process() -> Iterator[torch.Tensor]:
    # By type(): isinstance() asks the object, and torch's deprecated ones then warn.
    return (t for t in gc.get_objects() if issubclass(type(t), torch.Tensor))


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of all storages of CPU tensors, each once."""
    found = {}
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            continue
        storage = tensor.untyped_storage()
        if storage.device.type == "cpu":  # a fake tensor says "cpu", its storage does not
            with contextlib.suppress(RuntimeError):  # a wrapper has none, what it wraps has
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _load_libraries() -> None:
    """Run one update of one number, as torch's optimizers import its compiler at first use."""
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.zeros(1)
    torch.optim.SGD([weight], lr=0.0).step()


def _lifetime_peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _resident_bytes() -> int:
    return resident_bytes() or _lifetime_peak_bytes()


def _peak_resident_bytes() -> int:
    lines = _STATUS.read_text().splitlines() if _STATUS.exists() else []
    found = next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)
    return _lifetime_peak_bytes() if found is None else 1024 * found
