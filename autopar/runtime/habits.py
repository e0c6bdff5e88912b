"""What a compiled model lacks of an ``nn.Module``, with the call to make instead.

A compiled model's parameters are shards on other devices or in other processes, and a training step
is one call. Code written for a plain module gets an error that says what to write, as an
AttributeError where an attribute is missing, so that ``hasattr`` tells the truth.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from autopar.base.errors import InputError, MissingError
from autopar.base.spelling import did_you_mean
from autopar.base.torch_private import pytree
from autopar.frontend.capture import find_loss

_STATE = (
    "its parameters are shards on their devices. compiled.state_dict() and "
    "compiled.full_state_dict() have them by name, compiled.gradients() their gradients, and "
    "compiled.copy_to(model) puts them into the plain model"
)
_PLACE = (
    "it stays on its devices and in its dtypes. Cast the model before autopar.compile, or pass "
    "precision='bf16' and other devices to it"
)
_STEP = (
    "loss = compiled.train_step(...) runs the forward pass, the backward pass and the update. "
    "In a loop of its own: loss = compiled(...), loss.backward(), compiled.optimizer.step(), "
    "compiled.optimizer.zero_grad()"
)
_OPTIMIZER = (
    "each device has the optimizer of its shards. compiled.optimizer.param_groups has their "
    "hyper-parameters, compiled.optimizer_state_dict() their state; a scheduler takes "
    "compiled.optimizer, or autopar.compile(..., lr_scheduler=...) makes one"
)
_ATTRIBUTES = "plan", "program", "training"
_KERNELS = "autopar.compile(..., kernels='compiled') has Inductor compile its blocks"
_HOOKS = "hooks would not see its shards. Register them before autopar.compile sees the model"
_BACKWARD_HOOKS = (
    "gradients are those of shards, on their devices. compiled.gradients() has the whole ones of "
    "the last step"
)
IN_EVAL_MODE = (
    "it is in eval mode. Call compiled.train() before the calls that train; buffers are changed, "
    "and dropout is on, in train mode alone"
)
_INSTEAD = {
    **dict.fromkeys(
        (
            "parameters", "named_parameters", "buffers", "named_buffers", "modules", "children",
            "named_modules", "named_children", "module", "get_parameter", "get_buffer",
            "get_submodule", "register_buffer", "register_parameter", "apply", "requires_grad_",
            "_modules", "_parameters", "_buffers",
        ),
        _STATE,
    ),
    **dict.fromkeys(
        ("to", "cpu", "cuda", "half", "float", "double", "bfloat16", "type", "device", "dtype"),
        _PLACE,
    ),
    **dict.fromkeys(("forward", "backward", "step", "no_sync"), _STEP),
    **dict.fromkeys(("param_groups", "lr_scheduler"), _OPTIMIZER),
    **dict.fromkeys(
        ("register_forward_hook", "register_forward_pre_hook"),
        _HOOKS,
    ),
    **dict.fromkeys(
        ("register_full_backward_hook", "register_full_backward_pre_hook"), _BACKWARD_HOOKS
    ),
    "compile": _KERNELS,
}  # fmt: skip


def is_never_there(name: str) -> bool:
    """Whether a plain module has such an attribute and a compiled model never does."""
    return name in _INSTEAD


class ModuleHabits:
    """Errors for what users do with plain modules and a compiled model cannot."""

    def __getattr__(self, name: str) -> Any:
        if name in _INSTEAD:
            raise MissingError(f"a compiled model has no .{name}: {_INSTEAD[name]}")
        if name.startswith("_"):
            raise AttributeError(name)
        own = getattr(type(self), name, None)
        if isinstance(own, property) and own.fget is not None:
            return own.fget(self)  # it is missing here, and says why
        raise self._unknown(name)

    def _public_names(self) -> list[str]:
        return [*_ATTRIBUTES, *(each for each in dir(type(self)) if not each.startswith("_"))]

    def _unknown(self, name: str) -> MissingError:
        return MissingError(
            f"a compiled model has no .{name}" + did_you_mean(name, self._public_names())
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InputError(
            "a compiled model cannot be pickled or copied, as its parameters are on other devices "
            "or in other processes. Write compiled.save(folder), or "
            "torch.save(compiled.full_state_dict(), path) under the plain model's names; "
            "for a copy, compile again and load the folder"
        )


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, reason: str) -> Tensor:
        ctx.mark_dirty(output)
        ctx.reason = reason
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        raise InputError(
            "backward() was called on an output of a compiled model, which has no gradients: "
            f"{ctx.reason}. To evaluate only, call it under torch.no_grad()"
        )


def has_gradients_on() -> bool:
    """Whether a plain module called here would record its call for ``backward()``."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def refusing_backward(outputs: Any, reason: str) -> Any:
    """The outputs of a call, whose ``backward()`` raises InputError with a reason.

    Like a plain module's they require gradients.
    """
    anchor = torch.zeros((), requires_grad=True)

    def marked(output: Tensor) -> Tensor:
        if not output.is_floating_point():
            return output
        # The same memory, but no view, which could not be changed in place.
        alias = torch.empty(0, dtype=output.dtype, device=output.device)
        alias.set_(
            output.untyped_storage(), output.storage_offset(), output.size(), output.stride()
        )
        return _NoBackward.apply(alias, anchor, reason)

    return pytree.tree_map_only(Tensor, marked, outputs)


def with_loss(outputs: Any, loss: Tensor) -> Any:
    """A model's outputs, with the loss replaced by one that can run ``backward()``."""
    own = find_loss(outputs)
    leaves, spec = pytree.tree_flatten(outputs)
    marked = [
        loss if leaf is own
        else refusing_backward(leaf, f"only its loss has some. {_STEP}")
        for leaf in leaves
    ]  # fmt: skip
    return pytree.tree_unflatten(marked, spec)
