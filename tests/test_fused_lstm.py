"""On CPUs, an LSTM runs as oneDNN's fused layers, in plans as in eager mode."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from autopar.base.allocations import Recording
from autopar.ir.fused_lstm import lstm_layer, scratch_bytes, workspace_bytes
from autopar.lowering.differentiate import trace_joint
from autopar.lowering.types import Kernel, TensorMeta

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="needs a torch with oneDNN"
)
STEPS, BATCH, FEATURES, HIDDEN = 7, 3, 20, 24


def kernel_of(lstm: nn.LSTM, x: Tensor) -> Kernel:
    names = [name for name, _ in lstm.named_parameters()]

    def run(operands: list[Tensor]) -> tuple[Tensor, ...]:
        given = dict(zip(names, operands[1:]))
        return (torch.func.functional_call(lstm, given, (operands[0],))[0],)

    operands = [x, *lstm.parameters()]
    is_weight = [False] + [True] * len(names)
    metas = [TensorMeta.of(operand) for operand in operands]
    joint = trace_joint(run, metas, [True] * len(operands), is_weight, torch.device("cpu"))
    return joint.kernel()


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_equal_eager(batch_first: bool, bidirectional: bool, bias: bool) -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(
        FEATURES, HIDDEN, 2, bias=bias, batch_first=batch_first, bidirectional=bidirectional
    )
    x = torch.randn(STEPS, BATCH, FEATURES, requires_grad=True)
    kernel = kernel_of(lstm, x)
    called = [node.target for node in kernel.forward.graph.nodes]
    layers = 2 * (1 + bidirectional)
    assert called.count(torch.ops.autopar.lstm_layer.default) == layers

    expected = lstm(x)[0]
    cotangent = torch.randn_like(expected)
    operands = [x.detach(), *(p.detach() for p in lstm.parameters())]
    with torch.no_grad():  # as a runtime runs the graphs
        output, *saved = kernel.forward(*operands)
        known = {"operand": operands, "saved": saved, "cotangent": [cotangent]}
        assert kernel.backward_input is not None
        of_input, *handed = kernel.backward_input(
            *(known[kind][i] for kind, i in kernel.input_sources)
        )
        known["handed"] = handed
        assert kernel.backward_weight is not None
        of_weights = kernel.backward_weight(*(known[kind][i] for kind, i in kernel.weight_sources))
    torch.testing.assert_close(output, expected)
    grads = torch.autograd.grad(expected, [x, *lstm.parameters()], cotangent)
    for found, wanted in zip([of_input, *of_weights], grads, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("steps", "batch", "features", "hidden"),
    [
        (1, 1, 64, 64), (7, 3, 20, 24), (64, 16, 32, 32), (64, 16, 256, 256), (40, 8, 96, 100),
        (16, 32, 64, 200), (33, 4, 512, 96),
    ],
)  # fmt: skip
def test_memory_is_counted(steps: int, batch: int, features: int, hidden: int) -> None:
    """The workspace, and what the layer and its derivative take while they run."""
    x, states = torch.randn(steps, batch, features), [torch.zeros(batch, hidden) for _ in "hc"]
    weights = torch.randn(4 * hidden, features), torch.randn(4 * hidden, hidden)
    bias = torch.zeros(4 * hidden)
    given = x, *weights, bias, bias, *states
    options = 2, hidden, 1, True  # an LSTM, its width, one layer, biases
    sizes = steps, batch, features, hidden, 4

    def forward() -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = lstm_layer(*given, False, [], *options, False, False, True)
        return made

    def backward() -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = torch.ops.aten.mkldnn_rnn_layer_backward(
            *given, *results, *cotangents, False, *options, True, False, [], False, workspace
        )
        return made

    with torch.no_grad():
        *results, workspace = forward()
        cotangents = [torch.ones_like(result) for result in results]
        assert workspace_bytes(*sizes) == workspace.numel()
        for call, is_backward in ((forward, False), (backward, True)):
            call()
            recording = Recording()
            made = call()
            changes = recording.end()
            scratch = max(itertools.accumulate(changes)) - sum(t.nbytes for t in made)
            assert scratch_bytes(*sizes, is_backward=is_backward) == scratch
