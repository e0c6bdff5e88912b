"""Nearly all of the work of every model can be split.

That any valid way to split it gives eager's results is checked in `tests.equality`.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from autopar.base.torch_private import FakeTensorMode
from autopar.frontend.capture import capture
from autopar.ir.graph import Graph, Op
from autopar.rules.local import call_op
from autopar.sharding.strategy import Analysis
from tests.models.zoo import MODELS, MORE_MODELS, build


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def flops_of_ops(graph: Graph) -> list[int]:
    """Floating-point operations of each op's forward, by torch's own counter on fake tensors."""
    counts = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = {v.index: torch.empty(v.shape, dtype=v.dtype) for v in graph.values}
        for op in graph.ops:
            args, kwargs = op.bind([fakes[i] for i in op.inputs])
            with FlopCounterMode(display=False) as counter:
                call_op(op, args, kwargs)
            counts.append(counter.get_total_flops() or uncounted_flops(op, graph))
    return counts


def uncounted_flops(op: Op, graph: Graph) -> int:
    """Products that torch's counter does not know: recurrent layers and grouped products."""
    shapes = [graph.values[i].shape for i in op.inputs]
    if op.target_name == "aten.lstm.input":
        return 2 * math.prod(shapes[0][:2]) * sum(math.prod(s) for s in shapes if len(s) == 2)
    if "grouped_mm" in op.target_name:
        return 2 * shapes[0][0] * math.prod(shapes[1][1:])
    return 0


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", [*MODELS, *MORE_MODELS])
def test_share_of_flops_that_can_be_split(name, capsys):
    model, make_batch = build(name)
    graph = capture(model, make_batch(0)).graph
    analysis = Analysis(graph)
    flops = flops_of_ops(graph)
    total = sum(flops)
    split = sum(
        count
        for count, space in zip(flops, analysis.spaces)
        if space is not None and space.splittable()
    )
    with capsys.disabled():
        print(f"\n{name}: {split / total:.2%} of {total:,} flops have a split choice")
    assert total > 0
    assert split >= 0.999 * total
