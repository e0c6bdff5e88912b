"""Model FLOPs, tokens and samples of a step, for model FLOP utilisation and throughput.

In: an analysed graph and a device. Out: the floating-point operations of the products (matrix
products, convolutions, attention, recurrent layers) of a forward and backward pass over the whole
batch, and the seconds that they take at the peak rate of their units. By the usual convention,
recomputation (of activations, or of scores in fused attention) does not count, and causal attention
counts in full.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cost_models import CostError, DeviceSpec, OpCall
from autopar.cost_models.compute import is_product, matrix_units, peak_flops_per_s
from autopar.cost_models.op_work import work
from autopar.cost_models.work import Family
from autopar.ir.choice import Choice
from autopar.ir.graph import Op
from autopar.ir.mesh import Mesh
from autopar.pricing.local_calls import distinct_ops, local_call
from autopar.sharding.strategy import Analysis

_ONE_DEVICE = Mesh(("x",), (1,))
_WHOLE = Choice((None,))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """The work of a step over the whole batch; ``num_tokens`` is 0 without token ids.

    ``peak_s``: its seconds on one device at peak rate. ``flops_of_units``: its operations by the
    field of `PeakFlops` with the rate of the units that they run on.
    """

    flops: int
    flops_of_units: Mapping[str, int]
    peak_s: float
    num_samples: int
    num_tokens: int


def whole_call(analysis: Analysis, op: Op) -> OpCall:
    """The call of an op on one device, at its global shapes."""
    needs = analysis.needs(op, _WHOLE, _ONE_DEVICE)
    supplies = analysis.supplies(op, _WHOLE, _ONE_DEVICE)
    return local_call(analysis, op, _WHOLE, needs, supplies, _ONE_DEVICE)


def counted_calls(analysis: Analysis) -> list[tuple[OpCall, int]]:
    """All distinct calls of ops that are not fixed, on one device, with their counts."""
    return [(whole_call(analysis, op), count) for op, count in distinct_ops(analysis)]


def model_work(analysis: Analysis, device: DeviceSpec) -> ModelWork:
    """The work of a step, independent of the strategy; see the module's docstring."""
    flops_of, peak_s = Counter[str](), 0.0
    for call, count in counted_calls(analysis):
        try:
            todo = work(call)
        except CostError:
            continue  # the plan lists it as priced by memory traffic
        if not is_product(todo):
            continue
        backward = todo.input_grad.flops + todo.weight_grad.flops
        if todo.family is Family.ATTENTION and backward:
            backward = 2 * todo.forward.flops
        flops = count * (todo.forward.flops + backward)
        flops_of[matrix_units(todo, device)] += flops
        peak_s += flops / peak_flops_per_s(todo, device)
    return ModelWork(
        flops=flops_of.total(),
        flops_of_units=flops_of,
        peak_s=peak_s,
        num_samples=analysis.batch_size,
        num_tokens=_num_tokens(analysis),
    )


def _num_tokens(analysis: Analysis) -> int:
    """Size of the first two-dimensional integer input, taken as token ids."""
    shapes = [
        value.shape
        for value in (analysis.graph.values[i] for i in analysis.graph.inputs)
        if len(value.shape) == 2 and not value.dtype.is_floating_point
    ]
    return math.prod(shapes[0]) if shapes else 0
