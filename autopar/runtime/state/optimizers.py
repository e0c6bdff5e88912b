"""Optimizers over shards: which of them are supported, and what their state is.

An element-wise optimizer computes each element of its update and of its state from the same element
of parameter, gradient and state, so it runs on a shard of a parameter as on the whole. Others use
whole tensors (norms, row means, orthogonalisation) and are refused if a parameter is split. One
that is not known to update each parameter independently, or has step hooks, is also refused if
devices hold different parameters, as in a pipeline.

The user's function that makes the optimizer is given all trainable parameters of the model, in
order, on every device: an empty stand-in replaces a parameter of another device, and is removed
from the optimizer afterwards. So a group has the same parameters under every plan.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.base.errors import OptimizerError
from autopar.base.spelling import closest
from autopar.base.torch_private import FUSED_KERNELS, MatrixProducts, PeakOfNew, has_step_hooks
from autopar.cost_models import DeviceSpec
from autopar.cost_models.update import OptimizerSpec, Side, UpdateProduct, UpdateScope, adamw
from autopar.ir.mesh import Mesh
from autopar.ir.placement import local_shape
from autopar.lowering.types import ParameterProgram
from autopar.runtime.state.fused_steps import step_by_kernels
from autopar.runtime.state.shards import is_split

_log = logging.getLogger(__name__)

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]
HyperParameters = list[dict[str, Any]]
"""What each parameter group has besides its parameters, by name."""

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
PARAMETERWISE = (*ELEMENTWISE, torch.optim.Adafactor, torch.optim.Muon)
"""Update each parameter by itself."""


def check_makes_optimizer(make: object) -> None:
    """Raise OptimizerError for anything that makes no optimizer, such as an optimizer itself."""
    if make is None or callable(make):
        return
    if isinstance(make, torch.optim.Optimizer):
        name = type(make).__name__
        raise OptimizerError(
            f"optimizer is a {name} over the model's own parameters; pass a callable that makes "
            f"one from a list of shards: functools.partial(torch.optim.{name}, lr=...)"
        )
    known = [name for name, each in vars(torch.optim).items() if isinstance(each, type)]
    near = closest(make, known) if isinstance(make, str) else None
    raise OptimizerError(
        f"optimizer is {make!r}; it must be a callable that makes an optimizer from a list of "
        f"parameters: optimizer=functools.partial(torch.optim.{near or 'AdamW'}, lr=3e-4)"
    )


def check_optimizer(
    optimizer: torch.optim.Optimizer, programs: Sequence[ParameterProgram], mesh: Mesh
) -> None:
    """Raise OptimizerError if the optimizer does not support the plan's shards."""
    _check_kind(optimizer)
    scope = scope_of(optimizer)
    if scope is UpdateScope.ELEMENT:
        return
    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if has_step_hooks(optimizer):
        name += " with step hooks"
    trained = [program for program in programs if program.trainable]
    for program in trained:
        if is_split(program.stored, mesh):
            raise OptimizerError(
                f"parameter {program.name!r} is stored in parts, and {name} is not known to work "
                "element by element, so an update of a part may differ from that part of the "
                f"update. {_use(ELEMENTWISE)}, or a plan that stores this parameter whole on "
                "every device"
            )
    if scope is UpdateScope.PARAMETER:
        return
    for program in trained:
        if program.devices != trained[0].devices:
            raise OptimizerError(
                f"parameters {trained[0].name!r} and {program.name!r} are on different devices of "
                f"a pipeline, and {name} is not known to update each parameter by itself, so an "
                f"update may depend on what another device has. {_use(PARAMETERWISE)}, or a plan "
                "without a pipeline"
            )


