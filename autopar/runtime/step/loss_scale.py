"""Dynamic loss scaling, which keeps small gradients from underflow in float16.

In: the precision, and for every step whether its gradients were finite, which all ranks agree on
(`autopar.runtime.step.agreement`, or the norm that clips). Out: the scale of the next loss. All
ranks get the same verdict, so all have the same scale, and nothing more is communicated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from autopar.base.errors import InputError
from autopar.ir.precision import Precision
from autopar.runtime.step.agreement import NonFinite

_LEAST = 1.0
_MOST = torch.finfo(torch.float32).max


def check_scaled(precision: Precision | None, nonfinite: str) -> None:
    """Raise InputError where steps that overflow would update weights."""
    if precision is not None and precision.is_scaled and nonfinite == NonFinite.IGNORE:
        raise InputError(
            "nonfinite is 'ignore' with precision='fp16': a step whose scaled gradients overflow "
            "has to be left out, or its weights become NaN. Write nonfinite='raise' or 'skip', or "
            "precision='bf16', which needs no scale"
        )


class LossScale:
    """The scale of the loss in the next step: that of ``torch.amp.GradScaler``, but at least 1.

    ``num_good``: the number of finite steps since it changed.
    """

    def __init__(self, precision: Precision) -> None:
        self.value = float(precision.loss_scale)
        self.growth_interval = precision.growth_interval
        self.num_good = 0

    def grow(self) -> None:
        """Count a finite step; after enough of them double the scale."""
        self.num_good += 1
        if self.num_good >= self.growth_interval:
            self.num_good = 0
            self.value = 2 * self.value if 2 * self.value < _MOST else self.value

    def back_off(self) -> bool:
        """Halve the scale after an overflow; False if it is 1, which cannot cause one."""
        if self.value <= _LEAST:
            return False
        self.num_good = 0
        self.value = max(_LEAST, self.value / 2)
        return True

    def state(self) -> dict[str, Any]:
        return {"scale": self.value, "num_good": self.num_good}

    def load(self, state: Mapping[str, Any]) -> None:
        self.value, self.num_good = float(state["scale"]), int(state["num_good"])


def is_state(state: Any) -> bool:
    """Whether `LossScale.load` accepts it."""
    if not isinstance(state, Mapping) or set(state) != {"scale", "num_good"}:
        return False
    scale, num_good = state["scale"], state["num_good"]
    is_scale = type(scale) in (int, float) and _LEAST <= scale < math.inf
    return is_scale and type(num_good) is int and 0 <= num_good < 2**63
