"""Layers of experts as one op: which are, that they train exactly, and that rows move once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401 - defines the grouped product
from torch import Tensor, nn

from autopar.frontend.capture import capture
from autopar.ir.choice import Choice, parse_choice
from autopar.ir.graph import Graph, ValueKind
from autopar.ir.mesh import Mesh
from autopar.ir.placement import R, S
from autopar.ir.routed_layers import Between, Operand, routed_layers
from autopar.ir.routed_product import routed_product
from autopar.lowering.training import lower_training
from autopar.passes.prepare import Prepared, prepare
from autopar.sharding.strategy import Strategy
from tests.oracles import (
    assert_same,
    assert_trains_as_eager,
    random_assignment,
    reference_steps,
    state_of,
    train_program,
)

TOKENS, WIDTH, INNER, EXPERTS, TOP = 16, 8, 12, 4, 2
Gate = Callable[[Tensor], Tensor]


def grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    found: Tensor = torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)
    return found


class Experts(nn.Module):
    """Experts with one first matrix, whose result a gate makes narrower, or with two."""

    def __init__(self, gate: Gate, *, num_parts: int = 2, num_first: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = gate
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.ParameterList(
            torch.randn(EXPERTS, WIDTH, num_parts * INNER) / 4 for _ in range(num_first)
        )
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        scores, chosen = self.router(x).softmax(-1).topk(TOP, -1)
        ids = chosen.flatten()
        order = ids.argsort(stable=True)
        counts = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        taken = x[order // TOP]
        hidden = [grouped(taken, weight, ends) for weight in self.up]
        rows = self.outputs(self.gate(*hidden), order, ends)
        rows = rows * scores.flatten()[order].unsqueeze(-1)
        return (rows[order.argsort()].view(-1, TOP, WIDTH).sum(1) - target).square().mean()

    def outputs(self, inner: Tensor, order: Tensor, ends: Tensor) -> Tensor:
        return grouped(inner, self.down, ends)


def chunked(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, -1)
    return F.silu(gate) * up


def sliced(rows: Tensor) -> Tensor:
    return F.gelu(rows[:, INNER:], approximate="tanh") * (rows[:, :-INNER] + 1)


def thirds(rows: Tensor) -> Tensor:
    first, second, third = rows.split([INNER] * 3, 1)
    return first.clamp(max=1.0) * torch.cos(second) + 0.5 * third.tanh()


def interleaved(rows: Tensor) -> Tensor:
    return F.silu(rows[:, ::2]) * rows[:, 1::2]


def half(rows: Tensor) -> Tensor:
    return F.silu(rows[:, :INNER])


def compared(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, -1)
    return up.masked_fill(gate > 0, 0.0)


def dropped(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, -1)
    return F.dropout(F.silu(gate), 0.5) * up


def normed(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, -1)
    return gate.softmax(-1) * up


def two(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(TOKENS, WIDTH, generator=generator) for name in ("x", "target")}


def make_optimizer(parameters: list) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def routed(graph: Graph) -> list[str]:
    return [op.target_name.split(".")[1] for op in graph.ops if "routed" in op.target_name]


FUSED: dict[str, dict[str, Any]] = {
    "chunked": {"gate": chunked},
    "sliced": {"gate": sliced},
    "thirds": {"gate": thirds, "num_parts": 3},
    "none": {"gate": lambda rows: rows, "num_parts": 1},
    "not zero at zero": {"gate": torch.cos, "num_parts": 1},
    "steep at zero": {"gate": lambda rows: rows.abs().sqrt(), "num_parts": 1},
    "two matrices": {"gate": two, "num_parts": 1, "num_first": 2},
}


@pytest.mark.parametrize("case", FUSED)
def test_a_layer_is_one_op_and_trains_as_eager(case: str) -> None:
    model, batches = Experts(**FUSED[case]), [batch(0), batch(1)]
    prepared = prepare(capture(model, batches[0]))
    assert routed(prepared.captured.graph) == ["routed_layers"]
    meshes = [(Mesh(("x",), (2,)), 2), (Mesh(("x",), (3,)), 1), (Mesh(("x", "y"), (2, 2)), 1)]
    assert_trains_as_eager(model, batches, prepared, make_optimizer, meshes)


@pytest.mark.parametrize("case", FUSED)
def test_rows_move_to_their_experts_and_back_once(case: str) -> None:
    model, batches = Experts(**FUSED[case]), [batch(0), batch(1)]
    prepared = prepare(capture(model, batches[0]))
    program = lower_training(Strategy(prepared.cut(1).analysis, exchanged(prepared)), 1)
    nodes = program.kernels[0].forward.graph.nodes
    num_sent = sum("all_to_all" in str(node.target) for node in nodes)
    assert num_sent == 3  # rows, the numbers of their experts, and what comes back
    got = train_program(program, prepared.captured, state_of(model), batches, make_optimizer)
    assert_same(got, reference_steps(model, batches, make_optimizer), tolerance=1e-5)


def exchanged(prepared: Prepared) -> Any:
    """Rows and experts split together on two devices."""
    mesh, analysis = Mesh(("ep",), (2,)), prepared.cut(1).analysis
    values = analysis.graph.values
    whole = random_assignment(analysis, mesh, 0)
    choices = tuple(
        parse_choice("rows_and_experts") if "routed" in op.target_name
        else Choice((analysis.batch_splits[op.index],))
        for op in analysis.graph.ops
    )  # fmt: skip
    stored = {
        i: (S(0),) if len(values[i].shape) == 3 else (R,)
        for i in whole.stored
        if values[i].kind is ValueKind.PARAMETER
    }
    stored |= {i: (S(0),) for i in analysis.graph.inputs}
    return replace(whole, choices=choices, stored=stored)


class Shown(Experts):
    """Reads what is between the products."""

    def outputs(self, inner: Tensor, order: Tensor, ends: Tensor) -> Tensor:
        return super().outputs(inner, order, ends) + inner.mean(-1, keepdim=True)


@pytest.mark.parametrize(
    "model",
    [
        lambda: Experts(interleaved), lambda: Experts(half), lambda: Experts(compared),
        lambda: Experts(dropped), lambda: Experts(normed), lambda: Shown(chunked),
    ],
    ids=["interleaved", "half", "compared", "dropped", "normed", "shown"],
)  # fmt: skip
def test_another_layer_stays_as_it_is(model: Callable[[], nn.Module]) -> None:
    graph = prepare(capture(model(), batch(0))).captured.graph
    assert "routed_layers" not in routed(graph)


def test_a_function_survives_its_text() -> None:
    between = Between(
        (
            ("part", (Operand(0), 2, 1), {}),
            ("part", (Operand(0), 2, 0), {}),
            ("aten.gelu.default", (Operand(1),), {"approximate": "tanh"}),
            ("aten.add.Tensor", (Operand(3), Operand(2)), {"alpha": 0.1}),
            ("aten.clamp.default", (Operand(4), None, 2), {}),
        ),
        5,
    )
    again = Between.of_text(between.to_text())
    rows = torch.randn(3, 4)
    first, second = rows.chunk(2, -1)
    wanted = torch.clamp(F.gelu(second, approximate="tanh") + 0.1 * first, max=2)
    assert torch.equal(again([rows]), wanted)
    assert again.uses_all_parts()
    assert not Between(between.calls[:1], 2).uses_all_parts()
    assert again.to_text() == between.to_text()


def test_it_is_its_products_and_their_gradients() -> None:
    torch.manual_seed(0)
    x, up, down = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((5, 3), (4, 3, 4), (4, 2, 3))
    )
    expert = torch.tensor([0, 3, -1, 1, 4, 1, 3, 3, 7, 0])
    gate = Between(
        (
            ("part", (Operand(0), 2, 0), {}),
            ("part", (Operand(0), 2, 1), {}),
            ("aten.silu.default", (Operand(1),), {}),
            ("aten.mul.Tensor", (Operand(3), Operand(2)), {}),
        ),
        8,
    ).to_text()
    first, second = routed_product(x, up, expert).chunk(2, -1)
    wanted = routed_product(F.silu(first) * second, down, expert)
    assert torch.equal(routed_layers(x, [up], down, expert, gate), wanted)
    assert torch.autograd.gradcheck(
        lambda x, up, down: routed_layers(x, [up], down, expert, gate), (x, up, down)
    )
