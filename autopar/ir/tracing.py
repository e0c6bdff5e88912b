"""Tracing of functions over fake tensors, into functional graphs."""

from __future__ import annotations

from typing import Any

import torch

from autopar.base.exclusive import in_turn
from autopar.base.torch_private import (
    FakeTensorMode,
    without_generated_code,
    without_patched_modules,
)
from autopar.ir.fused_lstm import lstm_layer

VIEWS = frozenset({torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default})
"""Operators that give a tensor another shape, and fail for the strides of some tensors."""


@in_turn()
def trace_fx(function: Any, mode: FakeTensorMode, *arguments: Any) -> Any:
    """``torch.fx.experimental.proxy_tensor.make_fx`` over fake tensors of ``mode`` (2.11-2.13).

    Annotations of ``torch.fx.traceback.annotate`` are kept on the nodes. Where an operator's own
    decomposition writes in place (circular padding does), the trace is functionalized, so that
    nodes may be reordered and dropped by their results alone; views are reshapes then, as values
    have other strides. oneDNN's LSTM is recorded as `autopar.ir.fused_lstm.lstm_layer`, and
    gradients that are zero as ordinary zeros: tensors without storage lose their device where fake
    ones are added to them.
    """
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import preserve_node_meta

    instead: dict[Any, Any] = {
        torch.ops.aten.mkldnn_rnn_layer.default: lstm_layer,
        torch.ops.aten._efficientzerotensor.default: torch.ops.aten.zeros.default,
    }
    with mode, preserve_node_meta(), without_generated_code(), without_patched_modules():
        traced = make_fx(
            function,
            tracing_mode="real",
            decomposition_table=instead,
            _disable_torch_fn_metadata_mode=True,  # nobody reads which function called an operator
        )
        module = traced(*arguments)
        if _writes(module):
            _reshape(module)
            interpreter = torch.fx.Interpreter(module)
            functional = torch.func.functionalize(interpreter.run, remove="mutations")
            module = make_fx(functional, tracing_mode="real")(*arguments)
    assert not _writes(module), "a traced graph must be functional"
    return module


def _writes(module: torch.fx.GraphModule) -> bool:
    """Whether a graph calls an operator that mutates its arguments."""
    return any(
        isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        for node in module.graph.nodes
    )


def _reshape(module: torch.fx.GraphModule) -> None:
    """Turn the views of a graph into reshapes."""
    for node in module.graph.nodes:
        if node.target in VIEWS:
            node.target = torch.ops.aten.reshape.default
