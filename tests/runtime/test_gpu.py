"""The runtime's tests on CUDA devices and NCCL."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.frontend.capture import capture
from autopar.ir.mesh import Mesh
from autopar.lowering import lower
from autopar.rules.batch_norm import _SynchronizedBatchNorm
from autopar.rules.context import LocalContext
from autopar.runtime.compiled import Compiled
from autopar.runtime.options import RunOptions
from autopar.sharding.strategy import Analysis, Strategy
from tests.models.zoo import build
from tests.oracles import NUM_STEPS, loss_of, random_assignment, reference_steps, sgd, to_double
from tests.runtime.processes import lower_forward


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["mlp", "lstm", "gpt2", "resnet"])
@pytest.mark.parametrize("seed", [0, 1])
def test_training_equals_eager(name: str, seed: int) -> None:
    num_devices = min(2, torch.cuda.device_count())
    model, make_batch = build(name)
    model = model.double()
    batches = [to_double(make_batch(seed)) for seed in range(NUM_STEPS)]
    captured = capture(model, batches[0])
    analysis = Analysis(captured.graph)
    mesh = Mesh(("a",), (num_devices,))
    strategy = Strategy(analysis, random_assignment(analysis, mesh, seed))
    expected = reference_steps(model, batches)
    with Compiled(
        captured=captured,
        program=lower(strategy, device_type="cuda"),
        forward_program=lambda: lower(strategy, device_type="cuda", training=False),
        lower_forward=lower_forward(mesh, seed, device_type="cuda"),
        plan=None,
        devices=[torch.device("cuda", index) for index in range(num_devices)],
        model=model,
        options=RunOptions(optimizer=sgd),
    ) as compiled:
        losses = [compiled.train_step(**batch).item() for batch in batches]
        state = compiled.full_state_dict()
        held = min(compiled.peak_tensor_bytes(**batches[0]))
        compiled.load_state_dict(state)  # as it was before two more steps
        evaluated = compiled.eval()(**batches[0])
    torch.testing.assert_close(losses, expected.losses, rtol=2e-6, atol=2e-6)
    for key, tensor in expected.weights.items():
        torch.testing.assert_close(state[key], tensor, rtol=1e-5, atol=2e-6)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert held > parameters / num_devices
    model.load_state_dict(state)
    expected_loss = loss_of(model.eval()(**batches[0])).detach()
    torch.testing.assert_close(loss_of(evaluated), expected_loss, rtol=1e-5, atol=2e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_synchronized_batch_norm(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    check_synchronized_batch_norm("cuda", dtype, memory_format)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_synchronized_batch_norm_on_the_cpu(
    dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    check_synchronized_batch_norm("cpu", dtype, memory_format)


def check_synchronized_batch_norm(
    device: str, dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    """The kernels of a device, in a group of one, against the device's own batch norm."""
    torch.manual_seed(0)
    like = {"device": device, "dtype": dtype}
    x = (torch.randn(8, 6, 5, 5, **like) * 3 + 1).contiguous(memory_format=memory_format)
    operands = [x, torch.rand(6, **like) + 0.5, torch.randn(6, **like)]
    gradient = torch.randn_like(x)

    def run(function: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [operand.clone().requires_grad_() for operand in operands]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]

    context = LocalContext(
        op=None, space=None, choice=None, mesh=Mesh(("x",), (1,)), output_shapes=()
    )
    got = run(lambda *a: _SynchronizedBatchNorm.apply(*a, 1e-5, context, (0,))[0])
    expected = run(lambda *a: F.batch_norm(a[0], None, None, a[1], a[2], training=True, eps=1e-5))
    tolerance = 1e-4 if dtype is torch.float32 else 5e-2
    for ours, theirs in zip(got, expected):
        assert ours.dtype is theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
