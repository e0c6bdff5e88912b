"""Reduce-scatter of a flat tensor, as each backend does it best.

In: a tensor of ``num`` equal parts. Out: a call that waits for this rank's part of the sum. gloo
has no reduce-scatter: ``torch.distributed`` copies the tensor, all-reduces the copy and keeps a
part. Here each rank sends every other rank its part and sums what it got: half the bytes, and
between two processes 2 to 3 times as fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 gave it this name, and warns of the old one.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def start_reduce_scatter(whole: Tensor, process_group: Any, num: int) -> Callable[[], Tensor]:
    """Begin to sum ``whole`` (contiguous, 1-d) over the ``num`` ranks of a group."""
    if whole.device.type == "cpu":
        received = torch.empty_like(whole)
        exchange = dist.all_to_all_single(received, whole, group=process_group, async_op=True)

        def summed() -> Tensor:
            exchange.wait()
            return received.view(num, -1).sum(0, dtype=whole.dtype)

        return summed
    part = whole.new_empty(whole.numel() // num)
    reduction = _reduce_scatter_single(part, whole, group=process_group, async_op=True)

    def reduced() -> Tensor:
        reduction.wait()
        return part

    return reduced
