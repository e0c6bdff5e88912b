"""The optimizer's update of a parameter, as a call that is priced like any other.

The call is that of fused AdamW: one kernel that reads weights, gradient and two tensors of state,
and writes all but the gradient. Other updates are scaled by their memory traffic.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from autopar.cost_models.calls import OpCall, TensorSpec
from autopar.cost_models.hardware import DeviceSpec
from autopar.cost_models.work import Family, OpWork, Work


class UpdateScope(StrEnum):
    """The tensors that the update of one element reads: its own element of gradient and state
    (Adam), the whole parameter (Muon, Adafactor), or all parameters of the model."""

    ELEMENT = "element"
    PARAMETER = "parameter"
    MODEL = "model"


class Side(StrEnum):
    """A side of a matrix."""

    SHORT = "short"
    LONG = "long"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateProduct:
    """A product of two matrices in the update of a matrix, as Muon's orthogonalization makes:
    ``[rows, inner] @ [inner, columns]``, ``num_times`` in each update."""

    rows: Side
    inner: Side
    columns: Side
    dtype: torch.dtype
    num_times: int

    def call(self, shape: tuple[int, ...]) -> OpCall:
        """The call for a parameter of this shape, ``[_, _]``."""
        sizes = {Side.SHORT: min(shape), Side.LONG: max(shape)}
        rows, inner, columns = (sizes[side] for side in (self.rows, self.inner, self.columns))
        operands = TensorSpec((rows, inner), self.dtype), TensorSpec((inner, columns), self.dtype)
        return OpCall.of("aten.mm.default", operands)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """The properties of an optimizer that prices and memory depend on.

    ``num_states``: state tensors of a parameter's size. ``is_fused``: an update is one kernel. An
    update also holds temporaries: ``temporaries_of_all`` times the size of all parameters updated
    at once, ``temporaries_of_one`` times that of the current one, and ``temporaries_before`` times
    that of the previous one. ``is_joint``: it always updates all parameters of a device at once.
    ``is_clipped``: gradients are scaled before, one after the other, in new memory.
    ``scope``: a parameter is stored whole unless it is ``ELEMENT``, and all on each device if it is
    ``MODEL``. ``products``: those of each update of a matrix.
    """

    num_states: int
    is_fused: bool
    temporaries_of_all: float = 0.0
    temporaries_of_one: float = 0.0
    temporaries_before: float = 0.0
    is_joint: bool = False
    is_clipped: bool = False
    scope: UpdateScope = UpdateScope.ELEMENT
    products: tuple[UpdateProduct, ...] = ()

    @property
    def num_passes(self) -> int:
        """The memory traffic of an update, in multiples of the size of the weights.

        Weights and gradient are read and the weights written; each state is read and written. With
        kernels of one operation each, a state takes about eight passes: torch's SGD with momentum
        makes 8 passes in total, RMSprop 13, Adam 18 and AdamW 20.
        """
        return 3 + (2 if self.is_fused else 8) * self.num_states

    def workspace_bytes(self, sizes_bytes: Sequence[int]) -> int:
        """Bytes of temporaries while parameters of these sizes are updated in this order, or while
        their gradients are clipped before."""
        of_one = max(
            (
                self.temporaries_of_one * size + self.temporaries_before * before
                for before, size in itertools.pairwise([0, *sizes_bytes])
            ),
            default=0.0,
        )
        clipped = max(sizes_bytes, default=0) if self.is_clipped else 0
        return max(clipped, round(self.temporaries_of_all * sum(sizes_bytes) + of_one))


FUSED_ADAMW = OptimizerSpec(num_states=2, is_fused=True)
"""The optimizer of `update_call`."""


def adamw(device: DeviceSpec) -> OptimizerSpec:
    """AdamW as in the runtime: torch's fused kernel on CPUs, multi-tensor kernels elsewhere."""
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
    """The call that updates ``num_elements`` weights."""
    part = [TensorSpec((num_elements,), dtype)]
    steps = [TensorSpec((), torch.float32)]
    return OpCall.of("aten._fused_adamw_.default", [part, part, part, part, [], steps], _OPTIONS)


def update_work(call: OpCall) -> OpWork:
    """The work of an `update_call`."""
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
