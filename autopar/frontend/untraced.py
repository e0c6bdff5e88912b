"""Actions of a model that no exported graph shows, made visible or refused by name.

``torch.export`` sees operators. Anything that bypasses them (``tensor.data``, hooks, a backward
pass inside a forward pass) is left out, or its results become constants.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.traceback import preserve_node_meta, set_stack_trace
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from autopar.base.errors import CaptureError, InputError
from autopar.base.source_files import PACKAGE, is_users, lies_in
from autopar.base.torch_private import (
    FakeTensor,
    body_of,
    has_backward_hooks,
    has_gradient_hooks,
    in_reverse_mode,
    packs_sequences,
    pytree,
    without_transforms,
)
from autopar.frontend.low_precision import BATCH_NORMS
from autopar.frontend.value_checks import is_truth, passing_answer, warn_of
from autopar.ir.graph import Graph

_READ_DATA, _SET_DATA = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]
_READ_GRAD = Tensor.grad.__get__  # type: ignore[union-attr]
_HOOKS = frozenset({Tensor.register_hook, Tensor.register_post_accumulate_grad_hook})
_SEEDING = tuple(
    (module, name, getattr(module, name))
    for module in (torch, torch.random)
    for name in ("manual_seed", "seed", "set_rng_state", "fork_rng")
    if hasattr(module, name)
)
_CHECKING = {nn.functional.gaussian_nll_loss: body_of(nn.functional.gaussian_nll_loss)}
"""Functions of torch that check values, with their bodies."""
_BACKWARD = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})


PADDED = (
    "Run the layer on padded sequences (torch.nn.utils.rnn.pad_sequence): before the end of a "
    "sequence its outputs are the same in one direction. Leave out what lies behind by a mask in "
    "the loss, or by ignore_index, and read a last state by gather()"
)
"""How to do without packed sequences."""


class UntracedCalls(TorchFunctionMode):
    """A tracing mode: reads of ``data`` become ``detach()``, checks of values pass
    (`autopar.frontend.value_checks`), and other untraceable calls fail."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_truth(func, args) and _is_exported_directly():
            answer = passing_answer(_caller())
            if answer is not None:
                warn_of(users_line())
                return answer
        if func == _READ_DATA:
            return args[0].detach()
        if func == _SET_DATA:
            _refuse("assigns to .data", "Compute a new tensor, or copy into this one: x.copy_(y)")
        if func in _HOOKS:
            _refuse(
                f"calls {func.__name__}(), and a compiled step runs no hooks on gradients",
                "Change the gradient by a torch.autograd.Function",
            )
        if func == packs_sequences:
            _refuse(
                "packs sequences, and how many of them reach each step depends on their lengths' "
                "values",
                PADDED,
            )
        if _is_exported_directly() and in_reverse_mode():
            _refuse(
                "computes gradients in its forward pass, by torch.func.grad, vjp or jacrev",
                "Write the derivative out as operators, or use forward mode: torch.func.jvp, "
                "torch.func.jacfwd",
            )
        if (func in _BACKWARD or func == _READ_GRAD) and not _is_ours():
            _refuse(
                "reads or computes gradients in its forward pass",
                "Leave the backward pass to train_step, and write a derivative out as operators",
            )
        if _is_exported_directly():
            # A node that is given no stack trace gets one of all frames, which takes long.
            set_stack_trace(_in_forward())
        if func in _CHECKING:
            with self:  # which is told of the calls inside, too
                return _CHECKING[func](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() and _is_exported_directly():
            _refuse_unregistered((args, kwargs), result)
        return result


def _is_exported_directly() -> bool:
    """Whether ``torch.export`` itself traces the model. For operators that take functions
    (``torch.cond``) it calls Dynamo, which traces with tensors of its own."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def _refuse_unregistered(given: Any, result: Any) -> None:
    """Refuse gradients of tensors that are no parameters of the model: a trace has fake tensors in
    place of those, and takes any other one for a constant."""
    if not any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(result)):
        return
    for x in pytree.tree_leaves(given):
        if not isinstance(x, Tensor) or not x.requires_grad:
            continue
        if not isinstance(without_transforms(x), FakeTensor):
            _refuse(
                f"computes with a tensor of shape {tuple(x.shape)} that needs a gradient and is no "
                "parameter of the model",
                "To train it, register it as a parameter of the model: self.x = nn.Parameter(x), "
                "with the loss computed in forward() if it is the loss that needs it. Otherwise "
                "detach it, or x.requires_grad_(False)",
            )


@contextlib.contextmanager
def untraced_calls() -> Iterator[None]:
    """A context around a traced call of the model, in which untraceable calls are refused, and each
    node knows the line of the user's code that made it."""
    with _refusing_reseeding(), _keeping_modules(), preserve_node_meta(), UntracedCalls():
        yield


@contextlib.contextmanager
def _keeping_modules() -> Iterator[None]:
    """A context in which modules may be moved and converted to where and what they are already, in
    this thread."""
    here, convert = threading.get_ident(), nn.Module._apply

    def kept(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        if threading.get_ident() != here:
            return convert(self, fn, recurse)
        for tensor in (*self.parameters(recurse), *self.buffers(recurse)):
            found = fn(tensor)
            if (found.dtype, found.device) != (tensor.dtype, tensor.device):
                _refuse(
                    f"converts a module to {found.dtype} on {found.device}",
                    "Convert it before the model is compiled, or compute with converted tensors: "
                    "functional_call() takes those in place of parameters",
                )
        return self

    nn.Module._apply = kept  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = convert  # type: ignore[method-assign]


@contextlib.contextmanager
def _refusing_reseeding() -> Iterator[None]:
    """A context in which a model that seeds or restores random number generators is refused.

    It applies to this thread alone: another one may be training.
    """
    here = threading.get_ident()

    def refusing(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_code.co_filename
            if threading.get_ident() == here and is_users(caller):
                _refuse(
                    f"calls torch.{name}(), and a compiled step draws from generators of its own",
                    "Seed before the training loop, or by autopar.compile(..., seed=0); to use the "
                    "same numbers twice, draw them once and pass them on",
                )
            return function(*args, **kwargs)

        return call

    for module, name, function in _SEEDING:
        setattr(module, name, refusing(name, function))
    try:
        yield
    finally:
        for module, name, function in _SEEDING:
            setattr(module, name, function)


def refuse_packed(call: Any) -> None:
    """Raise InputError for packed sequences among the arguments of a call."""
    leaves = pytree.tree_leaves(call, is_leaf=lambda x: isinstance(x, PackedSequence))
    if any(isinstance(leaf, PackedSequence) for leaf in leaves):
        raise InputError(
            "a PackedSequence cannot be an input: how many sequences reach each step depends on "
            f"their lengths' values. {PADDED}; pass the lengths as a tensor"
        )


def refuse_averages_over_all_batches(model: nn.Module) -> None:
    """Raise CaptureError for running averages over all batches, weighted by a count."""
    for name, part in model.named_modules():
        is_averaging = isinstance(part, BATCH_NORMS) and part.training and part.track_running_stats
        if is_averaging and part.momentum is None:
            raise CaptureError(
                f"{type(part).__name__} {name!r} has momentum=None: the weight of a batch in its "
                "running averages is read from a tensor, which cannot be captured. Give it one, "
                f"such as momentum=0.1, or call eval() of {name!r}"
            )


def refuse_running_statistics(graph: Graph) -> None:
    """Raise CaptureError for instance norms that update running statistics, unseen by the graph."""
    for op in graph.ops:
        if op.target is torch.ops.aten.instance_norm.default:
            running_mean, uses_batch = op.args[3], op.args[5]
            if running_mean is not None and uses_batch:
                raise CaptureError(
                    f"the instance norm at {op.location or 'an unknown line'} updates running "
                    "statistics, which the captured graph does not show. Make it with "
                    "track_running_stats=False, or call eval() of it"
                )


def refuse_hooks(model: nn.Module) -> None:
    """Raise CaptureError for parameters and modules with hooks on their gradients."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and has_gradient_hooks(parameter):
            raise CaptureError(
                f"parameter {name!r} has a hook on its gradient, which a compiled step does not "
                "run. Remove it (handle.remove()), and scale or clip by the optimizer, by "
                "max_grad_norm=, or in the model by an autograd function"
            )
    for name, part in model.named_modules():
        if has_backward_hooks(part):
            raise CaptureError(
                f"module {name!r} has a backward hook, which a compiled step does not run. Remove "
                "it (handle.remove()), or change the gradient by an autograd function"
            )


def _refuse(what: str, fix: str) -> None:
    raise CaptureError(
        f"the model cannot be captured as one graph: at {users_line()} it {what}\n"
        f"How to fix it: {fix}"
    )


def _caller() -> FrameType:
    """The frame that called torch, behind those of the modes that are told of the call."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_ours() -> bool:
    """Whether this package called torch, as when it runs an autograd function a second time."""
    frame = sys._getframe(2)
    while frame is not None and lies_in(frame.f_code.co_filename, (Path(torch.__file__).parent,)):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and lies_in(frame.f_code.co_filename, (PACKAGE,))


def users_line() -> str:
    """``file:line`` of the user's code that is running."""
    frame = next(_users_frames(), None)
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _in_forward() -> list[str]:
    """The line of the user's innermost ``forward``, or else of other code of the user, as a stack
    trace of one frame, or of none."""
    first = next(_users_frames(), None)
    named = (frame for frame in _users_frames() if frame.f_code.co_name == "forward")
    frame = next(named, first)
    return [] if frame is None else [f'File "{frame.f_code.co_filename}", line {frame.f_lineno}']


def _users_frames() -> Iterator[FrameType]:
    """The running frames of the user's code, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back
