"""Selection, generators and backends of accelerators, through torch's device-generic modules.

A kind besides the CPU is an accelerator: ``torch.get_device_module`` (``torch.cuda`` and the like)
counts and selects its devices and tells their memory, and one of torch's backends communicates
between them. The runtime names a kind only where the user's request is read
(`autopar.runtime.host.devices`) or where torch itself makes an exception for one. Prices exist for
CPUs and CUDA devices: `autopar.cost_models` measures, detects and describes no other kind.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist


def is_accelerator(device: torch.device | str) -> bool:
    return torch.device(device).type not in ("cpu", "meta")


@contextlib.contextmanager
def cpu_by_default() -> Iterator[None]:
    """Within: new tensors are on the CPU, whatever ``torch.set_default_device`` says.

    Also a decorator. It is free where the default is the CPU.
    """
    cpu = torch.device("cpu")
    with contextlib.nullcontext() if torch.get_default_device() == cpu else cpu:
        yield


def module_of(device: torch.device | str) -> Any:
    """torch's module of a device's kind: ``torch.cuda`` of a CUDA device."""
    return torch.get_device_module(torch.device(device).type)


def with_index(device: torch.device) -> torch.device:
    """The device with its number: torch's current one of that kind unless it has one."""
    if not is_accelerator(device) or device.index is not None:
        return device
    return torch.device(device.type, module_of(device).current_device())


def selected(device: torch.device) -> AbstractContextManager[Any]:
    """Within: ``device`` is the current one of its kind in this thread."""
    if not is_accelerator(device):
        return contextlib.nullcontext()
    found: AbstractContextManager[Any] = module_of(device).device(device)
    return found


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that operators on a device draw from."""
    if not is_accelerator(device):
        return torch.default_generator
    module = module_of(device)
    current: int = module.current_device()  # there are no generators before the first use
    index = current if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator


def generator_bytes() -> int:
    """Bytes of a CPU's memory that `kept_generators` holds: the state of its generator."""
    return torch.default_generator.get_state().nbytes


@contextlib.contextmanager
def kept_generators(device: torch.device) -> Iterator[None]:
    """Restore the generators of the CPU and of ``device`` afterwards."""
    if not is_accelerator(device):
        with torch.random.fork_rng(devices=[]):
            yield
        return
    with torch.random.fork_rng(devices=[with_index(device)], device_type=device.type):
        yield


def release_cached() -> None:
    """Return the memory that this process's allocators hold without need to the accelerators.

    Another process could not use it otherwise: measurements and the gradient check of a process
    that starts workers would cost these their memory.
    """
    if torch.accelerator.is_available():
        module = module_of(torch.accelerator.current_accelerator() or "cpu")
        if getattr(module, "is_initialized", bool)():  # not all kinds tell
            gc.collect()
            module.empty_cache()


def backend_of(device_type: str) -> str:
    """The backends of a process group whose ranks have devices of one kind."""
    if not is_accelerator(device_type):
        return "gloo"
    return f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"
