"""Measured times of regions on this machine's devices, op by op and compiled.

In: regions with their operands, and the store of measured times. Out: for each region both times,
or why it has none. CPU processes that train concurrently also measure concurrently, the same region
at the same time, as for ops (`autopar.runtime.measure.op_times`); the slowest counts. Samples of
both ways alternate, so that other load on the machine affects them alike.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, fx

from autopar.base.accelerators import is_accelerator, module_of, with_index
from autopar.base.errors import WorkerError, first_line
from autopar.cost_models import DeviceSpec, ProfileStore
from autopar.cost_models.detect import num_side_by_side
from autopar.cost_models.store import RegionTime
from autopar.lowering.types import TensorMeta
from autopar.runtime.machine.regions import RegionFunction, op_by_op
from autopar.runtime.state.wire import pack, unpack
from autopar.runtime.workers.group import WorkerGroup

REGION_LIMIT_S = 120.0
"""If compiling and measuring one region takes longer, it and all remaining ones are given up."""
SAMPLING_S, MIN_SAMPLES, MAX_SAMPLES = 0.3, 5, 25
"""Both ways of a region together are sampled for so long, within these numbers of samples."""
MAX_SETS, SETS_BYTES = 4, 128 << 20
"""Samples cycle through so many sets of operands, if they fit, so that few are in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionCall:
    """A region as a graph of its own, and its operands."""

    module: fx.GraphModule
    operands: tuple[TensorMeta, ...]

    def __str__(self) -> str:
        """All that its time depends on, as text."""
        place = {node: f"%{i}" for i, node in enumerate(self.module.graph.nodes)}
        lines = [
            f"{node.target if node.op == 'call_function' else node.op} "
            f"{fx.map_arg(node.args, place.__getitem__)} "
            f"{fx.map_arg(node.kwargs, place.__getitem__)}"
            for node in self.module.graph.nodes
        ]
        metas = [[str(m.dtype), m.shape, m.stride] for m in self.operands]
        return json.dumps([lines, metas])


class RegionService:
    """The workers' side of a measurement."""

    def __init__(self, rank: int, world_size: int) -> None:
        del rank, world_size

    def measure(self, call: bytes) -> RegionTime | str:
        """The region's times, or why it has none, on this process; all measure at the same time."""
        return measured(unpack(call), torch.device("cpu"), _largest)


def measured(
    call: RegionCall, device: torch.device, largest: Callable[[float], float] = float
) -> RegionTime | str:
    """Compile and measure a region on a device; returns why it has no times if that fails.

    ``largest`` waits for all processes that measure it, and returns the largest number of theirs.
    """
    try:
        function = RegionFunction(call.module, device, "a region")
        function.compile(call.operands)
        ways = (op_by_op(call.module).forward, function.run)
        failure = ""
    except Exception as error:  # whatever Inductor and its compilers raise
        failure = first_line(error)
    if largest(float(bool(failure))):
        return failure or "another process could not compile it"
    sets = _operands(call.operands, device)
    with torch.no_grad():
        longest_s = largest(sum(_seconds(way, sets[0], device) for way in ways for _ in range(2)))
        num = int(min(max(2 * SAMPLING_S / longest_s, MIN_SAMPLES), MAX_SAMPLES))
        times: tuple[list[float], list[float]] = ([], [])
        for sample in range(num):
            for way, found in zip(ways, times):
                largest(0.0)
                found.append(_seconds(way, sets[sample % len(sets)], device))
    eager_s, compiled_s = map(statistics.median, times)
    low, _, high = statistics.quantiles(times[1], n=4)
    return RegionTime(
        eager_s=eager_s, compiled_s=compiled_s, spread=(high - low) / compiled_s, num_samples=num
    )


def _largest(number: float) -> float:
    found = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def _operands(metas: Sequence[TensorMeta], device: torch.device) -> list[list[Tensor]]:
    """Sets of operands; floating-point numbers are positive, as variances are."""
    size = max(1, sum(meta.size_bytes for meta in metas))
    return [
        [_operand(meta, device) for meta in metas]
        for _ in range(max(1, min(MAX_SETS, SETS_BYTES // size)))
    ]


def _operand(meta: TensorMeta, device: torch.device) -> Tensor:
    made = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)
    return made.uniform_(0.5, 1.5) if meta.dtype.is_floating_point else made.zero_()


def _seconds(
    way: Callable[..., Sequence[Tensor]], operands: Sequence[Tensor], device: torch.device
) -> float:
    _synchronize(device)
    start_s = time.perf_counter()
    results = way(*operands)
    _synchronize(device)
    taken_s = time.perf_counter() - start_s
    del results
    return taken_s


def _synchronize(device: torch.device) -> None:
    if is_accelerator(device.type):
        module_of(device.type).synchronize()


def region_times(
    calls: Sequence[RegionCall],
    device: DeviceSpec,
    path: Path,
    *,
    limit_s: float,
    start_timeout_s: float,
    progress: Callable[[str], None],
) -> dict[str, RegionTime | str]:
    """The times of regions, by their text; measured if the store at ``path`` lacks them.

    New measurements begin for up to ``limit_s``, in the order given; later regions get the reason.
    """
    found: dict[str, RegionTime | str] = {}
    with ProfileStore(path, device) as store:
        for call in calls:
            if (known := store.region(str(call))) is not None:
                found[str(call)] = known
        missing = {str(call): call for call in calls if str(call) not in found}
        if not missing:
            return found
        progress(f"compile and measure up to {len(missing)} regions, at most {limit_s:.0f} s")
        found |= dict.fromkeys(missing, f"not measured within {limit_s:g} s (profile_limit_s)")
        end_s = time.monotonic() + limit_s
        try:
            with _measuring(device, start_timeout_s) as measure:
                for text, call in missing.items():
                    if time.monotonic() > end_s:
                        break
                    found[text] = times = measure(call)
                    if isinstance(times, RegionTime):
                        store.put_region(text, times)
        except WorkerError as error:
            warnings.warn(f"regions that were left are not measured: {error}", stacklevel=3)
    return found


@contextlib.contextmanager
def _measuring(
    device: DeviceSpec, start_timeout_s: float
) -> Iterator[Callable[[RegionCall], RegionTime | str]]:
    """A function that measures a region as it runs in training."""
    if device.kind != "cpu":
        here = with_index(torch.device(device.kind))
        yield lambda call: measured(call, here)
        return
    count = num_side_by_side(device)
    workers = WorkerGroup(
        count,
        service=RegionService,
        threads_per_worker=device.num_threads,
        start_timeout_s=start_timeout_s,
    )

    def measure(call: RegionCall) -> RegionTime | str:
        replies: list[RegionTime | str] = workers.call(
            "measure", pack(call), timeout_s=REGION_LIMIT_S
        )
        times = [reply for reply in replies if isinstance(reply, RegionTime)]
        if len(times) < len(replies):
            return next(reply for reply in replies if isinstance(reply, str))
        share = count / device.num_processes
        return RegionTime(
            eager_s=max(t.eager_s for t in times) / share,
            compiled_s=max(t.compiled_s for t in times) / share,
            spread=max(t.spread for t in times),
            num_samples=times[0].num_samples,
        )

    with workers:
        yield measure
