"""Measurement of a call on the local device: forward, input gradients and weight gradients.

Each direction cycles through several sets of tensors, enough to exceed the cache, so that no run
finds its data in the cache from the previous run; as many results are kept alive, so that no run
writes to the same memory as the last one, since a step keeps its results. After a warm-up, blocks
of runs that are long enough for the clock are timed until there are enough samples or the time is
up; the result is the median. Samples with page faults are ignored if there are others, because a
step reuses the memory of the previous one. If the spread is too large, the measurement is repeated;
the remaining spread is reported with the time.
"""

import resource
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from autopar.cost_models.calls import OpCall
from autopar.cost_models.estimate import CostError, NotNowError, OpEstimate
from autopar.cost_models.hardware import DeviceSpec
from autopar.cost_models.inputs import RealCall, normal_like
from autopar.cost_models.shapes import outputs
from autopar.cost_models.store import OpTime


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureLimits:
    """Limits on the time and effort of a measurement.

    Each direction is sampled ``max_samples`` times or for ``max_direction_s``, whichever comes
    first, but at least three times. Blocks last ``block_s`` or one run. If the spread exceeds
    ``max_spread``, it is measured again, up to ``max_repeats`` times. A call longer than ``long_s``
    is run twice: the second time is the result, and its distance from the first the spread. There
    are up to ``min_sets`` sets of tensors, and up to ``max_sets`` if they take no more than
    ``sets_bytes`` in total.
    """

    max_direction_s: float = 0.04
    max_samples: int = 15
    block_s: float = 0.0005
    max_spread: float = 0.2
    max_repeats: int = 2
    min_sets: int = 4
    max_sets: int = 64
    sets_bytes: int = 128 << 20
    long_s: float = 0.1


_NUM_TRIES = 9
"""Limit on samples past the time limit, taken to have three without page faults."""
_ASIDE_S = 0.08
"""Rough overhead of measuring a call, besides its runs.

It covers making the tensors, messages to the workers, and repeated noisy measurements.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A median in seconds, the interquartile range relative to it, and the number of samples."""

    median_s: float
    spread: float
    num_samples: int


_KEEPS_WORKSPACE = frozenset({"lstm"})
"""Operations whose forward pass depends on whether there will be a backward pass."""
_ONE_BACKWARD = _KEEPS_WORKSPACE | {
    "_native_batch_norm_legit_functional", "batch_norm", "group_norm", "layer_norm",
    "native_batch_norm", "native_group_norm", "native_layer_norm", "prelu", "rms_norm",
}  # fmt: skip
"""Operations with one kernel for the gradients of inputs and of parameters.

The weight gradient is priced by the extra time of both over the inputs' alone.
"""

NOTHING = Sampled(median_s=0.0, spread=0.0, num_samples=0)


Together = Callable[[bool], bool]
"""Waits for all processes that measure the same call; returns whether any of them passes True."""


def _alone(wish: bool) -> bool:
    return wish


