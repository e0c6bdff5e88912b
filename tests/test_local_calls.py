"""The calls priced for an op are those that its lowered graphs make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autopar.cost_models import Cluster, OpCall
from autopar.cost_models.shapes import outputs
from autopar.frontend.capture import Captured, capture
from autopar.ir.graph import Op
from autopar.planning.constraints import Force, Pin
from autopar.planning.planner import Planned, make_planned
from autopar.planning.space import Space
from autopar.pricing.local_calls import calls_of, local_calls
from autopar.rules.kernels import LocalCall, Phase

CLUSTER = Cluster.preset("cpu", nodes=1, devices_per_node=2)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 1, 1))
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x * self.scale).square().mean()


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 32, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), y)


class Causal(nn.Module):
    """Causal attention; two query heads share each head of the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.square().mean()


CASES = {
    "batch_norm": (Images().train(), (torch.randn(8, 4, 3, 3),), Force("data_parallel")),
    "cross_entropy": (
        Words(),
        (torch.randn(8, 6), torch.randint(0, 32, (8,))),
        Pin("cross_entropy*", "c"),
    ),
}


ATTENTION = "aten.scaled_dot_product_attention.default"


def planned_of(name: str) -> tuple[Captured, Planned]:
    model, batch, wish = CASES[name]
    captured = capture(model, batch)
    return captured, make_planned(captured, CLUSTER, Space(mesh={"x": 2}), constraints=[wish])


def priced(planned: Planned, op: Op) -> tuple[LocalCall, ...]:
    strategy = planned.strategy
    analysis, choice = strategy.analysis, strategy.assignment.choices[op.index]
    needs = analysis.needs(op, choice, strategy.mesh)
    supplies = analysis.supplies(op, choice, strategy.mesh)
    return local_calls(analysis, op, choice, needs, supplies, strategy.mesh)


def made(graphs: list[fx.GraphModule | None]) -> Counter[Any]:
    """Operators and shapes of tensor arguments of all calls of the graphs."""
    found: Counter[Any] = Counter()
    for module in graphs:
        for node in module.graph.nodes if module is not None else ():
            if node.op == "call_function":
                values = [n.meta["val"] for n in node.all_input_nodes]
                shapes = frozenset(tuple(x.shape) for x in values if isinstance(x, Tensor))
                found[str(node.target), shapes] += 1
    return found


def key_of(call: OpCall) -> Any:
    return call.target, frozenset(t.shape for t in call.tensors())


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_those_of_the_lowered_graphs(name: str) -> None:
    captured, planned = planned_of(name)
    (op,) = (op for op in captured.graph.ops if name in op.target_name)
    calls = priced(planned, op)
    assert len(calls) > 1
    kernels = planned.program.kernels
    by_phase = {
        Phase.FORWARD: made([k.forward for k in kernels]),
        Phase.BACKWARD: made([m for k in kernels for m in (k.backward_input, k.backward_weight)]),
    }
    for phase, there in by_phase.items():
        wanted = Counter(key_of(c.call) for c in calls if c.phase is phase)
        assert wanted
        assert wanted <= there, f"{phase}: {wanted - there} not among {there}"
    # And the profiler is told of all of them.
    listed = set(calls_of(planned.strategy.analysis, [planned.strategy.mesh]))
    assert {c.call for c in calls} <= listed


def test_queries_of_causal_attention_that_are_split_are_priced_with_the_mask_they_get() -> None:
    captured = capture(Causal(), (torch.randn(2, 6, 16),))
    (op,) = (op for op in captured.graph.ops if op.target_name == ATTENTION)
    for wish, keys, is_causal in (("b0", (1, 2, 6, 4), True), ("s", (2, 4, 6, 4), False)):
        planned = make_planned(
            captured, CLUSTER, Space(mesh={"x": 2}), constraints=[Pin(op.name, wish)]
        )
        (call,) = priced(planned, op)
        kernels = made([k.forward for k in planned.program.kernels])
        assert [shapes for name, shapes in kernels if "attention" in name] == [key_of(call.call)[1]]
        assert call.call.argument(5, "is_causal", False) is is_causal
        assert call.call.tensor(1, "key").shape == keys
    assert call.call.tensor(3, "attn_mask").shape == (3, 6)  # its own queries, all keys


def test_an_op_that_is_not_split_is_priced_as_itself() -> None:
    captured, planned = planned_of("batch_norm")
    op = captured.graph.ops[0]
    (call,) = priced(planned, op)
    assert (call.call.target, call.phase) == (op.target_name, Phase.BOTH)
    assert call.call.tensors()[0].shape == (4, 4, 3, 3)  # half of the batch


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.repeat(4, 1)).square().mean()


def test_a_repeat_that_is_split_is_priced_at_its_part() -> None:
    captured = capture(Repeated(), (torch.randn(3, 6),))
    planned = make_planned(
        captured, CLUSTER, Space(mesh={"x": 2}), constraints=[Pin("repeat", "r0")]
    )
    repeat = next(op for op in captured.graph.ops if "repeat" in op.target_name)
    (call,) = priced(planned, repeat)
    graph = planned.program.kernels[0].forward.graph
    (node,) = (node for node in graph.nodes if node.target is torch.ops.aten.repeat.default)
    assert outputs(call.call)[0].shape == tuple(node.meta["val"].shape) == (6, 6)  # of 12 rows


class Heads(nn.Module):
    """Attention whose heads are transposed views, as models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x: Tensor) -> Tensor:
        mixed = nn.functional.scaled_dot_product_attention(*self.heads(x))
        return self.out(mixed.transpose(1, 2).reshape(x.shape)).square().mean()


def test_operands_lie_in_memory_as_in_eager_mode() -> None:
    model, x = Heads(), torch.randn(4, 6, 16)
    captured = capture(model, {"x": x})
    planned = make_planned(
        captured, CLUSTER, Space(mesh={"x": 2}), constraints=[Force("data_parallel")]
    )
    attention = next(op for op in captured.graph.ops if "attention" in op.target_name)
    (call,) = priced(planned, attention)
    specs = call.call.tensors()
    wanted = model.heads(x[:2])  # of half the batch
    assert [spec.shape for spec in specs] == [tuple(t.shape) for t in wanted]
    assert [order_of(spec.strides) for spec in specs] == [order_of(t.stride()) for t in wanted]
    assert not any(spec.is_contiguous for spec in specs)


def order_of(strides: Sequence[int]) -> list[int]:
    """The dimensions by decreasing stride."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])
