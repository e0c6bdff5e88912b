"""Mixed precision: the dtype that a model computes in, apart from that of its parameters.

With ``Precision(compute="bf16")`` a training step is this eager program, whatever the plan::

    def low(x):
        return x.to(torch.bfloat16) if x.is_floating_point() else x

    def single(x):
        return x.float() if x.dtype is torch.bfloat16 else x

    parameters = {name: low(p) for name, p in model.named_parameters()}  # not of batch norms
    output = torch.func.functional_call(model, parameters, tree_map(low, args), ...)
    loss = loss_fn(tree_map(single, output), *targets)  # or single(the model's own)
    loss.backward()
    optimizer.step()

This is the mixed precision of FSDP, without autocast's lists of operators: parameters, gradients
and the optimizer's state are float32 (the dtype that the model has), and every operator computes in
the low precision unless the model itself asks for another. Buffers and the parameters
of batch norms stay as they are, and the losses of ``torch.nn.functional`` compute in float32, also
inside the model, where the above stands for ``F.cross_entropy(logits.float(), ...)``. Parameters
are cast where they are stored and then gathered, so that the low precision travels; gradients are
summed over devices and micro-batches in ``reduce``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

from autopar.base.errors import InputError
from autopar.base.spelling import did_you_mean

_OTHERS = ("fp32", "float32", "bfloat16", "float16")
_FIX = "write precision='bf16', precision='fp16' or precision=None"


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The dtypes of mixed precision.

    * ``compute``: the dtype that operators compute in and parameters are gathered in: ``"bf16"`` or
      ``"fp16"``.
    * ``reduce``: the dtype that gradients are summed in, over devices and micro-batches:
      ``"fp32"``, or, with ``compute="bf16"``, also ``"bf16"``, which halves the bytes.
    * ``loss_scale``, ``growth_interval``: with ``"fp16"`` the loss is multiplied by a scale before
      the backward pass, and gradients are divided by it before the update. The scale begins at
      ``loss_scale``. As in ``torch.amp.GradScaler``, a step whose gradients overflow is skipped on
      all devices and halves it, and ``growth_interval`` steps without overflow double it.

    Raises InputError for any other value.
    """

    compute: str = "bf16"
    reduce: str = "fp32"
    loss_scale: float = 65536.0
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        if self.compute not in ("bf16", "fp16"):
            raise InputError(f"precision computes in {self.compute!r}; it is 'bf16' or 'fp16': "
                             f"{_FIX}")  # fmt: skip
        if self.reduce != "fp32" and (self.reduce, self.compute) != ("bf16", "bf16"):
            also = " (or in 'bf16')" if self.compute == "bf16" else ", for sums in fp16 overflow"
            raise InputError(
                f"precision reduces gradients in {self.reduce!r}; computed in {self.compute!r} "
                f"they are summed in 'fp32'{also}: write "
                f"precision=autopar.Precision(compute={self.compute!r}, reduce='fp32')"
            )
        scale, interval = self.loss_scale, self.growth_interval
        if isinstance(scale, bool) or not isinstance(scale, Real) or not 1 <= scale < math.inf:
            raise InputError(
                f"the precision's loss_scale is {scale!r}; it is a finite number, at least 1, "
                "such as loss_scale=65536.0"
            )
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise InputError(
                f"the precision's growth_interval is {interval!r}; it is a whole number of steps, "
                "at least 1, such as growth_interval=2000"
            )

    @property
    def is_scaled(self) -> bool:
        """Whether gradients are too small for the dtype unless the loss is scaled."""
        return self.compute == "fp16"

    def __str__(self) -> str:
        return f"{self.compute}, gradients summed in {self.reduce}"


def check_precision(precision: Any) -> Precision | None:
    """The precision that ``precision=`` names; raises InputError for any other value."""
    if precision is None or isinstance(precision, Precision):
        return precision
    if isinstance(precision, str) and precision in ("bf16", "fp16"):
        return Precision(compute=precision)
    if str(precision).removeprefix("torch.") in _OTHERS:
        raise InputError(
            f"precision is {precision!r}; {_FIX}, with which a model computes in its own dtype "
            "(all of it in bfloat16: model.bfloat16())"
        )
    raise InputError(
        f"precision is {precision!r}; it is 'bf16', 'fp16', an autopar.Precision or None: {_FIX}"
        + did_you_mean(str(precision), ("bf16", "fp16"))
    )