def measure_call(
    call: OpCall, device: DeviceSpec, limits: MeasureLimits, together: Together = _alone
) -> OpTime:
    """Measured times of ``call``; raises CostError if it cannot run here.

    Processes that measure it concurrently pass ``together``: they take each sample at the same
    time, and repeat it if any of them has to. After an error in one of them, the others stop
    waiting only if ``together`` detects it.
    """
    target = torch.device(device.kind)
    num_sets = _num_sets(call, device, limits)
    try:
        sets = [RealCall(call, target, seed) for seed in range(num_sets)]
        for tensor in (t for real in sets for t in (*real.inputs, *real.parameters)):
            tensor.requires_grad_(True)  # operators choose kernels by it
        with torch.set_grad_enabled(call.name in _KEEPS_WORKSPACE):
            forward = _sample(sets, target, limits, together)
        input_grad = _sample_gradient(sets, ("inputs",), target, limits, together)
        if call.name in _ONE_BACKWARD and input_grad.num_samples:
            sides = "inputs", "parameters"
            both = _sample_gradient(sets, sides, target, limits, together)
            beside_s = max(both.median_s - input_grad.median_s, 0.0)
            weight_grad = replace(both, median_s=beside_s)
        else:
            weight_grad = _sample_gradient(sets, ("parameters",), target, limits, together)
    except Exception as error:
        if _lacks_memory(error):
            raise NotNowError(
                f"{call.target} does not fit the memory of {device.name}: {error}"
            ) from error
        # What torch (no kernel for a dtype) or a user's operator refuses is priced without # a
        # measurement.
        raise CostError(f"{call.target} cannot be measured on {device.name}: {error}") from error
    parts = [part for part in (forward, input_grad, weight_grad) if part.num_samples]
    return OpTime(
        forward_s=forward.median_s,
        input_grad_s=input_grad.median_s,
        weight_grad_s=weight_grad.median_s,
        spread=max(part.spread for part in parts),
        num_samples=min(part.num_samples for part in parts),
    )


def _lacks_memory(error: Exception) -> bool:
    """Whether an error is out-of-memory; torch's CPU allocator says so only in its message."""
    is_known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return is_known or "DefaultCPUAllocator" in str(error)


def measuring_s(expected: OpEstimate, share: float, limits: MeasureLimits) -> float:
    """The approximate time of `measure_call` for a call that takes ``share`` of ``expected``."""
    directions = (expected.forward_s, expected.input_grad_s, expected.weight_grad_s)
    return _ASIDE_S + sum(_direction_s(share * once, limits) for once in directions if once)


def _direction_s(once_s: float, limits: MeasureLimits) -> float:
    if once_s > limits.long_s:
        return 2 * once_s
    block_s = max(once_s, limits.block_s)
    num_samples = min(limits.max_samples, max(3, limits.max_direction_s / block_s))
    return (limits.min_sets + 1) * once_s + num_samples * block_s


