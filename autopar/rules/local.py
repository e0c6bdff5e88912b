"""Execution of one op on the shards of one device, according to its rule and choice."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.comm.ops import identity, with_gradient
from autopar.ir.graph import Op, Ref
from autopar.rules.choice import padded_dims
from autopar.rules.context import LocalContext
from autopar.rules.registry import rule_of
from autopar.rules.space import Layout

_RECURRENT = {"aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input"}


def call_op(op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call the operator itself; tuples among the arguments become the lists it expects."""
    return op.target(*_lists(args), **{k: _lists(v) for k, v in kwargs.items()})


def shard_call(
    context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The operator that a device calls for an op, and its arguments on a shard."""
    rule = rule_of(context.op)
    if rule is None:
        return context.op.target, args, kwargs
    if rule.arguments is not None:
        args, kwargs = rule.arguments(context, args, kwargs)
    return rule.runs_as or context.op.target, args, kwargs


def call_target(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The default lowering: the same operator on the local shards."""
    target, args, kwargs = shard_call(context, args, kwargs)
    with _traceable(context.op):
        return target(*_lists(args), **{k: _lists(v) for k, v in kwargs.items()})


def _traceable(op: Op) -> contextlib.AbstractContextManager[None]:
    """Within: a recurrent layer runs step by step, as ATen's own kernels do.

    The call of cuDNN's looks at the storage of the weights, which no trace records.
    """
    if op.target_name not in _RECURRENT:
        return contextlib.nullcontext()
    cudnn = torch.backends.cudnn
    found: contextlib.AbstractContextManager[None] = cudnn.flags(
        enabled=False, benchmark=cudnn.benchmark, deterministic=cudnn.deterministic,
        allow_tf32=cudnn.allow_tf32,
    )  # fmt: skip
    return found


def _lists(node: Any) -> Any:
    return [_lists(n) for n in node] if isinstance(node, tuple) else node


def run_local(context: LocalContext, operands: Sequence[Tensor]) -> list[Any]:
    """Run one op on its local operands under its choice; returns its outputs.

    ``operands``: this device's shard of each tensor operand, in the placements of `needs`. Outputs
    have the placements of `supplies`.
    """
    rule, op = rule_of(context.op), context.op
    if rule is None or context.choice.is_redundant:
        return _as_list(call_target(context, *_arguments(context, operands)))
    space = context.space
    dims = [d for d in padded_dims(space, context.choice, context.mesh) if d not in space.clean]
    for dim in dims:
        operands = [_shield(context, x, lay, dim) for x, lay in zip(operands, space.inputs)]
    lower = rule.lower or call_target
    results = _as_list(lower(context, *_arguments(context, operands)))
    for dim in dims:
        results = [
            r if o is None else _clear(context, r, lay, dim)
            for r, o, lay in zip(results, op.outputs, space.outputs)
        ]
    return results


def _as_list(results: Any) -> list[Any]:
    return list(results) if isinstance(results, list | tuple) else [results]


def _arguments(
    context: LocalContext, operands: Sequence[Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = context.op.bind(list(operands))
    if context.device is None:
        return args, kwargs
    return _on_device(args, context.device), _on_device(kwargs, context.device)


def _on_device(node: Any, device: torch.device) -> Any:
    """Arguments with every captured device replaced by the device of the program."""
    if isinstance(node, torch.device):
        return device
    if isinstance(node, dict):
        return {k: _on_device(v, device) for k, v in node.items()}
    if isinstance(node, tuple) and not isinstance(node, Ref):
        return tuple(_on_device(n, device) for n in node)
    return node


def _clear(context: LocalContext, x: Tensor, layout: Layout, dim: str) -> Tensor:
    """``x`` with zeros in the padding of ``dim``."""
    tensor_dim = next((d for d, factors in enumerate(layout) if dim in factors), None)
    if tensor_dim is None:
        return x
    filled = context.is_filled(x, dim)
    return torch.where(filled.view(-1, *[1] * (x.dim() - 1 - tensor_dim)), x, x.new_zeros(()))


def _shield(context: LocalContext, x: Tensor, layout: Layout, dim: str) -> Tensor:
    """``x`` with zeros in the padding of ``dim`` of its gradient."""
    if not x.requires_grad or not any(dim in factors for factors in layout):
        return x
    return with_gradient(x, identity, lambda grad: _clear(context, grad, layout, dim))
