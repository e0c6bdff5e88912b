"""The same on CUDA devices and NCCL."""

from __future__ import annotations

import pytest
import torch

from autopar.capture import capture
from autopar.lowering import lower
from autopar.mesh import Mesh
from autopar.runtime.compiled import Compiled
from autopar.strategy import Analysis, Strategy
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
        optimizer=sgd,
    ) as compiled:
        losses = [compiled.train_step(**batch).item() for batch in batches]
        state = compiled.full_state_dict()
        evaluated = compiled.eval()(**batches[0])
    torch.testing.assert_close(losses, expected.losses, rtol=2e-6, atol=2e-6)
    for key, tensor in expected.weights.items():
        torch.testing.assert_close(state[key], tensor, rtol=1e-5, atol=2e-6)
    model.load_state_dict(state)
    expected_loss = loss_of(model.eval()(**batches[0])).detach()
    torch.testing.assert_close(loss_of(evaluated), expected_loss, rtol=1e-5, atol=2e-6)
