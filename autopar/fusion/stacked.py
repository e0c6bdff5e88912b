"""The models of an array as one eager module, which defines what the array's graph must compute.

Its parameters and buffers are the array's tensors, under the array's names; its forward pass runs
the models themselves, one after another, on their rows of these tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.frontend.capture import Step
from autopar.frontend.copies import copy_with
from autopar.frontend.reader import loss_fn_name
from autopar.frontend.signature import Signature
from autopar.frontend.targets import LossFn
from autopar.fusion.fuse import LOSSES, Fused, Slice


class _Calls:
    """The models, and how each is called.

    Copies of a `StackedModels` hold every tensor themselves, so copies of this share those of the
    models, but not the modules, whose calls may change what they keep in Python.
    """

    def __init__(self, steps: Sequence[Step], signatures: Sequence[Signature]) -> None:
        self.steps, self.signatures = tuple(steps), tuple(signatures)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Calls:
        return _Calls([copy_with(lambda x: x, step, memo) for step in self.steps], self.signatures)


class StackedModels(nn.Module):
    """B models over stacked tensors, whose forward pass returns the sum of their losses."""

    def __init__(
        self,
        fused: Fused,
        steps: Sequence[Step],
        signatures: Sequence[Signature],
        states: Sequence[Mapping[str, Tensor]],
    ) -> None:
        """``states``: the tensors of each model, by their names in its graph."""
        super().__init__()
        self.fused_slices = fused.slices
        self.shares_batch = fused.shares_batch
        self.calls = _Calls(steps, signatures)
        self._names: dict[str, str] = {}
        for name, rows in _rows_of(fused.slices).items():
            tensors = [states[model][part.target] for model, part in rows]
            first = rows[0][1]
            data = tensors[0].detach().clone()
            if first.row is not None:
                data = torch.stack([t.detach() for t in tensors])
            self._keep(name, data, first)
        self._keep(LOSSES, torch.zeros(len(steps), dtype=fused.loss_dtype), None)
        self.train(steps[0].training)

    def _keep(self, name: str, data: Tensor, part: Slice | None) -> None:
        attribute = f"t{len(self._names)}"
        self._names[attribute] = name
        if part is not None and part.is_parameter:
            trains = part.is_trained
            self.register_parameter(attribute, nn.Parameter(data, requires_grad=trains))
        else:
            self.register_buffer(attribute, data)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters, under the array's names."""
        for key, value in self._parameters.items():
            assert value is not None
            yield self._names[key], value

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The buffers, under the array's names."""
        for key, value in self._buffers.items():
            assert value is not None
            yield self._names[key], value

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The parameters and buffers, under the array's names."""
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}

    def forward(self, *tensors: Tensor) -> Tensor:
        held = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        losses = []
        for model, (step, signature) in enumerate(zip(self.calls.steps, self.calls.signatures)):
            own = tensors if self.shares_batch else [t[model] for t in tensors]
            args, kwargs = signature.call_of(own)
            state = _named_for(step, rows_of(self.fused_slices[model], held))
            out = torch.func.functional_call(step, state, args, dict(kwargs), tie_weights=True)
            losses.append(out[0].reshape(()))
        vector = torch.stack(losses)
        held[LOSSES].copy_(vector.detach())
        return vector.sum()


def rows_of(slices: Sequence[Slice], held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One model's tensors under the model's own names, as views of the array's tensors."""
    return {
        part.target: held[part.name] if part.row is None else held[part.name][part.row]
        for part in slices
    }


def state_of(model: nn.Module, loss_fn: LossFn | None) -> dict[str, Tensor]:
    """The tensors of a model and its loss function, by their names in the graph."""
    state: dict[str, Tensor] = {}
    for owner, name_of in ((model, str), (loss_fn, loss_fn_name)):
        if isinstance(owner, nn.Module):
            for name, tensor in (*owner.named_parameters(), *owner.named_buffers()):
                state[name_of(name)] = tensor
    return state


def _named_for(step: Step, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = loss_fn_name("")
    return {
        f"loss_fn.{name.removeprefix(prefix)}" if name.startswith(prefix) else f"model.{name}": x
        for name, x in state.items()
    }


def _rows_of(
    slices: Sequence[Sequence[Slice]],
) -> dict[str, list[tuple[int, Slice]]]:
    """The models with rows in each tensor of the array, in row order."""
    found: dict[str, list[tuple[int, Slice]]] = {}
    for model, own in enumerate(slices):
        for part in own:
            found.setdefault(part.name, []).append((model, part))
    for rows in found.values():
        rows.sort(key=lambda pair: pair[1].row or 0)
    return found
