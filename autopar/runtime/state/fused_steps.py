"""Optimizer steps by torch's fused kernels on CPUs, without what ``Optimizer.step`` does around.

In: one of torch's optimizers whose parameters have gradients. Out: weights and state as its own
step with ``fused=True`` leaves them, bit by bit, from the same kernel with the same arguments. That
step also opens a range of the profiler, looks for hooks and sorts tensors by device and dtype. For
a small model this takes several times what the kernel does, and an array has one step per model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.base.torch_private import FUSED_KERNELS, add_to_each, steps_as_its_class


def step_by_kernels(optimizer: torch.optim.Optimizer) -> bool:
    """Run one step if it takes no more than fused kernels; False, and nothing has changed, if not.

    Then its own ``step`` must run: it is of another class, has hooks or a group without a fused
    kernel, or makes its state in this step.
    """
    if type(optimizer) not in FUSED_KERNELS or not steps_as_its_class(optimizer):
        return False
    call_of = _sgd if type(optimizer) is torch.optim.SGD else _adam
    calls = [call_of(optimizer, group) for group in optimizer.param_groups]
    if None in calls:
        return False
    with torch.no_grad():
        for call in calls:
            assert call is not None
            call()
    return True


def _adam(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Callable[[], None] | None:
    """The call for a group of Adam or AdamW; None if there is none."""
    names = ["step", "exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]
    beta1, beta2 = group["betas"]
    found = _tensors(optimizer, group, names)
    if found is None or isinstance(beta1, Tensor) or isinstance(beta2, Tensor):
        return None
    parameters, gradients, steps, averages, squares, *most = found
    if not parameters:
        return _nothing
    is_decoupled = group["decoupled_weight_decay"]  # Adam has it as an option
    kernel = functools.partial(
        FUSED_KERNELS[torch.optim.AdamW if is_decoupled else torch.optim.Adam],
        parameters, gradients, averages, squares, most[0] if most else [], steps,
        beta1=beta1, beta2=beta2,
        **{name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")},
    )  # fmt: skip

    def call() -> None:
        add_to_each(steps, 1)
        kernel()

    return call


def _sgd(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Callable[[], None] | None:
    """The call for a group of SGD; None if there is none."""
    names = ["momentum_buffer"] * (group["momentum"] != 0)
    found = _tensors(optimizer, group, names)
    if found is None:
        return None
    parameters, gradients, *momenta = found
    if not parameters:
        return _nothing
    options = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")
    return functools.partial(
        FUSED_KERNELS[torch.optim.SGD], parameters, gradients, momenta[0] if momenta else [],
        **{name: group[name] for name in options}, is_first_step=False,
    )  # fmt: skip


def _nothing() -> None:
    """The call for a group without gradients, whose kernel takes no empty lists."""


def _tensors(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], names: Sequence[str]
) -> list[list[Tensor]] | None:
    """A group's parameters that have gradients, these, and the named tensors of their state.

    None unless the group is fused, and all are dense tensors of one dtype on the CPU; counts of
    steps may have another dtype.
    """
    if not group["fused"] or isinstance(group["lr"], Tensor):
        return None
    found: list[list[Tensor]] = [[] for _ in range(2 + len(names))]
    for parameter in group["params"]:
        gradient = parameter.grad
        if gradient is None:
            continue
        dtype, state = parameter.dtype, optimizer.state.get(parameter, {})
        for place, name in enumerate(names, start=2):
            tensor = state.get(name)
            if not isinstance(tensor, Tensor) or not tensor.is_cpu:
                return None
            if name != "step" and tensor.dtype is not dtype:
                return None
            found[place].append(tensor)
        is_plain = gradient.is_cpu and gradient.layout is torch.strided
        if not is_plain or not gradient.dtype is dtype is group["params"][0].dtype:
            return None
        found[0].append(parameter)
        found[1].append(gradient)
    return found
