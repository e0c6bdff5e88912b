"""oneDNN's LSTM as an operator per layer and direction that returns the workspace for its backward.

On CPUs PyTorch runs an LSTM as ``aten.mkldnn_rnn_layer``, much faster than step by step. That
operator returns its workspace only while autograd records, which it does not when a traced graph
runs. Traces therefore contain the operator below, which always returns it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORKSPACE_STATES = (6.0, 4.8)
"""Multiples of ``max(features, hidden)`` and ``hidden`` in oneDNN's workspace, besides the gates.

Per sequence and step, plus the initial state; fitted to the sizes that oneDNN reports.
"""
_LINE = 16
_BAD_STRIDE = 256


@torch.library.custom_op("autopar::lstm_layer", mutates_args=())
def lstm_layer(
    x: Tensor,
    input_weight: Tensor,
    hidden_weight: Tensor,
    input_bias: Tensor,
    hidden_bias: Tensor,
    hidden: Tensor,
    cell: Tensor,
    reverse: bool,
    batch_sizes: list[int],
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
    train: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output ``[steps, batch, hidden]``, last states ``[batch, hidden]``, and the workspace.

    The arguments are those of ``aten.mkldnn_rnn_layer``; ``x`` is ``[steps, batch, features]``.
    """
    with torch.enable_grad():
        made: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.aten.mkldnn_rnn_layer(
            x, input_weight, hidden_weight, input_bias, hidden_bias, hidden, cell, reverse,
            batch_sizes, mode, hidden_size, num_layers, has_biases, bidirectional, batch_first,
            train,
        )  # fmt: skip
    return made


@lstm_layer.register_fake
def _(
    x: Tensor,
    input_weight: Tensor,
    hidden_weight: Tensor,
    input_bias: Tensor,
    hidden_bias: Tensor,
    hidden: Tensor,
    cell: Tensor,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    steps, batch, features = x.shape
    hidden_size = hidden_weight.shape[1]
    kept_bytes = workspace_bytes(steps, batch, features, hidden_size, x.element_size())
    return (
        x.new_empty(steps, batch, hidden_size),
        torch.empty_like(hidden),
        torch.empty_like(cell),
        x.new_empty(kept_bytes, dtype=torch.uint8),
    )


def workspace_bytes(steps: int, batch: int, features: int, hidden: int, itemsize: int) -> int:
    """Approximate size of oneDNN's workspace for one layer in one direction."""
    first, second = _WORKSPACE_STATES
    gates = steps * _row(4 * hidden)
    states = (steps + 1) * (first * _row(max(features, hidden)) + second * _row(hidden))
    return int(batch * itemsize * (gates + states))


def scratch_bytes(
    steps: int, batch: int, features: int, hidden: int, itemsize: int, *, is_backward: bool
) -> int:
    """Memory that oneDNN uses only while it runs a layer: weights in its own layout, and the gates.

    In backward it also holds the weights in the transposed layout, where that layout is padded.
    """
    sizes = (features, hidden)
    needed = (sum(sizes) + steps * batch) * _row(4 * hidden)
    if is_backward:
        needed += sum(4 * hidden * _row(size) for size in sizes if _row(size) != size)
    return needed * itemsize


def _row(size: int) -> int:
    """Row length padded to a multiple of a cache line, but not of a quarter page (conflicts)."""
    padded = -(-size // _LINE) * _LINE
    return padded if padded % _BAD_STRIDE else padded + _LINE
