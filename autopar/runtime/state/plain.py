"""Plain data as JSON, without loss: numbers, text, lists, mappings and small tensors.

JSON has no tuples, no infinities, no keys but text and no tensors: these become mappings whose key
``$`` names their kind. Nothing else is accepted, in either direction.
"""

from __future__ import annotations

import base64
import collections
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autopar.base.errors import InputError

_MAPPINGS: dict[str, type] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": collections.Counter,
}
_MAX_DEPTH = 32
_MAX_DIGITS = 1000


def to_plain(value: Any, where: str, depth: int = 0) -> Any:
    """Convert to JSON data; InputError names the position of anything else."""
    if depth > _MAX_DEPTH:
        raise InputError(f"{where} is nested more than {_MAX_DEPTH} deep; a checkpoint holds less")
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < 2**63 else {"$": "int", "value": str(int(value))}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$": "float", "value": str(float(value))}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Tensor):
        return _tensor_out(value, where)
    if isinstance(value, list | tuple):
        items = [to_plain(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"$": "tuple", "value": items}
    if type(value) in _MAPPINGS.values():
        if type(value) is dict and all(isinstance(k, str) and k != "$" for k in value):
            return {str(k): to_plain(v, f"{where}[{k!r}]", depth + 1) for k, v in value.items()}
        pairs = [
            [to_plain(k, f"a key of {where}", depth + 1), to_plain(v, f"{where}[{k!r}]", depth + 1)]
            for k, v in value.items()
        ]
        return {"$": type(value).__name__, "value": pairs}
    raise InputError(
        f"{where} is a {type(value).__name__}; a checkpoint holds numbers, text, lists, tuples, "
        "mappings and tensors, so that loading one runs no code. Keep it out of the state, or "
        "make it of these"
    )


def from_plain(value: Any, depth: int = 0) -> Any:
    """The inverse of `to_plain`; ValueError for anything it does not write."""
    if depth > 2 * _MAX_DEPTH:
        raise ValueError(f"data is nested more than {2 * _MAX_DEPTH} deep")
    if isinstance(value, list):
        return [from_plain(v, depth + 1) for v in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {k: from_plain(v, depth + 1) for k, v in value.items()}
    kind, held = value["$"], value.get("value")
    if kind == "int" and isinstance(held, str) and len(held) <= _MAX_DIGITS:
        return int(held)
    if kind == "float" and held in ("inf", "-inf", "nan"):
        return float(held)
    if kind == "tuple" and isinstance(held, list):
        return tuple(from_plain(v, depth + 1) for v in held)
    if kind == "tensor":
        return _tensor_in(value)
    if isinstance(kind, str) and kind in _MAPPINGS and isinstance(held, list):
        made: Any = _MAPPINGS[kind]()
        for pair in held:
            key, item = (from_plain(v, depth + 1) for v in pair)
            made[key] = item
        return made
    raise ValueError(f"there is no kind of data {kind!r}")


def _tensor_out(value: Tensor, where: str) -> dict[str, Any]:
    held = value.detach().cpu().contiguous()
    if held.nbytes > 1 << 16:
        raise InputError(f"{where} is a tensor of {held.nbytes} bytes; options are small")
    data = held.reshape(-1).view(torch.uint8).numpy().tobytes() if held.numel() else b""
    return {
        "$": "tensor",
        "dtype": str(held.dtype).removeprefix("torch."),
        "shape": list(held.shape),
        "data": base64.b64encode(data).decode(),
    }


def _tensor_in(value: dict[str, Any]) -> Tensor:
    dtype, shape = getattr(torch, str(value.get("dtype")), None), value.get("shape")
    if not isinstance(dtype, torch.dtype) or not isinstance(shape, list):
        raise ValueError("a tensor has a dtype and a shape")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"no tensor has the shape {shape}")
    data = bytearray(base64.b64decode(str(value.get("data")), validate=True))
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError("a tensor's data is not of its shape")
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape)
