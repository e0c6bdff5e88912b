"""Rows sorted by expert keep their own order, unless the order itself can be seen."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.frontend.capture import capture
from autopar.ir.choice import Choice, parse_choice
from autopar.ir.graph import Graph, ValueKind, verify
from autopar.ir.mesh import Mesh
from autopar.ir.placement import R, S
from autopar.ir.routed_product import routed_product
from autopar.ir.row_exchange import most_rows, pack_numbers, pack_rows, unpack_rows
from autopar.lowering.training import lower_training
from autopar.passes.prepare import prepare
from autopar.sharding.strategy import Strategy
from tests.oracles import (
    assert_same,
    assert_trains_as_eager,
    random_assignment,
    reference_steps,
    state_of,
    train_program,
)

TOKENS, WIDTH, EXPERTS, TOP = 12, 16, 4, 2


def grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """PyTorch's grouped product, which is captured in bfloat16 only, or that of transformers."""
    import transformers.integrations.moe  # noqa: F401 - defines the operator

    if rows.dtype is torch.bfloat16:
        return torch._grouped_mm(rows, weight, offs=ends)
    return torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)


class Experts(nn.Module):
    """Rows are sorted by expert, multiplied, and summed for each token in one of several ways."""

    def __init__(self, *, gathers: str = "index", restores: str = "inverse", bias: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.gathers, self.restores = gathers, restores
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH)) if bias else None

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = x.flatten(0, 1)
        scores, chosen = self.router(x).softmax(-1).topk(TOP, -1)
        ids = chosen.flatten()
        order = self.order(ids)
        rows = self.taken(x, order)
        counts = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS)
        ends = counts.cumsum(0, dtype=torch.int32)
        rows = grouped(rows, self.up, ends)
        if self.bias is not None:
            rows = rows + self.bias[ids[order]]
        rows = grouped(self.between(rows), self.down, ends)
        rows = rows * scores.flatten()[order].unsqueeze(-1)
        return (self.restored(x, rows, order) - target.flatten(0, 1)).square().mean()

    def order(self, ids: Tensor) -> Tensor:
        return ids.argsort(stable=True)

    def between(self, rows: Tensor) -> Tensor:
        return torch.nn.functional.silu(rows)

    def taken(self, x: Tensor, order: Tensor) -> Tensor:
        token = order // TOP
        if self.gathers == "gather":
            return x.gather(0, token.unsqueeze(-1).expand(-1, WIDTH))
        if self.gathers == "select":
            return x.index_select(0, torch.div(order, TOP, rounding_mode="floor"))
        if self.gathers == "scaled":  # read by something else than a product
            return x[token] * 0.5
        return x[token]

    def restored(self, x: Tensor, rows: Tensor, order: Tensor) -> Tensor:
        token = order // TOP
        if self.restores == "index_add":
            return torch.zeros_like(x).index_add(0, token, rows)
        if self.restores == "scatter_add":
            return x.scatter_add(0, token.unsqueeze(-1).expand(-1, WIDTH), rows)
        if self.restores == "accumulate":
            return x.index_put((token,), rows, accumulate=True)
        if self.restores == "put":
            own = torch.zeros_like(rows).index_put((order,), rows)
        elif self.restores == "argsort":
            own = rows[order.argsort()]
        else:
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(len(order))
            own = rows[inverse]
        return own.view(-1, TOP, WIDTH).sum(1)


