"""A model whose second half delays the first process that runs it, once: its first step is slow.

In a module of its own, which local workers import with the operator.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import autopar
from autopar.ir.graph import Op, Value
from autopar.rules import Space, SpaceBuilder, layout

_TIMES: list[float] = []


@torch.library.custom_op("faultstest::held_up", mutates_args=())
def held_up(x: Tensor, how: str, time_s: float) -> Tensor:
    if not _TIMES:
        _TIMES.append(time_s)
        hold_up(how, time_s)
    return x.clone()


held_up.register_fake(lambda x, how, time_s: torch.empty_like(x))
held_up.register_autograd(lambda ctx, grad: (grad, None, None))


@autopar.register_rule("faultstest.held_up.default")
def space(op: Op, inputs: Sequence[Value], outputs: Sequence[Value | None]) -> Space:
    builder = SpaceBuilder()
    row, column = (builder.dim(name, size) for name, size in zip("mn", inputs[0].shape))
    return builder.build([layout(row, column)], [layout(row, column)])


def hold_up(how: str, time_s: float) -> None:
    """``sleep``, ``compute``, or ``hold`` the interpreter's lock."""
    if how == "sleep":
        time.sleep(time_s)
    end_s, x = time.monotonic() + time_s, torch.ones(256, 256)
    while time.monotonic() < end_s:
        if how == "hold":
            _hold_the_lock(end_s)
        x @ x


def _hold_the_lock(end_s: float) -> None:
    """Calls of C code that do not release the lock, each twice as long as the one before."""
    length = 18
    while time.monotonic() < end_s:
        re.fullmatch("(a+)+", "a" * length + "b")
        length += 1


class HeldUp(nn.Module):
    def __init__(self, how: str, time_s: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.how, self.time_s = how, time_s

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        return held_up(self.second(hidden), self.how, self.time_s).square().mean()
