"""Whether a source file belongs to the user, whatever its folders are called."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.base.source_files import is_users, lies_in
from autopar.runtime.faults.judge import WAITING, waits_for_peers

MODEL = """
from torch import nn

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        if y.sum() > 0:
            return y.mean()
        return y.sum()
"""


@pytest.mark.parametrize("folder", ["autopar", "torch", "my model", "autopar/torch/search"])
def test_a_users_line_is_named_wherever_it_lies(tmp_path: Path, folder: str) -> None:
    path = tmp_path / folder / "model.py"
    path.parent.mkdir(parents=True)
    path.write_text(MODEL)
    spec = importlib.util.spec_from_file_location("users_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(autopar.CaptureError) as caught:
        autopar.capture(module.Branches(), (torch.randn(2, 4),))
    line = MODEL.splitlines().index("        if y.sum() > 0:") + 1
    assert f"{path}:{line} in forward" in str(caught.value)


def test_libraries_are_not_users() -> None:
    from autopar import cost_models, search

    for package in (autopar, cost_models, search, torch, torch.nn.functional):
        assert package.__file__ is not None
        assert not is_users(package.__file__)
    assert not is_users("<eval_with_key>.0")
    assert is_users(__file__)


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert lies_in(str(tmp_path / "link" / "a.py"), [tmp_path / "real"])
    assert not lies_in(str(tmp_path / "realer" / "a.py"), [tmp_path / "real"])


def test_the_places_that_wait_for_peers_exist() -> None:
    """A file that is moved must be updated in the list."""
    for place in WAITING:
        assert place.exists()
    from autopar.comm.transports import c10d, shared_memory, sockets, unix_sockets
    from autopar.runtime.step import executor

    for module in (c10d, shared_memory, sockets, unix_sockets):
        assert waits_for_peers(str(module.__file__))
    assert not waits_for_peers(str(executor.__file__))


class Helped(nn.Module):
    """An op in ``forward``, one in a function that it calls, and one in a module of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        x = doubled(x)
        x = torch.cond(x.sum() > 0, torch.cos, torch.tanh, (x,))
        return x.sin()


def doubled(x: Tensor) -> Tensor:
    return x * 2


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def test_an_op_knows_the_line_of_forward_or_of_the_loss_function() -> None:
    captured = autopar.capture(Helped(), (torch.randn(2, 4), torch.randn(2, 4)), loss_fn=squared)
    ops = captured.graph.ops
    found = {op.target_name.removeprefix("aten.").split(".")[0]: op.location for op in ops}
    expected = {}
    forward = {"linear": "linear(x)", "mul": "doubled(x)", "cond": "torch.cond", "sin": "sin()"}
    loss = {"sub": "square()", "mean": "square()"}
    for function, names in ((Helped.forward, forward), (squared, loss)):
        lines, first = inspect.getsourcelines(function)
        for name, text in names.items():
            number = next(i for i, line in enumerate(lines) if text in line)
            expected[name] = f"test_source_files.py:{first + number}"
    assert {name: found[name] for name in expected} == expected
