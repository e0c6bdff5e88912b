"""The gradient check of ``compile``, with two workers and under ``torchrun``."""

from __future__ import annotations

import copy
import functools
import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.base.errors import GradientError, InputError
from autopar.frontend import capture as capturing
from tests.models import test_odd_captures as odd
from tests.oracles import state_of

SGD = functools.partial(torch.optim.SGD, lr=0.1)
NUM_STEPS = 2


def trained_in_eager(model: nn.Module, x: Tensor) -> tuple[list[float], dict[str, Tensor]]:
    model = copy.deepcopy(model)
    optimizer, losses = SGD(model.parameters()), []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, state_of(model)


@pytest.mark.parametrize("body", [odd.reentrant, odd.filled_diagonal], ids=lambda b: b.__name__)
def test_two_workers_train_as_in_eager_where_gradients_were_lost(body):
    torch.manual_seed(0)
    model, x = odd.Odd(body), torch.randn(4, 4)
    expected, weights = trained_in_eager(model, x)
    with autopar.compile(
        model, 2, example_inputs=(x,), optimizer=SGD, profile_limit_s=0
    ) as compiled:
        losses = [compiled.train_step(x).item() for _ in range(NUM_STEPS)]
        state = compiled.full_state_dict()
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(state["linear.weight"], model.linear.weight)
    for name, tensor in weights.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-6)


def test_compile_refuses_a_lost_gradient_unless_the_check_is_off(monkeypatch):
    monkeypatch.setattr(capturing, "index_strided_access", lambda module: None)
    torch.manual_seed(0)
    model, x = odd.Odd(odd.filled_diagonal), torch.randn(4, 4)
    options = {"example_inputs": (x,), "optimizer": SGD, "profile_limit_s": 0}
    with pytest.raises(GradientError, match=r"aten.as_strided_scatter.default at .*odd_captures"):
        autopar.compile(model, 2, **options)
    with pytest.raises(InputError, match="check_gradients is 1; it must be True or False"):
        autopar.compile(model, 2, check_gradients=1, **options)
    with autopar.compile(model, 2, check_gradients=False, **options) as compiled:
        assert compiled.train_step(x).item() == pytest.approx(model(x).item(), rel=1e-5)


def test_compile_for_training_refuses_a_frozen_model():
    model, x = odd.Odd(odd.filled_diagonal).requires_grad_(False), torch.randn(4, 4)
    with pytest.raises(InputError, match="none of its parameters requires a gradient"):
        autopar.compile(model, 2, example_inputs=(x,), optimizer=SGD, profile_limit_s=0)
    with autopar.compile(model, 2, example_inputs=(x,), profile_limit_s=0) as compiled:
        torch.testing.assert_close(compiled(x), model(x))


SCRIPT = """
    import functools, json, os, pathlib, sys
    import torch
    sys.path.insert(0, {root!r})
    import autopar
    from autopar.frontend import capture as capturing
    from tests.models import test_odd_captures as odd

    torch.manual_seed(0)
    model, x = odd.Odd(odd.filled_diagonal), torch.randn(4, 4)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    options = dict(example_inputs=(x,), optimizer=sgd, profile_limit_s=0)

    def refused(call):
        try:
            call()
        except autopar.AutoparError as error:
            return type(error).__name__ + ": " + str(error)
        return ""

    rewrite, capturing.index_strided_access = capturing.index_strided_access, lambda module: None
    found = [refused(lambda: autopar.compile(model, "cpu", **options))]
    capturing.index_strided_access = rewrite
    compiled = autopar.compile(model, "cpu", **options)
    with torch.autocast("cpu", torch.bfloat16):
        found.append(refused(lambda: compiled.train_step(x)))
        found.append(refused(lambda: compiled(x)))
    losses = [compiled.train_step(x).item() for _ in range(2)]
    compiled.close()
    pathlib.Path({folder!r}, os.environ["RANK"]).write_text(json.dumps([found, losses]))
"""


def test_every_rank_hears_the_verdict_under_torchrun(tmp_path):
    torch.manual_seed(0)
    model, x = odd.Odd(odd.filled_diagonal), torch.randn(4, 4)
    expected, _ = trained_in_eager(model, x)
    script = tmp_path / "train.py"
    root = str(Path(__file__).parents[2])
    script.write_text(textwrap.dedent(SCRIPT.format(root=root, folder=str(tmp_path))))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
            f"--master-port={port}", str(script),
        ],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    for rank in ("0", "1"):
        (verdict, in_step, in_call), losses = json.loads((tmp_path / rank).read_text())
        assert verdict.startswith("GradientError: the captured graph does not compute")
        assert "aten.as_strided_scatter.default at " in verdict
        assert in_step.startswith("InputError: train_step was called inside torch.autocast('cpu'")
        assert in_call.startswith("InputError: the compiled model was called inside torch.auto")
        assert losses == pytest.approx(expected, rel=1e-5)
