"""On CPUs, an LSTM runs as oneDNN's fused layers, in plans as in eager mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.fused_lstm import lstm_layer, workspace_bytes
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
    [(64, 16, 32, 32), (64, 16, 256, 256), (40, 8, 96, 100), (16, 32, 64, 200), (33, 4, 512, 96)],
)
def test_workspace_is_counted(steps: int, batch: int, features: int, hidden: int) -> None:
    x, state = torch.randn(steps, batch, features), torch.zeros(batch, hidden)
    weights = torch.randn(4 * hidden, features), torch.randn(4 * hidden, hidden)
    bias = torch.zeros(4 * hidden)
    with torch.no_grad():
        *_, workspace = lstm_layer(
            x, *weights, bias, bias, state, state, False, [], 2, hidden, 1, True, False, False, True
        )
    counted = workspace_bytes(steps, batch, features, hidden, 4)
    assert counted == pytest.approx(workspace.numel(), rel=0.03)
