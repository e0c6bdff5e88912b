"""The programs that are printed: known strategies have the collectives their authors drew."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from autopar.cost_models import Cluster
from torch import Tensor, nn

from autopar.capture import capture
from autopar.constraints import Force
from autopar.planner import Planned, make_planned


class Block(nn.Module):
    """A pre-norm feed-forward block with its residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, width: int = 16, num_blocks: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(num_blocks))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, target)


def planned(strategy: str) -> Planned:
    batch = (torch.randn(8, 16), torch.randn(8, 16))
    cluster = Cluster.preset("cpu", nodes=1, devices_per_node=4)
    return make_planned(
        capture(Stack(), batch), cluster, mesh={"x": 4}, constraints=[Force(strategy)]
    )


def in_block(result: Planned, name: str) -> list[tuple[str, str]]:
    return [(c.phase, c.kind) for c in result.program.collectives() if c.where == name]


def of_parameter(result: Planned, name: str) -> list[tuple[str, str]]:
    return [(c.phase, c.kind) for c in result.program.collectives() if c.where == name]


def test_tensor_parallel_block_has_one_all_reduce_each_way():
    result = planned("tensor_parallel")
    assert result.program.blocks[1].name == "layers.1"
    assert in_block(result, "layers.1") == [("F", "all_reduce"), ("I", "all_reduce")]
    stored = result.plan.parameters
    assert stored["layers.1.up.weight"] == "S0"
    assert stored["layers.1.down.weight"] == "S1"


def test_tensor_parallel_program_prints_the_all_reduces():
    result = planned("tensor_parallel")
    number = result.program.blocks[1].kernel
    graphs = str(result.program).split("\n\nkernel ")[1:]
    counts = {
        graph.splitlines()[0]: graph.count("autopar.all_reduce")
        for graph in graphs
        if graph.startswith(f"{number} ")
    }
    assert counts == {f"{number} F": 1, f"{number} I": 1, f"{number} W": 0}


def test_zero3_block_gathers_forward_and_reduce_scatters_backward():
    result = planned("zero3")
    assert in_block(result, "layers.1") == []
    for name in ("layers.1.up.weight", "layers.1.down.weight", "layers.1.norm.weight"):
        assert of_parameter(result, name) == [("F", "all_gather"), ("G", "reduce_scatter")]


def test_data_parallel_reduces_each_gradient_once():
    result = planned("data_parallel")
    assert in_block(result, "layers.1") == []
    assert set(result.plan.parameters.values()) == {"R"}
    for name in result.plan.parameters:
        assert of_parameter(result, name) == [("G", "all_reduce")]


def test_equal_blocks_share_one_kernel():
    program = planned("data_parallel").program
    first, second, third = (block.kernel for block in program.blocks[:3])
    assert second == third
    assert first != second, "no gradient flows into the first block's input"
