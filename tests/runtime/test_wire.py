"""Programs as bytes: unusual arguments of a graph survive serialisation."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import fx

from autopar.runtime.state.wire import _Pickler


def test_memory_formats_and_layouts_need_no_module_of_the_user(monkeypatch: pytest.MonkeyPatch):
    graph = fx.Graph()
    x = graph.placeholder("x")
    clone = torch.ops.aten.clone.default
    copied = graph.call_function(clone, (x,), {"memory_format": torch.contiguous_format})
    zeros = torch.ops.aten.zeros_like.default
    graph.output(graph.call_function(zeros, (copied,), {"layout": torch.strided}))
    module = fx.GraphModule({}, graph)

    users_own = types.ModuleType("only_here")
    users_own.torch = torch
    monkeypatch.setattr(sys, "modules", {"only_here": users_own, **sys.modules})
    buffer = io.BytesIO()
    _Pickler(buffer).dump(module)
    monkeypatch.undo()
    arrived = pickle.loads(buffer.getvalue())
    kwargs = [node.kwargs for node in arrived.graph.nodes if node.kwargs]
    assert kwargs == [{"memory_format": torch.contiguous_format}, {"layout": torch.strided}]


SCRIPT = """
import torch
import autopar
{definition}
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return torch.ops.wiretest.doubled(self.linear(x)).square().mean()

torch.manual_seed(0)
model, x = Model(), torch.ones(4, 4)
cluster = autopar.Cluster.preset("cpu", nodes=1, devices_per_node=2)
sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
with autopar.compile(model, cluster, example_inputs=(x,), optimizer=sgd) as compiled:
    torch.testing.assert_close(compiled.train_step(x), model(x).detach())
print("trained")
"""
OPERATORS_MADE_ON_THE_WAY = """
import torch
import autopar

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x, y):
        return torch.nn.functional.cross_entropy(Halved.apply(self.linear(x))[y > 0], y[y > 0])

class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2

torch.manual_seed(0)
model, x, y = Model(), torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 3, 1])
cluster = autopar.Cluster.preset("cpu", nodes=1, devices_per_node=2)
sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
with autopar.compile(model, cluster, example_inputs=(x, y), optimizer=sgd) as compiled:
    fewer = torch.tensor([0, 0, 2, 0, 0, 1])
    loss = model(x, fewer)
    loss.backward()
    torch.testing.assert_close(compiled.train_step(x, fewer), loss.detach())
    torch.testing.assert_close(compiled.gradients()["linear.weight"], model.linear.weight.grad)
print("trained")
"""
DEFINITION = """
import torch

@torch.library.custom_op("wiretest::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2

doubled.register_fake(lambda x: torch.empty_like(x))
doubled.register_autograd(lambda ctx, grad: torch.ops.wiretest.doubled(grad))
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", ["in the script", "in a module"])
def test_workers_know_operators_of_the_user(place: str, tmp_path):
    definition = "import my_ops" if place == "in a module" else DEFINITION
    (tmp_path / "my_ops.py").write_text(DEFINITION)
    run(SCRIPT.format(definition=definition), tmp_path)


def test_workers_know_operators_made_on_the_way(tmp_path):
    run(OPERATORS_MADE_ON_THE_WAY, tmp_path)


def run(text: str, folder: Path) -> None:
    script = folder / "train.py"
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.strip().endswith("trained"), done.stderr