def _num_sets(call: OpCall, device: DeviceSpec, limits: MeasureLimits) -> int:
    tensors = (*call.tensors(), *outputs(call))
    one_bytes = max(1, sum(t.size_bytes for t in tensors))
    if 4 * one_bytes > device.memory_bytes:
        raise NotNowError(
            f"{call.target} moves {one_bytes} bytes, too many to measure in the "
            f"{device.memory_bytes} bytes of {device.name}."
        )
    wanted = 1 + 2 * device.cache_bytes // one_bytes
    affordable = device.memory_bytes // (8 * one_bytes)
    most = min(limits.max_sets, max(limits.min_sets, limits.sets_bytes // one_bytes))
    return max(1, min(wanted, most, affordable))


def _sample_gradient(
    sets: Sequence[RealCall],
    sides: Sequence[str],
    device: torch.device,
    limits: MeasureLimits,
    together: Together,
) -> Sampled:
    """Sample the gradients of ``sides``: of the inputs, of the parameters, or both."""
    leaves = [[tensor for side in sides for tensor in getattr(real, side)] for real in sets]
    found = [_gradient(real, of_set) for real, of_set in zip(sets, leaves)]
    runs = [run for run in found if run is not None]
    if not runs:
        return NOTHING
    sampled = _sample(runs, device, limits, together)
    return Sampled(
        median_s=max(sampled.median_s - _engine_overhead_s(device), 0.0),
        spread=sampled.spread,
        num_samples=sampled.num_samples,
    )


def _gradient(real: RealCall, leaves: list[torch.Tensor]) -> Callable[[], Any] | None:
    """A function that runs the backward pass of a set; None if nothing has a gradient."""
    if not leaves:
        return None
    result = real()
    every = result if isinstance(result, (tuple, list)) else (result,)
    outs = tuple(out for out in every if isinstance(out, torch.Tensor) and out.requires_grad)
    if not outs:
        return None
    grads = tuple(normal_like(out) for out in outs)
    return lambda: torch.autograd.grad(outs, leaves, grads, retain_graph=True, allow_unused=True)


@lru_cache(maxsize=8)
def _engine_overhead_s(device: torch.device) -> float:
    """The overhead of a call of the autograd engine, which traced backward graphs do not have."""
    leaf = torch.ones(4, device=device, requires_grad=True)
    out = leaf.view(4)
    grad = torch.ones(4, device=device)
    run = _repeat(lambda: torch.autograd.grad(out, leaf, grad, retain_graph=True), 100)
    if device.type == "cuda":
        # The engine runs ahead of a GPU, so its overhead overlaps with the work.
        return 0.0
    return min(_timed(run, device) for _ in range(5)) / 100


def _sample(
    runs: Sequence[Callable[[], Any]],
    device: torch.device,
    limits: MeasureLimits,
    together: Together = _alone,
) -> Sampled:
    first_s = _timed(runs[0], device)
    if first_s > limits.long_s:
        return _steady(_pairs(first_s, runs[0], device), limits, together)
    for run in runs[1:]:
        run()
    once_s = _timed(_repeat(runs[-1], 1), device)
    num_inner = max(1, min(1000, round(limits.block_s / max(once_s, 1e-7))))
    return _steady(lambda: _one_sample(runs, num_inner, device, limits), limits, together)


def _steady(sample: Callable[[], Sampled], limits: MeasureLimits, together: Together) -> Sampled:
    """The sample with the least spread, repeated while that is too large."""
    found: list[Sampled] = []
    best = NOTHING
    while len(found) <= limits.max_repeats and together(
        not found or best.spread > limits.max_spread
    ):
        found.append(sample())
        best = min(found, key=lambda sampled: sampled.spread)
    return best


def _pairs(first_s: float, run: Callable[[], Any], device: torch.device) -> Callable[[], Sampled]:
    """Samples of one run each, whose spread is the distance from the previous run."""
    last_s = first_s

    def sample() -> Sampled:
        nonlocal last_s
        before_s, last_s = last_s, _timed(run, device)
        return Sampled(median_s=last_s, spread=abs(last_s - before_s) / last_s, num_samples=1)

    return sample


def _one_sample(
    runs: Sequence[Callable[[], Any]], num_inner: int, device: torch.device, limits: MeasureLimits
) -> Sampled:
    every: list[float] = []
    undisturbed: list[float] = []
    end = time.perf_counter() + limits.max_direction_s
    position = 0
    kept: deque[Any] = deque(maxlen=len(runs))
    while len(every) < limits.max_samples:
        enough = len(undisturbed) >= 3 or len(every) >= _NUM_TRIES
        if enough and time.perf_counter() > end:
            break
        block = [runs[(position + i) % len(runs)] for i in range(num_inner)]
        position += num_inner
        faults_before = _num_page_faults()
        every.append(_timed(_all_of(block, kept), device) / num_inner)
        if _num_page_faults() == faults_before:
            undisturbed.append(every[-1])
    samples = undisturbed if len(undisturbed) >= 3 else every
    median_s = statistics.median(samples)
    low, _, high = statistics.quantiles(samples, n=4)
    spread = (high - low) / median_s if median_s else 0.0
    return Sampled(median_s=median_s, spread=spread, num_samples=len(samples))


def _num_page_faults() -> int:
    """The number of minor page faults of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _all_of(block: Sequence[Callable[[], Any]], kept: deque[Any]) -> Callable[[], None]:
    def run() -> None:
        for function in block:
            kept.append(function())

    return run


def _repeat(function: Callable[[], Any], times: int) -> Callable[[], None]:
    return _all_of([function] * times, deque(maxlen=1))


def _timed(function: Callable[[], None], device: torch.device) -> float:
    """Seconds of one run, with the device's queue empty before and after."""
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
