"""Calls that are alike are decomposed once, into what torch's own decomposition makes of each."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autopar.frontend import decomposition
from autopar.frontend.decomposition import decomposed
from tests.models.test_repeated_captures import Composites


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.linear(self.norm(x)).chunk(2, dim=-1)
        return x + F.dropout(F.gelu(one) * other, 0.1)


def layers(num: int) -> nn.Module:
    return nn.Sequential(*[Layer() for _ in range(num)])


class Layouts(nn.Module):
    """Calls of one operator that become other ones for other layouts of the same shape."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        turned = x.transpose(0, 1)
        made = torch.arange(4, dtype=x.dtype)
        return (
            x.reshape(16), turned.reshape(16), x.contiguous(), turned.contiguous(),
            x.to(torch.float32), x.to(torch.float64), x[1:].flatten(), x[:3].flatten() + made[0],
            torch.cat(x.split(2)), x.sum(0, keepdim=True), x.sum(0, True), x + 1, x + 1.0, x + True,
        )  # fmt: skip


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 4), nn.Linear(4, 4)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding((x > 0).long())
        return self.head(hidden + hidden) @ self.head.weight


class Writes(nn.Module):
    """Writes in place that an operator declares, and one that it does not."""

    def __init__(self, *, declared: bool) -> None:
        super().__init__()
        self.declared = declared
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.declared:
            x = x.clone()
            x[0] = self.mean
            return x.mul_(2)
        return F.batch_norm(x, self.mean, self.variance, training=True)


class Filled(nn.Module):
    """Slices of new tensors that are written to, read in between, and joined by others."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        made = x.new_empty(4, 8)
        half = made[:, :4]
        half.copy_(x)
        made[:, 4:] = x.sum(1, keepdim=True)
        scores = x.sin().masked_fill_(x > 0, 2.0)
        hidden = F.relu(scores @ x, inplace=True)
        return made.sum(), hidden.div_(hidden.sum() + 1), half


class Drawn(nn.Module):
    """Views, writes in place and reads, drawn anew for each seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def extra_repr(self) -> str:
        return str(self.seed)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        draw, made = random.Random(self.seed), [x + 1, x * 2]
        views = [
            lambda t: t[: max(1, t.shape[0] // 2)],
            lambda t: t.transpose(0, -1),
            lambda t: t.unsqueeze(-1),
            lambda t: t.contiguous(),
            lambda t: t.chunk(2)[-1],
        ]
        writes = [
            lambda t, other: t.mul_(other.sum()),
            lambda t, other: t.masked_fill_(t > 0, 0.5),
            lambda t, other: t[0].copy_(other.mean()),
            lambda t, other: t.sigmoid_(),
            lambda t, other: t.zero_().add_(other.cos().mean()),
        ]
        for _ in range(draw.randint(4, 14)):
            tensor, other = draw.choice(made), draw.choice(made)
            match draw.randrange(3):
                case 0:
                    made.append(draw.choice(views)(tensor))
                case 1:
                    made.append(tensor.cos())
                case _:
                    draw.choice(writes)(tensor, other)
        return tuple(made)


def exported(model: nn.Module, x: Tensor) -> Any:
    return torch.export.export(model, (x,))


def without_assertions(graph: fx.Graph) -> list[fx.Node]:
    """The nodes but for assertions on metadata, which readers skip."""
    skipped = torch.ops.aten._assert_tensor_metadata.default
    return [node for node in graph.nodes if node.target is not skipped]


def described(nodes: Sequence[fx.Node]) -> list[str]:
    """Every node by name and call; results taken out of a tuple have no names that count."""
    number = {node: f"%{position}" for position, node in enumerate(nodes)}
    return [
        f"{number[node]} {'' if node.target is operator.getitem else node.name} {node.op} "
        f"{node.target} {fx.map_arg((node.args, node.kwargs), number.__getitem__)}"
        for node in nodes
    ]


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "composites": (Composites, (2, 4, 8)),
    "layers": (lambda: layers(3), (2, 8)),
    "layouts": (Layouts, (4, 4)),
    "tied": (Tied, (4, 4)),
    "declared_writes": (lambda: Writes(declared=True), (4, 4)),
    "undeclared_writes": (lambda: Writes(declared=False), (4, 4)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_program_is_torchs_own(name: str) -> None:
    make, shape = CASES[name]
    model, x = make(), torch.randn(shape)
    found = decomposed(exported(model, x))
    expected = exported(model, x).run_decompositions({})
    ours, torchs = map(without_assertions, (found.graph_module.graph, expected.graph))
    assert described(ours) == described(torchs)
    kinds = [
        [(spec.kind, spec.target) for spec in (*signature.input_specs, *signature.output_specs)]
        for signature in (found.graph_signature, expected.graph_signature)
    ]
    assert kinds[0] == kinds[1]
    for one, other in zip(ours, torchs, strict=True):
        if isinstance(other.meta.get("val"), Tensor):
            layouts = [
                (node.meta["val"].dtype, node.meta["val"].shape, node.meta["val"].stride())
                for node in (one, other)
            ]
            assert layouts[0] == layouts[1]
        for kind in ("nn_module_stack", "stack_trace"):
            assert one.meta.get(kind) == other.meta.get(kind)


def test_more_layers_are_no_more_to_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[int] = []
    trace = decomposition.decomposed_trace

    def counted(function: Any, operands: Sequence[Tensor], mode: Any) -> Any:
        traced.append(len(operands))
        return trace(function, operands, mode)

    monkeypatch.setattr(decomposition, "decomposed_trace", counted)
    for num in (2, 6):
        decomposed(exported(layers(num), torch.randn(2, 8)))
    few, many = traced
    assert few == many


NUM_DRAWN = 24


def test_what_is_written_in_place_is_read_in_order() -> None:
    num_whole = 0
    for model in [Filled(), *map(Drawn, range(NUM_DRAWN))]:
        x = torch.randn(4, 4)
        program = exported(model, x)
        num_whole += decomposition._by_kinds(program.graph_module.graph) is None
        found = decomposed(program).graph_module
        found.recompile()
        torch.testing.assert_close(tuple(found(x)), model(x), msg=lambda m: f"{model}: {m}")  # noqa: B023
    assert num_whole <= 1  # where a copy is laid out otherwise than what is written to


def test_a_write_to_an_input_or_a_buffer_is_left_to_torch() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.count[:2].add_(1)
            return x * self.count

    assert decomposition._by_kinds(exported(Counts(), torch.randn(4)).graph_module.graph) is None
