"""Recurrent layers: the batch is free; a time step needs the whole hidden state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from autopar.ir.fused_lstm import scratch_bytes
from autopar.ir.graph import Op, Value
from autopar.rules.derivative import Keeps
from autopar.rules.registry import register
from autopar.rules.space import Space, SpaceBuilder, layout
from autopar.rules.traced import register_traced

Outputs = Sequence[Value | None]


def _per_layer(share: float) -> Keeps:
    """The gates and states of every step in every layer (for an LSTM, oneDNN's workspace)."""

    def further(op: Op, output: Value) -> float:
        _, num_layers, *_ = op.args[-6:]
        return share * float(num_layers)

    return Keeps(further=further)


@register("aten.lstm.input", keeps=_per_layer(16))
@register("aten.gru.input", keeps=_per_layer(5))
@register("aten.rnn_tanh.input", "aten.rnn_relu.input")
def recurrent_space(op: Op, inputs: Sequence[Value], outputs: Outputs) -> Space | None:
    """``x[b, s, i]`` or ``[s, b, i]``, states ``[layers, b, h]``; weights stay whole."""
    shape, batch_first = inputs[0].shape, bool(op.args[-1])
    if len(shape) != 3:
        return None
    num_states = 2 if op.target_name == "aten.lstm.input" else 1
    builder = SpaceBuilder()
    b = builder.dim("b", shape[0 if batch_first else 1])
    s = builder.whole(shape[1 if batch_first else 0])

    def sequence(features: int) -> tuple[tuple[str, ...], ...]:
        f = builder.whole(features)
        return layout(b, s, f) if batch_first else layout(s, b, f)

    def state(value_shape: Sequence[int]) -> tuple[tuple[str, ...], ...]:
        return layout(builder.whole(value_shape[0]), b, builder.whole(value_shape[2]))

    states = [state(v.shape) for v in inputs[1 : 1 + num_states]]
    weights = [layout(*map(builder.whole, v.shape)) for v in inputs[1 + num_states :]]
    first = sequence(1 if outputs[0] is None else outputs[0].shape[2])
    finals = [state((1, 1, 1) if o is None else o.shape) for o in outputs[1:]]
    return builder.build([sequence(shape[2]), *states, *weights], [first, *finals], anchor=True)


def _forward_scratch(_: Any, args: tuple[Any, ...], num_threads: int) -> int:
    return _lstm_scratch(args, is_backward=False) + _copied(args[0])


def _backward_scratch(_: Any, args: tuple[Any, ...], num_threads: int) -> int:
    """With the copies that torch makes of what is not contiguous or not given."""
    x, hidden, cell, results, cotangents = args[0], args[5], args[6], args[7:10], args[10:13]
    copied = _copied(x) + sum(
        result.nbytes if cotangent is None else _copied(cotangent)
        for result, cotangent in zip(results, cotangents)
    )
    if hidden.untyped_storage() is cell.untyped_storage():
        copied += cell.nbytes
    return _lstm_scratch(args, is_backward=True) + copied


def _lstm_scratch(args: tuple[Any, ...], *, is_backward: bool) -> int:
    x, _, hidden_weight = args[:3]
    sizes = (*x.shape, hidden_weight.shape[1], x.element_size())
    return scratch_bytes(*sizes, is_backward=is_backward)


def _copied(tensor: Tensor) -> int:
    return 0 if tensor.is_contiguous() else tensor.nbytes


register_traced("autopar.lstm_layer.default", cpu_scratch=_forward_scratch)
register_traced("aten.mkldnn_rnn_layer_backward.default", cpu_scratch=_backward_scratch)
