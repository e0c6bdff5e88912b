"""The call of a model in mixed precision, with the casts that its graph is captured with.

Input: a model, its arguments and a `Precision`. Output: the model's output, computed from
parameters and inputs in the low precision, so that whatever its code does with their dtypes is
captured too. Derivatives end at the casts of parameters: gradients arrive in each parameter's own
dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar.base.torch_private import pytree
from autopar.ir.precision import Precision

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""By the names that `autopar.ir.precision.Precision` has."""
BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


def call_model(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], precision: Precision | None
) -> Any:
    """The model's output, computed in mixed precision as `autopar.ir.precision` defines it."""
    if precision is None:
        return model(*args, **kwargs)
    dtype = DTYPES[precision.compute]

    def low(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    parameters = {name: low(p) for name, p in _cast_parameters(model).items()}
    args, kwargs = pytree.tree_map_only(Tensor, low, (args, kwargs))
    with _Casts(precision):
        return torch.func.functional_call(model, parameters, args, kwargs)


def _cast_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The cast parameters, except those of batch norms, whose kernels take them in float32 only."""
    norms = (m for m in model.modules() if isinstance(m, BATCH_NORMS))
    kept = {id(p) for norm in norms for p in norm.parameters()}
    return {name: p for name, p in model.named_parameters() if id(p) not in kept}


_LOSSES = frozenset(
    {
        F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.cosine_embedding_loss,
        F.cross_entropy, F.ctc_loss, F.gaussian_nll_loss, F.hinge_embedding_loss, F.huber_loss,
        F.kl_div, F.l1_loss, F.margin_ranking_loss, F.mse_loss, F.multi_margin_loss,
        F.multilabel_margin_loss, F.multilabel_soft_margin_loss, F.nll_loss, F.poisson_nll_loss,
        F.smooth_l1_loss, F.soft_margin_loss, F.triplet_margin_loss,
    }
)  # fmt: skip


_OF_ONE_DTYPE = frozenset(
    {
        F.group_norm, F.layer_norm, F.linear, F.multi_head_attention_forward, F.rms_norm,
        F.scaled_dot_product_attention, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.addbmm,
        Tensor.addmm, Tensor.addmv, Tensor.baddbmm, Tensor.bmm, Tensor.dot, Tensor.matmul,
        Tensor.mm, Tensor.mv, torch.addbmm, torch.addmm, torch.addmv, torch.baddbmm,
        torch.bilinear, torch.bmm, torch.conv1d, torch.conv2d, torch.conv3d,
        torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d, torch.dot,
        torch.einsum, torch.layer_norm, torch.matmul, torch.mm, torch.mv, torch.prelu,
    }
)  # fmt: skip
"""Functions that refuse tensors of several dtypes, where others promote them."""


class _Casts(TorchFunctionMode):
    """A mode in which PyTorch's own losses compute in float32, and its products in one dtype.

    In bfloat16, means over many terms and logarithms of many classes keep two or three digits. A
    product of float32, which a buffer or a constant has brought in, by a parameter in the low
    precision is one in the low precision.
    """

    def __init__(self, precision: Precision) -> None:
        super().__init__()
        self.precision = precision

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LOSSES:
            args, kwargs = in_single((args, kwargs), self.precision)
        elif func in _OF_ONE_DTYPE:
            args, kwargs = self._in_one((args, kwargs))
        return func(*args, **kwargs)

    def _in_one(self, given: Any) -> Any:
        """Arguments without float32 where some are in the low precision."""
        dtype = DTYPES[self.precision.compute]
        dtypes = {x.dtype for x in pytree.tree_leaves(given) if isinstance(x, Tensor)}
        if not {dtype, torch.float32} <= dtypes:
            return given
        return pytree.tree_map_only(
            Tensor, lambda x: x.to(dtype) if x.dtype is torch.float32 else x, given
        )


def in_single(output: Any, precision: Precision | None) -> Any:
    """The input of a loss, or a loss, with low-precision tensors cast to float32."""
    if precision is None:
        return output

    def single(x: Tensor) -> Tensor:
        return x.float() if x.dtype is DTYPES[precision.compute] else x

    return pytree.tree_map_only(Tensor, single, output)
