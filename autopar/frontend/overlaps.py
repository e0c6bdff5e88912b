"""Tensors of a model that share memory without being the same object, refused by name.

A compiled model keeps each parameter and buffer in memory of its own, on several devices. Tied
tensors are the same object and stay tied; where a parameter is another's ``.data`` or a buffer a
view of one, a change of one would change the other in eager PyTorch alone.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.base.errors import CaptureError
from autopar.base.torch_private import FakeTensor
from autopar.frontend.reader import loss_fn_name
from autopar.ir.graph import Graph


def refuse_overlaps(
    model: nn.Module, loss_fn: Any, graph: Graph, constants: Mapping[str, Any]
) -> None:
    """Raise CaptureError if a tensor that a step changes shares memory with another one.

    ``constants``: the tensors that the graph holds as constants, by attribute where they are one,
    such as ``model.layer.scale``.
    """
    changed = {v.target for v in graph.parameters if v.differentiable}
    changed |= {graph.values[buffer].target for buffer, _ in graph.mutations}
    by_storage: dict[int, list[tuple[str, Tensor]]] = defaultdict(list)
    seen: set[int] = set()
    for name, tensor in _named(model, loss_fn, constants):
        if id(tensor) not in seen and _has_memory(tensor):
            seen.add(id(tensor))
            by_storage[tensor.untyped_storage().data_ptr()].append((name, tensor))
    for sharing in by_storage.values():
        for (first, one), (second, other) in itertools.combinations(sharing, 2):
            if (first in changed or second in changed) and overlap(one, other):
                raise CaptureError(
                    f"{first!r} and {second!r} share memory, and a step changes it: a compiled "
                    "model keeps each in memory of its own. To tie them, use one tensor in both "
                    "places (a.weight = b.weight); otherwise give one its own, by clone()"
                )
    for tensor in constants.values():
        if not isinstance(tensor, Tensor) or not _has_memory(tensor):
            continue
        names = [name for name, _ in by_storage.get(tensor.untyped_storage().data_ptr(), ())]
        for name in filter(changed.__contains__, names):
            raise CaptureError(
                f"the call reads {name!r} past the model, as a loss function does that holds the "
                "model, and would see its present value in every step. Read it in the model's "
                "forward(), or use a copy if that is meant: clone()"
            )


def _named(model: nn.Module, loss_fn: Any, constants: Collection[str]) -> Iterator[tuple[str, Any]]:
    for owner, root, name_of in ((model, "model", str), (loss_fn, "loss_fn", loss_fn_name)):
        if not isinstance(owner, nn.Module):
            continue
        for name, tensor in (*owner.named_parameters(), *owner.named_buffers()):
            yield name_of(name), tensor
        for prefix, module in owner.named_modules():
            for name, value in vars(module).items():
                path = f"{prefix}.{name}" if prefix else name
                if isinstance(value, Tensor) and f"{root}.{path}" in constants:
                    yield name_of(path), value


def _has_memory(tensor: Tensor) -> bool:
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return False
    return tensor.layout is torch.strided and tensor.numel() > 0


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage have an element in common.

    Exact for tensors of the same shape and strides, such as the parts of a split; otherwise whether
    their ranges overlap.
    """
    offset = (other.storage_offset() - one.storage_offset()) * one.element_size()
    if (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype):
        steps = [(step, size) for step, size in zip(one.stride(), one.shape) if size > 1]
        return _is_reached(offset // one.element_size(), sorted(steps, reverse=True))
    (a, b), (c, d) = _range(one), _range(other)
    return a < d and c < b


def _is_reached(distance: int, dims: Sequence[tuple[int, int]]) -> bool:
    """Whether two elements with these strides and sizes can be so far apart."""
    if not dims:
        return distance == 0
    (step, size), *smaller = dims
    rest = sum(s * (n - 1) for s, n in smaller)
    if step == 0:
        return _is_reached(distance, smaller)
    first = max(-((rest - distance) // step), 1 - size)
    last = min((distance + rest) // step, size - 1)
    return any(_is_reached(distance - step * n, smaller) for n in range(first, last + 1))


def _range(tensor: Tensor) -> tuple[int, int]:
    """The first byte in its storage, and the one behind the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    start, size = int(tensor.storage_offset()), tensor.element_size()
    return start * size, (start + last + 1) * size