def _check_kind(optimizer: torch.optim.Optimizer) -> None:
    """Raise OptimizerError for an optimizer that cannot train any compiled model."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptimizerError(
            "LBFGS evaluates the model several times in one step, which train_step does not do; "
            "pass an optimizer such as functools.partial(torch.optim.AdamW, lr=3e-4)"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise OptimizerError(
            "SparseAdam takes sparse gradients, and those of a compiled model are dense, also of "
            "embeddings with sparse=True; pass functools.partial(torch.optim.Adam, lr=1e-3), which "
            "decays the moments of all rows in each step"
        )


def scope_of(optimizer: torch.optim.Optimizer) -> UpdateScope:
    """The scope of an optimizer's update; that of the model where nothing is known."""
    if has_step_hooks(optimizer) or type(optimizer) not in PARAMETERWISE:
        return UpdateScope.MODEL
    return UpdateScope.ELEMENT if type(optimizer) in ELEMENTWISE else UpdateScope.PARAMETER


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is known to update each element independently."""
    return scope_of(optimizer) is UpdateScope.ELEMENT


def check_early_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise OptimizerError unless parameters can be updated one by one and by rows."""
    if not is_elementwise(optimizer):
        kind = type(optimizer)
        raise OptimizerError(
            f"update='early' updates parameters one by one and by rows, and "
            f"{kind.__module__}.{kind.__qualname__}"
            f"{' with step hooks' if has_step_hooks(optimizer) else ''} is not known to work "
            f"element by element. {_use(ELEMENTWISE)}, or update='at_end'"
        )


def _use(known: Sequence[type[torch.optim.Optimizer]]) -> str:
    names = ", ".join(kind.__name__ for kind in known)
    return (
        f"Use one of torch.optim's {names} without hooks, such as "
        "functools.partial(torch.optim.AdamW, lr=3e-4)"
    )


def make_optimizer(
    make: MakeOptimizer,
    parameters: Mapping[str, nn.Parameter],
    programs: Sequence[ParameterProgram],
    mesh: Mesh,
    *,
    may_be_elsewhere: bool = False,
) -> torch.optim.Optimizer:
    """Build and check the user's optimizer over the trainable ``parameters`` of this device; those
    of ``programs`` that it lacks are on other devices, all of them if that may be."""
    trained = [p for p in programs if p.trainable]
    if not parameters and not (may_be_elsewhere and trained):
        raise OptimizerError(
            "no parameter of the model gets a gradient, so there is nothing to optimize; set "
            "parameter.requires_grad_() where it should train, or leave optimizer= out"
        )
    of_wholes = None
    if any(is_split(p.stored, mesh) for p in trained):
        with contextlib.suppress(Exception):  # errors are reported for the real one
            of_wholes = _made(make, {}, {p.name: p.shape for p in trained}, trained)[1]
    shapes = {p.name: local_shape(p.shape, p.stored, mesh) for p in trained}
    optimizer, groups = _made(make, parameters, shapes, trained)
    check_optimizer(optimizer, programs, mesh)
    if of_wholes is not None and groups != of_wholes:
        name = next(p.name for p in trained if groups.get(p.name) != of_wholes.get(p.name))
        raise OptimizerError(
            f"optimizer(parameters) puts {name!r} into parameter group {groups.get(name)} where it "
            f"is given the parts of parameters that a device has, and into {of_wholes.get(name)} "
            "where it is given them whole: under autopar groups must not depend on sizes. Choose "
            "them by p.ndim or by the order of the parameters, which are those of the model"
        )
    _forget_absent(optimizer, parameters)
    return optimizer


