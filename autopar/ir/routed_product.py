"""Products of rows with the weights of their experts, in the order in which the rows are given.

``routed_product(x[t, k], weight[e, k, n], expert[t * r]) -> [t * r, n]``: row ``i`` of the result
is row ``i // r`` of ``x`` times the matrix of its expert. The rows are grouped by expert inside, so
every row is independent of the others: those of any part of a batch may be computed apart. A row
whose expert is not one of ``0 .. e - 1`` is zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_KERNEL_BYTES = 16
"""PyTorch's grouped kernel requires rows and columns that are multiples of this."""
_KERNEL_CAPABILITY = (8, 0)


@torch.library.custom_op("autopar::routed_product", mutates_args=())
def routed_product(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    """``[t * r, n]``, contiguous; the module's docstring has the shapes."""
    repeats, shape = _repeats(x, expert), (expert.shape[0], weight.shape[2])
    if not _has_kernel(x, weight):
        out = x.new_zeros(shape)
        for number, rows in _groups(expert, weight.shape[0]):
            out[rows] = x[rows // repeats] @ weight[number]
        return out
    order, ends = _grouped(expert, weight.shape[0])
    found = torch.nn.functional.grouped_mm(x[order // repeats], _aligned(weight), offs=ends)
    found = found.masked_fill_(_is_behind(order, ends), 0)
    return x.new_empty(shape).index_copy_(0, order, found)


@torch.library.custom_op("autopar::routed_product_weight", mutates_args=())
def routed_product_weight(x: Tensor, cotangent: Tensor, expert: Tensor, num_experts: int) -> Tensor:
    """The gradient ``[e, k, n]`` of the weights, from that of the result, ``[t * r, n]``."""
    repeats = _repeats(x, expert)
    if not _has_kernel(x, cotangent):
        out = x.new_zeros(num_experts, x.shape[1], cotangent.shape[1])
        for number, rows in _groups(expert, num_experts):
            torch.mm(x[rows // repeats].T, cotangent[rows], out=out[number])
        return out
    order, ends = _grouped(expert, num_experts)
    rows, columns = x[order // repeats], cotangent[order]
    found: Tensor = torch.nn.functional.grouped_mm(rows.T, columns, offs=ends)
    is_empty = ends == torch.nn.functional.pad(ends[:-1], (1, 0))
    return found.masked_fill_(is_empty.view(-1, 1, 1), 0)


def _repeats(x: Tensor, expert: Tensor) -> int:
    """To how many experts each row of ``x`` goes."""
    return expert.shape[0] // max(1, x.shape[0])


def _has_kernel(*operands: Tensor) -> bool:
    """Whether PyTorch has a grouped kernel for them that does not wait for the device."""
    return all(
        x.is_cuda
        and x.dtype is torch.bfloat16
        and all(size * x.itemsize % _KERNEL_BYTES == 0 for size in x.shape[1:])
        and torch.cuda.get_device_capability(x.device) >= _KERNEL_CAPABILITY
        for x in operands
    )


def _aligned(weight: Tensor) -> Tensor:
    """The weights as the kernel reads them; a view that starts elsewhere is copied."""
    return weight if weight.data_ptr() % _KERNEL_BYTES == 0 else weight.clone()


def _grouped(expert: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The rows by expert, those of no expert last, and the end of each expert's rows."""
    known = torch.where((expert >= 0) & (expert < num_experts), expert, num_experts)
    ordered, order = torch.sort(known, stable=True)
    numbers = torch.arange(num_experts, device=expert.device)
    return order, torch.searchsorted(ordered, numbers, right=True, out_int32=True)


def _is_behind(order: Tensor, ends: Tensor) -> Tensor:
    """Whether a grouped row has no expert: ``bool[rows, 1]``. The kernel does not write it."""
    return (torch.arange(order.shape[0], device=order.device) >= ends[-1]).unsqueeze(1)


def _groups(expert: Tensor, num_experts: int) -> Iterator[tuple[int, Tensor]]:
    """Each expert that has rows, with their indices in ascending order."""
    order, ends = _grouped(expert, num_experts)
    start = 0
    for number, end in enumerate(ends.tolist()):
        if end > start:
            yield number, order[start:end]
        start = end


@routed_product.register_fake
def _(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    return x.new_empty(expert.shape[0], weight.shape[2])


@routed_product_weight.register_fake
def _(x: Tensor, cotangent: Tensor, expert: Tensor, num_experts: int) -> Tensor:
    return x.new_empty(num_experts, x.shape[1], cotangent.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, expert = ctx.saved_tensors
    of_x = of_weight = None
    if ctx.needs_input_grad[0]:
        of_x = routed_product(cotangent, weight.transpose(1, 2), expert)
        if (repeats := _repeats(x, expert)) > 1:
            of_x = of_x.view(-1, repeats, of_x.shape[1]).sum(1)
    if ctx.needs_input_grad[1]:
        of_weight = routed_product_weight(x, cotangent, expert, weight.shape[0])
    return of_x, of_weight, None


routed_product.register_autograd(_backward, setup_context=_keep)
ROUTED_PRODUCT = torch.ops.autopar.routed_product.default
