"""How many models of a kind fit one device as an array, and which number is fastest per model.

Input: a model, a cluster of one device, and example inputs. Output: the largest array, by the bytes
that its lowered program holds, and the predicted step time of every size tried. No model is run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autopar.base.errors import ConstraintError, InputError
from autopar.cost_models import Cluster, ComputeModel
from autopar.frontend.capture import Captured, capture
from autopar.frontend.targets import LossFn
from autopar.fusion.fuse import fuse
from autopar.fusion.searchers import check_counts
from autopar.fusion.stacked import state_of
from autopar.planning.constraints import MemoryBudget
from autopar.planning.planner import Planned, make_planned
from autopar.planning.space import space_of
from autopar.runtime.state.optimizers import MakeOptimizer, optimizer_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySize:
    """Predicted memory and time of an array of ``num_models`` models on one device.

    ``peak_bytes``: peak memory of the device's tensors. ``step_time_s``: seconds of one training
    step of all models.
    """

    num_models: int
    peak_bytes: int
    step_time_s: float

    @property
    def time_of_a_model_s(self) -> float:
        """Seconds of a step divided by the number of models."""
        return self.step_time_s / self.num_models


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestArray:
    """The result of `largest_array`.

    ``largest``: the largest array that fits. ``pays_best``: the array with the least step time per
    model among those tried. ``looked_at``: every size tried that fits, in ascending order.
    """

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
    """Find the largest array of models like ``model`` that fits the cluster's one device.

    Arguments:

    * ``model``: the model; it may be on the meta device.
    * ``cluster``: a cluster of one device.
    * ``example_inputs``: one batch, shared by all models: a tuple of the model's arguments, or a
      mapping.
    * ``loss_fn``: the loss, where the model does not return it.
    * ``optimizer``: the optimizer of every model, whose states count as memory; by default AdamW.
    * ``compute``: the cost model of ops; by default the roofline of the cluster's device.
    * ``memory_bytes``: a budget for tensors in bytes, below the memory of the device.
    * ``at_most``: the largest number of models tried.

    Raises InputError for a cluster of several devices, for an ``at_most`` that is no whole number
    from 1 on, and where not even one model fits.
    """
    check_counts(at_most=at_most)
    if not isinstance(cluster, Cluster):
        raise InputError(
            f"cluster must be an autopar.Cluster, got {cluster!r}; write "
            "autopar.Cluster.preset('a100-80', nodes=1, devices_per_node=1) or Cluster.detect(1)"
        )
    if cluster.num_devices != 1:
        raise InputError(
            f"the cluster has {cluster.num_devices} devices; the largest array is asked for one "
            "device: pass Cluster.preset(name, nodes=1, devices_per_node=1)"
        )
    captured = capture(model, example_inputs, loss_fn=loss_fn, full_masks=())
    spec = optimizer_spec(optimizer, cluster.device)
    constraints = () if memory_bytes is None else (MemoryBudget(memory_bytes),)
    plan = functools.partial(
        make_planned, cluster=cluster, space=space_of(1, num_microbatches=1),
        constraints=constraints, compute=compute, optimizer=spec,
    )  # fmt: skip
    state = state_of(model, loss_fn)
    found = _Search(lambda num: _sized(state, captured, num, plan), at_most).run()
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


def _sized(
    state: Mapping[str, Tensor], captured: Captured, num: int, plan: Callable[[Captured], Planned]
) -> ArraySize | None:
    """The prediction for an array of ``num`` models; None where it does not fit."""
    array = fuse([captured] * num, [state] * num, shares_batch=True).captured
    try:
        prediction = plan(array).plan.prediction
    except ConstraintError:
        return None
    return ArraySize(
        num_models=num,
        peak_bytes=sum(prediction.memory_bytes.values()),
        step_time_s=prediction.step_time_s,
    )


class _Search:
    """Doubles the number of models while they fit, then bisects between fitting and not fitting."""

    def __init__(self, sized: Callable[[int], ArraySize | None], at_most: int) -> None:
        self.sized, self.at_most = sized, at_most
        self.fitting: dict[int, ArraySize] = {}

    def run(self) -> dict[int, ArraySize]:
        """Every size that was tried and fits, including the largest one."""
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
