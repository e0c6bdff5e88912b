"""The optimizer's update of one tensor of weights, as a call to be priced like any other.

It is AdamW's, fused: one kernel that reads weights, gradient and two tensors of state, and writes
all but the gradient.
"""

import torch
from autopar.cost_models.calls import OpCall, TensorSpec
from autopar.cost_models.work import Family, OpWork, Work

OPTIMIZER_STATES = 2
"""Tensors of optimizer state a parameter has."""
UPDATE_PASSES = 2 * (2 + OPTIMIZER_STATES) - 1
"""How often an update goes through memory as large as the weights."""
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
            size_bytes=UPDATE_PASSES * weights.size_bytes,
            num_kernels=1,
        ),
    )