class Behind(Experts):
    """Some rows have the number behind the last expert, in whose bin they count."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = x.flatten(0, 1)
        ids = self.router(x).argmax(-1).masked_fill(x[:, 0] > 0.5, EXPERTS)
        order = ids.argsort(stable=True)
        counts = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS)
        rows = grouped(x[order], self.up, counts.cumsum(0, dtype=torch.int32))
        return rows[order.argsort()].square().mean() + target.mean()


class Dropped(Experts):
    """Draws a number for each sorted row."""

    def between(self, rows: Tensor) -> Tensor:
        return nn.functional.dropout(rows, 0.5)


class Added(Experts):
    """Sums over the sorted rows above each one."""

    def between(self, rows: Tensor) -> Tensor:
        return rows.cumsum(0)


class Numbered(Experts):
    """Multiplies each sorted row by its place."""

    def between(self, rows: Tensor) -> Tensor:
        return rows * torch.arange(len(rows)).unsqueeze(-1)


class Reversed(Experts):
    """Restores rows by the inverse permutation backwards."""

    def restored(self, x: Tensor, rows: Tensor, order: Tensor) -> Tensor:
        return rows[order.argsort(descending=True)].view(-1, TOP, WIDTH).sum(1)


class Descending(Experts):
    """Sorts the last expert first, as the ends do not."""

    def order(self, ids: Tensor) -> Tensor:
        return ids.argsort(descending=True, stable=True)


class Columns(Experts):
    """Picks another row in each column: ``square[order[j], j]``."""

    def restored(self, x: Tensor, rows: Tensor, order: Tensor) -> Tensor:
        twice, inverse = torch.cat([x, x]), order.argsort()
        picked = (twice @ twice.T).gather(0, order.expand(len(order), -1))
        return rows[inverse].view(-1, TOP, WIDTH).sum(1) + picked[inverse].mean()


class FirstColumn(Experts):
    """Writes back only the first column of the rows."""

    def restored(self, x: Tensor, rows: Tensor, order: Tensor) -> Tensor:
        own = torch.zeros_like(rows).scatter(0, order.unsqueeze(-1), rows.detach())
        return own.view(-1, TOP, WIDTH).sum(1)


class AddedFirstColumn(Experts):
    """Adds only the first column of the rows."""

    def restored(self, x: Tensor, rows: Tensor, order: Tensor) -> Tensor:
        return x.scatter_add(0, (order // TOP).unsqueeze(-1), rows.detach())


class Shown(Experts):
    """Uses the permutation for something else."""

    def restored(self, x: Tensor, rows: Tensor, order: Tensor) -> Tensor:
        return super().restored(x, rows, order) + order.float().mean()


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(4, TOKENS // 2, WIDTH, generator=generator) for name in ("x", "target")
    }


def num_sorts(graph: Graph) -> int:
    return sum("sort" in op.target_name for op in graph.ops)


WAYS = [
    {"gathers": gathers, "restores": restores, "bias": bias}
    for gathers, restores, bias in [
        ("index", "inverse", False),
        ("gather", "scatter_add", True),
        ("select", "index_add", False),
        ("scaled", "put", False),
        ("index", "argsort", True),
        ("scaled", "accumulate", True),
    ]
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_trains_as_eager_in_parts_of_the_batch(way: dict) -> None:
    graph = check_training(Experts(**way))
    targets = [op.target_name for op in graph.ops if "routed" in op.target_name]
    product, layer = "autopar.routed_product.default", "autopar.routed_layers.default"
    assert targets == ([product] * 2 if way["bias"] else [layer])  # a bias is another operand


def test_rows_behind_the_last_expert_are_his_where_he_counts_them() -> None:
    check_training(Behind())


def check_training(model: Experts) -> Graph:
    """Train in lockstep on several meshes, without the sort."""
    batches = [batch(0), batch(1)]
    captured = capture(model, batches[0])
    prepared = prepare(captured)
    graph = prepared.captured.graph
    verify(graph)
    assert num_sorts(captured.graph) > 0
    assert num_sorts(graph) == 0

    def make_optimizer(parameters: list) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    meshes = [(Mesh(("x",), (1,)), 1), (Mesh(("x",), (2,)), 2), (Mesh(("x", "y"), (2, 2)), 1)]
    assert_trains_as_eager(model, batches, prepared, make_optimizer, meshes)
    return graph


def test_pytorchs_grouped_product_is_known() -> None:
    half = {name: x.bfloat16() for name, x in batch(0).items()}
    captured = capture(Experts().bfloat16(), half)
    assert any("aten._grouped_mm" in op.target_name for op in captured.graph.ops)
    graph = prepare(captured).captured.graph
    assert num_sorts(graph) == 0
    assert "grouped" not in str([op.target_name for op in graph.ops])


@pytest.mark.parametrize(
    "kind",
    [
        Dropped, Added, Numbered, Shown, Reversed, Descending, Columns, FirstColumn,
        AddedFirstColumn,
    ],
)  # fmt: skip
def test_a_visible_order_stays(kind: type[Experts]) -> None:
    captured = capture(kind(), batch(0))
    assert prepare(captured).captured is captured


@pytest.mark.parametrize("num_counted", [EXPERTS - 1, EXPERTS + 1])
def test_other_counts_than_one_an_expert_stay(num_counted: int) -> None:
    class Otherwise(Experts):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            x = x.flatten(0, 1)
            ids = self.router(x).argmax(-1)
            ordered, order = ids.sort()
            counts = torch.histc(ordered.float(), bins=num_counted, min=0, max=num_counted - 1)
            ends = counts.cumsum(0, dtype=torch.int32)[:EXPERTS]
            ends = torch.nn.functional.pad(ends, (0, EXPERTS - len(ends)), value=len(ids))
            rows = grouped(x[order], self.up, ends)
            return rows[order.argsort()].square().mean() + target.mean()

    captured = capture(Otherwise(), batch(0))
    assert prepare(captured).captured is captured


def test_rows_of_no_expert_are_zero_and_gradients_are_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    expert = torch.tensor([0, 3, -1, 1, 4, 1, 3, 3, 7, 0])  # no rows for 2; -1, 4 and 7 are none
    found = routed_product(x, weight, expert)
    for row, number in enumerate(expert.tolist()):
        own = x[row // 2] @ weight[number] if 0 <= number < 4 else torch.zeros(2)
        assert torch.equal(found[row], own.to(torch.float64))
    assert torch.autograd.gradcheck(routed_product, (x, weight, expert))
    assert routed_product(x[:0], weight, expert[:0]).shape == (0, 2)


def test_a_copy_of_a_prepared_model_is_prepared_alike() -> None:
    model = Experts()
    first = prepare(capture(model, batch(0))).captured.graph
    second = prepare(capture(copy.deepcopy(model), batch(0))).captured.graph
    assert first.fingerprint == second.fingerprint


@pytest.mark.parametrize("repeats", [1, 2])
def test_rows_that_are_sent_come_back(repeats: int) -> None:
    """Packing for 3 devices of 2 experts and unpacking change nothing; nor do their gradients."""
    generator = torch.Generator().manual_seed(0)
    expert = torch.tensor([5, 0, 2, 2, -1, 6, 2, 3, 0, 5])
    shape = (len(expert) // repeats, 3)
    x = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    most = most_rows(expert, 3, 2)
    assert most.item() == 4  # those of 2 and 3, on the device in the middle
    packed, numbers = pack_rows(x, expert, most, 3, 2), pack_numbers(expert, most, 3, 2)
    assert packed.shape == (3, 4, 3)
    assert sorted(numbers[0].tolist()) == [-1, -1, 0, 0]  # one is a row of no expert
    assert sorted(numbers[1].tolist()) == [0, 0, 0, 1]
    assert sorted(numbers[2].tolist()) == [-1, 1, 1, 2]  # 6 is no expert of the last device
    assert torch.equal(unpack_rows(packed, expert, most, 2), x.repeat_interleave(repeats, 0))
    assert torch.autograd.gradcheck(lambda x: pack_rows(x, expert, most, 3, 2), (x,))
    given = packed.detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda p: unpack_rows(p, expert, most, 2), (given,))


def test_rows_and_experts_split_together() -> None:
    """Every op of the experts that can has both split along one axis, in lockstep."""
    model, batches = Experts(), [batch(0), batch(1)]
    prepared = prepare(capture(model, batches[0]))
    mesh = Mesh(("dp", "ep"), (2, 2))
    analysis = prepared.cut(1).analysis
    choices = tuple(
        parse_choice("t rows_and_experts") if "routed" in op.target_name
        else Choice((analysis.batch_splits[op.index],) * 2)
        for op in analysis.graph.ops
    )  # fmt: skip
    whole = random_assignment(analysis, mesh, 0)
    stored = {
        i: (R, S(0)) if analysis.graph.values[i].name.endswith(("up", "down")) else (R, R)
        for i in whole.stored
        if analysis.graph.values[i].kind is ValueKind.PARAMETER
    }
    stored |= {i: (S(0), S(0, 2)) for i in analysis.graph.inputs}
    assignment = replace(whole, choices=choices, stored=stored)
    program = lower_training(Strategy(analysis, assignment), 1)
    assert "all_to_all" in str(program.kernels[0].forward.code)

    def make_optimizer(parameters: list) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    got = train_program(program, prepared.captured, state_of(model), batches, make_optimizer)
    assert_same(got, reference_steps(model, batches, make_optimizer), tolerance=1e-5)
