"""Programs as bytes: what unusual arguments of a graph become on the way."""

from __future__ import annotations

import io
import pickle
import sys
import types

import pytest
import torch
from torch import fx

from autopar.runtime.wire import _Pickler


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
