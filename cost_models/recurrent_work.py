"""The work of recurrent layers and cells."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from autopar.cost_models.calls import OpCall, TensorSpec
from autopar.cost_models.work import NO_WORK, Family, MatrixShape, OpWork, Work, output_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recurrence:
    """``num_cells`` cells, one per layer and direction, over ``rows`` inputs of all steps.

    ``weights`` are those of each cell in sequence, beginning with the matrices of the input and of
    the hidden state.
    """

    x: TensorSpec
    states: tuple[TensorSpec, ...]
    weights: tuple[TensorSpec, ...]
    num_cells: int
    directions: int
    rows: int
    steps: int


def _of_layers(call: OpCall) -> _Recurrence:
    """The recurrence of ``aten.lstm.input`` and the like, and of ``data`` on packed sequences."""
    is_packed = call.target.endswith(".data")
    x, *options = (call.args[0], *call.args[2:]) if is_packed else call.args
    states, weights, _, num_layers, _, _, is_bidirectional = options[:7]
    directions = 2 if is_bidirectional else 1
    if is_packed:
        steps = call.tensor(1, "batch_sizes").num_elements
    else:
        steps = x.shape[1 if call.argument(8, "batch_first") else 0]
    return _Recurrence(
        x=x,
        states=_as_tuple(states),
        weights=weights,
        num_cells=num_layers * directions,
        directions=directions,
        rows=prod(x.shape[:-1]),
        steps=steps,
    )


def _of_cell(call: OpCall) -> _Recurrence:
    x, states = call.tensor(0, "input"), _as_tuple(call.argument(1, "hx"))
    return _Recurrence(
        x=x,
        states=states,
        weights=call.tensors()[1 + len(states) :],
        num_cells=1,
        directions=1,
        rows=prod(x.shape[:-1]),
        steps=1,
    )


def _as_tuple(states: Any) -> tuple[TensorSpec, ...]:
    return (states,) if isinstance(states, TensorSpec) else states


def _layers(call: OpCall) -> OpWork:
    return _recurrent(call, _of_layers(call))


def _cell(call: OpCall) -> OpWork:
    return _recurrent(call, _of_cell(call))


def _recurrent(call: OpCall, found: _Recurrence) -> OpWork:
    """For each cell and step, the gates from the step's input and the hidden state."""
    x, rows = found.x, found.rows
    matrices = [w for w in found.weights if len(w.shape) == 2]
    per_cell, matrices_per_cell = (len(w) // found.num_cells for w in (found.weights, matrices))
    total = sum(2 * rows * prod(w.shape) for w in matrices)
    weight_bytes = sum(w.size_bytes for w in found.weights)
    hidden = [found.weights[cell * per_cell + 1].shape[-1] for cell in range(found.num_cells)]
    num_gates = matrices[0].shape[0] // found.states[-1].shape[-1]
    # At every step gates and states are written and read, and the weights are read.
    gate_bytes = 2 * (num_gates + 1) * rows * sum(hidden) * x.dtype.itemsize
    forward = Work(
        flops=total,
        size_bytes=x.size_bytes + found.steps * weight_bytes + gate_bytes + output_bytes(call),
        num_kernels=found.num_cells * (found.steps + 1),
        matrix=MatrixShape(m=rows // found.steps, n=matrices[0].shape[0], k=hidden[0]),
    )
    inputs = any(s.requires_grad for s in (x, *found.states))
    trained = [w for w in found.weights if w.requires_grad]
    first_ones = matrices[: matrices_per_cell * found.directions : matrices_per_cell]
    first_layer = sum(2 * rows * prod(w.shape) for w in first_ones)
    # Gradients flow through time in either case; without x's, the first layer's input is omitted.
    through_time = Work(
        flops=total if inputs else total - first_layer,
        size_bytes=forward.size_bytes + gate_bytes,
        num_kernels=2 * forward.num_kernels,
        matrix=forward.matrix,
    )
    weight_grad = NO_WORK
    if trained:
        has_bias = len(matrices) < len(found.weights)
        weight_grad = Work(
            flops=sum(2 * rows * prod(w.shape) for w in trained if len(w.shape) == 2),
            size_bytes=x.size_bytes + gate_bytes + weight_bytes,
            num_kernels=found.num_cells * (3 if has_bias else 2),
            matrix=MatrixShape(m=matrices[0].shape[0], n=hidden[0], k=rows),
        )
    return OpWork(
        family=Family.RECURRENT,
        dtype=x.dtype,
        forward=forward,
        input_grad=through_time if inputs else NO_WORK,
        weight_grad=weight_grad if inputs or not trained else weight_grad + through_time,
    )


RECURRENT_RULES: dict[str, Callable[[OpCall], OpWork]] = {
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _layers),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), _cell),
}