def _made(
    make: MakeOptimizer,
    parameters: Mapping[str, nn.Parameter],
    shapes: Mapping[str, Sequence[int]],
    trained: Sequence[ParameterProgram],
) -> tuple[torch.optim.Optimizer, dict[str, int]]:
    """Build the optimizer; returns it with each parameter's group.

    It is made of ``parameters`` and of stand-ins, of ``shapes``, for those of ``trained`` that are
    not there.
    """

    def stand_in(p: ParameterProgram, device: torch.device) -> nn.Parameter:
        one = torch.zeros((), dtype=p.dtype, device=device)  # takes no memory
        return nn.Parameter(one.expand(tuple(shapes[p.name])))

    def given(device: torch.device) -> dict[str, nn.Parameter]:
        return {
            p.name: parameters[p.name] if p.name in parameters else stand_in(p, device)
            for p in trained
        }

    device = next((p.device for p in parameters.values()), torch.device("cpu"))
    every = given(torch.device("meta"))  # so state that is made eagerly takes no memory either
    try:
        optimizer = _called(make, every)
    except OptimizerError:
        if len(parameters) == len(trained):
            raise
        every = given(device)  # fused kernels refuse tensors without data
        optimizer = _called(make, every)
    names = {id(parameter): name for name, parameter in every.items()}
    groups: dict[str, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise OptimizerError(
                    "the optimizer holds tensors that it was not given: under autopar it must be "
                    "built from its argument alone, as in lambda parameters: "
                    "torch.optim.AdamW(parameters, lr=3e-4)"
                )
            groups[names[id(parameter)]] = index
    return optimizer, groups


def _called(make: MakeOptimizer, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that ``make`` returns; raises OptimizerError if it returns anything else."""
    try:
        optimizer = make(list(parameters.values()))
    except Exception as error:
        raise OptimizerError(
            f"optimizer(parameters) raised {type(error).__name__}: {error}. Pass a callable that "
            "makes an optimizer from a list of parameters: "
            "functools.partial(torch.optim.AdamW, lr=3e-4)"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(
            f"optimizer(parameters) returned a {type(optimizer).__name__}; pass a callable that "
            "makes a torch.optim.Optimizer: functools.partial(torch.optim.AdamW, lr=3e-4)"
        )
    return optimizer


def _forget_absent(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> None:
    """Remove the parameters of other devices, and their state."""
    own = {id(parameter) for parameter in parameters.values()}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in own]
    for parameter in [p for p in optimizer.state if id(p) not in own]:
        del optimizer.state[parameter]


def update(optimizer: torch.optim.Optimizer) -> None:
    """Run one step of the optimizer, with its fused kernel unless the user chose another.

    On CPUs torch uses the fused kernel only on request, though it makes one pass over weights,
    gradient and state instead of a dozen.
    """
    groups = [g for g in optimizer.param_groups if _may_be_fused(optimizer, g)]
    for group in groups:
        group["fused"] = True
    for group in optimizer.param_groups:
        if group.get("fused"):
            for parameter in group["params"]:
                _lay_out_gradient(parameter)
    try:
        if not step_by_kernels(optimizer):
            optimizer.step()
    finally:
        for group in groups:
            group["fused"] = None


_EXACT_IN_KERNELS = (torch.float32, torch.float64)


def _may_be_fused(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether a fused kernel gives what eager mode does. In half precision it rounds otherwise, and
    that of SGD leaves all but the last elements unchanged on CPUs (torch 2.13)."""
    return (
        type(optimizer) in FUSED_KERNELS
        and group["fused"] is None
        and group["foreach"] is None
        and not group["differentiable"]
        and not isinstance(group["lr"], Tensor)  # eager mode rounds differently with one
        and all(
            p.device.type == "cpu" and p.dtype in _EXACT_IN_KERNELS and p.is_contiguous()
            for p in group["params"]
        )
    )


def _lay_out_gradient(parameter: nn.Parameter) -> None:
    """Make the gradient contiguous, as its parameter is: fused kernels ignore strides, and allocate
    state with the gradient's."""
    gradient = parameter.grad
    if gradient is not None and not gradient.is_contiguous():
        parameter.grad = gradient.contiguous()


def is_like_parameter(value: Any, parameter: Tensor) -> bool:
    """Whether a tensor of optimizer state has one element per element of the parameter's shard."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape


_PROBE = 64, 64


def optimizer_spec(
    make: MakeOptimizer | None, device: DeviceSpec, *, is_clipped: bool = False
) -> OptimizerSpec:
    """The cost model's description of the user's optimizer, from steps over small parameters.

    It is AdamW's if there is none, or if it does not run alone. With clipping all gradients are
    complete before any is used. Raises OptimizerError for one that cannot train any model.
    """
    if make is None:
        return replace(adamw(device), is_joint=is_clipped, is_clipped=is_clipped)
    scope = UpdateScope.ELEMENT
    parameters = [nn.Parameter(torch.zeros(_PROBE, device="cpu")) for _ in range(3)]
    try:
        optimizer = make(parameters[:1])
        _check_kind(optimizer)
        scope = scope_of(optimizer)
        held = [
            round(_held_in_step(make, parameters[:num], device) / parameters[0].nbytes, 1)
            for num in (1, 2, 3)
        ]
        is_fused = all(
            group.get("fused") or (device.kind == "cpu" and _may_be_fused(optimizer, group))
            for group in optimizer.param_groups
        )
        materialize_state(optimizer)
        state = optimizer.state.get(parameters[0], {})
        products = () if scope is UpdateScope.ELEMENT else _products_in_step(make)
    except OptimizerError:
        raise
    except Exception as error:  # it may need the model's own parameters
        _log.warning(
            "memory and time of the update are those of AdamW: optimizer=... makes none from three "
            "parameters of shape %s: %s: %s", _PROBE, type(error).__name__, error,
        )  # fmt: skip
        is_joint = is_clipped or scope is not UpdateScope.ELEMENT
        return replace(adamw(device), is_joint=is_joint, is_clipped=is_clipped, scope=scope)
    num_states = sum(is_like_parameter(value, parameters[0]) for value in state.values())
    of_all = round(held[2] - held[1], 1)
    return OptimizerSpec(
        num_states=num_states,
        is_fused=is_fused,
        temporaries_of_all=of_all,
        temporaries_of_one=round(held[0] - of_all, 1),
        temporaries_before=round(held[1] - held[0] - of_all, 1),
        is_joint=is_clipped or scope is not UpdateScope.ELEMENT,
        is_clipped=is_clipped,
        scope=scope,
        products=products,
    )


_SHORT, _LONG = 48, 80


def _products_in_step(make: MakeOptimizer) -> tuple[UpdateProduct, ...]:
    """The matrix products of one update of a matrix, whose sizes are its own."""
    parameter = nn.Parameter(torch.zeros(_SHORT, _LONG, device="cpu"))
    optimizer = make([parameter])
    parameter.grad = torch.ones_like(parameter)
    with MatrixProducts() as made:
        update(optimizer)
    sides = {_SHORT: Side.SHORT, _LONG: Side.LONG}
    found = Counter(made.products)
    return tuple(
        UpdateProduct(
            rows=sides[rows], inner=sides[inner], columns=sides[columns], dtype=dtype, num_times=num
        )
        for (rows, inner, columns, dtype), num in found.items()
        if {rows, inner, columns} <= sides.keys()
    )


def _held_in_step(make: MakeOptimizer, parameters: list[nn.Parameter], device: DeviceSpec) -> int:
    """The peak bytes of a step besides parameters, gradients and state, which exist before it."""
    optimizer = make(parameters)
    materialize_state(optimizer)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    for group in optimizer.param_groups:
        # On GPUs torch uses kernels that update many tensors at once.
        if device.kind == "cuda" and group.get("foreach", 0) is None and not group.get("fused"):
            group["foreach"] = True
    with PeakOfNew() as held:
        update(optimizer)
    return held.peak_bytes


def materialize_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state that the first step would make, without changing parameters.

    State is made lazily, and a checkpoint can only be read into existing tensors.
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
    """The parameter groups of several ranks joined, with parameter names in program order."""
    groups: list[dict[str, Any]] = []
    for place in range(max((len(groups) for groups in by_rank), default=0)):
        found = [groups[place] for groups in by_rank if len(groups) > place]
        names = {name for group in found for name in group["params"]}
        ordered = [p.name for p in programs if p.name in names]
        groups.append({**found[0], "params": ordered})
    return groups
