"""What a model may do that no exported graph shows: made visible, or refused by name.

``torch.export`` sees operators. What goes around them (``tensor.data``, hooks, a backward pass in
the middle of a forward pass) it leaves out, or takes what it led to for a constant.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.base.errors import CaptureError
from autopar.base.source_files import PACKAGE, is_users, lies_in

_READ_DATA, _SET_DATA = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]
_READ_GRAD = Tensor.grad.__get__  # type: ignore[union-attr]
_HOOKS = frozenset({Tensor.register_hook, Tensor.register_post_accumulate_grad_hook})
_BACKWARD = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})


class UntracedCalls(TorchFunctionMode):
    """Within, while a model is traced: reads of ``data`` are ``detach()``; the rest is refused."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _READ_DATA:
            return args[0].detach()
        if func == _SET_DATA:
            _refuse("assigns to .data", "Compute a new tensor, or copy into this one: x.copy_(y)")
        if func in _HOOKS:
            _refuse(
                f"calls {func.__name__}(), and a compiled step runs no hooks on gradients",
                "Change the gradient by a torch.autograd.Function",
            )
        if (func in _BACKWARD or func == _READ_GRAD) and not _is_ours():
            _refuse(
                "reads or computes gradients in its forward pass",
                "Leave the backward pass to train_step, and write a derivative out as operators",
            )
        return func(*args, **(kwargs or {}))


def _refuse(what: str, fix: str) -> None:
    raise CaptureError(
        f"the model cannot be captured as one graph: at {users_line()} it {what}\n"
        f"How to fix it: {fix}"
    )


def _is_ours() -> bool:
    """Whether this package called torch: it runs an autograd function once more."""
    frame = sys._getframe(2)
    while frame is not None and lies_in(frame.f_code.co_filename, (Path(torch.__file__).parent,)):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and lies_in(frame.f_code.co_filename, (PACKAGE,))


def users_line() -> str:
    """``file:line`` of the user's code that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
