"""The types of work: operations and bytes of each direction of a call.

Matrix products, convolutions, attention and recurrent layers count a multiply-add as two operations
and ignore the addition of a bias, as ``torch.utils.flop_counter`` does. Element-wise work counts
nominal operations per element. Bytes are reads and writes of main memory, each tensor once per
kernel.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch

from autopar.cost_models.calls import OpCall, TensorSpec
from autopar.cost_models.shapes import outputs


class Family(StrEnum):
    """Families of operations whose kernels reach similar fractions of a device's peaks."""

    MATMUL = "matmul"
    CONVOLUTION = "convolution"
    DEPTHWISE = "depthwise"
    ATTENTION = "attention"
    RECURRENT = "recurrent"
    NORMALIZATION = "normalization"
    SOFTMAX = "softmax"
    REDUCTION = "reduction"
    POINTWISE = "pointwise"
    RANDOM = "random"
    INDEXING = "indexing"
    COPY = "copy"
    CREATION = "creation"
    VIEW = "view"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixShape:
    """``batch`` products of an m x k with a k x n matrix.

    ``winograd_m`` counts the outputs of a 3x3 convolution of stride 1 in whole tiles of 2 x 2, as
    Winograd's products compute them (0: not such a convolution), ``winograd_large_m`` in whole
    tiles of 4 x 4.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    winograd_m: int = 0
    winograd_large_m: int = 0

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Operations, bytes and kernels of one direction of a call; no kernels means no work."""

    flops: int = 0
    size_bytes: int = 0
    num_kernels: int = 0
    matrix: MatrixShape | None = None

    def __add__(self, other: "Work") -> "Work":
        return Work(
            flops=self.flops + other.flops,
            size_bytes=self.size_bytes + other.size_bytes,
            num_kernels=self.num_kernels + other.num_kernels,
            matrix=self.matrix or other.matrix,
        )


NO_WORK = Work()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpWork:
    """The work of a call in three directions. ``dtype`` is that of the arithmetic."""

    family: Family
    dtype: torch.dtype
    forward: Work
    input_grad: Work = NO_WORK
    weight_grad: Work = NO_WORK


def arithmetic_dtype(call: OpCall) -> torch.dtype:
    """The real dtype of the first floating-point or complex tensor; float32 if there is none."""
    dtypes = (spec.dtype for spec in call.tensors())
    found = next((d for d in dtypes if d.is_floating_point or d.is_complex), torch.float32)
    return found.to_real()


def output_bytes(call: OpCall) -> int:
    """Bytes of all outputs."""
    return sum(out.size_bytes for out in outputs(call))


def sides(specs: tuple[TensorSpec, ...]) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """The tensors with input gradients, and those with weight gradients."""
    wanted = [
        s for s in specs if s.requires_grad and (s.dtype.is_floating_point or s.dtype.is_complex)
    ]
    return [s for s in wanted if not s.is_parameter], [s for s in wanted if s.is_parameter]


def generic(call: OpCall, family: Family, *, per_element: int, saved: bool = True) -> OpWork:
    """One kernel that reads the inputs and writes the outputs, and one more per gradient."""
    specs = call.tensors()
    outs = outputs(call)
    out_bytes = sum(out.size_bytes for out in outs)
    elements = max((s.num_elements for s in (*specs, *outs)), default=0)
    forward = Work(
        flops=per_element * elements,
        size_bytes=sum(s.size_bytes for s in specs) + out_bytes,
        num_kernels=1,
    )

    def gradient(side: list[TensorSpec]) -> Work:
        reads = out_bytes * (2 if saved else 1)
        return Work(
            flops=per_element * elements * len(side),
            size_bytes=sum(reads + s.size_bytes for s in side),
            num_kernels=len(side),
        )

    inputs, weights = sides(specs)
    return OpWork(
        family=family,
        dtype=arithmetic_dtype(call),
        forward=forward,
        input_grad=gradient(inputs),
        weight_grad=gradient(weights),
    )
