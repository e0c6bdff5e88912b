"""The optimizer's update of one tensor of weights, as a call to be priced like any other.

The call is AdamW's, fused: one kernel that reads weights, gradient and two tensors of state, and
writes all but the gradient. Other updates take as much of its time as they move of its memory.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autopar.cost_models.calls import OpCall, TensorSpec
from autopar.cost_models.hardware import DeviceSpec
from autopar.cost_models.work import Family, OpWork, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """What prices know of an optimizer: how many tensors of state, as large as it, a parameter has,
    and whether an update is one kernel.

    While an update runs it holds other tensors: as large as all parameters that it updates at once,
    ``temporaries_of_all`` times over; as the one that it is at, ``temporaries_of_one`` times; and
    as the one before that, ``temporaries_before`` times. ``is_joint`` where it updates all
    parameters of a device at once in any case.
    """

    num_states: int
    is_fused: bool
    temporaries_of_all: float = 0.0
    temporaries_of_one: float = 0.0
    temporaries_before: float = 0.0
    is_joint: bool = False

    @property
    def num_passes(self) -> int:
        """How often an update goes through memory as large as the weights.

        Weights and gradient are read and the weights written; each state is read and written. By
        kernels of one operation each, a state and what is made of it take about eight: torch's SGD
        with momentum makes 8 passes in all, RMSprop 13, Adam 18 and AdamW 20.
        """
        return 3 + (2 if self.is_fused else 8) * self.num_states

    def workspace_bytes(self, sizes_bytes: Sequence[int]) -> int:
        """What an update of parameters of these sizes, in this order, needs while it runs."""
        of_one = max(
            (
                self.temporaries_of_one * size + self.temporaries_before * before
                for before, size in itertools.pairwise([0, *sizes_bytes])
            ),
            default=0.0,
        )
        return round(self.temporaries_of_all * sum(sizes_bytes) + of_one)


FUSED_ADAMW = OptimizerSpec(num_states=2, is_fused=True)
"""The optimizer of an `update_call`."""


def adamw(device: DeviceSpec) -> OptimizerSpec:
    """AdamW as the runtime runs it: by torch's fused kernel on CPUs, by kernels that update many
    tensors at once elsewhere."""
    if device.kind == "cpu":
        return FUSED_ADAMW
    return OptimizerSpec(num_states=FUSED_ADAMW.num_states, is_fused=False, temporaries_of_all=1.0)


_OPERATIONS = 16
_OPTIONS = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "weight_decay": 1e-2,
    "eps": 1e-8,
    "amsgrad": False,
    "maximize": False,
}


def update_call(num_elements: int, dtype: torch.dtype) -> OpCall:
    """The update of ``num_elements`` weights."""
    part = [TensorSpec((num_elements,), dtype)]
    steps = [TensorSpec((), torch.float32)]
    return OpCall.of("aten._fused_adamw_.default", [part, part, part, part, [], steps], _OPTIONS)


def update_work(call: OpCall) -> OpWork:
    """Operations and bytes of an `update_call`."""
    (weights,) = call.argument(0, "self")
    return OpWork(
        family=Family.POINTWISE,
        dtype=weights.dtype,
        forward=Work(
            flops=_OPERATIONS * weights.num_elements,
            size_bytes=FUSED_ADAMW.num_passes * weights.size_bytes,
            num_kernels=1,
        ),
    )
