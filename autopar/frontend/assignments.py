"""Assignments to registered buffers in a forward pass, made visible as writes into them.

``torch.export`` shows what is written into a buffer (``self.ema.mul_(0.9)``) and loses what is
assigned to one (``self.ema = self.ema * 0.9``), unless it belongs to the outermost module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, nn

from autopar.base.errors import CaptureError
from autopar.frontend.overlaps import overlap


@dataclass(frozen=True, slots=True)
class _Slot:
    """One tensor of a module: ``tensors`` are the module's buffers or parameters."""

    path: str
    name: str
    tensors: dict[str, Tensor | None]
    held: Tensor

    @property
    def is_assigned(self) -> bool:
        return self.tensors.get(self.name) is not self.held


class HeldTensors:
    """The buffers and parameters that a module and its parts hold before a call.

    Buffers that are None do not count: a module may keep there what it computed.
    """

    def __init__(self, root: nn.Module) -> None:
        named = list(root.named_modules())
        self.buffers = [s for path, part in named for s in _slots(path, part._buffers)]
        self.parameters = [s for path, part in named for s in _slots(path, part._parameters)]

    def write_assigned(self, outputs: list[Tensor]) -> list[Tensor]:
        """Write what the call assigned to buffers into the tensors that they held before it.

        Returns the outputs, which may be such tensors, as they were before. Raises CaptureError
        for assignments without such a form.
        """
        for slot in self.parameters:
            if slot.is_assigned:
                _refuse(
                    f"parameter {slot.path!r}, which only the optimizer changes",
                    "Compute the changed value in a variable, or register it as a buffer",
                )
        assigned = [slot for slot in self.buffers if slot.is_assigned]
        if not assigned:
            return outputs
        outputs = [x.clone() for x in outputs]
        # They are copied before the first write: one buffer may have got what another held.
        values = [self._checked(slot).detach().clone() for slot in assigned]
        for slot, value in zip(assigned, values):
            slot.held.copy_(value)
        return outputs

    def put_back(self) -> None:
        """Let the modules hold the same buffers again; what was written into them stays."""
        for slot in self.buffers:
            slot.tensors[slot.name] = slot.held

    def _checked(self, slot: _Slot) -> Tensor:
        """The new value of a buffer; raises CaptureError where it cannot be written into it."""
        held, value = slot.held, slot.tensors.get(slot.name)
        fix = f"Write into it, self.{slot.name}.copy_(...), with a value of its shape and dtype"
        if value is None:
            _refuse(f"None or a parameter to buffer {slot.path!r}, or deletes it", fix)
        if (value.shape, value.dtype) != (held.shape, held.dtype):
            _refuse(f"{_kind(value)} to buffer {slot.path!r}, which is {_kind(held)}", fix)
        tied = [s.path for s in self.buffers if s.held is held and s.path != slot.path]
        if tied:
            _refuse(f"buffer {slot.path!r}, which shares its tensor with {tied[0]!r}", fix)
        if sharing := self._sharing(slot, value):
            _refuse(
                f"to buffer {slot.path!r} what is the memory of {sharing!r}, so that a change of "
                "one would change the other, and a compiled model keeps each in memory of its own",
                "Assign a copy: clone()",
            )
        return value

    def _sharing(self, slot: _Slot, value: Tensor) -> str | None:
        """A parameter or another buffer that shares memory with a buffer's new value."""
        memory = value.untyped_storage()._cdata
        parameters = ((s.path, s.held) for s in self.parameters)
        others = ((s.path, s.tensors.get(s.name)) for s in self.buffers if s is not slot)
        for path, tensor in (*parameters, *others):
            if tensor is None or tensor.untyped_storage()._cdata != memory:
                continue
            if overlap(value, tensor):
                return path
        return None


def _slots(path: str, tensors: dict[str, Any]) -> list[_Slot]:
    # A step holds its model as ``model``; users know its tensors without that prefix.
    prefix = f"{path}.".removeprefix("model.").lstrip(".")
    return [_Slot(prefix + n, n, tensors, x) for n, x in tensors.items() if x is not None]


def _kind(tensor: Tensor) -> str:
    return f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}"


def _refuse(what: str, fix: str) -> NoReturn:
    raise CaptureError(
        f"the model cannot be captured as one graph: its forward pass assigns {what}\n"
        f"How to fix it: {fix}"
    )
