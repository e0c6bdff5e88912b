"""CUDA graphs: the kernels of a function, recorded once and launched again as one.

In: a function that launches work on a device and neither waits for it nor reads its results. Out: a
`Recording`, whose `replay` launches the same kernels on the same memory. The tensors that the
function reads must stay where they are; those that it returned have new contents after a replay.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from autopar.base.accelerators import module_of
from autopar.base.torch_private import clear_matmul_workspaces, end_recording
from autopar.base.units import format_bytes

T = TypeVar("T")
_WAITS = "called a synchronizing CUDA operation"
"""What torch warns of in its synchronization debug mode."""


class NotRecorded(Exception):
    """A function cannot be recorded; the message says why."""


class Recording(Protocol):
    """A function that was recorded."""

    def replay(self) -> None:
        """Launch it again."""
        ...


class Recorder(Protocol):
    """Records functions for one device."""

    def record(self, function: Callable[[], T]) -> tuple[Recording, T]:
        """Run ``function`` while recording; also its results, which have no contents yet.

        Raises NotRecorded where that is not possible, or what ``function`` raises.
        """
        ...

    def why_no_room(self) -> str | None:
        """Why a step that has just run cannot be recorded for want of memory; None if it can."""
        ...


class CudaRecorder:
    """Records CUDA graphs. Each keeps the memory of its intermediate results in a pool of its own,
    which nothing else can use and which is released with the graph."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def record(self, function: Callable[[], T]) -> tuple[Recording, T]:
        """As `Recorder.record`; ``function`` runs once before, to find what waits for the device,
        as a recording that CUDA refuses leaves torch's allocator in disorder."""
        if (waiting := _first_wait(function)) is not None:
            raise NotRecorded(f"the host waits for the device: {waiting}")
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        # What cuBLAS keeps belongs to the stream of recordings: each graph has memory of its own.
        clear_matmul_workspaces()
        try:
            # Other threads may use CUDA meanwhile: a loader that pins memory, NCCL's watchdog.
            with (
                torch.cuda.stream(torch.cuda.current_stream(self._device)),
                torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
            ):
                results = function()
        except Exception:
            end_recording(self._device, pool)
            raise
        finally:
            clear_matmul_workspaces()
        return graph, results

    def why_no_room(self) -> str | None:
        """A graph takes about what a step has left in the allocator's cache, and other work, such
        as an evaluation, as much again."""
        module = module_of(self._device)
        gc.collect()
        module.synchronize(self._device)
        cached = module.memory_reserved(self._device) - module.memory_allocated(self._device)
        module.empty_cache()
        free = module.mem_get_info(self._device)[0]
        if free >= 2 * cached:
            return None
        return (
            f"a graph would keep {format_bytes(cached)} from other work, and only "
            f"{format_bytes(free)} are free"
        )


def _first_wait(function: Callable[[], object]) -> str | None:
    """Run a function; what torch says of the first call in it that waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    texts = (str(found.message).strip() for found in told)
    return next((text.splitlines()[0] for text in texts if _WAITS in text), None)


def recorder_of(device: torch.device) -> Recorder | None:
    """The recorder of a device; None if its kind has none."""
    return CudaRecorder(device) if device.type == "cuda" else None
