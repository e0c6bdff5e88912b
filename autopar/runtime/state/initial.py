"""The state that a compiled model starts with: its tensors by name, and its keys for them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from autopar.base.errors import InputError
from autopar.frontend.capture import Captured
from autopar.frontend.reader import loss_fn_name
from autopar.lowering.types import RankProgram


def initial_state(model: nn.Module, loss_fn: Any = None) -> dict[str, Tensor]:
    """Every parameter and buffer by name; raises InputError for a model without data."""
    state: dict[str, Tensor] = {}
    if isinstance(loss_fn, nn.Module):
        own = (*loss_fn.named_parameters(), *loss_fn.named_buffers())
        state.update((loss_fn_name(name), tensor) for name, tensor in own)
    state.update(model.named_parameters())
    state.update(model.named_buffers())
    for name, tensor in state.items():
        if tensor.is_meta:
            raise InputError(
                f"{name!r} is on the meta device, which holds no numbers, so the model can be "
                "planned but not run. Give it data first: model.to_empty(device='cpu'), then "
                "initialise it or model.load_state_dict(torch.load('weights.pt'))"
            )
    return state


def state_keys(
    model: nn.Module, captured: Captured, program: RankProgram
) -> tuple[tuple[str, str], ...]:
    """Each key of the model's ``state_dict()`` with the name of its tensor in the program."""
    canonical = dict(captured.graph.aliases)
    known = {p.name for p in program.parameters} | {b.name for b in program.buffers}
    pairs = [(key, canonical.get(key, key)) for key in model.state_dict()]
    return tuple((key, name) for key, name in pairs if name in known)
