"""Calls as text: the key of the profile store.

The text is one line of canonical JSON, so equal calls have equal text on every machine. Parsing
accepts calls only; nothing is evaluated.
"""

import json
from typing import Any

import torch

from autopar.cost_models.calls import OpCall, TensorSpec
from autopar.cost_models.estimate import CostError

_TENSOR, _CONSTANT = "tensor", "torch"


def call_to_text(call: OpCall) -> str:
    """The call as one line of JSON; the inverse of ``call_from_text``."""
    return json.dumps(
        [call.target, _encode(call.args), [[name, _encode(value)] for name, value in call.kwargs]],
        separators=(",", ":"),
    )


def call_from_text(text: str) -> OpCall:
    """Parse the text of ``call_to_text``; raises CostError for any other text."""
    try:
        target, args, kwargs = json.loads(text)
        if not isinstance(target, str):
            raise TypeError("the target is not a string")
        pairs = tuple((str(name), _decode(value)) for name, value in kwargs)
        return OpCall(target, tuple(_decode(value) for value in args), pairs)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CostError(f"{str(text)[:80]!r} is not a call: {error}") from error


def _encode(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        stride = None if value.stride is None else list(value.stride)
        flags = [int(value.requires_grad), int(value.is_parameter)]
        return {_TENSOR: [list(value.shape), _name(value.dtype), stride, *flags]}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return {_CONSTANT: _name(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CostError(f"{value!r} cannot be written as part of a call.")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == _CONSTANT:
        return _constant(content)
    if kind == "complex":
        return complex(*content)
    if kind != _TENSOR:
        raise ValueError(f"unknown kind {kind!r}")
    shape, dtype, stride, requires_grad, is_parameter = content
    return TensorSpec(
        _sizes(shape),
        _constant(dtype),
        None if stride is None else _sizes(stride),
        bool(requires_grad),
        bool(is_parameter),
    )


def _sizes(value: Any) -> tuple[int, ...]:
    if not all(type(size) is int and size >= 0 for size in value):
        raise ValueError(f"{value} are not sizes")
    return tuple(value)


def _name(constant: Any) -> str:
    return str(constant).removeprefix("torch.")


def _constant(name: str) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, (torch.dtype, torch.memory_format, torch.layout)):
        raise ValueError(f"torch.{name} is not a constant")
    return found
