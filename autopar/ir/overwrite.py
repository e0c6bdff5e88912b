"""A value overwritten in place without autograd's knowledge, as an operator.

``with torch.no_grad(): y.mul_(2)`` and ``y.detach().zero_()`` change the numbers of ``y`` and not
its gradient, which goes back to what ``y`` was before, whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("autopar::overwrite", mutates_args=(), tags=(torch.Tag.pointwise,))
def overwrite(value: Tensor, written: Tensor) -> Tensor:
    """``written``, whose gradient is that of ``value``; both have one shape."""
    return written.clone()


@overwrite.register_fake
def _(value: Tensor, written: Tensor) -> Tensor:
    return torch.empty_like(written)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return gradient, None


overwrite.register_autograd(_differentiate)
