"""Keys of captures: calls with one key differ only in the values of tensors, and share a capture.

In: a model, its loss function and example inputs. Out: a key that is equal only for those that give
the same graph. A graph has the values of no parameters and buffers, so all that a call depends on
is what a copy without them holds: classes, attributes, shapes, dtypes and ties.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn

from autopar.base.torch_private import pytree
from autopar.frontend.copies import on_meta, without_data


def capture_key(model: nn.Module, loss_fn: Any, example_inputs: Any) -> bytes | None:
    """The key of a call; None if it has parts that cannot be compared, such as local functions."""
    modules = [each for each in (model, loss_fn) if isinstance(each, nn.Module)]
    try:
        plain = without_data(model, loss_fn)
        inputs = pytree.tree_map_only(Tensor, on_meta, example_inputs)
        written = io.BytesIO()
        _Pickler(written).dump((plain, inputs, _memory_of(modules)))
        return hashlib.sha256(written.getvalue()).digest()
    except Exception:  # whatever copying or pickling an object of the user raises
        return None


class _Pickler(pickle.Pickler):
    """Writes a tensor as what it is, and its values where it has any: the constants of a graph."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        data = b"" if value.is_meta else _bytes_of(value)
        layout = tuple(value.shape), value.stride(), value.dtype, value.requires_grad
        return tuple, ((type(value), str(value.device), *layout, data),)


def _bytes_of(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def _memory_of(modules: list[nn.Module]) -> list[tuple[int, int]]:
    """Which tensors share memory: for each the number of its storage, and where it begins there."""
    numbers: dict[int, int] = {}
    found = []
    for module in modules:
        for tensor in [*module.parameters(), *module.buffers()]:
            place = tensor.untyped_storage().data_ptr() or id(tensor)
            found.append((numbers.setdefault(place, len(numbers)), int(tensor.storage_offset())))
    return found
