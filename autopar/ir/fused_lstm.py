"""oneDNN's LSTM as an operator per layer and direction that returns the workspace for its backward.

On CPUs PyTorch runs an LSTM as ``aten.mkldnn_rnn_layer``, much faster than step by step. That
operator returns its workspace only while autograd records, which it does not when a traced graph
runs. Traces therefore contain the operator below, which always returns it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LINE = 16
_BAD_STRIDE = 256
_PAGE = 4096
_SMALL_BYTES = 568


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
    """Size of oneDNN's workspace for one layer in one direction, each part in whole pages.

    The gates; states, cells and their gradients before and after each step; and a product of each
    step. Fitted to what oneDNN 3.12 reports.
    """
    gates = _pages(steps * batch * _row(4 * hidden) * itemsize)
    rows = 2 * (steps + 1) * batch * itemsize
    states = 3 * _pages(rows * _row(max(features, hidden)))
    cells = 2 * _pages(rows * hidden)
    return gates + states + cells + _pages(steps * batch * _row(hidden) * itemsize)


def scratch_bytes(
    steps: int, batch: int, features: int, hidden: int, itemsize: int, *, is_backward: bool
) -> int:
    """Memory that oneDNN uses only while it runs a layer: weights in its own layout, the gates, two
    states, and a sum of biases.

    In backward it also holds the weights in the transposed layout, where that layout is padded.
    """
    sizes = (features, hidden)
    weights = sum(sizes) * _row(4 * hidden)
    if is_backward:
        weights += sum(4 * hidden * _row(size) for size in sizes if _row(size) != size)
    gates = _pages(steps * batch * _row(4 * hidden) * itemsize)
    states = 2 * _pages(batch * _row(hidden) * itemsize)
    return (weights + 4 * hidden) * itemsize + gates + states + _PAGE + _SMALL_BYTES


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE) * _PAGE


def _row(size: int) -> int:
    """Row length padded to a multiple of a cache line, but not of a quarter page (conflicts)."""
    padded = -(-size // _LINE) * _LINE
    return padded if padded % _BAD_STRIDE else padded + _LINE
