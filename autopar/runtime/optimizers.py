"""Which optimizers work on shards, and what their state is.

An element-wise optimizer computes each element of its update and of its state from the same element
of parameter, gradient and state, so it runs on a part of a parameter as on the whole. Others
look at whole tensors (norms, row means, orthogonalisation) and are refused where a parameter is
split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.cost_models import DeviceSpec
from autopar.cost_models.update import OptimizerSpec, adamw
from autopar.errors import OptimizerError
from autopar.lowering.program import ParameterProgram
from autopar.mesh import Mesh
from autopar.runtime.parts import is_split

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.ASGD,
    torch.optim.Rprop,
)


def check_makes_optimizer(make: object) -> None:
    """Raise OptimizerError for what cannot make an optimizer, such as an optimizer itself."""
    if make is not None and not callable(make):
        name = type(make).__name__
        raise OptimizerError(
            f"optimizer is a {name} over the model's own parameters; pass a callable that makes "
            f"one from a list of shards: functools.partial(torch.optim.{name}, lr=...)"
        )


def check_optimizer(
    optimizer: torch.optim.Optimizer, programs: Sequence[ParameterProgram], mesh: Mesh
) -> None:
    """Raise OptimizerError where the optimizer cannot work on the shards that the plan makes."""
    kind = type(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptimizerError(
            "LBFGS evaluates the model several times in one step, which train_step does not do; "
            "pass an optimizer such as functools.partial(torch.optim.AdamW, lr=3e-4)"
        )
    if kind in ELEMENTWISE:
        return
    for program in programs:
        if program.trainable and is_split(program.stored, mesh):
            known = ", ".join(c.__name__ for c in ELEMENTWISE)
            raise OptimizerError(
                f"parameter {program.name!r} is stored in parts, and {kind.__module__}."
                f"{kind.__qualname__} is not known to work element by element, so an update of a "
                "part may differ from that part of the update. Use one of torch.optim's "
                f"element-wise optimizers ({known}), such as "
                "functools.partial(torch.optim.AdamW, lr=3e-4), or a plan that stores this "
                "parameter whole on every device"
            )


def make_optimizer(
    make: MakeOptimizer,
    parameters: Mapping[str, nn.Parameter],
    programs: Sequence[ParameterProgram],
    mesh: Mesh,
) -> torch.optim.Optimizer:
    """Build and check the user's optimizer over the trainable ``parameters``."""
    if not parameters:
        raise OptimizerError(
            "no parameter of the model gets a gradient, so there is nothing to optimize; set "
            "parameter.requires_grad_() where it should train, or leave optimizer= out"
        )
    optimizer = make(list(parameters.values()))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(
            f"optimizer(parameters) returned a {type(optimizer).__name__}; pass a callable that "
            "makes a torch.optim.Optimizer: functools.partial(torch.optim.AdamW, lr=3e-4)"
        )
    check_optimizer(optimizer, programs, mesh)
    known = {id(p) for p in parameters.values()}
    for group in optimizer.param_groups:
        if any(id(p) not in known for p in group["params"]):
            raise OptimizerError(
                "the optimizer holds tensors that it was not given: under autopar it must be "
                "built from its argument alone, as in lambda parameters: "
                "torch.optim.AdamW(parameters, lr=3e-4)"
            )
    return optimizer


_WITH_FUSED_KERNELS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def update(optimizer: torch.optim.Optimizer) -> None:
    """One step of the optimizer; by its fused kernel where it has one and nothing else was asked.

    On CPUs torch takes the fused kernel only when told to, though AdamW's is three times as fast:
    one pass over weights, gradient and state in place of a dozen.
    """
    groups = [g for g in optimizer.param_groups if _may_be_fused(optimizer, g)]
    for group in groups:
        group["fused"] = True
        for parameter in group["params"]:
            _lay_out_gradient(parameter)
    try:
        optimizer.step()
    finally:
        for group in groups:
            group["fused"] = None


def _may_be_fused(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    return (
        type(optimizer) in _WITH_FUSED_KERNELS
        and group["fused"] is None
        and group["foreach"] is None
        and not group["differentiable"]
        and not isinstance(group["lr"], Tensor)  # eager rounds what it makes of it otherwise
        and all(
            p.device.type == "cpu" and p.dtype.is_floating_point and p.is_contiguous()
            for p in group["params"]
        )
    )


def _lay_out_gradient(parameter: nn.Parameter) -> None:
    """The gradient in the order of the parameter: fused kernels go through both as they lie, and
    make state that lies like the gradient."""
    gradient = parameter.grad
    if gradient is not None and not gradient.is_contiguous():
        parameter.grad = gradient.contiguous()


def is_like_parameter(value: Any, parameter: Tensor) -> bool:
    """Whether a piece of optimizer state has an element for each one of the parameter's part."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape


def optimizer_spec(make: MakeOptimizer | None, device: DeviceSpec) -> OptimizerSpec:
    """What prices know of the user's optimizer, from one step of it over a small parameter.

    AdamW's, where there is none or it does not step that way.
    """
    if make is None:
        return adamw(device)
    parameter = nn.Parameter(torch.zeros(2, 3, device="cpu"))
    parameter.grad = torch.ones_like(parameter)
    try:
        optimizer = make([parameter])
        is_fused = all(
            group.get("fused") or (device.kind == "cpu" and _may_be_fused(optimizer, group))
            for group in optimizer.param_groups
        )
        update(optimizer)
        state = optimizer.state.get(parameter, {})
    except Exception:  # whatever is wrong with it is said where the real one is made
        return adamw(device)
    num_states = sum(is_like_parameter(value, parameter) for value in state.values())
    return OptimizerSpec(num_states=num_states, is_fused=is_fused)


def materialize_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state that the first step would make, leaving parameters as they are.

    State is made lazily, and a checkpoint can only be read into what is there.
    """
    if optimizer.state:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in parameters]
    gradients = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    update(optimizer)
    with torch.no_grad():
        for parameter, gradient, old in zip(parameters, gradients, before):
            parameter.grad = gradient
            parameter.copy_(old)


def joined_groups(
    by_rank: Sequence[Sequence[Mapping[str, Any]]], programs: Sequence[ParameterProgram]
) -> list[dict[str, Any]]:
    """Parameter groups of several ranks, with all their parameters by name, in program order."""
    groups: list[dict[str, Any]] = []
    for place in range(max((len(groups) for groups in by_rank), default=0)):
        found = [groups[place] for groups in by_rank if len(groups) > place]
        names = {name for group in found for name in group["params"]}
        ordered = [p.name for p in programs if p.name in names]
        groups.append({**found[0], "params": ordered})
    return groups
