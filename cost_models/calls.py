"""A call of an operation as a value: what is priced, measured and stored.

A call names an overload of a torch operation and its arguments, with every tensor replaced by its
``TensorSpec``. It is hashable, holds no storage, and has everything that its cost depends on.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch

from autopar.cost_models.estimate import CostError


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The properties of a tensor that a cost depends on.

    ``stride`` None means contiguous. ``is_parameter`` marks weights: theirs are weight gradients,
    all others input gradients.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    stride: tuple[int, ...] | None = None
    requires_grad: bool = False
    is_parameter: bool = False

    def __post_init__(self) -> None:
        if min(self.shape, default=0) < 0:
            raise CostError(
                f"a tensor of shape {self.shape}: a size is at least 0. Write the actual size "
                "instead of -1."
            )
        if self.stride is not None and len(self.stride) != len(self.shape):
            raise CostError(f"a tensor of shape {self.shape} cannot have stride {self.stride}.")

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides, also if the tensor is contiguous."""
        return contiguous_stride(self.shape) if self.stride is None else self.stride

    @property
    def is_contiguous(self) -> bool:
        if self.stride is None:
            return True
        expected = contiguous_stride(self.shape)
        return all(
            size == 1 or have == want for size, have, want in zip(self.shape, self.stride, expected)
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of the distinct elements; an expanded dimension (stride 0) counts once."""
        if self.stride is None:
            return self.num_elements * self.dtype.itemsize
        distinct = prod(
            size for size, stride in zip(self.shape, self.stride) if stride != 0 or size == 0
        )
        return distinct * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: torch.Tensor, *, is_parameter: bool | None = None) -> "TensorSpec":
        """The spec of a real, fake or meta tensor; raises CostError if a size is symbolic."""
        if not all(type(size) is int for size in tensor.shape):
            raise CostError(f"a tensor of symbolic shape {tuple(tensor.shape)} has no cost.")
        shape = tuple(tensor.shape)
        stride = tuple(tensor.stride())
        if is_parameter is None:
            is_parameter = isinstance(tensor, torch.nn.Parameter)
        return cls(
            shape=shape,
            dtype=tensor.dtype,
            stride=None if stride == contiguous_stride(shape) else stride,
            requires_grad=tensor.requires_grad,
            is_parameter=is_parameter,
        )


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of ``shape``."""
    stride = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        stride[dim] = stride[dim + 1] * max(shape[dim + 1], 1)
    return tuple(stride)


@dataclass(frozen=True, slots=True)
class OpCall:
    """A call: ``target`` such as ``"aten.linear.default"``, and its arguments.

    Arguments are nested tuples of ``TensorSpec``, numbers, None, strings and torch's own constants
    (dtypes, memory formats). Keyword arguments are sorted pairs of name and value.
    """

    target: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, target: Any, args: Any, kwargs: Any = None) -> "OpCall":
        """The call of an ``OpOverload`` on real, fake or meta tensors, or on specs.

        Arguments for the location of a tensor (device, pinning, layout) are omitted: a call is
        priced for a device that need not be present.
        """
        given = {
            name: value
            for name, value in (kwargs or {}).items()
            if name not in ("device", "pin_memory", "layout") and value is not None
        }
        return cls(
            target=str(target),
            args=tuple(_freeze(value) for value in args),
            kwargs=tuple((name, _freeze(given[name])) for name in sorted(given)),
        )

    @property
    def name(self) -> str:
        """The operation without overload, and torch's own without namespace: ``linear`` for
        ``aten.linear.default``, but ``mylib.linear`` for ``mylib.linear.default``."""
        return self.target.removeprefix("aten.").rpartition(".")[0] or self.target

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """The argument at ``index``, or given as keyword ``name``, or ``default``."""
        if index < len(self.args):
            return self.args[index]
        for key, value in self.kwargs:
            if key == name:
                return value
        return default

    def tensor(self, index: int, name: str) -> TensorSpec:
        """The tensor argument at ``index``; raises CostError if it is something else."""
        value = self.argument(index, name)
        if not isinstance(value, TensorSpec):
            raise CostError(f"{self.target} needs a tensor as argument {index} ({name}).")
        return value

    def tensors(self) -> tuple[TensorSpec, ...]:
        """All tensor arguments in order, including those in lists."""
        values = (*self.args, *(value for _, value in self.kwargs))
        return tuple(leaf for leaf in _leaves(values) if isinstance(leaf, TensorSpec))


def map_tensors(call: OpCall, function: Any) -> OpCall:
    """``call`` with ``function`` applied to each ``TensorSpec``."""

    def visit(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return function(value)
        if isinstance(value, tuple):
            return tuple(visit(item) for item in value)
        return value

    return OpCall(
        call.target,
        tuple(visit(value) for value in call.args),
        tuple((name, visit(value)) for name, value in call.kwargs),
    )


_OVERLOAD = type(torch.ops.aten.add.Tensor)


@lru_cache(maxsize=4096)
def resolve(target: str) -> Any:
    """The torch operation ``target``; raises CostError if there is none."""
    found: Any = torch.ops
    for part in target.split("."):
        try:
            found = getattr(found, part)
        except (AttributeError, RuntimeError) as error:
            raise CostError(
                f"torch has no operation {target!r}; write a target such as 'aten.linear.default'."
            ) from error
    if not isinstance(found, _OVERLOAD):
        raise CostError(
            f"{target!r} is not an overload; write a target such as 'aten.linear.default'."
        )
    return found


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


_CONSTANTS = (
    int, float, complex, bool, str, type(None), TensorSpec,
    torch.dtype, torch.memory_format, torch.layout, torch.device,
)  # fmt: skip


def _freeze(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorSpec.of(value)
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(item) for item in value)
    if isinstance(value, _CONSTANTS):
        return value
    raise CostError(
        f"{value!r} of type {type(value).__name__} cannot be part of a call; use tensors, "
        "numbers, strings, None and torch's constants."
    )
