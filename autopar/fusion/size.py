"""How many models of a kind fit one device as an array, and how many pay best: no trial runs.

In: a model, a cluster of one device, example inputs. Out: the largest array by the bytes that its
lowered program holds, and the price of a step a model at every size that was looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.base.errors import ConstraintError, InputError
from autopar.cost_models import Cluster, ComputeModel
from autopar.frontend.capture import capture
from autopar.frontend.targets import LossFn
from autopar.fusion.fuse import fuse
from autopar.planning.constraints import MemoryBudget
from autopar.planning.planner import make_planned
from autopar.planning.space import space_of
from autopar.runtime.state.optimizers import MakeOptimizer, optimizer_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySize:
    """An array of ``num_models`` on one device: bytes of tensors, and seconds of a step."""

    num_models: int
    peak_bytes: int
    step_time_s: float

    @property
    def time_of_a_model_s(self) -> float:
        return self.step_time_s / self.num_models


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestArray:
    """The ``largest`` array that fits, and that of those looked at which ``pays_best``: the one
    with the least time of a step a model."""

    largest: ArraySize
    pays_best: ArraySize
    looked_at: tuple[ArraySize, ...]


def largest_array(
    model: nn.Module,
    cluster: Cluster,
    example_inputs: Any,
    *,
    loss_fn: LossFn | None = None,
    optimizer: MakeOptimizer | None = None,
    compute: ComputeModel | None = None,
    memory_bytes: int | None = None,
    at_most: int = 1024,
) -> LargestArray:
    """The largest array of models like ``model`` on the cluster's one device.

    ``memory_bytes``: a budget for tensors below the device's own memory. ``model`` may live on the
    meta device. Raises InputError for a cluster of several devices, and where not even one fits.
    """
    if cluster.num_devices != 1:
        raise InputError(
            f"the cluster has {cluster.num_devices} devices; the largest array is asked for one "
            "device: pass Cluster.preset(name, nodes=1, devices_per_node=1)"
        )
    captured = capture(model, example_inputs, loss_fn=loss_fn)
    spec = optimizer_spec(optimizer, cluster.device)
    budgets = () if memory_bytes is None else (MemoryBudget(memory_bytes),)

    def sized(num: int) -> ArraySize | None:
        array = fuse([captured] * num, [model] * num, shares_batch=True).captured
        try:
            prediction = make_planned(
                array, cluster, space_of(1), constraints=budgets, compute=compute, optimizer=spec
            ).plan.prediction
        except ConstraintError:
            return None
        return ArraySize(
            num_models=num,
            peak_bytes=sum(prediction.memory_bytes.values()),
            step_time_s=prediction.step_time_s,
        )

    found = _Search(sized, at_most).run()
    if not found:
        room = memory_bytes or cluster.usable_memory_bytes
        raise InputError(
            f"not even one such model trains within {room:,} bytes on {cluster.device.name}; take "
            "a smaller batch, or a larger memory_bytes"
        )
    sizes = tuple(found[num] for num in sorted(found))
    return LargestArray(
        largest=sizes[-1],
        pays_best=min(sizes, key=lambda s: s.time_of_a_model_s),
        looked_at=sizes,
    )


class _Search:
    """Doubles while it fits, then halves the gap between what fits and what does not."""

    def __init__(self, sized: Callable[[int], ArraySize | None], at_most: int) -> None:
        self.sized, self.at_most = sized, at_most
        self.fitting: dict[int, ArraySize] = {}

    def run(self) -> dict[int, ArraySize]:
        """Every size that was tried and fits, the largest one among them."""
        num, too_many = 1, self.at_most + 1
        while num < too_many and self._fits(num):
            num *= 2
        too_many = min(num, too_many)
        low = max(self.fitting, default=0)
        while too_many - low > 1:
            middle = (low + too_many) // 2
            if self._fits(middle):
                low = middle
            else:
                too_many = middle
        return self.fitting

    def _fits(self, num: int) -> bool:
        size = self.sized(num)
        if size is not None:
            self.fitting[num] = size
        return size is not None
